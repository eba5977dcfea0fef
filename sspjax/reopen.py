"""A run that exists, opened to play with. Nothing is written into its workdir, and it may still be
training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from sspjax.checkpoint import Checkpoints
from sspjax.config import RunConfig, freeze, override, to_dict
from sspjax.errors import UserError
from sspjax.train import Setup, assemble, own_corpus, retrieve
from sspjax.trainer import abstract_policies
from sspjax.types import TrainState
from sspjax.workdir import Workdir, read_config


def recorded_config(root: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """The config a run was started with, under the overrides of a command line.

    Raises UserError where there is no run, ConfigError for what cannot be overridden so.
    """
    config = ConfigDict(to_dict(freeze(read_config(root)))).lock()
    for key, value in overrides:
        override(config, key, value)
    return freeze(config)


def reopen(config: RunConfig, root: str | Path) -> Setup:
    """What `build` made, at the size and place that `config` says.

    Raises UserError where there is no run, or one of another model.
    """
    workdir, recorded = Workdir(Path(root)), read_config(root)["model"]
    for name in ("preset", "vocab_size", "prompts"):
        here = vars(config.model)[name]
        if here != recorded[name]:
            raise UserError(
                f"config.model.{name}={here!r}: the run in {root} has {recorded[name]!r}; use the "
                "config it was started with"
            )
    return assemble(config, workdir, retrieve(config, own_corpus(config, workdir)))


def saved_policies(setup: Setup, step: int | None) -> tuple[TrainState, int, Path]:
    """Parameters after a step (None: the last), the step, and the folder they were read from.

    No optimizer is read. Step 0 is what self-play started from: where its own checkpoint is gone,
    the end of the warm start. Raises UserError where nothing of that step is kept.
    """
    workdir = setup.workdir
    saved = {phase: saved_steps(workdir, phase) for phase in ("warm_start", "self_play")}
    start = setup.config.warm_start.steps
    places = {0: ("warm_start", start)} if start in saved["warm_start"] else {}
    places |= {done: ("self_play", done) for done in saved["self_play"]}
    chosen = max(places, default=None) if step is None else step
    if chosen not in places:
        kept = ", ".join(map(str, sorted(places))) or "none yet"
        raise UserError(
            f"{workdir.root}: expected a checkpoint of step {'last' if step is None else step}, "
            f"kept are: {kept}"
        )
    phase, name = places[chosen]
    wanted = abstract_policies(setup.config, setup.decoder, setup.layout)
    with _read_only(workdir.checkpoints(phase)) as checkpoints:
        state, _ = checkpoints.restore(name, wanted, partial=True)
    return state, chosen, workdir.checkpoints(phase) / str(name)


def step_named(text: str) -> int | None:
    """A step of the command line: a number, or `last` (None)."""
    if text == "last":
        return None
    if not text.isdecimal():
        raise UserError(f"--step={text}: expected a number or last")
    return int(text)


def saved_steps(workdir: Workdir, phase: str) -> list[int]:
    """Complete checkpoints of a phase, oldest first."""
    folder = workdir.checkpoints(phase)
    if not folder.exists():
        return []
    with _read_only(folder) as checkpoints:
        return checkpoints.steps()


def _read_only(folder: Path) -> Checkpoints:
    return Checkpoints(folder, keep=1, read_only=True)
