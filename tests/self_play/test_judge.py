import pytest
from builders import question, solved

from sspjax.self_play.judge import JUDGES, judge_groups, judge_rollouts
from sspjax.types import Stop


def test_right_wrong_silent_and_failed():
    asked = question(answer="The Beatles", aliases=("Fab Four",))
    rollouts = [
        solved(asked, "beatles"),
        solved(asked, "the fab four!"),
        solved(asked, "The Rolling Stones"),
        solved(asked, None),
        solved(asked, "beatles", stop=Stop.TOOL_FAILED),
        solved(asked, None, stop=Stop.TOOL_FAILED),
    ]
    group = judge_rollouts(asked, rollouts, JUDGES["exact"])
    assert group.correct == (True, True, False, False, None, None)
    assert group.rollouts == tuple(rollouts)
    assert group.success_rate == 0.5


def test_all_claims_of_a_step_are_judged_in_one_call():
    first, second = question("q1", answer="x"), question("q2", answer="y")
    calls = []

    def judge(claims):
        calls.append([(c.question.uid, c.answer) for c in claims])
        return [True, None, False]

    groups = judge_groups(
        [first, second],
        [
            [solved(first, "1"), solved(first, None)],
            [solved(second, "2", stop=Stop.TOOL_FAILED), solved(second, "3"), solved(second, "4")],
        ],
        judge,
    )
    assert calls == [[("q1", "1"), ("q2", "3"), ("q2", "4")]]
    assert [g.correct for g in groups] == [(True, False), (None, None, False)]


def test_without_claims_the_judge_is_not_asked():
    def judge(claims):
        raise AssertionError("nothing to judge")

    asked = question()
    assert judge_rollouts(asked, [solved(asked, None)], judge).correct == (False,)
    assert judge_groups([], [], judge) == ()


def test_a_judge_that_skips_a_claim_is_an_error():
    asked = question()
    with pytest.raises(ValueError, match="expected 1 verdicts, got 0"):
        judge_rollouts(asked, [solved(asked, "x")], lambda claims: [])
