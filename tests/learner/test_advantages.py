"""Estimators against numbers worked out by hand."""

import numpy as np
import pytest
from toy_policy import toy_config

from sspjax.config import ConfigError
from sspjax.learner.advantages import ADVANTAGES, Scores

SEARCH = [1.0, 0.0, 0.0, 0.0, 0.0]


def estimate(estimator, std, *groups, **more):
    return ADVANTAGES[estimator](Scores(rewards=groups, **more), std)


@pytest.mark.parametrize(
    ("estimator", "std", "group", "expected"),
    [
        ("group_mean", "none", SEARCH, [0.8, -0.2, -0.2, -0.2, -0.2]),
        # Deviations .8 and -.2: sample variance (.64 + 4 x .04) / 4 = .2, population .16.
        ("group_mean", "sample", SEARCH, [0.8 / 0.4472145955] + [-0.2 / 0.4472145955] * 4),
        ("group_mean", "population", SEARCH, [0.8 / 0.400001] + [-0.2 / 0.400001] * 4),
        ("group_mean", "population", [0.0, 0.25, 0.5, 0.75], [-1.3416, -0.4472, 0.4472, 1.3416]),
        # Rewards of KG-WCR with partial credit .25: mean .3125, population deviation .40984.
        ("group_mean", "population", [1.0, 0.25, 0.0, 0.0], [1.6775, -0.1525, -0.7625, -0.7625]),
        ("raw", "none", [0.75], [0.75]),
        ("raw", "none", [0.75, 0.0], [0.75, 0.0]),
        # Against the others: 1 - 0, and 0 - 1/4.
        ("rloo", "none", SEARCH, [1.0, -0.25, -0.25, -0.25, -0.25]),
        ("rloo", "none", [0.9, 0.3, None, 0.0], [0.75, -0.15, None, -0.6]),
    ],
)
def test_one_group(estimator, std, group, expected):
    precision = 1e-9 if std in ("none", "sample") else 5e-5
    assert estimate(estimator, std, group)[0] == pytest.approx(expected, abs=precision)


def test_published_number_of_the_code_path():
    """SSP's code divides by the sample deviation: 1.7889 and -0.4472."""
    first, *rest = estimate("group_mean", "sample", SEARCH)[0]
    assert round(first, 4) == 1.7889
    assert {round(a, 4) for a in rest} == {-0.4472}


def test_scale_cancels_a_common_factor():
    """All-wrong groups with coverage get the same advantages for partial credit .1 and .5."""
    half = estimate("group_mean", "population", [0.0, 0.125, 0.25, 0.375])[0]
    tenth = estimate("group_mean", "population", [0.0, 0.025, 0.05, 0.075])[0]
    assert half == pytest.approx(tenth, abs=1e-4)


def test_groups_do_not_mix_and_batches_do():
    groups = ([1.0, 0.0], [3.0, 1.0])
    assert estimate("group_mean", "none", *groups) == [[0.5, -0.5], [1.0, -1.0]]
    assert estimate("batch_mean", "none", *groups) == [[-0.25, -1.25], [1.75, -0.25]]


def test_batch_deviation():
    # Mean 2, sample variance (1 + 0 + 1) / 2 = 1.
    values = estimate("batch_mean", "sample", [1.0], [2.0], [3.0])
    assert [v for (v,) in values] == pytest.approx([-1 / 1.000001, 0, 1 / 1.000001], abs=1e-12)


def test_remax_compares_with_the_greedy_rollout():
    groups = ([1.0, 0.0, None], [0.25], [1.0, 1.0])
    made = estimate("remax", "none", *groups, greedy=[1.0, 0.0, None])
    assert made == [[0.0, -1.0, None], [0.25], [None, None]]


