"""CPU-seconds of a tiny self-play step, split by phase.

    NPROC=1 python benchmarks/tiny_step.py [--run=runs/tiny]

Reads the metrics of a `configs/tiny.py` run (and makes it, to step 30, where there is none), prints
the median of steps 10 to 30 and writes benchmarks/results/DATE-tiny_step.json. CPU-seconds count
every thread of the process; they hardly depend on what else the machine does, wall seconds do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics

from rich.console import Console
from rich.table import Table

from sspjax.command_line import load_config
from sspjax.metrics import read_rows
from sspjax.train import train

HERE = pathlib.Path(__file__).parent
PHASES = {
    "generation": ("gen/proposer", "gen/verify", "gen/solver"),
    "judging": ("judge",),
    "update": ("update_actor",),
    "whole step": ("step",),
}
WORK = ("perf/generated_tokens", "perf/prefill_tokens", "selfplay/accepted")


def main() -> None:
    arguments = argparse.ArgumentParser(description="CPU-seconds of a tiny self-play step")
    arguments.add_argument("--run", type=pathlib.Path, default=pathlib.Path("runs/tiny"))
    run = arguments.parse_args().run
    if max((r["step"] for r in read_rows(run / "metrics.jsonl")), default=0) < 30:
        train(load_config(str(HERE.parent / "configs/tiny.py"), [("steps", "30")]), run)
    rows = [r for r in read_rows(run / "metrics.jsonl") if 10 <= r["step"] <= 30]
    table = Table("phase", "CPU-s", "wall s", title=f"median of {len(rows)} steps")
    result = {}
    for phase, names in PHASES.items():
        cpu, wall = (
            statistics.median(sum(r[f"{kind}/{name}"] for name in names) for r in rows)
            for kind in ("perf/cpu_s", "timing_s")
        )
        result[phase] = {"cpu_s": cpu, "wall_s": wall}
        table.add_row(phase, f"{cpu:.2f}", f"{wall:.2f}")
    retrieval = statistics.median(r["timing_s/retrieval"] for r in rows)
    result["retrieval"] = {"wall_s": retrieval}
    table.add_row("retrieval, within generation", "", f"{retrieval:.3f}")
    Console().print(table)
    result |= {name: statistics.median(r[name] for r in rows) for name in WORK}
    result["machine"] = f"{os.cpu_count()} x {platform.machine()}"
    result["load"] = os.getloadavg()[0]
    out = HERE / "results" / f"{datetime.date.today()}-tiny_step.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    Console().print(f"written to {out}")


if __name__ == "__main__":
    main()
