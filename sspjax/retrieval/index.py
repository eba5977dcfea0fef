"""A searchable index of one corpus under one encoder: built, saved to a folder, loaded, searched.

Sparse vectors and corpora below `EXACT_BELOW` passages are searched exactly, larger dense ones by
ScaNN's asymmetric hashing. Whatever finds the candidates, their scores are computed again from the
stored vectors by one exact rule (see `vectors`), so every searcher returns the same rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from sspjax.errors import UserError
from sspjax.retrieval.encoder import Encoder
from sspjax.retrieval.folders import new_folder
from sspjax.retrieval.jax_search import JaxSearch
from sspjax.retrieval.scann_search import HASHED, ScannSearch, scann_installed
from sspjax.retrieval.vectors import (
    MISSING,
    DenseVectors,
    SparseVectors,
    VectorError,
    Vectors,
    checked_queries,
    from_ranks,
    gather,
    keep_best,
    load_vectors,
)
from sspjax.types import noun, record

log = logging.getLogger(__name__)

FORMAT = 1
EXACT_BELOW = 20_000
"""Dense corpora of fewer passages are scanned in full, which is as fast there."""
MORE = 8
"""Candidates asked for beyond k, so that rounding seldom leaves the k-th place open."""

Kind = Literal["exact", "hashed"]
PARAMETERS: Mapping[Kind, Mapping[str, Any]] = {"exact": {}, "hashed": HASHED}


class IndexFolderError(UserError, ValueError):
    """An index folder that cannot be written, is damaged, or belongs to something else."""


class Search(Protocol):
    """Finds candidates among dense vectors; their scores are only as good as f32 sums are."""

    @property
    def exact(self) -> bool:
        """It scores every passage in full, so nothing better than its last candidate is left."""
        ...

    def candidates(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows i32 and scores f32, both [queries, count], best first; -1 and -inf where missing."""
        ...

    def save(self, folder: Path) -> None:
        """Writes what cannot be made again from the vectors."""
        ...


