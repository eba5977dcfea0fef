"""The wall between text and control tokens, bytes of tokens, files, and training."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from vocabularies import NAMES, SPECS, TEXTS, qwen_spec, trained, vocabulary, words

from sspjax.rollout.tokenizer import Tokenizer, TokenizerError, load_tokenizer, train_tokenizer

quick = settings(max_examples=60, deadline=None, database=None)
every_vocabulary = pytest.mark.parametrize("name", NAMES)


def hostile_texts(names):
    """Text in which control tokens, halves of them and their look-alikes are frequent."""
    disguised = [f(n) for n in names for f in (str.upper, lambda n: n[:-1], lambda n: n[1:])]
    disguised += [n.replace("|", "\uff5c") for n in names] + [f" {n} " for n in names]
    pieces = st.one_of(
        st.sampled_from([*names, *disguised, "<", ">", "|", "</", "<s", "s>", "<unk>", "<0x0A>"]),
        st.text(max_size=4),
    )
    return st.lists(pieces, max_size=12).map("".join)


# The wall -----------------------------------------------------------------------------------------


@every_vocabulary
def test_no_text_becomes_a_control_token(name):
    tokenizer = vocabulary(name)
    assert tokenizer.special_ids

    @quick
    @given(hostile_texts(list(tokenizer.specials)))
    def check(text):
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text))

    check()
    for special in tokenizer.specials:
        for text in (special, f" {special}", f"a{special}b", special * 3, f"{special}\n"):
            assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text)), text


@pytest.mark.parametrize("name", SPECS)
def test_the_wall_is_needed(name):
    """The vocabulary as it is shipped does give control tokens for their names."""
    shipped = tokenizers.Tokenizer.from_str(json.dumps(SPECS[name]()))
    specials = vocabulary(name).specials
    assert all(
        specials[special] in shipped.encode(special, add_special_tokens=False).ids
        for special in specials
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama3", "<|eot_id|>"), ("sentencepiece", "x<s>"), ("sentencepiece", "</s>")],
)
def test_forgetting_the_added_tokens_alone_is_not_a_wall(name, text):
    spec = SPECS[name]() | {"added_tokens": [], "post_processor": None}
    careless = tokenizers.Tokenizer.from_str(json.dumps(spec)).encode(text).ids
    assert not vocabulary(name).special_ids.isdisjoint(careless)


@every_vocabulary
def test_decode_inverts_encode(name):
    tokenizer = vocabulary(name)

    @quick
    @given(st.one_of(st.text(max_size=20), hostile_texts(list(tokenizer.specials))))
    def check(text):
        if name == "qwen":
            text = tokenizers.normalizers.NFC().normalize_str(text)
        if not name.startswith("sentencepiece") or "\u2581" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama3"])
def test_ordinary_text_is_encoded_as_shipped(name):
    shipped = tokenizers.Tokenizer.from_str(json.dumps(SPECS[name]()))
    for text in (TEXTS[0], TEXTS[3], "  two  spaces\n\n1999", ""):
        expected = shipped.encode(text, add_special_tokens=False).ids
        assert vocabulary(name).encode(text) == expected


def test_a_lone_surrogate_is_replaced():
    tokenizer = trained()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_encode_returns_a_list_of_its_own():
    tokenizer = trained()
    first = tokenizer.encode(" Bravik")
    first.append(-1)
    assert tokenizer.encode(" Bravik") == first[:-1]


# Ids and bytes ------------------------------------------------------------------------------------


def test_special_gives_ids_and_names_what_there_is():
    tokenizer = vocabulary("qwen")
    assert tokenizer.special("<|im_start|>") == 401
    assert tokenizer.special_ids == {400, 401, 402, 403, 404, 405}
    with pytest.raises(TokenizerError, match=r"<\|start_header_id\|>.*<\|im_end\|>"):
        tokenizer.special("<|start_header_id|>")


def test_eos_pad_and_ends():
    plain = Tokenizer(qwen_spec(), {})
    assert (plain.eos_id, plain.pad_id, plain.end_ids) == (400, 400, (400, 402, 401))
    chat = Tokenizer(
        qwen_spec(), {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
    )
    assert (chat.eos_id, chat.pad_id, chat.end_ids) == (402, 400, (402, 400, 401))
    assert chat.content_hash != plain.content_hash
    llama = vocabulary("llama3")
    assert llama.end_ids == (4, 1, 2)
    assert vocabulary("sentencepiece").eos_id == 2


def test_opening_ids_are_what_the_vocabulary_puts_first():
    assert vocabulary("llama3").opening_ids == (0,)
    assert vocabulary("qwen").opening_ids == ()


def test_the_id_space_may_have_gaps():
    tokenizer = Tokenizer(qwen_spec(), {"added_tokens_decoder": {"415": {"content": "<|x|>"}}})
    assert tokenizer.vocab_size == 416 == len(tokenizer.token_bytes)
    assert tokenizer.token_bytes[406:] == (b"",) * 9 + (b"<|x|>",)


@pytest.mark.parametrize("name", ["trained", "gpt2", "qwen", "llama3"])
def test_byte_level_tokens_are_inverted(name):
    """Against the library's own decoder, wherever a token is whole characters."""
    tokenizer = vocabulary(name)
    spec = SPECS[name]() if name in SPECS else tokenizer._spec
    decoder = decoders.ByteLevel()
    for token, token_id in spec["model"]["vocab"].items():
        if token_id not in tokenizer.special_ids:
            shown = tokenizer.token_bytes[token_id].decode("utf-8", "replace")
            assert shown == decoder.decode([token])
    singles = {b for b in tokenizer.token_bytes if len(b) == 1}
    assert singles == {bytes([b]) for b in range(256)}


