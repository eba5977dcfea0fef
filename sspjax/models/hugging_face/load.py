"""Tensors of a model folder to sharded parameters: each process reads what its devices hold.

A tensor is read in blocks of rows from the mapped file, turned and converted on the way into the
buffer that goes to the device. On a CPU that buffer becomes the parameter; elsewhere the host holds
one device's part of one parameter at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from sspjax.mesh import Layout
from sspjax.models.buffers import aligned
from sspjax.models.decoder import parameter_shardings
from sspjax.models.hugging_face.config import ModelFolderError, read_json
from sspjax.models.hugging_face.tensors import Tensor, model_tensors
from sspjax.models.presets import DecoderConfig
from sspjax.types import Params

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: Mapping[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
"""What a folder may hold; numbers are converted to the dtype that is asked for."""

UNUSED = ("rotary_emb.inv_freq",)
"""Endings of tensors that old files carry and that follow from their config."""

_BLOCK_BYTES = 256 << 10
_THREADS = min(8, os.cpu_count() or 1)
"""Layers that are read at the same time."""
_SHOWN = 12


def load_params(
    folder: str | Path,
    config: DecoderConfig,
    layout: Layout,
    dtype: Any,
    *,
    check_finite: bool = False,
) -> Params:
    """The folder's parameters, sharded as `parameter_shardings` says, each in `dtype`.

    Float32, bfloat16 and float16 files are read; files that are pickles never are.

    Raises:
      ModelFolderError: a file is missing or cut off; tensors are missing, unexpected, or of another
        shape or type (all of them in one message); with `check_finite`, one holds a NaN or an
        infinity.
    """
    files = weight_files(folder)
    tensors = model_tensors(config)
    _compare(Path(folder), config, tensors, files)
    shardings = parameter_shardings(config, layout)
    with _Reader(files, check_finite) as reader:
        params = {}
        for name, sharding in shardings.items():
            own = [tensor for tensor in tensors if tensor.parameter == name]
            params[name] = _placed(reader, own, sharding, np.dtype(dtype))
    return params


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """What a file's header says of a tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder by name, from the headers of its safetensors files.

    Raises ModelFolderError where there are none, where the index names what is not there, and where
    a file is shorter than its header says.
    """
    folder = Path(folder)
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return _header(folder / SINGLE)
    if any(folder.glob("*.bin")):
        raise ModelFolderError(
            f"{folder}: expected {SINGLE} or {INDEX}, got .bin files only, which are pickles and "
            "can run code when they are read; write the folder again with transformers' "
            "save_pretrained"
        )
    raise ModelFolderError(
        f"{folder}: expected {SINGLE}, or {INDEX} and the files it names, got neither; give a "
        "Hugging Face model folder"
    )


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    index = read_json(folder / INDEX)
    names: Mapping[str, str] = index.get("weight_map", {})
    problems = []
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(names.values())):
        own = [name for name, where in names.items() if where == file]
        if not (folder / file).is_file():
            problems.append(f"{file} is not there ({len(own)} tensors, first {own[0]})")
            continue
        found = _header(folder / file)
        problems += [f"{file} does not hold {name}" for name in own if name not in found]
        stored |= found
    if problems:
        raise ModelFolderError(
            f"{folder / INDEX}: {_listed(problems)}; fetch the missing files, all of one version"
        )
    return stored


def _header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file: eight bytes of length, as much JSON, and the numbers."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 2 <= length <= size - 8 else b""
    try:
        entries = json.loads(text)
    except ValueError:
        raise ModelFolderError(
            f"{path}: expected a safetensors file, got {size} bytes whose header is cut off or is "
            "none; fetch the file again"
        ) from None
    entries.pop("__metadata__", None)
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"][1]):
        end = 8 + length + entry["data_offsets"][1]
        if end > size:
            raise ModelFolderError(
                f"{path}: cut off inside {name}: expected at least {end} bytes, got {size}; fetch "
                "the file again"
            )
    return {
        name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]))
        for name, entry in entries.items()
    }


def _compare(
    folder: Path,
    config: DecoderConfig,
    tensors: Sequence[Tensor],
    stored: Mapping[str, StoredTensor],
) -> None:
    wanted = {tensor.name: tensor for tensor in tensors}
    # Where the head is the embedding, some files hold it twice.
    unused = (*UNUSED, "lm_head.weight") if config.tied else UNUSED
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [
        f"{name} is not part of this model ({own.file.name})"
        for name, own in stored.items()
        if name not in wanted and not name.endswith(unused)
    ]
    for name in wanted.keys() & stored.keys():
        want, own = wanted[name], stored[name]
        if own.shape != want.shape:
            problems.append(
                f"{name}: expected shape {want.shape}, got {own.shape} ({own.file.name})"
            )
        if own.dtype not in DTYPES:
            problems.append(
                f"{name}: expected {', '.join(DTYPES)}, got {own.dtype} ({own.file.name})"
            )
    if problems:
        raise ModelFolderError(
            f"{folder}: {len(problems)} of its tensors are not those that its config.json asks "
            f"for: {_listed(problems)}; config.json and weights must be of one model"
        )


def _listed(problems: Sequence[str]) -> str:
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


class _Reader:
    """Blocks of tensors from files that are mapped once, and threads to read them with."""

    def __init__(self, stored: Mapping[str, StoredTensor], check_finite: bool):
        self._stored = stored
        self._check_finite = check_finite
        self._open: dict[Path, Any] = {}
        self._exits = contextlib.ExitStack()
        self.threads = self._exits.enter_context(ThreadPoolExecutor(_THREADS))

    def blocks(
        self, name: str, rows: slice, columns: slice | None
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """Consecutive rows of a part of a tensor, with their place in the part."""
        stored = self._stored[name]
        view = self._open[stored.file].get_slice(name)
        width = 1 if columns is None else columns.stop - columns.start
        step = max(1, _BLOCK_BYTES // (width * np.dtype(DTYPES[stored.dtype]).itemsize))
        for start in range(rows.start, rows.stop, step):
            own = slice(start, min(start + step, rows.stop))
            block = view[own] if columns is None else view[own, columns]
            if self._check_finite and not np.isfinite(block).all():
                raise ModelFolderError(
                    f"{stored.file}: {name} holds numbers that are not finite, in rows "
                    f"{own.start} to {own.stop - 1}; use weights that were saved whole"
                )
            yield slice(own.start - rows.start, own.stop - rows.start), block

    def __enter__(self) -> _Reader:
        for path in {own.file for own in self._stored.values()}:
            try:
                file = safe_open(os.fspath(path), framework="numpy")
            except SafetensorError as error:
                raise ModelFolderError(f"{path}: {error}; fetch the file again") from error
            self._open[path] = self._exits.enter_context(file)
        return self

    def __exit__(self, *reason: object) -> None:
        self._exits.close()


def _placed(
    reader: _Reader, tensors: Sequence[Tensor], sharding: jax.sharding.Sharding, dtype: np.dtype
) -> jax.Array:
    """One parameter. Devices of this process that hold the same part share one reading of it."""
    dims = tensors[0].dims
    shape = dims if tensors[0].layer is None else (len(tensors), *dims)
    arrays = {}
    parts: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(i.indices(n)[:2] for i, n in zip(index or (), shape, strict=True))
        parts.setdefault(bounds, []).append(device)
    for bounds, devices in parts.items():
        part = _read_part(reader, tensors, bounds, dtype)
        for device in devices:
            arrays[device] = jax.device_put(part, device)
        # The buffer of the next part is made when this one's has been taken.
        jax.block_until_ready(list(arrays.values()))
    return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays.values()))


def _read_part(
    reader: _Reader,
    tensors: Sequence[Tensor],
    bounds: tuple[tuple[int, int], ...],
    dtype: np.dtype,
) -> np.ndarray:
    """A part of a parameter, in its shape: `bounds` are start and stop along every dimension."""
    part = aligned([stop - start for start, stop in bounds], dtype)
    if tensors[0].layer is None:
        _fill(reader, tensors[0], bounds, part)
        return part
    (first, last), *rest = bounds
    filled = [
        reader.threads.submit(_fill, reader, tensor, rest, own)
        for own, tensor in zip(part, tensors[first:last], strict=True)
    ]
    for layer in filled:
        layer.result()
    return part


def _fill(
    reader: _Reader, tensor: Tensor, bounds: Sequence[tuple[int, int]], part: np.ndarray
) -> None:
    dims, n = tensor.dims, tensor.inputs
    if n == 0:
        if len(tensor.shape) == len(dims):
            rows, *columns = [slice(*b) for b in bounds]
        else:
            rows, columns = _flat(bounds, dims), []
        flat = part.reshape(rows.stop - rows.start, -1)
        for place, block in reader.blocks(tensor.name, rows, *columns or [None]):
            flat[place] = block.reshape(len(block), -1).astype(part.dtype, copy=False)
        return
    rows, columns = _flat(bounds[n:], dims[n:]), _flat(bounds[:n], dims[:n])
    # Turned as integers: numpy moves those in loops of its own, bfloat16 one by one.
    bits = np.dtype(f"u{part.itemsize}")
    turned = part.view(bits).reshape(columns.stop - columns.start, rows.stop - rows.start)
    for place, block in reader.blocks(tensor.name, rows, columns):
        turned[:, place] = block.astype(part.dtype, copy=False).view(bits).T


def _flat(bounds: Sequence[tuple[int, int]], dims: Sequence[int]) -> slice:
    """The run that a box over `dims` is when they are one dimension: only the first is split."""
    (start, stop), *others = bounds
    inner = math.prod(dims[1:])
    assert all(b == (0, n) for b, n in zip(others, dims[1:], strict=True)), (bounds, dims)
    return slice(start * inner, stop * inner)
