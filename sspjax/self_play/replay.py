"""The replay store: accepted questions kept for slots that have none (SSP, replay buffer).

It holds every text once and takes new questions only, unless `duplicates` asks for the store of
SSP's code, which appends a question again each time it is played. Either survives a restart with
the host state.
"""

from __future__ import annotations

from collections.abc import Sequence

from sspjax.types import Group, Replayed


def remember(
    store: Sequence[Replayed], groups: Sequence[Group], step: int, *, duplicates: bool = False
) -> tuple[Replayed, ...]:
    """The store with the questions of `groups`, newest last.

    `groups` are those newly accepted in `step`; with `duplicates`, all that a proposer ever asked.
    A text that is asked again takes its last answer, evidence and success rate and becomes the
    newest; with `duplicates` it is there twice. A group that is not `settled` is not stored: nobody
    knows how hard its question is.
    """
    played = [
        Replayed(question=group.question, success_rate=group.success_rate, step=step)
        for group in groups
        if group.settled and group.success_rate is not None
    ]
    if duplicates:
        return (*store, *played)
    by_text = {r.question.text: r for r in store}
    for new in played:
        by_text.pop(new.question.text, None)
        by_text[new.question.text] = new
    return tuple(by_text.values())


def after_step(
    store: Sequence[Replayed], step: int, *, clear_every: int, keep: float, first_clear: int = 0
) -> tuple[Replayed, ...]:
    """What is left after the update of `step` (counted from 1).

    Every `clear_every` steps, for the first time after step `first_clear` (0: `clear_every`), only
    the newest share `keep` survives, rounded to whole questions; `clear_every=0` never clears.
    """
    since = step - (first_clear or clear_every)
    if clear_every == 0 or since < 0 or since % clear_every:
        return tuple(store)
    return tuple(store)[len(store) - round(keep * len(store)) :]
