"""The update: every optimizer step of a self-play step in one compiled, donated program.

Minibatches are visited in the order of a schedule that follows from the config; with several
epochs some are visited again. Counts are data: a visit to minibatch k runs over micro-batches
`micro_stop[k-1]` to `micro_stop[k]`, a loop with a traced trip count whose body takes the gradient,
so any number of examples costs what it holds and nothing is compiled twice. A minibatch without
weight takes no optimizer step.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from sspjax.config import LearnerConfig, RunConfig
from sspjax.learner.loss import PolicyModel, TokenSums, micro_batch, micro_loss
from sspjax.learner.pack import role_spans
from sspjax.learner.scoring import pinned, row_chunk, score_micro_batches
from sspjax.learner.state import policy_names
from sspjax.types import (
    LossConstants,
    Metrics,
    Params,
    PolicyState,
    Role,
    TrainState,
    UpdateBatch,
)

Update = Callable[
    [TrainState, Mapping[str, UpdateBatch], LossConstants, np.ndarray | jax.Array],
    tuple[TrainState, Metrics],
]
"""(state, donated; batch of each policy; constants; learning rates f32[roles]) to (state, metrics).
"""


class Schedule(NamedTuple):
    """The visits of one update in order, known from the config; every field has one entry a visit.

    A visit is one minibatch and one optimizer step.
    """

    minibatch: np.ndarray
    """i32"""
    role: np.ndarray
    """i32: whose learning rate holds; that of the first where a minibatch holds both."""
    fresh: np.ndarray
    """bool: ratios are taken from the present policy's own log-probabilities, so they are one."""
    refresh_start: np.ndarray
    refresh_stop: np.ndarray
    """i32: before the visit, minibatches from start to stop (exclusive) are scored anew."""
    again: np.ndarray
    """bool: of an epoch after the first. Only what was sampled is visited again."""

    @property
    def refreshes(self) -> bool:
        """Whether anything needs a forward pass of its own."""
        return bool(np.any(self.refresh_stop > self.refresh_start))


def update_schedule(config: RunConfig, policy: str) -> Schedule:
    """Every role's minibatches, `learner.epochs` times, then the next role's.

    `learner.old_logprobs` says whose log-probabilities the ratios are measured from. `behaviour`:
    the sampler's recorded ones throughout. `step_start`: the trainer's own, before the first
    optimizer step. `role_start`: the trainer's own, before the first one of each role, which
    already sees what the other role's have changed (SSP's code). They stay the same over epochs.
    """
    learner = config.learner
    spans = role_spans(config, policy)
    # Roles that are updated together have the same minibatches.
    phases = spans[:1] if learner.order == "joint" else spans
    last = max(span.stop for span in spans)
    visits = []
    for span in phases:
        scored_to = {
            "behaviour": None,
            "step_start": last if span.start == 0 else None,
            "role_start": span.stop,
        }[learner.old_logprobs]
        for epoch in range(learner.epochs):
            for k in range(span.start, span.stop):
                first = scored_to is not None and epoch == 0 and k == span.start
                # The first visit measures from itself; only later ones need what was recorded.
                start = k + 1 if learner.epochs == 1 else k
                stop = scored_to if first else start
                visits.append((k, span.role.value, first, start, stop, epoch > 0))
    minibatch, role, fresh, start, stop, again = zip(*visits, strict=True)
    return Schedule(
        minibatch=np.array(minibatch, np.int32),
        role=np.array(role, np.int32),
        fresh=np.array(fresh, np.bool_),
        refresh_start=np.array(start, np.int32),
        refresh_stop=np.array(stop, np.int32),
        again=np.array(again, np.bool_),
    )


class UpdateSums(NamedTuple):
    """What one policy's update adds up, over the visits whose optimizer step was taken."""

    tokens: TokenSums
    minibatches: Float[Array, "roles"]
    """Visits in which the role had weight."""
    grad_norm: Float[Array, ""]
    """Before clipping."""
    updates: Float[Array, ""]
    skipped: Float[Array, ""]
    """Visits with weight whose gradient was not finite; counted apart."""


class Carry(NamedTuple):
    """What minibatches hand on to the next."""

    policy: PolicyState
    old_logprob: Float[Array, "M R L"]
    sums: UpdateSums


