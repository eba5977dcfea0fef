"""Which tensor of a model folder is which parameter, and how it lies there.

A parameter of ours stacks the layers and keeps a linear map as inputs then outputs, with the heads
as a dimension; a tensor of theirs is one layer's, outputs before inputs, heads and head_dim in one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from sspjax.models.decoder import NOT_STACKED, parameter_shapes
from sspjax.models.presets import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter's tensors are."""

    template: str
    inputs: int = 0
    """Leading dimensions (after `layers`) that a linear map contracts; 0: nothing is turned."""


_LAYER = "model.layers.{}."

PLACES: Mapping[str, Place] = {
    "embedding": Place("model.embed_tokens.weight"),
    "attention_norm": Place(_LAYER + "input_layernorm.weight"),
    "q": Place(_LAYER + "self_attn.q_proj.weight", inputs=1),
    "q_bias": Place(_LAYER + "self_attn.q_proj.bias"),
    "q_norm": Place(_LAYER + "self_attn.q_norm.weight"),
    "k": Place(_LAYER + "self_attn.k_proj.weight", inputs=1),
    "k_bias": Place(_LAYER + "self_attn.k_proj.bias"),
    "k_norm": Place(_LAYER + "self_attn.k_norm.weight"),
    "v": Place(_LAYER + "self_attn.v_proj.weight", inputs=1),
    "v_bias": Place(_LAYER + "self_attn.v_proj.bias"),
    "o": Place(_LAYER + "self_attn.o_proj.weight", inputs=2),
    "mlp_norm": Place(_LAYER + "post_attention_layernorm.weight"),
    "gate": Place(_LAYER + "mlp.gate_proj.weight", inputs=1),
    "up": Place(_LAYER + "mlp.up_proj.weight", inputs=1),
    "down": Place(_LAYER + "mlp.down_proj.weight", inputs=1),
    "final_norm": Place("model.norm.weight"),
    "head": Place("lm_head.weight", inputs=1),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a folder, and the parameter (of one layer) that it is."""

    name: str
    parameter: str
    layer: int | None
    shape: tuple[int, ...]
    """In the folder."""
    dims: tuple[int, ...]
    """Here, without `layers`."""
    inputs: int


def model_tensors(config: DecoderConfig) -> list[Tensor]:
    """Every tensor of a model, in the order of its computation."""
    shapes = parameter_shapes(config)

    def tensor(parameter: str, layer: int | None) -> Tensor:
        place = PLACES[parameter]
        dims = shapes[parameter][0 if layer is None else 1 :]
        return Tensor(
            name=place.template.format(layer),
            parameter=parameter,
            layer=layer,
            shape=_shape_there(parameter, dims, place.inputs),
            dims=dims,
            inputs=place.inputs,
        )

    present = [name for name in PLACES if name in shapes]
    layered = [name for name in present if name not in NOT_STACKED]
    first, *last = [tensor(name, None) for name in present if name in NOT_STACKED]
    return [
        first,
        *(tensor(name, layer) for layer in range(config.layers) for name in layered),
        *last,
    ]


def _shape_there(parameter: str, dims: Sequence[int], inputs: int) -> tuple[int, ...]:
    if inputs:
        return math.prod(dims[inputs:]), math.prod(dims[:inputs])
    return tuple(dims) if parameter == "embedding" else (math.prod(dims),)
