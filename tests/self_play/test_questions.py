import pytest
from builders import document, proposed, searches, trajectory, turn

from sspjax.self_play.questions import parse_question
from sspjax.types import Act, Seed, Stop


def test_question_carries_the_seed_and_what_was_shown():
    a, b, c = document("a"), document("b"), document("c")
    played = proposed(
        "Who wrote it?", "t3", (("one", (a, b)), ("two", (b, c))), "Ibsen", ("H. Ibsen",)
    )
    question = parse_question(played)
    assert question.uid == "t3"
    assert question.text == "Who wrote it?"
    assert question.answers == ("Ibsen", "H. Ibsen")
    assert question.evidence == (a, b, c)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (" Who wrote it? \n", "Who wrote it?"),
        ("Who <answer>wrote</answer> it?", "Who wrote it?"),
        ("Who wrote it? <ANSWER>", "Who wrote it?"),
        ("Who wrote it?</", "Who wrote it?"),
        ("Is 3 </ 4?", "Is 3 </ 4?"),
    ],
)
def test_stray_tags_are_stripped(said, text):
    assert parse_question(proposed(said)).text == text


@pytest.mark.parametrize("said", [None, "", "  ", "<answer></answer>"])
def test_no_question(said):
    assert parse_question(proposed(said)) is None


def test_other_acts_are_no_question():
    played = trajectory([turn(Act.ANSWER, "Who wrote it?")], Seed(uid="s", answer="Ibsen"))
    assert parse_question(played) is None


def test_failed_tool_leaves_no_question():
    assert parse_question(proposed("Who wrote it?", stop=Stop.TOOL_FAILED)) is None


def test_the_last_question_counts():
    turns = [turn(Act.QUESTION, "First?"), *searches(("q", ())), turn(Act.QUESTION, "Second?")]
    assert parse_question(trajectory(turns, Seed(uid="s", answer="x"))).text == "Second?"


def test_seed_without_answer_is_an_error():
    with pytest.raises(ValueError, match="expected a proposer's prompt about a seed"):
        parse_question(proposed("Who wrote it?", answer=None))
