"""The multi-turn loop: prompts in, trajectories out.

Each round admits prompts into free slots, gives waiting slots their tool answers, and decodes. A
prompt is prefilled once for its group; a tool answer costs a prefill of its own tokens. Sampled ids
are kept as they were sampled and never re-tokenised. The schedule (slot count, queue order, when a
tool answers) does not enter the sample.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from sspjax.errors import UserError
from sspjax.rollout.acts import parse_act
from sspjax.rollout.engine import Engine, Sampling, stream_key
from sspjax.rollout.prompts import PromptSet, observation_turn, smallest_observation
from sspjax.rollout.stop import stop_bits
from sspjax.rollout.tokenizer import Tokenizer
from sspjax.tools.tool import Observation, Tool
from sspjax.types import Act, Params, Prompt, Stop, Trajectory, Turn

TERMINAL = {Act.ANSWER: Stop.ANSWER, Act.QUESTION: Stop.QUESTION}
Watch = Callable[[str, Turn], None]
"""Called with (trajectory uid, turn) as turns are finished."""


class ToolError(RuntimeError):
    """A tool raised, or broke its contract; what it cannot answer it should report as failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What a role may do in an episode."""

    final: Act
    """The act that ends the episode well: ANSWER or QUESTION."""
    tools: Mapping[Act, Tool]
    sampling: Sampling
    max_turns: int
    """Generations; a tool asked for in the last one is not executed."""
    response_tokens: int
    turn_tokens: int
    observation_tokens: int
    document_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """Trajectories in the order of their prompts, and what the host waited for."""

    trajectories: tuple[Trajectory, ...]
    tool_seconds: float
    """Time inside tools, hidden behind decoding or not."""
    exposed_seconds: float
    """Time nothing decoded because tools had not answered."""


@dataclasses.dataclass
class _Episode:
    """One trajectory in the making."""

    index: int
    uid: str
    prompt: Prompt
    turns: list[Turn] = dataclasses.field(default_factory=list)
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    spent: int = 0
    generations: int = 0


@dataclasses.dataclass(frozen=True)
class _Call:
    slot: int
    act: Act
    argument: str


class Conversations:
    """Plays prompts on one engine. Holds the loop's collaborators, no state between calls."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt_set: PromptSet,
        *,
        return_when: float,
        deterministic: bool,
    ):
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompt_set = prompt_set
        self._return_when = return_when
        self._deterministic = deterministic
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tools")

    def play(
        self,
        params: Params,
        prompts: Sequence[Prompt],
        rules: Rules,
        *,
        randomness: Sequence[object],
        policy_step: int,
        watch: Watch | None = None,
    ) -> Played:
        """Plays every prompt to its end; equal groups share one prefill.

        `randomness` (seed, attempt, step, ...) together with a trajectory's uid, which is
        role/group/index in its group, determines everything that is sampled.

        Raises ToolError where a tool breaks, and ValueError for prompts of one group that differ,
        for an episode that does not fit into a slot, and for rules that leave no room for a turn.
        """
        loop = _Loop(self, params, rules, randomness, policy_step, watch)
        return loop.run(prompts)


