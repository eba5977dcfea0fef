"""Builds an index folder from a corpus and measures its recall.

python -m retrieval_index.build --corpus=corpus.jsonl.gz --encoder=tfidf --out=INDEX
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import logging
import random
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sspjax.errors import UserError
from sspjax.retrieval.corpus import Corpus
from sspjax.retrieval.encoder import Encoder, encode_corpus
from sspjax.retrieval.encoders import ENCODERS, encoder_kind
from sspjax.retrieval.index import IndexFolderError, build_index, measure_recall
from sspjax.retrieval.store import open_corpus

log = logging.getLogger("retrieval_index.build")

RECALL_AT = 3
RECALL_QUERIES = 1000
RECALL_WARNING = 0.95
QUERIES_PER_CALL = 64


class QueriesError(UserError, ValueError):
    """A file of queries that cannot be read."""


def build(
    *, corpus_path: Path, encoder_name: str, out: Path, queries_path: Path | None, threads: int = 0
) -> None:
    """Reads, encodes, indexes, measures and saves; logs the time of each and the size."""
    kind = encoder_kind(encoder_name)
    if out.exists():
        raise IndexFolderError(f"{out}: exists already; remove it or choose another name")
    queries = None if queries_path is None else read_queries(queries_path)

    began = time.perf_counter()
    corpus = open_corpus(corpus_path)
    log.info("read %d passages in %.1f s", len(corpus), time.perf_counter() - began)

    began = time.perf_counter()
    encoder = kind.fit(corpus)
    index = build_index(
        encode_corpus(encoder, corpus),
        corpus=corpus.content_hash,
        encoder=encoder.config(),
        threads=threads,
    )
    log.info("built the %s index in %.1f s", index.kind, time.perf_counter() - began)

    began = time.perf_counter()
    asked = draw(titles(corpus) if queries is None else queries)
    recall = measure_recall(index, _encoded(encoder, asked), k=RECALL_AT)
    log.info(
        "recall@%d against exact search: %.4f over %d queries, measured in %.1f s",
        recall.k,
        recall.share,
        recall.queries,
        time.perf_counter() - began,
    )
    if recall.share < RECALL_WARNING:
        log.warning(
            "recall@%d %.4f is below %.2f: agents will miss passages that exact search finds",
            recall.k,
            recall.share,
            RECALL_WARNING,
        )

    saved = dataclasses.replace(index, recall=recall).save(out, encoder)
    log.info("wrote %s: %.1f MB, hash %s", out, _megabytes(out), saved.hash)


def read_queries(path: Path) -> list[str]:
    """Queries from a text file, one a line, or from JSON Lines with `question` or `query`.

    Names that end in .jsonl are JSON Lines, and .gz may follow. Raises QueriesError.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise QueriesError(f"{path}: cannot be read ({error})") from None
    if ".jsonl" in path.suffixes[-2:]:
        lines = [_question(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    queries = [line for line in lines if line]
    if not queries:
        raise QueriesError(f"{path}: no queries; expected one a line")
    return queries


def titles(corpus: Corpus) -> list[str]:
    """What there is to ask without queries: every different title, or the passages' first words."""
    different = list(dict.fromkeys(document.title for document in corpus if document.title))
    return different or [" ".join(document.text.split()[:10]) for document in corpus]


def draw(queries: Sequence[str]) -> list[str]:
    """At most RECALL_QUERIES of them, the same ones each time."""
    return random.Random(0).sample(queries, min(len(queries), RECALL_QUERIES))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0, or 2 after one line on standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m retrieval_index.build",
        description="Build an index folder from a corpus and measure its recall.",
    )
    parser.add_argument(
        "--corpus", type=Path, required=True, help="passages, .jsonl or .jsonl.gz, or a store"
    )
    parser.add_argument(
        "--encoder", required=True, help=f"one of: {', '.join(ENCODERS)}, or a folder"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--queries", type=Path, help="queries to measure recall with (default: titles of passages)"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of ScaNN (default: all the process may use)"
    )
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        build(
            corpus_path=chosen.corpus,
            encoder_name=chosen.encoder,
            out=chosen.out,
            queries_path=chosen.queries,
            threads=chosen.threads,
        )
    except UserError as error:
        log.error("error: %s", error)
        return 2
    return 0


def _encoded(encoder: Encoder, queries: Sequence[str]) -> Iterator[np.ndarray]:
    for start in range(0, len(queries), QUERIES_PER_CALL):
        yield encoder.encode_queries(queries[start : start + QUERIES_PER_CALL])


def _question(line: str, where: str) -> str:
    if not line:
        return ""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise QueriesError(f"{where}: not JSON ({error})") from None
    fields = row if isinstance(row, dict) else {}
    query = fields.get("question", fields.get("query"))
    if not isinstance(query, str):
        raise QueriesError(
            f"{where}: expected an object with a question or a query, a string; got {line:.60}"
        )
    return query.strip()


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    sys.exit(main())
