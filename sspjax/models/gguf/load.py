"""A GGUF file's decoder: its shape, and its parameters tensor by tensor.

`load_params` gives parameters as `models.decoder` has them: stacked layers, linear layers with the
inputs first, rotations in the rotate-half form, which llama files store interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from sspjax.mesh import Layout
from sspjax.models.buffers import aligned
from sspjax.models.decoder import NOT_STACKED, init_params, parameter_shardings
from sspjax.models.gguf.blocks import BLOCKS, dequantize
from sspjax.models.gguf.file import GgufError, GgufFile, TensorInfo, open_gguf
from sspjax.models.presets import DecoderConfig, Llama3Scaling
from sspjax.types import Params, noun


@noun
class Architecture:
    """What distinguishes the families."""

    qkv_bias: bool = False
    qk_norm: bool = False
    interleaved: bool = False
    """Rotated pairs are neighbours in the rows of q and k."""


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(interleaved=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True),
}
"""By `general.architecture`."""


@noun
class Stored:
    """How a parameter is called in the file, and how it lies there."""

    name: str
    """With {} for the layer."""
    inputs: int = 0
    """A linear layer's leading axes that are inputs; the file has (outputs, inputs). 0: as here."""
    rotated: bool = False


STORED: Mapping[str, Stored] = {
    "embedding": Stored(name="token_embd.weight"),
    "attention_norm": Stored(name="blk.{}.attn_norm.weight"),
    "q": Stored(name="blk.{}.attn_q.weight", inputs=1, rotated=True),
    "k": Stored(name="blk.{}.attn_k.weight", inputs=1, rotated=True),
    "v": Stored(name="blk.{}.attn_v.weight", inputs=1),
    "o": Stored(name="blk.{}.attn_output.weight", inputs=2),
    "q_bias": Stored(name="blk.{}.attn_q.bias", rotated=True),
    "k_bias": Stored(name="blk.{}.attn_k.bias", rotated=True),
    "v_bias": Stored(name="blk.{}.attn_v.bias"),
    "q_norm": Stored(name="blk.{}.attn_q_norm.weight"),
    "k_norm": Stored(name="blk.{}.attn_k_norm.weight"),
    "mlp_norm": Stored(name="blk.{}.ffn_norm.weight"),
    "gate": Stored(name="blk.{}.ffn_gate.weight", inputs=1),
    "up": Stored(name="blk.{}.ffn_up.weight", inputs=1),
    "down": Stored(name="blk.{}.ffn_down.weight", inputs=1),
    "final_norm": Stored(name="output_norm.weight"),
    "head": Stored(name="output.weight", inputs=1),
}


# Shape --------------------------------------------------------------------------------------------

_PLAIN = (
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.freq_base",
    "rope.dimension_count",
)
"""Settings that are read, or change nothing."""

_DIVISORS = "rope_freqs.weight"
"""A tensor that is part of the shape: what the rotations' frequencies are divided by."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
}
"""Settings that change nothing when they have one of these values."""


def decoder_config_from_gguf(path: str | Path) -> DecoderConfig:
    """The shape of the model in a file.

    Raises GgufError for an architecture that is not one of `ARCHITECTURES`, and for every setting
    that asks for maths the decoder does not do.
    """
    file = open_gguf(path)
    name = file.architecture
    if name not in ARCHITECTURES:
        raise GgufError(
            f"{file.path}: expected a decoder of architecture {', '.join(ARCHITECTURES)}, got "
            f"{name!r}"
        )
    family = ARCHITECTURES[name]
    _refuse_unknown(file, f"{name}.")

    def count(key: str, default: int | None = None) -> int:
        full = f"{name}.{key}"
        value = file.integer(full) if default is None else file.metadata.get(full, default)
        if type(value) is not int or value < 1:
            raise GgufError(f"{file.path}: {full}={value!r:.60}: expected a positive whole number")
        return value

    width, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if count(key, head_dim) != head_dim:
            raise GgufError(
                f"{file.path}: expected {name}.{key} to be the size of a head, {head_dim}, got "
                f"{count(key)}: not supported"
            )
    layers = count("block_count")
    if layers > len(file.tensors):
        raise GgufError(
            f"{file.path}: {layers} layers, but {len(file.tensors)} tensors; the file is damaged"
        )
    base = f"{name}.rope.freq_base"
    theta = file.number(base) if base in file.metadata else 10_000.0
    return DecoderConfig(
        vocab_size=_tensor(file, "token_embd.weight").shape[0],
        layers=layers,
        width=width,
        mlp=count("feed_forward_length"),
        heads=heads,
        kv_heads=count("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, head_dim, theta),
        rms_eps=_decimal(file.number(f"{name}.attention.layer_norm_rms_epsilon")),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tied="output.weight" not in file.tensors,
        context=count("context_length"),
    )


def _rope_scaling(file: GgufFile, head_dim: int, theta: float) -> Llama3Scaling | None:
    """What the file's divisors of the frequencies come from: Llama 3.1's way, or an error."""
    if _DIVISORS not in file.tensors:
        return None
    info = file.tensors[_DIVISORS]
    found = np.empty((1, info.shape[-1]), np.float32)
    if info.kind in BLOCKS and info.shape == (head_dim // 2,):
        dequantize(info.kind, file.raw(info), found, transposed=False)
        scaling = Llama3Scaling(factor=float(found.max()), low=1.0, high=4.0, original=8192)
        frequency = theta ** (-np.arange(head_dim // 2) / (head_dim // 2))
        turns = scaling.original * frequency / (2 * np.pi)
        fast = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        if np.allclose(found[0], 1 / (fast + (1 - fast) / scaling.factor), rtol=1e-4):
            return scaling
    raise GgufError(
        f"{file.path}: {_DIVISORS} is not Llama 3.1's scaling of rotations, the one supported"
    )


def _refuse_unknown(file: GgufFile, prefix: str) -> None:
    for key, value in file.metadata.items():
        setting = key.removeprefix(prefix)
        neutral = not isinstance(value, np.ndarray) and value in _NEUTRAL.get(setting, ())
        known = setting in _PLAIN or neutral
        if key.startswith(prefix) and not known:
            raise GgufError(
                f"{file.path}: {key}={value!r:.60} is not supported: the decoder would compute "
                "something else"
            )


def _decimal(value: float) -> float:
    """The number a float32 was written for: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(value)))


