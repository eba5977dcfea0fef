import pytest
from builders import group, proposal, proposed, question

from sspjax.config import ConfigError, ProposerConfig
from sspjax.self_play.rewards import UNPAID, Reward, penalised, reward_proposals, reward_rollouts
from sspjax.types import Proposal, Reason, Stop


def solvers(uid, correct, answers=None):
    answers = answers or ["Oslo" if c else f"wrong {i}" for i, c in enumerate(correct)]
    return group(question(uid), answers, correct)


def paying(*terms, **settings):
    return ProposerConfig(rewards=terms or ("one_minus_p",), **settings)


def paid(correct, answers=None, terms=("one_minus_p",), **settings):
    group = solvers("t0", correct, answers)
    (reward,) = reward_proposals([proposal("t0")], [group], paying(*terms, **settings))
    return reward.value


@pytest.mark.parametrize(
    ("correct", "value"),
    [
        ([1, 0, 0, 0], 0.75),
        ([1, 1, 0, 0, 0], 0.6),
        ([1, 1, 1, 1, 1], 0.0),
        ([0, 0, 0, 0, 0], 1.0),
        ([1, None, 0, None, None], 0.5),
        ([None, None], None),
    ],
)
def test_one_minus_p(correct, value):
    correct = [None if c is None else bool(c) for c in correct]
    assert paid(correct) == (value if value is None else pytest.approx(value, abs=1e-12))


def test_half_does_not_top_out_where_nobody_is_right():
    assert paid([False] * 4, terms=["half"]) == 0.5
    assert paid([True, False, False, False], terms=["half"]) == 0.75
    assert paid([True] * 4, terms=["half"]) == 0.0


@pytest.mark.parametrize(
    ("answers", "correct", "value"),
    [
        (["Oslo", "Oslo", "Bergen", None], [True, True, False, False], 0.5),
        (["Bergen", "the bergen!", "Bergen", "Oslo"], [False, False, False, True], 0.25),
        ([None, None, None, "Oslo"], [False, False, False, True], 0.25),
        (["a", None, "the", "x"], [False] * 4, 0.25),  # three say nothing
        (["a b", "c", "d", "e"], [False] * 4, 0.75),
        (["Oslo", "Christiania"], [True, True], 0.0),  # both right, by an alias
        (["x", "x", "y", "y", "y"], [False, False, False, None, None], 1 - 2 / 3),
    ],
)
def test_modal(answers, correct, value):
    assert paid(correct, answers, ["modal"]) == pytest.approx(value, abs=1e-12)


def of_five(k):
    return [True] * k + [False] * (5 - k)


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        # 4 p (1 - p) at p = 0, .2, .., 1.
        ({}, [0.0, 0.64, 0.96, 0.96, 0.64, 0.0]),
        ({"bell_ends": -0.1}, [-0.1, 0.64, 0.96, 0.96, 0.64, -0.1]),
        # 4 (.1 + p) (.9 - p)
        ({"bell_left": 0.1, "bell_right": 0.9}, [0.0, 0.84, 1.0, 0.84, 0.36, 0.0]),
    ],
)
def test_bell(settings, values):
    made = [paid(of_five(k), terms=["bell"], **settings) for k in range(6)]
    assert made == pytest.approx(values, abs=1e-12)


def test_bell_is_highest_at_half():
    assert paid([True, True, False, False], terms=["bell"]) == 1.0
    wide = {"bell_left": 0.1, "bell_right": 0.9}
    assert paid([True, False], terms=["bell"], **wide) == pytest.approx(0.96, abs=1e-12)
    assert paid([True, True, True, False], terms=["bell"]) == 0.75