def test_reinforce_pp_whitens_over_tokens():
    """Rewards 1 and 0 on 1 and 3 tokens: mean 1/4, sample variance (.5625 + 3 x .0625) / 3."""
    tokens = [[1], [3]]
    made = estimate("reinforce_pp", "sample", [1.0], [0.0], tokens=tokens)
    assert [a for (a,) in made] == pytest.approx([1.5, -0.5], abs=1e-5)
    made = estimate("reinforce_pp", "population", [1.0], [0.0], tokens=tokens)
    # sqrt(.75 / 4) = .4330127
    assert [a for (a,) in made] == pytest.approx([1.7320508, -0.5773503], abs=1e-5)
    assert estimate("reinforce_pp", "none", [1.0], [0.0], tokens=tokens) == [[0.75], [-0.25]]


def test_reinforce_pp_is_that_of_every_token():
    """Each token as a sample of its own, in float64 numpy; an unjudged rollout is in none."""
    rewards, tokens = [[0.3, None], [1.0, 0.0], [0.8]], [[7, 50], [2, 11], [4]]
    values = np.repeat([0.3, 1.0, 0.0, 0.8], [7, 2, 11, 4])
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    made = [a for g in estimate("reinforce_pp", "sample", *rewards, tokens=tokens) for a in g]
    assert made[1] is None
    judged = [a for a in made if a is not None]
    assert np.repeat(judged, [7, 2, 11, 4]) == pytest.approx(expected, rel=1e-12)
    assert expected.mean() == pytest.approx(0, abs=1e-12)


def test_reinforce_pp_without_tokens_is_worth_nothing():
    assert estimate("reinforce_pp", "sample", [1.0], [0.0], tokens=[[0], [0]]) == [[0.0], [0.0]]


@pytest.mark.parametrize("estimator", ["group_mean", "batch_mean"])
def test_an_unjudged_rollout_enters_no_statistic(estimator):
    assert estimate(estimator, "none", [1.0, None, 0.0]) == [[0.5, None, -0.5]]
    assert estimate(estimator, "none", [None, None]) == [[None, None]]
    assert estimate(estimator, "none") == []


def test_raw_keeps_unjudged_apart():
    assert estimate("raw", "none", [0.6], [None]) == [[0.6], [None]]


@pytest.mark.parametrize("std", ["none", "sample", "population"])
def test_equal_rewards_are_worth_exactly_nothing(std):
    assert estimate("group_mean", std, [0.1, 0.1, 0.1])[0] == [0.0, 0.0, 0.0]


def test_without_others_rloo_is_worth_nothing():
    assert estimate("rloo", "none", [None, 0.7], [0.2]) == [[None, 0.0], [0.0]]


@pytest.mark.parametrize("std", ["none", "sample", "population"])
def test_a_lone_judged_rollout_is_worth_nothing(std):
    assert estimate("group_mean", std, [None, 0.7])[0] == [None, 0.0]


def test_results_are_plain_floats():
    assert all(type(a) is float for a in estimate("group_mean", "sample", SEARCH)[0])


def test_refusals():
    for estimator in ("raw", "rloo", "remax"):
        with pytest.raises(ValueError, match=f"{estimator}: expected std=none, got sample"):
            estimate(estimator, "sample", [1.0], greedy=[0.0])
    with pytest.raises(ValueError, match="expected a finite number, got nan"):
        estimate("group_mean", "none", [float("nan"), 1.0])


def test_the_config_refuses_a_scale_without_baseline():
    for estimator in ("raw", "rloo", "remax"):
        with pytest.raises(ConfigError, match=f"estimator={estimator} has no baseline"):
            toy_config(solver={"estimator": estimator, "std": "sample"})


def test_the_config_refuses_groups_of_one_only_where_a_group_is_compared():
    for estimator in ("group_mean", "rloo"):
        with pytest.raises(ConfigError, match=f"{estimator}: with group_size=1 every advantage"):
            toy_config(solver={"estimator": estimator, "group_size": 1})
    # REINFORCE solver, n = 1; REINFORCE++ proposer, n = 1.
    toy_config(solver={"estimator": "raw", "group_size": 1})
    toy_config(proposer={"estimator": "reinforce_pp", "std": "sample"})
    with pytest.raises(ConfigError, match="proposer.estimator=remax: a greedy question"):
        toy_config(proposer={"estimator": "remax"})