# Parameters ---------------------------------------------------------------------------------------


def load_params(
    path: str | Path,
    config: DecoderConfig,
    layout: Layout,
    dtype: Any,
    *,
    check_finite: bool = False,
) -> Params:
    """The file's parameters, sharded as `parameter_shardings` says, each in `dtype`.

    Tensors are read one at a time, so that host memory holds the addressable shards, and beside
    them one tensor in float32. CPU devices take the shards over without a copy.

    Raises:
      GgufError: tensors are missing, unexpected, of another shape, or of a type that cannot be
        read (all of them in one message); with `check_finite`, one holds a NaN or an infinity.
    """
    file = open_gguf(path)
    shapes = {
        name: x.shape
        for name, x in jax.eval_shape(lambda: init_params(config, jax.random.key(0))).items()
    }
    _check_tensors(file, config, shapes)
    shardings = parameter_shardings(config, layout)
    return {
        name: _placed(file, name, shape, shardings[name], np.dtype(dtype), check_finite)
        for name, shape in shapes.items()
    }


def _tensor(file: GgufFile, name: str) -> TensorInfo:
    if name not in file.tensors:
        raise GgufError(f"{file.path}: expected a tensor {name}, got no such tensor")
    return file.tensors[name]


def _check_tensors(
    file: GgufFile, config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises GgufError with everything that is wrong, before anything is read."""
    expected = {
        STORED[name].name.format(layer): _stored_shape(
            STORED[name], shape if name in NOT_STACKED else shape[1:]
        )
        for name, shape in shapes.items()
        for layer in range(1 if name in NOT_STACKED else config.layers)
    }
    found = file.tensors
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [
        f"{name} is not expected" for name in found if name not in expected and name != _DIVISORS
    ]
    for name, shape in expected.items():
        if name in found and found[name].shape != shape:
            wrong.append(f"{name} has shape {found[name].shape} instead of {shape}")
        elif name in found and found[name].kind not in BLOCKS:
            wrong.append(f"{name} is stored as {found[name].kind}, which cannot be read")
    if wrong:
        more = f" (and {len(wrong) - 8} more)" if len(wrong) > 8 else ""
        raise GgufError(
            f"{file.path}: not the tensors of a {file.architecture} decoder of {config.layers} "
            f"layers: {'; '.join(wrong[:8])}{more}; readable types: {', '.join(BLOCKS)}"
        )


def _stored_shape(stored: Stored, shape: tuple[int, ...]) -> tuple[int, ...]:
    if stored.inputs:
        return math.prod(shape[stored.inputs :]), math.prod(shape[: stored.inputs])
    return (math.prod(shape),) if stored.rotated or stored.name.endswith(".bias") else shape


def _placed(
    file: GgufFile,
    name: str,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    dtype: np.dtype,
    check_finite: bool,
) -> jax.Array:
    """One parameter. Devices of this process that hold the same part share its memory."""
    stored, stacked = STORED[name], name not in NOT_STACKED
    boxes = {
        device: tuple(i.indices(n)[:2] for i, n in zip(index or (), shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    }
    parts = {box: aligned(tuple(b - a for a, b in box), dtype) for box in boxes.values()}
    one = shape[1:] if stacked else shape
    # A single part in float32 is filled where it is; others are cut from a tensor beside them.
    whole = [part.shape for part in parts.values()] == [shape] and dtype == np.float32
    beside = None if whole else np.empty(one, np.float32)
    for layer in range(shape[0] if stacked else 1):
        places = {box: part[layer] if stacked else part for box, part in parts.items()}
        tensor = next(iter(places.values())) if beside is None else beside
        info = _tensor(file, stored.name.format(layer))
        _read(file, info, stored, tensor)
        if check_finite and not np.isfinite(tensor).all():
            raise GgufError(f"{file.path}: tensor {info.name} is not finite: it is damaged")
        if beside is not None:
            for box, place in places.items():
                place[...] = tensor[tuple(slice(*i) for i in box[-len(one) :])]
    arrays = [jax.device_put(parts[box], device) for device, box in boxes.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read(file: GgufFile, info: TensorInfo, stored: Stored, out: np.ndarray) -> None:
    """Fills one layer's f32[...], in the shape it has here."""
    raw, turned = file.raw(info), bool(stored.inputs)
    if turned and stored.rotated and ARCHITECTURES[file.architecture].interleaved:
        raw = _halves_together(raw, out.shape[-2:])
    columns = info.shape[-1]
    matrix = (columns, len(raw)) if turned else (len(raw), columns)
    dequantize(info.kind, raw, out.reshape(matrix), transposed=turned)


def _halves_together(raw: np.ndarray, heads: tuple[int, ...]) -> np.ndarray:
    """Rows of q or k whose pairs (0, 1), (2, 3), ... are rotated, as (0, h/2), (1, h/2 + 1), ..."""
    count, size = heads
    pairs = raw.reshape(count, size // 2, 2, raw.shape[-1])
    return pairs.swapaxes(1, 2).reshape(raw.shape)
