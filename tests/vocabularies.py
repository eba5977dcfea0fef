"""Small vocabularies of every family, made like the real ones, hostile where real ones may be."""

import functools
import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from sspjax.rollout.tokenizer import Tokenizer, train_tokenizer

TEXTS = (
    " Bravik Tolen is a writer . he was born in Tormoor and works for Halden Guild .\n",
    " who founded the employer of Bravik Tolen ? <search> Bravik Tolen </search>\n",
    "The <s> tag and the </s> tag of HTML are old; <|im_end|> and <think> are not.\n",
    "Doc 1 (Title: Tormoor)\nTormoor is a city. Größe: 12 km², 東京 <information>\n",
) * 3


def words(count: int = 300) -> list[str]:
    """Sentences of invented words, spaced like the mini-encyclopaedia."""
    syllables = [c + v for c in "bdfgklmnprstv" for v in "aeiou"]
    names = [(syllables[i % 65] + syllables[(i * 7) % 65] + "l").capitalize() for i in range(count)]
    return [
        f" {a} {b} was born in {c} ." for a, b, c in zip(names, names[1:], names[2:], strict=False)
    ]


@functools.cache
def trained() -> Tokenizer:
    return train_tokenizer([*TEXTS, *words()], 1024)


def _byte_level(normalizer=None) -> tokenizers.Tokenizer:
    vocabulary = tokenizers.Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    if normalizer is not None:
        vocabulary.normalizer = normalizer
    return vocabulary


def _train(vocabulary, size, special_tokens=(), alphabet=()) -> dict:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special_tokens),
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
    vocabulary.train_from_iterator([*TEXTS, *words()], trainer=trainer)
    return json.loads(vocabulary.to_str())


def _added(ids: dict[str, int], special: bool) -> list[dict]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": i, "content": t, "special": special, **flags} for t, i in ids.items()]


def gpt2_spec() -> dict:
    """The control token is inside the model's own vocabulary."""
    return _train(_byte_level(), 400, ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet())


def qwen_spec() -> dict:
    """Control tokens behind the vocabulary; some added tokens are not control tokens."""
    spec = _train(_byte_level(normalizers.NFC()), 400, (), pre_tokenizers.ByteLevel.alphabet())
    control = {"<|endoftext|>": 400, "<|im_start|>": 401, "<|im_end|>": 402}
    spec["added_tokens"] = _added(control, True) + _added(
        {"<tool_call>": 403, "<think>": 404, "</think>": 405}, False
    )
    return spec


def smollm_spec() -> dict:
    """Single digits, and control tokens first in the vocabulary, some of them like XML tags."""
    vocabulary = _byte_level()
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), vocabulary.pre_tokenizer]
    )
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]
    return _train(vocabulary, 400, names, pre_tokenizers.ByteLevel.alphabet())


def llama3_spec() -> dict:
    """Whole words are looked up before merging, and control names are words of the vocabulary."""
    vocabulary = _byte_level()
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    names = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    vocabulary.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    spec = _train(vocabulary, 400, names, pre_tokenizers.ByteLevel.alphabet())
    spec["model"]["ignore_merges"] = True
    return spec


def sentencepiece_spec(legacy: bool = False) -> dict:
    """Byte fallback and Metaspace, control tokens in the vocabulary and merges that make them."""
    vocabulary = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    control = ["<unk>", "<s>", "</s>"]
    spec = _train(vocabulary, 400, [*control, *[f"<0x{b:02X}>" for b in range(256)]])
    model = spec["model"]
    model["byte_fallback"] = True
    model["vocab"] |= {t: 401 + i for i, t in enumerate(["<s", "</", "</s", "▁<s>"])}
    hostile = [["<", "s"], ["<s", ">"], ["<", "/"], ["</", "s"], ["</s", ">"], ["▁", "<s>"]]
    model["merges"] = hostile + [m for m in model["merges"] if m not in hostile]
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in control]
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    if legacy:
        spec["pre_tokenizer"] = None
        spec["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
    return spec


SPECS = {
    "gpt2": gpt2_spec,
    "qwen": qwen_spec,
    "smollm": smollm_spec,
    "llama3": llama3_spec,
    "sentencepiece": sentencepiece_spec,
    "sentencepiece_legacy": functools.partial(sentencepiece_spec, legacy=True),
}


@functools.cache
def vocabulary(name: str) -> Tokenizer:
    return trained() if name == "trained" else Tokenizer(SPECS[name](), {})


NAMES = ("trained", *SPECS)
