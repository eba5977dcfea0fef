"""Every storage type, bit for bit as ggml's own package reads it."""

import gguf
import numpy as np
import pytest

from sspjax.models.gguf.blocks import BLOCKS, TYPE_NAMES, dequantize

SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Bytes of the float16 numbers in a block; elsewhere every bit pattern is a value."""

ROWS, COLUMNS = 48, 768


def random_rows(kind: str) -> np.ndarray:
    """Rows of random blocks: u8[ROWS, bytes of a row]."""
    block, rng = BLOCKS[kind], np.random.default_rng(0)
    if block.values < 256:
        numbers = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
        raw = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind])
        return raw.view(np.uint8).reshape(ROWS, -1)
    raw = rng.integers(0, 256, (ROWS, COLUMNS // block.values, block.bytes), np.uint8)
    for place in SCALES[kind]:
        scale = rng.normal(size=(*raw.shape[:2], 1)).astype(np.float16)
        raw[:, :, place : place + 2] = scale.view(np.uint8)
    return raw.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_those_of_ggml(kind):
    raw = random_rows(kind)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(ROWS, COLUMNS)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 100
    straight = np.full((ROWS, COLUMNS), np.nan, np.float32)
    dequantize(kind, raw, straight, transposed=False)
    np.testing.assert_array_equal(straight, expected)
    turned = np.full((COLUMNS, ROWS), np.nan, np.float32)
    dequantize(kind, raw, turned, transposed=True)
    np.testing.assert_array_equal(turned, expected.T)


def test_sizes_and_names_are_those_of_ggml():
    for kind, block in BLOCKS.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert (block.values, block.bytes) == sizes
    for number, name in TYPE_NAMES.items():
        assert gguf.GGMLQuantizationType(number).name == name


def test_a_block_by_hand():
    """Q4_1: scale 2, offset -1, and the nibbles 0..15 twice over."""
    raw = np.zeros((1, 20), np.uint8)
    raw[0, 0:4] = np.array([2, -1], np.float16).view(np.uint8)
    raw[0, 4:] = [low | (15 - low) << 4 for low in range(16)]
    out = np.zeros((1, 32), np.float32)
    dequantize("Q4_1", raw, out, transposed=False)
    assert out[0].tolist() == [2 * q - 1 for q in [*range(16), *range(15, -1, -1)]]
