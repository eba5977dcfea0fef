"""The board: one slot a proposal, and the question that is played in it.

A slot whose proposal was rejected is refilled by the shortfall strategy. Slots remember where their
question came from, because only a new question may pay its proposer, count in a rate, or be stored.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable, Sequence

from sspjax.types import Group, Proposal, Question, Replayed, record


class Origin(enum.Enum):
    """Where a slot's question comes from."""

    NEW = "new"
    REPLAYED = "replayed"
    EMPTY = "empty"


@record
class Slot:
    """One place on the board; the question is None where it is empty."""

    origin: Origin
    question: Question | None


@record
class Board:
    """The slots of a step, aligned with its proposals."""

    slots: tuple[Slot, ...]

    @property
    def questions(self) -> tuple[Question, ...]:
        """What the solvers are asked, in slot order; every uid once."""
        return tuple(s.question for s in self.slots if s.question is not None)

    def count(self, origin: Origin) -> int:
        """Slots of that origin."""
        return sum(s.origin is origin for s in self.slots)

    def new(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Those of `groups` whose question is new in this step."""
        uids = {s.question.uid for s in self.slots if s.question and s.origin is Origin.NEW}
        return tuple(g for g in groups if g.question.uid in uids)


Shortfall = Callable[[Sequence[Proposal], Sequence[Replayed], random.Random, float], Board]
"""Proposals, replay store, random stream, highest success rate of a question worth reusing."""


def replay(
    proposals: Sequence[Proposal],
    store: Sequence[Replayed],
    rng: random.Random,
    max_success: float,
) -> Board:
    """Rejected slots get stored questions, drawn uniformly without replacement.

    A question is on the board once: one whose text was newly asked in this step is not drawn, and
    slots stay empty where the store has no more. (SSP's code draws for each slot on its own, so one
    question can fill many.) A replayed question is named after its slot, `<slot uid>/replay`, so
    that it never shares a group or a random stream with the question it was.
    """
    asked = {p.question.text for p in proposals if p.question is not None and p.reason is None}
    usable = [
        r.question for r in store if r.success_rate <= max_success and r.question.text not in asked
    ]
    vacant = [i for i, p in enumerate(proposals) if not p.accepted]
    drawn = rng.sample(usable, min(len(vacant), len(usable)))
    reused = dict(zip(vacant, drawn, strict=False))
    return Board(slots=tuple(_slot(p, reused.get(i)) for i, p in enumerate(proposals)))


def drop(
    proposals: Sequence[Proposal],
    store: Sequence[Replayed],
    rng: random.Random,
    max_success: float,
) -> Board:
    """Rejected slots stay empty."""
    return Board(slots=tuple(_slot(p, None) for p in proposals))


SHORTFALL: dict[str, Shortfall] = {"replay": replay, "drop": drop}
"""By `shortfall.strategy`."""


def _slot(proposal: Proposal, reused: Question | None) -> Slot:
    if proposal.accepted:
        return Slot(origin=Origin.NEW, question=proposal.question)
    if reused is None:
        return Slot(origin=Origin.EMPTY, question=None)
    uid = f"{proposal.trajectory.uid}/replay"
    return Slot(origin=Origin.REPLAYED, question=dataclasses.replace(reused, uid=uid))
