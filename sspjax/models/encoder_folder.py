"""An encoder's folder, as sentence-transformers or transformers save it: its shape and parameters.

What the files say about the maths is understood or refused by name: an encoder that is nearly the
one in the folder would find nearly the right passages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from sspjax.errors import UserError
from sspjax.models.encoder import NOT_STACKED, EncoderConfig, Pooling, init_params
from sspjax.types import Params, noun

WEIGHTS = "model.safetensors"

_FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("bert",),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
}
"""Fields of config.json that change the maths, and the values of the maths we do."""

_MODULES = ("Transformer", "Pooling", "Normalize")
"""Parts of a sentence-transformers pipeline that are understood."""


class EncoderFolderError(UserError, ValueError):
    """An encoder's folder that cannot be read, or asks for another network."""


@noun
class Stored:
    """How a parameter's tensor is called and lies in the file."""

    name: str
    """With {} for the layer."""
    inputs: int = 0
    """A linear map's leading axes that are inputs; the file has (outputs, inputs). 0: as here."""


_LAYER = "encoder.layer.{}."

STORED: Mapping[str, Stored] = {
    "words": Stored(name="embeddings.word_embeddings.weight"),
    "places": Stored(name="embeddings.position_embeddings.weight"),
    "types": Stored(name="embeddings.token_type_embeddings.weight"),
    "norm": Stored(name="embeddings.LayerNorm.weight"),
    "norm_bias": Stored(name="embeddings.LayerNorm.bias"),
    "q": Stored(name=_LAYER + "attention.self.query.weight", inputs=1),
    "q_bias": Stored(name=_LAYER + "attention.self.query.bias"),
    "k": Stored(name=_LAYER + "attention.self.key.weight", inputs=1),
    "k_bias": Stored(name=_LAYER + "attention.self.key.bias"),
    "v": Stored(name=_LAYER + "attention.self.value.weight", inputs=1),
    "v_bias": Stored(name=_LAYER + "attention.self.value.bias"),
    "o": Stored(name=_LAYER + "attention.output.dense.weight", inputs=2),
    "o_bias": Stored(name=_LAYER + "attention.output.dense.bias"),
    "attention_norm": Stored(name=_LAYER + "attention.output.LayerNorm.weight"),
    "attention_norm_bias": Stored(name=_LAYER + "attention.output.LayerNorm.bias"),
    "up": Stored(name=_LAYER + "intermediate.dense.weight", inputs=1),
    "up_bias": Stored(name=_LAYER + "intermediate.dense.bias"),
    "down": Stored(name=_LAYER + "output.dense.weight", inputs=1),
    "down_bias": Stored(name=_LAYER + "output.dense.bias"),
    "mlp_norm": Stored(name=_LAYER + "output.LayerNorm.weight"),
    "mlp_norm_bias": Stored(name=_LAYER + "output.LayerNorm.bias"),
}

_UNUSED = ("pooler.", "cls.", "embeddings.position_ids")
"""Beginnings of tensors that a sentence's vector does not depend on."""


def encoder_config(folder: str | Path) -> EncoderConfig:
    """The encoder in a folder: config.json, and the pooling that sentence-transformers recorded.

    Without such a record the pooling is the mean. Raises EncoderFolderError for another network or
    pooling, naming file and field.
    """
    folder = Path(folder)
    path = folder / "config.json"
    c = read_json(path)
    for name, allowed in _FIXED.items():
        if c.get(name) not in allowed:
            raise EncoderFolderError(
                f"{path}: {name}={c.get(name)!r} is not supported, expected {allowed[0]!r}"
            )
    return EncoderConfig(
        vocab_size=_whole(path, c, "vocab_size"),
        positions=_whole(path, c, "max_position_embeddings"),
        types=_whole(path, c, "type_vocab_size"),
        layers=_whole(path, c, "num_hidden_layers"),
        width=_whole(path, c, "hidden_size"),
        mlp=_whole(path, c, "intermediate_size"),
        heads=_whole(path, c, "num_attention_heads"),
        norm_eps=float(c.get("layer_norm_eps", 1e-12)),
        pooling=_pooling(folder),
    )


