import dataclasses
import random

from builders import group, proposal, question
from hypothesis import given
from hypothesis import strategies as st

from sspjax.config import ShortfallConfig
from sspjax.self_play.board import DUMMY, SHORTFALL, Origin, substituted
from sspjax.types import Reason, Replayed


def stored(text, success=0.5):
    return Replayed(question=question(f"old {text}", text), success_rate=success, step=1)


def fill(proposals, store=(), max_success=1.0, seed=0, strategy="replay", duplicates=False):
    config = ShortfallConfig(max_success=max_success, duplicates=duplicates)
    return SHORTFALL[strategy](proposals, store, random.Random(seed), config)


def origins(board):
    return [s.origin for s in board.slots]


def mixed():
    return [
        proposal("t0"),
        proposal("t1", reason=Reason.LEAK),
        proposal("t2"),
        proposal("t3", asked=False, reason=Reason.NO_QUESTION),
    ]


def test_rejected_slots_are_refilled():
    board = fill(mixed(), [stored("a"), stored("b"), stored("c")])
    assert origins(board) == [Origin.NEW, Origin.REPLAYED, Origin.NEW, Origin.REPLAYED]
    assert [q.uid for q in board.questions] == ["t0", "t1/replay", "t2", "t3/replay"]
    assert {board.slots[i].question.text for i in (1, 3)} <= {"a", "b", "c"}
    assert board.slots[1].question.answer == "Oslo"


def test_slots_stay_empty_when_the_store_is():
    board = fill(mixed(), [stored("a")])
    assert sorted(o.value for o in origins(board)) == ["empty", "new", "new", "replayed"]
    assert [board.count(o) for o in Origin] == [2, 0, 1, 0, 1]
    assert origins(fill(mixed())) == [Origin.NEW, Origin.EMPTY, Origin.NEW, Origin.EMPTY]


def test_only_hard_enough_questions_are_reused():
    store = [stored("easy", 0.8), stored("hard", 0.2), stored("edge", 0.5)]
    texts = {q.text for s in range(20) for q in fill([mixed()[1]], store, 0.5, seed=s).questions}
    assert texts == {"hard", "edge"}


def test_drop_leaves_slots_empty():
    board = fill(mixed(), [stored("a")], strategy="drop")
    assert origins(board) == [Origin.NEW, Origin.EMPTY, Origin.NEW, Origin.EMPTY]


def test_dummies_fill_the_board():
    board = fill(mixed(), [stored("a")], strategy="dummy")
    assert origins(board) == [Origin.NEW, Origin.DUMMY, Origin.NEW, Origin.DUMMY]
    assert [q.uid for q in board.questions] == ["t0", "t1/dummy", "t2", "t3/dummy"]
    assert {board.slots[i].question.text for i in (1, 3)} == {DUMMY}
    assert board.slots[1].question.answer == "Oslo"
    groups = [group(q, ["x"], [False]) for q in board.questions]
    # They are no questions of a proposer: no pay, no rate, no replay.
    assert [g.question.uid for g in board.asked(groups)] == ["t0", "t2"]


def test_with_duplicates_every_slot_draws_on_its_own():
    failed = [proposal(f"t{i}", reason=Reason.LEAK) for i in range(40)]
    board = fill(failed, [stored("a"), stored("b")], duplicates=True)
    drawn = [q.text for q in board.questions]
    assert len(drawn) == 40
    # Binomial(40, 1/2): outside 8..32 in less than one of 1e4 streams, and this one is fixed.
    assert 8 <= drawn.count("a") <= 32
    # The text that was newly asked may come again, and so may a question that is too easy.
    again = fill([proposal("t0", text="a"), failed[1]], [stored("a", 0.9)], 0.5, duplicates=True)
    assert [q.text for q in again.questions] == ["a", "a"]
    assert origins(fill(failed[:2], duplicates=True)) == [Origin.EMPTY] * 2


def test_later_tries_take_the_rejected_places():
    tried = [
        proposal("u0", reason=Reason.TOO_SHORT),
        proposal("u1"),
    ]
    kept, left = substituted(mixed(), tried)
    assert [p.trajectory.uid for p in kept] == ["t0", "u1", "t2", "t3"]
    assert [p.trajectory.uid for p in left] == ["t1", "u0"]
    assert [p.accepted for p in kept] == [True, True, True, False]
    kept, left = substituted(mixed(), [proposal(f"u{i}") for i in range(3)])
    assert [p.trajectory.uid for p in kept] == ["t0", "u0", "t2", "u1"]
    assert [p.trajectory.uid for p in left] == ["t1", "t3", "u2"]


@given(
    st.lists(st.booleans(), max_size=6),
    st.sets(st.sampled_from("abcdefg")),
    st.integers(0, 5),
)
def test_no_question_is_on_the_board_twice(accepted, texts, seed):
    proposals = [
        proposal(f"t{i}", text="abc"[i % 3], reason=None if ok else Reason.LEAK)
        for i, ok in enumerate(accepted)
    ]
    asked = {p.question.text for p in proposals if p.accepted}
    board = fill(proposals, [stored(t) for t in sorted(texts)], seed=seed)
    replayed = [s.question.text for s in board.slots if s.origin is Origin.REPLAYED]
    assert len(board.slots) == len(proposals)
    assert len(set(replayed)) == len(replayed)
    assert not asked & set(replayed)
    assert len(replayed) == min(len(texts - asked), accepted.count(False))
    assert len({q.uid for q in board.questions}) == len(board.questions)


def test_same_stream_same_board():
    store = [stored(t) for t in "abcdefgh"]
    texts = [[q.text for q in fill(mixed(), store, seed=s).questions] for s in (1, 1, 2, 3, 4)]
    assert texts[0] == texts[1]
    assert len({tuple(t) for t in texts}) > 1


def test_new_groups_are_those_of_new_slots():
    board = fill(mixed(), [stored("a"), stored("b")])
    groups = [group(q, ["Oslo"], [True]) for q in board.questions]
    assert [g.question.uid for g in board.new(groups)] == ["t0", "t2"]


def test_what_was_outvoted_is_neither_new_nor_asked():
    """It was played all the same: its group is there."""
    proposals = mixed()
    board = fill(proposals, [stored("a")])
    groups = [group(q, ["Oslo"], [True]) for q in board.questions]
    assert origins(board.after(proposals)) == origins(board)
    proposals[0] = dataclasses.replace(proposals[0], reason=Reason.CONSENSUS)
    after = board.after(proposals)
    others = origins(board)[1:]
    assert origins(after) == [Origin.OUTVOTED, *others]
    assert after.questions == board.questions
    assert [g.question.uid for g in after.new(groups)] == ["t2"]
    replayed = [f"t{i}/replay" for i in (1, 3) if origins(board)[i] is Origin.REPLAYED]
    assert sorted(g.question.uid for g in after.asked(groups)) == sorted(["t2", *replayed])
    assert board.asked(groups) == tuple(groups)
