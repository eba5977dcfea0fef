"""Retrievers: queries in, passages out, behind one protocol wherever the index lives."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from sspjax.errors import UserError
from sspjax.retrieval.corpus import Corpus
from sspjax.retrieval.encoder import Encoder, encode_corpus
from sspjax.retrieval.encoders import encoder_kind, load_encoder, short_name
from sspjax.retrieval.index import Index, IndexFolderError, build_index, load_index
from sspjax.types import Document, noun

INDEX_HEADER = "X-Index"
"""With which a server says what index an answer is from."""

Results = list[tuple[Document, ...] | None]
"""One entry a query, in order. A tuple holds the passages, best first, and is empty where nothing
matches; None means that this query's retrieval failed, after whatever retries there were. Never an
error text, and never an empty tuple for a failure: agents must not learn from either."""


class RetrievalError(UserError, RuntimeError):
    """The retriever cannot serve at all: nothing that was asked has a result."""


class Retriever(Protocol):
    """Finds passages. Calls are pure reads: repeating one is safe, and threads may share one."""

    def search(self, queries: Sequence[str], topk: int) -> Results:
        """At most `topk` passages for each query; RetrievalError when none can be served."""
        ...


class NamedRetriever(Retriever, Protocol):
    """One that knows what it searches, so that a run can tell when that has changed."""

    @property
    def content(self) -> Mapping[str, str]:
        """Hashes of `corpus` and `index`; "unknown" where nobody says."""
        ...


@noun
class Hit:
    """A passage with its score (the cosine of query and passage)."""

    document: Document
    score: float


class InProcessRetriever:
    """Searches an index in this process: one encoder call and one index call for a batch.

    White space around and within queries is evened out, repeated queries are searched once, and
    recent results are kept. Passages that score 0 or less have nothing in common with the query
    and are left out; so an empty query, or one of unknown words, finds nothing.
    """

    def __init__(
        self, corpus: Corpus, encoder: Encoder, index: Index, *, remember: int = 1 << 16
    ) -> None:
        """Raises IndexFolderError unless the index is this corpus's under this encoder.

        `remember`: queries whose results are kept; forgetting them costs time, not results.
        """
        for what, expected, found in (
            ("corpus", corpus.content_hash, index.corpus),
            ("encoder", encoder.config(), index.encoder),
        ):
            if expected != found:
                raise IndexFolderError(
                    f"the index of another {what}: expected {expected}, found {found}; "
                    f"build the index from this {what}"
                )
        self.corpus = corpus
        self.encoder = encoder
        self.index = index
        self._asked: Asked[tuple[Hit, ...]] = Asked(self._find, (), remember=remember)

    @property
    def content(self) -> Mapping[str, str]:
        return {"corpus": self.corpus.content_hash, "index": self.index.hash}

    def search(self, queries: Sequence[str], topk: int) -> Results:
        return [tuple(hit.document for hit in hits) for hits in self.hits(queries, topk)]

    def hits(self, queries: Sequence[str], topk: int) -> list[tuple[Hit, ...]]:
        """The same with scores, best first; ValueError for topk below 1."""
        return self._asked(queries, topk)

    def _find(self, queries: list[str], topk: int) -> list[tuple[Hit, ...]]:
        rows, scores = self.index.search(self.encoder.encode_queries(queries), topk)
        return [
            tuple(
                Hit(document=self.corpus.document(row), score=score)
                for row, score in zip(*ranked, strict=True)
                if score > 0
            )
            for ranked in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


def open_retriever(
    corpus: Corpus,
    folder: str | Path,
    *,
    encoder: str | None,
    threads: int = 0,
    remember: int = 1 << 16,
) -> InProcessRetriever:
    """Searches the index in a folder; `encoder` is the name the run expects it to have, if any.

    Raises IndexFolderError or EncoderError when the folder is damaged or belongs to another corpus
    or encoder.
    """
    loaded = load_encoder(folder)
    if encoder is not None and loaded.name != short_name(encoder):
        raise IndexFolderError(
            f"{folder}: expected an index under encoder {encoder}, found {loaded.name}; set "
            f"retrieval.encoder={loaded.name} or build the index with --encoder={encoder}"
        )
    index = load_index(folder, corpus=corpus.content_hash, encoder=loaded.config(), threads=threads)
    return InProcessRetriever(corpus, loaded, index, remember=remember)


def make_retriever(corpus: Corpus, *, encoder: str, threads: int = 0) -> InProcessRetriever:
    """Encodes the corpus and searches it exactly, in memory: for corpora that fit a start-up."""
    fitted = encoder_kind(encoder).fit(corpus)
    index = build_index(
        encode_corpus(fitted, corpus),
        corpus=corpus.content_hash,
        encoder=fitted.config(),
        kind="exact",
        threads=threads,
    )
    return InProcessRetriever(corpus, fitted, index)


Found = TypeVar("Found")


class Asked(Generic[Found]):
    """Asks for no query twice: not for one that only differs in white space, not within a call, and
    not while its result is among the most recent ones. Threads may share it.
    """

    def __init__(
        self, find: Callable[[list[str], int], Sequence[Found]], empty: Found, *, remember: int
    ) -> None:
        """`find` gives one result for each of some queries, None for a failure, which is not kept.
        `empty` is the result of an empty query; `remember` counts queries.
        """
        self._find = find
        self._empty = empty
        self._remember = remember
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[str, int], Found] = OrderedDict()

    def __call__(self, queries: Sequence[str], topk: int) -> list[Found]:
        """One result a query, in order; ValueError for topk below 1."""
        if topk < 1:
            raise ValueError(f"topk={topk}: expected at least 1")
        wanted = [evened(query) for query in queries]
        known = {"": self._empty} | self._remembered(wanted, topk)
        new = [query for query in dict.fromkeys(wanted) if query not in known]
        if new:
            found = dict(zip(new, self._find(new, topk), strict=True))
            self._keep(found, topk)
            known |= found
        return [known[query] for query in wanted]

    def _remembered(self, queries: Sequence[str], topk: int) -> dict[str, Found]:
        with self._lock:
            found = {}
            for query in queries:
                if (query, topk) in self._recent:
                    self._recent.move_to_end((query, topk))
                    found[query] = self._recent[query, topk]
            return found

    def _keep(self, results: dict[str, Found], topk: int) -> None:
        with self._lock:
            for query, result in results.items():
                if result is not None:
                    self._recent[query, topk] = result
                    self._recent.move_to_end((query, topk))
            while len(self._recent) > self._remember:
                self._recent.popitem(last=False)


def evened(query: str) -> str:
    """The query with one space for every stretch of white space, and none around it."""
    return " ".join(query.split())
