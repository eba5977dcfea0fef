"""The stop automaton against a plain search in the bytes, for every tokenisation."""

import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vocabularies import trained, vocabulary

from sspjax.rollout.stop import START, STOP_TAGS, Automaton, build_automaton, stop_bits
from sspjax.types import Act

TAGS = tuple(STOP_TAGS.values())
ALPHABET = "<>/searchnwquti \n"
quick = settings(max_examples=150, deadline=None, database=None)

text_around_tags = st.lists(
    st.one_of(
        st.sampled_from(
            [*TAGS, "</", "<", ">", "</sea", "rch>", "</search", "<search>", "</answer "]
        ),
        st.text(alphabet=ALPHABET, max_size=4),
    ),
    max_size=8,
).map("".join)


def cut(text: str, places: list[int]) -> list[bytes]:
    """`text` in pieces: one of its tokenisations, were these the tokens of a vocabulary."""
    data = text.encode()
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def walk(automaton: Automaton, ids: list[int]) -> list[int]:
    """Number of the tag completed by each token, -1 for none."""
    state, reported = START, []
    for token in ids:
        state = automaton.table[state, token]
        reported.append(int(automaton.completed[state]))
    return reported


def searched(pieces: list[bytes], tags) -> list[int]:
    """The same, by looking at every prefix of the bytes: the first tag that ends in each piece."""
    reported, end, data = [], 0, b"".join(pieces)
    for piece in pieces:
        start, end = end, end + len(piece)
        ends = (
            t
            for p in range(start, end)
            for t, tag in enumerate(tags)
            if data[: p + 1].endswith(tag.encode())
        )
        reported.append(next(ends, -1))
    return reported


@quick
@given(text_around_tags, st.lists(st.integers(0, 400), max_size=40))
@example("</search>", [])
@example("</search></answer>", [])
@example("x</sea</search></answer></", [3, 6, 12, 20])
def test_any_tokenisation_of_any_text(text, places):
    pieces = cut(text, places)
    automaton = build_automaton(pieces, TAGS)
    assert walk(automaton, list(range(len(pieces)))) == searched(pieces, TAGS)


@quick
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    st.text(alphabet="abc", max_size=30),
    st.lists(st.integers(0, 40), max_size=10),
)
def test_any_tags(tags, text, places):
    """Tags that overlap themselves and each other; none inside another."""
    if any(a in b for a in tags for b in tags if a != b):
        return
    pieces = cut(text, places)
    automaton = build_automaton(pieces, tags)
    assert walk(automaton, list(range(len(pieces)))) == searched(pieces, tags)


@pytest.mark.parametrize("name", ["trained", "qwen", "sentencepiece"])
def test_a_real_vocabulary(name):
    tokenizer = vocabulary(name)
    automaton = build_automaton(tokenizer.token_bytes)
    assert automaton.table.shape[1] == tokenizer.vocab_size

    @settings(max_examples=60, deadline=None, database=None)
    @given(text_around_tags)
    def check(text):
        ids = tokenizer.encode(text)
        pieces = [tokenizer.token_bytes[i] for i in ids]
        assert walk(automaton, ids) == searched(pieces, TAGS)

    check()


def test_a_tag_that_ends_inside_a_token_is_reported_with_it():
    automaton = build_automaton([b"</sea", b"rch>\nso", b"x"])
    assert walk(automaton, [0, 1, 2]) == [-1, 0, -1]


def test_the_first_tag_in_a_token_counts_and_the_second_may_still_go_on():
    vocab = [b"</answer></search></que", b"stion>"]
    automaton = build_automaton(vocab)
    acts = list(STOP_TAGS)
    assert walk(automaton, [0, 1]) == [acts.index(Act.ANSWER), acts.index(Act.QUESTION)]


def test_a_tag_that_need_not_end_the_turn_does_not_hide_the_next():
    automaton = build_automaton([b"</question>", b"</search>"])
    acts = list(STOP_TAGS)
    assert walk(automaton, [0, 1]) == [acts.index(Act.QUESTION), acts.index(Act.SEARCH)]


def test_control_tokens_and_padding_ids_interrupt_a_tag():
    automaton = build_automaton([b"</sea", b"rch>", b""], vocab_size=5)
    assert automaton.table.shape[1] == 5
    for interruption in (2, 3, 4):
        assert walk(automaton, [0, interruption, 1]) == [-1, -1, -1]
    assert (automaton.table[:, 2:] == START).all()


def test_types_and_ranges():
    automaton = build_automaton(trained().token_bytes)
    states = len(automaton.completed)
    assert automaton.table.dtype == np.int16 and automaton.completed.dtype == np.int32
    assert automaton.table.shape == (states, 1024)
    assert automaton.table.min() >= 0 and automaton.table.max() < states
    assert automaton.completed[START] == -1
    assert set(automaton.completed.tolist()) == {-1, 0, 1, 2, 3, 4}


def test_many_states_take_wider_numbers():
    tags = [f"<{i:05d}{'x' * 40}>" for i in range(900)]
    automaton = build_automaton([b"<", b"a"], tags)
    assert automaton.table.dtype == np.int32 and len(automaton.table) > 2**15


def test_stop_bits_follow_the_order_of_the_tags():
    assert list(STOP_TAGS) == [Act.SEARCH, Act.OPEN, Act.FIND, Act.ANSWER, Act.QUESTION]
    assert TAGS == ("</search>", "</open>", "</find>", "</answer>", "</question>")
    assert stop_bits([Act.SEARCH, Act.ANSWER]) == 0b01001
    assert stop_bits([Act.QUESTION, Act.QUESTION]) == 0b10000
    assert stop_bits([]) == 0


@pytest.mark.parametrize("tags", [["</a>", ""], ["</a>", "x</a>"], ["</a>", "</a>"]])
def test_tags_inside_each_other_are_refused(tags):
    with pytest.raises(ValueError, match="not empty and not part of each other"):
        build_automaton([b"a"], tags)


def test_a_table_narrower_than_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size of at least 3, the vocabulary's, got 2"):
        build_automaton([b"a", b"b", b"c"], vocab_size=2)


def test_a_large_vocabulary_takes_seconds_at_most():
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz </>", np.uint8)
    lengths = np.clip(rng.normal(6.5, 3, 152_000), 1, 64).astype(int)
    drawn = letters[rng.integers(len(letters), size=lengths.sum())].tobytes()
    ends = np.cumsum(lengths)
    vocab = [drawn[e - n : e] for e, n in zip(ends, lengths, strict=True)]
    began = time.process_time()
    automaton = build_automaton(vocab)
    assert time.process_time() - began < 5
    assert automaton.table.shape == (len(automaton.completed), 152_000)
    assert automaton.table.nbytes < 32e6
