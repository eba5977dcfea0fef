import io
import json
import logging
import math
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from tensorboardX.proto.event_pb2 import Event, SessionLog

from sspjax import metrics
from sspjax.types import (
    Act,
    Document,
    Example,
    Group,
    Message,
    Prompt,
    Proposal,
    Question,
    Reason,
    Role,
    Seed,
    Stop,
    Trajectory,
    Turn,
)

# Rows


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(folder):
    """TensorBoard events of a folder's files in order: length, crc, message, crc."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_rows_are_flat_with_the_step_first(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    row = {
        "actor/kl_loss": np.float32(0.5),
        "perf/compiles": 0,
        "actor/grad_norm": jnp.asarray(2.0),
        "ok": np.bool_(True),
        "actor/pg_loss": math.nan,
        "x": -math.inf,
    }
    writer.write(1, row)
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "actor/kl_loss": 0.5, "perf/compiles": 0, "actor/grad_norm": 2.0, '
        '"ok": 1, "actor/pg_loss": null, "x": null}\n'
    )
    scalars = {
        value.tag: (event.step, value.simple_value)
        for event in events(tmp_path / "tensorboard" / "metrics")
        for value in event.summary.value
    }
    assert scalars["actor/kl_loss"] == (1, 0.5)
    assert math.isnan(scalars["actor/pg_loss"][1])
    assert len(scalars) == len(row)


@pytest.mark.parametrize("row", [{"a": np.ones(2)}, {"a": "1"}, {"step": 3}, {"a": None}])
def test_what_is_not_a_number_is_refused(tmp_path, row):
    with pytest.raises(metrics.MetricsError):
        metrics.MetricsWriter(tmp_path).write(1, row)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_other_processes_write_nothing(tmp_path):
    writer = metrics.MetricsWriter(tmp_path / "run", active=False)
    writer.write(1, {"a": 1})
    writer.cut(0)
    trajectories = metrics.TrajectoryWriter(tmp_path / "run", active=False)
    trajectories.write(1, [{"uid": "t"}])
    trajectories.cut(0)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_leaves_no_trace_of_lost_steps(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, {"a": step / 3})
    writer.close()
    whole = writer.path.read_text().splitlines(keepends=True)
    writer.path.write_text("".join(whole) + '{"step": 6, "a": 1.')

    writer = metrics.MetricsWriter(tmp_path)
    writer.cut(3)
    assert writer.path.read_text() == "".join(whole[:3])
    writer.write(4, {"a": 4 / 3})
    writer.close()
    assert writer.path.read_text() == "".join(whole[:4])
    # A start with a step tells TensorBoard to forget what came at or after it.
    starts = [
        event.step
        for event in events(tmp_path / "tensorboard" / "metrics")
        for _, field in event.ListFields()
        if isinstance(field, SessionLog) and field.status == SessionLog.START
    ]
    assert starts[-1] == 4
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["metrics.jsonl"]


def test_cut_rolls_a_running_writer_back(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, {"attempt": 0})
    writer.cut(1)
    writer.write(2, {"attempt": 1})
    writer.close()
    assert lines(writer.path) == [{"step": 1, "attempt": 0}, {"step": 2, "attempt": 1}]


def test_cut_adds_the_row_the_checkpoint_holds(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    writer.write(1, {"a": 1})
    writer.cut(2, {"a": 2, "b": math.nan})
    assert lines(writer.path) == [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": None}]
    writer.cut(2, {"a": 9})
    assert lines(writer.path)[-1]["a"] == 2


def test_damage_that_no_kill_explains_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(metrics.MetricsError, match="line 2"):
        metrics.read_rows(path)
    path.write_text('{"a": 1}\n')
    with pytest.raises(metrics.MetricsError, match="a step"):
        metrics.read_rows(path)
    assert metrics.read_rows(tmp_path / "none.jsonl") == []


# Time and compilation


def test_timers_add_up_and_start_over():
    ticks = iter([0.0, 1.5, 10.0, 10.25, 20.0, 23.0])
    cpu_ticks = iter([0.0, 0.5, 1.0, 1.25, 2.0, 2.0])
    timers = metrics.Timers(clock=lambda: next(ticks), cpu_clock=lambda: next(cpu_ticks))
    with timers.measure("gen"):
        pass
    with timers.measure("gen"):
        pass
    with pytest.raises(KeyError), timers.measure("update"):
        raise KeyError
    timers.add("timing_s/wait", 0.5)
    assert timers.take() == {
        "timing_s/gen": 1.75,
        "timing_s/update": 3.0,
        "timing_s/wait": 0.5,
        "perf/cpu_s/gen": 0.75,
        "perf/cpu_s/update": 0.0,
    }
    assert timers.take() == {}


def test_each_program_is_counted_once():
    double = jax.jit(lambda x: x * 2)
    small, large = np.zeros(3, np.float32), np.zeros(4, np.float32)
    with metrics.CompileCounter() as counter:
        double(small)
        double(small)
        assert counter.take() == 1
        double(small)
        assert counter.take() == 0
        double(large)
        assert counter.take() == 1
    double(np.zeros(5, np.float32))
    assert counter.take() == 0


# Trajectories

PAPER = Document(id="d7", title="Paper", text="Paper is made of wood.")
SEED = Seed(uid="s1", answer="wood", hops=2)
QUESTION = Question(uid="q1", text="What is paper made of?", answer="wood")


def trajectory(uid, role, subject):
    prompt = Prompt(
        role=role,
        subject=subject,
        group="g",
        messages=(
            Message(author="system", content="Search."),
            Message(author="user", content="Go."),
        ),
        token_ids=np.array([1, 2], np.int32),
    )
    turns = (
        Turn(
            token_ids=np.array([5, 6], np.int32),
            logprobs=np.array([-0.1, -1 / 3], np.float32),
            sampled=True,
            text="<search>paper</search>",
            act=Act.SEARCH,
            argument="paper",
        ),
        Turn(
            token_ids=np.array([7], np.int32),
            logprobs=np.zeros(1, np.float32),
            sampled=False,
            text="Paper is made of wood.",
            documents=(PAPER,),
        ),
    )
    return Trajectory(uid=uid, prompt=prompt, turns=turns, stop=Stop.TURNS, policy_step=4)


def test_records_join_what_is_known_of_a_trajectory():
    proposer = trajectory("p", Role.PROPOSER, SEED)
    rejected = trajectory("r", Role.PROPOSER, SEED)
    solvers = tuple(trajectory(f"a{i}", Role.SOLVER, QUESTION) for i in range(2))
    reader = trajectory("v", Role.READER, QUESTION)
    proposals = [
        Proposal(trajectory=proposer, question=QUESTION),
        Proposal(trajectory=rejected, question=None, reason=Reason.NO_QUESTION),
    ]
    groups = [Group(question=QUESTION, rollouts=solvers, correct=(True, None))]
    examples = [
        Example(trajectory=solvers[0], reward=1.0, advantage=0.5, terms={"correct": 1.0}),
        Example(trajectory=proposer, reward=0.25, advantage=0.25, terms={"one_minus_p": 0.25}),
    ]
    rows = metrics.records(proposals, groups, examples, [reader])
    assert [row["uid"] for row in rows] == ["p", "r", "a0", "a1", "v"]
    p, r, a0, a1, v = rows
    assert (p["role"], p["question"], p["reason"]) == ("proposer", QUESTION.text, None)
    assert p["subject"] == {"uid": "s1", "answer": "wood", "hops": 2}
    assert (p["reward"], p["advantage"], p["terms"]) == (0.25, 0.25, {"one_minus_p": 0.25})
    assert (r["question"], r["reason"], r["reward"]) == (None, "no_question", None)
    assert (a0["correct"], a0["reward"], a0["advantage"]) == (True, 1.0, 0.5)
    assert (a1["correct"], a1["reward"], a1["terms"]) == (None, None, {})
    assert a0["subject"] == {"uid": "q1", "question": QUESTION.text, "answer": "wood"}
    assert (v["role"], v["stop"], v["policy_step"], v["group"]) == ("reader", "turns", 4, "g")
    assert (v["prompt"], v["prompt_token_ids"]) == ("Search.\n\nGo.", [1, 2])
    sampled, forced = v["turns"]
    assert (sampled["act"], sampled["argument"]) == ("search", "paper")
    assert (forced["sampled"], forced["documents"], forced["logprobs"]) == (False, ["d7"], [])
    assert all(row.keys() == rows[0].keys() for row in rows)


def test_recorded_logprobs_are_the_sampled_ones_bit_for_bit(tmp_path):
    writer = metrics.TrajectoryWriter(tmp_path)
    written = trajectory("p", Role.PROPOSER, SEED)
    writer.write(3, metrics.records([Proposal(trajectory=written, question=None)], [], []))
    assert [path.name for path in writer.folder.iterdir()] == ["step_3.jsonl"]
    (row,) = lines(writer.folder / "step_3.jsonl")
    turn = row["turns"][0]
    np.testing.assert_array_equal(np.array(turn["logprobs"], np.float32), written.turns[0].logprobs)
    assert turn["token_ids"] == [5, 6]


def test_a_trajectory_file_is_whole_or_absent(tmp_path):
    writer = metrics.TrajectoryWriter(tmp_path)

    def broken():
        yield {"uid": "t"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(1, broken())
    assert list(writer.folder.glob("*.jsonl")) == []
    for step in (1, 2, 10):
        writer.write(step, [{"uid": "t"}])
    writer.cut(2)
    assert {path.name for path in writer.folder.glob("*.jsonl")} == {
        "step_1.jsonl",
        "step_2.jsonl",
    }


# Truth


class TrueAnswers:
    """An oracle for which these questions are true."""

    def __init__(self, *true):
        self.true = true

    def correct(self, question):
        return question.uid in self.true


def proposal(uid, reason=None):
    question = Question(uid=uid, text=f"{uid}?", answer="a")
    return Proposal(
        trajectory=trajectory(uid, Role.PROPOSER, SEED), question=question, reason=reason
    )


def test_truth_is_counted_behind_every_gate_and_behind_verification():
    proposals = [
        proposal("a"),
        proposal("b"),
        proposal("c"),
        proposal("d", Reason.CONSENSUS),
        proposal("e", Reason.VERIFY_WRONG),
        proposal("f", Reason.VERIFY_WRONG),
        proposal("g", Reason.COUNTERFACTUAL),
        # Neither read nor decided on: nothing of these is counted.
        proposal("h", Reason.VERIFY_ERROR),
        proposal("i", Reason.VERIFY_TOO_LONG),
        proposal("j", Reason.NOT_FLUENT),
        proposal("k", Reason.NOT_GROUNDED),
        Proposal(
            trajectory=trajectory("l", Role.PROPOSER, SEED),
            question=None,
            reason=Reason.NO_QUESTION,
        ),
    ]
    oracle = TrueAnswers("a", "b", "e", "h", "i", "j", "k")
    assert metrics.truth_metrics(oracle, proposals) == {
        "selfplay/oracle_correct_rate": 2 / 3,
        "selfplay/oracle_verified_rate": 2 / 4,
        "selfplay/oracle_count": 3,
        # a, b of a, b, e are believed; c, d of c, d, f, g.
        "selfplay/oracle_true_read": 3,
        "selfplay/oracle_true_accepted": 2,
        "selfplay/oracle_false_read": 4,
        "selfplay/oracle_false_accepted": 2,
    }


def test_no_question_has_no_rate():
    none = {
        "selfplay/oracle_count": 0,
        "selfplay/oracle_true_read": 0,
        "selfplay/oracle_true_accepted": 0,
        "selfplay/oracle_false_read": 0,
        "selfplay/oracle_false_accepted": 0,
    }
    assert metrics.truth_metrics(TrueAnswers(), [proposal("a", Reason.LEAK)]) == none
    assert metrics.truth_metrics(TrueAnswers(), [proposal("a", Reason.CONSENSUS)]) == {
        **none,
        "selfplay/oracle_verified_rate": 0.0,
        "selfplay/oracle_false_read": 1,
        "selfplay/oracle_false_accepted": 1,
    }


# The terminal


def test_without_a_terminal_every_step_is_a_log_line(caplog):
    caplog.set_level(logging.INFO, logger="sspjax.metrics")
    ticks = iter([100.0, 130.0])
    with metrics.Progress(
        "self-play",
        20,
        console=rich.console.Console(file=io.StringIO()),
        done=5,
        clock=lambda: next(ticks),
    ) as progress:
        progress.update(5)
        progress.update(8, accuracy=0.625)
    assert [record.getMessage() for record in caplog.records] == [
        "self-play 5/20, started",
        "self-play 8/20, accuracy 62.5%, 0:02:00 left",
    ]


def test_log_lines_may_be_fewer_than_steps(caplog):
    caplog.set_level(logging.INFO, logger="sspjax.metrics")
    console = rich.console.Console(file=io.StringIO())
    with metrics.Progress("warm start", 7, console=console, every=3, clock=lambda: 0.0) as progress:
        for step in (1, 2, 3, 4, 5, 6, 7, 7):
            progress.update(step, loss=step / 8)
    assert [record.getMessage().split(", ")[:2] for record in caplog.records] == [
        ["warm start 3/7", "loss 0.375"],
        ["warm start 6/7", "loss 0.750"],
        ["warm start 7/7", "loss 0.875"],
    ]


def test_on_a_terminal_one_line_is_kept_up_to_date():
    screen = io.StringIO()
    console = rich.console.Console(file=screen, force_terminal=True, width=100)
    with metrics.Progress("warm start", 10, console=console) as progress:
        progress.update(7, accuracy=0.5)
    assert "warm start" in screen.getvalue()
    assert "7/10" in screen.getvalue()
    assert "accuracy 50.0%" in screen.getvalue()
