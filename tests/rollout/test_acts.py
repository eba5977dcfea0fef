"""Acts read from text: golden cases, and agreement with the stop automaton."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import trained

from sspjax.rollout.acts import act_tokens, parse_act
from sspjax.rollout.stop import START, STOP_TAGS, build_automaton
from sspjax.types import Act

SOLVER = (Act.SEARCH, Act.ANSWER)
PROPOSER = (Act.SEARCH, Act.QUESTION)


@pytest.mark.parametrize(
    ("text", "allowed", "act", "argument"),
    [
        ("<search> Bravik Tolen </search>", SOLVER, Act.SEARCH, "Bravik Tolen"),
        ("<think>so</think>\n<answer>\n Oslo\n</answer>", SOLVER, Act.ANSWER, "Oslo"),
        ("<question>Who was it?</question>", PROPOSER, Act.QUESTION, "Who was it?"),
        # What follows the tag in the last token is ignored.
        ("<search>a</search>\n<answer>b", SOLVER, Act.SEARCH, "a"),
        # The first completed tag counts, the last opening tag before it.
        ("<answer>a</answer><search>b</search>", SOLVER, Act.ANSWER, "a"),
        ("<search>a <search>b</search>", SOLVER, Act.SEARCH, "b"),
        ("<answer>a <search>b</search> c</answer>", SOLVER, Act.SEARCH, "b"),
        # Inside a thought a tag counts as well.
        ("<think>I could <search>x</search>", SOLVER, Act.SEARCH, "x"),
        # Tags that end no turn of this role are text.
        ("<question>q</question> <answer>a</answer>", SOLVER, Act.ANSWER, "a"),
        ("<answer>a</answer><question>q</question>", PROPOSER, Act.QUESTION, "q"),
        ("<open> doc7 </open>", (Act.OPEN,), Act.OPEN, "doc7"),
        ("<find>x</find>", (Act.FIND,), Act.FIND, "x"),
        # Nothing opened, nothing closed, or not quite a tag.
        ("so </search>", SOLVER, Act.NONE, ""),
        ("<answer>a</search>", SOLVER, Act.NONE, ""),
        ("</search> <search>a</search>", SOLVER, Act.NONE, ""),
        ("<search>a", SOLVER, Act.NONE, ""),
        ("<Search>a</Search>", SOLVER, Act.NONE, ""),
        ("<search>a</ search>", SOLVER, Act.NONE, ""),
        ("", SOLVER, Act.NONE, ""),
        ("<search>a</search>", (), Act.NONE, ""),
        # Empty arguments are acts.
        ("<search> \n</search>", SOLVER, Act.SEARCH, ""),
        ("<answer></answer>", SOLVER, Act.ANSWER, ""),
        ("<answer>\ufffd é</answer>", SOLVER, Act.ANSWER, "\ufffd é"),
    ],
)
def test_parse_act(text, allowed, act, argument):
    assert parse_act(text, allowed) == (act, argument)


def test_the_order_of_the_allowed_acts_does_not_matter():
    text = "<answer>a</answer><search>b</search>"
    assert parse_act(text, (Act.SEARCH, Act.ANSWER)) == parse_act(text, {Act.ANSWER, Act.SEARCH})


@settings(max_examples=100, deadline=None, database=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<search>",
                "</search>",
                "<answer>",
                "</answer>",
                "</question>",
                " Bravik",
                "</",
                "<",
                "x>",
            ]
        ),
        max_size=8,
    ),
    st.sampled_from([SOLVER, PROPOSER]),
)
def test_the_tag_that_stops_the_turn_is_the_one_that_is_parsed(pieces, allowed):
    """The turn is cut where the automaton stops it, as the engine does."""
    tokenizer = trained()
    automaton = build_automaton(tokenizer.token_bytes)
    state, turn, stopped_by = START, [], None
    for token in tokenizer.encode("".join(pieces)):
        turn.append(token)
        state = automaton.table[state, token]
        tag = int(automaton.completed[state])
        if tag >= 0 and list(STOP_TAGS)[tag] in allowed:
            stopped_by = list(STOP_TAGS)[tag]
            break
    text = tokenizer.decode(turn)
    act, _ = parse_act(text, allowed)
    if stopped_by is None:
        assert act is Act.NONE
    else:
        assert act is (stopped_by if f"<{stopped_by.value}>" in text else Act.NONE)


# The tokens of an act ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "own"),
    [
        # One token for each tag; the opening tag is not among them, the closing one is.
        ("<question>|Who|?|</question>", "Who|?|</question>"),
        ("<|question|>| Who|?| </|question|>|\n", " Who|?| </|question|>"),
        ("so |<question>|a|</question>", "a|</question>"),
        # A token that lies across an end counts whole.
        ("<question|>Who|?|</|question|>.", ">Who|?|</|question|>."),
        ("<question>Who?</question>", "<question>Who?</question>"),
        # The last opening tag before the first closing one.
        ("<question>|a|<question>|b|</question>|<question>|c|</question>", "b|</question>"),
        # A search is thought about and not made; what is asked is what counts.
        ("<search>|x|<question>|b|</question>", "b|</question>"),
        ("<question>|</question>", "</question>"),
        # Control tokens have no bytes; they count where they stand inside the question.
        ("|<question>||a||</question>|", "|a||</question>"),
    ],
)
def test_tokens_of_a_question(pieces, own):
    pieces = [p.encode() for p in pieces.split("|")]
    expected = [p.encode() for p in own.split("|")]
    assert pieces[act_tokens(pieces, Act.QUESTION)] == expected


def test_letters_of_several_tokens():
    """Where a letter's bytes are spread over tokens, and where they are none."""
    letter = "\u6771".encode()
    pieces = [b"<question>", letter[:1], letter[1:], b"\xff", b"</question>", b"\n"]
    assert act_tokens(pieces, Act.QUESTION) == slice(1, 5)


@pytest.mark.parametrize("text", ["", "<question>a", "a</question>", "</question><question>"])
def test_tokens_of_what_is_no_question(text):
    with pytest.raises(ValueError, match="expected a turn with b'<question>' before"):
        act_tokens([text.encode()], Act.QUESTION)


@settings(max_examples=100, deadline=None, database=None)
@given(
    st.lists(st.sampled_from(["<question>", " who", " Tormoor", "?", "</question>"]), max_size=9)
)
def test_tokens_and_argument_agree(parts):
    """Without the closing tag, and without the end of an opening tag that shares a token."""
    ids = trained().encode("".join(parts))
    act, argument = parse_act("".join(parts), PROPOSER)
    if act is Act.QUESTION:
        own = trained().decode(ids[act_tokens(trained().pieces(ids), Act.QUESTION)])
        before, closing, _ = own.partition("</question>")
        assert closing
        assert before.rpartition("<question>")[2].lstrip(">").strip() == argument
