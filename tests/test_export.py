"""A run's policy as a model folder, and back: evaluated, trained from, and read by transformers."""

import dataclasses
import importlib.util
import json
import shutil

import jax
import numpy as np
import pytest
from miniature import Miniature, config

from sspjax import evaluate, export, train
from sspjax.command_line import UserError
from sspjax.config import ConfigError, freeze, to_dict
from sspjax.models.hugging_face import verify
from sspjax.rollout.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def exported(taught, tmp_path_factory):
    """The miniature after its warm start, in float32 as it played."""
    out = tmp_path_factory.mktemp("exported") / "agent"
    export.main([f"--workdir={taught.workdir}", f"--out={out}"])
    return out


def parameters(taught, step=0):
    state, _ = taught.saved({}, step)
    mark = ".policies['policy'].params"
    return {p.removeprefix(mark).strip("[']"): x for p, x in state.items() if p.startswith(mark)}


def from_weights(taught, folder, **settings):
    return taught.settings({"model.weights": folder, "model.vocab_size": 0,
                            "warm_start.steps": 0, **settings})  # fmt: skip


# The folder ---------------------------------------------------------------------------------------


def test_a_folder_holds_all_that_loads_it(taught, exported):
    assert sorted(path.name for path in exported.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in exported.parent.iterdir()] == ["agent"]
    own = load_tokenizer(taught.workdir / "tokenizer")
    assert load_tokenizer(exported).content_hash == own.content_hash
    written = json.loads((exported / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForCausalLM"]
    assert written["torch_dtype"] == "float32"
    assert written["eos_token_id"] == list(own.end_ids)
    ends = json.loads((exported / "generation_config.json").read_text())
    assert ends == {"eos_token_id": list(own.end_ids), "pad_token_id": own.pad_id}


def test_the_card_says_what_it_was_made_from(taught, exported):
    card = (exported / "README.md").read_text()
    record = json.loads((taught.workdir / "config.json").read_text())
    assert card.startswith("---\nlibrary_name: transformers\n")
    for words in (
        "none: random parameters of the shape `tiny`",
        "made-up encyclopaedia of 40 entities, seed 0",
        record["content"]["corpus"],
        "answers.jsonl",
        record["config_hash"],
        "self-play | 0 steps, policy `policy`",
    ):
        assert words in card
    assert str(taught.workdir.parent) not in card


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/x/models--Qwen--Qwen2.5-7B/snapshots/0a1b", "Qwen/Qwen2.5-7B"),
        ("/x/smollm2", "smollm2"),
    ],
)
def test_the_base_model_is_named_without_the_way_to_it(path, name):
    assert export.base_model(path) == name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out={out}"], "--out=.*: exists"),
        (["--out={out}2", "--policy=other"], "--policy=other: expected one of policy"),
        (["--out={out}2", "--step=9"], "checkpoint of step 9, kept are: 0"),
        (["--out={out}2", "--step=first"], "expected a number or last"),
    ],
)
def test_what_cannot_be_exported_is_told(taught, exported, flags, message):
    with pytest.raises(UserError, match=message):
        export.main([f"--workdir={taught.workdir}", *(f.format(out=exported) for f in flags)])


def test_verifying_needs_torch(monkeypatch, taught, tmp_path):
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--verify: expected torch.*sspjax\[parity\]"):
        export.main([f"--workdir={taught.workdir}", f"--out={tmp_path / 'x'}", "--verify"])
    assert not (tmp_path / "x").exists()


# Transformers -------------------------------------------------------------------------------------


def needs_torch():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install 'sspjax[parity]'")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_finds_the_same_logits(taught, tmp_path, capsys, dtype):
    needs_torch()
    out = tmp_path / "agent"
    export.main([f"--workdir={taught.workdir}", f"--out={out}", f"--dtype={dtype}", "--verify"])
    assert "same best token at 100.0%" in capsys.readouterr().err
    from transformers import AutoTokenizer

    text = "<search> the oldest lighthouse of 1893 </search>"
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs(text, add_special_tokens=False)["input_ids"] == load_tokenizer(out).encode(text)


