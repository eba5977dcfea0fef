import json

import pytest
from builders import document, question
from hypothesis import given
from hypothesis import strategies as st

from sspjax.self_play.memory import host_state_from_json, host_state_to_json
from sspjax.types import Document, HostState, Question, Replayed

words = st.text(max_size=6)
texts = st.lists(words, max_size=2).map(tuple)
numbers = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
questions = st.builds(
    Question,
    uid=words,
    text=words,
    answer=words,
    aliases=texts,
    evidence=st.lists(st.builds(Document, id=words, title=words, text=words), max_size=2).map(
        tuple
    ),
    chain=texts,
    waypoints=texts,
)
states = st.builds(
    HostState,
    seed_cursor=st.integers(0),
    replay=st.lists(
        st.builds(Replayed, question=questions, success_rate=numbers, step=st.integers()),
        max_size=2,
    ).map(tuple),
    skills=st.lists(st.dictionaries(words, json_values, max_size=2), max_size=2).map(tuple),
    attempt=st.integers(0),
    last_row=st.dictionaries(words, numbers, max_size=3),
)


@given(states)
def test_round_trip_is_exact(state):
    assert host_state_from_json(json.loads(json.dumps(host_state_to_json(state)))) == state


def test_empty_state():
    assert host_state_from_json(json.loads(json.dumps(host_state_to_json(HostState())))) == (
        HostState()
    )


def test_evidence_comes_back_as_documents():
    kept = Replayed(
        question=question("q", aliases=("Christiania",), evidence=[document("a"), document("b")]),
        success_rate=0.2,
        step=4,
    )
    back = host_state_from_json(
        json.loads(json.dumps(host_state_to_json(HostState(seed_cursor=7, replay=(kept,)))))
    )
    assert back.replay[0].question.evidence == (document("a"), document("b"))
    assert back.replay[0].question.answers == ("Oslo", "Christiania")


def test_another_version_is_refused():
    values = host_state_to_json(HostState())
    with pytest.raises(ValueError, match="HostState: expected fields"):
        host_state_from_json(values | {"cursor": 3})
    with pytest.raises(ValueError, match="HostState: expected fields"):
        host_state_from_json({name: v for name, v in values.items() if name != "replay"})
