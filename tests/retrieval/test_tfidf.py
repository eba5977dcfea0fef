"""The hashed encoder against BM25 written out in float64, and names against their passages."""

import math
import random
import re
from collections import Counter

import numpy as np
import pytest

from sspjax.data.miniwiki import make_world
from sspjax.retrieval.corpus import MemoryCorpus
from sspjax.retrieval.encoder import (
    EncoderError,
    HashedTfidf,
    encode_corpus,
    split_words,
)
from sspjax.retrieval.encoders import encoder_kind, load_encoder
from sspjax.types import Document


def corpus_of(*passages):
    return MemoryCorpus(
        [Document(id=str(i), title=title, text=text) for i, (title, text) in enumerate(passages)]
    )


SMALL = corpus_of(
    ("Red Fox", "The fox is a small red animal . It hunts at night ."),
    ("Night", "Night is the time without sun ."),
    ("", "A red sun sets over the red hills and the night begins , says the fox ."),
    ("Red Fox Films", "Red Fox Films made the film Night ."),
)


def bm25(corpus, query, k1=0.9, b=0.4):
    """Scores of every passage: title twice, and a whole title as one more word."""
    passages, lengths = [], []
    for document in corpus:
        title = re.findall(r"\w+", document.title.lower())
        words = title * 2 + re.findall(r"\w+", document.text.lower())
        counts = Counter(words)
        if title:
            counts["TITLE " + " ".join(title)] = 2
        passages.append(counts)
        lengths.append(len(words))
    mean = sum(lengths) / len(lengths)
    words = re.findall(r"\w+", query.lower())
    asked = Counter(words) + Counter({"TITLE " + " ".join(words): len(words)})
    scores = []
    for counts, length in zip(passages, lengths, strict=True):
        score = 0.0
        for word, times in asked.items():
            df = sum(word in other for other in passages)
            idf = math.log(1 + (len(passages) - df + 0.5) / (df + 0.5))
            tf = counts[word]
            score += times * idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean))
        scores.append(score)
    return np.array(scores)


@pytest.mark.parametrize(
    "query",
    ["red fox", "Night", "the sun at night", "films of foxes", "red red night", "red films"],
)
def test_the_cosine_is_bm25_up_to_a_factor(query):
    encoder = HashedTfidf.fit(SMALL)
    passages = encoder.encode_passages(list(SMALL)).astype(np.float64)
    cosines = passages @ encoder.encode_queries([query])[0].astype(np.float64)
    expected = bm25(SMALL, query)
    factor = cosines.max() / expected.max()
    np.testing.assert_allclose(cosines, factor * expected, atol=1e-6)
    assert factor > 0


