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
) -> Float[Array, "B T heads head_dim"]:
    """Causal attention with grouped keys; the softmax is float32, the result has q's dtype.

    Packed rows (`kv_length` None): k and v are [B, T, kv_heads, head_dim]; a token sees the tokens
    before it in its own segment. Differentiable.

    Cache (`segments` None): k and v are the whole cache [layers, S, C, kv_heads, head_dim], read in
    place at `layer`, rows `slots` (None: row b belongs to query row b); key c is at position c and
    a query sees keys at positions up to its own. `kv_length` bounds the loop: keys at or beyond the
    longest one are never read.
    """
    if kv_length is None:
        return _packed(q, k, v, segments, min(block, q.shape[1]))
    return _cached(q, k, v, positions, kv_length, layer, slots, min(block, k.shape[2]))


# Cache --------------------------------------------------------------------------------------------


def _cached(q, k, v, positions, kv_length, layer, slots, block):
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
        return _accumulate(carry, grouped, read(k, start), read(v, start), visible)

    tiles = (jnp.max(kv_length) + block - 1) // block
    carry = jax.lax.fori_loop(0, tiles, step, _empty(grouped))
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _packed(q, k, v, segments, block):
    return _packed_forward(q, k, v, segments, block)[0]


def _tile(x, index, block):
    return jax.lax.dynamic_slice_in_dim(x, index * block, block, axis=1)


def _visible(segments_q, segments_k, i, j, block):
    """Mask of query tile i against key tile j: same segment, not later, not padding."""
    rows = i * block + jnp.arange(block)
    columns = j * block + jnp.arange(block)
    same = (segments_q[:, :, None] == segments_k[:, None, :]) & (segments_q > 0)[:, :, None]
    return same & (rows[:, None] >= columns[None, :])[None]


def _padded(x, block):
    extra = -x.shape[1] % block
    return jnp.pad(x, ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2)))


def _packed_forward(q, k, v, segments, block):
    length = q.shape[1]
    qp, kp, vp, sp = (_padded(x, block) for x in (q, k, v, segments))
    batch, padded, heads, head_dim = qp.shape
    kv_heads = k.shape[2]
    grouped = qp.reshape(batch, padded, kv_heads, heads // kv_heads, head_dim)

    def query_tile(i):
        tile, tile_segments = _tile(grouped, i, block), _tile(sp, i, block)

        def step(j, carry):
            visible = _visible(tile_segments, _tile(sp, j, block), i, j, block)
            return _accumulate(carry, tile, _tile(kp, j, block), _tile(vp, j, block), visible)

        carry = jax.lax.fori_loop(0, i + 1, step, _empty(tile))
        _, peak, norm = carry
        return _finish(carry).astype(q.dtype), peak + jnp.log(jnp.maximum(norm, 1e-30))

    out, log_norm = jax.lax.map(query_tile, jnp.arange(padded // block))
    out = out.swapaxes(0, 1).reshape(batch, padded, heads, head_dim)[:, :length]
    return out, (q, k, v, segments, out, log_norm)


def _packed_backward(block, saved, d_out):
    q, k, v, segments, out, log_norm = saved
    length = q.shape[1]
    qp, kp, vp, sp, op, dp = (_padded(x, block) for x in (q, k, v, segments, out, d_out))
    batch, padded, heads, head_dim = qp.shape
    kv_heads = k.shape[2]
    shape = (batch, padded, kv_heads, heads // kv_heads, head_dim)
    qp, op, dp = (x.reshape(shape) for x in (qp, op, dp))
    # Row sums of dO * O: the softmax's own term of the gradient.
    overlap = jnp.sum(dp.astype(jnp.float32) * op.astype(jnp.float32), axis=-1)
    scale = jnp.float32(head_dim**-0.5)
    tiles = padded // block

    def key_tile(d_q, j):
        k_tile, v_tile, k_segments = _tile(kp, j, block), _tile(vp, j, block), _tile(sp, j, block)

        def step(i, carry):
            d_q, d_k, d_v = carry
            q_tile, d_tile = _tile(qp, i, block), _tile(dp, i, block)
            visible = _visible(_tile(sp, i, block), k_segments, i, j, block)
            scores = _scores(q_tile, k_tile, visible)
            weights = jnp.where(
                visible[:, None, None], jnp.exp(scores - log_norm[i][..., None]), 0.0
            )
            d_weights = jnp.einsum(
                "btkgh,bskh->bkgts", d_tile, v_tile, preferred_element_type=jnp.float32
            )
            centre = _tile(overlap, i, block).transpose(0, 2, 3, 1)
            d_scores = (weights * (d_weights - centre[..., None]) * scale).astype(q.dtype)
            weights = weights.astype(q.dtype)
            d_v += jnp.einsum(
                "bkgts,btkgh->bskh", weights, d_tile, preferred_element_type=jnp.float32
            )
            d_k += jnp.einsum(
                "bkgts,btkgh->bskh", d_scores, q_tile, preferred_element_type=jnp.float32
            )
            piece = jnp.einsum(
                "bkgts,bskh->btkgh", d_scores, k_tile, preferred_element_type=jnp.float32
            )
            d_q = jax.lax.dynamic_update_slice_in_dim(
                d_q, _tile(d_q, i, block) + piece, i * block, axis=1
            )
            return d_q, d_k, d_v

        zero = jnp.zeros(k_tile.shape, jnp.float32)
        d_q, d_k, d_v = jax.lax.fori_loop(j, tiles, step, (d_q, zero, zero))
        return d_q, (d_k, d_v)

    d_q, (d_k, d_v) = jax.lax.scan(key_tile, jnp.zeros(shape, jnp.float32), jnp.arange(tiles))

    def joined(x):
        return x.swapaxes(0, 1).reshape(batch, padded, kv_heads, head_dim)[:, :length]

    d_q = d_q.reshape(batch, padded, heads, head_dim)[:, :length]
    return d_q.astype(q.dtype), joined(d_k).astype(k.dtype), joined(d_v).astype(v.dtype), None


_packed.defvjp(_packed_forward, _packed_backward)
