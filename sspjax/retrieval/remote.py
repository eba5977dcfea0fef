"""The retriever of a service: the queries of a round over HTTP, from one server or from shards.

Servers are those of `sspjax.retrieval.server`, or any that speaks the interface of Search-R1's and
verl's. What such servers are known to send instead of an answer (a web page with status 200, the
results of another request, made-up passages in the place of missing ones) is found out here: a
query has passages or a failure, never something that looks like passages.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from sspjax.retrieval.client import INDEX_HEADER, Asked, Hit, Results, RetrievalError
from sspjax.retrieval.corpus import is_unicode, split_contents
from sspjax.types import Document, noun

log = logging.getLogger(__name__)

UNKNOWN = "unknown"
IN_FLIGHT = 4
"""Requests that one server is sent at a time."""
PADDING = -1e30
"""Scores of passages that are none: servers fill up with -3.4e38 or NaN."""
AGAIN = frozenset({408, 425, 429})
"""Statuses below 500 that another try may mend."""
REFUSALS = frozenset({400, 413, 422})
"""Statuses that say something is wrong with the queries."""
DENIALS = frozenset({401, 403})


@noun
class Patience:
    """How long answers are waited for."""

    timeout: float = 30.0
    """Seconds of one try."""
    retries: int = 16
    """Further tries after the first."""
    deadline: float = 180.0
    """Seconds of a call, all tries together."""
    first_wait: float = 0.25
    """Seconds before the second try; each later wait is twice as long..."""
    longest_wait: float = 15.0
    """...up to this, and the half of each wait is drawn at random."""
    failures: int = 4
    """Requests to a server that fail for good, one after another, before it is left alone..."""
    rest: float = 15.0
    """...for so many seconds; then requests get one try each until one is answered."""


@noun
class Failure:
    """A query without a result, and why."""

    reason: str


Found = tuple[Hit, ...] | Failure


class _Lost(Exception):
    """No answer, and another try would not change it."""


class _Again(Exception):
    """No answer this time."""

    def __init__(self, reason: str, *, status: int = 0, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.status = status
        self.wait = wait
        """Seconds the server asks for."""


class _Refused(Exception):
    """The server does not take these queries."""


class HttpRetriever:
    """Searches the servers at some URLs. Several are shards of one corpus, in its order: all are
    asked, and their passages merged by (score descending, row ascending).

    A call asks for new queries only, in requests of at most `batch`, a few at a time. A query has a
    result when every shard has answered; it fails alone where a server refuses it alone.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        patience: Patience | None = None,
        batch: int = 64,
        key: str = "",
        remember: int = 1 << 16,
        seed: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key` is sent as `Authorization: Bearer KEY`; `remember`: queries whose results are kept.

        `seed` of the jitter; `sleep` and `clock` in seconds. Contacts nobody yet.
        """
        self._patience = patience or Patience()
        self._batch = batch
        self._clock = clock
        rng = random.Random(seed)
        self._servers = [_Server(url, self._patience, key, rng, sleep, clock) for url in urls]
        self._threads = ThreadPoolExecutor(IN_FLIGHT * len(urls), thread_name_prefix="retrieval")
        self._asked: Asked[tuple[Hit, ...] | None] = Asked(self._find, (), remember=remember)
        self._reason = ""
        self.content: Mapping[str, str] = {"corpus": UNKNOWN, "index": UNKNOWN}

    def connect(self, topk: int) -> None:
        """Learns what the servers search, and asks each one query to see that it answers well.

        Raises RetrievalError with the reason where one does not.
        """
        told = [server.status() for server in self._servers]
        self.content = {
            name: ",".join(one.get(name, UNKNOWN) for one in told) for name in ("corpus", "index")
        }
        for server in self._servers:
            (found,) = server.ask(["history"], topk, self._until())
            if isinstance(found, Failure):
                raise RetrievalError(found.reason)

    def search(self, queries: Sequence[str], topk: int) -> Results:
        return [
            None if hits is None else tuple(hit.document for hit in hits)
            for hits in self.hits(queries, topk)
        ]

    def hits(self, queries: Sequence[str], topk: int) -> list[tuple[Hit, ...] | None]:
        """The same with scores; RetrievalError where no query at all has a result."""
        found = self._asked(queries, topk)
        if found and all(hits is None for hits in found):
            raise RetrievalError(self._reason)
        return found

    def close(self) -> None:
        """Closes the connections, as happens when nobody holds the retriever any more."""
        self._threads.shutdown()
        for server in self._servers:
            server.close()

    def _until(self) -> float:
        return self._clock() + self._patience.deadline

    def _find(self, queries: list[str], topk: int) -> list[tuple[Hit, ...] | None]:
        until = self._until()
        chunks = [queries[i : i + self._batch] for i in range(0, len(queries), self._batch)]
        futures = [
            [self._threads.submit(server.ask, chunk, topk, until) for chunk in chunks]
            for server in self._servers
        ]
        by_server = [[f for future in row for f in future.result()] for row in futures]
        found = [merge(shards, topk) for shards in zip(*by_server, strict=True)]
        reasons = [one.reason for one in found if isinstance(one, Failure)]
        if reasons:
            self._reason = reasons[0]
            log.warning("%d of %d queries have no result: %s", len(reasons), len(found), reasons[0])
        return [None if isinstance(one, Failure) else one for one in found]


def merge(shards: Sequence[Found], topk: int) -> Found:
    """The best of the shards' passages for one query; a failure if any shard has failed."""
    for found in shards:
        if isinstance(found, Failure):
            return found
    if len(shards) == 1:
        return shards[0]
    hits = [hit for found in shards if not isinstance(found, Failure) for hit in found]
    if any(math.isnan(hit.score) for hit in hits):
        return Failure(reason="a shard sends no scores, which merging needs; use one URL")
    # Sorting is stable and shards come in the corpus's order, so equal scores stay in row order.
    ranked = sorted(hits, key=lambda hit: -hit.score)
    best: dict[str, Hit] = {}
    for hit in ranked:
        best.setdefault(hit.document.id, hit)
    return tuple(best.values())[:topk]


class _Server:
    """One URL: tries, waits between them, and a rest for a server that is down."""

    def __init__(
        self,
        url: str,
        patience: Patience,
        key: str,
        rng: random.Random,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self.url = endpoint(url)
        self._patience = patience
        self._rng = rng
        self._sleep = sleep
        self._clock = clock
        self._breaker = Breaker(patience.failures, patience.rest, clock)
        self._index: str | None = None
        self._http = httpx.Client(
            headers={b"Authorization": f"Bearer {key}".encode()} if key else {},
            limits=httpx.Limits(max_connections=IN_FLIGHT + 1),
            trust_env=False,
        )
        self.close = weakref.finalize(self, self._http.close)

    def status(self) -> Mapping[str, str]:
        """Hashes of corpus and index, nothing from a server of another kind."""
        try:
            answer = self._patiently(
                lambda left: self._received("GET", self.url.rpartition("/")[0] + "/status", left),
                self._patience.retries + 1,
                self._clock() + self._patience.deadline,
            )
            told = json.loads(answer.content)
        except _Again as error:
            raise RetrievalError(str(error)) from None
        except (_Lost, _Refused, ValueError):
            return {}
        if not isinstance(told, dict):
            return {}
        hashes = {k: v for k, v in told.items() if k in ("corpus", "index") and isinstance(v, str)}
        self._index = hashes.get("index")
        return hashes

    def ask(
        self, queries: Sequence[str], topk: int, until: float, *, most: int | None = None
    ) -> list[Found]:
        """One result or failure a query, after at most `most` tries (None: those of the patience).

        `until`: clock at which to give up.
        """
        tries = self._breaker.tries(most or self._patience.retries + 1)
        if not tries:
            reason = f"{self.url}: left alone after failures, the last: {self._breaker.reason}"
            return [Failure(reason=reason)] * len(queries)
        try:
            found = self._patiently(lambda left: self._post(queries, topk, left), tries, until)
        except (_Again, _Refused) as error:
            poisoned = isinstance(error, _Refused) or error.status == 500
            if poisoned and len(queries) > 1 and self._clock() < until:
                # One of them is too long, or makes the server fail: the others need not suffer.
                half = len(queries) // 2
                return [
                    *self.ask(queries[:half], topk, until, most=2),
                    *self.ask(queries[half:], topk, until, most=2),
                ]
            if isinstance(error, _Again):
                self._breaker.failed(str(error))
            return [Failure(reason=str(error))] * len(queries)
        except _Lost as error:
            self._breaker.failed(str(error))
            return [Failure(reason=str(error))] * len(queries)
        self._breaker.answered()
        return found

    def _patiently(self, attempt: Callable[[float], Any], tries: int, until: float) -> Any:
        """The first attempt that succeeds; raises the last `_Again` after `tries` or `until`."""
        for number in range(1, tries + 1):
            try:
                return attempt(max(0.001, min(self._patience.timeout, until - self._clock())))
            except _Again as error:
                wait = max(error.wait, self._wait(number))
                if number == tries or self._clock() + wait >= until:
                    raise _Again(f"{error} ({number} tries)", status=error.status) from None
                log.info("%s; trying again in %.1f s", error, wait)
                self._sleep(wait)
        raise AssertionError(tries)

    def _wait(self, number: int) -> float:
        whole = min(self._patience.longest_wait, self._patience.first_wait * 2.0 ** (number - 1))
        return whole * (0.5 + 0.5 * self._rng.random())

    def _post(self, queries: Sequence[str], topk: int, timeout: float) -> list[Found]:
        asking = {"queries": list(queries), "topk": topk, "return_scores": True}
        answer = self._received("POST", self.url, timeout, asking)
        index = answer.headers.get(INDEX_HEADER)
        if self._index and index and index != self._index:
            raise _Lost(
                f"{self.url}: searches index {index[:12]} now, expected {self._index[:12]} as at "
                "the start of the run; serve that one"
            )
        try:
            told = json.loads(answer.content)
        except (ValueError, RecursionError):
            kind = answer.headers.get("Content-Type", "nothing")
            raise _Again(
                f"{self.url}: expected JSON, got status 200 with {kind}: {answer.text[:80]!r}"
            ) from None
        return list(read_answer(told, queries, topk, self.url))

    def _received(
        self, method: str, url: str, timeout: float, content: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        """An answer with status 200; raises what any other means."""
        # ASCII, so that a query with half a surrogate pair can be refused rather than not sent.
        body = json.dumps(content).encode() if content is not None else None
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            answer = self._http.request(method, url, content=body, headers=headers, timeout=timeout)
        except httpx.RequestError as error:
            said = str(error) or type(error).__name__
            raise _Again(f"{url}: {type(error).__name__}: {said}") from None
        status, said = answer.status_code, f"{url}: status {answer.status_code}: {_reason(answer)}"
        if status == 200:
            return answer
        if status in AGAIN or status >= 500:
            raise _Again(said, status=status, wait=self._asked_wait(answer))
        if status in REFUSALS:
            raise _Refused(said)
        if status in DENIALS:
            raise _Lost(f"{said}; set the server's key in SSPJAX_RETRIEVAL_KEY")
        raise _Lost(f"{said}; expected a retrieval service there, see config.retrieval.url")

    def _asked_wait(self, answer: httpx.Response) -> float:
        with contextlib.suppress(ValueError):
            wait = float(answer.headers.get("Retry-After", ""))
            return min(self._patience.longest_wait, wait) if wait > 0 else 0.0
        return 0.0


class Breaker:
    """Lets a server that fails again and again rest. Threads may share it."""

    def __init__(self, failures: int, rest: float, clock: Callable[[], float]) -> None:
        self._allowed = failures
        self._rest = rest
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._until = -math.inf
        self.reason = ""
        """Of the last failure."""

    def tries(self, most: int) -> int:
        """How often a request may be tried now: `most`, none during the rest, once after it."""
        with self._lock:
            if self._failures < self._allowed:
                return most
            return 0 if self._clock() < self._until else 1

    def failed(self, reason: str) -> None:
        with self._lock:
            self.reason = reason
            self._failures += 1
            self._until = self._clock() + self._rest

    def answered(self) -> None:
        with self._lock:
            self._failures = 0


def endpoint(url: str) -> str:
    """Where to POST: the URL itself, or /retrieve at a server that is named without a path."""
    parsed = httpx.URL(url)
    return str(parsed.copy_with(path="/retrieve")) if parsed.path in ("", "/") else str(parsed)


def read_answer(told: Any, queries: Sequence[str], topk: int, where: str) -> Iterator[Found]:
    """Results in the answer of a server: one for each query, each of at most `topk` passages.

    Documents are `{"id", "contents"}`, `{"id", "title", "text"}`, or text alone, with their score
    beside them or without one (NaN here). Raises _Lost for an answer of another shape; a query
    whose passages are padded is a Failure.
    """
    result = told.get("result") if isinstance(told, dict) else None
    if not isinstance(result, list):
        raise _Lost(f'{where}: expected {{"result": [...]}}, got {_short(told)}')
    if len(result) != len(queries):
        raise _Lost(
            f"{where}: expected one list of passages for each of {len(queries)} queries, got "
            f"{len(result)}"
        )
    for number, found in enumerate(result):
        if not isinstance(found, list):
            raise _Lost(
                f"{where}: expected a list of passages for query {number}, got {_short(found)}"
            )
        yield _read_passages(found[:topk], f"{where}: query {queries[number][:60]!r}")


def _read_passages(entries: Sequence[Any], where: str) -> Found:
    hits: list[Hit] = []
    seen: set[str] = set()
    for place, entry in enumerate(entries):
        scored = isinstance(entry, dict) and "document" in entry
        score = entry.get("score", math.nan) if scored else math.nan
        document = _document(entry["document"] if scored else entry)
        if document is None or isinstance(score, bool) or not isinstance(score, int | float):
            raise _Lost(f"{where}: expected a passage and its score, got {_short(entry)}")
        given = scored and "score" in entry
        if document.id in seen or (given and not (math.isfinite(score) and score > PADDING)):
            return Failure(
                reason=f"{where}: passage {document.id!r} at place {place} (score {score}) fills "
                "the place of a missing one; ask for fewer (config.retrieval.topk) or mend the "
                "server"
            )
        seen.add(document.id)
        hits.append(Hit(document=document, score=float(score)))
    return tuple(hits)


def _document(told: Any) -> Document | None:
    fields = {"contents": told} if isinstance(told, str) else told
    if not isinstance(fields, dict):
        return None
    title, text = fields.get("title"), fields.get("text")
    if "contents" in fields:
        contents = fields["contents"]
        if not isinstance(contents, str):
            return None
        title, text = split_contents(contents)
    if not (isinstance(title, str) and isinstance(text, str)):
        return None
    id = fields.get("id")
    if id is None:
        named = f"{title}\n{text}".encode(errors="replace")
        id = f"sha256:{hashlib.sha256(named).hexdigest()[:16]}"
    elif type(id) is int:
        id = str(id)
    if not isinstance(id, str) or not all(map(is_unicode, (id, title, text))):
        return None
    return Document(id=id, title=title, text=text)


def _reason(answer: httpx.Response) -> str:
    """What a server says about a status, on one line."""
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(answer.content)
        if isinstance(told, dict) and "detail" in told:
            return _short(told["detail"])
    return _short(answer.text)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return " ".join(text[:200].split()) or "nothing"
