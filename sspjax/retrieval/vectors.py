"""The passages' vectors, dense or sparse, and the exact search that defines every result.

Scores are made of fixed-point numbers: each coordinate is a multiple of 2^-24, so each product is a
multiple of 2^-48, and a sum of such products that stays below 32 fits the 53 bits of a float64. A
dot product of two unit vectors is therefore *exact* in float64, in any order of summation, by any
library, on any number of threads; it is rounded to float32 once, at the end. Results are ordered by
(score descending, row ascending), so equal vectors come in the order of the corpus.

Both halves of that order are packed into one i64, a *rank*: the larger rank is the better result,
and no two passages share one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import scipy.sparse

from sspjax.errors import UserError
from sspjax.types import record

GRID = np.float32(2.0**24)
SPARSE = 1 / 20
"""Vectors with at most this share of entries that are not 0 are held sparse."""
ROWS_PER_SCAN = 4096
"""Dense vectors scored at a time."""
LONGEST = 1.01
"""Length up to which a vector counts as normalised: bf16 encoders miss 1 by some 0.003."""
MISSING = np.iinfo(np.int64).min
"""The rank of no result, below every other."""


class VectorError(UserError, ValueError):
    """Vectors that cannot be searched: wrong shape, not finite, or not normalised."""


@record
class DenseVectors:
    """One row for each passage."""

    array: np.ndarray
    """f32[passages, dimensions] on the grid: in memory, or a file mapped into it."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    def best(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Ranks i64[queries, k], best first, over all passages; `queries` f32 on the grid."""
        wide = queries.astype(np.float64)
        ranks = np.full((len(queries), k), MISSING)
        for start in range(0, len(self.array), ROWS_PER_SCAN):
            stretch = self.array[start : start + ROWS_PER_SCAN].astype(np.float64)
            rows = np.arange(start, start + len(stretch))
            found = to_ranks((wide @ stretch.T).astype(np.float32), rows[None, :])
            ranks = keep_best(np.concatenate([ranks, found], axis=1), k)
        return ranks

    def rank(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Ranks i64[queries, m] of given passages i32[queries, m]; row -1 is missing."""
        chosen = self.array[np.maximum(rows, 0)].astype(np.float64)
        scores = np.einsum("qmd,qd->qm", chosen, queries.astype(np.float64))
        return np.where(rows < 0, MISSING, to_ranks(scores.astype(np.float32), rows))

    def save(self, folder: Path) -> None:
        np.save(folder / "vectors.npy", self.array)


@record
class SparseVectors:
    """For each dimension, the passages that are not 0 there: a query reads its own words only."""

    postings: scipy.sparse.csr_array
    """f64[dimensions, passages], grid numbers (float64 so that no search has to convert them)."""
    passages: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.passages, len(self.postings.indptr) - 1

    def best(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Ranks i64[queries, k], best first, over all passages; `queries` f32 on the grid."""
        hits = scipy.sparse.csr_array(to_csr(queries) @ self.postings)
        found = to_ranks(hits.data.astype(np.float32), hits.indices)
        ranks = np.full((len(queries), k), MISSING)
        for query, (start, stop) in enumerate(zip(hits.indptr, hits.indptr[1:], strict=False)):
            best = keep_best(found[start:stop], k)
            if len(best) < k or best[-1] <= ZERO:
                untouched = self._untouched(hits.indices[start:stop], k)
                best = keep_best(np.concatenate([found[start:stop], untouched]), k)
            ranks[query, : len(best)] = best
        return ranks

    def _untouched(self, rows: np.ndarray, k: int) -> np.ndarray:
        """Ranks of the first k passages outside `rows`, whose score is 0: no word in common."""
        first = np.arange(min(self.passages, k + len(rows)))
        rest = np.setdiff1d(first, rows)[:k]
        return to_ranks(np.zeros(len(rest), np.float32), rest)

    def save(self, folder: Path) -> None:
        np.save(folder / "postings_start.npy", self.postings.indptr)
        np.save(folder / "postings_row.npy", self.postings.indices)
        np.save(folder / "postings_value.npy", self.postings.data.astype(np.float32))


Vectors = DenseVectors | SparseVectors


def gather(stretches: Iterable[np.ndarray]) -> Vectors:
    """All vectors of a corpus, from stretches f32[m, dimensions] in row order, put on the grid.

    Raises VectorError for no vectors at all, for stretches of different widths, and for rows that
    are not finite or longer than 1 (a row of zeros is allowed: nothing finds it).
    """
    dense: list[np.ndarray] = []
    sparse: list[scipy.sparse.csr_array] = []
    count, dimensions = 0, 0
    for stretch in stretches:
        dimensions = dimensions or stretch.shape[-1]
        stretch = _checked_passages(stretch, dimensions, count)
        count += len(stretch)
        if dense or np.count_nonzero(stretch) > SPARSE * stretch.size:
            dense += [part.toarray().astype(np.float32) for part in sparse] + [stretch]
            sparse = []
        else:
            sparse.append(to_csr(stretch))
    if not count:
        raise VectorError("no passages: expected at least one vector")
    if dense:
        return DenseVectors(array=np.concatenate(dense))
    postings = scipy.sparse.vstack(sparse, format="csc").T
    return SparseVectors(
        postings=scipy.sparse.csr_array(postings, dtype=np.float64), passages=count
    )


def load_vectors(folder: Path, *, passages: int) -> Vectors:
    """What `save` wrote to the folder. Dense vectors stay in their file, mapped into memory."""
    dense = folder / "vectors.npy"
    if dense.exists():
        return DenseVectors(array=np.load(dense, mmap_mode="r"))
    start, row, value = (np.load(folder / f"postings_{part}.npy") for part in _POSTINGS)
    shape = (len(start) - 1, passages)
    postings = scipy.sparse.csr_array((value.astype(np.float64), row, start), shape=shape)
    return SparseVectors(postings=postings, passages=passages)


_POSTINGS = ("start", "row", "value")


def checked_queries(queries: np.ndarray, dimensions: int) -> tuple[np.ndarray, np.ndarray]:
    """The queries f32[queries, dimensions] on the grid, and bool[queries]: which are finite.

    Rows that are not finite become zeros. Raises VectorError for another shape or type, and for
    rows longer than 1.
    """
    _check_shape(queries, dimensions, "queries")
    cells = np.flatnonzero(queries != 0)
    rows, values = cells // dimensions, queries.reshape(-1)[cells]
    finite = np.ones(len(queries), np.bool_)
    finite[rows[~np.isfinite(values)]] = False
    usable = finite[rows]
    cells, rows, values = cells[usable], rows[usable], values[usable]
    _check_lengths(np.bincount(rows, np.square(values, dtype=np.float64), len(queries)), "query", 0)
    gridded = np.zeros_like(queries)
    gridded.reshape(-1)[cells] = on_grid(values)
    return gridded, finite


def _checked_passages(stretch: np.ndarray, dimensions: int, first: int) -> np.ndarray:
    _check_shape(stretch, dimensions, "passages")
    bad = np.flatnonzero(~np.isfinite(stretch).all(axis=1))
    if len(bad):
        rows = ", ".join(str(first + row) for row in bad[:10])
        raise VectorError(
            f"{len(bad)} passage vectors are not finite (rows {rows}{', ...' * (len(bad) > 10)}); "
            "check the encoder on these passages"
        )
    _check_lengths(np.einsum("nd,nd->n", stretch, stretch), "passage", first)
    return on_grid(stretch)


def _check_shape(vectors: np.ndarray, dimensions: int, name: str) -> None:
    if vectors.ndim != 2 or vectors.shape[1] != dimensions or vectors.dtype != np.float32:
        raise VectorError(
            f"{name}: expected float32[n, {dimensions}], got {vectors.dtype}{list(vectors.shape)}; "
            "the encoder and the index do not belong together"
        )


def _check_lengths(squares: np.ndarray, name: str, first: int) -> None:
    long = np.flatnonzero(squares > LONGEST**2)
    if len(long):
        raise VectorError(
            f"{name} {first + long[0]}: expected a vector of length 1, got "
            f"{squares[long[0]] ** 0.5:.3f}; divide each vector by its length"
        )


# The grid -----------------------------------------------------------------------------------------


def on_grid(vectors: np.ndarray) -> np.ndarray:
    """f32 rounded to multiples of 2^-24; values from 1/2 upwards are such multiples already."""
    return np.rint(vectors * GRID) / GRID


def to_csr(vectors: np.ndarray) -> scipy.sparse.csr_array:
    """f64 rows of the entries that are not 0."""
    cells = np.flatnonzero(vectors != 0)
    rows, columns = np.divmod(cells, vectors.shape[1])
    start = np.searchsorted(rows, np.arange(len(vectors) + 1)).astype(np.int32)
    values = vectors.reshape(-1)[cells].astype(np.float64)
    columns = columns.astype(np.int32)
    return scipy.sparse.csr_array((values, columns, start), shape=vectors.shape)


# Ranks --------------------------------------------------------------------------------------------


def to_ranks(scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """i64 ranks of f32 scores at these rows, both of one shape or broadcast to one.

    The score's bits, mapped to an integer of the same order, over the row counted from the top.
    """
    bits = (scores + np.float32(0.0)).view(np.int32)  # The sum turns -0 into 0.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.astype(np.int64) << 32) | (0xFFFFFFFF - rows.astype(np.int64))


def from_ranks(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows i32 and scores f32 of ranks; -1 and -inf where a result is missing."""
    rows = (0xFFFFFFFF - (ranks & 0xFFFFFFFF)).astype(np.int32)
    ordered = (ranks >> 32).astype(np.int32)
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(np.float32)
    missing = ranks == MISSING
    return np.where(missing, np.int32(-1), rows), np.where(missing, np.float32(-np.inf), scores)


def keep_best(ranks: np.ndarray, k: int) -> np.ndarray:
    """The k largest ranks (or all, where there are fewer) along the last axis, best first."""
    if ranks.shape[-1] > k:
        ranks = np.partition(ranks, -k, axis=-1)[..., -k:]
    return np.sort(ranks, axis=-1)[..., ::-1]


ZERO = int(to_ranks(np.zeros((), np.float32), np.zeros((), np.int64)))
"""The best rank that a score of 0 can have."""
