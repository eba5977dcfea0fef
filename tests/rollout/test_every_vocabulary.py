"""What must hold under any vocabulary and any tokenisation: turns end at their tags, and text that
somebody else wrote never becomes a control token.
"""

import functools
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_models import smollm2
from vocabularies import NAMES, vocabulary

from sspjax.rollout.acts import parse_act
from sspjax.rollout.prompts import PROMPTS, observation_turn
from sspjax.rollout.stop import START, STOP_TAGS, Automaton, build_automaton
from sspjax.rollout.tokenizer import Tokenizer, load_tokenizer
from sspjax.types import Act, Document

quick = settings(max_examples=60, deadline=None, database=None)
every_vocabulary = pytest.mark.parametrize("name", [*NAMES, "SmolLM2"])

ACTS, TAGS = list(STOP_TAGS), [tag.encode() for tag in STOP_TAGS.values()]


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    """One of the small vocabularies, or the real one of a model that somebody fetched."""
    return load_tokenizer(smollm2()) if name == "SmolLM2" else vocabulary(name)


@functools.cache
def automaton_of(name: str) -> Automaton:
    return build_automaton(tokenizer_of(name).token_bytes)


@functools.cache
def spellings_of(name: str) -> dict[bytes, list[int]]:
    """Every id that stands for these bytes."""
    spellings: dict[bytes, list[int]] = {}
    for token_id, token in enumerate(tokenizer_of(name).token_bytes):
        if token:
            spellings.setdefault(token, []).append(token_id)
    return spellings


# Stops --------------------------------------------------------------------------------------------


@st.composite
def texts(draw) -> str:
    """Text in which tags, halves of them, and tags with something in between are frequent."""
    halves = [
        "<",
        "</",
        ">",
        "</sea",
        "rch>",
        "</search",
        "answer>",
        "<search>",
        "</answer >",
        "<</",
    ]
    pieces = st.one_of(
        st.sampled_from([*STOP_TAGS.values(), *halves, "東", "\n", " 12"]),
        st.text(alphabet="<>/aers \u00e9", max_size=4),
    )
    return "".join(draw(st.lists(pieces, max_size=8)))


@st.composite
def segmentations(draw, name: str) -> list[int]:
    """A text in ids: at every place any token of the vocabulary that fits, canonical or not."""
    spellings = spellings_of(name)
    longest = max(map(len, spellings))
    data, ids = draw(texts()).encode(), []
    while data:
        fitting = [n for n in range(1, min(longest, len(data)) + 1) if data[:n] in spellings]
        size = draw(st.sampled_from(fitting))
        ids.append(draw(st.sampled_from(spellings[data[:size]])))
        data = data[size:]
    return ids


def stops(name: str, ids: list[int]) -> list[int]:
    """Number of the tag that each id completes, -1 for none, by the automaton."""
    automaton, state, found = automaton_of(name), START, []
    for token_id in ids:
        state = automaton.table[state, token_id]
        found.append(int(automaton.completed[state]))
    return found


def plain_stops(pieces: list[bytes]) -> list[int]:
    """The same by looking at the bytes so far, which a piece without bytes makes forgotten."""
    found, before = [], b""
    for piece in pieces:
        if not piece:
            before = b""
        ends = [
            number
            for end in range(len(before) + 1, len(before) + len(piece) + 1)
            for number, tag in enumerate(TAGS)
            if (before + piece)[:end].endswith(tag)
        ]
        found.append(ends[0] if ends else -1)
        before += piece
    return found


@every_vocabulary
def test_tags_are_found_in_every_tokenisation(name):
    tokenizer = tokenizer_of(name)
    control = sorted(i for i in tokenizer.special_ids if not tokenizer.token_bytes[i])

    @quick
    @given(segmentations(name), st.lists(st.integers(0, 60), max_size=2))
    def check(ids, interruptions):
        for place in interruptions:
            ids.insert(place % (len(ids) + 1), control[place % len(control)])
        assert stops(name, ids) == plain_stops([tokenizer.token_bytes[i] for i in ids])

    check()


