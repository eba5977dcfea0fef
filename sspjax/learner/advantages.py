"""Advantages: what each rollout is worth against its baseline, on the host, in float64.

An estimator takes the rewards of a role as groups (rollouts of one prompt) and returns numbers of
the same layout. None stands for a rollout that was not judged: it enters no statistic and its
advantage is None.

Every estimator is (reward - baseline) / scale. The scale is 1 for `std="none"`, else the standard
deviation of the same rewards the baseline was taken from, plus `EPSILON`. An estimator whose
baseline is not a mean of them has no such deviation and refuses any other `std`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from sspjax.types import noun

Groups = Sequence[Sequence[float | None]]
Advantages = list[list[float | None]]
Std = Literal["none", "sample", "population"]


@noun
class Scores:
    """What the rollouts of one role got in a step."""

    rewards: Groups
    tokens: Sequence[Sequence[int]] = ()
    """Trained tokens of each rollout, in the layout of `rewards` (read by `reinforce_pp`)."""
    greedy: Sequence[float | None] = ()
    """Reward of each group's greedy rollout (read by `remax`)."""


Estimator = Callable[[Scores, Std], Advantages]

EPSILON = 1e-6
"""Added to a standard deviation (verl's GRPO): equal rewards divide by it, not by zero."""

DELTA_DOF: Mapping[str, int] = {"sample": 1, "population": 0}
"""Subtracted from the count in the variance: `sample` is verl's GRPO, `population` KG-WCR's."""


def raw(scores: Scores, std: Std) -> Advantages:
    """The reward itself, REINFORCE without baseline (SSP, arXiv 2510.18821, Eq 5)."""
    _unscaled("raw", std)
    return [[None if r is None else _finite(r) for r in group] for group in scores.rewards]


def batch_mean(scores: Scores, std: Std) -> Advantages:
    """Baseline and scale from all judged rewards of the role in this step."""
    return _against_all(scores.rewards, std)


def group_mean(scores: Scores, std: Std) -> Advantages:
    """Baseline and scale from the judged rewards of the same group (GRPO; SSP Eq 4 has no scale).

    A group with one judged rollout has nothing to compare it with: its advantage is 0. (verl gives
    such a group its raw reward; that is `raw` here, by name.)
    """
    return [row for group in scores.rewards for row in _against_all([group], std)]


def rloo(scores: Scores, std: Std) -> Advantages:
    """Against the mean of the *other* judged rollouts of the group (RLOO, arXiv 2402.14740).

    That is n / (n - 1) times the distance from the group's mean; 0 where there is no other.
    """
    _unscaled("rloo", std)

    def row(group: Sequence[float | None], centred: Sequence[float | None]) -> list[float | None]:
        judged = sum(r is not None for r in group)
        return [None if c is None else c * judged / max(judged - 1, 1) for c in centred]

    return list(map(row, scores.rewards, group_mean(scores, "none")))


def remax(scores: Scores, std: Std) -> Advantages:
    """Against the reward of the group's greedy rollout (ReMax, arXiv 2310.10505).

    A group whose greedy rollout was not judged has no baseline: its advantages are None.
    """
    _unscaled("remax", std)
    return [
        [None if r is None or baseline is None else _finite(r) - _finite(baseline) for r in group]
        for group, baseline in zip(scores.rewards, scores.greedy, strict=True)
    ]


def reinforce_pp(scores: Scores, std: Std) -> Advantages:
    """Whitened over all tokens of the role in this step (REINFORCE++, arXiv 2501.03262).

    As `batch_mean`, but mean and deviation are taken over trained tokens, each of which has its
    trajectory's reward: a long trajectory counts for more. verl's is `std="sample"`.
    """
    return _against_all(scores.rewards, std, scores.tokens)


ADVANTAGES: Mapping[str, Estimator] = {
    "raw": raw,
    "batch_mean": batch_mean,
    "group_mean": group_mean,
    "rloo": rloo,
    "remax": remax,
    "reinforce_pp": reinforce_pp,
}
"""By `estimator`."""


def _against_all(
    rewards: Groups, std: Std, weights: Sequence[Sequence[int]] | None = None
) -> Advantages:
    """Baseline and scale from all the rewards, each counted `weights` times (None: once)."""
    weights = [[1] * len(group) for group in rewards] if weights is None else weights
    pairs = [
        (r, w)
        for group, weight in zip(rewards, weights, strict=True)
        for r, w in zip(group, weight, strict=True)
        if r is not None
    ]
    centred = iter(_centred([r for r, _ in pairs], [w for _, w in pairs], std))
    return [[None if r is None else next(centred) for r in group] for group in rewards]


def _centred(rewards: Sequence[float], weights: Sequence[int], std: Std) -> list[float]:
    total = sum(weights)
    if not total:
        return [0.0] * len(rewards)
    values, weight = np.array([_finite(r) for r in rewards]), np.array(weights, np.float64)
    # Measured from the first value, equal rewards give exactly 0, which costs no gradient at all.
    distance = values - values[0]
    centred = distance - (weight @ distance) / total
    if std != "none":
        freedom = max(total - DELTA_DOF[std], 1)
        centred /= math.sqrt(float(weight @ centred**2) / freedom) + EPSILON
    return centred.tolist()


def _unscaled(estimator: str, std: Std) -> None:
    if std != "none":
        raise ValueError(
            f"estimator {estimator}: expected std=none, got {std}; its baseline is no mean of the "
            "same rewards, so there is no deviation around it"
        )


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"reward: expected a finite number, got {reward}; unjudged is None")
    return float(reward)
