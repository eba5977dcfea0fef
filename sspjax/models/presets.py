"""Shapes of the decoders that `model.preset` can name. Weights are loaded from a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sspjax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's longer context: slow rotations are slowed by `factor`, fast ones kept.

    A rotation is fast where more than `high` of its turns fit into the `original` context (tokens),
    slow where fewer than `low` do, and in between the two are mixed.
    """

    factor: float
    low: float
    high: float
    original: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of the Qwen2, Qwen3, Llama or Mistral family."""

    vocab_size: int
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    rms_eps: float = 1e-6
    qkv_bias: bool = False
    """Qwen2: biases on q, k and v."""
    qk_norm: bool = False
    """Qwen3: RMSNorm over each head of q and k, before the rotation."""
    tied: bool = False
    """The output head is the embedding."""
    window: int = 0
    """Mistral: a token sees itself and the `window - 1` tokens before it; 0: all before it."""
    context: int = 32768
    """Tokens it was made for. It changes no number, and is written into exported folders."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"decoder: heads={self.heads} must be a multiple of kv_heads={self.kv_heads} "
                f"and head_dim={self.head_dim} even"
            )


def _qwen2(
    layers: int,
    width: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    *,
    tied: bool = False,
    rms_eps: float = 1e-6,
    context: int = 32768,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151936 if tied else 152064,
        layers=layers,
        width=width,
        mlp=mlp,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        rope_theta=1e6,
        rms_eps=rms_eps,
        qkv_bias=True,
        tied=tied,
        context=context,
    )


def _qwen3(layers: int, width: int, mlp: int, heads: int, *, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151936,
        layers=layers,
        width=width,
        mlp=mlp,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        qk_norm=True,
        tied=tied,
        context=40960,
    )


def _smollm2(
    layers: int, width: int, mlp: int, heads: int, kv_heads: int, rope_theta: float = 1e5
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=49152,
        layers=layers,
        width=width,
        mlp=mlp,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        rope_theta=rope_theta,
        rms_eps=1e-5,
        tied=True,
        context=8192,
    )


_QWEN2_7B = _qwen2(28, 3584, 18944, 28, 4)
_LONG = 131072

PRESETS = {
    "tiny": DecoderConfig(
        vocab_size=1280,
        layers=2,
        width=128,
        mlp=256,
        heads=4,
        kv_heads=4,
        head_dim=64,
        rope_theta=1e4,
        qk_norm=True,
        tied=True,
    ),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, tied=True),
    "qwen2.5-0.5b-instruct": _qwen2(24, 896, 4864, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, tied=True, context=_LONG),
    "qwen2.5-1.5b-instruct": _qwen2(28, 1536, 8960, 12, 2, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 11008, 16, 2, tied=True),
    "qwen2.5-3b-instruct": _qwen2(36, 2048, 11008, 16, 2, tied=True),
    "qwen2.5-7b": dataclasses.replace(_QWEN2_7B, context=_LONG),
    "qwen2.5-7b-instruct": _QWEN2_7B,
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8, rms_eps=1e-5, context=_LONG),
    "qwen2.5-14b-instruct": _qwen2(48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8, rms_eps=1e-5, context=_LONG),
    "qwen2.5-32b-instruct": _qwen2(64, 5120, 27648, 40, 8),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, tied=False),
    "llama-3.1-8b": DecoderConfig(
        vocab_size=128256,
        layers=32,
        width=4096,
        mlp=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=8192),
        rms_eps=1e-5,
        context=_LONG,
    ),
    "smollm2-135m": _smollm2(30, 576, 1536, 9, 3),
    "smollm2-360m": _smollm2(32, 960, 2560, 15, 5),
    "smollm2-1.7b": _smollm2(24, 2048, 8192, 32, 32, rope_theta=1.3e5),
    "search-r1-7b": dataclasses.replace(_QWEN2_7B, context=_LONG),
    "zerosearch-7b": dataclasses.replace(_QWEN2_7B, context=_LONG),
    "r-search-7b": _QWEN2_7B,
}
"""Shapes from the published config.json files; `tiny` is a Qwen3 block. The last three are search
agents trained from Qwen2.5-7B.
"""


def decoder_from_json(fields: Mapping[str, Any]) -> DecoderConfig:
    """The shape whose `dataclasses.asdict` went through JSON."""
    scaling = fields["rope_scaling"]
    return DecoderConfig(
        **{**fields, "rope_scaling": None if scaling is None else Llama3Scaling(**scaling)}
    )


def preset(name: str, vocab_size: int = 0) -> DecoderConfig:
    """The named shape; a tokenizer trained for the run replaces the vocabulary size."""
    if name not in PRESETS:
        raise ConfigError(f"config.model.preset={name}: known presets: {', '.join(PRESETS)}")
    shape = PRESETS[name]
    return dataclasses.replace(shape, vocab_size=vocab_size) if vocab_size else shape
