"""Gates: what is asked of a question beyond the rules and the reading. Each is off by default.

A weak reader believes false questions nearly as often as true ones, and a proposer that is paid for
questions nobody solves learns to write false ones. Three cheap signs tell most of them apart, none
of which needs to know what is true:

- `grounded`, before the reading: the question names a passage that its proposer was shown.
- `fluency_quantile`, before the reading: the frozen start model, which has learnt questions from
  true ones, finds no token of the question too unlikely.
- `consensus`, after the solvers: nobody was right, and those who searched agree on something else.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from sspjax.config import VerifyConfig
from sspjax.self_play.exact import exact_match, normalise
from sspjax.types import Group, Proposal, Question, Reason, Trajectory

Fluency = Callable[[Sequence[Trajectory]], Sequence[float]]
"""Proposer trajectories that ask to the log-probability of the least likely token of each question,
under the frozen start model, in its proposer's context and at its proposer's temperature."""

_TITLE_CHARS = 3
"""Titles shorter than this ground nothing: "A", or "It", is in most questions by chance."""

_AGREEING = 2
"""Fewer equal answers than this are no agreement."""


def before_reading(
    proposals: Sequence[Proposal], config: VerifyConfig, *, fluency: Fluency, threshold: float
) -> tuple[Proposal, ...]:
    """Accepted proposals through the gates that need no rollout, the cheaper one first.

    `threshold`: the lowest log-probability that passes (`fluency_threshold`). `fluency` is called
    once whenever its gate is on, for the proposals that are left, be it none.
    """
    passed = tuple(proposals)
    if config.grounded:
        passed = tuple(
            dataclasses.replace(p, reason=Reason.NOT_GROUNDED)
            if p.question is not None and p.reason is None and not names_a_passage(p.question)
            else p
            for p in passed
        )
    if config.fluency_quantile > 0:
        asked = [p.trajectory for p in passed if p.accepted]
        least = dict(zip([t.uid for t in asked], fluency(asked), strict=True))
        # A log-probability that is not a number does not pass.
        passed = tuple(
            dataclasses.replace(p, reason=Reason.NOT_FLUENT)
            if p.accepted and not least[p.trajectory.uid] >= threshold
            else p
            for p in passed
        )
    return passed


def names_a_passage(question: Question) -> bool:
    """The question contains the title of a passage its proposer was shown, character for character.

    A title of fewer than three characters names nothing, the empty one included: it would be found
    in most questions by chance.
    """
    titles = [document.title.strip() for document in question.evidence]
    return any(len(title) >= _TITLE_CHARS and title in question.text for title in titles)


def fluency_threshold(demonstrated: Sequence[float], quantile: float) -> float:
    """The quantile (0..1, interpolated linearly) of the demonstrations' least log-probabilities."""
    return float(np.quantile(np.asarray(demonstrated, np.float64), quantile))


def after_solving(proposals: Sequence[Proposal], groups: Sequence[Group]) -> tuple[Proposal, ...]:
    """The consensus gate: accepted proposals whose solvers outvoted them are rejected.

    `groups` are the board's. A replayed question is nobody's proposal and is not gated.
    """
    against = {group.question.uid for group in groups if outvoted(group)}
    return tuple(
        dataclasses.replace(p, reason=Reason.CONSENSUS)
        if p.question is not None and p.reason is None and p.question.uid in against
        else p
        for p in proposals
    )


def outvoted(group: Group) -> bool:
    """No rollout was right, and half of those that searched, two at least, give one other answer.

    Rollouts that were not judged count nowhere. As in the rule filters an empty query is no search.
    Answers are compared normalised; none, or one that normalises to nothing, is no vote, but its
    rollout is among those that searched.
    """
    if not group.judged or any(group.judged):
        return False
    searched = [
        rollout.answer or ""
        for rollout, right in zip(group.rollouts, group.correct, strict=True)
        if right is not None and any(rollout.queries)
    ]
    others = [answer for answer in searched if not exact_match(answer, group.question.answers)]
    votes = Counter(filter(None, map(normalise, others)))
    most = max(votes.values(), default=0)
    return most >= _AGREEING and 2 * most >= len(searched)