class _Loop:
    """One call of `play`."""

    def __init__(self, owner, params, rules, randomness, policy_step, watch):
        self.engine: Engine = owner._engine
        self.tokenizer: Tokenizer = owner._tokenizer
        self.prompt_set: PromptSet = owner._prompt_set
        self.return_when: float = owner._return_when
        self.deterministic: bool = owner._deterministic
        self.threads: ThreadPoolExecutor = owner._threads
        self.params, self.rules = params, rules
        self.randomness, self.policy_step, self.watch = randomness, policy_step, watch
        self.smallest = smallest_observation(self.prompt_set, self.tokenizer)
        _check_rules(rules, self.smallest)
        self.allowed = (*rules.tools, rules.final)
        self.stops = stop_bits(self.allowed)
        self.queue: collections.deque[_Episode] = collections.deque()
        self.playing: dict[int, _Episode] = {}
        self.resident: dict[int, str] = {}
        """Group whose prompt a slot's cache starts with."""
        self.running: list[tuple[list[_Call], Future]] = []
        self.done: dict[int, Trajectory] = {}
        self.tool_seconds = self.exposed_seconds = 0.0

    def run(self, prompts: Sequence[Prompt]) -> Played:
        _check_room(prompts, self.rules.response_tokens, self.engine.shape.length)
        self.queue.extend(_episodes(prompts))
        self.engine.clear()
        try:
            while self.queue or self.playing:
                self._admit()
                self._collect()
                if self.engine.active.any():
                    self._submit(self._decode())
        finally:
            for _, future in self.running:
                future.cancel()
        return Played(
            trajectories=tuple(self.done[i] for i in range(len(prompts))),
            tool_seconds=self.tool_seconds,
            exposed_seconds=self.exposed_seconds,
        )

    def _admit(self) -> None:
        """Fills free slots from the queue; a group's prompt is prefilled in its first slot only.

        The queue holds groups one after another, so at most one group is partly admitted, and a
        slot that starts with its prompt cannot have been overwritten yet. Copies from such slots
        go first, then prefills, then copies of the new prompts.
        """
        free = [s for s in range(self.engine.shape.slots) if s not in self.playing]
        early: list[tuple[int, int]] = []
        late: list[tuple[int, int]] = []
        fresh: dict[int, np.ndarray] = {}
        holder = {group: slot for slot, group in self.resident.items()}
        placed: list[tuple[int, _Episode]] = []
        while free and self.queue:
            episode = self.queue.popleft()
            group = episode.prompt.group
            source = holder.get(group)
            same = next((s for s in free if self.resident.get(s) == group), None)
            slot = free[0] if same is None else same
            free.remove(slot)
            if source is None:
                holder[group] = slot
                fresh[slot] = episode.prompt.token_ids
            elif same is None:
                (late if source in fresh else early).append((source, slot))
            placed.append((slot, episode))
        lengths = {slot: len(episode.prompt.token_ids) for slot, episode in placed}
        self.engine.copy_prompts(early, [lengths[t] for _, t in early])
        self.engine.prefill(self.params, fresh)
        self.engine.copy_prompts(late, [lengths[t] for _, t in late])
        for slot, episode in placed:
            self.resident[slot] = episode.prompt.group
            self.playing[slot] = episode
            stream = stream_key(*self.randomness, episode.uid)
            self.engine.start(slot, episode.prompt.token_ids, stream, self.rules.sampling)
            self._begin_turn(slot)

    def _begin_turn(self, slot: int) -> None:
        episode = self.playing[slot]
        episode.generations += 1
        left = self.rules.response_tokens - episode.spent
        self.engine.begin_turn(slot, self.stops, min(self.rules.turn_tokens, left))

    def _decode(self) -> list[_Call]:
        """One decode call; finishes the turns that ended and returns the tool calls they make."""
        out = self.engine.decode(self.params, self.return_when)
        calls = []
        for row, slot in enumerate(out.slots.tolist()):
            episode, count = self.playing[slot], out.count[row]
            episode.tokens.append(out.tokens[row, :count])
            episode.logprobs.append(out.logprobs[row, :count])
            if out.stopped[row]:
                call = self._finish_turn(slot)
                if call is not None:
                    calls.append(call)
        return calls

    def _finish_turn(self, slot: int) -> _Call | None:
        episode = self.playing[slot]
        ids = np.concatenate(episode.tokens)
        text = self.tokenizer.decode(ids)
        act, argument = parse_act(text, self.allowed)
        turn = Turn(
            token_ids=ids,
            logprobs=np.concatenate(episode.logprobs),
            sampled=True,
            text=text,
            act=act,
            argument=argument,
        )
        episode.tokens, episode.logprobs = [], []
        episode.spent += len(ids)
        self._add(episode, turn)
        if act in TERMINAL:
            self._end(slot, TERMINAL[act])
        elif act is Act.NONE:
            cut = len(ids) and int(ids[-1]) not in self.tokenizer.end_ids
            spent = episode.spent >= self.rules.response_tokens
            self._end(slot, Stop.LENGTH if cut and spent else Stop.NO_ACTION)
        elif episode.generations >= self.rules.max_turns:
            self._end(slot, Stop.TURNS)
        elif self._room(episode) < self.smallest:
            self._end(slot, Stop.LENGTH)
        else:
            return _Call(slot, act, argument)
        return None

    def _room(self, episode: _Episode) -> int:
        """Tokens an observation may have so that at least one token can follow it."""
        left = self.rules.response_tokens - episode.spent - 1
        return min(self.rules.observation_tokens, left)

    def _submit(self, calls: list[_Call]) -> None:
        """Hands this round's tool calls to the thread, one batch for each tool."""
        for act, tool in self.rules.tools.items():
            batch = [c for c in calls if c.act is act]
            if batch:
                future = self.threads.submit(_timed, tool, [c.argument for c in batch])
                self.running.append((batch, future))

    def _collect(self) -> None:
        """Takes the tool answers that are there; waits for them where nothing else can go on."""
        waiting_since = time.perf_counter()
        futures = [future for _, future in self.running]
        if self.deterministic:
            wait(futures)
        elif not self.engine.active.any():
            wait(futures, return_when=FIRST_COMPLETED)
        self.exposed_seconds += time.perf_counter() - waiting_since
        ready = [entry for entry in self.running if entry[1].done()]
        self.running = [entry for entry in self.running if entry not in ready]
        observations: dict[int, np.ndarray] = {}
        for calls, future in ready:
            results, seconds = _answers(calls, future)
            self.tool_seconds += seconds
            for call, result in zip(calls, results, strict=True):
                ids = self._observe(call.slot, result)
                if ids is not None:
                    observations[call.slot] = ids
        self.engine.append(self.params, observations)
        for slot in observations:
            self._begin_turn(slot)

    def _observe(self, slot: int, result: Observation) -> np.ndarray | None:
        """Adds the tool's turn; its tokens, or None where the tool failed."""
        if result.failed:
            self._end(slot, Stop.TOOL_FAILED)
            return None
        episode = self.playing[slot]
        turn = observation_turn(
            self.prompt_set,
            self.tokenizer,
            result.documents,
            budget=self._room(episode),
            document_tokens=self.rules.document_tokens,
        )
        episode.spent += len(turn.token_ids)
        self._add(episode, turn)
        return turn.token_ids

    def _add(self, episode: _Episode, turn: Turn) -> None:
        episode.turns.append(turn)
        if self.watch is not None:
            self.watch(episode.uid, turn)

    def _end(self, slot: int, stop: Stop) -> None:
        episode = self.playing.pop(slot)
        self.done[episode.index] = Trajectory(
            uid=episode.uid,
            prompt=episode.prompt,
            turns=tuple(episode.turns),
            stop=stop,
            policy_step=self.policy_step,
        )


