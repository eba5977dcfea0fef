import pytest
from hypothesis import given
from hypothesis import strategies as st

from sspjax.self_play.seeds import SEED_SOURCES
from sspjax.types import Seed


def source(size, seed=0):
    return SEED_SOURCES["answers"]([Seed(uid=f"s{i}", answer=f"a{i}") for i in range(size)], seed)


def answers(seeds):
    return [s.answer for s in seeds]


@given(
    size=st.integers(1, 7),
    cursor=st.integers(0, 40),
    first=st.integers(0, 20),
    second=st.integers(0, 20),
)
def test_two_takes_are_one_long_take(size, cursor, first, second):
    pool = source(size)
    a, middle = pool.take(cursor, first)
    b, end = pool.take(middle, second)
    assert (a + b, end) == pool.take(cursor, first + second)
    assert end == cursor + first + second


@given(size=st.integers(1, 9), epoch=st.integers(0, 5), seed=st.integers(0, 3))
def test_every_epoch_holds_every_seed_once(size, epoch, seed):
    taken, _ = source(size, seed).take(epoch * size, size)
    assert sorted(answers(taken)) == sorted(f"a{i}" for i in range(size))


def test_epochs_and_runs_have_their_own_orders():
    first, cursor = source(50).take(0, 50)
    second, _ = source(50).take(cursor, 50)
    other, _ = source(50, seed=1).take(0, 50)
    again, _ = source(50).take(0, 50)
    assert len({tuple(answers(s)) for s in (first, second, other)}) == 3
    assert again == first


def test_a_seed_taken_twice_in_a_step_names_two_groups():
    taken, cursor = source(3).take(2, 8)
    assert cursor == 10
    assert len({s.uid for s in taken}) == 8
    assert all(s.uid.split("@")[0] == s.answer.replace("a", "s") for s in taken)


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_seed_without_answer_is_refused(answer):
    with pytest.raises(ValueError, match="seed s7: expected an answer"):
        SEED_SOURCES["answers"]([Seed(uid="s7", answer=answer)], 0)


def test_empty_pool_is_refused():
    with pytest.raises(ValueError, match="at least one answer"):
        SEED_SOURCES["answers"]([], 0)
