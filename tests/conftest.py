"""One process, eight CPU devices, and nothing silent: promotions are errors, so are warnings."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import pytest
from miniature import Miniature, write_answers
from processes import python_environment

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@dataclasses.dataclass(frozen=True)
class FinishedDemo:
    """A run that went from nothing to trained in another process, with one device."""

    config: str
    workdir: pathlib.Path
    stdout: str
    seconds: float


@pytest.fixture(scope="session")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> FinishedDemo:
    """The demo of `small_demo.py`; tests that write into its workdir copy it first."""
    config = str(pathlib.Path(__file__).parent / "small_demo.py")
    workdir = tmp_path_factory.mktemp("demo") / "run"
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "sspjax.demo", f"--config={config}", f"--workdir={workdir}"],
        env=python_environment(devices=1),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return FinishedDemo(config, workdir, done.stdout, time.monotonic() - start)


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Miniature:
    """The miniature after its warm start, at step 0 of self-play; tests run copies of it."""
    folder = tmp_path_factory.mktemp("miniature")
    write_answers(folder / "answers.jsonl")
    run = Miniature(folder / "taught", folder / "answers.jsonl", folder / "compiled")
    run.train({"steps": 0})
    return run
