"""The configuration schema: the only home of defaults, which are those of `configs/ssp.py`.

A config file is Python with `get_config() -> ConfigDict`; it starts from `default()` and overrides.
`freeze` turns the ConfigDict into a `RunConfig`, checks every type and choice, and then the
combinations. After that nobody sees a ConfigDict, and nobody calls `.get(key, default)`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import types
import typing
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, dataclass_transform

from ml_collections import ConfigDict

from sspjax.errors import UserError

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def schema(cls: type[T]) -> type[T]:
    """A group of settings: typed, frozen, every field with its default."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class ConfigError(UserError, ValueError):
    """A configuration that cannot run. The message is one line: key, value, what is allowed."""


@schema
class WorldConfig:
    """The mini-encyclopaedia, for runs that bring no corpus of their own."""

    kind: Literal["none", "miniwiki"] = "none"
    """`miniwiki`: corpus, answers, graph and questions are made in WORKDIR/world."""
    entities: int = 880
    hops: int = 2
    """Longest chain of relations in the evaluation questions (1 to 4)."""
    held_out: float = 0.35
    """Share of answer entities that are never seeds: the evaluation questions' answers."""
    questions: int = 250
    """Evaluation questions made for each number of hops."""


@schema
class SeedsConfig:
    kind: Literal["answers"] = "answers"
    path: str = ""
    """Answers file (.jsonl or .jsonl.gz); empty: the world's own answers."""


@schema
class WarmStartConfig:
    """Supervised phase on scripted trajectories of other worlds, before self-play."""

    steps: int = 0
    worlds: int = 0
    """Training worlds; their seeds never meet the run's own world."""
    batch: int = 32
    """Demonstrations a step."""
    learning_rate: float = 3e-3
    copy_steps: int = 0
    """First steps on short tasks only (one search or none): a small model learns to copy there."""
    lazy_steps: int = 0
    """Last steps, in which the solver's demonstrations are partly lazy."""
    proposer_share: float = 0.2
    reader_share: float = 0.5
    """Shares of the demonstrations; the rest are solver trajectories."""
    lazy_one_hop: float = 0.5
    """Share of one-hop solver demonstrations that search with a single word of the name."""
    lazy_two_hop: float = 0.7
    """Share of two-hop solver demonstrations that stop after the first search."""
    observation_weight: float = 0.1
    """Loss weight of tool text, against 1 for the text the agent writes."""


@schema
class ModelConfig:
    preset: str = "qwen2.5-7b-instruct"
    """Shape of a random start; with `weights` their own config.json says it."""
    weights: str = ""
    """Hugging Face folder or GGUF file that the run starts from; empty: random parameters."""
    check_finite: bool = False
    """Refuse weights with a NaN or an infinity among them."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Activations, cache and the islands' copy; trained parameters are float32."""
    tokenizer: str = ""
    """Folder or tokenizer.json; empty: with the weights, or trained on the world."""
    vocab_size: int = 0
    """Entries of a tokenizer trained on the world (a multiple of 128); 0 where one is given."""
    lora_rank: int = 0
    prompts: Literal["ssp", "tiny"] = "ssp"
    """Set of prompt texts and message layout (`rollout/prompts`)."""
    attention: Literal["portable"] = "portable"
    attention_block: int = 512
    """Keys (and queries) of one step of the blockwise softmax."""
    remat: bool = True
    """Recompute each layer's activations in the backward pass."""
    logprob_chunk: int = 1024
    """Tokens whose logits exist at one time."""


