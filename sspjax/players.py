"""The roles at play: prompts to trajectories, over every island of the run.

Each process plays its share of the groups on its own island; then all trajectories are exchanged,
so that every process continues with the same step. Who plays what does not enter the sample.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from sspjax import processes
from sspjax.config import RunConfig
from sspjax.islands import IslandCopy
from sspjax.learner.pack import role_config
from sspjax.mesh import Layout, island_layout
from sspjax.models.decoder import Model
from sspjax.models.presets import DecoderConfig
from sspjax.retrieval.client import Retriever
from sspjax.rollout.conversation import Conversations, Rules, Watch
from sspjax.rollout.engine import Engine, EngineCounts, EngineShape, Sampling
from sspjax.rollout.prompts import PROMPTS
from sspjax.rollout.stop import build_automaton
from sspjax.rollout.tokenizer import Tokenizer
from sspjax.tools.kit import equip
from sspjax.types import Act, Params, Prompt, Role, TrainState, Trajectory


def engine_shape(config: RunConfig, ways: int) -> EngineShape:
    """The engine's static sizes: the longest episode of any role, rounded up to whole chunks."""
    rollout = config.rollout
    episodes = [
        (config.proposer.prompt_tokens, config.proposer.response_tokens),
        (config.solver.prompt_tokens, config.solver.response_tokens),
        (config.verify.prompt_tokens, config.verify.answer_tokens),
    ]
    longest = max(prompt + response for prompt, response in episodes)
    rows = rollout.extend_rows or -(-rollout.slots // 4)
    sampled = [config.proposer, config.solver]
    return EngineShape(
        slots=rollout.slots,
        length=-(-longest // 64) * 64,
        prompt_length=max(prompt for prompt, _ in episodes),
        rows=-(-rows // ways) * ways,
        chunk=rollout.chunk,
        decode_tokens=rollout.decode_tokens,
        truncated=any(role.top_k > 0 or role.top_p < 1 for role in sampled),
    )


@dataclasses.dataclass
class Played:
    """What the players did since it was last taken."""

    counts: EngineCounts
    tool_seconds: float = 0.0
    exposed_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Time at the exchange: other processes were still playing."""


class Players:
    """Plays every role of the run on this process's island."""

    def __init__(
        self,
        config: RunConfig,
        decoder: DecoderConfig,
        train: Layout,
        tokenizer: Tokenizer,
        retriever: Retriever,
    ):
        island = island_layout(config.mesh, decoder.kv_heads)
        dtype = jnp.dtype(config.model.dtype)
        model = Model(
            decoder, island, dtype, block=config.model.attention_block, remat=config.model.remat
        )
        self._config = config
        self._retriever = retriever
        self._copy = IslandCopy(decoder, train, island, dtype)
        automaton = build_automaton(tokenizer.token_bytes, vocab_size=decoder.vocab_size)
        shape = engine_shape(config, island.ways("slots"))
        self._engine = Engine(model, shape, automaton, tokenizer.end_ids)
        deterministic = config.rollout.deterministic
        self._conversations = Conversations(
            self._engine,
            tokenizer,
            PROMPTS[config.model.prompts],
            return_when=config.rollout.return_when,
            deterministic=jax.default_backend() == "cpu"
            if deterministic is None
            else deterministic,
        )
        self._policies: Mapping[str, Params] = {}
        self._step = 0
        self._work = Played(counts=self._engine.counts)

    def load(self, state: TrainState, step: int) -> None:
        """Gives the island a copy of every policy, as it is at `step`."""
        self._policies = {name: self._copy(p.params) for name, p in state.policies.items()}
        self._step = step

    def rules(self, role: Role, *, tools: bool = True, temperature: float | None = None) -> Rules:
        """What a role may do; `temperature` replaces the configured one (evaluation)."""
        if role is Role.READER:
            verify = self._config.verify
            own = dataclasses.replace(
                self._config.solver,
                tools=(),
                max_turns=1,
                response_tokens=verify.answer_tokens,
                turn_tokens=verify.answer_tokens,
                temperature=verify.temperature,
                top_k=0,
                top_p=1.0,
            )
        else:
            own = role_config(self._config, role)
        named = own.tools if tools else ()
        return Rules(
            final=Act.QUESTION if role is Role.PROPOSER else Act.ANSWER,
            tools=equip(named, retriever=self._retriever, topk=self._config.retrieval.topk),
            sampling=Sampling(
                temperature=own.temperature if temperature is None else temperature,
                top_k=own.top_k,
                top_p=own.top_p,
            ),
            max_turns=own.max_turns,
            response_tokens=own.response_tokens,
            turn_tokens=own.turn_tokens,
            observation_tokens=own.observation_tokens,
            document_tokens=self._config.retrieval.document_tokens,
        )

    def play(
        self,
        role: Role,
        prompts: Sequence[Prompt],
        *,
        randomness: Sequence[object],
        rules: Rules | None = None,
        watch: Watch | None = None,
    ) -> tuple[Trajectory, ...]:
        """One trajectory a prompt, in order, the same in every process.

        Raises ProcessError where the processes cannot meet.
        """
        groups = {group: i for i, group in enumerate(dict.fromkeys(p.group for p in prompts))}
        mine = [
            i
            for i, prompt in enumerate(prompts)
            if groups[prompt.group] % jax.process_count() == jax.process_index()
        ]
        played = self._conversations.play(
            self._policies[self._policy(role)],
            [prompts[i] for i in mine],
            rules or self.rules(role),
            randomness=randomness,
            policy_step=self._step,
            watch=watch,
        )
        self._work.tool_seconds += played.tool_seconds
        self._work.exposed_seconds += played.exposed_seconds
        arrived = time.perf_counter()
        shares = processes.exchange(_packed(mine, played.trajectories))
        self._work.wait_seconds += time.perf_counter() - arrived
        everything = [pair for share in shares for pair in pickle.loads(share)]
        return tuple(
            _unpacked(fields, prompts[i])
            for i, fields in sorted(everything, key=lambda pair: pair[0])
        )

    def take_work(self) -> Played:
        """Counts and seconds of this process since the last call."""
        work, self._engine.counts = self._work, EngineCounts()
        self._work = Played(counts=self._engine.counts)
        return work

    def _policy(self, role: Role) -> str:
        return self._config.proposer.policy if role is Role.PROPOSER else self._config.solver.policy


def _packed(places: Sequence[int], trajectories: Sequence[Trajectory]) -> bytes:
    """Trajectories for the other processes, which have the prompts already."""
    rows = [
        (place, (t.uid, t.turns, t.stop, t.policy_step, t.skills))
        for place, t in zip(places, trajectories, strict=True)
    ]
    return pickle.dumps(rows, protocol=5)


def _unpacked(fields: tuple, prompt: Prompt) -> Trajectory:
    uid, turns, stop, policy_step, skills = fields
    return Trajectory(
        uid=uid, prompt=prompt, turns=turns, stop=stop, policy_step=policy_step, skills=skills
    )
