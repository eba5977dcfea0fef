"""What each role is paid, as sums of named terms.

Success is read from `Group.correct`, never from a reward. `None` means not paid at all: the
trajectory is left out of the loss because nothing was judged. It is not the same as a reward of 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sspjax.config import ConfigError, ProposerConfig
from sspjax.self_play.exact import normalise
from sspjax.types import Group, Proposal, Question, Reason, Trajectory, record


@record
class Reward:
    """The sum of `terms`, or None where the trajectory must be left out of the loss."""

    value: float | None
    terms: Mapping[str, float]


UNPAID = Reward(value=None, terms={})

Term = TypeVar("Term")

ProposerTerm = Callable[[Proposal, Group, float, ProposerConfig], float]
"""Proposal, the solvers' group of its question, the share p that was right (judged ones), config.
"""

SolverTerm = Callable[[Question, Trajectory, bool], float]
"""Question, rollout, and whether its answer is right."""


def one_minus_p(proposal: Proposal, group: Group, p: float, config: ProposerConfig) -> float:
    """1 - p: the harder the better (SSP, arXiv 2510.18821)."""
    return 1.0 - p


def half(proposal: Proposal, group: Group, p: float, config: ProposerConfig) -> float:
    """1 - p, but 0.5 where nobody was right: such a question is as likely false as hard."""
    return 1.0 - p if p > 0 else 0.5


def modal(proposal: Proposal, group: Group, p: float, config: ProposerConfig) -> float:
    """1 - share of the solvers' most common answer: agreement pays as little when it is on another.

    Answers are compared normalised; all right ones are one class whichever alias they used, and no
    answer is one class. Only judged rollouts count.
    """
    answers = Counter(
        (right, "" if right else normalise(rollout.answer or ""))
        for rollout, right in zip(group.rollouts, group.correct, strict=True)
        if right is not None
    )
    return 1.0 - max(answers.values()) / answers.total()


def bell(proposal: Proposal, group: Group, p: float, config: ProposerConfig) -> float:
    """4 (left + p) (right - p): the nearer to half the better, and `bell_ends` at p = 0 and 1.

    SSP's code has it as `intermediate_difficulty` with ends of 0, SESA with ends below 0.
    """
    if p in (0.0, 1.0):
        return config.bell_ends
    return 4 * (config.bell_left + p) * (config.bell_right - p)


def few_right(proposal: Proposal, group: Group, p: float, config: ProposerConfig) -> float:
    """(n - k) / (n - 1) with k of n right: 1 for a single one, 0 for all and for none (Dr. Zero).

    0 as well in a group of one: there is nobody else to be wrong.
    """
    n, k = len(group.judged), sum(group.judged)
    return (n - k) / (n - 1) if n > 1 and k > 0 else 0.0


def format_only(proposal: Proposal, group: Group, p: float, config: ProposerConfig) -> float:
    """1 for every question that passed its checks, however hard it is."""
    return 1.0


PROPOSER_TERMS: dict[str, ProposerTerm] = {
    "one_minus_p": one_minus_p,
    "half": half,
    "modal": modal,
    "bell": bell,
    "few_right": few_right,
    "format_only": format_only,
}
"""By `proposer.rewards`."""


def correct(question: Question, rollout: Trajectory, right: bool) -> float:
    """1 for a right answer, else 0 (SSP, arXiv 2510.18821)."""
    return float(right)


SOLVER_TERMS: dict[str, SolverTerm] = {"correct": correct}
"""By `solver.rewards`."""


def reward_proposals(
    proposals: Sequence[Proposal], groups: Sequence[Group], config: ProposerConfig
) -> tuple[Reward, ...]:
    """One reward a proposal, the sum of the terms `config.rewards` of its own question's group.

    A rejected proposal earns `config.invalid`, whatever question fills its slot: a replayed one
    never pays the proposer that failed. Unpaid are those that nobody judged: a tool failed while it
    was proposed, its verification had an error, or its group is not `settled`.

    `groups` may hold other groups; every accepted proposal's must be there (else ValueError).
    """
    terms = _chosen(PROPOSER_TERMS, config.rewards, "proposer")
    rejected = (
        UNPAID
        if config.invalid == "exclude"
        else _sum({**dict.fromkeys(terms, 0.0), "invalid": config.invalid})
    )
    by_uid = {group.question.uid: group for group in groups}

    def reward(proposal: Proposal) -> Reward:
        if proposal.trajectory.failed or proposal.reason is Reason.VERIFY_ERROR:
            return UNPAID
        if proposal.question is None or proposal.reason is not None:
            return rejected
        group = by_uid.get(proposal.question.uid)
        if group is None:
            raise ValueError(
                f"question {proposal.question.uid}: expected a group of solvers for an accepted "
                f"proposal, got groups of {sorted(by_uid)}"
            )
        p = group.success_rate
        if p is None or not group.settled:
            return UNPAID
        return _sum({name: term(proposal, group, p, config) for name, term in terms.items()})

    return tuple(map(reward, proposals))


def reward_rollouts(group: Group, names: Sequence[str]) -> tuple[Reward, ...]:
    """One reward a rollout of the group, in order; unpaid where it was not judged, and all of a
    group that is not `settled`.
    """
    terms = _chosen(SOLVER_TERMS, names, "solver")
    return tuple(
        UNPAID
        if right is None or not group.settled
        else _sum({name: term(group.question, rollout, right) for name, term in terms.items()})
        for rollout, right in zip(group.rollouts, group.correct, strict=True)
    )


def penalised(
    rewards: Sequence[Reward], divergences: Sequence[float], coefficient: float
) -> tuple[Reward, ...]:
    """The rewards less `coefficient` times each trajectory's divergence from the reference.

    The penalty is a term of its own, `kl`. It is that of the whole trajectory, as in verl's
    estimators of outcomes; in its REINFORCE++ every token has the penalties from it on.
    """
    return tuple(
        r if r.value is None else _sum({**r.terms, "kl": -coefficient * divergence})
        for r, divergence in zip(rewards, divergences, strict=True)
    )


def _sum(terms: Mapping[str, float]) -> Reward:
    return Reward(value=sum(terms.values(), 0.0), terms=terms)


def _chosen(table: Mapping[str, Term], names: Sequence[str], role: str) -> dict[str, Term]:
    for name in names:
        if name not in table:
            raise ConfigError(
                f"config.{role}.rewards={name!r}: expected one of {', '.join(sorted(table))}"
            )
    return {name: table[name] for name in names}