@schema
class RetrievalConfig:
    corpus: str = ""
    """Passages (.jsonl or .jsonl.gz); empty: the world's own."""
    index: str = ""
    """Folder made by `python -m retrieval_index.build`; empty: exact search, built at start."""
    url: str = ""
    """Servers that search instead (`sspjax.retrieval.server`, or one that speaks as Search-R1's),
    comma separated. Several are shards of one corpus in its order, and their results are merged."""
    batch: int = 64
    """Queries of a request to a server."""
    timeout: float = 30.0
    """Seconds a server has for one try."""
    retries: int = 16
    """Further tries, some two minutes; after the last one a trajectory is left out of the loss."""
    deadline: float = 180.0
    """Seconds that all tries of a round may take together."""
    record: str = ""
    """File that is given every query and its result."""
    replay: str = ""
    """Such a file, which answers instead of any index or server."""
    topk: int = 3
    encoder: str = "e5"
    document_tokens: int = 256
    """A passage longer than this is cut before it is shown."""


@schema
class JudgeConfig:
    kind: Literal["exact", "llm"] = "exact"
    """`llm`: what is not literally an accepted answer is put to a language model."""
    url: str = ""
    """OpenAI-compatible service, up to and without /chat/completions: http://HOST:PORT/v1."""
    model: str = ""
    api_key_variable: str = ""
    """Environment variable that holds the service's key; empty: none is sent."""
    temperature: float = 0.0
    max_tokens: int = 16
    """Of a verdict."""
    concurrency: int = 32
    """Requests in flight, from each process."""
    timeout: float = 30.0
    """Seconds of one try."""
    tries: int = 6
    """Of a request, when the service is busy, silent or broken."""
    backoff: float = 1.0
    """Seconds before the second try, doubled for each further one up to 30."""
    audit_every: int = 20
    """Steps between comparisons of the model with exact match on a fixed set (0: never)."""
    audit_floor: float = 0.9
    """Share of agreement under which an alarm is logged."""
    max_failures: float = 0.05
    """Share of rollouts that may stay unscored in a step before the run stops."""


@schema
class CheckpointConfig:
    every: int = 5
    keep: int = 3


@schema
class EvalConfig:
    every: int = 5
    """Steps between evaluations in training (0: never)."""
    benchmarks: tuple[str, ...] = ()
    """Question files; empty: the world's own, one benchmark for each number of hops."""
    questions: int = 500
    samples: int = 1
    mode: Literal["agent", "rag", "closed_book"] = "agent"
    temperature: float = 0.0


@schema
class FiltersConfig:
    min_chars: int = 10
    max_chars: int = 1000
    min_words: int = 10
    repeated_searches: Literal["reject", "allow"] = "allow"
    searched_answer: Literal["reject", "allow"] = "allow"
    """A query that contains the answer."""


@schema
class RoleConfig:
    """What both roles have."""

    policy: str = "policy"
    group_size: int = 1
    estimator: Literal["raw", "batch_mean", "group_mean", "rloo", "remax", "reinforce_pp"] = "raw"
    std: Literal["none", "sample", "population"] = "none"
    """Scale advantages by the deviation of the rewards that the baseline is the mean of."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "seq-mean-token-mean"
    role_weight: float = 1.0
    """Factor of this role's loss; 0 freezes the role."""
    tools: tuple[Literal["search"], ...] = ("search",)
    max_turns: int = 10
    """Generations: 10 generations are at most 9 executed searches."""
    min_searches: int = 0
    prompt_tokens: int = 4096
    response_tokens: int = 8192
    """Response budget, observations included."""
    turn_tokens: int = 8192
    observation_tokens: int = 2048
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@schema
class ProposerConfig(RoleConfig):
    rewards: tuple[
        Literal["one_minus_p", "half", "modal", "bell", "few_right", "format_only"], ...
    ] = ("one_minus_p",)
    bell_left: float = 0.0
    bell_right: float = 1.0
    bell_ends: float = 0.0
    """`bell` pays 4 (left + p) (right - p), but `bell_ends` where all or none of a group is right.
    """
    invalid: float | Literal["exclude"] = 0.0
    """Reward of a rejected question; `exclude` leaves it out of statistics and loss."""
    min_searches: int = 1


@schema
class SolverConfig(RoleConfig):
    group_size: int = 5
    estimator: Literal["raw", "batch_mean", "group_mean", "rloo", "remax", "reinforce_pp"] = (
        "group_mean"
    )
    rewards: tuple[Literal["correct"], ...] = ("correct",)


