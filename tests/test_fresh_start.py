"""Two processes that start a run from nothing: they make one world and one tokenizer, and meet."""

import json

import pytest
from miniature import CONFIG, Miniature, flags
from processes import run_processes


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_start_from_an_empty_workdir(taught: Miniature, tmp_path):
    """`taught` gives the answers file only. Process 0 makes what is missing while 1 waits."""
    workdir = tmp_path / "run"
    settings = {"seeds.path": taught.answers, "warm_start.steps": 2, "steps": 1, "eval.every": 0}
    arguments = ["-m", "sspjax.train", f"--config={CONFIG}", f"--workdir={workdir}"]
    run_processes(
        [*arguments, *flags(settings)],
        count=2,
        devices=2,
        timeout=400,
        environment=taught.environment(),
    )
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert (workdir / "world" / "made.json").exists()
    assert json.loads((workdir / "config.json").read_text())["content"]["corpus"]
