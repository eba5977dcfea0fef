"""AdamW against float64 steps worked out by the textbook, and the schedule."""

import dataclasses

import jax
import numpy as np
import pytest

from sspjax.config import LearnerConfig
from sspjax.learner.optimizer import learning_rate, make_optimizer

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


@pytest.mark.parametrize(
    ("warmup", "multipliers"),
    [(5, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]), (1, [1.0, 1.0]), (0, [1.0, 1.0])],
)
def test_learning_rate(warmup, multipliers):
    learner = LearnerConfig(learning_rate=1e-6, warmup=warmup)
    rates = [learning_rate(learner, step) for step in range(1, len(multipliers) + 1)]
    assert rates == pytest.approx([1e-6 * x for x in multipliers], rel=1e-12)


def test_steps_are_counted_from_one():
    with pytest.raises(ValueError, match="counted from 1, got 0"):
        learning_rate(LEARNER, 0)
