"""Choosing the next token: one uniform number a token, inverse CDF, reproducible anywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

_BLOCK = 128
"""Tokens that `inverse_cdf` sums up at a time; what vocabularies of models are multiples of."""
_BELOW_ONE = 1.0 - 2.0**-24


def sample(
    logits: Float[Array, "S V"],
    stream: UInt32[Array, "S 2"],
    drawn: Int[Array, "S"],
    temperature: Float[Array, "S"],
    top_k: Int[Array, "S"],
    top_p: Float[Array, "S"],
    *,
    truncated: bool,
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Next token of every slot and its log-probability.

    The random number depends on the trajectory's threefry key and on how many tokens it has drawn,
    on nothing else. The log-probability is that of softmax(logits / T) over the whole vocabulary,
    also where top-k or top-p cut the choice; temperature 0 takes the first of the most likely
    tokens and reports T = 1. `truncated` False leaves the sort for top-k and top-p out of the
    program.
    """
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled - peak)
    log_total = jnp.log(jnp.sum(weights, axis=-1))
    kept = allowed(scaled, top_k, top_p) if truncated else jnp.ones(logits.shape, jnp.bool_)
    kept = jnp.where(greedy[:, None], scaled >= peak, kept)
    uniform = jnp.where(greedy, 0.0, jax.vmap(_uniform)(stream, drawn))
    token = inverse_cdf(jnp.where(kept, weights, 0.0), uniform)
    return token, _take(scaled, token) - peak[:, 0] - log_total


def allowed(
    scaled: Float[Array, "S V"], top_k: Int[Array, "S"], top_p: Float[Array, "S"]
) -> Bool[Array, "S V"]:
    """Tokens among the top k (0: off) and in the smallest set of mass top_p (1: off).

    The most likely token is always allowed, and so is whatever ties with the least likely allowed.
    Instead of sorting, the lowest allowed logit is searched by bisection over the order of floats:
    32 sums over the vocabulary, exact, and local where the vocabulary is sharded.
    """
    key = _ordered(scaled)
    mass = jax.nn.softmax(scaled, axis=-1)
    k = jnp.where(top_k > 0, top_k, scaled.shape[-1])

    def narrow(_, bounds):
        # Enough tokens are at `low` or above, and not at `high` or above.
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        above = key >= middle[:, None]
        enough = jnp.sum(above, axis=-1, dtype=jnp.int32) >= k
        enough |= (jnp.sum(jnp.where(above, mass, 0.0), axis=-1) >= top_p) & (top_p < 1)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    bounds = (jnp.min(key, axis=-1), jnp.max(key, axis=-1) + 1)
    low, _ = jax.lax.fori_loop(0, 32, narrow, bounds)
    return key >= low[:, None]


def _ordered(x: jax.Array) -> jax.Array:
    """int32 in the order of the float32 `x`; both zeros are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def inverse_cdf(weights: Float[Array, "S V"], uniform: Float[Array, "S"]) -> Int[Array, "S"]:
    """The token at the share `uniform`, in [0, 1), of each row's weight; never one of weight 0.

    A block of tokens first, then the token inside it. A running sum over the whole vocabulary costs
    more, and its rounding hands tokens of weight 0 up to 5e-5 of the probability at 150,000 tokens.
    """
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    block, rest = _pick(jnp.sum(blocks, axis=-1), uniform)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token, _ = _pick(inside, rest)
    return block * _BLOCK + token


def _pick(weights: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index i32[S] of the weight [S, n] that holds `uniform`, and where inside it, in [0, 1)."""
    # A weight of 0 cannot be reached, however the running sum rounds, and the last one can.
    reached = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
    target = uniform * jnp.max(reached, axis=-1)
    index = jnp.argmax(reached > target[:, None], axis=-1).astype(jnp.int32)
    inside = 1.0 - (_take(reached, index) - target) / _take(weights, index)
    return index, jnp.clip(inside, 0.0, _BELOW_ONE)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]


def _uniform(stream: jax.Array, drawn: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(stream, impl="threefry2x32"), drawn)
    return jax.random.uniform(key)
