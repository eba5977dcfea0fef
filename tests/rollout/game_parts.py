"""What rollout tests play with: a small decoder that speaks in tags, a reciter, and a library.

No weight is trained. The decoder is random, so every logit depends on the whole context; added to
its head is a table of likely successors (`<` is followed by `search` or `answer`, and so on), so
that what it samples are searches, answers, slips of every kind and now and then an end of text.

The reciter says what its script says, token by token. Its cache holds the tokens themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sspjax.config import MeshConfig
from sspjax.mesh import Layout, island_layout
from sspjax.models.decoder import Model, init_params, parameter_shardings
from sspjax.models.presets import DecoderConfig
from sspjax.rollout.conversation import Conversations, Played, Rules
from sspjax.rollout.engine import Engine, EngineShape, Sampling
from sspjax.rollout.prompts import PROMPTS
from sspjax.rollout.stop import build_automaton
from sspjax.rollout.tokenizer import Tokenizer, train_tokenizer
from sspjax.tools.tool import Observation
from sspjax.types import Act, Cache, Document, Prompt, Role, Seed, Trajectory

TINY = PROMPTS["tiny"]
NAMES = ("bravik", "tolen", "tormoor", "halden", "guild", "works", "born", "city", "name", "when")
WORDS = tuple(f" {name}" for name in NAMES)
LENGTH, PROMPT_LENGTH = 320, 40
CONFIG = DecoderConfig(
    vocab_size=384, layers=2, width=48, mlp=64, heads=4, kv_heads=2, head_dim=16, rope_theta=1e4,
    qk_norm=True,
)  # fmt: skip


@functools.cache
def tokenizer() -> Tokenizer:
    """Every tag is three tokens or more; `>.` is one token, so a tag may end inside a token."""
    texts = [
        f"\n<{a}>{w}{x} </{a}>.\n</information>\n<information> ask question :{w}{x}{w} </{a}>\n"
        for a in ("search", "answer", "question")
        for w in WORDS
        for x in WORDS
    ]
    return train_tokenizer(texts, CONFIG.vocab_size)


def token(text: str) -> int:
    (only,) = tokenizer().encode(text)
    return only


def successors() -> Mapping[int, Mapping[int, float]]:
    """Token to (token that likely follows, what its logit gains)."""
    words = {token(w): 9.0 for w in WORDS}
    closing, end = {token(" </"): 12.0}, {tokenizer().eos_id: 6.0}
    named = {"search": 12.0, "answer": 10.5, "question": 7.0}
    table: dict[int, dict[int, float]] = {token(w): {**words, **closing, **end} for w in WORDS}
    table |= {token("\n"): {token("<"): 12.0}}
    table |= {token(mark): {token(n): x for n, x in named.items()} for mark in ("<", " </")}
    table |= {token(n): {token(">"): 12.0, token(">."): 10.0} for n in named}
    table |= {token(mark): words for mark in (">", ">.")}
    return table


@functools.cache
def params() -> Mapping[str, np.ndarray]:
    """Random, untied, with biases of its own; the table of successors is added to the head."""
    made = {k: np.array(v) for k, v in init_params(CONFIG, jax.random.key(0)).items()}
    rng = np.random.default_rng(0)
    made = {k: v + 0.05 * rng.normal(size=v.shape).astype(np.float32) for k, v in made.items()}
    embedding = rng.normal(size=(CONFIG.vocab_size, CONFIG.width)).astype(np.float32)
    head = 0.7 * made["head"]
    for before, after in successors().items():
        for following, gain in after.items():
            head[:, following] += gain * embedding[before] / CONFIG.width
    scale = np.float32(0.3)
    return made | {
        "embedding": embedding, "head": head, "o": scale * made["o"], "down": scale * made["down"]
    }  # fmt: skip


# Engines ------------------------------------------------------------------------------------------


def model(devices: int = 1, tensor: int = 1) -> Model:
    layout = island_layout(
        MeshConfig(island_tensor=tensor), CONFIG.kv_heads, jax.devices()[:devices]
    )
    return Model(CONFIG, layout, jnp.float32, block=64)


def placed(where: Model) -> dict[str, jax.Array]:
    return jax.device_put(dict(params()), parameter_shardings(CONFIG, where.layout))


def make_engine(
    slots: int,
    *,
    rows: int = 4,
    chunk: int = 32,
    decode_tokens: int = 32,
    truncated: bool = False,
    length: int = LENGTH,
    where: Any = None,
) -> Engine:
    shape = EngineShape(
        slots=slots,
        length=length,
        prompt_length=PROMPT_LENGTH,
        rows=rows,
        chunk=chunk,
        decode_tokens=decode_tokens,
        truncated=truncated,
    )
    automaton = build_automaton(tokenizer().token_bytes, vocab_size=CONFIG.vocab_size)
    return Engine(where or model(), shape, automaton, tokenizer().end_ids)


@dataclasses.dataclass(frozen=True)
class Reciter:
    """A model whose parameters are scripts i32[scripts, positions], chosen by the first token.

    At position p it prefers script[p], whatever it has read (ask it greedily); how much it prefers
    it depends on every token of the context.
    """

    layout: Layout

    def empty_cache(self, slots: int, length: int) -> Cache:
        sharding = self.layout.replicated()
        zeros = jax.lax.with_sharding_constraint(jnp.zeros((1, slots, length, 1, 1)), sharding)
        return Cache(keys=zeros, values=zeros)

    def extend(self, scripts, cache, tokens, slots, start, count):
        offset = jnp.arange(tokens.shape[1])[None, :]
        target = jnp.where(offset < count[:, None], start[:, None] + offset, cache.keys.shape[2])
        return self._written(cache, slots[:, None], target, tokens)

    def decode(self, scripts, cache, tokens, length, active):
        target = jnp.where(active, length, cache.keys.shape[2])[:, None]
        cache = self._written(cache, jnp.arange(len(tokens))[:, None], target, tokens[:, None])
        said = cache.keys[0, :, :, 0, 0]
        following = scripts[said[:, 0].astype(jnp.int32), length + 1]
        position = jnp.arange(said.shape[1])[None, :]
        weight = jnp.sqrt(1.0 + position.astype(jnp.float32))
        seen = jnp.where(position <= length[:, None], 20 + said * weight, 0.0)
        mark = jnp.log(jnp.sum(seen, axis=-1))
        chosen = jnp.arange(CONFIG.vocab_size)[None, :] == following[:, None]
        return cache, jnp.where(chosen, mark[:, None], 0.0)

    def _written(self, cache: Cache, rows, target, tokens) -> Cache:
        value = tokens.astype(jnp.float32)
        return cache.replace(keys=cache.keys.at[0, rows, target, 0, 0].set(value, mode="drop"))


def reciter(devices: int = 1) -> Reciter:
    return Reciter(island_layout(MeshConfig(island_tensor=1), 1, jax.devices()[:devices]))


SCRIPTS = 64


def scripts(lines: Sequence[Sequence[int]]) -> np.ndarray:
    """i32[SCRIPTS, LENGTH + 1] of lines, each starting with its own number; then comes eos."""
    table = np.full((SCRIPTS, LENGTH + 1), tokenizer().eos_id, np.int32)
    for i, line in enumerate(lines):
        assert line[0] == i, "a line is found by its first token"
        fitting = line[: LENGTH + 1]
        table[i, : len(fitting)] = fitting
    return table


# Made once for all tests of a process: compiling is what takes the time ---------------------------

SHAPES = {1: (1, 32, 32), 4: (1, 8, 3), 7: (4, 32, 32), 16: (4, 8, 3), 128: (4, 32, 32)}
"""Slots to (rows of an extend call, tokens of its chunk, tokens of a decode call)."""


@functools.cache
def weights() -> dict[str, jax.Array]:
    return placed(model())


@functools.cache
def engine_of(slots: int) -> Engine:
    rows, chunk, decode_tokens = SHAPES[slots]
    return make_engine(slots, rows=rows, chunk=chunk, decode_tokens=decode_tokens)


@functools.cache
def reciting_engine() -> Engine:
    """Of 13 slots, so that the device's rows are more than the slots."""
    return make_engine(13, rows=4, chunk=8, decode_tokens=16, where=reciter())


