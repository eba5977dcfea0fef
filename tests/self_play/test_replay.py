import pytest
from builders import group, question
from hypothesis import given
from hypothesis import strategies as st

from sspjax.self_play.replay import after_step, remember
from sspjax.types import Replayed


def judged(text, correct, answer="Oslo"):
    asked = question(f"uid {text}", text, answer)
    return group(asked, ["x"] * len(correct), correct)


def texts(store):
    return [r.question.text for r in store]


def test_new_questions_are_stored_with_their_success():
    store = remember((), [judged("a", [True, False]), judged("b", [False, None, False])], 3)
    assert store == (
        Replayed(question=question("uid a", "a"), success_rate=0.5, step=3),
        Replayed(question=question("uid b", "b"), success_rate=0.0, step=3),
    )


def test_what_nobody_judged_is_not_stored():
    assert remember((), [judged("a", [None, None])], 1) == ()


def test_a_group_with_fewer_than_two_verdicts_is_not_stored():
    assert remember((), [judged("a", [True, None, None])], 1) == ()
    assert remember((), [judged("a", [True, None, None])], 1, duplicates=True) == ()
    # What was stored before stays as it was.
    store = remember((), [judged("a", [True, False])], 1)
    assert remember(store, [judged("a", [False, None])], 2) == store


def test_asked_again_it_is_the_newest():
    store = remember((), [judged("a", [True]), judged("b", [True])], 1)
    store = remember(store, [judged("a", [False], answer="Bergen")], 2)
    assert texts(store) == ["b", "a"]
    assert (store[1].question.answer, store[1].success_rate, store[1].step) == ("Bergen", 0.0, 2)


@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=4), max_size=6))
def test_every_text_once(steps):
    store, seen = (), set()
    for step, asked in enumerate(steps):
        before = store
        store = remember(store, [judged(t, [True]) for t in asked], step)
        seen |= set(asked)
        assert len(before) <= len(store)
    assert sorted(texts(store)) == sorted(seen)


def grown(size):
    return remember((), [judged(str(i), [True]) for i in range(size)], 1)


def test_cleared_after_every_tenth_step():
    store = ()
    for step in range(1, 21):
        store = remember(store, [judged(str(step), [True])], step)
        store = after_step(store, step, clear_every=10, keep=0.0)
        assert len(store) == step % 10


def test_cleared_one_step_earlier_as_in_the_published_code():
    """After steps 9, 19, 29."""
    cleared = [
        step
        for step in range(1, 31)
        if not after_step(grown(3), step, clear_every=10, keep=0.0, first_clear=9)
    ]
    assert cleared == [9, 19, 29]
    late = [
        s
        for s in range(1, 31)
        if not after_step(grown(1), s, clear_every=5, keep=0.0, first_clear=20)
    ]
    assert late == [20, 25, 30]


def test_duplicates_are_kept_where_asked_for():
    """As the published code's pool: the same text again, with its own success rate."""
    store = remember((), [judged("a", [True]), judged("b", [False])], 1, duplicates=True)
    store = remember(store, [judged("a", [False]), judged("c", [None])], 2, duplicates=True)
    assert texts(store) == ["a", "b", "a"]
    assert [r.success_rate for r in store] == [1.0, 0.0, 0.0]
    assert [r.step for r in store] == [1, 1, 2]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (0.0, []),
        (0.3, ["7", "8", "9"]),
        (0.29, ["7", "8", "9"]),
        (1.0, [str(i) for i in range(10)]),
    ],
)
def test_the_newest_share_survives(keep, left):
    assert texts(after_step(grown(10), 5, clear_every=5, keep=keep)) == left


def test_without_resets_nothing_is_lost():
    assert after_step(grown(3), 10, clear_every=0, keep=0.0) == grown(3)
    assert after_step((), 10, clear_every=10, keep=0.5) == ()