@schema
class VerifyConfig:
    reader: Literal["solver", "judge", "none"] = "solver"
    """Who reads: the solver's policy (paper), or the judge's model (its code)."""
    noise: int = 4
    noise_unit: Literal["passage", "blob"] = "passage"
    """One noise unit: a passage, or all that another proposer was shown."""
    samples: int = 1
    """Readings under different noise; all must be right."""
    counterfactual: bool = False
    """Also require that the noise alone does not give the answer."""
    grounded: bool = False
    """The question must name, verbatim, the title of a passage that its proposer was shown."""
    fluency_quantile: float = 0.0
    """Reject a question whose least likely token the frozen start model finds less likely than this
    quantile of the warm start's own demonstrations (0: off)."""
    consensus: bool = False
    """After the solvers: reject a question that nobody solved and to which half of those that
    searched, two at least, give one other answer."""
    prompt_tokens: int = 4096
    """Budget of the reader's prompt: noise goes first, own evidence is never cut."""
    answer_tokens: int = 70
    temperature: float = 0.1


@schema
class ShortfallConfig:
    """What fills the places of rejected questions."""

    strategy: Literal["replay", "resample", "dummy", "drop"] = "replay"
    """Earlier questions, new tries with the next seeds, a question with no answer, or nothing."""
    clear_every: int = 10
    """Steps between resets of the replay pool (0: never, which is full reuse)."""
    first_clear: int = 0
    """Step of the first reset (0: the same number)."""
    keep: float = 0.0
    """Share of the newest questions that survives a reset."""
    max_success: float = 1.0
    """Only questions solved at most this often are reused."""
    duplicates: bool = False
    """Store a question again whenever it is played, and let one fill several places (SSP's code).
    """
    max_attempts: int = 6
    """Tries at a step's questions, the first included (`resample`)."""


@schema
class MinibatchConfig:
    proposer: int = 1
    solver: int = 2


@schema
class LearnerConfig:
    loss: Literal["clipped", "gspo", "cispo"] = "clipped"
    order: Literal["solver_first", "proposer_first", "joint"] = "solver_first"
    old_logprobs: Literal["behaviour", "step_start", "role_start"] = "role_start"
    """Whose log-probabilities ratios are taken against: the sampler's own, or the trainer's."""
    minibatches: MinibatchConfig = dataclasses.field(default_factory=MinibatchConfig)
    epochs: int = 1
    """Times a role's minibatches are gone through before the next role's."""
    mini_epochs: int = 1
    """Times the solvers play a step's questions, with an update of both roles after each."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    """Bound of the ratio where the advantage is negative (loss `clipped`)."""
    kl: float = 0.01
    """Coefficient of the divergence from the start in the loss."""
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimate of it; with a plus its gradient is that of k2."""
    kl_reward: float = 0.0
    """Coefficient of the divergence in the reward: k1, summed over a trajectory's tokens."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    importance: Literal["none", "token", "sequence"] = "none"
    """Weigh by trainer over sampler probability: of a token, or of its whole trajectory."""
    importance_cap: float = 2.0
    rejection: Literal["none", "token", "sequence"] = "none"
    """Leave out what sampler and trainer disagree on: tokens, or trajectories by their mean."""
    rejection_low: float = 0.5
    rejection_high: float = 2.0
    """Ratios of trainer to sampler probability that are kept."""
    optimizer: Literal["adamw"] = "adamw"
    learning_rate: float = 1e-6
    b1: float = 0.9
    b2: float = 0.999
    warmup: int = 5
    """Units over which the learning rate rises linearly from 0; then it is constant."""
    warmup_unit: Literal["step", "call"] = "step"
    """A step of self-play, counted from 1, or the update of one role in it, counted from 0."""
    proposer_warmup: int = 0
    """First steps in which only the proposer is updated."""
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    row_tokens: int = 12288
    """Length L of a packed row; at least a whole trajectory of either role."""
    micro_rows: int = 0
    """Rows of a micro-batch on each device of the batch axes (0: one)."""


@schema
class RolloutConfig:
    slots: int = 256
    """Rollouts in flight on one island."""
    chunk: int = 512
    """Tokens of one prefill or extension call, for each of its rows."""
    extend_rows: int = 0
    """Rows of one prefill or extension call (0: a quarter of the slots)."""
    return_when: float = 0.25
    """Decoding returns to the host when this share of the sampling slots waits."""
    decode_tokens: int = 256
    """Tokens after which it returns in any case."""
    deterministic: bool | None = None
    """Collect tool results in fixed rounds; None: on CPU yes, elsewhere no."""


@schema
class MeshConfig:
    """Global mesh of the update; one axis may be -1 (all devices that are left)."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    island_tensor: int = 0
    """Devices of an island that share one copy (0: the largest divisor that fits the kv heads)."""