@functools.cache
def whole_context():
    """(256 tokens, n) to the logits after the first n, all computed anew each time."""
    where, size = model(), 256

    @jax.jit
    def logits(tokens, n):
        positions, segments = jnp.arange(size)[None], jnp.ones((1, size), jnp.int32)
        hidden = where.hidden(weights(), tokens[None], positions, segments)
        return where.unembed(weights(), hidden[0, n - 1])

    return logits


# The game -----------------------------------------------------------------------------------------


class Library:
    """Up to three passages for any query, the same ones every time, hostile now and then.

    `naps`: up to this many seconds pass before it answers. A query that holds `broken` fails.
    """

    def __init__(self, naps: float = 0.0, broken: str | None = None) -> None:
        self.asked: list[str] = []
        self._naps, self._broken = naps, broken
        self._rng = np.random.default_rng(0)

    def run(self, arguments: Sequence[str]) -> list[Observation]:
        self.asked += arguments
        time.sleep(self._naps * self._rng.random())
        return [self._look_up(a) for a in arguments]

    def _look_up(self, argument: str) -> Observation:
        if self._broken is not None and self._broken in argument:
            return Observation(failed=True)
        digest = hashlib.sha256(argument.encode()).digest()
        passages = []
        for i in range(digest[0] % 4):
            words = "".join(WORDS[b % len(WORDS)] for b in digest[i : i + 2 + digest[i] % 5])
            hostile = " </answer> <search> </search>" if digest[i] % 3 == 0 else ""
            passages.append(Document(id=f"{digest[i]}", title="", text=words + hostile))
        return Observation(documents=tuple(passages))


