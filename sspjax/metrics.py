"""What a run says about itself: rows, event files, trajectories, the terminal.

The only module that may ask the synthetic world's oracle what is true: truth is watched here and
never reaches a filter, a reward or the learner.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
import rich.logging
import rich.progress
import tensorboardX

from sspjax.data.miniwiki import load_graph
from sspjax.data.oracle import Oracle
from sspjax.errors import UserError
from sspjax.types import Example, Group, Proposal, Question, Reason, Seed, Trajectory, Turn

log = logging.getLogger(__name__)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Recorded by JAX once for every program it builds or loads from its compilation cache."""


class MetricsError(UserError, ValueError):
    """A metrics file or row that is not what this module writes."""


# Rows ---------------------------------------------------------------------------------------------


class MetricsWriter:
    """Appends one flat JSON object a step to WORKDIR/NAME.jsonl, and to TensorBoard event files.

    A killed run leaves at worst half a last line and rows beyond its last checkpoint; `cut` removes
    both, so call it with the checkpointed step (-1 where there is none) before the first `write`.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], name: str = "metrics", *, active: bool = True
    ):
        """`active=False` (all processes but the main one) writes nothing."""
        self.path = pathlib.Path(workdir) / f"{name}.jsonl"
        self._events = pathlib.Path(workdir) / "tensorboard" / name
        self._active = active
        self._board: tensorboardX.SummaryWriter | None = None
        self._first_step = 0
        if active:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Appends the row of `step`; a value that is not finite becomes null in the file.

        Raises:
          MetricsError: a value that is not a number, or a row that brings its own `step`.
        """
        if not self._active:
            return
        values = {name: _number(name, value) for name, value in row.items()}
        if "step" in values:
            raise MetricsError("a metrics row names `step` itself: it is the writer's first key")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(step, values))
        board = self._open_board()
        for name, value in values.items():
            board.add_scalar(name, value, step)
        board.flush()

    def cut(self, step: int, last_row: Mapping[str, float] | None = None) -> None:
        """Drops every row after `step`, here and in TensorBoard; the next row is `step + 1`.

        The file is rewritten under a temporary name and renamed. `last_row`, the row of `step` as
        the checkpoint holds it, is appended where the file ends earlier.
        """
        if not self._active:
            return
        self.close()
        self._first_step = step + 1
        rows = [row for row in read_rows(self.path) if row["step"] <= step]
        lines = [json.dumps(row) + "\n" for row in rows]
        if last_row and (not rows or rows[-1]["step"] < step):
            lines.append(_line(step, {k: _number(k, v) for k, v in last_row.items()}))
        _replace(self.path, lines)

    def close(self) -> None:
        """Closes the event file; a later `write` opens a new one."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def _open_board(self) -> tensorboardX.SummaryWriter:
        if self._board is None:
            # TensorBoard forgets what earlier event files say from this step on.
            self._board = tensorboardX.SummaryWriter(str(self._events), purge_step=self._first_step)
        return self._board


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a metrics file in order; none where there is no file.

    A last line that was cut off while it was written is left out.

    Raises:
      MetricsError: any other line that is not a JSON object with a `step`.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    rows = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            log.warning("%s: line %d was cut off while it was written; left out", path, number)
            break
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise MetricsError(f"{path}, line {number}: not JSON ({error}); remove it") from error
        if not isinstance(row, dict) or "step" not in row:
            raise MetricsError(f"{path}, line {number}: expected an object with a step; remove it")
        rows.append(row)
    return rows


def _number(name: str, value: Any) -> int | float:
    """Python's own number, whatever array scalar came."""
    array = np.asarray(value)
    if array.shape or not (np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise MetricsError(f"metric {name}={value!r}: expected one number")
    return int(array) if array.dtype.kind in "iub" else float(array)


def _line(step: int, values: Mapping[str, int | float]) -> str:
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({"step": step, **finite}, allow_nan=False) + "\n"


def _replace(path: pathlib.Path, lines: Iterable[str]) -> None:
    """Writes under a temporary name first: the file is there whole, or as it was."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)
    temporary.replace(path)


# Time and compilation -----------------------------------------------------------------------------


class Timers:
    """Wall-clock and CPU seconds of the named parts of a step; parts with one name add up."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ):
        """`cpu_clock` counts every thread of the process, the device threads of a CPU included."""
        self._clock, self._cpu_clock = clock, cpu_clock
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Adds the time spent inside, an exception's included."""
        start, cpu_start = self._clock(), self._cpu_clock()
        try:
            yield
        finally:
            self.add(f"timing_s/{name}", self._clock() - start)
            self.add(f"perf/cpu_s/{name}", self._cpu_clock() - cpu_start)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """`timing_s/<name>` and `perf/cpu_s/<name>` of everything since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class CompileCounter:
    """Counts the programs this process compiles, from any thread; use as a context or `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def take(self) -> int:
        """Programs since the last call: a step's `perf/compiles`, 0 after the first step."""
        with self._lock:
            count, self._count = self._count, 0
        return count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def __enter__(self) -> CompileCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            with self._lock:
                self._count += 1


# Trajectories -------------------------------------------------------------------------------------


class TrajectoryWriter:
    """Writes WORKDIR/trajectories/step_N.jsonl, one JSON object a trajectory; see `records`."""

    def __init__(self, workdir: str | os.PathLike[str], *, active: bool = True):
        self.folder = pathlib.Path(workdir) / "trajectories"
        self._active = active

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """The file appears whole; one of the same step is replaced."""
        if self._active:
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self._path(step), (json.dumps(row) + "\n" for row in rows))

    def cut(self, step: int) -> None:
        """Removes the files of later steps, which a resumed run writes anew."""
        if self._active and self.folder.exists():
            for path in self.folder.glob("step_*.jsonl"):
                if int(path.stem.removeprefix("step_")) > step:
                    path.unlink()

    def _path(self, step: int) -> pathlib.Path:
        return self.folder / f"step_{step}.jsonl"


def records(
    proposals: Sequence[Proposal],
    groups: Sequence[Group],
    examples: Sequence[Example],
    readings: Sequence[Trajectory] = (),
) -> list[dict[str, Any]]:
    """Every trajectory of a step as a JSON-able object: proposers, solvers, then readers.

    `reward`, `advantage` and `terms` come from the example made of a trajectory (null and empty
    where none was), `correct` from its group, `question` and `reason` from its proposal.
    """
    scored = {example.trajectory.uid: example for example in examples}
    rows = []
    for proposal in proposals:
        row = _record(proposal.trajectory, scored.get(proposal.trajectory.uid))
        row["question"] = proposal.question.text if proposal.question else None
        row["reason"] = proposal.reason.value if proposal.reason else None
        rows.append(row)
    for group in groups:
        for rollout, correct in zip(group.rollouts, group.correct, strict=True):
            rows.append(_record(rollout, scored.get(rollout.uid)) | {"correct": correct})
    return rows + [_record(reading, None) for reading in readings]


def _record(trajectory: Trajectory, example: Example | None) -> dict[str, Any]:
    prompt = trajectory.prompt
    return {
        "uid": trajectory.uid,
        "role": prompt.role.name.lower(),
        "group": prompt.group,
        "subject": _subject(prompt.subject),
        "prompt": "\n\n".join(message.content for message in prompt.messages),
        "prompt_token_ids": prompt.token_ids.tolist(),
        "turns": [_turn(turn) for turn in trajectory.turns],
        "stop": trajectory.stop.value,
        "policy_step": trajectory.policy_step,
        "skills": list(trajectory.skills),
        "reward": example.reward if example else None,
        "advantage": example.advantage if example else None,
        "terms": dict(example.terms) if example else {},
        "correct": None,
        "question": None,
        "reason": None,
    }


def _subject(subject: Seed | Question) -> dict[str, Any]:
    if isinstance(subject, Question):
        return {"uid": subject.uid, "question": subject.text, "answer": subject.answer}
    return {"uid": subject.uid, "answer": subject.answer, "hops": subject.hops}


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "sampled": turn.sampled,
        "text": turn.text,
        "act": turn.act.value,
        "argument": turn.argument,
        "documents": [document.id for document in turn.documents],
        "token_ids": turn.token_ids.tolist(),
        # The shortest decimals that give the same f32 back; a tool's tokens have none.
        "logprobs": [float(x) for x in turn.logprobs.astype(str)] if turn.sampled else [],
    }


# Truth --------------------------------------------------------------------------------------------


def open_oracle(world: str | os.PathLike[str]) -> Oracle:
    """What is true in the mini-encyclopaedia of a folder. Raises DataError where there is none."""
    return Oracle(load_graph(world))


def truth_metrics(oracle: Oracle, proposals: Sequence[Proposal]) -> dict[str, float]:
    """How many of a step's new questions are true in the synthetic world.

    `selfplay/oracle_correct_rate` is the true share of the questions every gate accepted,
    `selfplay/oracle_count` their number; `selfplay/oracle_verified_rate` is the share among those
    that passed verification, rejected by the consensus gate or not. A rate of nothing is left out.

    `selfplay/oracle_{true,false}_read` count the questions that verification decided on (its errors
    left out), `selfplay/oracle_{true,false}_accepted` those of them that it passed: their ratios
    are how well the reader tells true from false.
    """
    truths: dict[Reason | None, list[bool]] = {reason: [] for reason in (*_PASSED, *_REFUSED)}
    for proposal in proposals:
        if proposal.question is not None and proposal.reason in truths:
            truths[proposal.reason].append(oracle.correct(proposal.question))
    accepted = truths[None]
    verified = [true for reason in _PASSED for true in truths[reason]]
    read = verified + [true for reason in _REFUSED for true in truths[reason]]
    rates = {"selfplay/oracle_correct_rate": accepted, "selfplay/oracle_verified_rate": verified}
    row = {name: sum(true) / len(true) for name, true in rates.items() if true}
    return row | {
        "selfplay/oracle_count": len(accepted),
        "selfplay/oracle_true_read": read.count(True),
        "selfplay/oracle_true_accepted": verified.count(True),
        "selfplay/oracle_false_read": read.count(False),
        "selfplay/oracle_false_accepted": verified.count(False),
    }


_PASSED = (None, Reason.CONSENSUS)
"""What became of the questions that passed verification."""

_REFUSED = (Reason.VERIFY_WRONG, Reason.COUNTERFACTUAL)
"""Why verification rejects a question that could be read."""


# The terminal -------------------------------------------------------------------------------------


def start_logging(*, main: bool = True) -> rich.console.Console:
    """Sends log lines to stderr and returns the console that `Progress` draws on.

    Other processes than the main one show warnings only.
    """
    console = rich.console.Console(file=sys.stderr)
    if console.is_terminal:
        handler: logging.Handler = rich.logging.RichHandler(console=console, show_path=False)
        layout = "%(message)s"
    else:
        handler = logging.StreamHandler()
        layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=layout, handlers=[handler], force=True)
    for ours in ("sspjax", "__main__"):
        logging.getLogger(ours).setLevel(logging.INFO if main else logging.WARNING)
    # Orbax warns about each folder it opens to read, and logs every failure with its stack from
    # several threads at once; what fails is raised as well.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    return console


class Progress:
    """Phase, step, accuracy and time left: a live line on a terminal, else log lines."""

    def __init__(
        self,
        phase: str,
        total: int,
        *,
        console: rich.console.Console,
        done: int = 0,
        every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`done` steps were made before a resume and do not count for the time left.

        `every`: steps of one log line; the last step always has one.
        """
        self._phase, self._total, self._first = phase, total, done
        self._every, self._logged = every, -1
        self._clock = clock
        self._start = clock()
        self._live: rich.progress.Progress | None = None
        if console.is_terminal:
            self._live = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[shown]}"),
                console=console,
            )
            self._task = self._live.add_task(phase, total=total, completed=done, shown="")
            self._live.start()

    def update(
        self, step: int, accuracy: float | None = None, *, loss: float | None = None
    ) -> None:
        """`step` steps are done; `accuracy` in 0..1 is shown in percent."""
        parts = [] if accuracy is None else [f"accuracy {accuracy:.1%}"]
        if loss is not None:
            parts.append(f"loss {loss:.3f}")
        made = step - self._first
        if made > 0:
            left = (self._clock() - self._start) / made * (self._total - step)
            parts.append(f"{_duration(left)} left")
        shown = ", ".join(parts)
        if self._live is not None:
            self._live.update(self._task, completed=step, shown=shown)
        elif step != self._logged and (step % self._every == 0 or step == self._total):
            self._logged = step
            log.info("%s %d/%d, %s", self._phase, step, self._total, shown or "started")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
