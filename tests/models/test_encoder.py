"""The BERT forward pass against float64 numpy, and folders that are not what they seem."""

import json
import math

import encoder_folders
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sspjax.config import ConfigError
from sspjax.models.encoder import EncoderConfig, encode, init_params
from sspjax.models.encoder_folder import (
    EncoderFolderError,
    encoder_config,
    load_params,
    max_tokens,
)

erf = np.vectorize(math.erf)


def plain_bert(tensors, ids: list[int], *, heads: int, layers: int, eps: float) -> np.ndarray:
    """Hidden states f64[tokens, width] of one text without padding, a head at a time."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}

    def norm(x, name):
        mean, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        return (x - mean) / np.sqrt(variance + eps) * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    x = t["embeddings.word_embeddings.weight"][ids]
    x = x + t["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + t["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(layers):
        name = f"encoder.layer.{layer}."
        q, k, v = (linear(x, f"{name}attention.self.{part}") for part in ("query", "key", "value"))
        size = x.shape[1] // heads
        mixed = np.zeros_like(x)
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            scores = q[:, own] @ k[:, own].T / math.sqrt(size)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed[:, own] = weights / weights.sum(1, keepdims=True) @ v[:, own]
        x = norm(
            x + linear(mixed, f"{name}attention.output.dense"), f"{name}attention.output.LayerNorm"
        )
        y = linear(x, f"{name}intermediate.dense")
        y = y * (1 + erf(y / math.sqrt(2))) / 2
        x = norm(x + linear(y, f"{name}output.dense"), f"{name}output.LayerNorm")
    return x


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


@pytest.mark.parametrize(("pooling", "prefix"), [("mean_tokens", ""), ("cls_token", "bert.")])
def test_vectors_are_those_of_a_plain_bert(tmp_path, pooling, prefix):
    tensors = encoder_folders.write(tmp_path, pooling=pooling, prefix=prefix)
    config = encoder_config(tmp_path)
    assert config.pooling == pooling.split("_")[0]
    rng = np.random.default_rng(3)
    texts = [rng.integers(4, 40, size).tolist() for size in (1, 5, 12, 17)]
    tokens = np.full((5, 17), 7, np.int32)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)] = ids
    length = np.array([1, 5, 12, 17, 1], np.int32)
    vectors = encode(load_params(tmp_path, config), tokens, length, config=config)
    assert vectors.dtype == np.float32 and vectors.shape == (5, 24)
    for row, ids in enumerate(texts):
        hidden = plain_bert(tensors, ids, heads=3, layers=2, eps=1e-6)
        expected = unit(hidden.mean(0) if pooling == "mean_tokens" else hidden[0])
        np.testing.assert_allclose(vectors[row], expected, rtol=0, atol=2e-6)


def test_fresh_parameters_have_the_folders_shapes(tmp_path):
    encoder_folders.write(tmp_path)
    config = encoder_config(tmp_path)
    fresh, read = init_params(config, jax.random.key(0)), load_params(tmp_path, config)
    assert jax.tree.map(np.shape, fresh) == jax.tree.map(np.shape, read)
    vectors = encode(fresh, np.ones((2, 4), np.int32), np.array([4, 2], np.int32), config=config)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_transformers_computes_the_same(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed (extra parity)")
    from transformers import BertConfig, BertModel

    encoder_folders.write(tmp_path)
    theirs = BertModel(BertConfig(**encoder_folders.CONFIG)).eval()
    state = {n: torch.tensor(x) for n, x in load_file(tmp_path / "model.safetensors").items()}
    missing = theirs.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["pooler.dense.bias"]
    ids = np.random.default_rng(1).integers(4, 40, (3, 9))
    mask = np.arange(9)[None] < np.array([9, 4, 1])[:, None]
    with torch.no_grad():
        hidden = theirs(torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state
    pooled = (hidden.numpy() * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    expected = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    config = encoder_config(tmp_path)
    length = mask.sum(1).astype(np.int32)
    found = encode(load_params(tmp_path, config), ids.astype(np.int32), length, config=config)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


# Folders ------------------------------------------------------------------------------------------


def test_without_a_record_the_mean_is_taken_and_512_tokens(tmp_path):
    encoder_folders.write(tmp_path, pooling="", max_position_embeddings=600)
    config = encoder_config(tmp_path)
    assert config.pooling == "mean" and max_tokens(tmp_path, config) == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert max_tokens(tmp_path, config) == 256
    encoder_folders.write(tmp_path, pooling="", max_position_embeddings=64)
    assert max_tokens(tmp_path, encoder_config(tmp_path)) == 64


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "roberta"),
        ("hidden_act", "relu"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("hidden_size", "24"),
        ("num_hidden_layers", 0),
    ],
)
def test_other_networks_are_refused_by_name(tmp_path, field, value):
    encoder_folders.write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(EncoderFolderError, match=rf"config.json: {field}={value!r}.*expected"):
        encoder_config(tmp_path)


def test_other_pipelines_are_refused_by_name(tmp_path):
    encoder_folders.write(tmp_path, pooling="max")
    with pytest.raises(EncoderFolderError, match="1_Pooling/config.json: pooling_mode_max is not"):
        encoder_config(tmp_path)
    dense = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(dense))
    with pytest.raises(EncoderFolderError, match="modules.json: Dense is not supported"):
        encoder_config(tmp_path)
    with pytest.raises(ConfigError, match="width=10 must be a multiple of heads=3"):
        EncoderConfig(
            vocab_size=1, positions=1, types=1, layers=1, width=10, mlp=1, heads=3, norm_eps=0.0,
            pooling="mean",
        )  # fmt: skip


def test_wrong_tensors_are_listed_together(tmp_path):
    tensors = encoder_folders.write(tmp_path)
    del tensors["encoder.layer.1.output.dense.bias"]
    tensors["encoder.layer.0.intermediate.dense.weight"] = np.zeros((24, 40), np.float32)
    tensors["encoder.layer.2.output.dense.bias"] = np.zeros(24, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EncoderFolderError) as raised:
        load_params(tmp_path, encoder_config(tmp_path))
    for problem in (
        "encoder.layer.1.output.dense.bias is missing",
        "encoder.layer.0.intermediate.dense.weight: expected shape (40, 24), got (24, 40)",
        "encoder.layer.2.output.dense.bias is not part of the encoder",
    ):
        assert problem in str(raised.value)


def test_damaged_or_missing_files_are_named(tmp_path):
    encoder_folders.write(tmp_path)
    config = encoder_config(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(EncoderFolderError, match="model.safetensors: .*fetch the file again"):
        load_params(tmp_path, config)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(EncoderFolderError, match="expected model.safetensors in .*pickle"):
        load_params(tmp_path, config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EncoderFolderError, match="config.json: cannot be read"):
        encoder_config(tmp_path)
