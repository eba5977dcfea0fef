"""A language model behind an OpenAI-compatible chat endpoint.

Whatever goes wrong on the way is one lost request with a reason, after as many tries as are
allowed: nothing here raises because of what a service does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import email.utils
import hashlib
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from sspjax.types import Message, noun

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Longest pause between two tries of one request, in seconds, that is our own choice."""

OBEDIENCE = 120.0
"""Longest pause that a service may ask for; a request that should wait longer is lost."""

RETRIED = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses that may pass. Any other but 200 will not: wrong address, wrong key, wrong request."""

EXCERPT = 200
"""Characters of a refusal that are told."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One question to the model."""

    body: bytes
    """JSON in ASCII, as it is sent."""
    about: Mapping[str, Any]
    """What it is about, for people who read the journal."""

    @property
    def key(self) -> str:
        """64 hex digits that change with anything the model is told."""
        return hashlib.sha256(self.body).hexdigest()


@noun
class Lost:
    """There was no reply."""

    reason: str


Heard = Callable[[int, str], None]
"""Called with (place of the request, reply) as replies arrive."""


def chat_request(
    messages: Sequence[Message],
    *,
    model: str,
    temperature: float,
    max_tokens: int,
    about: Mapping[str, Any],
    seed: int | None = None,
) -> Request:
    """A request for one completion; characters that no encoding has become question marks."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": m.author, "content": sendable(m.content)} for m in messages],
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    if seed is not None:
        fields["seed"] = seed
    return Request(body=json.dumps(fields).encode("ascii"), about=about)


def sendable(text: str) -> str:
    """`text` without halves of surrogate pairs, which JSON files may hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def said(reply: str) -> str:
    """What a reply says after the model has thought aloud."""
    return reply.rpartition("</think>")[2].strip()


class _NoReply(Exception):
    """A request is lost."""


class Chat:
    """Sends requests; holds settings only, and opens its connections anew for every call.

    Args:
      url: the service, up to and without `/chat/completions`.
      key: sent as a bearer token where it is not empty; never logged.
      concurrency: requests in flight.
      timeout: seconds a try may take from the first byte sent to the last received.
      tries: of one request.
      backoff: seconds before the second try; doubled for each further one, up to `PATIENCE`, and
        shortened by up to a half at random, so that not all come back at one moment.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        concurrency: int = 32,
        timeout: float = 30.0,
        tries: int = 6,
        backoff: float = 1.0,
    ) -> None:
        self._endpoint = f"{url.rstrip('/')}/chat/completions"
        self._key = key
        self._concurrency = concurrency
        self._timeout = timeout
        self._tries = tries
        self._backoff = backoff

    def complete(self, requests: Sequence[Request], heard: Heard) -> list[str | Lost]:
        """One reply a request, in order.

        After `concurrency` requests in a row (8 at least) were lost, the rest is not sent: the
        service is down, and waiting for every request would take hours.
        """
        return asyncio.run(self._complete(requests, heard)) if requests else []

    async def _complete(self, requests: Sequence[Request], heard: Heard) -> list[str | Lost]:
        found: dict[int, str | Lost] = {}
        queue = iter(enumerate(requests))
        outage = _Outage(max(self._concurrency, 8))

        async def work(client: httpx.AsyncClient) -> None:
            for place, request in queue:
                if outage.over:
                    found[place] = Lost(reason="not sent, the service seems to be down")
                    continue
                try:
                    reply = await self._one(client, request.body, outage)
                except _NoReply as error:
                    outage.lost_in_a_row += 1
                    found[place] = Lost(reason=str(error))
                else:
                    outage.lost_in_a_row = 0
                    found[place] = reply
                    heard(place, reply)

        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        limits = httpx.Limits(max_connections=self._concurrency)
        async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
            workers = min(self._concurrency, len(requests))
            await asyncio.gather(*(work(client) for _ in range(workers)))
        return [found[place] for place in range(len(requests))]

    async def _one(self, client: httpx.AsyncClient, body: bytes, outage: _Outage) -> str:
        trouble = ""
        for attempt in range(self._tries):
            asked = 0.0
            try:
                # The client's own timeouts start again with every byte.
                async with asyncio.timeout(self._timeout):
                    response = await client.post(self._endpoint, content=body)
            except TimeoutError:
                trouble = f"no reply within {self._timeout:g} s"
            except httpx.RequestError as error:
                trouble = " ".join(f"{type(error).__name__}: {error}".split())
            else:
                if response.status_code == 200:
                    reply = completion(response.content)
                    if reply is not None:
                        return reply
                    trouble = "a body that is no chat completion"
                else:
                    trouble = self._refusal(response)
                    if response.status_code not in RETRIED:
                        raise _NoReply(trouble)
                    asked = retry_after(
                        response.headers.get("Retry-After", ""),
                        datetime.datetime.now(datetime.UTC),
                    )
                    if asked > OBEDIENCE:
                        raise _NoReply(f"{trouble}, and to be asked again in {asked:.0f} s only")
            if attempt + 1 < self._tries:
                outage.tell(self._endpoint, trouble)
                await asyncio.sleep(max(asked, pause(attempt, self._backoff, random.random())))
        raise _NoReply(trouble)

    def _refusal(self, response: httpx.Response) -> str:
        text = response.content[: 4 * EXCERPT].decode("utf-8", "replace")
        if self._key:
            text = text.replace(self._key, "***")
        words = " ".join(text.split())[:EXCERPT]
        return f"HTTP {response.status_code}{f': {words}' if words else ''}"


@dataclasses.dataclass
class _Outage:
    """What the workers of one call know of the service together."""

    limit: int
    lost_in_a_row: int = 0
    told: bool = False

    @property
    def over(self) -> bool:
        return self.lost_in_a_row >= self.limit

    def tell(self, endpoint: str, trouble: str) -> None:
        """Once a call: what takes so long."""
        if not self.told:
            log.warning("%s: %s; trying again", endpoint, trouble)
            self.told = True


def completion(body: bytes) -> str | None:
    """The text of the first choice; None where this is no chat completion."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return text
    return None


def pause(attempt: int, backoff: float, chance: float) -> float:
    """Seconds after try `attempt` (from 0), for a `chance` drawn from 0..1."""
    return min(PATIENCE, backoff * 2**attempt) * (1 - chance / 2)


def retry_after(header: str, today: datetime.datetime) -> float:
    """Seconds that a Retry-After header asks for, a number or a date; 0 for anything else."""
    text = header.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return max(0.0, (date - today).total_seconds())