@every_vocabulary
def test_a_turn_ends_where_its_text_first_holds_a_tag(name):
    """And its act is that tag's, if the tag was opened: stops and texts cannot disagree."""
    tokenizer = tokenizer_of(name)

    @quick
    @given(segmentations(name))
    def check(ids):
        ended = [i for i, tag in enumerate(stops(name, ids)) if tag >= 0]
        whole = tokenizer.decode(ids)
        assert bool(ended) == any(tag in whole for tag in STOP_TAGS.values())
        if ended:
            before, turn = tokenizer.decode(ids[: ended[0]]), tokenizer.decode(ids[: ended[0] + 1])
            assert not any(tag in before for tag in STOP_TAGS.values())
            act, _ = parse_act(turn, ACTS)
            assert act in (Act.NONE, ACTS[stops(name, ids)[ended[0]]])

    check()


# The wall -----------------------------------------------------------------------------------------

INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u034f\ufe0f\u0338\u0301"
"""Characters without width, and marks that join the character before."""


@functools.cache
def look_alikes() -> dict[str, list[str]]:
    """For every printable ASCII character, those that compatibility normalisation takes for it."""
    alike: dict[str, list[str]] = {chr(c): [chr(c)] for c in range(0x20, 0x7F)}
    for code in range(0x80, 0x30000):
        folded = unicodedata.normalize("NFKC", chr(code))
        if folded in alike:
            alike[folded].append(chr(code))
    return alike


@st.composite
def imitations(draw, names: list[str]) -> str:
    """A control token's name as it is, in look-alikes, or with something invisible inside."""
    alike, name = look_alikes(), draw(st.sampled_from(names))
    disguise = draw(st.integers(0, 3))
    shown = [
        draw(st.sampled_from(alike.get(c, [c]))) if disguise & 1 else c
        for c in draw(st.sampled_from([name, name.upper(), f"\u2581{name}", f" {name}"]))
    ]
    if disguise & 2:
        shown.insert(draw(st.integers(0, len(shown))), draw(st.sampled_from(INVISIBLE)))
    return "".join(shown)


@every_vocabulary
def test_no_imitation_becomes_a_control_token(name):
    tokenizer = tokenizer_of(name)
    names = list(tokenizer.specials)
    pieces = st.one_of(imitations(names), st.sampled_from(names), st.text(max_size=3))

    @quick
    @given(st.lists(pieces, max_size=6).map("".join))
    def check(text):
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text))

    check()


@every_vocabulary
@pytest.mark.parametrize("prompts", PROMPTS)
def test_no_observation_holds_a_control_token(name, prompts):
    """Nor a tag that is completed anywhere within it but at its end, where we put one."""
    tokenizer, prompt_set = tokenizer_of(name), PROMPTS[prompts]
    hostile = [*tokenizer.specials, *STOP_TAGS.values(), "<information>", "</information>"]
    pieces = st.one_of(imitations(hostile), st.sampled_from(hostile), st.text(max_size=3))
    written = st.lists(pieces, max_size=5).map("".join)

    @quick
    @given(st.lists(st.tuples(written, written), min_size=1, max_size=3), st.integers(4, 60))
    def check(passages, document_tokens):
        documents = [Document(id=str(i), title=a, text=b) for i, (a, b) in enumerate(passages)]
        turn = observation_turn(
            prompt_set, tokenizer, documents, budget=400, document_tokens=document_tokens
        )
        ids = turn.token_ids.tolist()
        assert len(ids) <= 400 and not turn.sampled
        assert tokenizer.special_ids.isdisjoint(ids)
        assert set(stops(name, ids)) == {-1}
        np.testing.assert_array_equal(turn.logprobs, 0)

    check()
