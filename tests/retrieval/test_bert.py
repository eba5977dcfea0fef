"""Texts to vectors by a trained encoder: buckets, prefixes, index folders, and a real one."""

import gzip
import json
import os
import pathlib
import shutil

import encoder_folders
import numpy as np
import pytest
from real_models import fetched

from retrieval_index import build
from sspjax.models.encoder_folder import EncoderFolderError
from sspjax.retrieval.bert import BUCKETS, BertEncoder, contents
from sspjax.retrieval.client import make_retriever, open_retriever
from sspjax.retrieval.corpus import MemoryCorpus, read_corpus
from sspjax.retrieval.encoder import EncoderError
from sspjax.retrieval.encoders import ENCODERS, encoder_kind, load_encoder
from sspjax.retrieval.index import IndexFolderError
from sspjax.types import Document

WORDS = encoder_folders.WORDS


def document(number: int, words: int) -> Document:
    text = " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(words))
    return Document(id=str(number), title=WORDS[number % len(WORDS)], text=text)


DOCUMENTS = [document(i, 1 + (i * 13) % 70) for i in range(60)]
CORPUS = MemoryCorpus(DOCUMENTS)


@pytest.fixture
def folder(tmp_path):
    encoder_folders.write(tmp_path / "small-bert")
    return tmp_path / "small-bert"


@pytest.fixture
def encoder(folder):
    return encoder_kind(str(folder)).fit(CORPUS)


def test_a_text_has_the_same_bits_in_any_company(encoder):
    together = encoder.encode_passages(DOCUMENTS)
    assert together.dtype == np.float32 and together.shape == (60, 24)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    alone = [encoder.encode_passages([each])[0] for each in DOCUMENTS]
    assert (together == np.stack(alone)).all()
    backwards = encoder.encode_passages(DOCUMENTS[::-1])
    assert (together == backwards[::-1]).all()


def test_every_length_has_a_bucket(encoder):
    """The empty text, the edges of every bucket, and texts that have to be cut."""
    assert encoder.max_tokens == 64
    lengths = [0, *(b + d for b in BUCKETS if b <= 64 for d in (-3, -2, -1, 0)), 500]
    texts = [" ".join(["city"] * n) for n in lengths]
    vectors = encoder.encode_queries(texts)
    assert np.isfinite(vectors).all()
    longest, cut = vectors[lengths.index(62)], vectors[-1]
    assert (longest == cut).all() and not (vectors[lengths.index(61)] == cut).all()
    assert encoder.encode_queries([]).shape == (0, 24)


def test_passages_are_shown_with_their_title_in_quotes(encoder):
    passage = Document(id="x", title="Bravik Tolen", text="was born in Tormoor")
    assert contents(passage) == '"Bravik Tolen"\nwas born in Tormoor'
    assert contents(Document(id="x", title="", text="was born")) == "was born"
    both = encoder.encode_queries([contents(passage), "bravik tolen was born in tormoor"])
    assert (encoder.encode_passages([passage])[0] == both[0]).all()
    assert not (both[0] == both[1]).all()


@pytest.mark.parametrize(
    ("called", "prompts", "prefixes"),
    [
        ("e5-base-v2", None, ("query: ", "passage: ")),
        ("my_E5", None, ("query: ", "passage: ")),
        ("bge-large-en", None, ("Represent this sentence for searching relevant passages: ", "")),
        ("small-bert", None, ("", "")),
        ("some5", None, ("", "")),
        ("e5-saved-again", {"query": "", "document": ""}, ("query: ", "passage: ")),
        ("e5-tuned", {"query": "q: ", "passage": "p: "}, ("q: ", "p: ")),
        ("other", {"query": "q: ", "document": "d: "}, ("q: ", "d: ")),
    ],
)
def test_prefixes_follow_the_folder(tmp_path, called, prompts, prefixes):
    encoder_folders.write(tmp_path / called)
    if prompts is not None:
        path = tmp_path / called / "config_sentence_transformers.json"
        path.write_text(json.dumps({"prompts": prompts}))
    encoder = encoder_kind(str(tmp_path / called)).fit(CORPUS)
    assert (encoder.query_prefix, encoder.passage_prefix) == prefixes
    plain = BertEncoder.read("plain", tmp_path / called, ("", ""))
    passage = Document(id="x", title="", text="born in tormoor")
    for ours, prefix in (
        (encoder.encode_queries(["born in tormoor"]), prefixes[0]),
        (encoder.encode_passages([passage]), prefixes[1]),
    ):
        assert (ours == plain.encode_queries([f"{prefix}born in tormoor"])).all()


