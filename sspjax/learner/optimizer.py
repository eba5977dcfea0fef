"""AdamW as verl runs it, the learning rate as data, and which roles learn when."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import optax

from sspjax.config import LearnerConfig, RunConfig
from sspjax.learner.pack import role_config, role_spans
from sspjax.learner.state import policy_names
from sspjax.types import Params, Role

ADAM_EPSILON = 1e-8


def make_optimizer(learner: LearnerConfig) -> optax.GradientTransformation:
    """The direction in which parameters move: the update subtracts learning rate times its output.

    Clipping by the global norm (`grad_clip`, 0: none), Adam's bias-corrected moments with epsilon
    outside the square root, plus `weight_decay` times the parameters. Everything decays, norms and
    biases too, as in verl and torch's AdamW. Moments have the dtype of the parameters.
    """
    clip = optax.clip_by_global_norm(learner.grad_clip) if learner.grad_clip else optax.identity()
    chain = optax.chain(
        clip,
        optax.scale_by_adam(b1=learner.b1, b2=learner.b2, eps=ADAM_EPSILON),
        optax.add_decayed_weights(learner.weight_decay),
    )

    def update(
        updates: Params, state: optax.OptState, params: Params | None = None
    ) -> tuple[Params, optax.OptState]:
        # optax raises floats to integer counters, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(updates, state, params)

    return optax.GradientTransformation(chain.init, update)


def learning_rates(config: RunConfig, step: int) -> np.ndarray:
    """The rate of every role's minibatches in self-play step `step`, counted from 1: f32[roles].

    learner.learning_rate x min(1, n / warmup), where `learner.warmup_unit` says what n counts.
    `step`: n is the step, so the first update learns already and step `warmup` has the full rate.
    `call`: n is the number of updates a policy has had before, one a role and step or one for both
    where the order is joint, as in SSP's code; the very first has rate 0, and `warmup=5` is over in
    the third step.
    """
    if step < 1:
        raise ValueError(f"learning_rates: expected a step counted from 1, got {step}")
    learner = config.learner
    done = np.full(len(Role), float(step))
    if learner.warmup_unit == "call":
        for policy in policy_names(config):
            for role, before in _calls_before(config, policy, step).items():
                done[role.value] = before
    rates = learner.learning_rate * np.minimum(1.0, done / max(learner.warmup, 1))
    return rates.astype(np.float32)


def updated_roles(config: RunConfig, step: int) -> tuple[Role, ...]:
    """The roles that learn in `step`: with a weight, and past the proposer's warm-up (SSP)."""
    first_step = {Role.PROPOSER: 1, Role.SOLVER: config.learner.proposer_warmup + 1}
    return tuple(
        role
        for role, first in first_step.items()
        if step >= first and role_config(config, role).role_weight > 0
    )


def _calls_before(config: RunConfig, policy: str, step: int) -> dict[Role, int]:
    """Updates that a policy has had before each role's in `step`."""
    roles = [span.role for span in role_spans(config, policy)]
    calls = [roles] if config.learner.order == "joint" else [[role] for role in roles]

    def is_made(call: Sequence[Role], at: int) -> bool:
        return not set(call).isdisjoint(updated_roles(config, at))

    count = sum(is_made(call, at) for call in calls for at in range(1, step))
    before = {}
    for call in calls:
        before |= dict.fromkeys(call, count)
        count += is_made(call, step)
    return before
