"""The gates by hand: what grounds, what is too unlikely, and who is outvoted."""

import math

import pytest
from builders import document, group, proposal, question, solved

from sspjax.config import VerifyConfig
from sspjax.self_play.exact import exact_match
from sspjax.self_play.gates import (
    after_solving,
    before_reading,
    fluency_threshold,
    names_a_passage,
    outvoted,
)
from sspjax.types import Document, Group, Proposal, Reason, Stop


def titled(*titles):
    return tuple(Document(id=str(i), title=t, text="Text.") for i, t in enumerate(titles))


def refuse(asked):
    raise AssertionError("nobody asked how fluent the questions are")


def gated(proposals, config, fluency=refuse, threshold=-math.inf):
    passed = before_reading(proposals, config, fluency=fluency, threshold=threshold)
    return [p.reason for p in passed]


# Grounded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "titles", "named"),
    [
        ("Who founded Halden Guild ?", ["Tormoor", "Halden Guild"], True),
        ("Who founded Halden Guild ?", ["Tormoor"], False),
        ("Who founded halden guild ?", ["Halden Guild"], False),
        ("Who founded Halden  Guild ?", ["Halden Guild"], False),
        ("Who founded Halden ?", ["Halden Guild"], False),
        ("Who founded Halden Guild ?", [" Halden Guild\n"], True),
        ("Who founded it?", [], False),
        # Shorter than three characters: found in most questions by chance.
        ("Who founded it?", [""], False),
        ("Who founded it?", ["  "], False),
        ("Who founded It?", ["It", "W"], False),
        ("Who founded IBM?", ["IBM"], True),
    ],
)
def test_a_question_names_a_passage(text, titles, named):
    assert names_a_passage(question(text=text, evidence=titled(*titles))) is named


def test_what_names_no_passage_is_rejected():
    shown = (document("a"),)
    proposals = [
        proposal("t0", shown, text="Who wrote Title a ?"),
        proposal("t1", shown, text="Who wrote Title b ?"),
        proposal("t2", shown, text="Who wrote Title b ?", reason=Reason.LEAK),
        proposal("t3", shown, asked=False, reason=Reason.NO_QUESTION),
        proposal("t4", text="Who wrote Title a ?"),
    ]
    assert gated(proposals, VerifyConfig(grounded=True)) == [
        None, Reason.NOT_GROUNDED, Reason.LEAK, Reason.NO_QUESTION, Reason.NOT_GROUNDED,
    ]  # fmt: skip
    # The proposals that pass, and those that had failed before, are the same objects.
    passed = before_reading(
        proposals, VerifyConfig(grounded=True), fluency=refuse, threshold=-math.inf
    )
    assert [a is b for a, b in zip(passed, proposals, strict=True)] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_without_a_gate_nothing_changes():
    proposals = [proposal("t0"), proposal("t1", reason=Reason.LEAK)]
    assert gated(proposals, VerifyConfig()) == [None, Reason.LEAK]
    assert gated([], VerifyConfig(grounded=True)) == []


# Fluent -------------------------------------------------------------------------------------------


def test_less_likely_than_the_threshold_is_rejected():
    least = {"t0": -1.0, "t1": -1.5, "t2": -1.5001, "t3": math.nan, "t4": -math.inf}
    proposals = [proposal(uid) for uid in least]
    reasons = gated(
        proposals,
        VerifyConfig(fluency_quantile=0.1),
        lambda asked: [least[t.uid] for t in asked],
        threshold=-1.5,
    )
    assert reasons == [None, None] + [Reason.NOT_FLUENT] * 3


def test_only_those_that_passed_so_far_are_scored_and_the_model_is_asked_once():
    asked = []

    def fluency(trajectories):
        asked.append([t.uid for t in trajectories])
        return [-9.0] * len(trajectories)

    shown = (document("a"),)
    proposals = [
        proposal("t0", shown, text="Who wrote Title a ?"),
        proposal("t1", shown, text="Who wrote Title b ?"),
        proposal("t2", shown, text="Who wrote Title a ?", reason=Reason.TOO_LONG),
        proposal("t3", asked=False, reason=Reason.TOOL_FAILED),
    ]
    both = VerifyConfig(grounded=True, fluency_quantile=0.05)
    assert gated(proposals, both, fluency, threshold=-1.0) == [
        Reason.NOT_FLUENT, Reason.NOT_GROUNDED, Reason.TOO_LONG, Reason.TOOL_FAILED,
    ]  # fmt: skip
    assert asked == [["t0"]]
    assert gated(proposals[1:], both, fluency, threshold=-1.0)[0] is Reason.NOT_GROUNDED
    assert asked == [["t0"], []]


def test_every_question_gets_a_number():
    with pytest.raises(ValueError, match="zip"):
        gated([proposal("t0")], VerifyConfig(fluency_quantile=0.1), lambda asked: [])


