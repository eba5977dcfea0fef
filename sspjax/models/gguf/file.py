"""The container: metadata, and tensors as raw bytes of a mapped file (GGUF versions 2 and 3).

Little endian throughout: magic, version, counts; then metadata as key, type, value; then for each
tensor its name, dimensions (the fastest first), type and offset; then, aligned, the tensors' bytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sspjax.errors import UserError
from sspjax.models.gguf.blocks import BLOCKS, TYPE_NAMES
from sspjax.types import noun, record

VERSIONS = (2, 3)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_STRUCTS = {code: struct.Struct(f"<{letter}") for code, letter in _SCALARS.items()}
_U32, _U64 = _STRUCTS[4], _STRUCTS[10]


class GgufError(UserError, ValueError):
    """A file that is no GGUF, is damaged, or holds what cannot be used; the message names it."""


@noun
class TensorInfo:
    """Where a tensor lies and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """The slowest dimension first, as arrays have it: a linear layer is (outputs, inputs)."""
    kind: str
    """Name of the storage type: a key of `BLOCKS`, or one that cannot be read."""
    start: int
    """Byte of the file."""


@record
class GgufFile:
    """An open file. The bytes stay in the file, mapped into memory."""

    path: Path
    metadata: Mapping[str, Any]
    """Numbers, text and truth values; arrays as numpy arrays, or lists of text."""
    tensors: Mapping[str, TensorInfo]
    content: mmap.mmap

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def text(self, key: str) -> str:
        return self._typed(key, str, "text")

    def integer(self, key: str) -> int:
        return self._typed(key, int, "an integer")

    def number(self, key: str) -> float:
        return self._typed(key, float, "a number")

    def raw(self, info: TensorInfo) -> np.ndarray:
        """u8[rows, bytes of a row], mapped: the last dimension of a tensor is stored in blocks."""
        block = BLOCKS[info.kind]
        rows = math.prod(info.shape[:-1])
        width = info.shape[-1] // block.values * block.bytes
        flat = np.frombuffer(self.content, np.uint8, rows * width, info.start)
        return flat.reshape(rows, width)

    def _typed(self, key: str, kind: type, what: str) -> Any:
        value = self.metadata.get(key)
        if type(value) is not kind:
            raise GgufError(f"{self.path}: expected {what} under {key}, got {value!r:.60}")
        return value


def open_gguf(path: str | Path) -> GgufFile:
    """Maps the file and reads what stands before the tensors' bytes.

    Raises GgufError where it is no GGUF of a known version, is cut short, or has a tensor of
    impossible size; the message names the file and, where there is one, the tensor.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise GgufError(f"{path}: expected a GGUF file, got: {error}") from None
    try:
        return _Reader(path, content).file()
    except struct.error:
        raise GgufError(
            f"{path}: cut short at {len(content)} bytes, before the end of its header; copy or "
            "download it again"
        ) from None
    except UnicodeDecodeError as error:
        raise GgufError(f"{path}: damaged: a name or text is not UTF-8 ({error.reason})") from None


class _Reader:
    """Walks through the header once."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._at = 0

    def file(self) -> GgufFile:
        if self._content[:4] != b"GGUF":
            raise GgufError(
                f"{self._path}: expected a GGUF file, which begins with GGUF, got "
                f"{self._content[:4]!r}"
            )
        self._at = 4
        version = self._scalar(_U32)
        if version not in VERSIONS:
            raise GgufError(
                f"{self._path}: expected GGUF version 2 or 3, little endian, got {version:#x}; "
                "convert it with a newer converter"
            )
        tensors, entries = self._scalar(_U64), self._scalar(_U64)
        metadata = {}
        for _ in range(entries):
            key = self._text()
            metadata[key] = self._value(self._scalar(_U32), key)
        infos = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise GgufError(f"{self._path}: general.alignment is {alignment!r}; it is damaged")
        base = -(-self._at // alignment) * alignment
        placed = [self._placed(*info, base) for info in infos]
        return GgufFile(
            path=self._path,
            metadata=metadata,
            tensors={info.name: info for info in placed},
            content=self._content,
        )

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        dimensions = self._scalar(_U32)
        if dimensions > 4:
            raise GgufError(f"{self._path}: tensor {name} has {dimensions} dimensions; damaged")
        shape = tuple(self._scalar(_U64) for _ in range(dimensions))
        return name, shape[::-1], self._scalar(_U32), self._scalar(_U64)

    def _placed(
        self, name: str, shape: tuple[int, ...], code: int, offset: int, base: int
    ) -> TensorInfo:
        kind = TYPE_NAMES.get(code, f"type {code}")
        info = TensorInfo(name=name, shape=shape, kind=kind, start=base + offset)
        block = BLOCKS.get(kind)
        # Tensors of other types are refused when, and if, somebody asks for them.
        if block is not None:
            if not shape or shape[-1] % block.values:
                raise GgufError(
                    f"{self._path}: tensor {name} of shape {shape} cannot be {kind}, whose rows "
                    f"are multiples of {block.values}; the file is damaged"
                )
            stop = info.start + math.prod(shape) // block.values * block.bytes
            if stop > len(self._content):
                raise GgufError(
                    f"{self._path}: cut short: tensor {name} ends at byte {stop}, the file has "
                    f"{len(self._content)}; copy or download it again"
                )
        return info

    def _scalar(self, kind: struct.Struct) -> Any:
        (value,) = kind.unpack_from(self._content, self._at)
        self._at += kind.size
        return value

    def _text(self) -> str:
        size = self._scalar(_U64)
        return self._bytes(size).decode("utf-8")

    def _bytes(self, size: int) -> bytes:
        start, stop = self._at, self._at + size
        if stop > len(self._content):
            raise struct.error("beyond the end")
        self._at = stop
        return self._content[start:stop]

    def _value(self, code: int, key: str) -> Any:
        if code in _STRUCTS:
            return self._scalar(_STRUCTS[code])
        if code == _STRING:
            return self._text()
        if code == _ARRAY:
            inner, count = self._scalar(_U32), self._scalar(_U64)
            if inner in _SCALARS:
                dtype = np.dtype(f"<{_SCALARS[inner]}")
                return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)
            if inner == _STRING:
                return [self._text() for _ in range(count)]
        raise GgufError(f"{self._path}: {key} has the unknown type {code}; the file is damaged")