def test_other_logits_are_refused_and_left_to_look_at(taught, tmp_path, monkeypatch):
    needs_torch()
    theirs = verify._theirs
    monkeypatch.setattr(verify, "_theirs", lambda *args: theirs(*args) * 1.01)
    with pytest.raises(UserError, match=r"--verify: logits of .* differ by"):
        export.main([f"--workdir={taught.workdir}", f"--out={tmp_path / 'x'}", "--verify"])
    assert [path.name for path in tmp_path.iterdir()] == [".x.unfinished"]


# Back again ---------------------------------------------------------------------------------------


def test_a_folder_answers_as_the_run_it_came_from(taught, exported, tmp_path):
    own, given = tmp_path / "own.json", tmp_path / "given.json"
    evaluate.main([f"--workdir={taught.workdir}", f"--out={own}"])
    evaluate.main([f"--workdir={taught.workdir}", f"--weights={exported}", f"--out={given}",
                   "--check-finite"])  # fmt: skip
    assert given.with_suffix(".jsonl").read_text() == own.with_suffix(".jsonl").read_text()
    assert json.loads(given.read_text())["checkpoint"] == str(exported)


def test_a_folder_alone_needs_passages_and_questions(exported, tmp_path):
    out = f"--out={tmp_path / 'x.json'}"
    with pytest.raises(UserError, match="--workdir: expected"):
        evaluate.main([f"--weights={exported}", out])
    with pytest.raises(UserError, match="of a run's own world.*--workdir too"):
        evaluate.main([f"--weights={exported}", "--config=configs/tiny.py", out])


def test_training_starts_from_the_weights(taught, exported, tmp_path):
    own = config(from_weights(taught, exported, **{"learner.kl": 0.01}))
    setup = train.build(own, tmp_path / "run")
    state = setup.trainer.start()
    reference = setup.trainer.reference(state)["policy"]
    expected = parameters(taught)
    assert state.policies["policy"].params.keys() == expected.keys()
    for name, x in expected.items():
        assert np.array_equal(state.policies["policy"].params[name], x), name
        assert np.array_equal(reference[name], x), name
    assert int(state.step) == 0
    assert not any(np.any(x) for x in jax.tree.leaves(state.policies["policy"].opt_state))


@pytest.mark.slow
def test_a_run_from_weights_goes_on_without_their_folder(taught, exported, tmp_path):
    folder = tmp_path / "weights"
    shutil.copytree(exported, folder)
    run = dataclasses.replace(taught, workdir=tmp_path / "run")
    assert isinstance(run, Miniature)
    settings = from_weights(taught, folder, **{"learner.kl": 0.01})
    run.train({**settings, "steps": 1})
    shutil.rmtree(folder)
    run.train({**settings, "steps": 2})
    assert [row["step"] for row in run.rows()] == [0, 1, 2]
    before, after = parameters(run, 0), parameters(run, 2)
    assert all(np.array_equal(before[n], x) for n, x in parameters(taught).items())
    assert any(not np.array_equal(before[n], after[n]) for n in before)


def test_a_vocabulary_larger_than_the_embedding_is_told(taught, exported, tmp_path):
    larger = train_tokenizer(["a few words of another text"], 768)
    larger.save(tmp_path / "tokenizer")
    settings = from_weights(taught, exported, **{"model.tokenizer": tmp_path / "tokenizer"})
    with pytest.raises(ConfigError, match=r"768 entries.*agent has 640.*embed_tokens.weight"):
        train.build(config(settings), tmp_path / "run")


def test_weights_keep_their_vocabulary(exported):
    given = to_dict(config({}))
    given["model"] |= {"weights": str(exported), "vocab_size": 640}
    with pytest.raises(ConfigError, match="config.model.vocab_size=640.*their own tokenizer"):
        freeze(given)
