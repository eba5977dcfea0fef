"""Advantages: what each rollout is worth against its baseline, on the host, in float64.

An estimator takes the rewards of a role as groups (rollouts of one prompt) and returns numbers of
the same layout. None stands for a rollout that was not judged: it enters no statistic and its
advantage is None.

Every estimator is (reward - baseline) / scale. The scale is 1 for `std="none"`, else the standard
deviation of the same rewards the baseline was taken from, plus `EPSILON`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

Rewards = Sequence[Sequence[float | None]]
Advantages = list[list[float | None]]
Std = Literal["none", "sample", "population"]
Estimator = Callable[[Rewards, Std], Advantages]

EPSILON = 1e-6
"""Added to a standard deviation (verl's GRPO): equal rewards divide by it, not by zero."""

DELTA_DOF: Mapping[str, int] = {"sample": 1, "population": 0}
"""Subtracted from the count in the variance: `sample` is verl's GRPO, `population` KG-WCR's."""


def raw(rewards: Rewards, std: Std) -> Advantages:
    """The reward itself, REINFORCE without baseline (SSP, arXiv 2510.18821, Eq 5).

    Raises ValueError unless `std` is "none": without a baseline there is nothing to scale by.
    """
    if std != "none":
        raise ValueError(f"estimator raw: expected std=none, got {std}; use batch_mean or none")
    return [[None if r is None else _finite(r) for r in group] for group in rewards]


def batch_mean(rewards: Rewards, std: Std) -> Advantages:
    """Baseline and scale from all judged rewards of the role in this step."""
    centred = iter(_centred([r for group in rewards for r in group if r is not None], std))
    return [[None if r is None else next(centred) for r in group] for group in rewards]


def group_mean(rewards: Rewards, std: Std) -> Advantages:
    """Baseline and scale from the judged rewards of the same group (GRPO; SSP Eq 4 has no scale).

    A group with one judged rollout has nothing to compare it with: its advantage is 0. (verl gives
    such a group its raw reward; that is `raw` here, by name.)
    """
    return [row for group in rewards for row in batch_mean([group], std)]


ADVANTAGES: Mapping[str, Estimator] = {
    "raw": raw,
    "batch_mean": batch_mean,
    "group_mean": group_mean,
}


def _centred(rewards: Sequence[float], std: Std) -> list[float]:
    if not rewards:
        return []
    values = np.array([_finite(r) for r in rewards], np.float64)
    # Measured from the first value, equal rewards give exactly 0, which costs no gradient at all.
    distance = values - values[0]
    centred = distance - distance.mean()
    if std != "none":
        freedom = max(len(values) - DELTA_DOF[std], 1)
        centred /= math.sqrt(float(np.sum(centred**2)) / freedom) + EPSILON
    return centred.tolist()


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"reward: expected a finite number, got {reward}; unjudged is None")
    return float(reward)