@dataclasses.dataclass(frozen=True)
class PolicyUpdate:
    """The update of one policy; its fields are static, its methods are traced."""

    model: PolicyModel
    optimizer: optax.GradientTransformation
    learner: LearnerConfig
    schedule: Schedule
    chunk: int
    """Positions of a row whose logits exist at one time."""
    shardings: Params | None
    """Of the parameters, and so of their gradients."""
    batch_sharding: NamedSharding | None

    def __call__(
        self,
        policy: PolicyState,
        batch: UpdateBatch,
        constants: LossConstants,
        learning_rates: Float[Array, "roles"],
    ) -> tuple[PolicyState, UpdateSums]:
        """Makes the visits in order."""
        visits = jax.tree.map(jnp.asarray, self.schedule)
        bounds = jnp.concatenate([jnp.zeros_like(batch.micro_stop[:1]), batch.micro_stop])
        demonstrated = jnp.logical_not(jnp.any(batch.sampled))

        def visit(v: jax.Array, carry: Carry) -> Carry:
            old, k = carry.old_logprob, visits.minibatch[v]
            if self.schedule.refreshes:
                old = score_micro_batches(
                    self.model, carry.policy.params, batch, old,
                    bounds[visits.refresh_start[v]], bounds[visits.refresh_stop[v]], constants,
                    chunk=self.chunk, batch_sharding=self.batch_sharding,
                )  # fmt: skip
            skipped = visits.again[v] & demonstrated
            gradient, tokens = self._accumulate(
                carry.policy.params, batch.replace(old_logprob=old), constants,
                bounds[k], jnp.where(skipped, bounds[k], bounds[k + 1]),
                fresh=visits.fresh[v], unmoved=carry.sums.updates == 0,
            )  # fmt: skip
            rate = learning_rates[visits.role[v]]
            policy, sums = self._step(carry.policy, gradient, tokens, rate)
            return Carry(policy, old, jax.tree.map(operator.add, carry.sums, sums))

        start = Carry(policy, pinned(batch.old_logprob, self.batch_sharding), _no_sums())
        end = jax.lax.fori_loop(0, len(self.schedule.minibatch), visit, start)
        return end.policy, end.sums

    def _accumulate(
        self,
        params: Params,
        batch: UpdateBatch,
        constants: LossConstants,
        start: Int[Array, ""],
        stop: Int[Array, ""],
        *,
        fresh: Bool[Array, ""],
        unmoved: Bool[Array, ""],
    ) -> tuple[Params, TokenSums]:
        """Gradient of the loss over micro-batches `start` to `stop` (exclusive)."""
        differentiate = jax.grad(micro_loss, has_aux=True)

        def add(m: jax.Array, total: tuple[Params, TokenSums]) -> tuple[Params, TokenSums]:
            micro = differentiate(
                params, micro_batch(batch, m), constants, model=self.model, config=self.learner,
                chunk=self.chunk, fresh=fresh, unmoved=unmoved,
            )  # fmt: skip
            gradient, tokens = jax.tree.map(operator.add, total, micro)
            return pinned(gradient, self.shardings), tokens

        zeros = pinned(jax.tree.map(jnp.zeros_like, params), self.shardings)
        return jax.lax.fori_loop(start, stop, add, (zeros, _no_tokens()))

    def _step(
        self,
        policy: PolicyState,
        gradient: Params,
        tokens: TokenSums,
        learning_rate: Float[Array, ""],
    ) -> tuple[PolicyState, UpdateSums]:
        """One optimizer step, unless nothing has weight or the gradient is not finite (verl)."""
        weighted = jnp.sum(tokens.weight) > 0
        grad_norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(grad_norm)

        def move(policy: PolicyState, gradient: Params) -> PolicyState:
            direction, opt_state = self.optimizer.update(gradient, policy.opt_state, policy.params)
            params = jax.tree.map(lambda p, d: p - learning_rate * d, policy.params, direction)
            return PolicyState(params=params, opt_state=opt_state)

        taken = weighted & finite
        policy = jax.lax.cond(taken, move, lambda policy, _: policy, policy, gradient)
        sums = UpdateSums(
            tokens=tokens,
            minibatches=(tokens.weight > 0).astype(jnp.float32),
            grad_norm=grad_norm,
            updates=jnp.ones((), jnp.float32),
            skipped=jnp.zeros((), jnp.float32),
        )
        sums = jax.tree.map(lambda x: jnp.where(taken, x, 0), sums)
        skipped = (weighted & jnp.logical_not(finite)).astype(jnp.float32)
        return policy, sums._replace(skipped=skipped)


