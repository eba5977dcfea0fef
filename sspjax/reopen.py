"""A run that exists, opened to play with. Nothing is written into its workdir, and it may still be
training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from ml_collections import ConfigDict

from sspjax.checkpoint import Checkpoints
from sspjax.config import RunConfig, freeze, override, to_dict
from sspjax.errors import UserError
from sspjax.learner.state import policy_names
from sspjax.mesh import Layout
from sspjax.models.presets import DecoderConfig
from sspjax.models.weights import decoder_config_of, load_params
from sspjax.rollout.tokenizer import load_tokenizer
from sspjax.train import Setup, assemble, described, own_corpus, retrieve
from sspjax.trainer import abstract_policies
from sspjax.types import PolicyState, TrainState
from sspjax.workdir import Workdir, read_config


def recorded_config(root: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """The config a run was started with, under the overrides of a command line.

    Raises UserError where there is no run, ConfigError for what cannot be overridden so.
    """
    config = ConfigDict(to_dict(freeze(read_config(root)))).lock()
    # A recording belongs to the run, which may still be writing it, and holds its searches alone.
    own = (("retrieval.record", ""), ("retrieval.replay", ""))
    for key, value in (*own, *overrides):
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
    retriever = retrieve(config, own_corpus(config, workdir))
    decoder = own_decoder(config, workdir)
    return assemble(config, workdir, decoder, retriever, load_tokenizer(workdir.tokenizer))


def own_decoder(config: RunConfig, workdir: Workdir) -> DecoderConfig:
    """The shape of a run's policies: recorded, or described by its config."""
    return workdir.decoder() or described(config)


def open_weights(config: RunConfig, weights: str, root: str | Path | None) -> Setup:
    """Players around a given model (`models.weights`), with the questions and passages that a
    config names, or those of the run in `root`.

    Raises UserError where the config means a run's own world and no run is given.
    """
    if root is None and config.world.kind != "none":
        raise UserError(
            f"--weights={weights}: the config's questions and passages are of a run's own world "
            "(world.kind=miniwiki); give that run's --workdir too, or a config with passages"
        )
    model = dataclasses.replace(config.model, weights=weights, vocab_size=0)
    config = freeze(to_dict(dataclasses.replace(config, model=model)))
    # Without a run there is no world, and nothing else of a workdir is read.
    workdir = Workdir(Path(weights if root is None else root))
    decoder = decoder_config_of(weights)
    tokenizer = load_tokenizer(config.model.tokenizer or weights)
    retriever = retrieve(config, own_corpus(config, workdir))
    return assemble(config, workdir, decoder, retriever, tokenizer)


def given_policies(setup: Setup) -> TrainState:
    """Every policy from `config.model.weights`, at step 0, in the model's dtype."""
    own = setup.config.model
    params = load_params(
        own.weights,
        setup.decoder,
        setup.layout,
        jnp.dtype(own.dtype),
        check_finite=own.check_finite,
    )
    policy = PolicyState(params=params, opt_state=None)
    return TrainState(
        step=jnp.zeros((), jnp.int32), policies=dict.fromkeys(policy_names(setup.config), policy)
    )


def saved_policies(setup: Setup, step: int | None) -> tuple[TrainState, int, Path]:
    """`read_policies` of a run that is opened to play with."""
    return read_policies(setup.config, setup.workdir, setup.decoder, setup.layout, step)


def read_policies(
    config: RunConfig, workdir: Workdir, decoder: DecoderConfig, layout: Layout, step: int | None
) -> tuple[TrainState, int, Path]:
    """Parameters after a step (None: the last), the step, and the folder they were read from.

    No optimizer is read. Step 0 is what self-play started from: where its own checkpoint is gone,
    the end of the warm start. Raises UserError where nothing of that step is kept.
    """
    saved = {phase: saved_steps(workdir, phase) for phase in ("warm_start", "self_play")}
    start = config.warm_start.steps
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
    wanted = abstract_policies(config, decoder, layout)
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
