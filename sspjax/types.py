"""Every noun of the program: what the host passes around, and what the devices hold.

Host nouns are frozen dataclasses of tuples and arrays; nothing changes them after they are made.
Device nouns are pytrees. Dimension key, used in every annotation of the project:

  S  rollout slots on one island        M  micro-batches of one update
  C  cache length of a slot             R  rows of a micro-batch
  N  tokens one decode call may sample  L  row length in tokens
  T  query tokens of a model call       K  optimizer minibatches of one update
  V  vocabulary                         G  rollouts of one question
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, dataclass_transform

import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def noun(cls: type[T]) -> type[T]:
    """A value: compared field by field, hashable when its fields are."""
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
def record(cls: type[T]) -> type[T]:
    """A value that carries arrays: compared by identity."""
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)(cls)


class Role(enum.Enum):
    """Who is playing. The value indexes the per-role constants on the device."""

    PROPOSER = 0
    SOLVER = 1
    READER = 2
    """The solver's policy answering from given documents, without tools (verification)."""


class Act(enum.Enum):
    """What a sampled turn did, read from the tag that ended it."""

    SEARCH = "search"
    OPEN = "open"
    FIND = "find"
    ANSWER = "answer"
    QUESTION = "question"
    NONE = "none"
    """No tag was completed: end of sequence, or the turn's budget ran out."""


class Stop(enum.Enum):
    """Why a trajectory ended."""

    ANSWER = "answer"
    QUESTION = "question"
    NO_ACTION = "no_action"
    """The model ended its text without an act, or its turn's budget ran out."""
    TURNS = "turns"
    """A tool was asked for in the last generation that is allowed; it is not executed."""
    LENGTH = "length"
    """The response budget is spent, observations included."""
    TOOL_FAILED = "tool_failed"
    """The tool gave no result; the trajectory must not be trained on or scored."""


class Reason(enum.Enum):
    """Why a proposal was rejected. Rewards, metrics and logs all read this."""

    NO_QUESTION = "no_question"
    NO_SEARCH = "no_search"
    FEW_SEARCHES = "few_searches"
    REPEATED_SEARCH = "repeated_search"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    LEAK = "leak"
    SEARCHED_ANSWER = "searched_answer"
    VERIFY_WRONG = "verify_wrong"
    VERIFY_TOO_LONG = "verify_too_long"
    VERIFY_ERROR = "verify_error"
    COUNTERFACTUAL = "counterfactual"
    NOT_FLUENT = "not_fluent"
    NOT_GROUNDED = "not_grounded"
    TOOL_FAILED = "tool_failed"
    """Not the proposer's fault: its trajectory is left out of the loss."""
    CONSENSUS = "consensus"
    NO_TOOLS = "no_tools"
    FORMAT = "format"
    INVALID = "invalid"
    CLOSED_BOOK = "closed_book"


# Host nouns ---------------------------------------------------------------------------------------


@noun
class Document:
    """One passage of a corpus; two documents are the same when their ids are."""

    id: str
    title: str
    text: str


@noun
class Triple:
    """One edge of a knowledge graph, by entity ids."""

    head: str
    relation: str
    tail: str


@noun
class Seed:
    """What a proposer starts from: an answer, a document, or a graph path ending at the answer."""

    uid: str
    answer: str | None = None
    aliases: tuple[str, ...] = ()
    hops: int = 1
    """Searches the proposer is asked to chain."""
    document: Document | None = None
    path: tuple[Triple, ...] = ()
    branches: tuple[Triple, ...] = ()


@noun
class Question:
    """A question with the answer it is said to have, and what its proposer had read."""

    uid: str
    text: str
    answer: str
    aliases: tuple[str, ...] = ()
    evidence: tuple[Document, ...] = ()
    chain: tuple[str, ...] = ()
    waypoints: tuple[str, ...] = ()

    @property
    def answers(self) -> tuple[str, ...]:
        """Every accepted string, the canonical one first."""
        return (self.answer, *self.aliases)


@noun
class Message:
    """One message of a prompt; `author` is system, user or assistant."""

    author: str
    content: str


