"""Weights of small real models, where somebody has fetched them."""

import functools
import pathlib

import pytest

from sspjax.cache import cache_folder
from sspjax.fetch import SOURCES, is_fetched

_fetched = functools.cache(is_fetched)


def fetched(name: str) -> pathlib.Path:
    """Folder of a model that `python -m sspjax.fetch` knows; skips the test where it is missing."""
    folder = cache_folder() / name
    if not _fetched(SOURCES[name], folder):
        pytest.skip(f"{name} is not in the cache: python -m sspjax.fetch {name}")
    return folder


def smollm2() -> pathlib.Path:
    return fetched("smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