def load_params(folder: str | Path, config: EncoderConfig) -> Params:
    """The folder's parameters in float32, on the host.

    Raises EncoderFolderError where the file is missing or cut off, and where tensors are missing or
    of another shape (all of them in one message).
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise EncoderFolderError(
            f"expected {WEIGHTS} in {folder}, got no such file; where there is a .bin file, which "
            "is a pickle, write the folder again with transformers' save_pretrained"
        )
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            return _read(path, file, config)
    except SafetensorError as error:
        raise EncoderFolderError(f"{path}: {error}; fetch the file again") from None


def max_tokens(folder: str | Path, config: EncoderConfig) -> int:
    """Tokens of a text beyond which it is cut: what sentence-transformers recorded, or 512."""
    path = Path(folder) / "sentence_bert_config.json"
    recorded = read_json(path).get("max_seq_length") if path.is_file() else None
    return min(recorded or 512, config.positions)


def read_json(path: Path) -> Any:
    """Content of a JSON file; EncoderFolderError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EncoderFolderError(
            f"{path}: cannot be read ({error}); give a folder as sentence-transformers or "
            "transformers save it"
        ) from None


def _whole(path: Path, c: Mapping[str, Any], name: str) -> int:
    value = c.get(name)
    if type(value) is not int or value < 1:
        raise EncoderFolderError(f"{path}: {name}={value!r}: expected a positive whole number")
    return value


def _pooling(folder: Path) -> Pooling:
    modules = folder / "modules.json"
    if not modules.is_file():
        return "mean"
    parts = {module["type"].rpartition(".")[2]: module["path"] for module in read_json(modules)}
    strange = [name for name in parts if name not in _MODULES]
    if strange:
        raise EncoderFolderError(
            f"{modules}: {strange[0]} is not supported, expected {', '.join(_MODULES)}"
        )
    if "Pooling" not in parts:
        return "mean"
    path = folder / parts["Pooling"] / "config.json"
    c = read_json(path)
    chosen = [name for name, on in c.items() if name.startswith("pooling_mode_") and on is True]
    known: Mapping[str, Pooling] = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
    }
    if len(chosen) != 1 or chosen[0] not in known:
        raise EncoderFolderError(
            f"{path}: {' and '.join(chosen) or 'no pooling'} is not supported, expected one of "
            f"{', '.join(known)}"
        )
    return known[chosen[0]]


def _read(path: Path, file: Any, config: EncoderConfig) -> Params:
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    names = set(file.keys())
    # A model with a head on top keeps the encoder under a name of its own.
    prefix = "bert." if f"bert.{STORED['words'].name}" in names else ""
    wrong: list[str] = []
    read: set[str] = set()

    def tensor(stored: Stored, layer: int, shape: tuple[int, ...]) -> np.ndarray:
        """In the shape it has here; zeros where something is wrong with it."""
        name = prefix + stored.name.format(layer)
        read.add(name)
        inputs = int(np.prod(shape[: stored.inputs]))
        there = (int(np.prod(shape)) // inputs, inputs) if stored.inputs else None
        if name not in names:
            wrong.append(f"{name} is missing")
            return np.zeros(shape, np.float32)
        value = file.get_tensor(name)
        if there is not None and value.shape == there:
            value = value.T
        elif there is not None or value.size != np.prod(shape):
            wrong.append(f"{name}: expected shape {there or shape}, got {value.shape}")
            return np.zeros(shape, np.float32)
        return value.astype(np.float32).reshape(shape)

    params = {}
    for name, x in shapes.items():
        if name in NOT_STACKED:
            params[name] = tensor(STORED[name], 0, x.shape)
        else:
            layers = (tensor(STORED[name], i, x.shape[1:]) for i in range(config.layers))
            params[name] = np.stack(list(layers))
    wrong += [
        f"{name} is not part of the encoder"
        for name in sorted(names - read)
        if not name.removeprefix(prefix).startswith(_UNUSED)
    ]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise EncoderFolderError(
            f"{path}: not the tensors that config.json asks for: {'; '.join(wrong[:8])}{more}"
        )
    return params
