"""A run killed at any moment, and run again, is the run that was not killed."""

import json
import random
import subprocess
import sys

import pytest
from miniature import Miniature, assert_same_run, config
from processes import ROOT, python_environment

from sspjax.retrieval.corpus import MemoryCorpus
from sspjax.rollout.tokenizer import Tokenizer, load_tokenizer
from sspjax.train import make_own_tokenizer
from sspjax.warm_start import training_worlds
from sspjax.workdir import Workdir

STEPS = 6

PLANS = {
    1: (
        ("warm start", (1, 12)),
        ("warm start", (16, 30)),
        ("update/pack", (1, 2)),
        ("verification/rollout", (2, 3)),
        ("save", (3, 4)),
        ("rollout", (5, 6)),
    ),
    3: (
        ("warm start", (1, 30)),
        ("save", (1, 1)),
        ("evaluation/rollout", (1, 2)),
        ("save", (2, 3)),
        ("update", (4, 5)),
        ("rollout", (5, 6)),
    ),
}
"""`checkpoint.every` to the kills of one run, in order: in which part, and once how many rows of
metrics are written (drawn within these bounds). Row 0 comes before the first checkpoint."""

SKIPS = {"update/pack": 1}
LONGEST_SKIP = 20
"""How far into its part a kill falls is drawn too, in half milliseconds."""


@pytest.fixture(scope="module")
def uninterrupted(taught, tmp_path_factory):
    run = taught.copy(tmp_path_factory.mktemp("uninterrupted") / "run")
    run.train({"steps": STEPS})
    assert sum(row["selfplay/accepted"] for row in run.rows()[1:]) > 0
    return run


def killed(run: Miniature, settings, part: str, rows: int, skip: int):
    """Starts the run and kills it; the moment it was killed at."""
    moment = run.workdir.with_name("moment.json")
    program = ["tests/programs/train_until_killed.py", part, str(rows), str(skip), str(moment)]
    done = subprocess.run(
        [sys.executable, *program, *run.arguments(settings)],
        cwd=ROOT,
        env=python_environment(1, run.environment()),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == -9, f"{part}, {rows} rows: {done.stderr[-4000:]}"
    return json.loads(moment.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_killed_six_times_is_the_run_that_was_not(every, uninterrupted, taught, tmp_path):
    rng = random.Random(f"kills/{every}")
    run = Miniature(tmp_path / "run", taught.answers, taught.compiled)
    settings = {"steps": STEPS, "checkpoint.every": every}
    for part, bounds in PLANS[every]:
        rows, skip = rng.randint(*bounds), rng.randrange(SKIPS.get(part, LONGEST_SKIP))
        moment = killed(run, settings, part, rows, skip)
        assert moment["rows"] >= rows
        assert moment["saving"] if part == "save" else moment["part"] == part
    run.train(settings)
    assert_same_run(run, uninterrupted, settings)
    assert list(run.workdir.rglob("*tmp*")) == []


def test_a_tokenizer_that_was_half_saved_is_made_again(tmp_path, monkeypatch):
    own, workdir = config({}), Workdir(tmp_path)
    corpus = MemoryCorpus(training_worlds(own)[0].documents())

    def half_a_save(self, folder):
        folder.mkdir()
        (folder / "tokenizer.json").write_text('{"model": {"vocab"')
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "save", half_a_save)
        with pytest.raises(InterruptedError):
            make_own_tokenizer(own, workdir, corpus)
    make_own_tokenizer(own, workdir, corpus)
    assert load_tokenizer(workdir.tokenizer).vocab_size == own.model.vocab_size
