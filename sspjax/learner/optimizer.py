"""AdamW as verl runs it, with the learning rate as data."""

from __future__ import annotations

import jax
import optax

from sspjax.config import LearnerConfig
from sspjax.types import Params

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


def learning_rate(learner: LearnerConfig, step: int) -> float:
    """The rate of self-play step `step`, counted from 1: learner.learning_rate x step / warmup.

    The line starts from 0 at step 0, which is no step, so the first update learns already and
    step `warmup` has the full rate. SSP's code counts update calls instead, two a step and the
    first of them at rate 0: there `warmup=5` is over in the third step.
    """
    if step < 1:
        raise ValueError(f"learning_rate: expected a step counted from 1, got {step}")
    return learner.learning_rate * min(1.0, step / max(learner.warmup, 1))
