"""Does it learn? Ten steps of self-play after the demo's own warm start."""

import subprocess
import sys

import pytest
from processes import ROOT, python_environment

from sspjax.metrics import read_rows

SETTINGS = ("steps=10", "eval.every=10", "save_trajectories=0")


@pytest.mark.slow
def test_ten_steps_of_self_play_add_five_points(tmp_path):
    """1-hop greedy EM on 250 held-out questions, from a start below 90 (about 6 CPU-minutes).

    On one device, as in the demo.
    """
    done = subprocess.run(
        [sys.executable, "-m", "sspjax.train", "--config=configs/tiny.py", f"--workdir={tmp_path}"]
        + [f"--config.{setting}" for setting in SETTINGS],
        cwd=ROOT,
        env=python_environment(devices=1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["step"]: row for row in read_rows(tmp_path / "metrics.jsonl")}
    before, after = rows[0]["eval/1hop/em"], rows[10]["eval/1hop/em"]
    questions = (tmp_path / "world/questions/1hop.jsonl").read_text().splitlines()
    assert len(questions) >= 200
    assert before < 90
    assert after >= before + 5
