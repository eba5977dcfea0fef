"""A whole run in seconds: `configs/tiny.py` with everything made small, by the real command.

The agent learns the tags and some names in a few dozen supervised steps, no more. So that questions
are accepted, and groups are neither all right nor all wrong, the answers are the names of the world
that taught it, each accepting all others: half of what the agent says is right by chance, and a
question that names none of them gives nothing away.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from processes import ROOT, python_environment

from sspjax.checkpoint import Checkpoints
from sspjax.command_line import load_config
from sspjax.config import RunConfig
from sspjax.mesh import train_layout
from sspjax.metrics import read_rows
from sspjax.models.presets import preset
from sspjax.trainer import Trainer
from sspjax.warm_start import training_worlds
from sspjax.workdir import Workdir

CONFIG = "configs/tiny.py"

SETTINGS: Mapping[str, Any] = {
    "steps": 4,
    "batch": 8,
    "world.entities": 40,
    "world.hops": 1,
    "world.questions": 4,
    "warm_start.steps": 40,
    "warm_start.worlds": 1,
    "warm_start.batch": 24,
    "warm_start.copy_steps": 0,
    "warm_start.learning_rate": 0.008,
    "warm_start.observation_weight": 0.0,
    "warm_start.proposer_share": 0.4,
    "warm_start.reader_share": 0.3,
    "warm_start.lazy_one_hop": 0.0,
    "warm_start.lazy_two_hop": 1.0,
    "model.vocab_size": 640,
    "model.attention_block": 32,
    "retrieval.document_tokens": 16,
    "proposer.prompt_tokens": 32,
    "proposer.response_tokens": 96,
    "proposer.turn_tokens": 16,
    "proposer.observation_tokens": 40,
    "proposer.temperature": 0.7,
    "solver.prompt_tokens": 32,
    "solver.response_tokens": 96,
    "solver.turn_tokens": 16,
    "solver.observation_tokens": 40,
    "solver.temperature": 0.8,
    "solver.group_size": 4,
    "filters.min_words": 1,
    "filters.min_chars": 1,
    "verify.noise": 1,
    "verify.samples": 1,
    "verify.prompt_tokens": 112,
    "verify.temperature": 1.0,
    "learner.row_tokens": 128,
    "learner.micro_rows": 1,
    "rollout.slots": 8,
    "rollout.extend_rows": 8,
    "rollout.decode_tokens": 16,
    "checkpoint.every": 1,
    "checkpoint.keep": 8,
    "eval.every": 2,
    "eval.questions": 2,
}


def flags(settings: Mapping[str, Any]) -> list[str]:
    """`--config.key=value` for each of the miniature's settings, and for those given."""
    return [f"--config.{key}={value}" for key, value in {**SETTINGS, **settings}.items()]


def config(settings: Mapping[str, Any]) -> RunConfig:
    """The same, frozen."""
    overrides = [(key, str(value)) for key, value in {**SETTINGS, **settings}.items()]
    return load_config(str(ROOT / CONFIG), overrides)


def write_answers(path: pathlib.Path) -> None:
    """The answers file that `seeds.path` names."""
    (world,) = training_worlds(config({}))
    names = [name for entity in world.graph.entities.values() for name in entity.names]
    rows = [{"answer": a, "aliases": [b for b in names if b != a], "hops": 1} for a in names]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclasses.dataclass(frozen=True)
class Miniature:
    """A workdir, how it is run, and what can be read from it."""

    workdir: pathlib.Path
    answers: pathlib.Path
    compiled: pathlib.Path
    """JAX's compilation cache: every process but the first loads its programs from here."""

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"seeds.path": self.answers, **settings}

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **(extra or {}),
        }

    def arguments(self, settings: Mapping[str, Any], *more: str) -> list[str]:
        """What follows `python -m sspjax.train`."""
        own = flags(self.settings(settings))
        return [f"--config={CONFIG}", f"--workdir={self.workdir}", *own, *more]

    def train(
        self, settings: Mapping[str, Any], *more: str, devices: int = 1, **environment: str
    ) -> str:
        """Runs the command to its end in a process of its own; returns what it logged."""
        done = subprocess.run(
            [sys.executable, "-m", "sspjax.train", *self.arguments(settings, *more)],
            cwd=ROOT,
            env=python_environment(devices, self.environment(environment)),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stderr

    def copy(self, workdir: pathlib.Path) -> Miniature:
        """The run as it is now, under another name."""
        shutil.copytree(self.workdir, workdir)
        return dataclasses.replace(self, workdir=workdir)

    def rows(self, name: str = "metrics") -> list[dict[str, Any]]:
        """Metrics rows in full."""
        return read_rows(self.workdir / f"{name}.jsonl")

    def lasting(self, name: str = "metrics") -> list[dict[str, Any]]:
        """Metrics rows without what depends on the clock and on where compilation happened."""
        return [lasting(row) for row in self.rows(name)]

    def trajectories(self) -> dict[int, list[dict[str, Any]]]:
        """Step to the records of everything that was played in it."""
        return {
            int(path.stem.removeprefix("step_")): list(
                map(json.loads, path.read_text().splitlines())
            )
            for path in sorted((self.workdir / "trajectories").glob("step_*.jsonl"))
        }

    def saved(
        self, settings: Mapping[str, Any], step: int | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Device state by path, and lasting host state, of a checkpoint (None: the last)."""
        own = config(self.settings(settings))
        decoder = preset(own.model.preset, own.model.vocab_size)
        form = Trainer(own, decoder, train_layout(own.mesh)).abstract()
        folder = Workdir(self.workdir).checkpoints("self_play")
        with Checkpoints(folder, 1, read_only=True) as checkpoints:
            state, host = checkpoints.restore(
                checkpoints.steps()[-1] if step is None else step, form
            )
        leaves, _ = jax.tree_util.tree_flatten_with_path(state)
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        return arrays, {**host, "last_row": lasting(host["last_row"])}


def lasting(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without `timing_s/*` and `perf/*`."""
    return {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))}


def assert_same_run(one: Miniature, other: Miniature, settings: Mapping[str, Any]) -> None:
    """Bit for bit: last device state, host state, metrics rows of both phases, and trajectories."""
    (state, host), (other_state, other_host) = one.saved(settings), other.saved(settings)
    assert state.keys() == other_state.keys()
    different = [p for p in state if state[p].tobytes() != other_state[p].tobytes()]
    assert different == []
    assert host == other_host
    assert one.lasting() == other.lasting()
    assert one.lasting("warm_start") == other.lasting("warm_start")
    assert one.trajectories() == other.trajectories()
