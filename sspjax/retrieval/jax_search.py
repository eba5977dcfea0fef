"""The full scan where ScaNN is not installed: blocks of passages with a running top k."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sspjax.retrieval.vectors import ROWS_PER_SCAN

QUERIES_PER_SCAN = 64
"""Every call scans for this many queries, the last ones empty: one program serves any batch."""


class JaxSearch:
    """Candidates from a scan in f32 on the host's CPU (or the first device, where that is hidden).

    Thread-safe: it holds constants only.
    """

    exact = True

    def __init__(self, vectors: np.ndarray) -> None:
        """Copies f32[passages, dimensions] in blocks, the last one filled with zeros."""
        self._passages, dimensions = vectors.shape
        block = min(ROWS_PER_SCAN, -(-self._passages // 128) * 128)
        blocks = np.zeros((-(-self._passages // block), block, dimensions), np.float32)
        blocks.reshape(-1, dimensions)[: self._passages] = vectors
        self._device = _host_device()
        self._blocks = jax.device_put(blocks, self._device)

    def candidates(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows i32 and scores f32, both [queries, count], best first; -1 and -inf where missing."""
        rows = np.full((len(queries), count), -1, np.int32)
        scores = np.full((len(queries), count), -np.inf, np.float32)
        width = min(count, self._passages)
        for start in range(0, len(queries), QUERIES_PER_SCAN):
            some = queries[start : start + QUERIES_PER_SCAN]
            batch = np.zeros((QUERIES_PER_SCAN, queries.shape[1]), np.float32)
            batch[: len(some)] = some
            found, similarity = _scan(
                self._blocks, jax.device_put(batch, self._device), self._passages, k=width
            )
            stop = start + len(some)
            rows[start:stop, :width] = np.asarray(found)[: len(some)]
            scores[start:stop, :width] = np.asarray(similarity)[: len(some)]
        return rows, scores

    def save(self, folder: Path) -> None:
        """Nothing: it is made again from the vectors."""


@functools.partial(jax.jit, static_argnames="k")
def _scan(
    blocks: Float[Array, "blocks block dimensions"],
    queries: Float[Array, "queries dimensions"],
    passages: int | Int[Array, ""],
    *,
    k: int,
) -> tuple[Int[Array, "queries k"], Float[Array, "queries k"]]:
    """Rows and scores of the k best passages of each query."""
    count, block = blocks.shape[0], blocks.shape[1]

    def step(carry, scanned):
        rows, scores = carry
        first, vectors = scanned
        here = first + jnp.arange(block, dtype=jnp.int32)
        similarity = jnp.einsum("qd,pd->qp", queries, vectors, precision="highest")
        similarity = jnp.where(here[None, :] < passages, similarity, -jnp.inf)
        scores = jnp.concatenate([scores, similarity], axis=1)
        rows = jnp.concatenate([rows, jnp.broadcast_to(here[None, :], similarity.shape)], axis=1)
        scores, best = jax.lax.top_k(scores, k)
        return (jnp.take_along_axis(rows, best, axis=1), scores), None

    nothing = (
        jnp.full((queries.shape[0], k), -1, jnp.int32),
        jnp.full((queries.shape[0], k), -jnp.inf, jnp.float32),
    )
    starts = jnp.arange(count, dtype=jnp.int32) * block
    (rows, scores), _ = jax.lax.scan(step, nothing, (starts, blocks))
    return rows, scores


def _host_device() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # The process was told to use accelerators alone.
        return jax.local_devices()[0]
