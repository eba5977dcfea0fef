"""Storage types of GGUF tensors, and their values in float32.

A row is stored in blocks of 32 or 256 values: integers of a few bits, and for each block (or part
of one) a scale and sometimes an offset. Every reader gets the bytes with the place within a block
as the first axis, u8[bytes, ...], and fills f32[values, ...]; the remaining axes, and how they lie
in memory, are the caller's. So a matrix comes out transposed at no cost.

The layouts are those of ggml; a value is computed in float32, in the order scale * integer, then
offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from sspjax.types import noun

Reader = Callable[[np.ndarray, np.ndarray], None]


@noun
class Block:
    """A storage type: how many values one block holds, in how many bytes, and how to read it."""

    values: int
    bytes: int
    read: Reader


def dequantize(kind: str, raw: np.ndarray, out: np.ndarray, *, transposed: bool) -> None:
    """Fills `out` with the values of `raw` u8[rows, bytes of a row].

    `out` is f32[rows, columns], or f32[columns, rows] where `transposed`.
    """
    block = BLOCKS[kind]
    rows = raw.shape[0]
    if transposed:
        # Rows lie side by side, so that every operation runs along them.
        stored = np.ascontiguousarray(raw.T).reshape(-1, block.bytes, rows)
        filled = out.reshape(-1, block.values, rows)
        step = max(1, 32 // block.values)
    else:
        stored = raw.reshape(rows, -1, block.bytes).swapaxes(1, 2)
        filled = out.reshape(rows, -1, block.values).swapaxes(1, 2)
        step = max(1, _AT_ONCE // out.shape[1])
    # A damaged file's scales need not be finite; that is for the caller to find.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(stored), step):
            # The place within a block comes first, the axis that is walked along after it.
            source, target = stored[start : start + step], filled[start : start + step]
            block.read(source.swapaxes(0, 1), target.swapaxes(0, 1))


_AT_ONCE = 1 << 17
"""Values read at a time, so that what is left over in between stays in the processor's cache."""


def _f32(b: np.ndarray, out: np.ndarray) -> None:
    out[...] = _words(b, np.uint32).view(np.float32)


def _f16(b: np.ndarray, out: np.ndarray) -> None:
    out[...] = _words(b, np.uint16).view(np.float16)


def _bf16(b: np.ndarray, out: np.ndarray) -> None:
    out[...] = (_words(b, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b[2:], out)
    out -= np.float32(8)
    out *= _half(b[0:2])


def _q4_1(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b[4:], out)
    out *= _half(b[0:2])
    out += _half(b[2:4])


def _q5_0(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b[6:], out)
    out += _fifth_bits(b[2:6])
    out -= np.float32(16)
    out *= _half(b[0:2])


def _q5_1(b: np.ndarray, out: np.ndarray) -> None:
    _nibbles(b[8:], out)
    out += _fifth_bits(b[4:8])
    out *= _half(b[0:2])
    out += _half(b[2:4])


def _q8_0(b: np.ndarray, out: np.ndarray) -> None:
    np.multiply(b[2:].view(np.int8), _half(b[0:2]), out=out)


def _q4_k(b: np.ndarray, out: np.ndarray) -> None:
    for part, scale, least in _scaled_parts(b, out):
        half = b[16 + part // 2 * 32 :][:32]
        values = out[part * 32 :][:32]
        np.multiply(half >> 4 if part % 2 else half & 15, scale, out=values)
        values -= least


def _q5_k(b: np.ndarray, out: np.ndarray) -> None:
    for part, scale, least in _scaled_parts(b, out):
        half = b[48 + part // 2 * 32 :][:32]
        fifth = (b[16:48] >> part & 1) << 4
        values = out[part * 32 :][:32]
        np.multiply((half >> 4 if part % 2 else half & 15) | fifth, scale, out=values)
        values -= least


def _q6_k(b: np.ndarray, out: np.ndarray) -> None:
    whole = _half(b[208:210])
    for part in range(8):
        side, quarter = divmod(part, 4)
        low = b[side * 64 + quarter % 2 * 32 :][:32]
        low = low >> 4 if quarter >= 2 else low & 15
        high = b[128 + side * 32 :][:32] >> 2 * quarter & 3
        values = (low | high << 4).view(np.int8) - np.int8(32)
        for half in range(2):
            scale = b[192 + side * 8 + quarter * 2 + half].view(np.int8).astype(np.float32)
            at = part * 32 + half * 16
            np.multiply(values[half * 16 :][:16], whole * scale, out=out[at : at + 16])


BLOCKS: Mapping[str, Block] = {
    "F32": Block(values=1, bytes=4, read=_f32),
    "F16": Block(values=1, bytes=2, read=_f16),
    "BF16": Block(values=1, bytes=2, read=_bf16),
    "Q4_0": Block(values=32, bytes=18, read=_q4_0),
    "Q4_1": Block(values=32, bytes=20, read=_q4_1),
    "Q5_0": Block(values=32, bytes=22, read=_q5_0),
    "Q5_1": Block(values=32, bytes=24, read=_q5_1),
    "Q8_0": Block(values=32, bytes=34, read=_q8_0),
    "Q4_K": Block(values=256, bytes=144, read=_q4_k),
    "Q5_K": Block(values=256, bytes=176, read=_q5_k),
    "Q6_K": Block(values=256, bytes=210, read=_q6_k),
}
"""What can be read, by name."""

TYPE_NAMES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    30: "BF16",
}
"""Names of the numbers that files carry, those that cannot be read included."""


def _words(b: np.ndarray, dtype: type[np.unsignedinteger]) -> np.ndarray:
    """Little-endian integers [1, ...] of u8[bytes, ...]."""
    word = b[:1].astype(dtype)
    for place in range(1, len(b)):
        word |= b[place : place + 1].astype(dtype) << dtype(8 * place)
    return word


def _half(b: np.ndarray) -> np.ndarray:
    """f32[1, ...] of a float16."""
    return _words(b, np.uint16).view(np.float16).astype(np.float32)


def _nibbles(b: np.ndarray, out: np.ndarray) -> None:
    """The low halves of 16 bytes, then the high ones."""
    np.bitwise_and(b, 15, out=out[:16], casting="unsafe")
    np.right_shift(b, 4, out=out[16:], casting="unsafe")


def _fifth_bits(b: np.ndarray) -> np.ndarray:
    """Bit i of a 32-bit word as 0 or 16: u8[32, ...]."""
    word = _words(b, np.uint32)
    places = np.arange(32, dtype=np.uint32).reshape(-1, *[1] * (b.ndim - 1))
    return ((word >> places & 1) << 4).astype(np.uint8)


def _scaled_parts(b: np.ndarray, out: np.ndarray):
    """The eight parts of a 256-block: number, scale and offset, each f32[...].

    Scales and offsets are 6-bit integers in 12 bytes: the first four of each in the low bits of
    bytes 0-3 and 4-7; of the others, four bits in bytes 8-11 and two on top of bytes 0-7.
    """
    scale, least, packed = _half(b[0:2])[0], _half(b[2:4])[0], b[4:16]
    for part in range(8):
        if part < 4:
            s, m = packed[part] & 63, packed[part + 4] & 63
        else:
            s = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
            m = packed[part + 4] >> 4 | packed[part] >> 6 << 4
        yield part, scale * s.astype(np.float32), least * m.astype(np.float32)
