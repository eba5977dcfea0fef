"""The replay store: accepted questions kept for slots that have none (SSP, replay buffer).

Unlike the store of SSP's code, which appends a question again each time it is reused, this one
holds every text once; it takes new questions only, and it survives a restart with the host state.
"""

from __future__ import annotations

from collections.abc import Sequence

from sspjax.types import Group, Replayed


def remember(store: Sequence[Replayed], groups: Sequence[Group], step: int) -> tuple[Replayed, ...]:
    """The store with the questions of `groups`, which are those newly accepted in `step`.

    Newest last. A text that is asked again takes its last answer, evidence and success rate and
    becomes the newest. A group of which nothing was judged is not stored: nobody knows whether its
    question can be solved.
    """
    by_text = {r.question.text: r for r in store}
    for group in groups:
        if group.success_rate is not None:
            by_text.pop(group.question.text, None)
            by_text[group.question.text] = Replayed(
                question=group.question, success_rate=group.success_rate, step=step
            )
    return tuple(by_text.values())


def after_step(
    store: Sequence[Replayed], step: int, *, clear_every: int, keep: float
) -> tuple[Replayed, ...]:
    """What is left after the update of `step` (counted from 1).

    Every `clear_every` steps only the newest share `keep` survives, rounded to whole questions;
    `clear_every=0` never clears.
    """
    if clear_every == 0 or step % clear_every:
        return tuple(store)
    return tuple(store)[len(store) - round(keep * len(store)) :]
