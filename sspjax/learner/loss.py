"""The objective: log-probabilities of packed rows in chunks, policy losses, KL, entropy.

The loss of a micro-batch is sum(weight * term) over its tokens. Normalisation, role weights and
estimators are in the weights and advantages (`learner/pack.py`), so one program serves REINFORCE,
GRPO and likelihood, and losses and gradients of micro-batches simply add up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sspjax.config import LearnerConfig
from sspjax.types import LossConstants, Params, Role, UpdateBatch

LOG_RATIO_BOUND = 20.0
"""Log ratios are clipped to +-20 before exp (verl)."""
K3_BOUND = 10.0
"""The k3 estimate of a token is clipped to +-10 (verl, `low_var_kl`)."""


class PolicyModel(NamedTuple):
    """What the learner needs of a model.

    `hidden(params, tokens i32[R, L], positions i32[R, L], segments i32[R, L]) -> [R, L, D]`: final
    hidden states; a token sees its own segment up to itself. Must be finite at padding (segment 0),
    whose weight is 0.
    `unembed(params, hidden [..., D]) -> f32[..., V]`: finite logits.
    """

    hidden: Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]
    unembed: Callable[[Params, jax.Array], jax.Array]


class Rows(NamedTuple):
    """One micro-batch: the [M, R, L] fields of an UpdateBatch at one index of M."""

    tokens: Int[Array, "R L"]
    positions: Int[Array, "R L"]
    segments: Int[Array, "R L"]
    sampled: Bool[Array, "R L"]
    loss_weight: Float[Array, "R L"]
    kl_weight: Float[Array, "R L"]
    advantage: Float[Array, "R L"]
    behaviour_logprob: Float[Array, "R L"]
    old_logprob: Float[Array, "R L"]
    reference_logprob: Float[Array, "R L"]
    role: Int[Array, "R L"]


def micro_batch(batch: UpdateBatch, index: Int[Array, ""]) -> Rows:
    """Micro-batch `index` of a batch; the index may be traced."""

    def take(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)

    return Rows(
        tokens=take(batch.tokens),
        positions=take(batch.positions),
        segments=take(batch.segments),
        sampled=take(batch.sampled),
        loss_weight=take(batch.loss_weight),
        kl_weight=take(batch.kl_weight),
        advantage=take(batch.advantage),
        behaviour_logprob=take(batch.behaviour_logprob),
        old_logprob=take(batch.old_logprob),
        reference_logprob=take(batch.reference_logprob),
        role=take(batch.role),
    )


# Log-probabilities -------------------------------------------------------------------------------


def token_logprobs(
    model: PolicyModel,
    params: Params,
    rows: Rows,
    temperature: Float[Array, "roles"],
    *,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "R L"], Float[Array, "R L"]]:
    """Log-probability of every token given those before it in its segment, and the entropy there.

    Both belong to softmax(logits / temperature[role]) over the whole vocabulary, f32, and stand at
    the position of the predicted token. At the first token of a segment they mean nothing.

    `chunk`: positions of a row whose logits exist at one time, f32[R, chunk, V], forward and
    backward alike: the backward pass makes them again.
    `entropy_gradient`: whether the entropy is differentiated; else it is a constant.
    """
    hidden = model.hidden(params, rows.tokens, rows.positions, rows.segments)
    length = rows.tokens.shape[1]
    # Position i predicts token i + 1; the last position predicts nothing and is dropped again.
    target = jnp.roll(rows.tokens, -1, axis=1)
    scale = jnp.asarray(temperature)[jnp.roll(rows.role, -1, axis=1)]
    count = math.ceil(length / chunk)
    inputs = [_chunks(x, count) for x in (hidden, target, scale)]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(
        hidden: jax.Array, target: jax.Array, scale: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits = model.unembed(params, hidden) / scale[..., None]
        return _logprob_and_entropy(logits, target, entropy_gradient=entropy_gradient)

    _, outputs = jax.lax.scan(lambda _, x: (None, one_chunk(*x)), None, inputs)
    logprob, entropy = (
        jnp.pad(jnp.moveaxis(x, 0, 1).reshape(len(x[0]), -1)[:, : length - 1], ((0, 0), (1, 0)))
        for x in outputs
    )
    return logprob, entropy


def _chunks(x: jax.Array, count: int) -> jax.Array:
    """[R, L, ...] to [count, R, ceil(L / count), ...]."""
    # Padded with the last value: a temperature must not become 0.
    size = math.ceil(x.shape[1] / count)
    padding = [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    padded = jnp.pad(x, padding, mode="edge")
    return jnp.moveaxis(padded.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)


def _logprob_and_entropy(
    logits: jax.Array, target: jax.Array, *, entropy_gradient: bool
) -> tuple[jax.Array, jax.Array]:
    # A comparison instead of a gather: it stays local when the vocabulary is sharded.
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.sum(jnp.where(vocabulary == target[..., None], logits, 0), axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1)
    log_probability = logits - total[..., None]
    if not entropy_gradient:
        log_probability = jax.lax.stop_gradient(log_probability)
    entropy = -jnp.sum(jnp.exp(log_probability) * log_probability, axis=-1)
    return chosen - total, entropy


# Terms of one token ------------------------------------------------------------------------------


class Spans(NamedTuple):
    """Which trajectory every token of the rows belongs to, for what is said of a whole one."""

    segments: Int[Array, "R L"]
    counted: Bool[Array, "R L"]
    """The tokens that sums run over: those that were sampled and are trained on."""

    def total(self, values: Float[Array, "R L"]) -> Float[Array, "R L"]:
        """Sum over the counted tokens of the same trajectory, given to each of its tokens."""

        def one_row(values: jax.Array, segments: jax.Array) -> jax.Array:
            # Segments count from 1: a row of L tokens has at most L of them.
            sums = jax.ops.segment_sum(values, segments, num_segments=len(segments) + 1)
            return sums[segments]

        return jax.vmap(one_row)(jnp.where(self.counted, values, 0), self.segments)

    def mean(self, values: Float[Array, "R L"]) -> Float[Array, "R L"]:
        """Mean over the same tokens; 0 where none is counted."""
        count = self.total(jnp.ones_like(values))
        return self.total(values) / jnp.maximum(count, 1)


class Surrogate(NamedTuple):
    """What a policy loss says about each token, [R, L]."""

    loss: jax.Array
    log_ratio: jax.Array
    clipped: jax.Array
    """bool: the upper or lower clip replaced the ratio."""
    clipped_dual: jax.Array
    """bool: the dual clip did."""


PolicyLoss = Callable[[jax.Array, jax.Array, jax.Array, LossConstants, Spans], Surrogate]
"""(logprob, old logprob, advantage, the constants of each token's role, trajectories) of [R, L]."""


def clipped(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    own: LossConstants,
    spans: Spans,
) -> Surrogate:
    """PPO's clipped surrogate with asymmetric bounds (DAPO) and dual clip (arXiv 1912.09729).

    max(-A r, -A clip(r, 1 - low, 1 + high)), and where A < 0 at most -A dual_clip. All [R, L].
    """
    log_ratio = _bounded(logprob - old_logprob)
    loss, is_clipped = _pessimistic(jnp.exp(log_ratio), advantage, own)
    ceiling = -advantage * own.dual_clip
    is_dual = (advantage < 0) & (loss > ceiling)
    return Surrogate(jnp.where(is_dual, ceiling, loss), log_ratio, is_clipped, is_dual)


def gspo(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    own: LossConstants,
    spans: Spans,
) -> Surrogate:
    """Group sequence policy optimisation (GSPO, arXiv 2507.18071): one ratio for a trajectory.

    The ratio is that of the whole trajectory's likelihoods to the power of one over its length,
    exp(mean of logprob - old), and is clipped as a whole; bounds of 3e-4 and 4e-4 are the paper's.
    Each token has that value and its own gradient (GSPO-token), which under weights that are equal
    within a trajectory adds up to the gradient of the sequence's ratio. There is no dual clip.
    """
    sequence = _bounded(spans.mean(jax.lax.stop_gradient(logprob - old_logprob)))
    log_ratio = logprob - jax.lax.stop_gradient(logprob) + sequence
    loss, is_clipped = _pessimistic(jnp.exp(log_ratio), advantage, own)
    return Surrogate(loss, log_ratio, is_clipped, jnp.zeros_like(is_clipped))


def cispo(
    logprob: jax.Array,
    old_logprob: jax.Array,
    advantage: jax.Array,
    own: LossConstants,
    spans: Spans,
) -> Surrogate:
    """Clipped importance weights (CISPO, arXiv 2506.13585): REINFORCE, reweighted.

    -A log p times clip(r, 1 - low, 1 + high), the weight a constant: every token keeps its
    gradient, however far its ratio is. The paper clips above only, which is `clip_low=1`.
    """
    log_ratio = _bounded(logprob - old_logprob)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = jnp.clip(ratio, 1 - own.clip_low, 1 + own.clip_high)
    is_clipped = weight != ratio
    return Surrogate(
        -advantage * weight * logprob, log_ratio, is_clipped, jnp.zeros_like(is_clipped)
    )


LOSSES: Mapping[str, PolicyLoss] = {"clipped": clipped, "gspo": gspo, "cispo": cispo}
"""By `learner.loss`."""


def _bounded(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _pessimistic(
    ratio: jax.Array, advantage: jax.Array, own: LossConstants
) -> tuple[jax.Array, jax.Array]:
    """The larger of the losses with the free and the clipped ratio, and where it is the latter.

    Selections, not maximum: at a tie the whole gradient is that of the free ratio.
    """
    free = -advantage * ratio
    bounded = -advantage * jnp.clip(ratio, 1 - own.clip_low, 1 + own.clip_high)
    is_clipped = bounded > free
    return jnp.where(is_clipped, bounded, free), is_clipped


# Estimates of KL(policy | reference) at one token, all [R, L] -------------------------------------


def k1(logprob: jax.Array, reference_logprob: jax.Array) -> jax.Array:
    """policy - reference: unbiased, of either sign. As a loss its expected gradient is 0."""
    return logprob - reference_logprob


def distance(logprob: jax.Array, reference_logprob: jax.Array) -> jax.Array:
    """|policy - reference|."""
    return jnp.abs(logprob - reference_logprob)


def k2(logprob: jax.Array, reference_logprob: jax.Array) -> jax.Array:
    """Half the squared difference: its expected gradient is that of the divergence."""
    return jnp.square(logprob - reference_logprob) / 2


def k3(logprob: jax.Array, reference_logprob: jax.Array) -> jax.Array:
    """Estimate that is never negative (Schulman's k3).

    exp(x) - x - 1 with x = reference - policy, both clipped as in verl.
    """
    x = _bounded(reference_logprob - logprob)
    return jnp.clip(jnp.exp(x) - x - 1, -K3_BOUND, K3_BOUND)


def k1_straight(logprob: jax.Array, reference_logprob: jax.Array) -> jax.Array:
    """k1 with the gradient of k2."""
    return _straight_through(k1(logprob, reference_logprob), k2(logprob, reference_logprob))


def k3_straight(logprob: jax.Array, reference_logprob: jax.Array) -> jax.Array:
    """k3 with the gradient of k2."""
    return _straight_through(k3(logprob, reference_logprob), k2(logprob, reference_logprob))


def _straight_through(value: jax.Array, slope: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(value) + (slope - jax.lax.stop_gradient(slope))


KL_KINDS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "k1": k1,
    "abs": distance,
    "k2": k2,
    "k3": k3,
    "k1+": k1_straight,
    "k3+": k3_straight,
}
"""By `learner.kl_kind`."""


# What lies between the sampler and the trainer ----------------------------------------------------


def token_level(log_ratio: jax.Array, spans: Spans) -> jax.Array:
    """A weight for each token: a bias for less variance."""
    return log_ratio


def sequence_level(log_ratio: jax.Array, spans: Spans) -> jax.Array:
    """The weight of the whole trajectory: the product over its tokens."""
    return spans.total(log_ratio)


def sequence_mean(log_ratio: jax.Array, spans: Spans) -> jax.Array:
    """The mean of a trajectory's tokens: what one of them drifted."""
    return spans.mean(log_ratio)


IMPORTANCE: Mapping[str, Callable[[jax.Array, Spans], jax.Array]] = {
    "token": token_level,
    "sequence": sequence_level,
}
"""By `learner.importance`: the log ratio that truncated importance sampling weighs a token with."""

REJECTION: Mapping[str, Callable[[jax.Array, Spans], jax.Array]] = {
    "token": token_level,
    "sequence": sequence_mean,
}
"""By `learner.rejection`: the log ratio that decides whether a token is trained on."""


class Mismatch(NamedTuple):
    """How far sampler and trainer are apart, and what is done about it, [R, L]."""

    weight: jax.Array
    """Of the policy loss; a constant."""
    capped: jax.Array
    """bool: the weight would be above the cap."""
    kept: jax.Array
    """bool: false where the token leaves the loss."""


def mismatch(
    old_logprob: jax.Array, behaviour_logprob: jax.Array, spans: Spans, config: LearnerConfig
) -> Mismatch:
    """Truncated importance sampling and rejection, from trainer over sampler probabilities.

    The weight is min(ratio, `importance_cap`) (verl, rollout correction). What falls outside
    [`rejection_low`, `rejection_high`] is left out of every term of the loss and still counts in
    its normaliser. Tokens that are not counted keep weight one.
    """
    log_ratio = jax.lax.stop_gradient(old_logprob - behaviour_logprob)
    log_ratio = jnp.where(spans.counted, _bounded(log_ratio), 0)
    nothing = jnp.zeros_like(spans.counted)
    weight, capped, kept = jnp.ones_like(log_ratio), nothing, jnp.logical_not(nothing)
    if config.importance != "none":
        ratio = jnp.exp(_bounded(IMPORTANCE[config.importance](log_ratio, spans)))
        capped = spans.counted & (ratio > config.importance_cap)
        weight = jnp.where(spans.counted, jnp.minimum(ratio, config.importance_cap), 1)
    if config.rejection != "none":
        ratio = jnp.exp(REJECTION[config.rejection](log_ratio, spans))
        within = (ratio >= config.rejection_low) & (ratio <= config.rejection_high)
        kept = jnp.logical_not(spans.counted) | within
    return Mismatch(weight, capped, kept)


# The loss of a micro-batch -----------------------------------------------------------------------


class TokenSums(NamedTuple):
    """Sums over tokens, f32[roles] each. Those of micro-batches add up exactly."""

    weight: jax.Array
    """Of the loss weights; 0 means that the role has no part in this."""
    pg_loss: jax.Array
    kl_loss: jax.Array
    """Loss weight times KL, without the KL coefficient; 0 without a reference."""
    nll: jax.Array
    """Loss weight times -log p of forced tokens."""
    forced_weight: jax.Array
    tokens: jax.Array
    """Trained sampled tokens: what the unweighted sums below run over."""
    entropy: jax.Array
    ppo_kl: jax.Array
    """Old minus present log-probability, clipped as the ratio is."""
    clipped: jax.Array
    clipped_dual: jax.Array
    offered: jax.Array
    """Trained sampled tokens before rejection: what the three sums below run over."""
    importance: jax.Array
    """Weights of truncated importance sampling."""
    capped: jax.Array
    rejected: jax.Array
    compared: jax.Array
    """Sampled tokens scored before any optimizer step: what the two sums below run over."""
    rollout_kl: jax.Array
    """Behaviour minus trainer log-probability."""
    rollout_k3: jax.Array


def row_loss(
    logprob: Float[Array, "R L"],
    entropy: Float[Array, "R L"],
    rows: Rows,
    constants: LossConstants,
    config: LearnerConfig,
    *,
    fresh: bool | Bool[Array, ""],
    unmoved: bool | Bool[Array, ""],
) -> tuple[Float[Array, ""], TokenSums]:
    """Loss of one micro-batch from its log-probabilities: sum of weight times term.

    A forced token's old log-probability is its present one, a constant: ratio one, so that with
    advantage 1 its gradient is that of -log p.

    `fresh`: the old policy *is* the present one, so the same holds for every token.
    `unmoved`: no optimizer step was taken since the tokens were sampled; what is left between
    behaviour and trainer is numerics, and is measured.
    """
    own = jax.tree.map(lambda constant: jnp.asarray(constant)[rows.role], constants)
    same = jnp.logical_not(rows.sampled) | fresh
    old = jnp.where(same, jax.lax.stop_gradient(logprob), rows.old_logprob)
    offered = rows.sampled & (rows.loss_weight > 0)
    spans = Spans(rows.segments, offered)
    apart = mismatch(old, rows.behaviour_logprob, spans, config)
    rows = rows._replace(
        loss_weight=jnp.where(apart.kept, rows.loss_weight, 0),
        kl_weight=jnp.where(apart.kept, rows.kl_weight, 0),
    )
    terms = LOSSES[config.loss](logprob, old, rows.advantage, own, spans)
    kl = KL_KINDS[config.kl_kind](logprob, rows.reference_logprob)
    policy = rows.loss_weight * apart.weight * terms.loss
    bonus = jnp.where(rows.sampled, rows.loss_weight * own.entropy, 0) * entropy
    loss = jnp.sum(policy) + jnp.sum(rows.kl_weight * kl) - jnp.sum(bonus)

    trained = rows.sampled & (rows.loss_weight > 0)
    forced = jnp.logical_not(rows.sampled) & (rows.loss_weight > 0)
    compared = trained & unmoved

    def by_role(values: jax.Array, where: jax.Array) -> jax.Array:
        one_hot = rows.role[None] == jnp.arange(len(Role))[:, None, None]
        return jnp.sum(jnp.where(one_hot & where[None], values[None], 0), axis=(1, 2))

    ones = jnp.ones_like(logprob)
    sums = TokenSums(
        weight=by_role(rows.loss_weight, trained | forced),
        pg_loss=by_role(policy, trained | forced),
        kl_loss=by_role(rows.loss_weight * kl, rows.kl_weight > 0),
        nll=by_role(-rows.loss_weight * logprob, forced),
        forced_weight=by_role(rows.loss_weight, forced),
        tokens=by_role(ones, trained),
        entropy=by_role(entropy, trained),
        ppo_kl=by_role(-terms.log_ratio, trained),
        clipped=by_role(ones, trained & terms.clipped),
        clipped_dual=by_role(ones, trained & terms.clipped_dual),
        offered=by_role(ones, offered),
        importance=by_role(apart.weight, offered),
        capped=by_role(ones, apart.capped),
        rejected=by_role(ones, jnp.logical_not(apart.kept)),
        compared=by_role(ones, compared),
        rollout_kl=by_role(rows.behaviour_logprob - logprob, compared),
        rollout_k3=by_role(k3(rows.behaviour_logprob, logprob), compared),
    )
    return loss, sums


def micro_loss(
    params: Params,
    rows: Rows,
    constants: LossConstants,
    *,
    model: PolicyModel,
    config: LearnerConfig,
    chunk: int,
    fresh: bool | Bool[Array, ""],
    unmoved: bool | Bool[Array, ""],
) -> tuple[Float[Array, ""], TokenSums]:
    """Loss of one micro-batch from its parameters; see `token_logprobs` and `row_loss`."""
    logprob, entropy = token_logprobs(
        model, params, rows, constants.temperature,
        chunk=chunk, entropy_gradient=config.entropy != 0,
    )  # fmt: skip
    return row_loss(logprob, entropy, rows, constants, config, fresh=fresh, unmoved=unmoved)
