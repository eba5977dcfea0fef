"""The retriever in this process: order, empty and repeated queries, cache, threads, mismatches."""

import threading

import numpy as np
import pytest

from sspjax.retrieval.client import InProcessRetriever, make_retriever, open_retriever
from sspjax.retrieval.corpus import MemoryCorpus
from sspjax.retrieval.encoder import EncoderError, HashedTfidf, encode_corpus
from sspjax.retrieval.index import IndexFolderError, build_index
from sspjax.types import Document

CORPUS = MemoryCorpus(
    [
        Document(id="ada", title="Ada Lovelace", text="She wrote the first program ."),
        Document(id="babbage", title="Charles Babbage", text="He built engines with Ada ."),
        Document(id="engine", title="Analytical Engine", text="A machine for any program ."),
        Document(id="loom", title="Loom", text="A machine that weaves ."),
    ]
)


class Counting:
    """An encoder that remembers every batch of queries."""

    def __init__(self, encoder):
        self.encoder = encoder
        self.batches = []
        self.name = encoder.name
        self.dimensions = encoder.dimensions
        self.config = encoder.config
        self.encode_passages = encoder.encode_passages
        self.save = encoder.save

    def encode_queries(self, queries):
        self.batches.append(list(queries))
        return self.encoder.encode_queries(queries)


def counting_retriever(**options):
    encoder = Counting(HashedTfidf.fit(CORPUS))
    index = build_index(
        encode_corpus(encoder, CORPUS), corpus=CORPUS.content_hash, encoder=encoder.config()
    )
    return InProcessRetriever(CORPUS, encoder, index, **options), encoder


def ids(results):
    return [None if r is None else [d.id for d in r] for r in results]


def test_passages_come_best_first_and_only_those_that_share_a_word():
    retriever = make_retriever(CORPUS, encoder="tfidf")
    results = retriever.search(["Ada Lovelace", "machine", "weaves", "PROGRAM"], 3)
    assert ids(results) == [["ada", "babbage"], ["loom", "engine"], ["loom"], ["ada", "engine"]]
    assert results[0][0] is CORPUS.document(0)
    assert ids(retriever.search(["machine"], 1)) == [["loom"]]
    assert ids(retriever.search(["ada she he a the"], 100))[0][0] == "ada"


def test_hits_carry_descending_cosines():
    retriever = make_retriever(CORPUS, encoder="tfidf")
    (hits,) = retriever.hits(["ada program machine"], 4)
    scores = [hit.score for hit in hits]
    assert len(hits) == 4
    assert scores == sorted(scores, reverse=True)
    assert 0 < scores[-1] <= scores[0] <= 1
    query = retriever.encoder.encode_queries(["ada program machine"])[0]
    passage = retriever.encoder.encode_passages([hits[0].document])[0]
    assert scores[0] == pytest.approx(float(query.astype(np.float64) @ passage), abs=1e-6)


def test_empty_and_unknown_queries_find_nothing_which_is_not_a_failure():
    retriever, encoder = counting_retriever()
    assert retriever.search(["", " \t\n", "zebra", "ada"], 2)[:3] == [(), (), ()]
    assert encoder.batches == [["zebra", "ada"]]
    assert retriever.search([], 2) == []
    assert retriever.search([""], 2) == [()]
    assert len(encoder.batches) == 1


def test_a_batch_is_one_call_and_repeated_queries_are_searched_once():
    retriever, encoder = counting_retriever()
    results = retriever.search(["loom", "  ada \n lovelace ", "loom", "ada lovelace"], 2)
    assert encoder.batches == [["loom", "ada lovelace"]]
    assert results[0] == results[2]
    assert results[1] == results[3]
    assert retriever.search(["ada lovelace", "loom"], 2) == [results[1], results[0]]
    assert len(encoder.batches) == 1
    retriever.search(["loom"], 3)
    assert encoder.batches[1:] == [["loom"]]  # Another number of passages is another result.


def test_the_least_recently_asked_is_forgotten():
    retriever, encoder = counting_retriever(remember=2)
    for query in ("ada", "loom", "ada", "engine"):
        retriever.search([query], 2)
    retriever.search(["ada"], 2)
    retriever.search(["loom"], 2)
    assert encoder.batches == [["ada"], ["loom"], ["engine"], ["loom"]]
    # More new queries than are kept, in one call.
    assert ids(retriever.search(["ada", "weaves", "engines", "machine"], 1)) == [
        ["ada"],
        ["loom"],
        ["babbage"],
        ["loom"],
    ]


def test_threads_share_a_retriever():
    retriever, _ = counting_retriever(remember=3)
    queries = ["ada", "loom", "machine", "program", "engines", "charles babbage"]
    expected = make_retriever(CORPUS, encoder="tfidf").search(queries, 2)
    wrong = []

    def run(offset):
        for turn in range(60):
            chosen = [(turn + offset + i) % len(queries) for i in range(3)]
            found = retriever.search([queries[i] for i in chosen], 2)
            wrong.append(found != [expected[i] for i in chosen])

    threads = [threading.Thread(target=run, args=(offset,)) for offset in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 360
    assert not any(wrong)


def test_bad_requests():
    retriever = make_retriever(CORPUS, encoder="tfidf")
    with pytest.raises(ValueError, match="topk=0"):
        retriever.search(["ada"], 0)
    with pytest.raises(EncoderError, match="unknown encoder 'e6'"):
        make_retriever(CORPUS, encoder="e6")


def test_parts_that_do_not_belong_together_are_refused():
    other = MemoryCorpus([Document(id="x", title="Ada", text="Someone else .")])
    retriever = make_retriever(CORPUS, encoder="tfidf")
    with pytest.raises(IndexFolderError, match="the index of another corpus: expected"):
        InProcessRetriever(other, retriever.encoder, retriever.index)
    with pytest.raises(IndexFolderError, match="the index of another encoder: expected"):
        InProcessRetriever(CORPUS, HashedTfidf.fit(CORPUS, b=0.5), retriever.index)


def test_opened_from_a_folder(tmp_path):
    built = make_retriever(CORPUS, encoder="tfidf")
    built.index.save(tmp_path / "index", built.encoder)
    opened = open_retriever(CORPUS, tmp_path / "index", encoder="tfidf")
    queries = ["ada", "machine program", "loom"]
    assert opened.hits(queries, 4) == built.hits(queries, 4)

    other = MemoryCorpus(list(CORPUS)[:3])
    with pytest.raises(IndexFolderError, match="another corpus"):
        open_retriever(other, tmp_path / "index", encoder="tfidf")
    with pytest.raises(IndexFolderError, match="expected an index under encoder e5, found tfidf"):
        open_retriever(CORPUS, tmp_path / "index", encoder="e5")
    with pytest.raises(EncoderError, match="encoder.json"):
        open_retriever(CORPUS, tmp_path / "nowhere", encoder="tfidf")