@record
class Prompt:
    """What a rollout starts from. Prompts with one `group` are the same text and are compared."""

    role: Role
    subject: Seed | Question
    group: str
    messages: tuple[Message, ...]
    token_ids: np.ndarray
    """i32[prompt length]"""


@record
class Turn:
    """One stretch of a response: sampled by the policy, or forced by a tool."""

    token_ids: np.ndarray
    """i32[turn length]"""
    logprobs: np.ndarray
    """f32[turn length] of softmax(logits / temperature) at sampling time; zeros where forced."""
    sampled: bool
    """The mark made where the tokens are made. In self-play it *is* the loss mask."""
    text: str
    act: Act = Act.NONE
    argument: str = ""
    documents: tuple[Document, ...] = ()


@record
class Trajectory:
    """A prompt and everything that followed it."""

    uid: str
    """Unique within a step; with (seed, attempt, step) it determines every random choice."""
    prompt: Prompt
    turns: tuple[Turn, ...]
    stop: Stop
    policy_step: int
    """Step of the parameters that sampled it."""
    skills: tuple[str, ...] = ()

    @property
    def token_ids(self) -> np.ndarray:
        """i32[response length]: sampled and forced tokens, without the prompt."""
        return _joined([t.token_ids for t in self.turns], np.int32)

    @property
    def sampled(self) -> np.ndarray:
        """bool[response length], aligned with `token_ids`."""
        return _joined([np.full(len(t.token_ids), t.sampled) for t in self.turns], np.bool_)

    @property
    def logprobs(self) -> np.ndarray:
        """f32[response length], aligned with `token_ids`."""
        return _joined([t.logprobs for t in self.turns], np.float32)

    @property
    def queries(self) -> tuple[str, ...]:
        """Arguments of the searches that were executed, in order."""
        return self._executed(Act.SEARCH)

    @property
    def opened(self) -> tuple[str, ...]:
        """Ids of the documents that were opened, in order, repeats included."""
        return self._executed(Act.OPEN)

    @property
    def documents(self) -> tuple[Document, ...]:
        """Every document a tool showed, once each, in order of first appearance."""
        seen = {d.id: d for t in self.turns for d in t.documents}
        return tuple(seen.values())

    @property
    def answer(self) -> str | None:
        """Argument of the last turn that answered, or None."""
        answers = [t.argument for t in self.turns if t.act is Act.ANSWER]
        return answers[-1] if answers else None

    @property
    def failed(self) -> bool:
        """A tool failed on the way: neither right nor wrong, left out of the loss."""
        return self.stop is Stop.TOOL_FAILED

    def _executed(self, act: Act) -> tuple[str, ...]:
        """An act counts as executed when a tool's turn follows it."""
        pairs = zip(self.turns, self.turns[1:], strict=False)
        return tuple(t.argument for t, reply in pairs if t.act is act and not reply.sampled)


@record
class Proposal:
    """A proposer trajectory, the question found in it, and why it was rejected (None: accepted)."""

    trajectory: Trajectory
    question: Question | None
    reason: Reason | None = None

    @property
    def accepted(self) -> bool:
        return self.question is not None and self.reason is None


@record
class Group:
    """The rollouts of one question."""

    question: Question
    rollouts: tuple[Trajectory, ...]
    """[G]"""
    correct: tuple[bool | None, ...]
    """[G]; None: not judged (tool or judge failure), never counted as wrong."""

    @property
    def judged(self) -> tuple[bool, ...]:
        return tuple(c for c in self.correct if c is not None)

    @property
    def settled(self) -> bool:
        """Enough is judged to compare: two rollouts, or the only one there is.

        A group that is not is left out of the loss, its proposer's too, and of replay.
        """
        return len(self.judged) >= min(2, len(self.rollouts)) > 0

    @property
    def success_rate(self) -> float | None:
        """Share of right answers among the judged rollouts; None when nothing was judged."""
        return sum(self.judged) / len(self.judged) if self.judged else None


@record
class Example:
    """What the learner learns from."""

    trajectory: Trajectory
    reward: float
    advantage: float
    terms: Mapping[str, float]
    """The named reward terms that were summed, for the logs."""


@noun
class Replayed:
    """A question kept for reuse, with how often it was solved when it was new."""

    question: Question
    success_rate: float
    step: int


