"""A retriever as a web application: what requests may ask, how they wait, what is told of them.

The interface is that of Search-R1's and verl's retrieval servers. Requests that arrive while a
search runs wait and are then searched together, so nobody waits for company that does not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, StrictBool, StrictInt
from starlette.exceptions import HTTPException as AnyHTTPException

from sspjax import __version__
from sspjax.retrieval.client import INDEX_HEADER, Hit, InProcessRetriever
from sspjax.retrieval.corpus import is_unicode, join_contents

Hits = tuple[Hit, ...]
Searching = Callable[[Sequence[str], int], Sequence[Hits]]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may ask, and how much may wait."""

    topk: int = 3
    """Passages of a query whose request does not say how many."""
    max_topk: int = 100
    max_queries: int = 512
    """Queries of a request."""
    max_query_chars: int = 20_000
    max_body_bytes: int = 8 << 20
    batch: int = 256
    """Queries of a search; a request of more is searched alone."""
    max_waiting: int = 8192
    """Queries that may wait for a search, all requests together."""


class Overloaded(Exception):
    """The queue is full."""


class Batcher:
    """Joins waiting requests into one search at a time. Belongs to one event loop."""

    def __init__(self, search: Searching, *, batch: int, max_waiting: int) -> None:
        self._search = search
        self._batch = batch
        self._max_waiting = max_waiting
        self._requests: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self.waiting = 0
        """Queries in the queue."""
        self.searches = 0

    async def ask(self, queries: Sequence[str], topk: int) -> list[Hits]:
        """One result a query; raises Overloaded, and whatever the search raises."""
        if self.waiting + len(queries) > self._max_waiting:
            raise Overloaded
        request = _Waiting(queries, topk, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self.waiting += len(queries)
        self._arrived.set()
        return await request.answer

    async def run(self) -> None:
        """Searches until it is cancelled."""
        try:
            while True:
                await self._arrived.wait()
                await self._answer(self._next())
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> list[_Waiting]:
        """The oldest request, with those behind it that want as many passages and fit beside it.

        Those that want another number are searched on their own: a result must not depend on who
        asked at the same time, and approximate search finds other candidates for another k.
        """
        taken: list[_Waiting] = []
        count = 0
        for request in list(self._requests):
            alike = not taken or request.topk == taken[0].topk
            if alike and (not taken or count + len(request.queries) <= self._batch):
                taken.append(request)
                count += len(request.queries)
                self._requests.remove(request)
        self.waiting -= count
        if not self._requests:
            self._arrived.clear()
        return taken

    async def _answer(self, requests: Sequence[_Waiting]) -> None:
        queries = [query for request in requests for query in request.queries]
        self.searches += 1
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, self._search, queries, requests[0].topk)
        await asyncio.wait([done])
        error = done.exception()
        if error and len(requests) > 1:
            # One of them is to blame, and the others need not suffer.
            for request in requests:
                await self._answer([request])
            return
        found = iter(() if error else done.result())
        for request in requests:
            if request.answer.done():
                continue  # Whoever asked has gone.
            if error:
                request.answer.set_exception(error)
            else:
                request.answer.set_result([next(found) for _ in request.queries])


@dataclasses.dataclass(frozen=True, eq=False)
class _Waiting:
    queries: Sequence[str]
    topk: int
    answer: asyncio.Future[list[Hits]]