def make_update(
    model: PolicyModel,
    optimizer: optax.GradientTransformation,
    config: RunConfig,
    *,
    shardings: TrainState | None = None,
    batch_sharding: NamedSharding | None = None,
) -> Update:
    """The jitted update of all policies; it compiles once and donates the state.

    Batches are of `update_shape(config, policy)`, as host arrays or global arrays sharded over R.
    Learning rates are f32[roles], one for the minibatches of each role. `state.step` grows by one a
    call, whatever was trained.

    `shardings`: from `state_shardings`; None on one device. `batch_sharding`: of [M, R, L] arrays.

    Metrics, f32[]: verl's names under `actor/` over all policies and, for what a role has of its
    own, under `<role>/actor/`. `pg_loss` and `kl_loss` are means over optimizer steps of what the
    step minimised (KL without its coefficient); `entropy`, `ppo_kl`, `pg_clipfrac` are means over
    the sampled tokens that were given to the loss. `rollout_corr/kl` compares sampler and trainer
    before the first step: under the same parameters, so what it shows is numerics. `actor/nll`
    (where there is a warm start) is the weighted mean of -log p over forced tokens. With importance
    weights or rejection there are verl's `rollout_corr/rollout_is_mean`,
    `rollout_is_ratio_fraction_high` (above the cap) and `rollout_rs_masked_fraction`. What nothing
    contributed to is 0. `actor/lr` is the rate of the last visit.
    """
    roles = {name: [s.role for s in role_spans(config, name)] for name in policy_names(config)}
    schedules = {name: update_schedule(config, name) for name in policy_names(config)}
    last_role = int([*schedules.values()][-1].role[-1])
    likelihood = config.warm_start.steps > 0

    def update(
        state: TrainState,
        batches: Mapping[str, UpdateBatch],
        constants: LossConstants,
        learning_rates: Float[Array, "roles"],
    ) -> tuple[TrainState, Metrics]:
        policies, sums = {}, {}
        for name, policy in state.policies.items():  # Unrolled: one or two.
            update_policy = PolicyUpdate(
                model=model,
                optimizer=optimizer,
                learner=config.learner,
                schedule=schedules[name],
                chunk=row_chunk(config.model.logprob_chunk, batches[name], batch_sharding),
                shardings=shardings.policies[name].params if shardings else None,
                batch_sharding=batch_sharding,
            )
            policies[name], sums[name] = update_policy(
                policy, batches[name], constants, learning_rates
            )
        metrics = _metrics(sums, roles, likelihood=likelihood)
        if config.learner.importance != "none" or config.learner.rejection != "none":
            metrics |= _correction_metrics(sums)
        metrics["actor/lr"] = learning_rates[last_role]
        return TrainState(step=state.step + 1, policies=policies), metrics

    out_shardings = (shardings, shardings.step) if shardings else None
    return jax.jit(update, donate_argnames="state", out_shardings=out_shardings)


def _no_tokens() -> TokenSums:
    return TokenSums(*[jnp.zeros(len(Role), jnp.float32) for _ in TokenSums._fields])


def _no_sums() -> UpdateSums:
    zero = jnp.zeros((), jnp.float32)
    return UpdateSums(_no_tokens(), jnp.zeros(len(Role), jnp.float32), zero, zero, zero)


def _over_policies(sums: Mapping[str, UpdateSums]) -> UpdateSums:
    first, *rest = sums.values()
    return jax.tree.map(lambda x, *others: sum(others, x), first, *rest)


def _correction_metrics(sums: Mapping[str, UpdateSums]) -> Metrics:
    tokens = jax.tree.map(jnp.sum, _over_policies(sums).tokens)
    return {
        "rollout_corr/rollout_is_mean": _mean(tokens.importance, tokens.offered),
        "rollout_corr/rollout_is_ratio_fraction_high": _mean(tokens.capped, tokens.offered),
        "rollout_corr/rollout_rs_masked_fraction": _mean(tokens.rejected, tokens.offered),
    }


def _metrics(
    sums: Mapping[str, UpdateSums], roles: Mapping[str, list[Role]], *, likelihood: bool
) -> Metrics:
    total = _over_policies(sums)
    tokens = jax.tree.map(jnp.sum, total.tokens)
    metrics = {
        **_token_metrics("actor", tokens, total.updates),
        **_step_metrics("actor", total),
        "rollout_corr/kl": _mean(tokens.rollout_kl, tokens.compared),
        "rollout_corr/k3_kl": _mean(tokens.rollout_k3, tokens.compared),
    }
    for policy, own in sums.items():
        for role in roles[policy]:
            prefix = f"{role.name.lower()}/actor"
            of_role = jax.tree.map(lambda x, i=role.value: x[i], own.tokens)
            metrics |= _token_metrics(prefix, of_role, own.minibatches[role.value])
            if len(sums) > 1:
                metrics |= _step_metrics(prefix, own)
    if likelihood:
        metrics["actor/nll"] = _mean(tokens.nll, tokens.forced_weight)
        for role in Role:
            metrics[f"{role.name.lower()}/actor/nll"] = _mean(
                total.tokens.nll[role.value], total.tokens.forced_weight[role.value]
            )
    return metrics


def _token_metrics(prefix: str, sums: TokenSums, minibatches: jax.Array) -> Metrics:
    return {
        f"{prefix}/pg_loss": _mean(sums.pg_loss, minibatches),
        f"{prefix}/kl_loss": _mean(sums.kl_loss, minibatches),
        f"{prefix}/entropy": _mean(sums.entropy, sums.tokens),
        f"{prefix}/ppo_kl": _mean(sums.ppo_kl, sums.tokens),
        f"{prefix}/pg_clipfrac": _mean(sums.clipped, sums.tokens),
        f"{prefix}/pg_clipfrac_lower": _mean(sums.clipped_dual, sums.tokens),
    }


def _step_metrics(prefix: str, sums: UpdateSums) -> Metrics:
    return {
        f"{prefix}/grad_norm": _mean(sums.grad_norm, sums.updates),
        f"{prefix}/updates": sums.updates,
        f"{prefix}/skipped_updates": sums.skipped,
    }


def _mean(total: jax.Array, count: jax.Array) -> jax.Array:
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0)
