"""A GGUF file's byte-level BPE vocabulary, as the files that a Hugging Face folder would have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from sspjax.models.gguf.file import GgufError, GgufFile, open_gguf

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Types of tokens: control tokens are special, user-defined ones only added."""

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _words(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "smollm": _single_digits,
    "qwen2": lambda: _words(_QWEN2),
    "llama-bpe": lambda: _words(_LLAMA3),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}
"""Pieces that merges never cross, by `tokenizer.ggml.pre`."""

NORMALIZED = ("qwen2",)
"""Those whose text is put into Unicode's composed form first."""

WHOLE_WORDS = ("llama-bpe",)
"""Those that look a whole piece up before they merge."""

_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}


def tokenizer_from_gguf(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of `tokenizer.json` and `tokenizer_config.json`, the chat template in the latter.

    Raises GgufError for other vocabularies than byte-level BPE, for a way of splitting text that is
    not one of `PRE_TOKENIZERS`, and for lists that do not belong together.
    """
    file = open_gguf(path)
    _check_kind(file)
    tokens = _texts(file, "tokenizer.ggml.tokens")
    kinds = [int(kind) for kind in file.metadata.get("tokenizer.ggml.token_type", ())]
    if len(kinds) != len(tokens):
        raise GgufError(
            f"{file.path}: expected a type for each of {len(tokens)} tokens, got {len(kinds)}"
        )
    named = {name: _named(file, key, tokens) for name, key in _NAMED.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, token in named.items() if token is not None},
    }
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = file.text("tokenizer.chat_template")
    return _spec(file, tokens, kinds, named["bos_token"]), config


def _check_kind(file: GgufFile) -> None:
    kind = file.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise GgufError(
            f"{file.path}: expected a byte-level BPE vocabulary (tokenizer.ggml.model gpt2), got "
            f"{kind!r}: set model.tokenizer to a folder with the model's tokenizer.json"
        )
    split = file.text("tokenizer.ggml.pre")
    if split not in PRE_TOKENIZERS:
        raise GgufError(
            f"{file.path}: expected tokenizer.ggml.pre to be one of {', '.join(PRE_TOKENIZERS)}, "
            f"got {split!r}: set model.tokenizer to a folder with the model's tokenizer.json"
        )


def _texts(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise GgufError(f"{file.path}: expected a list of texts under {key}, got {value!r:.60}")
    return value


def _named(file: GgufFile, key: str, tokens: list[str]) -> str | None:
    if key not in file.metadata:
        return None
    number = file.integer(key)
    if not 0 <= number < len(tokens):
        raise GgufError(f"{file.path}: {key} is {number}, but there are {len(tokens)} tokens")
    return tokens[number]


def _spec(file: GgufFile, tokens: list[str], kinds: list[int], bos: str | None) -> dict[str, Any]:
    split = file.text("tokenizer.ggml.pre")
    merges = [merge.split(" ") for merge in _texts(file, "tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    strange = [m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= vocab.keys()]
    if strange:
        raise GgufError(
            f"{file.path}: {len(strange)} merges are not of two tokens that make a third, such as "
            f"{strange[0]}: the vocabulary is damaged"
        )
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = PRE_TOKENIZERS[split]()
    built.decoder = decoders.ByteLevel()
    if split in NORMALIZED:
        built.normalizer = normalizers.NFC()
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", False):
        built.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    spec = json.loads(built.to_str())
    spec["added_tokens"] = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[i] == _CONTROL,
        }
        for i, token in enumerate(tokens)
        if kinds[i] in (_CONTROL, _USER_DEFINED)
    ]
    ignore_merges = split in WHOLE_WORDS
    spec["model"] |= {"vocab": vocab, "merges": merges, "ignore_merges": ignore_merges}
    return spec
