"""Text to token ids and back, with a wall between text and control tokens.

`Tokenizer.encode` sees plain text only: a control token's name that occurs in a passage, a question
or an answer becomes ordinary tokens, never the control token. The wall is built, not checked for:
encoding uses a second vocabulary from which every control token and every merge that would make one
is gone. Control tokens enter a sequence through `Tokenizer.special` alone, which the prompt layouts
call.

Differences from `transformers`: no space is put before a text, nothing is put around it, and
characters that the vocabulary cannot spell are left out. So for a byte-level vocabulary (or one
with byte fallback) without a normaliser, `decode(encode(text)) == text`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from sspjax.errors import UserError
from sspjax.models.gguf.vocabulary import tokenizer_from_gguf

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

END_NAMES = (ENDOFTEXT, IM_END, "<|eot_id|>", "<|end_of_text|>", "</s>")
"""Control tokens that end a text or a message; an unnamed eos is looked for in this order."""

_START_NAMES = (IM_START, "<|start_header_id|>")
"""Control tokens that start the next message: a model that writes one has ended its own."""

_WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pieces that merges never cross: a word and the space before it, one digit, marks, blanks."""

_MEMO = 1 << 14
"""Texts whose ids are remembered: passages come back step after step."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_CONFIG_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(UserError, ValueError):
    """A vocabulary that cannot be read, or that cannot do what is asked of it."""


class Tokenizer:
    """A byte-level or SentencePiece-style BPE vocabulary. Nothing in it changes after it is made.

    `spec` is the content of a `tokenizer.json`, `config` that of a `tokenizer_config.json` (it may
    be empty). Raises TokenizerError for other kinds of vocabularies and where no eos is found.
    """

    specials: Mapping[str, int]
    """Control tokens and other added tokens by name."""
    special_ids: frozenset[int]
    """Ids that `encode` never gives."""
    eos_id: int
    pad_id: int
    """eos where the vocabulary names none."""
    end_ids: tuple[int, ...]
    """Ids after which a model has nothing more to say: eos first, then every other control token
    that ends a text or a message, or starts the next one."""
    opening_ids: tuple[int, ...]
    """What the vocabulary itself puts before a text (Llama's beginning-of-text); often empty."""
    vocab_size: int
    """Size of the id space: the highest id plus one."""
    token_bytes: tuple[bytes, ...]
    """What each id stands for; b"" for control tokens and for ids without a token."""
    content_hash: str
    """16 hex digits that change with the vocabulary, eos or pad."""

    def __init__(self, spec: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        byte_level = _is_byte_level(spec)
        added = _added_tokens(spec, config)
        ids = {**spec["model"]["vocab"], **{name: token["id"] for name, token in added.items()}}
        self._spec, self._config = spec, config
        self.specials = types.MappingProxyType({name: t["id"] for name, t in added.items()})
        self.special_ids = frozenset(self.specials.values())
        self.eos_id = self._end_of_sequence()
        pad = _name(config, "pad_token")
        self.pad_id = self.specials[pad] if pad else self.eos_id
        others = (self.specials[n] for n in END_NAMES + _START_NAMES if n in self.specials)
        self.end_ids = tuple(dict.fromkeys((self.eos_id, *others)))
        self.vocab_size = max(ids.values()) + 1
        self.token_bytes = _token_bytes(ids, added, self.vocab_size, byte_level)
        self.opening_ids = _opening_ids(spec, self.special_ids)
        identity = json.dumps([spec, self.eos_id, self.pad_id], sort_keys=True)
        self.content_hash = hashlib.sha256(identity.encode()).hexdigest()[:16]
        plain = tokenizers.Tokenizer.from_str(json.dumps(_plain(spec, self.specials)))
        self._encode = functools.lru_cache(_MEMO)(functools.partial(_plain_ids, plain))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. No id of `special_ids` comes out, whatever the text says."""
        return list(self._encode(text))

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """What each id stands for; b"" for control tokens, and for ids past the vocabulary (padding
        of a model's embedding).
        """
        table, size = self.token_bytes, self.vocab_size
        return [table[i] if 0 <= i < size else b"" for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, all `pieces` together. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.pieces(ids)).decode("utf-8", "replace")

    def special(self, name: str) -> int:
        """Id of a control token, for layouts. Raises TokenizerError when there is none."""
        if name not in self.specials:
            raise TokenizerError(
                f"expected a control token {name!r}, got a vocabulary with "
                f"{', '.join(self.specials) or 'none'}: choose a prompt set whose layout fits it"
            )
        return self.specials[name]

    def save(self, folder: str | Path) -> None:
        """Writes a folder that `load_tokenizer` and transformers' fast tokenizers read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._config,
            "eos_token": _name_of(self.specials, self.eos_id),
            "pad_token": _name_of(self.specials, self.pad_id),
        }
        for name, content in (("tokenizer.json", self._spec), ("tokenizer_config.json", config)):
            text = json.dumps(content, ensure_ascii=False, indent=1)
            (folder / name).write_text(text, encoding="utf-8")

    def _end_of_sequence(self) -> int:
        named = _name(self._config, "eos_token")
        for name in (named,) if named else END_NAMES:
            if name in self.specials:
                return self.specials[name]
        raise TokenizerError(
            f"expected an end-of-sequence token, got none of {', '.join(END_NAMES)}: "
            'put {"eos_token": "..."} into tokenizer_config.json beside tokenizer.json'
        )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a folder or a `tokenizer.json`; `tokenizer_config.json` beside it names eos and pad.
    Or a `.gguf` file, which holds both.

    Raises TokenizerError when the file is missing, not JSON, or holds another kind of vocabulary,
    GgufError where a `.gguf` file does.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return Tokenizer(*tokenizer_from_gguf(path))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(
            f"expected a tokenizer.json at {file}, got no such file: give a folder that holds one "
            "(transformers' save_pretrained of a fast tokenizer writes it)"
        )
    config_file = file.with_name("tokenizer_config.json")
    template_file = file.with_name("chat_template.jinja")
    config = _read_json(config_file) if config_file.is_file() else {}
    if template_file.is_file():
        config["chat_template"] = template_file.read_text(encoding="utf-8")
    spec = _read_json(file)
    if "vocab" not in spec.get("model", {}):
        raise TokenizerError(f"expected the fields of a tokenizer.json in {file}, got {list(spec)}")
    return Tokenizer(spec, config)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, whole: Sequence[str] = ()
) -> Tokenizer:
    """A byte-level BPE with exactly `vocab_size` entries; the same texts give the same vocabulary.

    All 256 bytes are in it, so any text can be spelled. Control tokens are `<|endoftext|>` (eos and
    pad), `<|im_start|>` and `<|im_end|>`; where the texts give too few merges, the rest are control
    tokens that nothing produces. A word and the space before it are one piece, and so is each text
    of `whole` (tags, say): one token where the texts hold it often enough, ordinary text all the
    same, which can be spelled in several tokens too.
    Raises TokenizerError unless `vocab_size` is a multiple of 128 (rows of an embedding divide well
    over devices) of at least 384.
    """
    if vocab_size % 128 or vocab_size < 384:
        raise TokenizerError(
            "expected vocab_size to be a multiple of 128 and at least 384 (256 bytes and 3 control "
            f"tokens), got {vocab_size}: set model.vocab_size"
        )
    control = [ENDOFTEXT, IM_START, IM_END]
    pieces = "|".join([*(f" ?{re.escape(text)}" for text in whole), _WORDS])
    vocabulary = tokenizers.Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary.train_from_iterator(texts, trainer=trainer)
    missing = vocab_size - vocabulary.get_vocab_size()
    vocabulary.add_special_tokens([f"<|unused_{i}|>" for i in range(missing)])
    return Tokenizer(json.loads(vocabulary.to_str()), {"eos_token": ENDOFTEXT})


def _plain_ids(plain: tokenizers.Tokenizer, text: str) -> tuple[int, ...]:
    # A lone surrogate, which JSON can carry, is no text: it is replaced as a decoder would.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return tuple(plain.encode(text, add_special_tokens=False).ids)


def _plain(spec: Mapping[str, Any], specials: Mapping[str, int]) -> dict[str, Any]:
    """The vocabulary without its control tokens, without what makes them, and without additions."""
    model = spec["model"]
    vocab = {token: i for token, i in model["vocab"].items() if token not in specials}
    # Older files write a merge as "left right".
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    merges = [[a, b] for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
    return {
        **spec,
        "model": {**model, "vocab": vocab, "merges": merges, "unk_token": None, "dropout": None},
        "added_tokens": [],
        "normalizer": _without_prefix(spec.get("normalizer")),
        "pre_tokenizer": _without_prefix(spec.get("pre_tokenizer")),
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


_NO_PREFIX = {"add_prefix_space": False, "prepend_scheme": "never"}


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normaliser or pre-tokeniser that puts no space before a text (None: nothing is left)."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        return {**part, key: [p for inner in part[key] if (p := _without_prefix(inner))]}
    return {**part, **{k: v for k, v in _NO_PREFIX.items() if k in part}}


def _added_tokens(spec: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Added tokens and the tokens that the config names, by content: {"id", "special"}."""
    listed = [*spec.get("added_tokens", [])]
    listed += [{**t, "id": int(i)} for i, t in config.get("added_tokens_decoder", {}).items()]
    found = {t["content"]: {"id": t["id"], "special": t.get("special", False)} for t in listed}
    named = [_name(config, key) for key in _CONFIG_NAMES] + [spec["model"].get("unk_token")]
    for name in filter(None, named):
        token_id = found.get(name, {}).get("id", spec["model"]["vocab"].get(name))
        if token_id is None:
            raise TokenizerError(
                f"expected the control token {name!r} in the vocabulary, got no such entry: "
                "tokenizer_config.json and tokenizer.json do not belong together"
            )
        found[name] = {"id": token_id, "special": True}
    return found


def _name(config: Mapping[str, Any], key: str) -> str | None:
    """A token named by a config, which writes it as text or as {"content": text}."""
    value = config.get(key)
    return value["content"] if isinstance(value, dict) else value


def _name_of(ids: Mapping[str, int], token_id: int) -> str:
    return next(name for name, i in ids.items() if i == token_id)


def _opening_ids(spec: Mapping[str, Any], special_ids: frozenset[int]) -> tuple[int, ...]:
    if not spec.get("post_processor"):
        return ()
    around = tokenizers.Tokenizer.from_str(json.dumps(spec)).encode("a").ids
    opening = []
    for token_id in around:
        if token_id not in special_ids:
            break
        opening.append(token_id)
    return tuple(opening)


# What a token stands for --------------------------------------------------------------------------


def _token_bytes(
    ids: Mapping[str, int], added: Mapping[str, Mapping[str, Any]], size: int, byte_level: bool
) -> tuple[bytes, ...]:
    """Bytes of every id. Added tokens that are not control tokens (`<think>` of some models) are
    text when they are sampled, though text never becomes one of them.
    """
    spelled = _byte_level_bytes if byte_level else _sentence_piece_bytes
    table = [b""] * size
    for token, token_id in ids.items():
        if token not in added:
            table[token_id] = spelled(token)
        elif not added[token]["special"]:
            table[token_id] = token.encode()
    return tuple(table)


def _byte_level_bytes(token: str) -> bytes:
    byte_of = _byte_of()
    if any(character not in byte_of for character in token):
        return token.encode()
    return bytes(byte_of[character] for character in token)


def _sentence_piece_bytes(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


@functools.cache
def _byte_of() -> Mapping[str, int]:
    """Inverse of GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the other 68
    are numbered from U+0100 in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    """Byte-level or SentencePiece-style; raises TokenizerError where it is neither."""
    model = spec["model"]
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix"):
        raise TokenizerError(
            f"expected a BPE vocabulary without subword prefix, got {model.get('type')}: the "
            "language models of the supported families (Qwen, Llama, SmolLM) have one"
        )
    kinds = set(_kinds([spec.get("pre_tokenizer"), spec.get("normalizer"), spec.get("decoder")]))
    if "ByteLevel" in kinds:
        return True
    if "Metaspace" in kinds or spec["model"].get("byte_fallback", False):
        return False
    raise TokenizerError(
        "expected a byte-level or SentencePiece-style vocabulary, got one with "
        f"{', '.join(sorted(kinds)) or 'no pre-tokeniser'}: its tokens cannot be turned into bytes"
    )


def _kinds(parts: Sequence[dict[str, Any] | None]) -> Iterator[str]:
    """Types of all components, those inside sequences included."""
    for part in filter(None, parts):
        yield part["type"]
        for key in ("normalizers", "pretokenizers", "decoders"):
            yield from _kinds(part.get(key, []))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"expected JSON in {file}, got: {error}") from error
