"""Every searcher gives the same rows; ScaNN's traps; folders that fit and folders that do not."""

import json
import logging
import shutil
import threading

import numpy as np
import pytest

from sspjax.retrieval import index as index_module
from sspjax.retrieval.corpus import MemoryCorpus
from sspjax.retrieval.encoder import HashedTfidf, encode_corpus
from sspjax.retrieval.index import (
    IndexFolderError,
    Recall,
    Refined,
    build_index,
    load_index,
    measure_recall,
)
from sspjax.retrieval.jax_search import JaxSearch
from sspjax.retrieval.scann_search import ScannSearch, scann_installed
from sspjax.retrieval.vectors import DenseVectors, SparseVectors, VectorError, from_ranks, on_grid
from sspjax.types import Document

needs_scann = pytest.mark.skipif(not scann_installed(), reason="ScaNN is not installed")
CONFIG = {"name": "test", "dimensions": 16}


def unit(rng, *shape):
    x = rng.normal(size=shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def build(vectors, **options):
    return build_index([vectors], corpus="c" * 64, encoder=CONFIG, **options)


def sorted_exactly(vectors, queries, k):
    """Rows [queries, k] by (score down, row up), in float64 and a stable sort."""
    scores = on_grid(queries).astype(np.float64) @ on_grid(vectors).astype(np.float64).T
    order = np.argsort(-scores.astype(np.float32), axis=1, kind="stable")[:, :k]
    return np.pad(order, ((0, 0), (0, k - order.shape[1])), constant_values=-1)


SEARCHES = {
    "jax": JaxSearch,
    "scann": lambda vectors: ScannSearch.build(vectors, exact=True, threads=2),
}


class Adversary:
    """A full scan that, of equal scores, always proposes the last rows."""

    exact = True

    def __init__(self, vectors):
        self.vectors = vectors

    def candidates(self, queries, count):
        scores = queries @ self.vectors.T
        rows = np.argsort(scores, axis=1, kind="stable")[:, ::-1][:, :count].astype(np.int32)
        return rows, np.take_along_axis(scores, rows, axis=1)

    def save(self, folder):
        raise NotImplementedError


@pytest.mark.parametrize(
    "search",
    [JaxSearch, pytest.param(SEARCHES["scann"], marks=needs_scann), Adversary],
    ids=["jax", "scann", "adversary"],
)
@pytest.mark.parametrize("k", [1, 3, 20])
def test_every_searcher_gives_the_rows_of_a_plain_sort(search, k):
    rng = np.random.default_rng(0)
    vectors = unit(rng, 700, 16)
    vectors[200:240] = vectors[7]  # More equal passages than there are spare candidates.
    vectors[-1] = vectors[0]
    queries = unit(rng, 70, 16)
    queries[0], queries[1] = vectors[7], vectors[0]
    refined = Refined(vectors=DenseVectors(array=on_grid(vectors)), search=search(on_grid(vectors)))
    rows, scores = from_ranks(refined.best(on_grid(queries), k))
    assert (rows == sorted_exactly(vectors, queries, k)).all()
    reference = refined.vectors.best(on_grid(queries), k)
    assert (scores == from_ranks(reference)[1]).all()
    assert rows[0, :3].tolist() == [7, 200, 201][:k]


@pytest.mark.parametrize("name", ["jax", pytest.param("scann", marks=needs_scann)])
def test_more_results_than_passages_and_batches_of_any_size(name):
    rng = np.random.default_rng(1)
    vectors = on_grid(unit(rng, 5, 16))
    refined = Refined(vectors=DenseVectors(array=vectors), search=SEARCHES[name](vectors))
    for batch in (0, 1, 3, 65):
        queries = on_grid(unit(rng, batch, 16))
        rows, scores = from_ranks(refined.best(queries, 7))
        assert rows.shape == scores.shape == (batch, 7)
        assert (rows == sorted_exactly(vectors, queries, 7)).all()
        assert (rows[:, 5:] == -1).all()
        assert (scores[:, 5:] == -np.inf).all()


def test_sparse_and_dense_indexes_of_the_same_passages_agree():
    documents = [
        Document(
            id=str(i), title=f"name{i % 40} thing{i % 7}", text=f"word{i % 5} is a word{i % 9}"
        )
        for i in range(120)
    ]
    corpus = MemoryCorpus(documents)
    encoder = HashedTfidf.fit(corpus, dimensions=512)
    sparse = build_index(encode_corpus(encoder, corpus), corpus="c", encoder=encoder.config())
    assert isinstance(sparse.vectors, SparseVectors)
    array = on_grid(encoder.encode_passages(documents))
    queries = encoder.encode_queries(["name3", "word2 word3", "name39 thing4", "nothing", ""])
    rows, scores = sparse.search(queries, 10)
    for search in (JaxSearch(array), Adversary(array)):
        dense = Refined(vectors=DenseVectors(array=array), search=search)
        found = from_ranks(dense.best(on_grid(queries), 10))
        assert (found[0] == rows).all()
        assert (found[1] == scores).all()
    assert rows[3].tolist() == list(range(10))  # Nothing in common with anything: all score 0.
    assert not scores[3].any()


def test_queries_that_are_not_finite_find_nothing():
    rng = np.random.default_rng(2)
    vectors = unit(rng, 50, 16)
    queries = unit(rng, 3, 16)
    queries[1, 4] = np.nan
    for index in (build(vectors), build(np.eye(64, dtype=np.float32))):
        some = np.pad(queries, ((0, 0), (0, index.dimensions - 16)))
        rows, scores = index.search(some, 2)
        assert rows.dtype == np.int32
        assert scores.dtype == np.float32
        assert rows[1].tolist() == [-1, -1]
        assert scores[1].tolist() == [-np.inf, -np.inf]
        assert (rows[[0, 2]] >= 0).all()
    rows, _ = build(vectors).search(np.full((2, 16), np.inf, np.float32), 2)
    assert (rows == -1).all()


def test_bad_requests():
    index = build(unit(np.random.default_rng(3), 9, 16))
    assert len(index) == 9
    with pytest.raises(ValueError, match="k=0"):
        index.search(np.zeros((1, 16), np.float32), 0)
    with pytest.raises(VectorError, match=r"expected float32\[n, 16\], got float32\[1, 15\]"):
        index.search(np.zeros((1, 15), np.float32), 1)
    rows, scores = index.search(np.zeros((0, 16), np.float32), 4)
    assert rows.shape == scores.shape == (0, 4)


# ScaNN itself -------------------------------------------------------------------------------------


@needs_scann
def test_scann_refuses_what_would_kill_the_process():
    vectors = unit(np.random.default_rng(4), 30, 16)
    vectors[11, 3] = np.nan
    vectors[20] = np.inf
    for exact in (True, False):
        with pytest.raises(VectorError, match=r"2 passage vectors .* \(rows 11, 20\)"):
            ScannSearch.build(vectors, exact=exact)
    with pytest.raises(VectorError, match="not finite"):
        build(vectors)


@needs_scann
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("threads", [-3, 0, 1, 2])
def test_scann_candidates(exact, threads):
    rng = np.random.default_rng(5)
    vectors = unit(rng, 40, 16)
    search = ScannSearch.build(vectors, exact=exact, threads=threads)
    queries = unit(rng, 5, 16)
    queries[0, 0], queries[4, 1] = np.nan, np.inf
    rows, scores = search.candidates(queries, 50)
    assert rows.dtype == np.int32
    assert rows.shape == scores.shape == (5, 50)
    assert (rows[[0, 4]] == -1).all()
    assert np.isneginf(scores[[0, 4]]).all()
    for row, score in zip(rows[1:4], scores[1:4], strict=True):
        assert sorted(row[:40]) == list(range(40))
        assert (row[40:] == -1).all()
        assert not np.isnan(score).any()
    assert search.candidates(queries[:0], 3)[0].shape == (0, 3)
    assert (search.candidates(queries[:1], 3)[0] == -1).all()


def test_neighbours_that_scann_did_not_find_are_missing_and_not_row_0():
    class TooFew:
        """What ScaNN gives for three neighbours where it had one candidate."""

        def set_num_threads(self, count):
            assert count >= 1

        def search_batched_parallel(self, queries, **options):
            assert options["batch_size"] == 2  # ceil(3 queries / 2 threads)
            rows = np.array([[5, 0, 0]] * len(queries), np.uint32)
            return rows, np.array([[0.5, np.nan, np.nan]] * len(queries), np.float32)

    search = ScannSearch(TooFew(), exact=False, passages=9, threads=2)
    rows, scores = search.candidates(np.eye(3, 16, dtype=np.float32), 3)
    assert rows.tolist() == [[5, -1, -1]] * 3
    assert scores.tolist() == [[0.5, -np.inf, -np.inf]] * 3


@needs_scann
def test_scann_searches_from_many_threads():
    rng = np.random.default_rng(6)
    search = ScannSearch.build(unit(rng, 300, 16), exact=True, threads=2)
    queries = unit(rng, 33, 16)
    expected, _ = search.candidates(queries, 5)
    different = []

    def run():
        for _ in range(20):
            found, _ = search.candidates(queries, 5)
            different.append((found != expected).any())

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(different) == 120
    assert not any(different)


@needs_scann
def test_a_hashed_index_recalls_saves_moves_and_loads(tmp_path, monkeypatch):
    rng = np.random.default_rng(7)
    centres = unit(rng, 40, 16)
    vectors = unit(rng, 1500, 16) * np.float32(0.5) + centres[rng.integers(0, 40, 1500)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = unit(rng, 100, 16)
    index = build(vectors, kind="hashed")
    assert index.kind == "hashed"
    recall = measure_recall(index, [queries[:60], queries[60:]])
    assert recall.queries == 100
    assert 0.9 < recall.share <= 1.0

    rows, scores = index.search(queries, 3)
    exact_scores = np.einsum("qkd,qd->qk", vectors[rows].astype(np.float64), queries)
    np.testing.assert_allclose(scores, exact_scores, atol=1e-6)
    assert (np.diff(scores, axis=1) <= 0).all()

    saved = index.save(tmp_path / "there" / "index", FakeEncoder())
    assert saved.hash != index.hash
    (tmp_path / "there").rename(tmp_path / "moved")
    loaded = load_index(tmp_path / "moved/index", corpus="c" * 64, encoder=CONFIG)
    assert (loaded.search(queries, 3)[0] == rows).all()
    assert loaded.hash == saved.hash
    assert loaded.kind == "hashed"

    monkeypatch.setattr(index_module, "scann_installed", lambda: False)
    with pytest.raises(IndexFolderError, match="hashed index needs ScaNN, which is not installed"):
        load_index(tmp_path / "moved/index", corpus="c" * 64, encoder=CONFIG)
    with pytest.raises(IndexFolderError, match="a hashed index needs ScaNN"):
        build(vectors, kind="hashed")


def test_without_scann_the_same_rows_come_from_jax(monkeypatch, caplog):
    rng = np.random.default_rng(8)
    vectors, queries = unit(rng, 200, 16), unit(rng, 10, 16)
    here = build(vectors)
    monkeypatch.setattr(index_module, "scann_installed", lambda: False)
    monkeypatch.setattr(index_module, "EXACT_BELOW", 100)
    with caplog.at_level(logging.WARNING):
        there = build(vectors)
    assert "ScaNN is not installed: 200 passages are searched exactly" in caplog.text
    assert isinstance(there.finder, Refined)
    assert isinstance(there.finder.search, JaxSearch)
    assert there.kind == "exact"
    for a, b in zip(here.search(queries, 5), there.search(queries, 5), strict=True):
        assert (a == b).all()


@needs_scann
def test_the_kind_follows_the_size(monkeypatch):
    rng = np.random.default_rng(9)
    vectors = unit(rng, 120, 16)
    assert build(vectors).kind == "exact"
    monkeypatch.setattr(index_module, "EXACT_BELOW", 120)
    assert build(vectors).kind == "hashed"
    assert build(vectors[:119]).kind == "exact"
    assert build(np.eye(150, dtype=np.float32)).kind == "exact"  # Sparse, whatever its size.
    with pytest.raises(VectorError, match="sparse vectors are searched exactly"):
        build(np.eye(150, dtype=np.float32), kind="hashed")


def test_recall_counts_what_exact_search_finds():
    rng = np.random.default_rng(10)
    vectors, queries = unit(rng, 30, 16), unit(rng, 8, 16)
    index = build(vectors)
    assert measure_recall(index, [queries]) == Recall(share=1.0, k=3, queries=8)

    class FirstOnly(Adversary):
        exact = False

        def candidates(self, queries, count):
            rows, scores = super().candidates(queries, count)
            rows[:, 1:] = -1
            return rows, scores

    array = index.vectors.array
    poor = index_module.dataclasses.replace(
        index, finder=Refined(vectors=index.vectors, search=FirstOnly(array))
    )
    assert measure_recall(poor, [queries]).share == pytest.approx(1 / 3)


# Folders ------------------------------------------------------------------------------------------


class FakeEncoder:
    name = "test"
    dimensions = 16

    def config(self):
        return dict(CONFIG)

    def save(self, folder):
        (folder / "encoder.json").write_text(json.dumps(CONFIG))


@pytest.fixture
def saved(tmp_path):
    vectors = unit(np.random.default_rng(11), 60, 16)
    index = build(vectors).save(tmp_path / "index", FakeEncoder())
    return index, tmp_path / "index"


def test_saved_and_loaded(saved, tmp_path):
    index, folder = saved
    loaded = load_index(folder, corpus="c" * 64, encoder=CONFIG)
    queries = unit(np.random.default_rng(12), 7, 16)
    for a, b in zip(index.search(queries, 4), loaded.search(queries, 4), strict=True):
        assert (a == b).all()
    assert (loaded.hash, len(loaded), loaded.kind) == (index.hash, 60, "exact")
    assert loaded.recall is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index"]  # Nothing temporary is left.
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["metric"] == "dot_product"
    assert meta["corpus"] == "c" * 64
    assert meta["encoder"] == CONFIG
    assert set(meta["files"]) == {"encoder.json", "vectors.npy"}


def test_an_exact_index_is_the_same_wherever_it_is_built(saved, tmp_path):
    index, _ = saved
    vectors = unit(np.random.default_rng(11), 60, 16)
    again = build_index([vectors[:20], vectors[20:]], corpus="c" * 64, encoder=CONFIG).save(
        tmp_path / "again", FakeEncoder()
    )
    assert again.hash == index.hash
    vectors[5] = vectors[6]
    other = build(vectors).save(tmp_path / "other", FakeEncoder())
    assert other.hash != index.hash


def test_an_index_of_something_else_is_refused(saved):
    _, folder = saved
    with pytest.raises(
        IndexFolderError, match="another corpus: expected dddd.*, found cccc.*; build an index"
    ):
        load_index(folder, corpus="d" * 64, encoder=CONFIG)
    with pytest.raises(IndexFolderError, match="another encoder: expected .*32.*, found .*16"):
        load_index(folder, corpus="c" * 64, encoder={"name": "test", "dimensions": 32})


def test_a_damaged_folder_is_refused(saved):
    _, folder = saved
    path = folder / "vectors.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(IndexFolderError, match="vectors.npy: expected .*sha256.*damaged"):
        load_index(folder, corpus="c" * 64, encoder=CONFIG)
    load_index(folder, corpus="c" * 64, encoder=CONFIG, verify=False)
    path.write_bytes(content[:-4])
    with pytest.raises(IndexFolderError, match="vectors.npy: expected .*bytes"):
        load_index(folder, corpus="c" * 64, encoder=CONFIG, verify=False)
    path.unlink()
    with pytest.raises(IndexFolderError, match="found no file"):
        load_index(folder, corpus="c" * 64, encoder=CONFIG)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; expected a folder made by"),
        ("{", "cannot be read"),
        ("[]", "expected format 1, found list"),
        ('{"format": 2}', "expected format 1, found 2"),
        ('{"format": 1, "hash": ""}', "corpus, .* missing"),
    ],
)
def test_a_meta_file_that_cannot_be_used(saved, content, message):
    _, folder = saved
    (folder / "meta.json").unlink()
    if content is not None:
        (folder / "meta.json").write_text(content)
    with pytest.raises(IndexFolderError, match=message):
        load_index(folder, corpus="c" * 64, encoder=CONFIG)


def test_saving_never_overwrites_and_leaves_nothing_half_written(saved, tmp_path):
    index, folder = saved
    with pytest.raises(IndexFolderError, match="exists already"):
        index.save(folder, FakeEncoder())

    class Interrupted(FakeEncoder):
        def save(self, folder):
            super().save(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.save(tmp_path / "half", Interrupted())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index"]

    class Other(FakeEncoder):
        def config(self):
            return {"name": "other"}

    with pytest.raises(IndexFolderError, match="another encoder"):
        index.save(tmp_path / "half", Other())
    (tmp_path / "file").write_text("")
    with pytest.raises(IndexFolderError, match="cannot be written"):
        index.save(tmp_path / "file" / "index", FakeEncoder())
    shutil.rmtree(folder)
    index.save(folder, FakeEncoder())
