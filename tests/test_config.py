"""The schema's own rules: every number has a range, and what cannot run is refused by name."""

import typing

import pytest
from ml_collections import ConfigDict

from sspjax.config import (
    LEAST,
    SHARES,
    ConfigError,
    LearnerConfig,
    ProposerConfig,
    ShortfallConfig,
    SolverConfig,
    VerifyConfig,
    cautions,
    default,
    freeze,
    override,
)
from sspjax.learner.advantages import ADVANTAGES
from sspjax.learner.loss import IMPORTANCE, KL_KINDS, LOSSES, REJECTION
from sspjax.learner.pack import AGGREGATIONS
from sspjax.self_play.board import SHORTFALL
from sspjax.self_play.rewards import PROPOSER_TERMS, SOLVER_TERMS
from sspjax.self_play.verify import NOISE_POOLS
from sspjax.tools.kit import TOOLS

ELSEWHERE = {
    # Any whole number is a seed; a world says itself how many entities it needs.
    "seed", "world.entities",
    # Checked by a rule of their own.
    "world.hops", "world.held_out", "learner.dual_clip", "learner.row_tokens", "model.lora_rank",
    "rollout.return_when", "mesh.data", "mesh.fsdp", "mesh.tensor",
    # Any value means something: a bound that nothing reaches, a bonus or a malus.
    "filters.min_chars", "filters.max_chars", "filters.min_words", "learner.entropy",
    "proposer.invalid", "proposer.bell_left", "proposer.bell_right", "proposer.bell_ends",
}  # fmt: skip


def keys(config, prefix=""):
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def frozen(*settings):
    config = default()
    config.world.kind = "miniwiki"
    for setting in settings:
        override(config, *setting.split("=", 1))
    return freeze(config)


def test_every_number_has_a_range():
    numbers = {key for key, value in keys(default()) if type(value) in (int, float)}
    assert numbers == {*LEAST, *SHARES, *ELSEWHERE}
    assert len(LEAST) + len(SHARES) + len(ELSEWHERE) == len(numbers)


@pytest.mark.parametrize("key", [*LEAST, *SHARES])
def test_numbers_out_of_range(key):
    value = LEAST.get(key, 0) - 1
    with pytest.raises(ConfigError, match=rf"^config.{key}={value}(\.0)?: must be "):
        frozen(f"{key}={value}")


@pytest.mark.parametrize("key", [*SHARES, "learner.learning_rate", "solver.temperature"])
def test_what_is_no_number_is_out_of_range(key):
    with pytest.raises(ConfigError, match=f"config.{key}=nan: must be "):
        frozen(f"{key}=nan")


@pytest.mark.parametrize("key", SHARES)
def test_a_share_is_at_most_one(key):
    with pytest.raises(ConfigError, match=f"config.{key}=1.5: must be in 0..1"):
        frozen(f"{key}=1.5")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("proposer.rewards=one_minus_q",), "'one_minus_q': expected one of one_minus_p, half"),
        (("solver.rewards=one_minus_p",), "'one_minus_p': expected one of correct"),
        (("solver.rewards=",), r"solver.rewards=\(\): nothing would be paid"),
        (("proposer.invalid=omit",), "proposer.invalid=.*omit.*: expected float or exclude"),
        (
            ("proposer.rewards=few_right", "solver.group_size=1", "solver.estimator=raw"),
            "few_right: pays by the share of the other solvers; needs solver.group_size above 1",
        ),
        (
            ("shortfall.strategy=resample", "proposer.group_size=2"),
            "resample: with proposer.group_size=2 a new try would break up a group",
        ),
        (("solver.tools=dig",), "'dig': expected one of search"),
        (("proposer.tools=",), "proposer.min_searches=1: there is no search among"),
        (("model.weights=folder", "model.vocab_size=640"), "model.vocab_size=640: the embeddings"),
        (("retrieval.url=host:80",), "retrieval.url=host:80: expected http://HOST:PORT.*'host:80'"),
        (("retrieval.url=http://a,b",), "several with commas between them, got 'b'"),
        (("retrieval.url=http://a", "retrieval.index=b"), "a server brings its own index"),
        (("retrieval.record=a", "retrieval.replay=a"), "what is replayed is on record already"),
        (("retrieval.timeout=0",), "retrieval.timeout=0.0: must be at least 0.001"),
        (
            ("retrieval.deadline=9", "retrieval.timeout=10"),
            "deadline=9.0: must be at least one",
        ),
        (("retrieval.retries=-1",), "retrieval.retries=-1: must be at least 0"),
        (("retrieval.batch=0",), "retrieval.batch=0: must be at least 1"),
        (
            ("world.kind=none", "seeds.path=a", "retrieval.url=http://a", "model.tokenizer="),
            "config.model.tokenizer='': without retrieval.corpus there is no text to train one on",
        ),
        (("world.kind=none", "seeds.path=a", "retrieval.index=b"), "retrieval.corpus='': passages"),
        (
            ("verify.fluency_quantile=0.05",),
            "verify.fluency_quantile=0.05: its threshold comes from the warm start's demonstr",
        ),
        (
            ("warm_start.steps=1", "warm_start.worlds=1", "warm_start.proposer_share=0.75"),
            "proposer_share and reader_share add up to 1.25",
        ),
    ],
    ids=lambda value: value[-1].partition("=")[0] if isinstance(value, tuple) else "",
)
def test_settings_that_cannot_run(settings, message):
    with pytest.raises(ConfigError, match=message):
        frozen(*settings)


def test_a_value_or_a_word():
    assert frozen("proposer.invalid=exclude").proposer.invalid == "exclude"
    assert frozen("proposer.invalid=-0.5").proposer.invalid == -0.5
    assert frozen().proposer.invalid == 0.0


def test_a_penalty_without_a_group_is_warned_of():
    """PAPER: -0.1 raises entropy and the valid rate collapses."""
    (caution,) = cautions(frozen("proposer.invalid=-0.1"))
    assert "config.proposer.invalid=-0.1: a negative reward with estimator=raw" in caution
    grouped = ("proposer.group_size=4", "proposer.estimator=group_mean")
    assert cautions(frozen("proposer.invalid=-0.1", *grouped)) == ()
    assert cautions(frozen("proposer.invalid=exclude")) == ()
    assert cautions(frozen()) == ()


@pytest.mark.parametrize(
    ("group", "field", "table"),
    [
        (ProposerConfig, "rewards", PROPOSER_TERMS),
        (SolverConfig, "rewards", SOLVER_TERMS),
        (ProposerConfig, "tools", TOOLS),
    ],
)
def test_names_that_can_be_chosen_are_those_there_are(group, field, table):
    (names, _) = typing.get_args(typing.get_type_hints(group)[field])
    assert set(typing.get_args(names)) == set(table)


@pytest.mark.parametrize(
    ("group", "field", "table"),
    [
        (ProposerConfig, "estimator", ADVANTAGES),
        (SolverConfig, "estimator", ADVANTAGES),
        (ProposerConfig, "aggregation", AGGREGATIONS),
        (LearnerConfig, "loss", LOSSES),
        (LearnerConfig, "kl_kind", KL_KINDS),
        (LearnerConfig, "importance", {"none", *IMPORTANCE}),
        (LearnerConfig, "rejection", {"none", *REJECTION}),
        (ShortfallConfig, "strategy", SHORTFALL),
        (VerifyConfig, "noise_unit", NOISE_POOLS),
    ],
)
def test_a_name_that_can_be_chosen_is_one_there_is(group, field, table):
    assert set(typing.get_args(typing.get_type_hints(group)[field])) == set(table)