@schema
class RunConfig:
    seed: int = 0
    steps: int = 200
    batch: int = 256
    """Seeds a step."""
    save_trajectories: int = 1
    """Steps between trajectory files (0: never)."""
    world: WorldConfig = dataclasses.field(default_factory=WorldConfig)
    seeds: SeedsConfig = dataclasses.field(default_factory=SeedsConfig)
    warm_start: WarmStartConfig = dataclasses.field(default_factory=WarmStartConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    retrieval: RetrievalConfig = dataclasses.field(default_factory=RetrievalConfig)
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    filters: FiltersConfig = dataclasses.field(default_factory=FiltersConfig)
    proposer: ProposerConfig = dataclasses.field(default_factory=ProposerConfig)
    solver: SolverConfig = dataclasses.field(default_factory=SolverConfig)
    verify: VerifyConfig = dataclasses.field(default_factory=VerifyConfig)
    shortfall: ShortfallConfig = dataclasses.field(default_factory=ShortfallConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)


def default() -> ConfigDict:
    """The schema's defaults as a locked ConfigDict, for config files to override.

    It takes any value: types are the schema's, and `freeze` checks them.
    """
    return ConfigDict(to_dict(RunConfig()), type_safe=False).lock()


def to_dict(config: Any) -> dict[str, Any]:
    """A frozen config as plain nested dicts, JSON-able."""
    return dataclasses.asdict(config)


def config_hash(config: RunConfig) -> str:
    """16 hex digits that change with any field."""
    text = json.dumps(to_dict(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def freeze(config: Mapping[str, Any] | ConfigDict) -> RunConfig:
    """Checks types, choices and combinations; raises ConfigError with a one-line message."""
    frozen = _freeze(RunConfig, dict(config), "")
    _cross_check(frozen)
    return frozen


def check_types(config: Mapping[str, Any] | ConfigDict) -> None:
    """Checks names, types and choices, not combinations: overrides may still complete those."""
    _freeze(RunConfig, dict(config), "")


def override(config: ConfigDict, key: str, text: str) -> None:
    """Sets `key` (dotted) of a ConfigDict from command-line text, by the schema's type."""
    *groups, leaf = key.split(".")
    node: Any = config
    kind: Any = RunConfig
    for group in groups:
        _known(kind, group, key, text)
        kind = _hints(kind)[group]
        if not dataclasses.is_dataclass(kind):
            raise ConfigError(f"config.{key}={text}: {group} is a value, not a group")
        node = node[group]
    _known(kind, leaf, key, text)
    hint = _hints(kind)[leaf]
    if dataclasses.is_dataclass(hint):
        names = ", ".join(f.name for f in dataclasses.fields(hint))
        raise ConfigError(f"config.{key}={text}: this is a group, not a value; it has {names}")
    node[leaf] = _parse(hint, text, key)


def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _known(kind: Any, name: str, key: str, value: object) -> None:
    names = [f.name for f in dataclasses.fields(kind)]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"config.{key}={value}: unknown key{hint}; known here: {', '.join(names)}"
        )


def _freeze(kind: Any, values: dict[str, Any], prefix: str) -> Any:
    hints = _hints(kind)
    for name, value in values.items():
        _known(kind, name, prefix + name, value)
    fields = {}
    for name, value in values.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping | ConfigDict):
                raise ConfigError(f"config.{prefix}{name}={value!r}: this is a group, not a value")
            fields[name] = _freeze(hint, dict(value), f"{prefix}{name}.")
        else:
            fields[name] = _checked(hint, value, prefix + name)
    return kind(**fields)


def _checked(hint: Any, value: Any, key: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value not in typing.get_args(hint):
            choices = ", ".join(map(str, typing.get_args(hint)))
            raise ConfigError(f"config.{key}={value!r}: expected one of {choices}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, tuple | list):
            raise ConfigError(f"config.{key}={value!r}: expected a tuple of strings")
        return tuple(_checked(typing.get_args(hint)[0], v, key) for v in value)
    if origin in UNIONS:
        first, other = typing.get_args(hint)
        if value in _words(other):
            return value
        if isinstance(value, str):
            raise _neither(first, other, value, key)
        return _checked(first, value, key)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(
            f"config.{key}={value!r}: expected {hint.__name__}, got {type(value).__name__}"
        )
    return value


UNIONS = (types.UnionType, typing.Union)
"""Origins of `float | None` and, since Literal is no type, of `float | Literal["exclude"]`."""


def _neither(first: Any, other: Any, value: object, key: str) -> ConfigError:
    choices = " or ".join(map(str, (first.__name__, *_words(other))))
    return ConfigError(f"config.{key}={value}: expected {choices}")


def _words(hint: Any) -> tuple[Any, ...]:
    """What may stand in the place of a number: None, or the choices of a Literal."""
    return (None,) if hint is type(None) else typing.get_args(hint)


def _parse(hint: Any, text: str, key: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        return tuple(part for part in text.strip("()").split(",") if part)
    if origin in UNIONS:
        first, other = typing.get_args(hint)
        for word in _words(other):
            if text.lower() == str(word).lower():
                return word
        try:
            return _parse(first, text, key)
        except ConfigError:
            raise _neither(first, other, text, key) from None
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"config.{key}={text}: expected true or false")
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ConfigError(f"config.{key}={text}: expected {hint.__name__}") from None
    return _checked(hint, text, key) if origin is Literal else text


LEAST: Mapping[str, float] = {
    "steps": 0,
    "batch": 1,
    "save_trajectories": 0,
    "world.questions": 1,
    "warm_start.steps": 0,
    "warm_start.worlds": 0,
    "warm_start.batch": 1,
    "warm_start.learning_rate": 0,
    "warm_start.copy_steps": 0,
    "warm_start.lazy_steps": 0,
    "warm_start.observation_weight": 0,
    "model.vocab_size": 0,
    "model.attention_block": 1,
    "model.logprob_chunk": 1,
    "retrieval.batch": 1,
    "retrieval.retries": 0,
    "retrieval.timeout": 0.001,
    "retrieval.deadline": 0.001,
    "retrieval.topk": 1,
    "retrieval.document_tokens": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "eval.every": 0,
    "eval.questions": 1,
    "eval.samples": 1,
    "eval.temperature": 0,
    **{
        f"{role}.{name}": low
        for role in ("proposer", "solver")
        for name, low in (
            ("group_size", 1),
            ("role_weight", 0),
            ("max_turns", 1),
            ("min_searches", 0),
            ("prompt_tokens", 1),
            ("response_tokens", 1),
            ("turn_tokens", 1),
            ("observation_tokens", 1),
            ("temperature", 0),
            ("top_k", 0),
        )
    },
    "judge.temperature": 0,
    "judge.max_tokens": 1,
    "judge.concurrency": 1,
    "judge.timeout": 0.001,
    "judge.tries": 1,
    "judge.backoff": 0,
    "judge.audit_every": 0,
    "verify.samples": 1,
    "verify.noise": 0,
    "verify.prompt_tokens": 1,
    "verify.answer_tokens": 1,
    "verify.temperature": 0,
    "shortfall.clear_every": 0,
    "shortfall.first_clear": 0,
    "shortfall.max_attempts": 1,
    "learner.minibatches.proposer": 1,
    "learner.minibatches.solver": 1,
    "learner.epochs": 1,
    "learner.mini_epochs": 1,
    "learner.kl_reward": 0,
    "learner.importance_cap": 1,
    "learner.rejection_high": 1,
    "learner.proposer_warmup": 0,
    "learner.clip_low": 0,
    "learner.clip_high": 0,
    "learner.kl": 0,
    "learner.learning_rate": 0,
    "learner.warmup": 0,
    "learner.weight_decay": 0,
    "learner.grad_clip": 0,
    "learner.micro_rows": 0,
    "rollout.slots": 1,
    "rollout.chunk": 1,
    "rollout.extend_rows": 0,
    "rollout.decode_tokens": 1,
    "mesh.island_tensor": 0,
}
"""Lowest value of a number (NaN is below all)."""

SHARES = (
    "warm_start.proposer_share",
    "warm_start.reader_share",
    "warm_start.lazy_one_hop",
    "warm_start.lazy_two_hop",
    "judge.audit_floor",
    "judge.max_failures",
    "proposer.top_p",
    "solver.top_p",
    "verify.fluency_quantile",
    "shortfall.keep",
    "shortfall.max_success",
    "learner.b1",
    "learner.b2",
    "learner.rejection_low",
)
"""Numbers in 0..1."""


GROUPED = ("group_mean", "rloo")
"""Estimators that compare the rollouts of a group."""

UNSCALED = ("raw", "rloo", "remax")
"""Estimators whose baseline is no mean of the rewards it is taken from."""


def cautions(c: RunConfig) -> tuple[str, ...]:
    """What can run but is known to go wrong, one line each, for the log at the start."""
    found = []
    p = c.proposer
    negative = p.invalid != "exclude" and p.invalid < 0
    if negative and p.estimator not in GROUPED and p.role_weight > 0:
        found.append(
            f"config.proposer.invalid={p.invalid}: a negative reward with estimator={p.estimator} "
            "pushes invalid questions away without saying where to; in SSP -0.1 made entropy rise "
            "and valid questions vanish. Use 0 or exclude"
        )
    return tuple(found)


def urls(text: str) -> tuple[str, ...]:
    """The URLs of `retrieval.url`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _by_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value under its dotted key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _by_key(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _cross_check(c: RunConfig) -> None:
    """Combinations that cannot work, cheapest first."""

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    values = _by_key(to_dict(c))
    for key, low in LEAST.items():
        need(values[key] >= low, f"config.{key}={values[key]}: must be at least {low}")
    for key, high in MOST.items():
        need(values[key] <= high, f"config.{key}={values[key]}: must be at most {high}")
    for key in SHARES:
        need(0 <= values[key] <= 1, f"config.{key}={values[key]}: must be in 0..1")
    for name, role in (("proposer", c.proposer), ("solver", c.solver)):
        need(bool(role.rewards), f"config.{name}.rewards=(): nothing would be paid; name a term")
        need(
            role.min_searches == 0 or "search" in role.tools,
            f"config.{name}.min_searches={role.min_searches}: there is no search among "
            f"{name}.tools={role.tools}; add it or use min_searches=0",
        )
        need(
            role.min_searches < role.max_turns,
            f"config.{name}.min_searches={role.min_searches}: {role.max_turns} generations execute "
            f"at most {role.max_turns - 1} searches; raise {name}.max_turns",
        )
        need(
            role.role_weight == 0 or role.temperature > 0,
            f"config.{name}.temperature=0: a greedy role has no log-probability to train on",
        )
        need(
            role.role_weight == 0 or (role.top_k == 0 and role.top_p == 1.0),
            f"config.{name}.top_k={role.top_k}, top_p={role.top_p}: training on truncated samples "
            "needs importance correction, which is off; use top_k=0, top_p=1",
        )
        need(
            role.estimator not in GROUPED or role.group_size > 1,
            f"config.{name}.estimator={role.estimator}: with group_size=1 every advantage is 0; "
            "use raw or batch_mean, or a larger group",
        )
        need(
            role.std == "none" or role.estimator != "group_mean" or role.group_size > 1,
            f"config.{name}.std={role.std}: a group of one has no standard deviation; use none",
        )
        need(
            role.std == "none" or role.estimator not in UNSCALED,
            f"config.{name}.std={role.std}: estimator={role.estimator} has no baseline to scale "
            "around; use std=none or another estimator",
        )
        longest = role.prompt_tokens + role.response_tokens
        need(
            longest <= c.learner.row_tokens,
            f"config.learner.row_tokens={c.learner.row_tokens}: a {name} trajectory may hold "
            f"{longest} tokens (prompt_tokens + response_tokens) and never spans rows",
        )
    need(
        c.shortfall.strategy != "resample" or c.proposer.group_size == 1,
        f"config.shortfall.strategy=resample: with proposer.group_size={c.proposer.group_size} a "
        "new try would break up a group; use replay, or group_size=1",
    )
    need(
        c.proposer.estimator != "remax",
        "config.proposer.estimator=remax: a greedy question has no reward before solvers play it; "
        "use rloo or group_mean with a larger group",
    )
    need(
        "few_right" not in c.proposer.rewards or c.solver.group_size > 1,
        "config.proposer.rewards=few_right: pays by the share of the other solvers; needs "
        f"solver.group_size above 1, got {c.solver.group_size}",
    )
    need(
        c.proposer.role_weight > 0 or c.solver.role_weight > 0,
        "config.proposer.role_weight=0 and solver.role_weight=0: nothing is trained",
    )
    need(
        c.proposer.policy == c.solver.policy or c.learner.order != "joint",
        "config.learner.order=joint: needs one policy; "
        f"proposer.policy={c.proposer.policy}, solver.policy={c.solver.policy}",
    )
    need(
        c.learner.dual_clip > 1,
        f"config.learner.dual_clip={c.learner.dual_clip}: must be above 1, the ratio on policy",
    )
    for name, chosen in (
        ("importance", c.learner.importance),
        ("rejection", c.learner.rejection),
    ):
        need(
            chosen == "none" or c.learner.old_logprobs != "behaviour",
            f"config.learner.{name}={chosen}: with old_logprobs=behaviour sampler and trainer are "
            "not compared; use old_logprobs=step_start or role_start",
        )
    need(1 <= c.world.hops <= 4, f"config.world.hops={c.world.hops}: must be in 1..4")
    need(
        0 < c.world.held_out < 1, f"config.world.held_out={c.world.held_out}: must be within (0, 1)"
    )
    need(
        0 < c.rollout.return_when <= 1,
        f"config.rollout.return_when={c.rollout.return_when}: must be within (0, 1]",
    )
    axes = (c.mesh.data, c.mesh.fsdp, c.mesh.tensor)
    need(
        sum(a == -1 for a in axes) <= 1 and all(a == -1 or a >= 1 for a in axes),
        f"config.mesh: data, fsdp, tensor = {axes}: each at least 1, one of them may be -1",
    )
    _check_judge(c)
    need(
        c.model.vocab_size % 128 == 0,
        f"config.model.vocab_size={c.model.vocab_size}: must be a multiple of 128",
    )
    need(
        c.model.lora_rank == 0,
        f"config.model.lora_rank={c.model.lora_rank}: adapters are not supported yet; use 0",
    )
    need(
        not (c.model.weights and c.model.vocab_size),
        f"config.model.vocab_size={c.model.vocab_size}: the embeddings of model.weights belong to "
        "their own tokenizer; use 0",
    )
    own = c.retrieval
    for url in urls(own.url):
        need(
            bool(re.fullmatch(r"https?://[^\s/]+(/\S*)?", url)),
            f"config.retrieval.url={own.url}: expected http://HOST:PORT, several with commas "
            f"between them, got {url!r}",
        )
    need(
        not (own.url and own.index),
        f"config.retrieval.url={own.url}: a server brings its own index; leave retrieval.index "
        "empty, or the url",
    )
    need(
        not (own.record and own.replay),
        f"config.retrieval.record={own.record}: what is replayed is on record already; leave it "
        "empty, or retrieval.replay",
    )
    need(
        own.deadline >= own.timeout,
        f"config.retrieval.deadline={own.deadline}: must be at least one try, "
        f"retrieval.timeout={own.timeout}",
    )
    if c.warm_start.steps:
        need(
            c.world.kind == "miniwiki",
            f"config.warm_start.steps={c.warm_start.steps}: demonstrations come from "
            "mini-encyclopaedias; set world.kind=miniwiki or warm_start.steps=0",
        )
        need(c.warm_start.worlds >= 1, "config.warm_start.worlds=0: a warm start needs worlds")
        shares = c.warm_start.proposer_share + c.warm_start.reader_share
        need(
            shares <= 1,
            f"config.warm_start: proposer_share and reader_share add up to {shares}, which leaves "
            "no room for the solver; at most 1 together",
        )
    need(
        c.verify.fluency_quantile == 0 or c.warm_start.steps > 0,
        f"config.verify.fluency_quantile={c.verify.fluency_quantile}: its threshold comes from the "
        "warm start's demonstrations; set warm_start.steps, or 0 to do without",
    )
    need(
        c.world.kind == "miniwiki" or bool(c.seeds.path),
        "config.seeds.path='': an answers file is needed where world.kind=none",
    )
    need(
        c.world.kind == "miniwiki" or bool(own.corpus or own.url or own.replay),
        "config.retrieval.corpus='': passages are needed where world.kind=none; or a retrieval.url",
    )
    need(
        c.world.kind == "miniwiki" or bool(own.corpus or c.model.tokenizer or c.model.weights),
        "config.model.tokenizer='': without retrieval.corpus there is no text to train one on; "
        "name one",
    )


MOST: Mapping[str, float] = {
    "judge.concurrency": 1024,
    "judge.timeout": 3600,
    "judge.tries": 20,
    "judge.backoff": 30,
}
"""Highest value of a number that only a slip makes larger."""


def _check_judge(c: RunConfig) -> None:
    """The service behind judge and reader; what may be a secret is not repeated."""
    judge = c.judge
    wanted = [
        name
        for name, chosen in (
            ("judge.kind=llm", judge.kind == "llm"),
            ("verify.reader=judge", c.verify.reader == "judge"),
        )
        if chosen
    ]
    if not wanted:
        return
    for key, value in (("url", judge.url), ("model", judge.model)):
        if not value:
            raise ConfigError(f"config.judge.{key}='': {' and '.join(wanted)} needs it")
    if "@" in judge.url or "?" in judge.url:
        raise ConfigError(
            "config.judge.url: holds a name, a key or a query; put the key into an environment "
            "variable and its name into judge.api_key_variable"
        )
    try:
        address = urllib.parse.urlsplit(judge.url)
        complete = address.scheme in ("http", "https") and bool(address.hostname)
        complete &= address.port != 0 and judge.url.isascii() and judge.url.isprintable()
    except ValueError:
        complete = False
    if not complete:
        raise ConfigError(f"config.judge.url={judge.url}: expected http://HOST:PORT/v1, or https")
    if not re.fullmatch("([A-Z_][A-Z0-9_]*)?", judge.api_key_variable):
        raise ConfigError(
            "config.judge.api_key_variable: expected the name of an environment variable, in "
            "capitals, got something else (not shown, it may be the key itself)"
        )
