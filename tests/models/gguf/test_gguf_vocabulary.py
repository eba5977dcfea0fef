"""Tokenizers rebuilt from metadata: the same ids as from the files they were converted from."""

import gzip
import json
import os
import pathlib

import numpy as np
import pytest
import tokenizers
from gguf_files import Tiny, metadata, write
from hypothesis import given, settings
from hypothesis import strategies as st
from real_models import smollm2
from vocabularies import TEXTS, qwen_spec

from sspjax.models.gguf.file import GgufError
from sspjax.models.gguf.vocabulary import tokenizer_from_gguf
from sspjax.rollout.tokenizer import Tokenizer, load_tokenizer

PRE = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
    "qwen2": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
                r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


def folder_spec(pre: str) -> dict:
    """The `tokenizer.json` that a model with this way of splitting would have."""
    spec = qwen_spec()
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": PRE[pre]}
    if pre != "qwen2":
        spec["normalizer"] = None
    return spec


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("pre", PRE)
def test_the_same_ids_as_from_the_folder(path, pre):
    spec = folder_spec(pre)
    write(path, Tiny(), {}, metadata=metadata(spec, pre))
    ours = load_tokenizer(path)
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    theirs = Tokenizer(spec, config)
    shipped = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_from_gguf(path)[0]))
    original = tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert ours.specials == theirs.specials and ours.token_bytes == theirs.token_bytes
    assert (ours.eos_id, ours.pad_id, ours.end_ids) == (
        theirs.eos_id,
        theirs.pad_id,
        theirs.end_ids,
    )
    pieces = st.sampled_from(["\n", "\n\n1", "a  12", "1999", "'s", " Größe", "<think>", "é"])

    @settings(max_examples=80, deadline=None, database=None)
    @given(st.lists(st.one_of(pieces, st.sampled_from(TEXTS), st.text(max_size=6)), max_size=6))
    def check(parts):
        text = "".join(parts)
        assert ours.encode(text) == theirs.encode(text)
        assert shipped.encode(text).ids == original.encode(text).ids

    check()


def test_what_belongs_to_the_vocabulary_is_kept(path, tmp_path):
    write(path, Tiny(), {}, metadata=metadata(folder_spec("smollm"), "smollm"))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.opening_ids) == (402, 400, ())
    assert tokenizer.token_bytes[401] == b"" and tokenizer.token_bytes[404] == b"<think>"
    tokenizer.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}"
    assert load_tokenizer(tmp_path / "saved").content_hash == tokenizer.content_hash


def test_an_opening_token_and_unused_entries(path):
    own = metadata(folder_spec("smollm"), "smollm")
    own["tokenizer.ggml.tokens"] += ["[PAD406]", "[PAD407]"]
    own["tokenizer.ggml.token_type"] += [5, 5]
    own |= {"tokenizer.ggml.bos_token_id": 400, "tokenizer.ggml.add_bos_token": True}
    write(path, Tiny(), {}, metadata=own)
    tokenizer = load_tokenizer(path)
    assert tokenizer.opening_ids == (400,)
    assert tokenizer.vocab_size == 406


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "byte-level BPE.*got 'llama': set model.tokenizer"),
        ({"tokenizer.ggml.pre": "tekken"}, "one of smollm, qwen2.*got 'tekken': set model.token"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "1 merges are not of two tokens.*'a', 'b', 'c'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "a type for each of 406 tokens, got 2"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "a list of texts under tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.eos_token_id": 1000}, "eos_token_id is 1000, but there are 406 tokens"),
    ],
)
def test_vocabularies_that_cannot_be_rebuilt(path, change, message):
    write(path, Tiny(), {}, metadata=metadata(folder_spec("smollm"), "smollm") | change)
    with pytest.raises(GgufError, match=message):
        load_tokenizer(path)


# A real vocabulary --------------------------------------------------------------------------------


def test_smollm2s_vocabulary():
    tokenizer = load_tokenizer(smollm2())
    assert tokenizer.vocab_size == 49_152 and len(tokenizer.specials) == 17
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 2)
    assert tokenizer.special("<|im_start|>") == 1
    singles = [tokenizer.token_bytes[i] for i in tokenizer.encode("in 2024")]
    assert singles == [b"in", b" ", b"2", b"0", b"2", b"4"]
    assert [tokenizer.token_bytes[i] for i in tokenizer.encode("\n\n1")] == [b"\n\n", b"1"]
    _, config = tokenizer_from_gguf(smollm2())
    assert "<|im_start|>" in config["chat_template"]


def test_smollm2_spells_real_passages():
    if "SSPJAX_DATA" not in os.environ:
        pytest.skip("SSPJAX_DATA is not set: no real passages")
    tokenizer = load_tokenizer(smollm2())
    path = pathlib.Path(os.environ["SSPJAX_DATA"]) / "corpus" / "wiki-small.jsonl.gz"
    texts = [json.loads(line)["text"] for line in gzip.decompress(path.read_bytes()).splitlines()]
    lengths = []
    for text in texts[::3]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        lengths.append(len(ids))
    assert len(lengths) > 3000 and 100 < np.mean(lengths) < 160
