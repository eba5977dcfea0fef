"""`config.json` of a model folder: read to a DecoderConfig, and written from one.

What a file says about the maths is either understood or refused by name; a model that is nearly the
one in the folder would train without a sign that anything is wrong.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sspjax.errors import UserError
from sspjax.models.presets import DecoderConfig, Llama3Scaling


class ModelFolderError(UserError, ValueError):
    """A model folder that cannot be read, or does not hold what it should."""


ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
"""Families by the `model_type` of their config.json. SmolLM2 is a Llama, as are many others."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "quantization_config": (None,),
    "auto_map": (None,),
}
"""Fields that change the maths, with the values at which they do not. Others than these raise."""

_WINDOWED, _WHOLE = "sliding_attention", "full_attention"


def decoder_config_from_hf(folder: str | Path) -> DecoderConfig:
    """The shape of the model in a folder.

    Raises ModelFolderError where there is no config.json, where it is of another family, and for
    every field that asks for maths the decoder does not do.
    """
    path = Path(folder) / "config.json"
    c = read_json(path)
    family = c.get("model_type")
    if family not in ARCHITECTURES:
        raise ModelFolderError(
            f"{path}: model_type={family!r}: expected one of {', '.join(ARCHITECTURES)}"
        )
    for name, allowed in NEUTRAL.items():
        if name in c and c[name] not in allowed:
            raise ModelFolderError(
                f"{path}: {name}={c[name]!r} is not supported, expected {allowed[0]!r}; "
                "choose a model without it"
            )
    rope_theta, rope_scaling = _rope(path, c)
    heads, width = _whole(path, c, "num_attention_heads"), _whole(path, c, "hidden_size")
    # Llama's first models have as many key heads as heads, and say nothing of them.
    by_default: dict[str, Any] = {"num_key_value_heads": heads} if family == "llama" else {}
    head_dim = c.get("head_dim") or (128 if family == "qwen3" else width // heads)
    return DecoderConfig(
        vocab_size=_whole(path, c, "vocab_size"),
        layers=_whole(path, c, "num_hidden_layers"),
        width=width,
        mlp=_whole(path, c, "intermediate_size"),
        heads=heads,
        kv_heads=_whole(path, {**by_default, **c}, "num_key_value_heads"),
        head_dim=head_dim,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_eps=float(c.get("rms_norm_eps", 1e-6)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(c.get("tie_word_embeddings", False)),
        window=_window(path, c, family),
        context=_whole(path, {"max_position_embeddings": 32768, **c}, "max_position_embeddings"),
    )


def decoder_config_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The content of a config.json that `transformers` reads as this model.

    Raises ModelFolderError for a shape that no family has.
    """
    family = _family(config)
    scaling = config.rope_scaling
    content: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else _scaling_to_hf(scaling),
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    if family in ("llama", "qwen3"):
        content["attention_bias"] = False
    if family in ("qwen2", "qwen3"):
        content["use_sliding_window"] = False
    if family == "mistral":
        content["sliding_window"] = config.window
    return content


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; ModelFolderError where there is none."""
    if not path.is_file():
        raise ModelFolderError(
            f"expected {path.name} in {path.parent}, got no such file: give a folder as "
            "transformers' save_pretrained writes it"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(f"{path}: expected JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _whole(path: Path, c: Mapping[str, Any], name: str) -> int:
    value = c.get(name)
    if type(value) is not int or value < 1:
        raise ModelFolderError(f"{path}: {name}={value!r}: expected a positive whole number")
    return value


def _window(path: Path, c: Mapping[str, Any], family: str) -> int:
    """Mistral's window (4,096 where its file is silent); other families name one and use none."""
    window = (c.get("sliding_window", 4096) or 0) if family == "mistral" else 0
    kind = _WINDOWED if window else _WHOLE
    for layer, found in enumerate(c.get("layer_types") or ()):
        # Mistral's own code gives every layer its window, whatever the layer is called.
        if found != kind and family != "mistral":
            raise ModelFolderError(
                f"{path}: layer_types[{layer}]={found!r} is not supported, expected {kind!r}; "
                "choose a model whose layers all see the same"
            )
    return window


def _rope(path: Path, c: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling; transformers 5 writes both into `rope_parameters`."""
    name = "rope_parameters" if c.get("rope_parameters") else "rope_scaling"
    given = c.get(name) or {}
    theta = float(given.get("rope_theta", c.get("rope_theta", 10000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("partial_rotary_factor", 1) != 1:
        raise ModelFolderError(
            f"{path}: {name}.partial_rotary_factor={given['partial_rotary_factor']} is not "
            "supported, expected 1; choose a model that rotates whole heads"
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelFolderError(
            f"{path}: {name}.rope_type={kind!r} is not supported, expected 'default' or 'llama3'; "
            "where the model works without it in a shorter context, take it out of the file"
        )
    fields = {
        "factor": "factor",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "original": "original_max_position_embeddings",
    }
    for key in fields.values():
        if not isinstance(given.get(key), int | float):
            raise ModelFolderError(
                f"{path}: {name}.{key}={given.get(key)!r}: expected a number, which rope type "
                "llama3 needs"
            )
    scaling = Llama3Scaling(**{ours: given[key] for ours, key in fields.items()})
    return theta, dataclasses.replace(scaling, original=int(scaling.original))


def _scaling_to_hf(scaling: Llama3Scaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original,
    }


def _family(config: DecoderConfig) -> str:
    kinds = {"qwen2": config.qkv_bias, "qwen3": config.qk_norm, "mistral": config.window > 0}
    said = [family for family, is_it in kinds.items() if is_it]
    if len(said) > 1:
        raise ModelFolderError(
            f"expected a decoder of one family, got the marks of {' and '.join(said)} in {config}: "
            "there is no Hugging Face model of this kind to export to"
        )
    return said[0] if said else "llama"
