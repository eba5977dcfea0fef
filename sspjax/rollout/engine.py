"""The rollout engine: a fixed set of slots on one island, and three compiled programs.

`extend` appends forced tokens (prompts, tool answers) to cache rows in fixed chunks, `copy` gives a
group's prompt to its other slots, `decode` samples in all active slots until enough of them wait.
The cache is donated and updated in place; the small per-slot vectors live on the host between
calls. Parameters are an argument: there is no second copy to keep in step with the trainer.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sspjax.config import ConfigError
from sspjax.models.decoder import Model
from sspjax.rollout.sampling import sample
from sspjax.rollout.stop import Automaton
from sspjax.types import Cache, Params, SlotState

_VECTOR = 8
"""Floats of a vector register in the code that XLA makes for CPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Every static size of the engine's programs."""

    slots: int
    length: int
    """Tokens a slot's cache holds: prompt and response."""
    prompt_length: int
    """Longest prompt; what `copy` copies."""
    rows: int
    """Rows of one extend call."""
    chunk: int
    """Tokens of one extend call, for each of its rows."""
    decode_tokens: int
    """Most tokens one decode call samples in a slot."""
    truncated: bool = False
    """Whether any role samples with top-k or top-p."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one trajectory samples."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """What one decode call sampled."""

    slots: np.ndarray
    """i32[n]: the slots that were active."""
    tokens: np.ndarray
    """i32[n, steps], zeros after a slot stopped."""
    logprobs: np.ndarray
    """f32[n, steps]"""
    count: np.ndarray
    """i32[n]: tokens of each slot."""
    stopped: np.ndarray
    """bool[n]: the turn ended (tag, end of sequence, or budget)."""


@dataclasses.dataclass
class EngineCounts:
    """Work done since the counts were last taken, in tokens and slot-steps."""

    generated: int = 0
    prefilled: int = 0
    """Tokens put into the cache by `extend`, padding excluded: all but the last of every prompt
    that was prefilled, and as many as every observation has."""
    copied: int = 0
    """Prompt tokens that were copied instead of prefilled (all but the last of each copy)."""
    slot_steps: int = 0
    """Slots x decode steps that ran."""


def stream_key(*parts: object) -> np.ndarray:
    """Threefry key u32[2] of a trajectory: a hash of (seed, attempt, step, trajectory id)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint32)


