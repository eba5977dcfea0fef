"""Shapes of the decoders that `model.preset` can name. Weights are loaded from a folder."""

from __future__ import annotations

import dataclasses

from sspjax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of the Qwen2 / Qwen3 / Llama-3 family."""

    vocab_size: int
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float = 1e-6
    qkv_bias: bool = False
    """Qwen2: biases on q, k and v."""
    qk_norm: bool = False
    """Qwen3: RMSNorm over each head of q and k, before the rotation."""
    tied: bool = False
    """The output head is the embedding."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"decoder: heads={self.heads} must be a multiple of kv_heads={self.kv_heads} "
                f"and head_dim={self.head_dim} even"
            )


def _qwen2(layers: int, width: int, mlp: int, heads: int, kv_heads: int, tied: bool, vocab: int):
    return DecoderConfig(
        vocab_size=vocab,
        layers=layers,
        width=width,
        mlp=mlp,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        rope_theta=1e6,
        qkv_bias=True,
        tied=tied,
    )


def _qwen3(layers: int, width: int, mlp: int, heads: int, tied: bool):
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
    )


PRESETS = {
    "tiny": DecoderConfig(
        vocab_size=1280,
        layers=2,
        width=128,
        mlp=384,
        heads=4,
        kv_heads=2,
        head_dim=32,
        rope_theta=1e4,
        qk_norm=True,
        tied=True,
    ),
    "qwen2.5-0.5b-instruct": _qwen2(24, 896, 4864, 14, 2, True, 151936),
    "qwen2.5-1.5b-instruct": _qwen2(28, 1536, 8960, 12, 2, True, 151936),
    "qwen2.5-3b-instruct": _qwen2(36, 2048, 11008, 16, 2, True, 151936),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, False, 152064),
    "qwen2.5-7b-instruct": _qwen2(28, 3584, 18944, 28, 4, False, 152064),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, False),
}
"""Qwen/Qwen2.5 and Qwen/Qwen3 shapes from their published config.json; `tiny` is a Qwen3 block."""


def preset(name: str, vocab_size: int = 0) -> DecoderConfig:
    """The named shape; a tokenizer trained for the run replaces the vocabulary size."""
    if name not in PRESETS:
        raise ConfigError(f"config.model.preset={name}: known presets: {', '.join(PRESETS)}")
    shape = PRESETS[name]
    return dataclasses.replace(shape, vocab_size=vocab_size) if vocab_size else shape