def test_few_right():
    """(n - k) / (n - 1), and nothing where nobody is right; only judged ones are counted."""
    made = [paid(of_five(k), terms=["few_right"]) for k in range(6)]
    assert made == [0.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert paid([True, False, False, None, None], terms=["few_right"]) == 1.0
    assert paid([True, True, False, None, None], terms=["few_right"]) == 0.5
    assert paid([True], terms=["few_right"]) == 0.0


def test_format_only():
    assert [paid(of_five(k), terms=["format_only"]) for k in (0, 3, 5)] == [1.0] * 3


def test_a_rejected_proposal_has_the_value_that_is_set():
    failed = [proposal("t0", reason=Reason.LEAK), proposal("t1", reason=Reason.VERIFY_ERROR)]
    rewards = reward_proposals(failed, [], paying(invalid=-0.1))
    assert [r.value for r in rewards] == [-0.1, None]
    assert rewards[0].terms == {"one_minus_p": 0.0, "invalid": -0.1}
    rewards = reward_proposals(failed, [], paying(invalid="exclude"))
    assert [r.value for r in rewards] == [None, None]


def test_penalised_by_divergence():
    rewards = [Reward(value=1.0, terms={"correct": 1.0}), UNPAID]
    made = penalised(rewards, [2.5, 7.0], 0.1)
    assert [r.value for r in made] == [0.75, None]
    assert made[0].terms == {"correct": 1.0, "kl": -0.25}


@pytest.mark.parametrize("reason", [r for r in Reason if r is not Reason.VERIFY_ERROR])
def test_a_rejected_proposal_earns_nothing(reason):
    failed = proposal("t0", reason=reason)
    # Its slot was refilled with a question that one of five solved: 0, not 0.8.
    for uid in ("t0/replay", "t0"):
        refill = solvers(uid, [True, False, False, False, False])
        (reward,) = reward_proposals([failed], [refill], paying())
        assert reward.value == 0.0
        assert reward.terms == {"one_minus_p": 0.0, "invalid": 0.0}


def test_what_nobody_judged_is_not_paid():
    broken = proposal("t0", reason=Reason.VERIFY_ERROR)
    toolless = Proposal(
        trajectory=proposed(None, "t1", stop=Stop.TOOL_FAILED),
        question=None,
        reason=Reason.NO_QUESTION,
    )
    rewards = reward_proposals([broken, toolless], [], paying())
    assert [r.value for r in rewards] == [None, None]


def test_a_group_with_fewer_than_two_verdicts_pays_nobody():
    """p of one rollout says nothing; a group that is one rollout is meant to."""
    groups = {
        "one of three": ([True, None, None], False),
        "none": ([None, None], False),
        "two of three": ([True, None, False], True),
        "a lone one": ([False], True),
        "a lone one without": ([None], False),
    }
    for correct, pays in groups.values():
        (proposer,) = reward_proposals([proposal("t0")], [solvers("t0", correct)], paying())
        solver = reward_rollouts(solvers("t0", correct), ["correct"])
        assert (proposer.value is not None) is pays
        assert [r.value is not None for r in solver] == [pays and c is not None for c in correct]
    (half,) = reward_proposals([proposal("t0")], [solvers("t0", [True, None, False])], paying())
    assert half.value == 0.5


def test_each_proposal_is_paid_by_its_own_group():
    proposals = [proposal("t0"), proposal("t1", reason=Reason.LEAK), proposal("t2")]
    groups = [
        solvers("t2", [True, True]),
        solvers("t1/replay", [True, False]),
        solvers("t0", [True, False]),
    ]
    rewards = reward_proposals(proposals, groups, paying())
    assert [r.value for r in rewards] == [0.5, 0.0, 0.0]


def test_terms_are_summed_and_kept():
    (reward,) = reward_proposals(
        [proposal("t0")], [solvers("t0", [False, False])], paying("one_minus_p", "half")
    )
    assert reward.value == 1.5
    assert reward.terms == {"one_minus_p": 1.0, "half": 0.5}


def test_an_accepted_proposal_without_a_group_is_an_error():
    with pytest.raises(ValueError, match="question t0: expected a group of solvers"):
        reward_proposals([proposal("t0")], [], paying())


def test_solvers_are_paid_for_right_answers():
    rewards = reward_rollouts(solvers("q", [True, False, None]), ["correct"])
    assert [r.value for r in rewards] == [1.0, 0.0, None]
    assert [dict(r.terms) for r in rewards] == [{"correct": 1.0}, {"correct": 0.0}, {}]


@pytest.mark.parametrize("role", ["proposer", "solver"])
def test_unknown_term(role):
    with pytest.raises(ConfigError, match=f"config.{role}.rewards='luck': expected one of"):
        if role == "proposer":
            reward_proposals([], [], paying("luck"))
        else:
            reward_rollouts(solvers("q", [True]), ["luck"])
