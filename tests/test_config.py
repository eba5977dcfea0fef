"""The schema's own rules: every number has a range, and what cannot run is refused by name."""

import typing

import pytest
from ml_collections import ConfigDict

from sspjax.config import (
    LEAST,
    SHARES,
    ConfigError,
    ProposerConfig,
    SolverConfig,
    default,
    freeze,
    override,
)
from sspjax.self_play.rewards import PROPOSER_TERMS, SOLVER_TERMS
from sspjax.tools.kit import TOOLS

ELSEWHERE = {
    # Any whole number is a seed; a world says itself how many entities it needs.
    "seed", "world.entities",
    # Checked by a rule of their own.
    "world.hops", "world.held_out", "learner.dual_clip", "learner.row_tokens", "model.lora_rank",
    "rollout.return_when", "mesh.data", "mesh.fsdp", "mesh.tensor",
    # Any value means something: a bound that nothing reaches, a bonus or a malus.
    "filters.min_chars", "filters.max_chars", "filters.min_words", "learner.entropy",
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
        (("solver.tools=dig",), "'dig': expected one of search"),
        (("proposer.tools=",), "proposer.min_searches=1: there is no search among"),
        (("model.weights=folder",), "model.weights=folder: loading weights is not supported yet"),
        (("retrieval.url=http://a",), "retrieval.url=http://a: searching over HTTP is not supp"),
        (("world.kind=none", "seeds.path=a", "retrieval.index=b"), "retrieval.corpus='': passages"),
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
