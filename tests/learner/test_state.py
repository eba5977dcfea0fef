"""TrainState: where it lies, that it starts clean, and that nothing in it is shared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy_policy import toy_config, toy_params

from sspjax.config import ConfigError, LearnerConfig
from sspjax.learner.optimizer import make_optimizer
from sspjax.learner.state import (
    init_state,
    loss_constants,
    policy_names,
    reset_optimizer,
    state_from_params,
    state_shardings,
)
from sspjax.types import Role

OPTIMIZER = make_optimizer(LearnerConfig())


@pytest.fixture(scope="module")
def shardings():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    lay = functools.partial(NamedSharding, mesh)
    params = {
        "embedding": lay(PartitionSpec(None, "fsdp")),
        "place": lay(PartitionSpec("fsdp")),
        "head": lay(PartitionSpec("fsdp", None)),
    }
    return state_shardings(params, OPTIMIZER, ("asker", "answerer"), mesh)


def test_moments_lie_like_their_parameters(shardings):
    state = init_state(toy_params, OPTIMIZER, ("asker", "answerer"), jax.random.key(0), shardings)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    for policy in state.policies.values():
        adam = policy.opt_state[1]
        for moment in (adam.mu, adam.nu):
            for name, x in policy.params.items():
                assert moment[name].sharding == x.sharding
                assert moment[name].addressable_shards[0].data.size == x.size // 2
        assert adam.count.sharding.is_fully_replicated


def test_policies_start_equal_in_buffers_of_their_own():
    state = init_state(toy_params, OPTIMIZER, ("asker", "answerer"), jax.random.key(0))
    asker, answerer = (state.policies[name].params for name in ("asker", "answerer"))
    for a, b in zip(jax.tree.leaves(asker), jax.tree.leaves(answerer), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
    assert int(state.step) == 0


def test_given_parameters_are_copied(shardings):
    params = toy_params(jax.random.key(0))
    state = state_from_params(params, OPTIMIZER, ("asker", "answerer"))
    buffers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
    for policy in state.policies.values():
        for name, x in policy.params.items():
            np.testing.assert_array_equal(x, params[name])
            assert x.unsafe_buffer_pointer() not in buffers
            buffers.add(x.unsafe_buffer_pointer())
    placed = state_from_params(params, OPTIMIZER, ("asker", "answerer"), shardings)
    assert jax.tree.map(lambda x: x.sharding, placed) == shardings


def test_the_optimizer_starts_over():
    state = init_state(toy_params, OPTIMIZER, ("policy",), jax.random.key(0))
    fresh = jax.tree.map(np.asarray, state)
    params = jax.tree.map(lambda x: x + 1, state.policies["policy"].params)
    opt_state = jax.tree.map(
        lambda x: x + jnp.ones((), x.dtype), state.policies["policy"].opt_state
    )
    policy = state.policies["policy"].replace(params=params, opt_state=opt_state)
    used = state.replace(step=state.step + 7, policies={"policy": policy})
    expected = jax.tree.map(np.asarray, params)
    made = reset_optimizer(used, OPTIMIZER)
    assert int(made.step) == 0
    for got, want in (
        (made.policies["policy"].params, expected),
        (made.policies["policy"].opt_state, fresh.policies["policy"].opt_state),
    ):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)


def test_policy_names():
    assert policy_names(toy_config()) == ("policy",)
    apart = toy_config(proposer={"policy": "asker"}, solver={"policy": "answerer"})
    assert policy_names(apart) == ("asker", "answerer")


def test_loss_constants():
    config = toy_config(
        proposer={"temperature": 0.8},
        solver={"temperature": 0.0, "role_weight": 0.0},
        learner={"clip_high": 0.285, "entropy": 0.02},
    )
    made = loss_constants(config)
    assert made.temperature[Role.PROPOSER.value] == np.float32(0.8)
    # A greedy role is never trained, the reader learns from demonstrations only.
    assert made.temperature[Role.SOLVER.value] == made.temperature[Role.READER.value] == 1
    for name, value in (
        ("clip_low", 0.2),
        ("clip_high", 0.285),
        ("dual_clip", 3),
        ("entropy", 0.02),
    ):
        assert vars(made)[name] == pytest.approx([value] * 3)
        assert vars(made)[name].dtype == np.float32


def test_the_config_refuses_a_dual_clip_that_would_bind_on_policy():
    with pytest.raises(ConfigError, match="must be above 1"):
        toy_config(learner={"dual_clip": 1.0})
