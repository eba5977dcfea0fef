"""What finds a run's passages, as its configuration says."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sspjax.config import RetrievalConfig, urls
from sspjax.retrieval.client import (
    NamedRetriever,
    RetrievalError,
    make_retriever,
    open_retriever,
)
from sspjax.retrieval.corpus import Corpus
from sspjax.retrieval.recording import RecordingRetriever, ReplayRetriever, of_process
from sspjax.retrieval.remote import UNKNOWN, HttpRetriever, Patience

KEY = "SSPJAX_RETRIEVAL_KEY"
"""Environment variable with the servers' key: no secret is written into a run's config."""


def open_source(
    own: RetrievalConfig,
    corpus: Corpus | None,
    *,
    process: int = 0,
    environ: Mapping[str, str] = os.environ,
) -> NamedRetriever:
    """A recording if one is to be replayed, else servers, else the given index of the corpus, else
    exact search of it, made now; recorded if the config says so.

    `corpus` may be None where a recording or servers have the passages. Raises RecordingError,
    RetrievalError, IndexFolderError or EncoderError where it cannot serve this corpus.
    """
    if own.replay:
        retriever = ReplayRetriever(own.replay)
        _expect(corpus, retriever.content, f"config.retrieval.replay={own.replay}")
        return retriever
    retriever = _searching(own, corpus, environ.get(KEY, ""))
    if own.record:
        return RecordingRetriever(retriever, of_process(own.record, process))
    return retriever


def _searching(own: RetrievalConfig, corpus: Corpus | None, key: str) -> NamedRetriever:
    if own.url:
        remote = HttpRetriever(
            urls(own.url),
            patience=Patience(timeout=own.timeout, retries=own.retries, deadline=own.deadline),
            batch=own.batch,
            key=key,
        )
        remote.connect(own.topk)
        _expect(corpus, remote.content, f"config.retrieval.url={own.url}")
        return remote
    if corpus is None:
        raise RetrievalError("config.retrieval.corpus='': expected passages, or servers with them")
    if own.index:
        return open_retriever(corpus, own.index, encoder=own.encoder)
    return make_retriever(corpus, encoder=own.encoder)


def _expect(corpus: Corpus | None, content: Mapping[str, str], where: str) -> None:
    """Refuses passages of another corpus than the run's own, where both are known."""
    found = content.get("corpus", UNKNOWN)
    # Shards have hashes of their own parts.
    if corpus is None or found == UNKNOWN or "," in found or found == corpus.content_hash:
        return
    raise RetrievalError(
        f"{where}: passages of another corpus: expected {corpus.content_hash}, found {found}; name "
        "that corpus in config.retrieval.corpus, or serve this one"
    )