@record
class Refined:
    """A search whose candidates are ranked by the exact rule."""

    vectors: DenseVectors
    search: Search

    def best(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Ranks i64[queries, k], best first; `queries` f32 on the grid."""
        rows, scores = self.search.candidates(queries, k + MORE)
        ranks = keep_best(self.vectors.rank(queries, rows), k)
        if self.search.exact:
            # Passages left out score at most the last candidate's score, give or take the rounding
            # of an f32 sum. Where that reaches the k-th result (equal vectors), scan all of them.
            rounding = np.float32((self.vectors.shape[1] + 8) * 2.0**-24)
            _, kept = from_ranks(ranks)
            left_out = scores[:, -1]
            undecided = (left_out > -np.inf) & (left_out + rounding >= kept[:, -1])
            if undecided.any():
                ranks[undecided] = self.vectors.best(queries[undecided], k)
        return ranks


@noun
class Recall:
    """Share of the exact top k that an index returned, over a number of queries."""

    share: float
    k: int
    queries: int


@record
class Index:
    """One corpus under one encoder, ready to search from any thread."""

    vectors: Vectors
    finder: SparseVectors | Refined
    kind: Kind
    corpus: str
    """Content hash of the corpus."""
    encoder: Mapping[str, Any]
    """Configuration of the encoder that made the vectors."""
    hash: str
    """64 hex digits: changes with corpus, encoder, parameters and, in a folder, any file."""
    recall: Recall | None = None
    """What was measured when it was built."""

    def __len__(self) -> int:
        return self.vectors.shape[0]

    @property
    def dimensions(self) -> int:
        return self.vectors.shape[1]

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best passages of each query f32[queries, dimensions], rows of length 1 (or 0).

        Returns rows i32[queries, k] and scores f32[queries, k], ordered by (score descending, row
        ascending); -1 and -inf where there is no result: beyond the last passage, and everywhere
        for a query that is not finite. Raises VectorError for queries of another shape or type,
        ValueError for k below 1.
        """
        return _search(self.finder, queries, k, self.dimensions)

    def search_exactly(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The same by a full scan in float64: what recall is measured against."""
        return _search(self.vectors, queries, k, self.dimensions)

    def save(self, folder: str | Path, encoder: Encoder) -> Index:
        """Writes index and encoder to a new folder, whole or not at all; returns what is there.

        The folder holds meta.json, encoder.json with the encoder's state, and the vectors. It is
        written under a temporary name beside its own and then renamed. Raises IndexFolderError
        when the folder exists, cannot be written, or `encoder` did not make the vectors.
        """
        folder = Path(folder)
        _expect(folder, "encoder", self.encoder, encoder.config())
        with new_folder(folder, IndexFolderError) as partial:
            encoder.save(partial)
            self.vectors.save(partial)
            if isinstance(self.finder, Refined):
                self.finder.search.save(partial / "scann")
            content = {**_content(self.kind, self.corpus, self.encoder), "files": _files(partial)}
            meta = {
                "hash": _hash(content),
                **content,
                "passages": len(self),
                "dimensions": self.dimensions,
                "recall": dataclasses.asdict(self.recall) if self.recall else None,
            }
            (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        return dataclasses.replace(self, hash=meta["hash"])


def build_index(
    stretches: Iterable[np.ndarray],
    *,
    corpus: str,
    encoder: Mapping[str, Any],
    kind: Kind | None = None,
    threads: int = 0,
) -> Index:
    """Indexes the vectors f32[m, dimensions] of a corpus, given in row order.

    `corpus` is its content hash, `encoder` the configuration of the encoder that made the vectors.
    `kind` None chooses by size; `threads` 0 uses all the process may. Raises VectorError for
    vectors that cannot be searched, IndexFolderError for a hashed index without ScaNN.
    """
    vectors = gather(stretches)
    if kind is None:
        small = isinstance(vectors, SparseVectors) or vectors.shape[0] < EXACT_BELOW
        kind = "exact" if small or not scann_installed() else "hashed"
        if not small and kind == "exact":
            log.warning(
                "ScaNN is not installed: %d passages are searched exactly, which is slow; "
                "`pip install scann` (Linux) and build again",
                vectors.shape[0],
            )
    if isinstance(vectors, SparseVectors):
        if kind == "hashed":
            raise VectorError("sparse vectors are searched exactly; build with kind=exact")
        finder = vectors
    else:
        if kind == "hashed":
            _need_scann("a hashed index")
        finder = Refined(vectors=vectors, search=_dense_search(vectors, kind, threads))
    return Index(
        vectors=vectors,
        finder=finder,
        kind=kind,
        corpus=corpus,
        encoder=encoder,
        hash=_hash(_content(kind, corpus, encoder)),
    )


def load_index(
    folder: str | Path,
    *,
    corpus: str,
    encoder: Mapping[str, Any],
    threads: int = 0,
    verify: bool = True,
) -> Index:
    """The index in a folder, provided it is this corpus's under this encoder.

    `verify` compares every file with its recorded hash (about a second for each GB); sizes are
    compared in any case. Raises IndexFolderError, whose message says what was expected, what was
    found, and what to do.
    """
    folder = Path(folder)
    meta = _read_meta(folder)
    _expect(folder, "corpus", corpus, meta["corpus"])
    _expect(folder, "encoder", encoder, meta["encoder"])
    found = _files(folder, verify=verify)
    for name, recorded in meta["files"].items():
        wanted = recorded if verify else {"bytes": recorded["bytes"]}
        if found.get(name) != wanted:
            raise IndexFolderError(
                f"{folder / name}: expected {wanted}, found {found.get(name, 'no file')}; "
                "the folder is damaged: copy or build it again"
            )
    kind, passages = meta["kind"], meta["passages"]
    vectors = load_vectors(folder, passages=passages)
    if isinstance(vectors, SparseVectors):
        finder = vectors
    elif kind == "hashed":
        _need_scann(f"{folder}: a hashed index")
        search = ScannSearch.load(folder / "scann", passages=passages, threads=threads)
        finder = Refined(vectors=vectors, search=search)
    else:
        finder = Refined(vectors=vectors, search=_dense_search(vectors, kind, threads))
    return Index(
        vectors=vectors,
        finder=finder,
        kind=kind,
        corpus=corpus,
        encoder=meta["encoder"],
        hash=meta["hash"],
        recall=Recall(**meta["recall"]) if meta["recall"] else None,
    )


def measure_recall(index: Index, queries: Iterable[np.ndarray], *, k: int = 3) -> Recall:
    """Compares the index with exact search on query vectors f32[m, dimensions].

    Only results that exact search has count; queries without any count as fully recalled.
    """
    found, wanted, count = 0, 0, 0
    for some in queries:
        exact, _ = index.search_exactly(some, k)
        rows, _ = index.search(some, k)
        hits = (exact[:, :, None] == rows[:, None, :]).any(axis=2)
        found += int(hits[exact >= 0].sum())
        wanted += int((exact >= 0).sum())
        count += len(some)
    return Recall(share=found / wanted if wanted else 1.0, k=k, queries=count)


def _search(
    finder: Vectors | Refined, queries: np.ndarray, k: int, dimensions: int
) -> tuple[np.ndarray, np.ndarray]:
    if k < 1:
        raise ValueError(f"k={k}: expected at least 1")
    queries, finite = checked_queries(queries, dimensions)
    ranks = np.full((len(queries), k), MISSING)
    if finite.any():
        ranks[finite] = finder.best(queries[finite], k)
    return from_ranks(ranks)


def _dense_search(vectors: DenseVectors, kind: Kind, threads: int) -> Search:
    if not scann_installed():
        return JaxSearch(vectors.array)
    return ScannSearch.build(vectors.array, exact=kind == "exact", threads=threads)


def _need_scann(what: str) -> None:
    if not scann_installed():
        raise IndexFolderError(
            f"{what} needs ScaNN, which is not installed; `pip install scann` (Linux), or build an "
            "exact index"
        )


# Folders ------------------------------------------------------------------------------------------


def _content(kind: Kind, corpus: str, encoder: Mapping[str, Any]) -> dict[str, Any]:
    """What an index is made from."""
    return {
        "format": FORMAT,
        "corpus": corpus,
        "encoder": dict(encoder),
        "metric": "dot_product",
        "kind": kind,
        "parameters": dict(PARAMETERS[kind]),
    }


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _files(folder: Path, *, verify: bool = True) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 (where asked for) of every file but meta.json, by relative path."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != "meta.json":
            files[name] = {"bytes": path.stat().st_size}
            if verify:
                with open(path, "rb") as file:
                    files[name]["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return files


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError:
        raise IndexFolderError(
            f"{path}: no such file; expected a folder made by `python -m retrieval_index.build`"
        ) from None
    except (OSError, ValueError) as error:
        raise IndexFolderError(f"{path}: cannot be read ({error}); build the index again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise IndexFolderError(
            f"{path}: expected format {FORMAT}, found {found}; build the index with this version"
        )
    missing = sorted(_META - meta.keys())
    if missing:
        raise IndexFolderError(f"{path}: {', '.join(missing)} missing; build the index again")
    return meta


_META = {"hash", "corpus", "encoder", "kind", "files", "passages", "dimensions", "recall"}


def _expect(folder: Path, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise IndexFolderError(
            f"{folder}: the index of another {what}: expected {expected}, found {found}; "
            f"build an index of this {what} or point to the {what} it was built from"
        )
