"""A run's agent on benchmarks: the roles, tools and programs of training, and a table.

    python -m sspjax.evaluate --workdir=DIR --out=results.json [--config=FILE] [--step=N|last]
        [--mode=agent|rag|closed_book] [--temperature=1.0] [--samples=4] [--benchmarks FILE ...]
    python -m sspjax.evaluate --weights=HF_DIR (--config=FILE | --workdir=DIR) --out=results.json

Without --config the run's own is used, without --benchmarks its own questions; step 0 is what
self-play started from. --weights puts the model of a Hugging Face folder in the agent's place.
`agent` searches over several turns, `rag` reads what one search of the question finds,
`closed_book` answers from memory. Writes results.json and results.jsonl (every trajectory).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from sspjax import processes
from sspjax.command_line import load_config, parse, parser, run
from sspjax.config import EvalConfig, RunConfig, freeze, to_dict
from sspjax.errors import UserError
from sspjax.examiner import benchmarks, watching
from sspjax.metrics import Progress, start_logging
from sspjax.reopen import (
    given_policies,
    open_weights,
    recorded_config,
    reopen,
    saved_policies,
    step_named,
)
from sspjax.train import Setup, checking, evaluation
from sspjax.types import Group, TrainState, Turn

log = logging.getLogger(__name__)


def evaluate(
    config: RunConfig, root: str | Path | None, step: int | None, out: Path, *, weights: str = ""
) -> dict[str, Any]:
    """Answers `config.eval`'s benchmarks with a saved policy, or with the model of a Hugging Face
    folder (`weights`), and writes what came of it.
    """
    processes.initialize()
    console = start_logging(main=processes.is_main())
    if weights:
        setup = open_weights(config, weights, root)
        state, found, folder = given_policies(setup), 0, Path(weights)
    elif root:
        setup = reopen(config, root)
        state, found, folder = saved_policies(setup, step)
    else:
        raise UserError("--workdir: expected the workdir of a run, or a model with --weights")
    log.info("evaluating %s", folder)
    summary, groups = examination(setup, state, found, config.eval, console)
    summary |= {"config": to_dict(setup.config), "checkpoint": str(folder)}
    if processes.is_main():
        write_results(out, summary, groups)
    return summary


def examination(
    setup: Setup,
    state: TrainState,
    step: int,
    how: EvalConfig,
    console: rich.console.Console,
    phase: str = "evaluation",
) -> tuple[dict[str, Any], tuple[Group, ...]]:
    """`evaluation` on the run's benchmarks, with its progress shown."""
    questions = benchmarks(setup.config, setup.workdir.world)
    total = how.samples * sum(map(len, questions.values()))
    if not total:
        raise UserError(
            "config.eval.benchmarks: nothing to answer; expected question files (--benchmarks), "
            "or a run with a world of its own"
        )
    with Progress(phase, total, console=console, every=-(-total // 5)) as progress:
        result = evaluation(setup, state, step, questions, how, watching(progress))
        progress.update(total)
    return result


def write_results(path: Path, summary: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """The summary as JSON, and beside it a .jsonl with everything that was said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        for group in groups:
            for rollout, correct in zip(group.rollouts, group.correct, strict=True):
                row = {
                    "id": group.question.uid,
                    "question": group.question.text,
                    "answers": list(group.question.answers),
                    "answer": rollout.answer,
                    "correct": correct,
                    "stop": rollout.stop.value,
                    "turns": [_turn(turn) for turn in rollout.turns],
                }
                file.write(json.dumps(row) + "\n")
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "sampled": turn.sampled,
        "act": turn.act.value,
        "text": turn.text,
        "documents": [document.id for document in turn.documents],
    }


def table(summary: Mapping[str, Any]) -> rich.table.Table:
    """Exact match and F1 of every benchmark, the judge's share where there is one, and averages."""
    judged = "judge_avg" in summary
    columns = {"em": "EM", "f1": "F1", **({"judge": "judge"} if judged else {})}
    shown = rich.table.Table()
    shown.add_column("benchmark")
    for name in (*columns.values(), "questions"):
        shown.add_column(name, justify="right")
    for name, own in summary["benchmarks"].items():
        shown.add_row(name, *(_shown(own[key]) for key in columns), str(own["count"]))
    shown.add_section()
    for label, key in (("general", "general_avg"), ("multi-hop", "multihop_avg"), ("all", "avg")):
        if summary[key] is not None:
            last = [_shown(summary["judge_avg"])] if judged and key == "avg" else []
            shown.add_row(f"mean, {label}", _shown(summary[key]), "", *last)
    return shown


def _shown(percent: float | None) -> str:
    return "none" if percent is None else f"{percent:.1f}"


def main(argv: Sequence[str]) -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--config", help="a Python file with get_config() (default: the run's)")
    arguments.add_argument("--workdir", help="of the run whose agent answers")
    arguments.add_argument(
        "--weights", help="a Hugging Face folder or GGUF file that answers instead"
    )
    arguments.add_argument("--check-finite", action="store_true", help="refuse weights with a NaN")
    arguments.add_argument("--out", required=True, help="results.json")
    arguments.add_argument("--step", default="last", help="checkpoint: a step, or last")
    arguments.add_argument("--mode", choices=("agent", "rag", "closed_book"))
    arguments.add_argument("--temperature", type=float, help="0: greedy")
    arguments.add_argument("--samples", type=int, help="answers a question")
    arguments.add_argument("--benchmarks", nargs="+", metavar="FILE", help="question files")
    options, overrides = parse(arguments, argv)
    if not options.workdir and not (options.weights and options.config):
        raise UserError(
            "--workdir: expected the workdir of a run, or --weights with --config for a model alone"
        )
    out = Path(options.out)
    if out.suffix == ".jsonl" or out.is_dir():
        raise UserError(
            f"--out={out}: expected the name of a .json file; trajectories go to a .jsonl beside it"
        )
    config = (
        load_config(options.config, overrides)
        if options.config
        else recorded_config(options.workdir, overrides)
    )
    given = {
        name: vars(options)[name]
        for name in ("mode", "temperature", "samples", "benchmarks")
        if vars(options)[name] is not None
    }
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, **given))
    if options.check_finite:
        config = checking(config)
    summary = evaluate(
        freeze(to_dict(config)),
        options.workdir,
        step_named(options.step),
        out,
        weights=options.weights or "",
    )
    if processes.is_main():
        rich.console.Console(file=sys.stdout).print(table(summary))


if __name__ == "__main__":
    run(main)