def _check_rules(rules: Rules, smallest: int) -> None:
    least = min(rules.max_turns, rules.response_tokens, rules.turn_tokens)
    if least < 1:
        raise ValueError(
            f"expected max_turns, response_tokens and turn_tokens of at least 1, got "
            f"{rules.max_turns}, {rules.response_tokens} and {rules.turn_tokens}"
        )
    if rules.tools and rules.observation_tokens < smallest:
        raise ValueError(
            f"expected observation_tokens of at least {smallest}, what a tool's text without "
            f"passages takes, got {rules.observation_tokens}: every tool call would end its episode"
        )


def _check_room(prompts: Sequence[Prompt], response_tokens: int, capacity: int) -> None:
    longest = max((len(p.token_ids) for p in prompts), default=0)
    if longest + response_tokens > capacity:
        raise ValueError(
            f"expected prompt and response to fit into a slot of {capacity} tokens, got a prompt "
            f"of {longest} and response_tokens={response_tokens}: build the engine for this role"
        )


def _episodes(prompts: Sequence[Prompt]) -> Iterable[_Episode]:
    """One episode a prompt, groups together in order of first appearance."""
    groups: dict[str, list[_Episode]] = {}
    for index, prompt in enumerate(prompts):
        members = groups.setdefault(prompt.group, [])
        if members and not np.array_equal(members[0].prompt.token_ids, prompt.token_ids):
            raise ValueError(
                f"group {prompt.group}: expected one prompt, got two that differ; a group shares "
                "its prefill, so give every prompt text a group of its own"
            )
        uid = f"{prompt.role.name.lower()}/{prompt.group}/{len(members)}"
        members.append(_Episode(index=index, uid=uid, prompt=prompt))
    return [episode for members in groups.values() for episode in members]


def _timed(tool: Tool, arguments: list[str]) -> tuple[list[Observation], float]:
    began = time.perf_counter()
    return tool.run(arguments), time.perf_counter() - began


def _answers(calls: Sequence[_Call], future: Future) -> tuple[list[Observation], float]:
    """One observation a call and the seconds they took; raises ToolError, or the UserError that
    the tool raised.
    """
    error = future.exception()
    if isinstance(error, UserError):
        raise error
    asked = f"{calls[0].act.value}: {len(calls)} calls, the first {calls[0].argument!r}"
    if error is not None:
        raise ToolError(
            f"{asked}: expected observations, got {type(error).__name__}: {error}; a tool reports "
            "what it cannot answer as Observation(failed=True)"
        ) from error
    results, seconds = future.result()
    if len(results) != len(calls):
        raise ToolError(f"{asked}: expected one observation for each, got {len(results)}")
    return results, seconds
