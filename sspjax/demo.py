"""The demo: an agent from nothing to trained, and what that changed.

    python -m sspjax.demo --config=configs/tiny.py --workdir=runs/tiny [--config.seed=1]

`make demo` runs this. Run again with the same workdir it resumes, or shows the results again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from sspjax import warm_start
from sspjax.ask import ended, spoken
from sspjax.command_line import load_config, parse, parser, run
from sspjax.config import RunConfig
from sspjax.errors import UserError
from sspjax.evaluate import examination
from sspjax.metrics import read_rows, start_logging
from sspjax.reopen import saved_policies, saved_steps
from sspjax.train import Setup, build, learn
from sspjax.types import Group
from sspjax.workdir import Workdir

LAST = 10
"""Steps at the end of self-play over which rates are pooled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exam:
    """What an agent knows: exact match in 0..100, and its greedy trajectories."""

    onehop_em: float
    twohop_em: float
    sampled_em: float
    """At temperature 1, mean of one and two hops."""
    count: int
    groups: tuple[Group, ...]

    @property
    def avg_em(self) -> float:
        return (self.onehop_em + self.twohop_em) / 2

    def numbers(self) -> dict[str, float]:
        """As in summary.json."""
        return {
            "avg_em": self.avg_em,
            "onehop_em": self.onehop_em,
            "twohop_em": self.twohop_em,
            "sampled_em": self.sampled_em,
            "count": self.count,
        }


class Spent:
    """Seconds and CPU-seconds of every phase, over all starts of a demo.

    Kept in a file that is written when a phase ends, well or badly; what a start that was killed
    without a word had spent in its last phase is not in it. CPU time is this process's.
    """

    def __init__(self, path: Path):
        self._path = path
        nothing = {"seconds": {}, "cpu_seconds": {}}
        self._spent = json.loads(path.read_text()) if path.exists() else nothing
        # What was spent before now (imports) belongs to the first phase.
        self._cpu = 0.0

    @contextlib.contextmanager
    def on(self, phase: str) -> Iterator[None]:
        """Adds the time since the phase before it ended."""
        start = time.monotonic()
        try:
            yield
        finally:
            cpu = time.process_time()
            self._add("seconds", phase, time.monotonic() - start)
            self._add("cpu_seconds", phase, cpu - self._cpu)
            self._cpu = cpu
            write_json(self._path, self._spent)

    def forget(self, phase: str) -> None:
        """Begins a phase anew that is done again at every start."""
        for kind in self._spent.values():
            kind.pop(phase, None)

    def numbers(self) -> dict[str, dict[str, float | None]]:
        """`seconds` and `cpu_seconds` as in summary.json; null for a phase that never ran."""
        install = installation(Path(sys.prefix))
        phases = ("warm_start", "self_play", "evaluate")
        return {
            kind: {"install": install[kind], **{p: spent.get(p) for p in phases}}
            for kind, spent in self._spent.items()
        }

    def _add(self, kind: str, phase: str, value: float) -> None:
        self._spent[kind][phase] = self._spent[kind].get(phase, 0.0) + value


def installation(environment: Path) -> dict[str, float | None]:
    """What `make install` took to make this environment; null where it did not."""
    stamp = environment / "install.json"
    if not stamp.exists():
        return {"seconds": None, "cpu_seconds": None}
    took = json.loads(stamp.read_text())
    return {
        "seconds": took["seconds"],
        "cpu_seconds": took["user_seconds"] + took["system_seconds"],
    }


def demo(config: RunConfig, root: str | Path, out: rich.console.Console) -> dict[str, Any]:
    """Warm start, evaluation, self-play, evaluation; what was written to summary.json.

    Raises UserError for a config without a warm start or a world with two-hop questions.
    """
    if config.world.kind != "miniwiki" or config.world.hops < 2 or not config.warm_start.steps:
        raise UserError(
            "the demo compares one-hop and two-hop questions before and after self-play; expected "
            "a config with world.kind=miniwiki, world.hops of at least 2, and warm_start.steps"
        )
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    console = start_logging()
    spent = Spent(root / "demo.json")
    spent.forget("evaluate")
    left = unfinished(config, Workdir(root))
    with spent.on(left[0]):
        setup = build(config, root)
    if "warm_start" in left:
        with spent.on("warm_start"):
            warm_start.run(config, setup.workdir, setup.trainer, setup.tokenizer, console)
    with spent.on("evaluate"):
        before = exam(setup, 0, console, "before self-play")
    if "self_play" in left:
        with spent.on("self_play"):
            learn(setup, console)
    with spent.on("evaluate"):
        after = exam(setup, None, console, "after self-play")
    summary = {
        "seed": config.seed,
        "steps": config.steps,
        "before": before.numbers(),
        "after": after.numbers(),
        **rates(read_rows(root / "metrics.jsonl")),
        **spent.numbers(),
    }
    write_json(root / "summary.json", summary)
    tell(out, root, summary, before, after)
    return summary


def unfinished(config: RunConfig, workdir: Workdir) -> list[str]:
    """The phases that a start still has before it; evaluation is done in each."""
    warmed, played = (saved_steps(workdir, phase) for phase in ("warm_start", "self_play"))
    phases = []
    if not played and config.warm_start.steps not in warmed:
        phases.append("warm_start")
    if max(played, default=-1) < config.steps:
        phases.append("self_play")
    return [*phases, "evaluate"]


