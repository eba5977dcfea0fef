"""Blockwise attention against the whole score matrix, forward and backward, packed and cached."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sspjax.models.attention import attention

HEADS, KV_HEADS, DIM = 4, 2, 8


def plain(q, k, v, segments, window=0):
    """float64, one score matrix."""
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(DIM)
    length = q.shape[1]
    visible = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, :, None]
    visible &= np.tril(np.ones((length, length), bool))
    if window:
        visible &= ~np.tril(np.ones((length, length), bool), -window)
    scores = np.where(visible[:, None], scores, -np.inf)
    peak = np.where(np.isfinite(scores.max(-1)), scores.max(-1), 0.0)
    weights = np.exp(scores - peak[..., None])
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bnts,bsnh->btnh", weights, v)


@pytest.fixture
def packed():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 37, HEADS, DIM))
    k, v = rng.normal(size=(2, 2, 37, KV_HEADS, DIM))
    segments = np.zeros((2, 37), np.int32)
    segments[0, :20], segments[0, 20:33] = 1, 2
    segments[1, :5], segments[1, 5:37] = 1, 2
    positions = np.zeros((2, 37), np.int32)
    return q, k, v, positions, segments


def f32(*arrays):
    return [np.asarray(x, np.float32) for x in arrays]


@pytest.mark.parametrize(
    ("block", "window"), [(4, 0), (16, 0), (64, 0), (4, 1), (4, 6), (16, 5), (64, 7)]
)
def test_packed_rows_equal_the_whole_matrix(packed, block, window):
    q, k, v, positions, segments = packed
    out = attention(*f32(q, k, v), positions, segments, None, block=block, window=window)
    np.testing.assert_allclose(out, plain(q, k, v, segments, window), atol=2e-6)
    assert np.all(np.asarray(out)[segments == 0] == 0)


@pytest.mark.parametrize(("block", "window"), [(4, 0), (16, 0), (64, 0), (4, 6), (16, 5)])
def test_packed_gradient_equals_that_of_the_whole_matrix(packed, block, window):
    q, k, v, positions, segments = packed
    weight = np.random.default_rng(1).normal(size=q.shape)

    def loss(q, k, v):
        out = attention(q, k, v, positions, segments, None, block=block, window=window)
        return jnp.sum(out * np.asarray(weight, np.float32))

    ours = jax.grad(loss, argnums=(0, 1, 2))(*map(jnp.asarray, f32(q, k, v)))
    # Central differences in float64, on a few entries of each argument.
    rng = np.random.default_rng(2)
    for index, grad in enumerate(ours):
        for _ in range(5):
            place = tuple(rng.integers(n) for n in grad.shape)
            values = []
            for sign in (1, -1):
                moved = [q.copy(), k.copy(), v.copy()]
                moved[index][place] += sign * 1e-5
                values.append((plain(*moved, segments, window) * weight).sum())
            assert float(grad[place]) == pytest.approx((values[0] - values[1]) / 2e-5, abs=2e-5)


@pytest.mark.parametrize("window", [0, 4])
def test_cache_equals_full_context_at_any_slot_and_length(packed, window):
    q, k, v, _, _ = packed
    capacity, slots = 50, np.array([3, 0], np.int32)
    length = np.array([11, 30], np.int32)
    cache_k, cache_v = (
        np.random.default_rng(i).normal(size=(3, 5, capacity, KV_HEADS, DIM)) for i in (3, 4)
    )
    for row, slot in enumerate(slots):
        cache_k[1, slot, : length[row]] = k[row, : length[row]]
        cache_v[1, slot, : length[row]] = v[row, : length[row]]
    last = np.stack([q[row, length[row] - 3 : length[row]] for row in range(2)])
    positions = (length[:, None] - 3 + np.arange(3)[None]).astype(np.int32)
    out = attention(
        *map(jnp.asarray, f32(last, cache_k, cache_v)),
        positions,
        None,
        length,
        layer=jnp.int32(1),
        slots=slots,
        block=16,
        window=window,
    )
    ones = np.ones((1, 37), np.int32)
    for row in range(2):
        n = length[row]
        own = (x[row : row + 1, :n] for x in (q, k, v))
        full = plain(*own, ones[:, :n], window)
        np.testing.assert_allclose(out[row], full[0, -3:], atol=2e-6)


@pytest.mark.parametrize("window", [0, 4])
def test_a_longer_neighbour_does_not_change_a_bit(packed, window):
    q, k, v, _, _ = packed
    rng = np.random.default_rng(5)
    cache = [jnp.asarray(rng.normal(size=(1, 2, 64, KV_HEADS, DIM)), jnp.float32) for _ in "kv"]
    query = jnp.asarray(q[:, :1], jnp.float32)

    @jax.jit
    def run(positions, kv_length):
        return attention(
            query, *cache, positions, None, kv_length, layer=jnp.int32(0), block=8, window=window
        )

    alone = run(np.array([[5], [0]], np.int32), np.array([6, 0], np.int32))
    beside = run(np.array([[5], [60]], np.int32), np.array([6, 61], np.int32))
    assert np.array_equal(alone[0], beside[0])


def test_memory_does_not_hold_the_score_matrix():
    shape = (1, 4096, HEADS, DIM)
    q = jax.ShapeDtypeStruct(shape, jnp.float32)
    k = jax.ShapeDtypeStruct((1, 4096, KV_HEADS, DIM), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def loss(q, k, v, segments):
        return jnp.sum(attention(q, k, v, segments, segments, None, block=128))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k, segments).compile()
    matrix = HEADS * 4096 * 4096 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < matrix / 16