def test_sentencepiece_tokens_are_inverted():
    tokenizer = vocabulary("sentencepiece")
    vocab = SPECS["sentencepiece"]()["model"]["vocab"]
    assert tokenizer.token_bytes[vocab["<0x0A>"]] == b"\n"
    assert tokenizer.token_bytes[vocab["▁<s>"]] == b" <s>"
    assert tokenizer.token_bytes[vocab["</s"]] == b"</s"
    assert [tokenizer.token_bytes[i] for i in (0, 1, 2)] == [b"", b"", b""]


def test_added_tokens_that_are_not_control_tokens_are_text_when_sampled():
    tokenizer = vocabulary("qwen")
    assert tokenizer.token_bytes[404] == b"<think>"
    assert tokenizer.token_bytes[401] == b""
    assert tokenizer.decode([401, 404, *tokenizer.encode(" so"), 405, 402]) == "<think> so</think>"


def test_decode_of_broken_bytes_and_foreign_ids():
    tokenizer = trained()
    first, *rest = tokenizer.encode("東")
    assert tokenizer.decode([first, *rest]) == "東"
    assert tokenizer.decode([first]) == "\ufffd"
    ids = np.asarray([tokenizer.eos_id, *tokenizer.encode("ab"), 5000], np.int32)
    assert tokenizer.decode(ids) == "ab"


# Training -----------------------------------------------------------------------------------------


def test_training_is_deterministic_and_exact():
    texts = [*TEXTS, *words()]
    one, two = train_tokenizer(texts, 512), train_tokenizer(iter(texts), 512)
    assert one.content_hash == two.content_hash
    assert one.vocab_size == 512
    assert one.content_hash != train_tokenizer(texts[:5], 512).content_hash
    assert {"<|endoftext|>", "<|im_start|>", "<|im_end|>"} == set(one.specials)
    assert (
        one.decode([one.eos_id]) == "" and one.pad_id == one.eos_id == one.specials["<|endoftext|>"]
    )


def test_a_small_corpus_is_filled_up_with_entries_that_nothing_produces():
    tokenizer = train_tokenizer(["ab ab"], 640)
    assert tokenizer.vocab_size == 640
    # 256 bytes, 3 control tokens, and the merges "ab" and " ab".
    unused = {i for name, i in tokenizer.specials.items() if "unused" in name}
    assert len(unused) == 640 - 256 - 3 - 2
    assert unused < tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("ab <|unused_0|> ☃")) == "ab <|unused_0|> ☃"


