"""Estimators against numbers worked out by hand."""

import pytest
from toy_policy import toy_config

from sspjax.config import ConfigError
from sspjax.learner.advantages import ADVANTAGES

SEARCH = [1.0, 0.0, 0.0, 0.0, 0.0]


def estimate(estimator, std, *groups):
    return ADVANTAGES[estimator](groups, std)


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


@pytest.mark.parametrize("std", ["none", "sample", "population"])
def test_a_lone_judged_rollout_is_worth_nothing(std):
    assert estimate("group_mean", std, [None, 0.7])[0] == [None, 0.0]


def test_results_are_plain_floats():
    assert all(type(a) is float for a in estimate("group_mean", "sample", SEARCH)[0])


def test_refusals():
    with pytest.raises(ValueError, match="raw: expected std=none, got sample"):
        estimate("raw", "sample", [1.0])
    with pytest.raises(ValueError, match="expected a finite number, got nan"):
        estimate("group_mean", "none", [float("nan"), 1.0])


def test_the_config_refuses_a_scale_without_baseline():
    with pytest.raises(ConfigError, match="estimator=raw has no baseline"):
        toy_config(solver={"estimator": "raw", "std": "sample"})
