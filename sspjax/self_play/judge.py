"""Right, wrong, or not judged: the only place where correctness is decided.

A judge is an argument. The one here compares strings; one that asks a model has the same type, and
answers None where it could not get a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sspjax.self_play.exact import exact_match
from sspjax.types import Group, Question, Trajectory, noun


@noun
class Claim:
    """An answer somebody gave to a question."""

    question: Question
    answer: str


Judge = Callable[[Sequence[Claim]], Sequence[bool | None]]
"""One verdict a claim, in order; None: no verdict could be had."""


def exact(claims: Sequence[Claim]) -> tuple[bool, ...]:
    """Equality with the answer or an alias after normalisation (`exact.exact_match`)."""
    return tuple(exact_match(claim.answer, claim.question.answers) for claim in claims)


JUDGES: dict[str, Judge] = {"exact": exact}
"""By `judge.kind`: the judges that need nothing from the world."""


def judge_groups(
    questions: Sequence[Question], rollouts: Sequence[Sequence[Trajectory]], judge: Judge
) -> tuple[Group, ...]:
    """One group a question, all claims judged in one call.

    A rollout without an answer is wrong. One whose tool failed is not judged (None), and neither
    is one whose claim got no verdict: a failure of the world is never a wrong answer.
    """
    claims = [
        Claim(question=question, answer=rollout.answer)
        for question, group in zip(questions, rollouts, strict=True)
        for rollout in group
        if rollout.answer is not None and not rollout.failed
    ]
    verdicts = tuple(judge(claims)) if claims else ()
    if len(verdicts) != len(claims):
        raise ValueError(
            f"judge: expected {len(claims)} verdicts, got {len(verdicts)}; "
            "a judge answers every claim, with None where it has no verdict"
        )
    queue = iter(verdicts)
    return tuple(
        Group(
            question=question,
            rollouts=tuple(group),
            correct=tuple(_correct(rollout, queue) for rollout in group),
        )
        for question, group in zip(questions, rollouts, strict=True)
    )


def judge_rollouts(question: Question, rollouts: Sequence[Trajectory], judge: Judge) -> Group:
    """`judge_groups` of one question."""
    return judge_groups([question], [rollouts], judge)[0]


def _correct(rollout: Trajectory, verdicts: Iterator[bool | None]) -> bool | None:
    """Takes the next verdict when the rollout made a claim."""
    if rollout.failed:
        return None
    return False if rollout.answer is None else next(verdicts)
