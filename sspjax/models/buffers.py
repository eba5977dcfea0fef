"""Host memory that becomes a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_ALIGNMENT = 64
"""XLA's CPU client takes over a buffer that starts at a multiple of this, and copies any other."""


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An empty array that devices of this host can take over as it is."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
