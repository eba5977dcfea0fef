"""The encoders by name: `retrieval.encoder=NAME`, or a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sspjax.retrieval.bert import BertEncoder, Pretrained
from sspjax.retrieval.encoder import Encoder, EncoderError, EncoderKind, HashedTfidf, read_config


def _from_hub(name: str, published: str) -> Pretrained:
    advice = f"put {published} there, or name the folder that holds it instead of {name}"
    return Pretrained(name=name, advice=advice)


ENCODERS: Mapping[str, EncoderKind] = {
    "tfidf": HashedTfidf,
    "minilm": Pretrained(name="minilm", advice="`python -m sspjax.fetch minilm` makes it"),
    "e5": _from_hub("e5", "intfloat/e5-base-v2"),
    "bge": _from_hub("bge", "BAAI/bge-base-en-v1.5"),
}


def encoder_kind(name: str) -> EncoderKind:
    """The kind of encoder with this name, or in this folder; EncoderError names those there are."""
    if name in ENCODERS:
        return ENCODERS[name]
    if Path(name).is_dir():
        return Pretrained(name=short_name(name), folder=Path(name))
    raise EncoderError(
        f"unknown encoder {name!r}; expected one of: {', '.join(ENCODERS)}, or a model folder"
    )


def short_name(name: str) -> str:
    """What an encoder is called in an index: a folder by its last part, wherever it stands."""
    return Path(name).resolve().name if Path(name).is_dir() else Path(name).name


def load_encoder(folder: str | Path) -> Encoder:
    """The encoder that was saved in an index folder; EncoderError when it cannot be read."""
    folder = Path(folder)
    config = read_config(folder)
    if config.get("family") == "bert":
        return BertEncoder.load(folder)
    return encoder_kind(config["name"]).load(folder)