class Meter:
    """Counts and durations of requests, told in Prometheus' text format 0.0.4."""

    SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.queries = 0
        self._within: Counter[float] = Counter()
        self._seconds = 0.0
        self._count = 0

    def observe(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        self._count += 1
        self._seconds += seconds
        self._within.update(bound for bound in self.SECONDS if seconds <= bound)

    def text(self, batcher: Batcher) -> str:
        name = "sspjax_retrieval"
        lines = [
            f"# HELP {name}_requests_total Requests to /retrieve, by status.",
            f"# TYPE {name}_requests_total counter",
            *(
                f'{name}_requests_total{{status="{status}"}} {count}'
                for status, count in sorted(self.statuses.items())
            ),
            f"# HELP {name}_queries_total Queries that were answered.",
            f"# TYPE {name}_queries_total counter",
            f"{name}_queries_total {self.queries}",
            f"# HELP {name}_searches_total Searches, each for all requests that waited.",
            f"# TYPE {name}_searches_total counter",
            f"{name}_searches_total {batcher.searches}",
            f"# HELP {name}_waiting_queries Queries in the queue.",
            f"# TYPE {name}_waiting_queries gauge",
            f"{name}_waiting_queries {batcher.waiting}",
            f"# HELP {name}_request_seconds Time from a request to its answer.",
            f"# TYPE {name}_request_seconds histogram",
            *(
                f'{name}_request_seconds_bucket{{le="{bound}"}} {self._within[bound]}'
                for bound in self.SECONDS
            ),
            f'{name}_request_seconds_bucket{{le="+Inf"}} {self._count}',
            f"{name}_request_seconds_sum {self._seconds:.6f}",
            f"{name}_request_seconds_count {self._count}",
        ]
        return "\n".join(lines) + "\n"


class Asking(BaseModel):
    """The body of POST /retrieve."""

    queries: list[str]
    topk: StrictInt | None = None
    """0 or null: the server's own number."""
    return_scores: StrictBool = False


def application(retriever: InProcessRetriever, limits: Limits, *, key: str = "") -> Application:
    """POST /retrieve, GET /status, GET /metrics. With a `key` all but /status need it, as
    `Authorization: Bearer KEY`.
    """
    batcher = Batcher(retriever.hits, batch=limits.batch, max_waiting=limits.max_waiting)
    meter = Meter()

    @contextlib.asynccontextmanager
    async def searching(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    api = FastAPI(title="sspjax retrieval", version=__version__, lifespan=searching)
    told = {INDEX_HEADER: retriever.content["index"]}

    @api.post("/retrieve")
    async def retrieve(request: Request, asking: Asking) -> Response:
        check_key(request, key)
        check(asking, limits)
        try:
            found = await batcher.ask(asking.queries, asking.topk or limits.topk)
        except Overloaded:
            raise HTTPException(
                503,
                f"{batcher.waiting} queries are waiting already, of at most {limits.max_waiting}; "
                "ask again later",
                {"Retry-After": "1"},
            ) from None
        meter.queries += len(found)
        rows = [[as_json(hit, asking.return_scores) for hit in hits] for hits in found]
        return _json(200, {"result": rows}, told)

    @api.get("/status")
    async def status() -> Response:
        index = retriever.index
        recall = dataclasses.asdict(index.recall) if index.recall else None
        return _json(
            200,
            {
                "status": "ok",
                "version": __version__,
                "passages": len(index),
                **retriever.content,
                "encoder": retriever.encoder.name,
                "kind": index.kind,
                "recall": recall,
                "limits": dataclasses.asdict(limits),
                "waiting": batcher.waiting,
            },
        )

    @api.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_key(request, key)
        return Response(meter.text(batcher), media_type="text/plain; version=0.0.4")

    @api.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # Without the input itself, which may be anything, even text that no UTF-8 can hold.
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _json(422, {"detail": f"{where}: {first['msg']}"})

    @api.exception_handler(AnyHTTPException)
    async def refused(_: Request, error: AnyHTTPException) -> Response:
        return _json(error.status_code, {"detail": error.detail}, error.headers)

    return _Edge(api, limits.max_body_bytes, meter)


def check_key(request: Request, key: str) -> None:
    """Raises 401 unless the request has the key, if there is one."""
    given = request.headers.get("Authorization", "").encode("latin-1")
    if key and not hmac.compare_digest(given, f"Bearer {key}".encode()):
        raise HTTPException(
            401,
            "expected the header Authorization: Bearer KEY with this server's key",
            {"WWW-Authenticate": "Bearer"},
        )


def check(asking: Asking, limits: Limits) -> None:
    """Raises 422 for a request beyond the limits, with what was expected."""
    longest = max(map(len, asking.queries), default=0)
    for what, found, least, most in (
        ("queries", len(asking.queries), 0, limits.max_queries),
        ("topk", asking.topk or 0, 0, limits.max_topk),
        ("characters of a query", longest, 0, limits.max_query_chars),
    ):
        if not least <= found <= most:
            raise HTTPException(422, f"{what}: expected {least} to {most}, got {found}")
    for number, query in enumerate(asking.queries):
        if not is_unicode(query):
            raise HTTPException(422, f"query {number} holds half a surrogate pair; repair the text")


def as_json(hit: Hit, scored: bool) -> dict[str, Any]:
    """A passage as Search-R1's server gives it."""
    document = {"id": hit.document.id, "contents": join_contents(hit.document)}
    return {"document": document, "score": hit.score} if scored else document


def _json(
    status: int, content: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        json.dumps(content, ensure_ascii=False).encode(),
        status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


class _Edge:
    """Around the application: bodies of a bounded size, and the time of every request."""

    def __init__(self, inner: Application, max_body_bytes: int, meter: Meter) -> None:
        self._inner = inner
        self._max = max_body_bytes
        self._meter = meter

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._inner(scope, receive, send)
        began = time.perf_counter()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["path"] == "/retrieve":
                self._meter.observe(message["status"], time.perf_counter() - began)
            await send(message)

        body = await self._body(receive)
        if body is None:
            reason = f"the body is too large; expected at most {self._max} bytes"
            return await _json(413, {"detail": reason}, {"Connection": "close"})(
                scope, receive, timed
            )
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Message:
            return next(messages, None) or await receive()

        return await self._inner(scope, again, timed)

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body, or None as soon as it is too large; what was sent before a disconnect."""
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._max:
                return None
            if not message.get("more_body", False):
                return bytes(body)
