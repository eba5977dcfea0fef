"""TrainState: made on the devices where it lives, and the constants that go with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sspjax.config import RunConfig
from sspjax.types import LossConstants, Params, PolicyState, Role, TrainState


def policy_names(config: RunConfig) -> tuple[str, ...]:
    """The policies of a run, each once: one that plays both roles, or one for each."""
    return tuple(dict.fromkeys((config.proposer.policy, config.solver.policy)))


def init_state(
    init_params: Callable[[jax.Array], Params],
    optimizer: optax.GradientTransformation,
    policies: Sequence[str],
    key: jax.Array,
    shardings: TrainState | None = None,
) -> TrainState:
    """A state at step 0; every policy starts from the same `init_params(key)`.

    `shardings` (from `state_shardings`): where each array is made; no device ever holds it whole.
    """

    def init(key: jax.Array) -> TrainState:
        return _at_start({name: init_params(key) for name in policies}, optimizer)

    return jax.jit(init, out_shardings=shardings)(key)


def state_from_params(
    params: Params,
    optimizer: optax.GradientTransformation,
    policies: Sequence[str],
    shardings: TrainState | None = None,
) -> TrainState:
    """A state at step 0 around given parameters; every policy gets its own copy of them."""

    def init(params: Params) -> TrainState:
        # The update donates its state: a buffer must not be shared, or still the caller's.
        copies = {name: jax.tree.map(jnp.copy, params) for name in policies}
        return _at_start(copies, optimizer)

    return jax.jit(init, out_shardings=shardings)(params)


def reset_optimizer(
    state: TrainState,
    optimizer: optax.GradientTransformation,
    shardings: TrainState | None = None,
) -> TrainState:
    """The same parameters at step 0 with a fresh optimizer: the warm start hands over to self-play.

    `state` is donated: what is not kept is freed.
    """

    def reset(state: TrainState) -> TrainState:
        params = {name: policy.params for name, policy in state.policies.items()}
        return _at_start(params, optimizer)

    return jax.jit(reset, donate_argnums=0, out_shardings=shardings)(state)


def state_shardings(
    params: Params,
    optimizer: optax.GradientTransformation,
    policies: Sequence[str],
    mesh: Mesh,
) -> TrainState:
    """Where a TrainState lives, as a TrainState of NamedShardings.

    `params`: a NamedSharding for each parameter. Optimizer moments lie like their parameters;
    counters are replicated.
    """
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    # The optimizer's structure follows from that of the parameters, whatever their shapes.
    scalars = jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), params)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, scalars),
        params,
        transform_non_params=lambda _: replicated,
    )
    policy = PolicyState(params=params, opt_state=opt_state)
    return TrainState(step=replicated, policies={name: policy for name in policies})


def loss_constants(config: RunConfig) -> LossConstants:
    """The objective's constants, f32[roles] on the host, indexed by `Role.value`.

    The temperature is the one a role samples at. A greedy role is never trained and the reader only
    learns from demonstrations, whatever it reads at: both stand at 1.
    """
    learner = config.learner
    temperature = _for_roles(1.0)
    for role, own in ((Role.PROPOSER, config.proposer), (Role.SOLVER, config.solver)):
        temperature[role.value] = own.temperature or 1.0
    return LossConstants(
        clip_low=_for_roles(learner.clip_low),
        clip_high=_for_roles(learner.clip_high),
        dual_clip=_for_roles(learner.dual_clip),
        entropy=_for_roles(learner.entropy),
        temperature=temperature,
    )


def _for_roles(value: float) -> Any:
    return np.full(len(Role), value, np.float32)


def _at_start(params: Mapping[str, Params], optimizer: optax.GradientTransformation) -> TrainState:
    policies = {
        name: PolicyState(params=own, opt_state=optimizer.init(own)) for name, own in params.items()
    }
    return TrainState(step=jnp.zeros((), jnp.int32), policies=policies)
