"""Every file in configs/ is a run: it loads, and freezes once it has the paths it needs."""

import ast
from pathlib import Path

import pytest

from sspjax.command_line import load_config
from sspjax.config import ConfigError, RunConfig, config_hash, to_dict

FOLDER = Path(__file__).parent.parent / "configs"
CONFIGS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}

NEEDS = {
    "tiny": (),
    "ssp": (("seeds.path", "answers.jsonl"), ("retrieval.corpus", "corpus.jsonl.gz")),
    "ssp_reference": (
        ("judge.url", "http://host:5000/v1"),
        ("seeds.path", "answers.jsonl"),
        ("retrieval.corpus", "corpus.jsonl.gz"),
    ),
}
"""What a user must bring, in the order in which it is asked for."""


def test_every_config_is_tested():
    assert set(CONFIGS) == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_it_freezes_with_the_paths_it_needs(name):
    config = load_config(str(CONFIGS[name]), NEEDS[name])
    assert isinstance(config, RunConfig)


@pytest.mark.parametrize("name", NEEDS)
def test_it_asks_for_each_path_by_name(name):
    for i, (key, _) in enumerate(NEEDS[name]):
        # The group is enough.
        with pytest.raises(ConfigError, match=f"config.{key.split('.')[0]}"):
            load_config(str(CONFIGS[name]), NEEDS[name][:i])


@pytest.mark.parametrize("name", NEEDS)
def test_its_docstring_has_the_command(name):
    text = ast.get_docstring(ast.parse(CONFIGS[name].read_text()))
    assert f"python -m sspjax.train --config=configs/{name}.py --workdir=" in text


def test_ssp_is_the_schemas_defaults_and_those_are_the_papers():
    """arXiv:2510.18821, table 4, algorithm 1, equations 4 and 5."""
    c = load_config(str(CONFIGS["ssp"]), NEEDS["ssp"])
    assert config_hash(c) == config_hash(
        RunConfig(
            seeds=type(c.seeds)(path="answers.jsonl"),
            retrieval=type(c.retrieval)(corpus="corpus.jsonl.gz"),
        )
    )
    assert (c.batch, c.proposer.group_size, c.solver.group_size) == (256, 1, 5)
    assert (c.proposer.estimator, c.solver.estimator) == ("raw", "group_mean")
    assert (c.proposer.std, c.solver.std) == ("none", "none")
    assert (c.proposer.role_weight, c.solver.role_weight) == (1.0, 1.0)
    assert c.learner.order == "solver_first"
    assert (c.learner.minibatches.proposer, c.learner.minibatches.solver) == (1, 2)
    assert (c.learner.kl, c.learner.learning_rate, c.learner.warmup) == (0.01, 1e-6, 5)
    for role in (c.proposer, c.solver):
        assert (role.prompt_tokens, role.response_tokens, role.max_turns) == (4096, 8192, 10)
        assert role.temperature == 1.0
    assert (c.verify.reader, c.verify.noise, c.eval.temperature) == ("solver", 4, 0.0)
    assert (c.shortfall.strategy, c.shortfall.clear_every, c.shortfall.keep) == ("replay", 10, 0.0)
    assert (c.retrieval.encoder, c.retrieval.topk) == ("e5", 3)


def test_ssp_reference_is_what_the_code_does_otherwise():
    """Its launch script, and the defaults under it; every difference from the paper, no more."""
    paper, code = (
        _by_key(to_dict(load_config(str(CONFIGS[n]), NEEDS[n]))) for n in ("ssp", "ssp_reference")
    )
    assert {key: value for key, value in code.items() if value != paper[key]} == {
        "learner.order": "proposer_first",
        "learner.warmup_unit": "call",
        "learner.clip_high": 0.285,
        "proposer.role_weight": 256 / 640,
        "proposer.min_searches": 2,
        "solver.std": "sample",
        "filters.repeated_searches": "reject",
        "judge.kind": "llm",
        "judge.url": "http://host:5000/v1",
        "judge.model": "Qwen/Qwen2.5-32B-Instruct",
        "judge.temperature": 0.1,
        "judge.max_tokens": 10,
        "verify.reader": "judge",
        "verify.noise_unit": "blob",
        "verify.prompt_tokens": 12160,
        "shortfall.first_clear": 9,
        "shortfall.duplicates": True,
    }
    assert (code["shortfall.clear_every"], code["shortfall.keep"]) == (10, 0.0)
    assert (code["learner.kl"], code["learner.kl_kind"], code["learner.dual_clip"]) == (
        0.01, "k3", 3.0,
    )  # fmt: skip
    assert code["proposer.invalid"] == 0.0


def _by_key(values, prefix=""):
    flat = {}
    for name, value in values.items():
        flat |= (
            _by_key(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat
