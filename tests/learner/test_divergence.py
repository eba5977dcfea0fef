"""Divergences of whole trajectories, against sums over their own tokens in float64."""

import numpy as np
import pytest
from toy_policy import toy_config, toy_examples

from sspjax.learner.divergence import divergences, numbered
from sspjax.learner.pack import pack, update_shape
from sspjax.types import Role


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_each_trajectory_has_the_sum_over_its_sampled_tokens(kl):
    """Reference log-probabilities are made up from the token alone, so they need no place."""
    config = toy_config(learner={"kl": kl, "kl_reward": 0.1})
    r = np.random.default_rng(0)
    solvers = [e.trajectory for e in toy_examples(r, Role.SOLVER, groups=8)]
    proposers = [e.trajectory for e in toy_examples(r, Role.PROPOSER, groups=8, size=1)]
    made = {
        Role.SOLVER: numbered(solvers, 1),
        Role.PROPOSER: numbered(proposers, 1 + len(solvers)),
    }
    batch = pack(made, config, update_shape(config, "policy", batch_devices=4))
    reference = (-0.25 * batch.tokens).astype(np.float32)
    sums = divergences(batch, reference, len(solvers) + len(proposers))
    expected = [
        np.sum(np.where(t.sampled, np.float64(t.logprobs) + 0.25 * t.token_ids, 0))
        for t in (*solvers, *proposers)
    ]
    assert np.std(expected) > 1
    np.testing.assert_allclose(sums, expected, rtol=1e-12)


def test_what_is_not_packed_has_none():
    config = toy_config(solver={"role_weight": 0.0}, learner={"kl_reward": 0.1})
    trajectories = [e.trajectory for e in toy_examples(np.random.default_rng(0))]
    batch = pack({Role.SOLVER: numbered(trajectories, 1)}, config, update_shape(config, "policy"))
    sums = divergences(batch, np.ones_like(batch.behaviour_logprob), len(trajectories))
    assert sums.tolist() == [0.0] * len(trajectories)


def test_numbers_are_exact_in_float32():
    (only,) = toy_examples(np.random.default_rng(0), groups=1, size=1)
    with pytest.raises(ValueError, match="expected numbers from 1 to 2\\^24, got 0 to 0"):
        numbered([only.trajectory], 0)
    with pytest.raises(ValueError, match="expected numbers from 1 to 2\\^24"):
        numbered([only.trajectory], 2**24)
