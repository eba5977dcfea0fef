"""Asks a model what was not asked before, together with the other processes of the run."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence

import jax

from sspjax import processes
from sspjax.judges.chat import Heard, Lost, Request
from sspjax.judges.journal import Journal

log = logging.getLogger(__name__)

Complete = Callable[[Sequence[Request], Heard], Sequence[str | Lost]]
"""One reply a request, in order (`Chat.complete`)."""


@dataclasses.dataclass
class Asked:
    """What became of requests, equal ones counted each time; the same in every process."""

    asked: int = 0
    remembered: int = 0
    """Answered from the journal, or by an equal request."""
    lost: int = 0
    """Without a reply."""
    unreadable: int = 0
    """With a reply that says nothing."""


class Clerk:
    """Gets replies, each request once.

    Args:
      name: what the replies are, for metrics and messages.
      accept: whether a reply says what was asked; one that does not is never remembered.
    """

    def __init__(
        self, name: str, complete: Complete, journal: Journal, accept: Callable[[str], bool]
    ) -> None:
        self.name = name
        self._complete = complete
        self._journal = journal
        self._accept = accept
        self._counts = Asked()

    def replies(self, requests: Sequence[Request]) -> list[str | None]:
        """One reply a request, in order, the same in every process; None where there is none."""
        new = {r.key: r for r in requests if r.key not in self._journal}
        pending = list(new.values())

        def heard(place: int, reply: str) -> None:
            if self._accept(reply):
                self._journal.put(pending[place].key, reply, pending[place].about)

        found = dict(zip(new, together(self._complete, pending, heard), strict=True))
        replies = [
            self._journal[r.key] if r.key in self._journal else _reply(found[r.key])
            for r in requests
        ]
        self._count(replies, len(pending))
        self._tell(list(found.values()))
        return replies

    def take_counts(self) -> dict[str, float]:
        """`perf/<name>_asked` and so on since the last call: what a resumed run need not ask again
        differs, so they are amounts of work.
        """
        counts, self._counts = self._counts, Asked()
        return {f"perf/{self.name}_{k}": float(v) for k, v in dataclasses.asdict(counts).items()}

    def _count(self, replies: Sequence[str | None], sent: int) -> None:
        self._counts.asked += len(replies)
        self._counts.remembered += len(replies) - sent
        self._counts.lost += sum(r is None for r in replies)
        self._counts.unreadable += sum(r is not None and not self._accept(r) for r in replies)

    def _tell(self, found: Sequence[str | Lost]) -> None:
        reasons = collections.Counter(
            reply.reason if isinstance(reply, Lost) else f"an unreadable reply, {reply[:60]!r}"
            for reply in found
            if isinstance(reply, Lost) or not self._accept(reply)
        )
        if reasons:
            most = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
            log.warning("%s: %d of %d requests: %s", self.name, reasons.total(), len(found), most)


def together(
    complete: Complete, requests: Sequence[Request], heard: Heard
) -> tuple[str | Lost, ...]:
    """`complete`, each process for its share; every process gets and hears all replies."""
    if not requests:
        return ()
    mine = range(len(requests))[jax.process_index() :: jax.process_count()]
    own = complete([requests[i] for i in mine], lambda k, reply: heard(mine[k], reply))
    rows = [
        (i, None, reply.reason) if isinstance(reply, Lost) else (i, reply, "")
        for i, reply in zip(mine, own, strict=True)
    ]
    shares = processes.exchange(json.dumps(rows).encode())
    found = sorted((row for share in shares for row in json.loads(share)), key=lambda row: row[0])
    for i, reply, _ in found:
        if reply is not None:
            heard(i, reply)
    return tuple(Lost(reason=why) if reply is None else reply for _, reply, why in found)


def _reply(reply: str | Lost) -> str | None:
    return None if isinstance(reply, Lost) else reply
