"""Texts to vectors by a trained encoder of the BERT family: MiniLM, E5, BGE.

A text goes through the program of its length: lengths are rounded up to one of a few buckets, and
each program takes a fixed number of rows, the last of them empty. So few programs are compiled, and
a text's vector has the same bits whatever is encoded beside it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import tokenizers

from sspjax.cache import cache_folder
from sspjax.models.encoder import EncoderConfig, encode
from sspjax.models.encoder_folder import (
    EncoderFolderError,
    encoder_config,
    load_params,
    max_tokens,
    read_json,
)
from sspjax.retrieval.corpus import Corpus
from sspjax.retrieval.encoder import EncoderError
from sspjax.types import Document, Params, noun, record

BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Lengths in tokens that texts are padded to."""
ROWS, TOKENS = 16, 1024
"""Texts of one call, and tokens of all of them (4 texts may have more): a lone query pays for the
whole call, and on CPU larger ones are no faster."""

PREFIXES: Mapping[str, tuple[str, str]] = {
    "e5": ("query: ", "passage: "),
    "bge": ("Represent this sentence for searching relevant passages: ", ""),
}
"""What was written before queries and passages in training (Wang et al. 2022, section 4.2; Xiao et
al. 2023), by what the model is called."""

_SAVED = "encoder"
"""Folder of the encoder's files in an index folder."""
_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
"""Everything that a vector may depend on, where it is there."""


@record
class BertEncoder:
    """A trained encoder on this process's first device."""

    name: str
    """What the run calls it."""
    folder: Path
    network: EncoderConfig
    params: Params
    tokenizer: tokenizers.Tokenizer
    max_tokens: int
    query_prefix: str
    passage_prefix: str
    content_hash: str
    """16 hex digits that change with any file the vectors depend on."""

    @property
    def dimensions(self) -> int:
        return self.network.width

    def config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "family": "bert",
            "pooling": self.network.pooling,
            "max_tokens": self.max_tokens,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "state": self.content_hash,
        }

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        return self._encode([self.query_prefix + query for query in queries])

    def encode_passages(self, documents: Sequence[Document]) -> np.ndarray:
        return self._encode([self.passage_prefix + contents(document) for document in documents])

    def save(self, folder: Path) -> None:
        for name in _FILES:
            if (self.folder / name).is_file():
                target = folder / _SAVED / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / name, target)
        (folder / "encoder.json").write_text(json.dumps(self.config(), indent=2) + "\n")

    @classmethod
    def read(cls, name: str, folder: Path, prefixes: tuple[str, str]) -> Self:
        """The encoder of a model folder. Raises EncoderFolderError where it cannot be read."""
        network = encoder_config(folder)
        longest = max_tokens(folder, network)
        return cls(
            name=name,
            folder=folder,
            network=network,
            params=jax.device_put(load_params(folder, network), jax.local_devices()[0]),
            tokenizer=_tokenizer(folder / "tokenizer.json", network, longest),
            max_tokens=longest,
            query_prefix=prefixes[0],
            passage_prefix=prefixes[1],
            content_hash=_content_hash(folder),
        )

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What `save` wrote to an index folder, which brings its own copy of the model."""
        path = folder / "encoder.json"
        saved = read_json(path)
        try:
            name, prefixes = saved["name"], (saved["query_prefix"], saved["passage_prefix"])
        except (KeyError, TypeError):
            raise EncoderError(
                f"{path}: expected a name and two prefixes, got {saved!r:.80}"
            ) from None
        encoder = cls.read(name, folder / _SAVED, prefixes)
        if encoder.config() != saved:
            raise EncoderError(
                f"{folder / _SAVED}: expected the state {saved.get('state')}, got "
                f"{encoder.content_hash}; a file was changed: copy or build the index again"
            )
        return encoder

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        """f32[texts, dimensions]"""
        ids = [encoded.ids for encoded in self.tokenizer.encode_batch(list(texts))]
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        waiting: dict[int, list[int]] = {}
        for row, own in enumerate(ids):
            bucket = next(size for size in BUCKETS if size >= len(own))
            waiting.setdefault(min(bucket, self.max_tokens), []).append(row)
        for bucket, rows in sorted(waiting.items()):
            size = min(ROWS, max(4, TOKENS // bucket))
            for start in range(0, len(rows), size):
                some = rows[start : start + size]
                vectors[some] = self._call([ids[row] for row in some], size, bucket)
        return vectors

    def _call(self, ids: Sequence[Sequence[int]], size: int, bucket: int) -> np.ndarray:
        """f32[len(ids), dimensions] of at most `size` texts of at most `bucket` tokens."""
        tokens = np.zeros((size, bucket), np.int32)
        length = np.ones(size, np.int32)
        for row, own in enumerate(ids):
            tokens[row, : len(own)] = own
            length[row] = len(own)
        vectors = encode(self.params, tokens, length, config=self.network)
        return np.asarray(vectors)[: len(ids)]


@noun
class Pretrained:
    """An encoder that was trained elsewhere: it fits every corpus."""

    name: str
    folder: Path | None = None
    """None: the folder of this name in the cache."""
    advice: str = ""
    """How to come by the folder."""

    def fit(self, corpus: Corpus) -> BertEncoder:
        """Reads the folder; EncoderError where it is missing, EncoderFolderError where it cannot
        be read.
        """
        folder = self.folder or cache_folder() / self.name
        if not folder.is_dir():
            raise EncoderError(
                f"encoder {self.name}: expected a model folder {folder}, got no such folder; "
                f"{self.advice}"
            )
        return BertEncoder.read(self.name, folder, _prefixes(self.name, folder))

    def load(self, folder: Path) -> BertEncoder:
        return BertEncoder.load(folder)


def contents(document: Document) -> str:
    """A passage as the encoder sees it: the title in quotes on a line of its own, then the text.

    E5's index of Wikipedia 2018 that search agents are trained with is made so.
    """
    return f'"{document.title}"\n{document.text}' if document.title else document.text


def _prefixes(name: str, folder: Path) -> tuple[str, str]:
    """Prefixes that the folder names, or those of the family that it is called by; else none."""
    path = folder / "config_sentence_transformers.json"
    prompts = read_json(path).get("prompts") if path.is_file() else None
    # Newer versions write empty prompts for every model.
    if prompts and any(prompts.values()):
        return prompts.get("query", ""), prompts.get("passage", prompts.get("document", ""))
    called = f"{name} {folder.resolve().name}".lower()
    for family, prefixes in PREFIXES.items():
        if re.search(rf"(?<![a-z0-9]){family}(?![a-z0-9])", called):
            return prefixes
    return "", ""


def _tokenizer(path: Path, network: EncoderConfig, longest: int) -> tokenizers.Tokenizer:
    """The folder's tokenizer, cutting to `longest` tokens and padding nothing."""
    read_json(path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() > network.vocab_size:
        raise EncoderFolderError(
            f"{path}: {tokenizer.get_vocab_size()} entries, but the model has {network.vocab_size} "
            "embeddings; tokenizer and model do not belong together"
        )
    tokenizer.enable_truncation(longest)
    tokenizer.no_padding()
    return tokenizer


def _content_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        if (folder / name).is_file():
            with open(folder / name, "rb") as file:
                digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()[:16]
