"""The warm start: supervised steps on scripted trajectories of other worlds, before self-play.

It teaches the tags and part of the skill, through the same update program as self-play: a forced
token with a loss weight has ratio one, which makes its loss plain likelihood.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import rich.console

from sspjax import processes
from sspjax.checkpoint import Checkpoints
from sspjax.config import RunConfig, WarmStartConfig
from sspjax.data.miniwiki import World, make_world
from sspjax.demonstrations import Script, demonstrations
from sspjax.metrics import MetricsWriter, Progress
from sspjax.retrieval.client import InProcessRetriever, make_retriever
from sspjax.retrieval.corpus import MemoryCorpus
from sspjax.rollout.prompts import PROMPTS, act_text
from sspjax.rollout.tokenizer import Tokenizer, train_tokenizer
from sspjax.trainer import Trainer
from sspjax.types import Act, Document, TrainState
from sspjax.workdir import Workdir

OTHER_WORLDS = 1_000_000
"""Seeds of training worlds start here, out of reach of any run's own world."""

SAVE_EVERY = 100

TAGS = (*(act.value for act in Act if act is not Act.NONE), "information")
"""Of the agent's acts, and around what a tool shows."""


def training_worlds(config: RunConfig) -> list[World]:
    """Worlds to learn from; no fact of the run's own world is among them."""
    first = OTHER_WORLDS + 1000 * config.seed
    return [
        make_world(first + i, config.world.entities, hops=config.world.hops)
        for i in range(config.warm_start.worlds)
    ]


def train_world_tokenizer(config: RunConfig, own: list[Document]) -> Tokenizer:
    """A byte-level BPE of the worlds' language: passages, questions, and the agent's own tags.

    A tag is one token: at the end of a tag of several, a model of two layers has to spend one on
    telling which tag it was, and has none left to find the answer with.
    """
    texts = _language(config, training_worlds(config), own)
    tags = [f"<{slash}{name}>" for name in TAGS for slash in ("", "/")]
    return train_tokenizer(texts, config.model.vocab_size, whole=tags)


def run(
    config: RunConfig,
    workdir: Workdir,
    trainer: Trainer,
    tokenizer: Tokenizer,
    console: rich.console.Console,
) -> TrainState:
    """Trains from fresh parameters, or from where an earlier start stopped; the last state."""
    warm = config.warm_start
    with Checkpoints(workdir.checkpoints("warm_start"), config.checkpoint.keep) as checkpoints:
        done = checkpoints.latest() or 0
        if done:
            state, _ = checkpoints.restore(done, trainer.abstract())
        else:
            state = trainer.start()
        writer = MetricsWriter(workdir.root, "warm_start", active=processes.is_main())
        writer.cut(done)
        scripts = world_scripts(config, tokenizer) if done < warm.steps else []
        progress = Progress("warm start", warm.steps, console=console, done=done, every=10)
        for step in range(done + 1, warm.steps + 1):
            batch = demonstrations(scripts, warm, step, config.seed)
            state, row = trainer.teach(state, batch, rate(warm, step))
            checkpoints.poll()
            writer.write(step, row)
            if step % min(SAVE_EVERY, config.checkpoint.every) == 0 or step == warm.steps:
                checkpoints.save(step, state, {})
            progress.update(step, loss=row["actor/nll"])
        progress.close()
        writer.close()
    return state


def rate(warm: WarmStartConfig, step: int) -> float:
    """Learning rate of a step counted from 1: 20 steps up, constant while it learns to copy, then
    down to 5% along half a cosine.
    """
    done = max(0, step - warm.copy_steps) / max(1, warm.steps - warm.copy_steps)
    shape = 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2
    return warm.learning_rate * min(1.0, step / 20) * shape


def world_scripts(config: RunConfig, tokenizer: Tokenizer) -> list[Script]:
    """What can be demonstrated in each training world."""
    return [
        Script(
            world=world,
            search=_searcher(world, config),
            tokenizer=tokenizer,
            prompt_set=PROMPTS[config.model.prompts],
            config=config,
        )
        for world in training_worlds(config)
    ]


def _searcher(world: World, config: RunConfig):
    retriever = make_retriever(
        MemoryCorpus(world.documents()), encoder=config.retrieval.encoder, threads=1
    )
    _remember_names(retriever, world, config.retrieval.topk)
    return lambda queries: [
        found or () for found in retriever.search(queries, config.retrieval.topk)
    ]


def _remember_names(retriever: InProcessRetriever, world: World, topk: int) -> None:
    """Searches every name in one batch: scripts ask one query at a time, mostly these."""
    names = [name for e in world.graph.entities.values() for name in e.names]
    retriever.search(names, topk)


def _language(config: RunConfig, worlds: list[World], own: list[Document]) -> Iterator[str]:
    prompt_set = PROMPTS[config.model.prompts]
    for world in worlds:
        for document in world.documents():
            yield " " + document.text
    for document in own:
        yield " " + document.text
    rng = random.Random("language")
    acts = [Act.SEARCH, Act.ANSWER, Act.QUESTION]
    for world in worlds[:3]:
        for hops in range(1, config.world.hops + 1):
            for question in world.questions(hops, rng):
                yield " " + question.text
                yield prompt_set.opening + prompt_set.closing
                yield from (act_text(prompt_set, act, "") for act in acts)