def test_a_word_and_its_space_are_one_piece():
    tokenizer = trained()
    bravik = tokenizer.encode(" Bravik")
    assert len(bravik) == 1
    sentence = tokenizer.encode(" he met Bravik . Bravik left")
    assert sentence.count(bravik[0]) == 2
    assert not any(b" " in token[1:] for token in tokenizer.token_bytes if token.strip())


def test_a_whole_text_is_one_token_and_still_ordinary_text():
    texts = [*TEXTS, *words(), *["<search> a </search>\n"] * 50]
    several = train_tokenizer(texts, 640)
    one = train_tokenizer(texts, 640, whole=["<search>", "</search>"])
    for tag in ("<search>", " </search>"):
        assert len(several.encode(tag)) > 1
        assert len(one.encode(tag)) == 1
        assert not set(one.encode(tag)) & one.special_ids
    assert one.decode(one.encode("x<search>y</search>")) == "x<search>y</search>"
    assert len(one.encode("<searching>")) > 1


@pytest.mark.parametrize("size", [0, 256, 300, 1000])
def test_a_size_that_does_not_divide_is_refused(size):
    with pytest.raises(TokenizerError, match=f"multiple of 128.*got {size}.*model.vocab_size"):
        train_tokenizer(TEXTS, size)


# Files --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
def test_transformers_loads_what_is_saved(tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = trained()
    tokenizer.save(tmp_path / "tokenizer")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    text = TEXTS[0] + TEXTS[3]
    assert theirs.encode(text) == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    assert len(theirs) == tokenizer.vocab_size


@every_vocabulary
def test_saved_and_loaded_is_the_same(name, tmp_path):
    tokenizer = vocabulary(name)
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        loaded = load_tokenizer(path)
        assert loaded.content_hash == tokenizer.content_hash
        assert loaded.token_bytes == tokenizer.token_bytes
        assert loaded.specials == tokenizer.specials


def test_the_config_names_eos_and_pad_and_keeps_its_template(tmp_path):
    Tokenizer(qwen_spec(), {}).save(tmp_path)
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 64}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (402, 400)
    tokenizer.save(tmp_path / "again")
    kept = json.loads((tmp_path / "again/tokenizer_config.json").read_text())
    assert kept["chat_template"] == "{{ messages }}" and kept["model_max_length"] == 64


def test_tokens_that_only_the_config_lists_are_walled_off():
    listed = {"415": {"content": "<|extra|>", "special": True}}
    tokenizer = Tokenizer(qwen_spec(), {"added_tokens_decoder": listed})
    assert tokenizer.special("<|extra|>") == 415
    assert tokenizer.vocab_size == 416


def test_merges_written_as_text_are_read():
    spec = qwen_spec()
    spec["model"]["merges"] = [" ".join(m) for m in spec["model"]["merges"]]
    assert Tokenizer(spec, {}).encode(TEXTS[0]) == vocabulary("qwen").encode(TEXTS[0])


def test_unreadable_files_say_what_was_expected(tmp_path):
    with pytest.raises(TokenizerError, match="expected a tokenizer.json at .*tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="expected JSON in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(TokenizerError, match="expected the fields of a tokenizer.json"):
        load_tokenizer(tmp_path)


def test_vocabularies_of_other_kinds_are_refused():
    wordpiece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(TokenizerError, match="expected a BPE vocabulary.*WordPiece"):
        Tokenizer(json.loads(wordpiece.to_str()), {})
    characters = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    characters.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(TokenizerError, match="byte-level or SentencePiece-style.*Whitespace"):
        Tokenizer(json.loads(characters.to_str()), {})
    with pytest.raises(TokenizerError, match="expected an end-of-sequence token"):
        Tokenizer(qwen_spec() | {"added_tokens": []}, {})
    with pytest.raises(TokenizerError, match="<\\|nowhere\\|>.*do not belong together"):
        Tokenizer(qwen_spec(), {"eos_token": "<|nowhere|>"})