def test_everything_has_length_one_and_queries_leave_the_last_dimension_empty():
    encoder = HashedTfidf.fit(SMALL)
    foreign = Document(id="x", title="red fox night sun", text=" ".join(["hills small"] * 500))
    passages = encoder.encode_passages([*SMALL, foreign, Document(id="y", title="", text="")])
    queries = encoder.encode_queries(["red fox", "hills"])
    assert passages.dtype == queries.dtype == np.float32
    assert passages.shape == (6, encoder.dimensions)
    np.testing.assert_allclose(np.linalg.norm(passages, axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1.0, atol=1e-6)
    assert not queries[:, -1].any()
    assert passages[:, -1].min() == 0.0
    assert passages[5, -1] == 1.0


@pytest.mark.parametrize("query", ["", "  ", "?!", "zebra quagga", "\u0301"])
def test_a_query_without_known_words_is_zero(query):
    assert not HashedTfidf.fit(SMALL).encode_queries([query]).any()


def test_no_queries():
    assert HashedTfidf.fit(SMALL).encode_queries([]).shape == (0, 8192)


def test_words_are_folded():
    assert split_words("Gábor's ÉCLAIR_42") == ["gabor", "s", "eclair", "42"]
    assert split_words("STRASSE straße") == ["strasse", "strasse"]
    assert split_words("Дом 東京") == ["дом", "東京"]
    encoder = HashedTfidf.fit(corpus_of(("Pál Gábor", "director"), ("Other", "thing")))
    plain, accented = encoder.encode_queries(["pal gabor", "PÁL GÁBOR"])
    assert (plain == accented).all()
    assert plain.any()


def test_half_a_surrogate_pair_in_a_query_is_a_word_like_any_other():
    assert not HashedTfidf.fit(SMALL).encode_queries(["\ud800"]).any()


def test_an_exact_name_finds_its_own_passage():
    corpus = corpus_of(
        ("Red Fox", "An animal ."),
        ("Red Fox Films", "Red Fox Films is owned by Red Fox . Red Fox is red . A fox , Red Fox ."),
        ("Fox", "Fox and red fox , red fox , red fox ."),
    )
    encoder = HashedTfidf.fit(corpus)
    scores = encoder.encode_queries(["red fox"]) @ encoder.encode_passages(list(corpus)).T
    assert scores.argmax() == 0


def test_every_name_of_a_world_finds_its_own_passage():
    corpus = MemoryCorpus(make_world(5).documents())
    encoder = HashedTfidf.fit(corpus)
    passages = np.concatenate(list(encode_corpus(encoder, corpus)))
    titles = [document.title for document in corpus]
    scores = encoder.encode_queries(titles) @ passages.T
    assert len(titles) > 800
    assert [titles[row] for row in scores.argmax(axis=1)] == titles


def test_words_share_places_without_being_taken_for_each_other():
    """1,500 different rare words in 1,023 places: each still finds its own passage first."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(1500)]
    corpus = corpus_of(*(("", " ".join(words[i : i + 3])) for i in range(0, 1500, 3)))
    encoder = HashedTfidf.fit(corpus, dimensions=1024)
    scores = encoder.encode_queries(words) @ encoder.encode_passages(list(corpus)).T
    assert (scores.argmax(axis=1) == np.arange(1500) // 3).mean() > 0.99


def test_places_do_not_depend_on_the_process_or_the_order_of_passages():
    encoder = HashedTfidf.fit(SMALL)
    again = HashedTfidf.fit(MemoryCorpus(list(SMALL)[::-1]))
    assert encoder.config() == again.config()
    fox = bytes.fromhex("12e107141a5273b7")  # What `b2sum -l 64` prints for "fox".
    assert int.from_bytes(fox, "little") in encoder.words.tolist()


def test_encoding_goes_through_the_corpus_in_stretches():
    corpus = corpus_of(*((f"t{i}", f"word{i} and") for i in range(1100)))
    encoder = HashedTfidf.fit(corpus, dimensions=64)
    stretches = list(encode_corpus(encoder, corpus))
    assert [len(stretch) for stretch in stretches] == [512, 512, 76]
    whole = encoder.encode_passages(list(corpus))
    assert (np.concatenate(stretches) == whole).all()


def test_saved_and_loaded(tmp_path):
    encoder = HashedTfidf.fit(SMALL, dimensions=512, k1=1.2, b=0.75, title_weight=3)
    encoder.save(tmp_path)
    loaded = load_encoder(tmp_path)
    assert loaded.config() == encoder.config()
    assert (loaded.encode_passages(list(SMALL)) == encoder.encode_passages(list(SMALL))).all()
    assert (loaded.encode_queries(["red"]) == encoder.encode_queries(["red"])).all()
    other = HashedTfidf.fit(corpus_of(("a", "b")), dimensions=512, k1=1.2, b=0.75, title_weight=3)
    assert other.config() != encoder.config()


def test_a_damaged_or_foreign_state_is_refused(tmp_path):
    with pytest.raises(EncoderError, match="encoder.json: cannot be read"):
        load_encoder(tmp_path)
    HashedTfidf.fit(SMALL).save(tmp_path)
    state = (tmp_path / "encoder.npz").read_bytes()
    (tmp_path / "encoder.npz").write_bytes(state[: len(state) // 2])
    with pytest.raises(EncoderError, match="encoder.npz: cannot be read"):
        load_encoder(tmp_path)
    (tmp_path / "encoder.npz").unlink()
    with pytest.raises(EncoderError, match="encoder.npz: cannot be read"):
        load_encoder(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    HashedTfidf.fit(corpus_of(("a", "b"))).save(other)
    (other / "encoder.npz").rename(tmp_path / "encoder.npz")
    with pytest.raises(EncoderError, match="expected the state"):
        load_encoder(tmp_path)
    (tmp_path / "encoder.json").write_text("[]")
    with pytest.raises(EncoderError, match="an object with a name"):
        load_encoder(tmp_path)
    (tmp_path / "encoder.json").write_text('{"name": "glove"}')
    with pytest.raises(EncoderError, match="unknown encoder 'glove'; expected one of: tfidf"):
        load_encoder(tmp_path)


def test_what_cannot_be_fitted():
    with pytest.raises(EncoderError, match="none in 1 passages"):
        HashedTfidf.fit(corpus_of(("", "...")))
    with pytest.raises(ValueError, match="at least 64"):
        HashedTfidf.fit(SMALL, dimensions=2)
    with pytest.raises(EncoderError, match="expected one of: tfidf"):
        encoder_kind("nope")
