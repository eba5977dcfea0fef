import pytest
from builders import group, proposal, proposed, question

from sspjax.config import ConfigError
from sspjax.self_play.rewards import reward_proposals, reward_rollouts
from sspjax.types import Proposal, Reason, Stop


def solvers(uid, correct, answers=None):
    answers = answers or ["Oslo" if c else f"wrong {i}" for i, c in enumerate(correct)]
    return group(question(uid), answers, correct)


def paid(correct, answers=None, terms=("one_minus_p",)):
    (reward,) = reward_proposals([proposal("t0")], [solvers("t0", correct, answers)], terms)
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


@pytest.mark.parametrize("reason", [r for r in Reason if r is not Reason.VERIFY_ERROR])
def test_a_rejected_proposal_earns_nothing(reason):
    failed = proposal("t0", reason=reason)
    # Its slot was refilled with a question that one of five solved: 0, not 0.8.
    for uid in ("t0/replay", "t0"):
        refill = solvers(uid, [True, False, False, False, False])
        (reward,) = reward_proposals([failed], [refill], ["one_minus_p"])
        assert reward.value == 0.0
        assert reward.terms == {"one_minus_p": 0.0}


def test_what_nobody_judged_is_not_paid():
    broken = proposal("t0", reason=Reason.VERIFY_ERROR)
    toolless = Proposal(
        trajectory=proposed(None, "t1", stop=Stop.TOOL_FAILED),
        question=None,
        reason=Reason.NO_QUESTION,
    )
    rewards = reward_proposals([broken, toolless], [], ["one_minus_p"])
    assert [r.value for r in rewards] == [None, None]


def test_each_proposal_is_paid_by_its_own_group():
    proposals = [proposal("t0"), proposal("t1", reason=Reason.LEAK), proposal("t2")]
    groups = [
        solvers("t2", [True, True]),
        solvers("t1/replay", [True, False]),
        solvers("t0", [True, False]),
    ]
    rewards = reward_proposals(proposals, groups, ["one_minus_p"])
    assert [r.value for r in rewards] == [0.5, 0.0, 0.0]


def test_terms_are_summed_and_kept():
    (reward,) = reward_proposals(
        [proposal("t0")], [solvers("t0", [False, False])], ["one_minus_p", "half"]
    )
    assert reward.value == 1.5
    assert reward.terms == {"one_minus_p": 1.0, "half": 0.5}


def test_an_accepted_proposal_without_a_group_is_an_error():
    with pytest.raises(ValueError, match="question t0: expected a group of solvers"):
        reward_proposals([proposal("t0")], [], ["one_minus_p"])


def test_solvers_are_paid_for_right_answers():
    rewards = reward_rollouts(solvers("q", [True, False, None]), ["correct"])
    assert [r.value for r in rewards] == [1.0, 0.0, None]
    assert [dict(r.terms) for r in rewards] == [{"correct": 1.0}, {"correct": 0.0}, {}]


@pytest.mark.parametrize("role", ["proposer", "solver"])
def test_unknown_term(role):
    with pytest.raises(ConfigError, match=f"config.{role}.rewards='luck': expected one of"):
        if role == "proposer":
            reward_proposals([], [], ["luck"])
        else:
            reward_rollouts(solvers("q", [True]), ["luck"])
