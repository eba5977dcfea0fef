"""What ten steps of self-play add to the warm start, on questions nobody trained on.

    NPROC=1 python benchmarks/self_play_gain.py [--seed=0] [--steps=10]

Trains `configs/tiny.py` from nothing in runs/gain-SEED (about 8 CPU-minutes, nearly all of it the
warm start), prints greedy exact match before and after on 250 held-out questions for each number
of hops, and writes benchmarks/results/DATE-self_play_gain-SEED.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib

from rich.console import Console
from rich.table import Table

from sspjax.command_line import load_config
from sspjax.metrics import read_rows
from sspjax.train import train

HERE = pathlib.Path(__file__).parent


def main() -> None:
    arguments = argparse.ArgumentParser(description="what self-play adds to the warm start")
    arguments.add_argument("--seed", default="0")
    arguments.add_argument("--steps", default="10")
    flags = arguments.parse_args()
    run = HERE.parent / "runs" / f"gain-{flags.seed}"
    settings = [("seed", flags.seed), ("steps", flags.steps), ("eval.every", flags.steps)]
    train(load_config(str(HERE.parent / "configs/tiny.py"), settings), run)
    rows = {row["step"]: row for row in read_rows(run / "metrics.jsonl")}
    before, after = rows[0], rows[int(flags.steps)]
    table = Table("exact match", "before", "after", "gain")
    result = {}
    for name in (key for key in before if key.startswith("eval/")):
        result[name] = [before[name], after[name]]
        gain = after[name] - before[name]
        table.add_row(name, f"{before[name]:.1f}", f"{after[name]:.1f}", f"{gain:+.1f}")
    Console().print(table)
    out = HERE / "results" / f"{datetime.date.today()}-self_play_gain-{flags.seed}.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"steps": int(flags.steps), "before_after": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
