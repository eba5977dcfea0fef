"""Forward-only passes: log-probabilities of the used micro-batches under given parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from sspjax.config import RunConfig
from sspjax.learner.loss import PolicyModel, micro_batch, token_logprobs
from sspjax.types import LossConstants, Params, UpdateBatch

Reference = Callable[[Params, UpdateBatch, LossConstants], UpdateBatch]
"""(reference parameters, batch, constants) to the batch with `reference_logprob` filled in."""


def make_reference_logprobs(
    model: PolicyModel, config: RunConfig, *, batch_sharding: NamedSharding | None = None
) -> Reference:
    """Scores a batch under frozen parameters; compiled once, whatever the batch holds.

    `batch_sharding`: sharding of [M, R, L] arrays, and of the result. At the tokens of unused
    micro-batches the result is 0.
    """

    def reference_logprobs(
        params: Params, batch: UpdateBatch, constants: LossConstants
    ) -> jax.Array:
        return score_micro_batches(
            model, params, batch, jnp.zeros_like(batch.reference_logprob),
            jnp.zeros_like(batch.micro_stop[-1]), batch.micro_stop[-1], constants,
            chunk=row_chunk(config.model.logprob_chunk, batch, batch_sharding),
            batch_sharding=batch_sharding,
        )  # fmt: skip

    compiled = jax.jit(reference_logprobs, out_shardings=batch_sharding)

    def fill(params: Params, batch: UpdateBatch, constants: LossConstants) -> UpdateBatch:
        return batch.replace(reference_logprob=compiled(params, batch, constants))

    return fill


def score_micro_batches(
    model: PolicyModel,
    params: Params,
    batch: UpdateBatch,
    logprobs: Float[Array, "M R L"],
    start: Int[Array, ""],
    stop: Int[Array, ""],
    constants: LossConstants,
    *,
    chunk: int,
    batch_sharding: NamedSharding | None,
) -> Float[Array, "M R L"]:
    """`logprobs` with micro-batches `start` to `stop` (exclusive) scored anew under `params`."""

    def score(m: jax.Array, logprobs: jax.Array) -> jax.Array:
        rows = micro_batch(batch, m)
        logprob, _ = token_logprobs(model, params, rows, constants.temperature, chunk=chunk)
        logprobs = jax.lax.dynamic_update_index_in_dim(logprobs, logprob, m, axis=0)
        return pinned(logprobs, batch_sharding)

    return jax.lax.fori_loop(start, stop, score, pinned(logprobs, batch_sharding))


def row_chunk(logprob_chunk: int, batch: UpdateBatch, batch_sharding: NamedSharding | None) -> int:
    """Positions of a row scored at a time, so that a device holds the logits of `logprob_chunk`."""
    shape = batch.tokens.shape
    local = shape if batch_sharding is None else batch_sharding.shard_shape(shape)
    return max(1, logprob_chunk // local[1])


def pinned(tree: Any, shardings: Any) -> Any:
    """The same arrays inside jit, held to `shardings` (a matching tree or one for all, or None)."""
    return tree if shardings is None else jax.lax.with_sharding_constraint(tree, shardings)