@noun
class HostState:
    """Everything the host remembers between steps; JSON-able and in every checkpoint."""

    seed_cursor: int = 0
    """Seeds taken since the start of the run, over all epochs."""
    replay: tuple[Replayed, ...] = ()
    skills: tuple[Mapping[str, Any], ...] = ()
    attempt: int = 0
    """Roll-backs so far; enters every random choice."""
    last_row: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics row of the step this state ends."""


# What the pure rules are given to reach the world -------------------------------------------------

Read = Callable[[Sequence[Prompt]], Sequence[Trajectory]]
"""Reader prompts to one finished trajectory each (the model call of verification)."""


# Device nouns -------------------------------------------------------------------------------------

HostOrDevice = Any
"""A jax.Array inside a program, a numpy array between two of them."""


class Cache(flax.struct.PyTreeNode):
    """Keys and values of every slot. Row `p` of a slot belongs to the token at position `p`."""

    keys: Float[Array, "layers S C kv_heads head_dim"]
    values: Float[Array, "layers S C kv_heads head_dim"]


class SlotState(flax.struct.PyTreeNode):
    """What decoding knows of each slot beside its cache; the host keeps it between calls.

    The cache holds every token of a slot but the pending one.
    """

    length: Int[HostOrDevice, "S"]
    """Tokens in the cache."""
    pending: Int[HostOrDevice, "S"]
    """The last token, not yet in the cache: the next model call feeds it."""
    active: Bool[HostOrDevice, "S"]
    """The slot is sampling."""
    automaton: Int[HostOrDevice, "S"]
    """State of the stop automaton over this turn's sampled tokens."""
    stops: UInt32[HostOrDevice, "S"]
    """Bit t is set when completing tag t ends the slot's turn."""
    stream: UInt32[HostOrDevice, "S 2"]
    """Threefry key of the trajectory."""
    drawn: Int[HostOrDevice, "S"]
    """Tokens sampled in this trajectory so far: the counter of its random stream."""
    budget: Int[HostOrDevice, "S"]
    """Tokens this turn may still sample."""
    temperature: Float[HostOrDevice, "S"]
    """0 means greedy."""
    top_k: Int[HostOrDevice, "S"]
    """0 means off."""
    top_p: Float[HostOrDevice, "S"]
    """1 means off."""


class UpdateBatch(flax.struct.PyTreeNode):
    """Packed rows of one policy's update. Normalisation is data: the loss is sum(weight * term).

    Rows belong to micro-batches, micro-batches to minibatches; minibatch k owns micro-batches
    `micro_stop[k-1]` to `micro_stop[k]` (exclusive), so counts never change a shape.
    A trajectory never spans rows. Position i of a row holds the token and everything that is said
    about predicting *it* from the tokens before it in the same segment.
    """

    tokens: Int[Array, "M R L"]
    positions: Int[Array, "M R L"]
    segments: Int[Array, "M R L"]
    """1..n in a row; 0 where there is no token."""
    sampled: Bool[Array, "M R L"]
    """False with a loss weight means plain likelihood: the ratio is one by construction."""
    loss_weight: Float[Array, "M R L"]
    kl_weight: Float[Array, "M R L"]
    advantage: Float[Array, "M R L"]
    behaviour_logprob: Float[Array, "M R L"]
    old_logprob: Float[Array, "M R L"]
    reference_logprob: Float[Array, "M R L"]
    role: Int[Array, "M R L"]
    micro_stop: Int[Array, "K"]


class LossConstants(flax.struct.PyTreeNode):
    """Per-role constants of the objective, as data: one program serves them all."""

    clip_low: Float[Array, "roles"]
    clip_high: Float[Array, "roles"]
    dual_clip: Float[Array, "roles"]
    entropy: Float[Array, "roles"]
    temperature: Float[Array, "roles"]


class PolicyState(flax.struct.PyTreeNode):
    """Trained parameters and their optimizer."""

    params: Any
    opt_state: Any


class TrainState(flax.struct.PyTreeNode):
    """Everything the devices remember between steps."""

    step: Int[Array, ""]
    policies: dict[str, PolicyState]


Params = Any
"""A pure nested dict of arrays."""

Metrics = dict[str, jax.Array]


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)