def exam(setup: Setup, step: int | None, console: rich.console.Console, phase: str) -> Exam:
    """A saved policy on the world's own questions, greedy and at temperature 1."""
    state, found, _ = saved_policies(setup, step)
    how = dataclasses.replace(setup.config.eval, mode="agent", samples=1, temperature=0.0)
    greedy, groups = examination(setup, state, found, how, console, f"{phase}, greedy")
    how = dataclasses.replace(how, temperature=1.0)
    sampled, _ = examination(setup, state, found, how, console, f"{phase}, sampled")
    one, two = greedy["benchmarks"]["1hop"], greedy["benchmarks"]["2hop"]
    return Exam(
        onehop_em=one["em"],
        twohop_em=two["em"],
        sampled_em=sum(sampled["benchmarks"][name]["em"] for name in ("1hop", "2hop")) / 2,
        count=one["count"] + two["count"],
        groups=groups,
    )


def rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Rates of new questions pooled over the last steps, as in summary.json; null: no question."""
    last = [row for row in rows if row["step"] > 0][-LAST:]

    def pooled(name: str, *weights: str) -> float | None:
        pairs = [
            (row[name], sum(row.get(weight) or 0 for weight in weights))
            for row in last
            if row.get(name) is not None
        ]
        total = sum(weight for _, weight in pairs)
        return sum(rate * weight for rate, weight in pairs) / total if total else None

    valid = [row["selfplay/valid_question_rate"] for row in last]
    return {
        "oracle_correct_rate": pooled("selfplay/oracle_correct_rate", "selfplay/oracle_count"),
        "oracle_verified_rate": pooled(
            "selfplay/oracle_verified_rate", "selfplay/oracle_count", "selfplay/rejected/consensus"
        ),
        "oracle_count": sum(row["selfplay/oracle_count"] for row in last),
        "valid_question_rate": sum(valid) / len(valid) if valid else None,
        "two_search_rate": pooled("selfplay/two_search_rate", "selfplay/accepted"),
    }


def tell(
    out: rich.console.Console, root: Path, summary: Mapping[str, Any], before: Exam, after: Exam
) -> None:
    """The results for a reader: numbers, one question before and after, and where to look next."""
    out.print(comparison(summary))
    first, second = telling(before.groups, after.groups)
    question = first.question
    out.print(f"\n{question.text}  ({', '.join(question.answers)})", markup=False, soft_wrap=True)
    for name, group in (("before", first), ("after", second)):
        rollout = group.rollouts[0]
        missing = ended(rollout)
        lines = [spoken(turn) for turn in rollout.turns] + ([missing] if missing else [])
        out.print(f"  {name} self-play, {'right' if group.correct[0] else 'wrong'}")
        for line in lines:
            out.print(f"    {line}", markup=False, soft_wrap=True)
    out.print(
        f"\nMore to see in {root}: summary.json, metrics.jsonl (a line a step), trajectories/\n"
        f"  python -m sspjax.ask --workdir={root} {shlex.quote(question.text)}\n"
        f"  python -m sspjax.evaluate --workdir={root} --mode=closed_book "
        f"--out={root}/closed_book.json",
        markup=False,
        soft_wrap=True,
    )


def comparison(summary: Mapping[str, Any]) -> rich.table.Table:
    """Exact match before and after, rates of the last questions, and what the phases took."""
    table = rich.table.Table("seed " + str(summary["seed"]))
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    for label, key in (
        ("EM, one hop", "onehop_em"),
        ("EM, two hops", "twohop_em"),
        ("EM, mean", "avg_em"),
        ("EM, mean at temperature 1", "sampled_em"),
        ("questions", "count"),
    ):
        shown = "{}" if key == "count" else "{:.1f}"
        table.add_row(label, *(shown.format(summary[when][key]) for when in ("before", "after")))
    table.add_section()
    for label, key in (
        ("valid questions", "valid_question_rate"),
        ("true among them", "oracle_correct_rate"),
        ("after two searches", "two_search_rate"),
    ):
        share = summary[key]
        table.add_row(label, "", "none" if share is None else f"{share:.0%}")
    table.add_section()
    for phase, seconds in summary["seconds"].items():
        if seconds is not None:
            cpu = summary["cpu_seconds"][phase]
            table.add_row(f"{phase.replace('_', ' ')}, s", "", f"{seconds:.0f} ({cpu:.0f} CPU)")
    return table


def telling(before: Sequence[Group], after: Sequence[Group]) -> tuple[Group, Group]:
    """A question that self-play taught, of as many hops as there is; else the last one."""
    pairs = list(zip(before, after, strict=True))
    taught = [(b, a) for b, a in pairs if a.correct[0] and b.correct[0] is False]
    return taught[-1] if taught else pairs[-1]


def write_json(path: Path, value: Any) -> None:
    """The file is there whole, or as it was."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def main(argv: Sequence[str]) -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--config", required=True, help="a Python file with get_config()")
    arguments.add_argument("--workdir", required=True, help="where the run lives")
    options, overrides = parse(arguments, argv)
    out = rich.console.Console(file=sys.stdout, highlight=False)
    demo(load_config(options.config, overrides), options.workdir, out)


if __name__ == "__main__":
    run(main)
