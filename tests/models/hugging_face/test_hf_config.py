"""config.json: what is read, what is refused, and that what is written is read again."""

import json

import pytest

from sspjax.models.hugging_face.config import (
    ModelFolderError,
    decoder_config_from_hf,
    decoder_config_to_hf,
)
from sspjax.models.presets import PRESETS, preset

LLAMA_31_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN25_05B = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}


@pytest.fixture
def read(tmp_path):
    def reads(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
        return decoder_config_from_hf(tmp_path)

    return reads


def test_published_files_are_the_presets(read):
    assert read(LLAMA_31_8B) == preset("llama-3.1-8b")
    assert read(QWEN25_05B) == preset("qwen2.5-0.5b")


def test_both_ways_to_write_the_rotation(read):
    """Files of transformers 4 (`rope_theta`, `rope_scaling`) and of 5 (`rope_parameters`)."""
    older = {**LLAMA_31_8B, "rope_scaling": {**LLAMA_31_8B["rope_scaling"]}}
    older["rope_scaling"]["type"] = older["rope_scaling"].pop("rope_type")
    newer = {k: v for k, v in LLAMA_31_8B.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0}
    assert read(older) == read(newer) == read(LLAMA_31_8B)


def test_what_a_file_leaves_out(read):
    silent = {k: v for k, v in LLAMA_31_8B.items() if k not in ("num_key_value_heads",)}
    assert read(silent).kv_heads == 32
    assert read(MISTRAL).window == 4096
    assert read({k: v for k, v in MISTRAL.items() if k != "sliding_window"}).window == 4096
    assert read({**MISTRAL, "sliding_window": None}).window == 0
    assert read({**QWEN25_05B, "model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma2"}, "model_type='gemma2'.*qwen2, qwen3, llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, expected 'silu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True, "max_window_layers": 3}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\[1\]"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type='yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.rope_type='linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor=None: expected a number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config="),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map="),
        ({"num_hidden_layers": None}, "num_hidden_layers=None: expected a positive whole number"),
    ],
)
def test_maths_that_is_not_done_is_refused_by_name(read, tmp_path, change, words):
    with pytest.raises(ModelFolderError, match=words) as told:
        read({**QWEN25_05B, **change})
    assert str(tmp_path / "config.json") in str(told.value)


def test_a_file_that_is_none(read, tmp_path):
    with pytest.raises(ModelFolderError, match="got no such file"):
        decoder_config_from_hf(tmp_path)
    with pytest.raises(ModelFolderError, match="config.json: expected JSON"):
        read("{")
    with pytest.raises(ModelFolderError, match="expected a JSON object, got list"):
        read("[]")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_written_and_read_again(read, name):
    assert read(decoder_config_to_hf(preset(name), "bfloat16")) == preset(name)


def test_mistral_is_written_and_read_again(read):
    config = read(MISTRAL)
    assert read(decoder_config_to_hf(config, "float32")) == config
