"""Serves an index over HTTP, to runs of this package, of Search-R1 and of verl.

    python -m sspjax.retrieval.server --index=INDEX --corpus=corpus.jsonl.gz [--port=8000]

`POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}` answers `{"result": ...}`: for
each query a list of `{"document": {"id", "contents"}, "score"}`, or of documents alone without
scores. `GET /status` says what is searched, `GET /metrics` how it goes (Prometheus). With
SSPJAX_RETRIEVAL_KEY in the environment, requests need `Authorization: Bearer KEY`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import os
import socket
from collections.abc import Sequence

from sspjax.command_line import parser, run
from sspjax.errors import UserError
from sspjax.retrieval.client import open_retriever
from sspjax.retrieval.source import KEY
from sspjax.retrieval.store import open_corpus

log = logging.getLogger("sspjax.retrieval.server")

REMEMBER = 4096
"""Queries whose results are kept: enough for groups that ask the same, and little memory. Clients
keep more."""
KEEP_ALIVE_SECONDS = 75
"""A connection may rest as long as a decode call between two searches takes."""


class ServerError(UserError, RuntimeError):
    """A server that cannot start."""


def main(argv: Sequence[str]) -> None:
    for name in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ServerError(f"the server needs {name}: pip install 'sspjax[serve]'")
    import uvicorn

    from sspjax.retrieval.service import Limits, application

    options = _arguments(Limits()).parse_args(argv)
    names = [field.name for field in dataclasses.fields(Limits)]
    limits = Limits(**{name: vars(options)[name] for name in names})
    retriever = open_retriever(
        open_corpus(options.corpus),
        options.index,
        encoder=None,
        threads=options.threads,
        remember=REMEMBER,
    )
    listening = listen(options.host, options.port)
    log.info(
        "%d passages under %s, index %s, at http://%s:%d/retrieve",
        len(retriever.index),
        retriever.encoder.name,
        retriever.index.hash[:12],
        *listening.getsockname()[:2],
    )
    config = uvicorn.Config(
        application(retriever, limits, key=os.environ.get(KEY, "")),
        http="h11",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket (port 0: any free one); ServerError where there can be none."""
    if not 0 <= port < 1 << 16:
        raise ServerError(f"--port={port}: expected 0 to 65535; choose another")
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise ServerError(
            f"--host={host} --port={port}: cannot listen there ({error}); choose another"
        ) from None


def _arguments(limits) -> argparse.ArgumentParser:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--index", required=True, help="folder of retrieval_index.build")
    arguments.add_argument("--corpus", required=True, help="its passages: a file or a store")
    arguments.add_argument("--host", default="127.0.0.1", help="address (default %(default)s)")
    arguments.add_argument("--port", type=int, default=8000, help="port (default %(default)s)")
    arguments.add_argument("--threads", type=int, default=0, help="of ScaNN (default: all)")
    for name, value in dataclasses.asdict(limits).items():
        arguments.add_argument(
            f"--{name.replace('_', '-')}",
            type=_positive,
            default=value,
            help=f"{HELP[name]} (default %(default)s)",
        )
    return arguments


HELP = {
    "topk": "passages, where a request does not say how many",
    "max_topk": "most passages of a query",
    "max_queries": "most queries of a request",
    "max_query_chars": "longest query",
    "max_body_bytes": "largest body",
    "batch": "most queries of a search",
    "max_waiting": "most queries that wait, before 503",
}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


if __name__ == "__main__":
    run(main)