class Engine:
    """Slots, their caches, and the programs over them. One per island."""

    def __init__(
        self, model: Model, shape: EngineShape, automaton: Automaton, end_ids: tuple[int, ...]
    ):
        ways = model.layout.ways("slots")
        if shape.slots % ways or shape.rows % ways:
            raise ConfigError(
                f"config.rollout: slots={shape.slots} and extend_rows={shape.rows} must divide "
                f"over the island's {ways} slot groups; choose multiples of {ways}"
            )
        self.shape = shape
        self.counts = EngineCounts()
        self._lanes = _lanes(model, shape)
        self._empty_cache = jax.jit(lambda: model.empty_cache(self._lanes, shape.length))
        self._cache: Any = self._empty_cache()
        self._table = jax.device_put(automaton.table, model.layout.replicated())
        self._completed = jax.device_put(automaton.completed, model.layout.replicated())
        self._state = _idle(self._lanes)
        statics = dict(model=model, shape=shape)
        self._extend = jax.jit(functools.partial(_extend, **statics), donate_argnums=1)
        self._copy = jax.jit(functools.partial(_copy, **statics), donate_argnums=0)
        self._decode = jax.jit(
            functools.partial(_decode, end_ids=end_ids, **statics), donate_argnums=1
        )
        # Compiled now: groups come with the first accepted question, in whatever step that is.
        nothing = np.zeros(self._lanes, np.int32)
        self._cache = self._copy(self._cache, nothing, nothing, np.int32(0))

    @property
    def active(self) -> np.ndarray:
        """bool[S]: slots that are sampling."""
        return self._state.active

    def clear(self) -> None:
        """Forgets every slot, what is sampling in it and what its cache holds.

        Masked keys are read with weight 0, so numbers of an earlier play do not matter unless they
        are not finite: parameters that diverged must not reach into what is played after them.
        """
        self._state = _idle(self._lanes)
        # The old cache goes first: two of them may not fit.
        self._cache = None
        self._cache = self._empty_cache()

    def prefill(self, params: Params, prompts: Mapping[int, np.ndarray]) -> None:
        """Puts a prompt into each given slot, replacing what was there.

        Raises ValueError for an empty prompt and for one over `prompt_length` tokens.
        """
        longest = self.shape.prompt_length
        for slot, ids in prompts.items():
            if not 1 <= len(ids) <= longest:
                raise ValueError(
                    f"slot {slot}: expected a prompt of 1 to {longest} tokens, got {len(ids)}; "
                    "a role's prompts are held to its prompt_tokens"
                )
            self._state.length[slot] = 0
        self._feed(params, {slot: np.asarray(ids) for slot, ids in prompts.items()})

    def copy_prompts(self, pairs: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        """Copies the prompt of slot `source` (of `length` tokens) to slot `target`.

        No target is the source of another pair.
        """
        if not pairs:
            return
        source, target = np.zeros((2, self._lanes), np.int32)
        source[: len(pairs)], target[: len(pairs)] = np.transpose(pairs)
        self._cache = self._copy(self._cache, source, target, np.int32(len(pairs)))
        self.counts.copied += sum(length - 1 for length in lengths)

    def start(self, slot: int, prompt: np.ndarray, stream: np.ndarray, sampling: Sampling) -> None:
        """Begins a trajectory in a slot whose cache already starts with the prompt.

        Raises ValueError for top-k or top-p where the shape is not `truncated`.
        """
        if (sampling.top_k > 0 or sampling.top_p < 1) and not self.shape.truncated:
            raise ValueError(
                f"slot {slot}: expected top_k=0 and top_p=1, got top_k={sampling.top_k} and "
                f"top_p={sampling.top_p}; build the engine with EngineShape.truncated=True"
            )
        s = self._state
        s.length[slot] = len(prompt) - 1
        s.pending[slot] = prompt[-1]
        s.stream[slot] = stream
        s.drawn[slot] = 0
        s.temperature[slot] = sampling.temperature
        s.top_k[slot] = sampling.top_k
        s.top_p[slot] = sampling.top_p

    def append(self, params: Params, observations: Mapping[int, np.ndarray]) -> None:
        """Extends each slot's context by forced tokens (at least one), once.

        Raises ValueError where they do not fit into the slot's cache.
        """
        s, fed = self._state, {}
        for slot, ids in observations.items():
            fed[slot] = np.concatenate([s.pending[slot : slot + 1], ids])
            s.pending[slot] = ids[-1]
        self._feed(params, fed)

    def begin_turn(self, slot: int, stops: int, budget: int) -> None:
        """Lets a slot sample up to `budget` tokens, until a tag of the bit set `stops` ends.

        Raises ValueError for a budget below 1 or beyond the slot's cache.
        """
        if budget < 1:
            raise ValueError(f"slot {slot}: expected a turn of at least 1 token, got {budget}")
        self._check_room(slot, budget)
        s = self._state
        s.active[slot] = True
        s.automaton[slot] = 0
        s.stops[slot] = stops
        s.budget[slot] = budget

    def decode(self, params: Params, return_when: float) -> Decoded:
        """Samples in the active slots until that share of them stopped, or decode_tokens."""
        was_active = np.flatnonzero(self._state.active)
        threshold = max(1, math.ceil(return_when * len(was_active)))
        self._cache, *result = self._decode(
            params, self._cache, self._state, self._table, self._completed, np.int32(threshold)
        )
        # Writable host copies: the host changes these vectors between calls.
        changed, count, tokens, logprobs, steps = jax.device_get(result)
        self._state = self._state.replace(**{k: np.array(v) for k, v in changed.items()})
        count = count[was_active]
        tokens, logprobs = tokens[was_active, :steps], logprobs[was_active, :steps]
        self.counts.generated += int(count.sum())
        self.counts.slot_steps += int(steps) * self.shape.slots
        return Decoded(
            slots=was_active,
            tokens=tokens,
            logprobs=logprobs,
            count=count,
            stopped=~self._state.active[was_active],
        )

    def _feed(self, params: Params, fed: dict[int, np.ndarray]) -> None:
        """Runs all but the last token of each row through the model, `rows` x `chunk` at a time."""
        shape, state = self.shape, self._state
        left = {slot: ids[:-1] for slot, ids in fed.items() if len(ids) > 1}
        for slot, ids in left.items():
            self._check_room(slot, len(ids))
        self.counts.prefilled += sum(len(ids) for ids in left.values())
        while left:
            batch = list(left)[: shape.rows]
            tokens = np.zeros((shape.rows, shape.chunk), np.int32)
            slots, start, count = (np.zeros(shape.rows, np.int32) for _ in range(3))
            for row, slot in enumerate(batch):
                part = left[slot][: shape.chunk]
                tokens[row, : len(part)] = part
                slots[row], start[row], count[row] = slot, state.length[slot], len(part)
                state.length[slot] += len(part)
                rest = left.pop(slot)[len(part) :]
                if len(rest):
                    left[slot] = rest
            self._cache = self._extend(params, self._cache, tokens, slots, start, count)

    def _check_room(self, slot: int, tokens: int) -> None:
        # The device drops what is written beyond a cache, and would go on without it.
        used, length = int(self._state.length[slot]), self.shape.length
        if used + tokens > length:
            raise ValueError(
                f"slot {slot}: expected at most {length - used} more tokens, got {tokens}; "
                f"EngineShape.length={length} must hold a prompt and its response"
            )


def _lanes(model: Model, shape: EngineShape) -> int:
    """Rows of the device arrays: the slots, and on CPUs idle ones up to whole vectors.

    What is left over of a vector loop runs in code whose exp and log round differently, so the bits
    of a row would depend on whether it is among the last.
    """
    ways = model.layout.ways("slots")
    share = shape.slots // ways
    if model.layout.mesh.devices.flat[0].platform != "cpu" or share == 1:
        return shape.slots
    return -(-share // _VECTOR) * _VECTOR * ways


def _idle(slots: int) -> SlotState:
    def zeros(dtype: type, *shape: int) -> np.ndarray:
        return np.zeros((slots, *shape), dtype)

    return SlotState(
        length=zeros(np.int32),
        pending=zeros(np.int32),
        active=zeros(np.bool_),
        automaton=zeros(np.int32),
        stops=zeros(np.uint32),
        stream=zeros(np.uint32, 2),
        drawn=zeros(np.int32),
        budget=zeros(np.int32),
        temperature=zeros(np.float32),
        top_k=zeros(np.int32),
        top_p=zeros(np.float32),
    )


def _extend(params, cache, tokens, slots, start, count, *, model: Model, shape: EngineShape):
    return model.extend(params, cache, tokens, slots, start, count)


def _copy(cache: Cache, source, target, count, *, model: Model, shape: EngineShape) -> Cache:
    """Copies the first `prompt_length` rows of `count` sources, one after another: a gather of all
    at once would hold them all a second time.
    """

    def copy_one(i, cache: Cache) -> Cache:
        pair = [jax.lax.dynamic_slice_in_dim(x, i, 1) for x in (source, target)]

        def copied(x: jax.Array) -> jax.Array:
            prompt = x[:, pair[0], : shape.prompt_length]
            return x.at[:, pair[1], : shape.prompt_length].set(prompt)

        return Cache(keys=copied(cache.keys), values=copied(cache.values))

    return jax.lax.fori_loop(0, count, copy_one, cache)


def _decode(
    params, cache, state: SlotState, table, completed, threshold, *, model: Model,
    shape: EngineShape, end_ids: tuple[int, ...],
):  # fmt: skip
    """The sampling loop; returns the cache, the vectors that changed, and what was sampled."""
    entered = state.active

    def more(carry):
        _, state, _, _, _, step = carry
        waiting = jnp.sum(entered & ~state.active)
        return (step < shape.decode_tokens) & (waiting < threshold) & jnp.any(state.active)

    def token_step(carry):
        cache, state, tokens, logprobs, count, step = carry
        active = state.active
        cache, logits = model.decode(params, cache, state.pending, state.length, active)
        token, logprob = sample(
            logits,
            state.stream,
            state.drawn,
            state.temperature,
            state.top_k,
            state.top_p,
            truncated=shape.truncated,
        )
        one = active.astype(jnp.int32)
        token = jnp.where(active, token, state.pending)
        automaton = table[state.automaton, token].astype(jnp.int32)
        tag = completed[automaton]
        bit = jax.lax.shift_right_logical(state.stops, jnp.maximum(tag, 0).astype(jnp.uint32))
        ends = (tag >= 0) & ((bit & jnp.uint32(1)) == 1)
        budget = state.budget - one
        ended = jnp.isin(token, jnp.array(end_ids, jnp.int32))
        going = active & ~ends & ~ended & (budget > 0)

        def column(x, value):
            value = jnp.where(active, value, jnp.zeros_like(value))
            return jax.lax.dynamic_update_slice(x, value[:, None], (0, step))

        state = state.replace(
            length=state.length + one,
            pending=token,
            active=going,
            automaton=jnp.where(active, automaton, state.automaton),
            drawn=state.drawn + one,
            budget=budget,
        )
        return cache, state, column(tokens, token), column(logprobs, logprob), count + one, step + 1

    out = (*entered.shape, shape.decode_tokens)
    carry = (
        cache,
        state,
        jnp.zeros(out, jnp.int32),
        jnp.zeros(out, jnp.float32),
        jnp.zeros(entered.shape, jnp.int32),
        jnp.int32(0),
    )
    cache, state, tokens, logprobs, count, steps = jax.lax.while_loop(more, token_step, carry)
    changed = {
        "length": state.length,
        "pending": state.pending,
        "active": state.active,
        "automaton": state.automaton,
        "drawn": state.drawn,
        "budget": state.budget,
    }
    return cache, changed, count, tokens, logprobs, steps
