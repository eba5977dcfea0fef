"""The decoder once more, in float64 numpy, one sequence at a time: what tests compare with."""

from __future__ import annotations

import numpy as np

from sspjax.models.presets import DecoderConfig


def logits(config: DecoderConfig, params: dict, tokens: np.ndarray) -> np.ndarray:
    """[T] token ids to [T, vocab] logits; the whole score matrix, no blocks, no cache."""
    p = {k: np.asarray(v, np.float64) for k, v in params.items()}
    x = p["embedding"][tokens]
    for i in range(config.layers):
        layer = {k: v[i] for k, v in p.items() if k not in ("embedding", "final_norm", "head")}
        x = x + _attention(config, layer, _norm(x, layer["attention_norm"], config.rms_eps))
        y = _norm(x, layer["mlp_norm"], config.rms_eps)
        gate = y @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"])) @ layer["down"]
    x = _norm(x, p["final_norm"], config.rms_eps)
    return x @ (p["embedding"].T if config.tied else p["head"])


def _attention(config: DecoderConfig, layer: dict, y: np.ndarray) -> np.ndarray:
    length, groups = len(y), config.heads // config.kv_heads
    q, k, v = (np.tensordot(y, layer[name], 1) for name in "qkv")
    if config.qkv_bias:
        q, k, v = q + layer["q_bias"], k + layer["k_bias"], v + layer["v_bias"]
    if config.qk_norm:
        q = _norm(q, layer["q_norm"], config.rms_eps)
        k = _norm(k, layer["k_norm"], config.rms_eps)
    q, k = _rope(q, config), _rope(k, config)
    out = np.zeros_like(q)
    for head in range(config.heads):
        scores = q[:, head] @ k[:, head // groups].T / np.sqrt(config.head_dim)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        if config.window:
            scores[np.tril_indices(length, -config.window)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, head // groups]
    return np.tensordot(out, layer["o"], 2)


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def _rope(x: np.ndarray, config: DecoderConfig) -> np.ndarray:
    half = x.shape[-1] // 2
    frequency = config.rope_theta ** (-np.arange(half) / half)
    scaling = config.rope_scaling
    for i in range(half if scaling else 0):
        length = 2 * np.pi / frequency[i]  # Tokens of a whole turn.
        if length > scaling.original / scaling.low:
            frequency[i] /= scaling.factor
        elif length > scaling.original / scaling.high:
            kept = (scaling.original / length - scaling.low) / (scaling.high - scaling.low)
            frequency[i] *= kept + (1 - kept) / scaling.factor
    angle = np.arange(len(x))[:, None] * frequency
    sin, cos = np.sin(angle)[:, None], np.cos(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
