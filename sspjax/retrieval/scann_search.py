"""ScaNN behind guards: what would kill the process or return document 0 is met here.

Seen with ScaNN 1.4.2: a vector that is not finite ends the process when a tree is built, and as a
query it silently finds row 0; a search for more neighbours than there are pads with row 0; an empty
batch raises; zero threads crash; paths must be strings, and a folder moves only when its paths are
relative; `search_batched_parallel` uses one thread for up to 256 queries unless told otherwise.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Self

import numpy as np

from sspjax.retrieval.vectors import ROWS_PER_SCAN, VectorError

REORDER = 30
"""Candidates of the hashed search that are scored again with bf16 vectors."""
HASHED = {"dimensions_per_block": 2, "anisotropic_quantization_threshold": 0.2, "reorder": REORDER}
"""Parameters of the hashed search."""


def scann_installed() -> bool:
    return importlib.util.find_spec("scann") is not None


class ScannSearch:
    """Candidates from ScaNN, by a full scan (`exact`) or by asymmetric hashing. Thread-safe."""

    def __init__(self, searcher: Any, *, exact: bool, passages: int, threads: int) -> None:
        self.exact = exact
        self._searcher = searcher
        self._passages = passages
        self._threads = threads
        searcher.set_num_threads(threads)

    @classmethod
    def build(cls, vectors: np.ndarray, *, exact: bool, threads: int = 0) -> Self:
        """Builds on f32[passages, dimensions], which is copied; `threads` 0: all of the process.

        Raises VectorError naming the rows that are not finite. Hashed builds are random: the same
        vectors give another searcher each time, so one is built and then shipped.
        """
        from scann import ReorderType, scann_ops_pybind

        _check_finite(vectors)
        threads = _thread_count(threads)
        builder = scann_ops_pybind.builder(vectors, REORDER, "dot_product")
        builder.set_n_training_threads(threads)
        if exact:
            builder.score_brute_force(quantize=ReorderType.FLOAT32)
        else:
            builder.score_ah(
                HASHED["dimensions_per_block"],
                anisotropic_quantization_threshold=HASHED["anisotropic_quantization_threshold"],
            )
            builder.reorder(REORDER, quantize=ReorderType.BFLOAT16)
        return cls(builder.build(), exact=exact, passages=len(vectors), threads=threads)

    @classmethod
    def load(cls, folder: Path, *, passages: int, threads: int = 0) -> Self:
        """The hashed searcher that `save` wrote."""
        from scann import scann_ops_pybind

        searcher = scann_ops_pybind.load_searcher(str(folder.resolve()))
        return cls(searcher, exact=False, passages=passages, threads=_thread_count(threads))

    def save(self, folder: Path) -> None:
        """Writes a hashed searcher; an exact one is built again from the vectors."""
        if self.exact:
            return
        folder.mkdir()
        self._searcher.serialize(str(folder), relative_path=True)

    def candidates(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows i32 and scores f32, both [queries, count], best first; -1 and -inf where missing.

        A query that is not finite has no candidates.
        """
        rows = np.full((len(queries), count), -1, np.int32)
        scores = np.full((len(queries), count), -np.inf, np.float32)
        finite = np.flatnonzero(np.isfinite(queries).all(axis=1))
        if not len(finite):
            return rows, scores
        width = min(count, self._passages)
        found, similarity = self._searcher.search_batched_parallel(
            np.ascontiguousarray(queries[finite], np.float32),
            final_num_neighbors=width,
            pre_reorder_num_neighbors=None if self.exact else max(REORDER, 2 * width),
            batch_size=-(-len(finite) // self._threads),
        )
        present = ~np.isnan(similarity)
        rows[finite, :width] = np.where(present, found.astype(np.int32), np.int32(-1))
        scores[finite, :width] = np.where(present, similarity, np.float32(-np.inf))
        return rows, scores


def _thread_count(threads: int) -> int:
    return threads if threads >= 1 else len(os.sched_getaffinity(0))


def _check_finite(vectors: np.ndarray) -> None:
    bad: list[int] = []
    for start in range(0, len(vectors), ROWS_PER_SCAN):
        stretch = vectors[start : start + ROWS_PER_SCAN]
        bad += (start + np.flatnonzero(~np.isfinite(stretch).all(axis=1))).tolist()
    if bad:
        raise VectorError(
            f"{len(bad)} passage vectors are not finite (rows {', '.join(map(str, bad[:10]))}"
            f"{', ...' * (len(bad) > 10)}); check the encoder on these passages"
        )
