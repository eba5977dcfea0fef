"""The board: one slot a proposal, and the question that is played in it.

A slot whose proposal was rejected is refilled by the shortfall strategy. Slots remember where their
question came from, because only a new question may pay its proposer, count in a rate, or be stored.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable, Sequence

from sspjax.config import ShortfallConfig
from sspjax.types import Group, Proposal, Question, Replayed, Seed, record


class Origin(enum.Enum):
    """Where a slot's question comes from."""

    NEW = "new"
    OUTVOTED = "outvoted"
    """New as well, and rejected for how it was played: from then on it is neither."""
    REPLAYED = "replayed"
    DUMMY = "dummy"
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

    def after(self, proposals: Sequence[Proposal]) -> Board:
        """The board once it is played: new questions that are rejected by now are OUTVOTED."""
        return Board(
            slots=tuple(
                dataclasses.replace(s, origin=Origin.OUTVOTED)
                if s.origin is Origin.NEW and not p.accepted
                else s
                for s, p in zip(self.slots, proposals, strict=True)
            )
        )

    def new(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Those of `groups` whose question is new in this step."""
        return self._of(groups, {Origin.NEW})

    def asked(self, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Those whose question a proposer has asked, in this step or an earlier one."""
        return self._of(groups, {Origin.NEW, Origin.REPLAYED})

    def _of(self, groups: Sequence[Group], origins: set[Origin]) -> tuple[Group, ...]:
        uids = {s.question.uid for s in self.slots if s.question and s.origin in origins}
        return tuple(g for g in groups if g.question.uid in uids)


Shortfall = Callable[
    [Sequence[Proposal], Sequence[Replayed], random.Random, ShortfallConfig], Board
]
"""Proposals, replay store, random stream, settings."""

DUMMY = "Leave the answer empty."
"""What a dummy asks: nothing that its answer could be found by."""


def replay(
    proposals: Sequence[Proposal],
    store: Sequence[Replayed],
    rng: random.Random,
    config: ShortfallConfig,
) -> Board:
    """Rejected slots get stored questions, drawn uniformly without replacement.

    A question is on the board once: one whose text was newly asked in this step is not drawn, and
    slots stay empty where the store has no more. With `duplicates` every slot draws on its own, as
    in SSP's code, so one question can fill many; where none is hard enough, all are drawn from. A
    replayed question is named after its slot, `<slot uid>/replay`, so that it never shares a group
    or a random stream with the question it was.
    """
    vacant = [i for i, p in enumerate(proposals) if not p.accepted]
    if config.duplicates:
        usable = [r for r in store if r.success_rate <= config.max_success] or list(store)
        reused = {i: rng.choice(usable).question for i in vacant if usable}
        return Board(slots=tuple(_slot(p, reused.get(i)) for i, p in enumerate(proposals)))
    asked = {p.question.text for p in proposals if p.question is not None and p.reason is None}
    usable = [
        r.question
        for r in store
        if r.success_rate <= config.max_success and r.question.text not in asked
    ]
    drawn = rng.sample(usable, min(len(vacant), len(usable)))
    reused = dict(zip(vacant, drawn, strict=False))
    return Board(slots=tuple(_slot(p, reused.get(i)) for i, p in enumerate(proposals)))


def drop(
    proposals: Sequence[Proposal],
    store: Sequence[Replayed],
    rng: random.Random,
    config: ShortfallConfig,
) -> Board:
    """Rejected slots stay empty."""
    return Board(slots=tuple(_slot(p, None) for p in proposals))


def dummy(
    proposals: Sequence[Proposal],
    store: Sequence[Replayed],
    rng: random.Random,
    config: ShortfallConfig,
) -> Board:
    """Rejected slots get a question that cannot be answered (SSP, table 5: dummy padding).

    All solvers fail it, so that it keeps the batch full and teaches nothing.
    """
    return Board(slots=tuple(_slot(p, None) if p.accepted else _padded(p) for p in proposals))


SHORTFALL: dict[str, Shortfall] = {
    "replay": replay,
    "resample": drop,
    "dummy": dummy,
    "drop": drop,
}
"""By `shortfall.strategy`: what is done once there are no more tries."""


def substituted(
    proposals: Sequence[Proposal], tried: Sequence[Proposal]
) -> tuple[tuple[Proposal, ...], tuple[Proposal, ...]]:
    """Proposals with rejected ones replaced by the accepted of `tried`, and what has no place.

    The accepted ones take the rejected places in order. What has no place is the proposals they
    replace and the rest of `tried`: played, but neither trained on nor paid (SSP's dynamic
    sampling keeps valid questions only).
    """
    accepted = iter([p for p in tried if p.accepted])
    kept = [p if p.accepted else next(accepted, p) for p in proposals]
    uids = {p.trajectory.uid for p in kept}
    left = [p for p in (*proposals, *tried) if p.trajectory.uid not in uids]
    return tuple(kept), tuple(left)


def _padded(proposal: Proposal) -> Slot:
    seed = proposal.trajectory.prompt.subject
    uid = f"{proposal.trajectory.uid}/dummy"
    answer = seed.answer if isinstance(seed, Seed) and seed.answer else ""
    return Slot(origin=Origin.DUMMY, question=Question(uid=uid, text=DUMMY, answer=answer))


def _slot(proposal: Proposal, reused: Question | None) -> Slot:
    if proposal.accepted:
        return Slot(origin=Origin.NEW, question=proposal.question)
    if reused is None:
        return Slot(origin=Origin.EMPTY, question=None)
    uid = f"{proposal.trajectory.uid}/replay"
    return Slot(origin=Origin.REPLAYED, question=dataclasses.replace(reused, uid=uid))
