"""One attention, for packed training rows and for the cache of a rollout.

`attention` has a portable body, a blockwise online softmax: no [T, S] score matrix ever exists, so
memory is O(T x block) in the forward and in the backward pass (Dao et al., 2022, FlashAttention,
algorithms 1 and 4; here as plain XLA loops). Masked blocks leave the running sums exactly as they
were, so a row's bits do not depend on how far its neighbours have got.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MASKED = -1e30
"""Score of an invisible key: finite, so that a fully masked tile gives no NaN."""


def attention(
    q: Float[Array, "B T heads head_dim"],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None,
    kv_length: Int[Array, "B"] | None,
    *,
    layer: Int[Array, ""] | None = None,
    slots: Int[Array, "B"] | None = None,
    block: int = 512,
    window: int = 0,
) -> Float[Array, "B T heads head_dim"]:
    """Causal attention with grouped keys; the softmax is float32, the result has q's dtype.

    Packed rows (`kv_length` None): k and v are [B, T, kv_heads, head_dim]; a token sees the tokens
    before it in its own segment. Differentiable.

    Cache (`segments` None): k and v are the whole cache [layers, S, C, kv_heads, head_dim], read in
    place at `layer`, rows `slots` (None: row b belongs to query row b); key c is at position c and
    a query sees keys at positions up to its own. `kv_length` bounds the loop: keys at or beyond the
    longest one are never read.

    `window` (static, 0: none): a query sees itself and the `window - 1` tokens before it; tiles
    that lie before every query's window are not read.
    """
    if kv_length is None:
        return _packed(q, k, v, segments, min(block, q.shape[1]), window)
    return _cached(q, k, v, positions, kv_length, layer, slots, min(block, k.shape[2]), window)


# Cache --------------------------------------------------------------------------------------------


def _cached(q, k, v, positions, kv_length, layer, slots, block, window):
    batch, length, heads, head_dim = q.shape
    _, num_slots, capacity, kv_heads, _ = k.shape
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)

    def read(cache, start):
        if slots is None:
            tile = jax.lax.dynamic_slice(
                cache, (layer, 0, start, 0, 0), (1, num_slots, block, kv_heads, head_dim)
            )
            return tile[0]
        columns = start + jnp.arange(block)
        return cache[layer, slots[:, None], columns[None, :]]

    def step(j, carry):
        # The last tile is shifted back to stay inside; keys it repeats are masked out.
        start = jnp.minimum(j * block, capacity - block)
        column = start + jnp.arange(block)
        visible = (column[None, None, :] <= positions[:, :, None]) & (column >= j * block)[
            None, None
        ]
        if window:
            visible &= column[None, None, :] > positions[:, :, None] - window
        return _accumulate(carry, grouped, read(k, start), read(v, start), visible)

    tiles = (jnp.max(kv_length) + block - 1) // block
    first = 0
    if window:
        # Rows that do nothing stand anywhere: they do not say where reading begins.
        earliest = jnp.where(kv_length > 0, jnp.min(positions, axis=1), capacity)
        first = jnp.maximum(jnp.min(earliest) - window + 1, 0) // block
    carry = jax.lax.fori_loop(first, tiles, step, _empty(grouped))
    return _finish(carry).reshape(q.shape).astype(q.dtype)


def _empty(grouped):
    batch, length, kv_heads, groups, head_dim = grouped.shape
    shape = (batch, kv_heads, groups, length)
    return (
        jnp.zeros((*shape, head_dim), jnp.float32),
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _scores(grouped, k, visible):
    """[B, kv_heads, groups, T, keys] float32, invisible keys at MASKED."""
    scale = jnp.float32(grouped.shape[-1] ** -0.5)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    return jnp.where(visible[:, None, None], scores * scale, jnp.float32(MASKED))


def _accumulate(carry, grouped, k, v, visible):
    total, peak, norm = carry
    scores = _scores(grouped, k, visible)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
    weights = jnp.where(visible[:, None, None], jnp.exp(scores - new_peak[..., None]), 0.0)
    shrink = jnp.exp(peak - new_peak)
    values = jnp.einsum(
        "bkgts,bskh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return total * shrink[..., None] + values, new_peak, norm * shrink + jnp.sum(weights, axis=-1)


def _finish(carry):
    """[B, T, kv_heads, groups, head_dim]; rows that see nothing (padding) give 0."""
    total, _, norm = carry
    out = total / jnp.maximum(norm, jnp.float32(1e-30))[..., None]
    return out.transpose(0, 3, 1, 2, 4)


# Packed rows --------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _packed(q, k, v, segments, block, window):
    return _packed_forward(q, k, v, segments, block, window)[0]


def _tile(x, index, block, axis=2):
    return jax.lax.dynamic_slice_in_dim(x, index * block, block, axis=axis)


def _visible(segments, i, j, block, groups, window):
    """Mask [B, 1, block * groups, block] of query tile i against key tile j.

    Same segment, not later, within the window, not padding; each query counts once for every head
    of its group.
    """
    of_queries, of_keys = (_tile(segments, n, block, axis=1) for n in (i, j))
    rows, columns = (n * block + jnp.arange(block) for n in (i, j))
    same = (of_queries[:, :, None] == of_keys[:, None, :]) & (of_queries > 0)[:, :, None]
    visible = same & (rows[:, None] >= columns[None, :])[None]
    if window:
        # Tokens of one segment are neighbours in the row: places tell how far apart they are.
        visible &= (rows[:, None] - columns[None, :] < window)[None]
    return jnp.repeat(visible, groups, axis=1)[:, None]


def _head_major(x, kv_heads, block):
    """[B, T, heads, h] to [B, kv_heads, T * groups, h], T padded to whole tiles.

    The heads that share a key are rows of one matrix, so every product below is a plain batched
    matrix product over contiguous tiles.
    """
    batch, length, heads, head_dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    x = x.reshape(batch, -1, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 1, 3, 4)
    return x.reshape(batch, kv_heads, -1, head_dim)


def _token_major(x, heads, length):
    """The inverse of `_head_major`, without the padding."""
    batch, kv_heads, _, head_dim = x.shape
    x = x.reshape(batch, kv_heads, -1, heads // kv_heads, head_dim).transpose(0, 2, 1, 3, 4)
    return x.reshape(batch, -1, heads, head_dim)[:, :length]


def _product(equation, a, b):
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _packed_forward(q, k, v, segments, block, window):
    length, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    groups, scale = heads // kv_heads, jnp.float32(q.shape[3] ** -0.5)
    keys, values = _head_major(k, kv_heads, block), _head_major(v, kv_heads, block)
    queries = _head_major(q, kv_heads, block)
    padded = jnp.pad(segments, ((0, 0), (0, -length % block)))

    def query_tile(i):
        tile = _tile(queries, i, block * groups)

        def step(j, carry):
            total, peak, norm = carry
            visible = _visible(padded, i, j, block, groups, window)
            scores = _product("bkth,bksh->bkts", tile, _tile(keys, j, block)) * scale
            scores = jnp.where(visible, scores, jnp.float32(MASKED))
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0.0)
            shrink = jnp.exp(peak - new_peak)
            added = _product("bkts,bksh->bkth", weights.astype(v.dtype), _tile(values, j, block))
            total = total * shrink[..., None] + added
            return total, new_peak, norm * shrink + jnp.sum(weights, axis=-1)

        rows = tile.shape[:3]
        start = (
            jnp.zeros(tile.shape, jnp.float32),
            jnp.full(rows, MASKED, jnp.float32),
            jnp.zeros(rows, jnp.float32),
        )
        first = jnp.maximum(i * block - window + 1, 0) // block if window else 0
        total, peak, norm = jax.lax.fori_loop(first, i + 1, step, start)
        norm = jnp.maximum(norm, jnp.float32(1e-30))
        return (total / norm[..., None]).astype(q.dtype), peak + jnp.log(norm)

    tiles = padded.shape[1] // block
    out, log_norm = jax.lax.map(query_tile, jnp.arange(tiles))
    out = jnp.moveaxis(out, 0, 2).reshape(queries.shape)
    return _token_major(out, heads, length), (q, k, v, segments, out, log_norm)


def _packed_backward(block, window, saved, d_out):
    q, k, v, segments, out, log_norm = saved
    length, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    groups, scale = heads // kv_heads, jnp.float32(q.shape[3] ** -0.5)
    keys, values = _head_major(k, kv_heads, block), _head_major(v, kv_heads, block)
    queries, d_out = (_head_major(x, kv_heads, block) for x in (q, d_out))
    padded = jnp.pad(segments, ((0, 0), (0, -length % block)))
    tiles = padded.shape[1] // block
    # Row sums of dO * O: the softmax's own term of the gradient.
    overlap = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def key_tile(d_q, j):
        key_part, value_part = _tile(keys, j, block), _tile(values, j, block)

        def step(i, carry):
            d_q, d_k, d_v = carry
            query_part, d_part = _tile(queries, i, block * groups), _tile(d_out, i, block * groups)
            visible = _visible(padded, i, j, block, groups, window)
            scores = _product("bkth,bksh->bkts", query_part, key_part) * scale
            weights = jnp.where(visible, jnp.exp(scores - log_norm[i][..., None]), 0.0)
            d_weights = _product("bkth,bksh->bkts", d_part, value_part)
            d_scores = weights * (d_weights - _tile(overlap, i, block * groups)[..., None]) * scale
            d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
            d_v += _product("bkts,bkth->bksh", weights, d_part)
            d_k += _product("bkts,bkth->bksh", d_scores, query_part)
            moved = _tile(d_q, i, block * groups) + _product("bkts,bksh->bkth", d_scores, key_part)
            d_q = jax.lax.dynamic_update_slice_in_dim(d_q, moved, i * block * groups, axis=2)
            return d_q, d_k, d_v

        zero = jnp.zeros(key_part.shape, jnp.float32)
        # The last query that sees this tile's last key, and its tile.
        end = jnp.minimum((j * block + block + window - 2) // block + 1, tiles) if window else tiles
        d_q, d_k, d_v = jax.lax.fori_loop(j, end, step, (d_q, zero, zero))
        return d_q, (d_k, d_v)

    d_q, parts = jax.lax.scan(key_tile, jnp.zeros(queries.shape, jnp.float32), jnp.arange(tiles))
    d_k, d_v = (jnp.moveaxis(x, 0, 2).reshape(keys.shape) for x in parts)
    return (
        _token_major(d_q, heads, length).astype(q.dtype),
        _token_major(d_k, kv_heads, length).astype(k.dtype),
        _token_major(d_v, kv_heads, length).astype(v.dtype),
        None,
    )


_packed.defvjp(_packed_forward, _packed_backward)
