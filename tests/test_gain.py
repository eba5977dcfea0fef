"""Does it learn? Ten steps of self-play after the demo's own warm start."""

import json

import pytest

from sspjax.command_line import load_config
from sspjax.train import train


@pytest.mark.slow
def test_ten_steps_of_self_play_add_five_points(tmp_path):
    """1-hop greedy EM on 250 held-out questions, from a start below 90 (about 6 CPU-minutes)."""
    overrides = [("steps", "10"), ("eval.every", "10"), ("save_trajectories", "0")]
    train(load_config("configs/tiny.py", overrides), tmp_path)
    rows = {
        row["step"]: row
        for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    }
    before, after = rows[0]["eval/1hop/em"], rows[10]["eval/1hop/em"]
    questions = (tmp_path / "world/questions/1hop.jsonl").read_text().splitlines()
    assert len(questions) >= 200
    assert before < 90
    assert after >= before + 5
