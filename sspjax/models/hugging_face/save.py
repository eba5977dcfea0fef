"""Sharded parameters to a model folder that `transformers` loads, one tensor at a time.

A safetensors file is a header that names every tensor and its place, and then the numbers; the
shapes are known before, so a file is written front to back and never held.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sspjax import processes
from sspjax.models.hugging_face.config import decoder_config_to_hf
from sspjax.models.hugging_face.load import INDEX, SINGLE
from sspjax.models.hugging_face.tensors import Tensor, model_tensors
from sspjax.models.presets import DecoderConfig
from sspjax.types import Params

NAMES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16"}
"""Dtypes of an exported folder, as safetensors call them."""

_BLOCK = 256


def save_params(
    folder: Path,
    config: DecoderConfig,
    params: Params,
    dtype: str,
    *,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Writes the tensors; process 0 writes, all processes must call it.

    Args:
      folder: exists on process 0.
      params: of any sharding; converted to `dtype`, a key of `NAMES`.
      max_file_bytes: a file ends before the tensor that would make it longer.
    """
    files = _files(model_tensors(config), dtype, max_file_bytes)
    names = [SINGLE] if len(files) == 1 else [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]  # fmt: skip
    for name, tensors in zip(names, files, strict=True):
        gathered = ((tensor, _gathered(params, tensor, dtype)) for tensor in tensors)
        if processes.is_main():
            with (folder / name).open("wb") as file:
                _write(file, tensors, gathered, dtype)
        else:
            for _ in gathered:  # The others hold parts of every tensor.
                pass
    if processes.is_main() and len(files) > 1:
        placed = {t.name: name for name, own in zip(names, files, strict=True) for t in own}
        total = sum(_size(t, dtype) for own in files for t in own)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def save_config(folder: Path, config: DecoderConfig, dtype: str, tokens: Mapping[str, Any]) -> None:
    """Writes config.json, and generation_config.json with what ends and pads a text.

    `tokens`: `eos_token_id` (one or several), `pad_token_id`, and a `bos_token_id` if there is one.
    """
    _write_json(folder / "config.json", {**decoder_config_to_hf(config, dtype), **tokens})
    _write_json(folder / "generation_config.json", tokens)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _files(tensors: Sequence[Tensor], dtype: str, most: int) -> list[list[Tensor]]:
    files: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        own = _size(tensor, dtype)
        if files[-1] and size + own > most:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += own
    return files


def _size(tensor: Tensor, dtype: str) -> int:
    return math.prod(tensor.shape) * jnp.dtype(dtype).itemsize


def _write(
    file: BinaryIO,
    tensors: Sequence[Tensor],
    gathered: Iterator[tuple[Tensor, np.ndarray]],
    dtype: str,
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + _size(tensor, dtype)
        header[tensor.name] = {
            "dtype": NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # Numbers start at a multiple of eight.
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor, value in gathered:
        for block in _rows_there(tensor, value):
            file.write(block.tobytes())


def _rows_there(tensor: Tensor, value: np.ndarray) -> Iterator[np.ndarray]:
    """The tensor as the folder has it, some rows at a time: outputs before inputs."""
    if tensor.inputs == 0:
        flat = value.reshape(tensor.shape)
        yield from (flat[i : i + _BLOCK] for i in range(0, len(flat), _BLOCK))
        return
    rows, columns = tensor.shape
    turned = value.reshape(columns, rows)
    yield from (turned[:, i : i + _BLOCK].T for i in range(0, rows, _BLOCK))


def _gathered(params: Params, tensor: Tensor, dtype: str) -> np.ndarray:
    """One tensor whole, in our shape, on this host."""
    x = params[tensor.parameter]
    whole = None
    if not x.is_fully_addressable:
        whole = NamedSharding(x.sharding.mesh, PartitionSpec())
    if tensor.layer is None:
        return np.asarray(_converted(dtype, whole)(x))
    return np.asarray(_layer(dtype, whole)(x, np.int32(tensor.layer)))


@functools.cache
def _converted(dtype: str, sharding: NamedSharding | None) -> Any:
    return jax.jit(lambda x: x.astype(jnp.dtype(dtype)), out_shardings=sharding)


@functools.cache
def _layer(dtype: str, sharding: NamedSharding | None) -> Any:
    def layer(x: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, index, keepdims=False).astype(jnp.dtype(dtype))

    return jax.jit(layer, out_shardings=sharding)
