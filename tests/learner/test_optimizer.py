"""AdamW against float64 steps worked out by the textbook, and the schedule."""

import dataclasses

import jax
import numpy as np
import pytest
from toy_policy import toy_config

from sspjax.config import LearnerConfig
from sspjax.learner.optimizer import learning_rates, make_optimizer, updated_roles
from sspjax.types import Role

LEARNER = LearnerConfig(b1=0.9, b2=0.999, weight_decay=0.01, grad_clip=1.0)

GRADIENTS = [np.array([0.3, -0.4, 0.0]), np.array([3.0, 4.0, 12.0]), np.array([-0.1, 0.2, 0.05])]
"""Norms .5 (kept), 13 (clipped to 1), .23 (kept)."""


def moved(learner, gradients, start):
    optimizer = make_optimizer(learner)
    params, rate = {"w": np.float32(start)}, np.float32(0.1)
    state = optimizer.init(jax.tree.map(jax.numpy.asarray, params))
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        direction, state = update({"w": np.float32(gradient)}, state, params)
        params = {"w": np.asarray(params["w"] - rate * direction["w"])}
    return params["w"]


def test_first_steps_of_adamw():
    p = np.array([1.0, -2.0, 0.5])
    expected, m, v = p.copy(), 0 * p, 0 * p
    for t, g in enumerate(GRADIENTS, 1):
        g = g / max(1.0, np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        direction = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        expected = expected - 0.1 * direction - 0.1 * 0.01 * expected
    # 1 - b2 is rounded in f32 to 1.3e-5 of itself, which enters under a square root.
    np.testing.assert_allclose(moved(LEARNER, GRADIENTS, p), expected, rtol=1e-5)


def test_the_first_step_by_hand():
    """Bias correction makes it lr x sign(g), and every parameter decays: 1 - .1 x (1 + .01 x 1)."""
    made = moved(LEARNER, GRADIENTS[:1], np.array([1.0, -2.0, 0.5]))
    np.testing.assert_allclose(made, [1 - 0.101, -2 + 0.102, 0.5 - 0.0005], rtol=1e-5)


def test_no_clipping():
    """With b1 = b2 = 0 a step is g / |g| whatever its size: clipping must not hide behind Adam."""
    learner = dataclasses.replace(LEARNER, grad_clip=0.0, weight_decay=0.0, b1=0.5, b2=0.5)
    start, big = np.zeros(3), [np.array([1.0, 1.0, 1.0]), np.array([100.0, 1.0, 1.0])]
    # Second moments 5000.25 / .75, first 50.25 / .75.
    second = (50.25 / 0.75) / np.sqrt(5000.25 / 0.75)
    np.testing.assert_allclose(moved(learner, big, start)[0], -0.1 * (1 + second), rtol=1e-5)
    clipped = dataclasses.replace(learner, grad_clip=1.0)
    assert abs(moved(clipped, big, start)[0] + 0.1 * (1 + second)) > 1e-3


def multipliers(steps, role=None, **settings):
    """Rates of the first steps over learning_rate: of one role, or the one they share."""
    config = toy_config(learner={"learning_rate": 1e-3, **settings})
    rates = np.array([learning_rates(config, step) for step in range(1, steps + 1)], np.float64)
    assert rates.shape == (steps, len(Role))
    if role is None:
        assert np.all(rates == rates[:, :1])
    return (rates[:, 0 if role is None else role.value] / 1e-3).tolist()


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [(5, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]), (1, [1.0, 1.0]), (0, [1.0, 1.0])],
)
def test_warmup_by_steps(warmup, expected):
    assert multipliers(len(expected), warmup=warmup) == pytest.approx(expected, rel=1e-6)


def test_warmup_by_calls_is_that_of_the_published_code():
    """Proposer 0, solver .2; .4 and .6; .8 and 1.0; then 1."""
    settings = {"warmup": 5, "warmup_unit": "call", "order": "proposer_first"}
    proposer = multipliers(4, Role.PROPOSER, **settings)
    assert proposer == pytest.approx([0.0, 0.4, 0.8, 1.0], rel=1e-6)
    solver = multipliers(4, Role.SOLVER, **settings)
    assert solver == pytest.approx([0.2, 0.6, 1.0, 1.0], rel=1e-6)
    first = multipliers(4, Role.SOLVER, **settings | {"order": "solver_first"})
    assert first == pytest.approx([0.0, 0.4, 0.8, 1.0], rel=1e-6)
    joint = multipliers(4, Role.SOLVER, **settings | {"order": "joint"})
    assert joint == pytest.approx([0.0, 0.2, 0.4, 0.6], rel=1e-6)
    # Two steps without the solver are two calls, not four: 0, 1 | 2, 3 | 4, 5.
    late = settings | {"proposer_warmup": 2}
    assert multipliers(4, Role.PROPOSER, **late) == pytest.approx([0, 0.2, 0.4, 0.8], rel=1e-6)
    assert multipliers(4, Role.SOLVER, **late)[2:] == pytest.approx([0.6, 1.0], rel=1e-6)


def test_separate_policies_count_their_own_calls():
    config = toy_config(
        proposer={"policy": "asker"},
        learner={"learning_rate": 1.0, "warmup": 4, "warmup_unit": "call"},
    )
    rates = [learning_rates(config, step) for step in (1, 2, 3)]
    assert [r[Role.PROPOSER.value] for r in rates] == [0.0, 0.25, 0.5]
    assert [r[Role.SOLVER.value] for r in rates] == [0.0, 0.25, 0.5]


def test_the_solver_waits_for_the_proposers_warmup():
    config = toy_config(learner={"proposer_warmup": 2})
    both = (Role.PROPOSER, Role.SOLVER)
    assert [updated_roles(config, s) for s in (1, 2, 3)] == [both[:1], both[:1], both]
    frozen = toy_config(proposer={"role_weight": 0.0}, learner={"proposer_warmup": 1})
    assert [updated_roles(frozen, s) for s in (1, 2)] == [(), both[1:]]


def test_steps_are_counted_from_one():
    with pytest.raises(ValueError, match="counted from 1, got 0"):
        learning_rates(toy_config(), 0)