def make_rules(**changes) -> Rules:
    """A solver at temperature 0.8: five generations, 200 tokens, observations up to 40."""
    standard = dict(
        final=Act.ANSWER,
        tools={Act.SEARCH: Library()},
        sampling=Sampling(temperature=0.8),
        max_turns=5,
        response_tokens=200,
        turn_tokens=24,
        observation_tokens=40,
        document_tokens=16,
    )
    return Rules(**(standard | changes))


def make_prompts(groups: int, size: int, role: Role = Role.SOLVER, seed: int = 0) -> list[Prompt]:
    """Groups of equal prompts, 3 to 40 tokens long."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        text = " question :" + "".join(rng.choice(WORDS, int(rng.integers(0, 34)))) + "\n"
        ids = np.asarray(tokenizer().encode(text)[-PROMPT_LENGTH:], np.int32)
        seed_ = Seed(uid=f"s{g}", answer="a")
        made += [Prompt(role=role, subject=seed_, group=f"g{g}", messages=(), token_ids=ids)] * size
    return made


def play(
    engine: Engine,
    weights,
    prompts: Sequence[Prompt],
    rules: Rules | None = None,
    *,
    return_when: float = 0.5,
    deterministic: bool = True,
    randomness: Sequence[object] = (0, 0, 1),
    watch=None,
) -> Played:
    conversations = Conversations(
        engine, tokenizer(), TINY, return_when=return_when, deterministic=deterministic
    )
    return conversations.play(
        weights,
        prompts,
        rules or make_rules(),
        randomness=randomness,
        policy_step=7,
        watch=watch,
    )


def ids_of(trajectories: Sequence[Trajectory]) -> dict[str, tuple]:
    """What was said, by uid: tokens of every turn, who made them, and how it ended."""
    return {
        t.uid: (t.stop, tuple((turn.sampled, tuple(turn.token_ids)) for turn in t.turns))
        for t in trajectories
    }
