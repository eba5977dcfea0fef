"""What happened in a self-play step, as numbers for the metrics row.

Names that end in `_rate` are shares, names that end in `/mean` are means, all others are counts.
Rates are about questions newly accepted in this step, never about replayed ones. The keys are the
same in every step; a share or mean of nothing is 0, and `selfplay/accepted` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sspjax.self_play.board import Board, Origin
from sspjax.self_play.rewards import Reward
from sspjax.self_play.verify import VerifyCounts
from sspjax.types import Group, Proposal, Reason, Stop, Trajectory

REASONS = (
    Reason.TOOL_FAILED,
    Reason.NO_QUESTION,
    Reason.NO_SEARCH,
    Reason.FEW_SEARCHES,
    Reason.REPEATED_SEARCH,
    Reason.TOO_SHORT,
    Reason.TOO_LONG,
    Reason.LEAK,
    Reason.SEARCHED_ANSWER,
    Reason.NOT_GROUNDED,
    Reason.NOT_FLUENT,
    Reason.VERIFY_WRONG,
    Reason.VERIFY_TOO_LONG,
    Reason.VERIFY_ERROR,
    Reason.COUNTERFACTUAL,
    Reason.CONSENSUS,
)
"""Every reason filters, gates and verification can give: one metric each, every step."""


def step_counts(
    *,
    proposals: Sequence[Proposal],
    discarded: Sequence[Proposal] = (),
    verification: VerifyCounts,
    board: Board,
    groups: Sequence[Group],
    proposer_rewards: Sequence[Reward],
    solver_rewards: Sequence[Sequence[Reward]],
) -> dict[str, float]:
    """The metrics of one step; `groups` are the board's, `solver_rewards` theirs, in order.

    `discarded` are proposals that lost their place to a later try: they count in the rates and
    lengths, and have no reward.

    Raises KeyError on a reason that is not in `REASONS`.
    """
    proposals = [*proposals, *discarded]
    accepted = [p for p in proposals if p.accepted]
    new = board.new(groups)
    return {
        "selfplay/accepted": float(len(accepted)),
        "selfplay/valid_question_rate": _mean(p.accepted for p in proposals),
        "selfplay/two_search_rate": _mean(len(p.trajectory.queries) >= 2 for p in accepted),
        "selfplay/replayed": float(board.count(Origin.REPLAYED)),
        "selfplay/dummies": float(board.count(Origin.DUMMY)),
        "selfplay/empty": float(board.count(Origin.EMPTY)),
        "selfplay/discarded": float(len(discarded)),
        **_rejected(proposals),
        "selfplay/verify_noise_missing": float(verification.noise_missing),
        "selfplay/verify_noise_dropped": float(verification.noise_dropped),
        "selfplay/verify_unjudged": float(verification.unjudged),
        "selfplay/unjudged": float(sum(c is None for g in groups for c in g.correct)),
        "selfplay/unsettled": float(sum(not g.settled for g in groups)),
        "solver/success_rate": _mean(c for g in new for c in g.judged),
        **_role("proposer", [p.trajectory for p in proposals], proposer_rewards),
        **_role(
            "solver",
            [r for g in groups for r in g.rollouts],
            [reward for group in solver_rewards for reward in group],
        ),
        **_lengths(
            [p.trajectory for p in proposals] + [r for g in groups for r in g.rollouts],
        ),
    }


def _rejected(proposals: Sequence[Proposal]) -> Mapping[str, float]:
    counts: dict[Reason, float] = dict.fromkeys(REASONS, 0.0)
    for proposal in proposals:
        if proposal.reason is not None:
            counts[proposal.reason] += 1
    return {f"selfplay/rejected/{reason.value}": count for reason, count in counts.items()}


def _role(
    role: str, trajectories: Sequence[Trajectory], rewards: Sequence[Reward]
) -> Mapping[str, float]:
    return {
        f"{role}/reward/mean": _mean(r.value for r in rewards if r.value is not None),
        f"{role}/searches/mean": _mean(len(t.queries) for t in trajectories),
        f"{role}/response_length/mean": _mean(len(t.token_ids) for t in trajectories),
    }


def _lengths(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """verl's names, over both roles: tokens of the response, observations included."""
    lengths = [len(t.token_ids) for t in trajectories]
    return {
        "response_length/mean": _mean(lengths),
        "response_length/max": float(max(lengths, default=0)),
        "response_length/min": float(min(lengths, default=0)),
        "response_length/clip_ratio": _mean(t.stop is Stop.LENGTH for t in trajectories),
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