def test_named_encoders_are_folders_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SSPJAX_CACHE", str(tmp_path))
    for name, advice in (
        ("minilm", "sspjax.fetch minilm"),
        ("e5", "put intfloat/e5-base-v2 there"),
        ("bge", "put BAAI/bge-base-en-v1.5 there"),
    ):
        with pytest.raises(
            EncoderError, match=f"{tmp_path / name}, got no such folder; .*{advice}"
        ):
            encoder_kind(name).fit(CORPUS)
    encoder_folders.write(tmp_path / "e5")
    encoder = encoder_kind("e5").fit(CORPUS)
    assert (encoder.name, encoder.query_prefix) == ("e5", "query: ")
    assert list(ENCODERS) == ["tfidf", "minilm", "e5", "bge"]


def test_the_config_changes_with_any_file(folder, encoder):
    assert encoder.config()["name"] == "small-bert"
    assert encoder_kind(str(folder)).fit(CORPUS).config() == encoder.config()
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    other = encoder_kind(str(folder)).fit(CORPUS).config()
    assert other["max_tokens"] == 32 and other["state"] != encoder.config()["state"]


def test_a_tokenizer_of_another_model_is_refused(folder):
    encoder_folders.write(folder, vocab_size=10)
    with pytest.raises(EncoderFolderError, match=r"tokenizer.json: \d+ entries, but .* has 10"):
        encoder_kind(str(folder)).fit(CORPUS)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(EncoderFolderError, match="tokenizer.json: cannot be read"):
        encoder_kind(str(folder)).fit(CORPUS)


# Index folders ------------------------------------------------------------------------------------


@pytest.fixture
def built(folder, tmp_path):
    """The command's index, after the model's own folder is gone, and its corpus."""
    path = tmp_path / "corpus.jsonl.gz"
    rows = [json.dumps({"id": d.id, "title": d.title, "text": d.text}) for d in DOCUMENTS]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    index = tmp_path / "index"
    assert build.main([f"--corpus={path}", f"--encoder={folder}", f"--out={index}"]) == 0
    shutil.rmtree(folder)
    return read_corpus(path), index


def test_an_index_brings_its_encoder(built, tmp_path):
    corpus, index = built
    moved = index.rename(tmp_path / "elsewhere")
    retriever = open_retriever(corpus, moved, encoder="small-bert")
    found = retriever.search([contents(d) for d in DOCUMENTS[:20]], 1)
    assert [f[0].text for f in found] == [" ".join(d.text.split()) for d in DOCUMENTS[:20]]
    with pytest.raises(
        IndexFolderError, match="expected an index under encoder tfidf, found small"
    ):
        open_retriever(corpus, moved, encoder="tfidf")


def test_an_index_is_opened_under_a_folders_name_wherever_that_stands(built):
    corpus, index = built
    assert (
        open_retriever(corpus, index, encoder="/elsewhere/small-bert").encoder.name == "small-bert"
    )


def test_a_changed_encoder_is_refused(built):
    _, index = built
    path = index / "encoder" / "modules.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(EncoderError, match="expected the state .* a file was changed"):
        load_encoder(index)
    (index / "encoder.json").write_text('{"name": "small-bert", "family": "bert"}')
    with pytest.raises(EncoderError, match="expected a name and two prefixes"):
        load_encoder(index)


# A real encoder -----------------------------------------------------------------------------------


def real_passages(count: int) -> list[Document]:
    if "SSPJAX_DATA" not in os.environ:
        pytest.skip("SSPJAX_DATA is not set: no real passages")
    path = pathlib.Path(os.environ["SSPJAX_DATA"]) / "corpus" / "wiki-small.jsonl.gz"
    passages = list(read_corpus(path))
    return passages[:: len(passages) // count][:count]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_minilm_agrees_with_torch_on_real_passages():
    folder = fetched("minilm")
    torch = pytest.importorskip("torch", reason="torch is not installed (extra parity)")
    from transformers import AutoTokenizer, BertModel

    passages = real_passages(200)
    ours = encoder_kind("minilm").fit(CORPUS).encode_passages(passages)
    model, tokenizer = (
        BertModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    for passage, vector in zip(passages, ours, strict=True):
        read = tokenizer(contents(passage), return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            pooled = model(**read).last_hidden_state[0].mean(0).numpy()
        assert vector @ pooled / np.linalg.norm(pooled) >= 0.9999


def test_minilm_finds_real_passages():
    fetched("minilm")
    passages = real_passages(60)
    retriever = make_retriever(MemoryCorpus(passages), encoder="minilm")
    found = retriever.search([passage.title for passage in passages], 1)
    hits = [f[0].title == passage.title for f, passage in zip(found, passages, strict=True)]
    assert sum(hits) >= 54
