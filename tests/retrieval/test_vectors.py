"""The exact rule: fixed-point scores, ranks, and what counts as a vector."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sspjax.retrieval.vectors import (
    MISSING,
    DenseVectors,
    SparseVectors,
    VectorError,
    checked_queries,
    from_ranks,
    gather,
    keep_best,
    load_vectors,
    on_grid,
    to_csr,
    to_ranks,
)


def unit(rng, *shape):
    x = rng.normal(size=shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def sparse_unit(rng, rows, dimensions, used=4):
    x = np.zeros((rows, dimensions))
    for row in x:
        row[rng.choice(dimensions, used, replace=False)] = rng.normal(size=used)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


floats = st.floats(width=32, allow_nan=False)


@given(st.lists(st.tuples(floats, st.integers(0, 2**31 - 1)), min_size=1, max_size=30, unique=True))
@settings(max_examples=200, deadline=None)
def test_ranks_sort_by_score_down_then_row_up_and_come_back(results):
    scores = np.array([score for score, _ in results], np.float32)
    rows = np.array([row for _, row in results], np.int64)
    found_rows, found_scores = from_ranks(keep_best(to_ranks(scores, rows), len(results)))
    expected = sorted(results, key=lambda result: (-result[0], result[1]))
    assert found_rows.tolist() == [row for _, row in expected]
    assert found_scores.tolist() == [score for score, _ in expected]
    assert found_rows.dtype == np.int32
    assert found_scores.dtype == np.float32


def test_minus_zero_ties_with_zero_and_missing_comes_last():
    ranks = to_ranks(np.array([0.0, -0.0, -np.inf], np.float32), np.array([5, 4, 3]))
    rows, scores = from_ranks(keep_best(np.append(ranks, MISSING), 4))
    assert rows.tolist() == [4, 5, 3, -1]
    assert scores.tolist() == [0.0, 0.0, -np.inf, -np.inf]


def test_scores_are_the_exact_sums_in_any_order():
    rng = np.random.default_rng(0)
    query, passage = on_grid(unit(rng, 2, 768))
    exact = sum(
        Fraction(float(a)) * Fraction(float(b)) for a, b in zip(query, passage, strict=True)
    )
    ranks = DenseVectors(array=passage[None]).rank(query[None], np.array([[0]], np.int32))
    _, scores = from_ranks(ranks)
    assert scores[0, 0] == np.float32(float(exact))
    order = rng.permutation(768)
    shuffled = DenseVectors(array=passage[order][None]).best(query[order][None], 1)
    assert shuffled[0, 0] == ranks[0, 0]
    # The sum is exact before it is rounded, not merely close.
    in_float64 = sum(float(a) * float(b) for a, b in zip(query[order], passage[order], strict=True))
    assert Fraction(in_float64) == exact


def test_the_grid():
    values = np.array([0.5, 1.0, 0.3, -(2.0**-24), 2.0**-26, 0.0], np.float32)
    gridded = on_grid(values)
    steps = gridded.astype(np.float64) * 2**24
    assert (steps == np.rint(steps)).all()
    assert np.abs(gridded - values).max() <= 2.0**-25
    assert gridded.tolist()[:2] == [0.5, 1.0]


@pytest.mark.parametrize("k", [1, 3, 40, 60])
def test_dense_and_sparse_agree_with_a_plain_sort(k):
    rng = np.random.default_rng(1)
    vectors = sparse_unit(rng, 50, 120)
    vectors[10:14] = vectors[3]
    queries = sparse_unit(rng, 9, 120)
    queries[0] = 0
    queries[1] = vectors[3]

    table = on_grid(queries).astype(np.float64) @ on_grid(vectors).astype(np.float64).T
    table = table.astype(np.float32)
    order = np.lexsort((np.broadcast_to(np.arange(50), table.shape), -table), axis=1)[:, :k]
    expected = np.full((9, k), -1)
    expected[:, : order.shape[1]] = order

    sparse = gather([vectors[:30], vectors[30:]])
    dense = DenseVectors(array=on_grid(vectors))
    assert isinstance(sparse, SparseVectors)
    assert sparse.shape == dense.shape == (50, 120)
    for found in (sparse.best(on_grid(queries), k), dense.best(on_grid(queries), k)):
        rows, scores = from_ranks(found)
        assert (rows == expected).all()
        kept = order.shape[1]
        assert (scores[:, :kept] == np.take_along_axis(table, order, axis=1)).all()
        assert (scores[:, kept:] == -np.inf).all()
    if k >= 5:
        assert rows[1, :5].tolist() == [3, 10, 11, 12, 13]
        assert rows[0, :5].tolist() == [0, 1, 2, 3, 4]


def test_one_dense_stretch_makes_all_dense():
    rng = np.random.default_rng(2)
    parts = [sparse_unit(rng, 3, 100), unit(rng, 2, 100), sparse_unit(rng, 2, 100)]
    vectors = gather(parts)
    assert isinstance(vectors, DenseVectors)
    assert vectors.array.dtype == np.float32
    assert (vectors.array == on_grid(np.concatenate(parts))).all()


def test_saved_and_loaded(tmp_path):
    rng = np.random.default_rng(3)
    queries = on_grid(unit(rng, 4, 100))
    for name, part in (("dense", unit(rng, 6, 100)), ("sparse", sparse_unit(rng, 6, 100))):
        vectors = gather([part])
        (tmp_path / name).mkdir()
        vectors.save(tmp_path / name)
        loaded = load_vectors(tmp_path / name, passages=6)
        assert type(loaded) is type(vectors)
        assert (loaded.best(queries, 6) == vectors.best(queries, 6)).all()


def test_an_empty_batch():
    nobody = np.zeros((0, 100), np.float32)
    assert to_csr(nobody).shape == (0, 100)
    assert gather([np.eye(100, dtype=np.float32)]).best(nobody, 3).shape == (0, 3)


def test_passages_that_are_not_vectors():
    rng = np.random.default_rng(4)
    good = unit(rng, 5, 8)
    bad = unit(rng, 20, 8)
    bad[[1, 3], 2] = np.nan, np.inf
    with pytest.raises(VectorError, match=r"2 passage vectors are not finite \(rows 6, 8\)"):
        gather([good, bad])
    bad[:] = np.nan
    with pytest.raises(VectorError, match=r"rows 5, 6, 7, .*, 14, \.\.\.\)"):
        gather([good, bad])
    with pytest.raises(VectorError, match="passage 7: expected a vector of length 1, got 3.000"):
        gather([good, np.concatenate([good[:2], 3 * good[:1]])])
    with pytest.raises(VectorError, match=r"expected float32\[n, 8\], got float32\[5, 7\]"):
        gather([good, good[:, :7]])
    with pytest.raises(VectorError, match="got float64"):
        gather([good.astype(np.float64)])
    with pytest.raises(VectorError, match="at least one vector"):
        gather([])
    with pytest.raises(VectorError, match="at least one vector"):
        gather([good[:0]])


def test_queries_that_are_not_vectors():
    rng = np.random.default_rng(5)
    queries = unit(rng, 4, 8)
    queries[1, 3], queries[2, 0] = np.nan, -np.inf
    checked, finite = checked_queries(queries, 8)
    assert finite.tolist() == [True, False, False, True]
    assert not checked[1:3].any()
    assert (checked[[0, 3]] == on_grid(queries[[0, 3]])).all()
    with pytest.raises(VectorError, match="query 3: expected a vector of length 1, got 2.000"):
        checked_queries(np.concatenate([queries[:3], 2 * queries[3:]]), 8)
    with pytest.raises(VectorError, match="queries: expected"):
        checked_queries(queries, 9)
    with pytest.raises(VectorError, match="queries: expected"):
        checked_queries(queries[0], 8)
