"""A model by its place: a Hugging Face folder, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sspjax.mesh import Layout
from sspjax.models.gguf import load as gguf
from sspjax.models.gguf.load import decoder_config_from_gguf
from sspjax.models.hugging_face import load as hugging_face
from sspjax.models.hugging_face.config import decoder_config_from_hf
from sspjax.models.presets import DecoderConfig
from sspjax.types import Params


def decoder_config_of(weights: str | Path) -> DecoderConfig:
    """The shape of the model. Raises ModelFolderError or GgufError where it cannot be read."""
    if is_gguf(weights):
        return decoder_config_from_gguf(weights)
    return decoder_config_from_hf(weights)


def load_params(
    weights: str | Path,
    config: DecoderConfig,
    layout: Layout,
    dtype: Any,
    *,
    check_finite: bool = False,
) -> Params:
    """The model's parameters, sharded as `parameter_shardings` says, each in `dtype`.

    Raises ModelFolderError or GgufError where tensors are missing, misshaped or damaged.
    """
    load = gguf.load_params if is_gguf(weights) else hugging_face.load_params
    return load(weights, config, layout, dtype, check_finite=check_finite)


def is_gguf(weights: str | Path) -> bool:
    return Path(weights).suffix == ".gguf"
