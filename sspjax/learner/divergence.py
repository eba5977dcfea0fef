"""The divergence of whole trajectories from the reference, for a penalty in the reward.

It is needed before advantages are, so the trajectories are packed and scored once on their own.
While they are, each carries its number in place of an advantage, and is found again by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sspjax.types import Example, Trajectory, UpdateBatch


def numbered(trajectories: Sequence[Trajectory], first: int) -> list[Example]:
    """The trajectories as examples for `pack`, with numbers from `first` (1 or more) as advantages.

    Raises ValueError where float32, the dtype of a packed advantage, cannot tell them apart.
    """
    if first < 1 or first + len(trajectories) > 2**24:
        raise ValueError(
            f"numbered: expected numbers from 1 to 2^24, got {first} to "
            f"{first + len(trajectories) - 1}"
        )
    return [
        Example(trajectory=trajectory, reward=0.0, advantage=float(number), terms={})
        for number, trajectory in enumerate(trajectories, first)
    ]


def divergences(batch: UpdateBatch, reference_logprob: np.ndarray, count: int) -> np.ndarray:
    """Sum over each trajectory's sampled tokens of log p(sampler) - log p(reference), f64[count].

    The k1 estimate of its divergence. `batch`: packed from `numbered`, in host memory;
    `reference_logprob`: f32[M, R, L]. Entry n - 1 belongs to number n; one that is not in the batch
    has 0.
    """
    of_token = np.float64(batch.behaviour_logprob) - reference_logprob
    number = np.where(batch.sampled, batch.advantage, 0).astype(np.int64)
    return np.bincount(number.ravel(), of_token.ravel(), minlength=count + 1)[1:]