@pytest.mark.parametrize(
    ("quantile", "threshold"),
    # Sorted: -8, -4, -2, -1, -0.5; ranks 0..4, so a quantile q lies at rank 4 q.
    [(0.0, -8.0), (0.25, -4.0), (0.5, -2.0), (1.0, -0.5), (0.125, -6.0), (0.05, -7.2)],
)
def test_a_threshold_is_a_quantile_of_the_demonstrations(quantile, threshold):
    demonstrated = [-1.0, -8.0, -0.5, -4.0, -2.0]
    assert fluency_threshold(demonstrated, quantile) == pytest.approx(threshold, abs=1e-12)


# Consensus ----------------------------------------------------------------------------------------

ANSWER = "Oslo"


def played(*rollouts, subject=None):
    """A group of (answer, searches) pairs; a third member True marks one that was not judged."""
    subject = subject or question(answer=ANSWER, aliases=("Kristiania",))
    made, correct = [], []
    for i, (answer, searched, *unjudged) in enumerate(rollouts):
        stop = Stop.TOOL_FAILED if unjudged else None
        made.append(solved(subject, answer, f"{subject.uid}/{i}", stop, searched=searched))
        right = answer is not None and exact_match(answer, subject.answers)
        correct.append(None if unjudged else right)
    return Group(question=subject, rollouts=tuple(made), correct=tuple(correct))


@pytest.mark.parametrize(
    ("rollouts", "out"),
    [
        # Two of two, two of four; two of five are less than half.
        ([("Rome", 1), ("Rome", 1)], True),
        ([("Rome", 1), ("Rome", 2), ("Bonn", 1), (None, 1)], True),
        ([("Rome", 1), ("Rome", 1), ("Bonn", 1), ("Paris", 1), (None, 1)], False),
        # One is no agreement, even alone.
        ([("Rome", 1)], False),
        ([("Rome", 1), ("Bonn", 1)], False),
        # Somebody was right, by searching or not.
        ([("Rome", 1), ("Rome", 1), ("Rome", 1), ("Oslo", 1)], False),
        ([("Rome", 1), ("Rome", 1), ("Kristiania", 0)], False),
        # Who did not search neither votes nor is counted.
        ([("Rome", 0), ("Rome", 0), ("Rome", 0)], False),
        ([("Rome", 1), ("Rome", 0)], False),
        ([("Rome", 1), ("Rome", 1), ("Bonn", 0), ("Bonn", 0), ("Bonn", 0)], True),
        # Answers are compared normalised; an empty one is no vote but its rollout searched.
        ([("the Rome.", 1), ("rome", 1)], True),
        ([("the", 1), ("The!", 1)], False),
        ([(None, 1), (None, 1)], False),
        ([("", 1), ("", 1), ("Rome", 1)], False),
        ([("Rome", 1), ("Rome", 1), ("", 1), (None, 1)], True),
        # Two camps of half each.
        ([("Rome", 1), ("Rome", 1), ("Bonn", 1), ("Bonn", 1)], True),
        # Who was not judged counts nowhere: three searched, two agree.
        ([("Rome", 1), ("Rome", 1), ("Bonn", 1), ("x", 1, True), ("y", 1, True)], True),
        ([("Rome", 1), ("Rome", 1, True)], False),
        ([("Rome", 1, True), ("Rome", 1, True)], False),
        ([], False),
    ],
)
def test_who_is_outvoted(rollouts, out):
    assert outvoted(played(*rollouts)) is out


def test_agreeing_on_the_answer_itself_is_no_vote_against_it():
    """A judge may call the stated answer wrong; then nobody said anything else."""
    subject = question(answer=ANSWER)
    same = [solved(subject, "Oslo", f"q/{i}", searched=1) for i in range(3)]
    assert not outvoted(Group(question=subject, rollouts=tuple(same), correct=(False,) * 3))


def test_an_empty_query_is_no_search():
    subject = question(answer=ANSWER)
    rollouts = [solved(subject, "Rome", f"q/{i}", searched=1) for i in range(2)]
    searching = Group(question=subject, rollouts=tuple(rollouts), correct=(False, False))
    assert outvoted(searching)
    for rollout in rollouts:
        object.__setattr__(rollout.turns[0], "argument", "")
    assert not outvoted(searching)


def test_outvoted_proposals_are_rejected_and_replayed_questions_are_not_gated():
    proposals = [
        proposal("t0"),
        proposal("t1"),
        proposal("t2", reason=Reason.LEAK),
        proposal("t3", asked=False, reason=Reason.NO_QUESTION),
    ]
    against = (("Rome", 1), ("Rome", 1))
    groups = [
        played(*against, subject=proposals[0].question),
        played(("Rome", 1), ("Oslo", 1), subject=proposals[1].question),
        played(*against, subject=question("t2/replay")),
        played(*against, subject=question("t3/replay")),
    ]
    judged = after_solving(proposals, groups)
    assert [p.reason for p in judged] == [
        Reason.CONSENSUS, None, Reason.LEAK, Reason.NO_QUESTION,
    ]  # fmt: skip
    assert judged[1:] == tuple(proposals[1:])


def test_a_group_of_wrong_answers_alone_outvotes_nobody():
    """Wrong answers as `builders.group` writes them: nobody searched."""
    only = proposal("t0")
    assert isinstance(only, Proposal)
    assert after_solving([only], [group(only.question, ["x", "x"], [False, False])]) == (only,)
