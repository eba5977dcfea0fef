"""Choosing the next token: one uniform number a token, inverse CDF, reproducible anywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


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
    also where top-k or top-p cut the choice; temperature 0 takes the arg max and reports T = 1.
    `truncated` False leaves the sort for top-k and top-p out of the program.
    """
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    allowed = _allowed(scaled, top_k, top_p) if truncated else jnp.ones(logits.shape, jnp.bool_)
    cdf = jnp.cumsum(jnp.where(allowed, jnp.exp(logprobs), 0.0), axis=-1)
    uniform = jax.vmap(_uniform)(stream, drawn)
    # The last column is the total, so u * total < total always lands on a token with weight.
    below = cdf <= (uniform * cdf[:, -1])[:, None]
    token = jnp.minimum(jnp.sum(below, axis=-1), logits.shape[-1] - 1)
    token = jnp.where(greedy, jnp.argmax(logits, axis=-1), token).astype(jnp.int32)
    return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]


def _uniform(stream: jax.Array, drawn: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(stream, impl="threefry2x32"), drawn)
    return jax.random.uniform(key)


def _allowed(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Tokens inside the top k and inside the smallest set of mass top_p; ties are kept."""
    ordered = -jnp.sort(-scaled, axis=-1)
    vocab = scaled.shape[-1]
    last = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1
    k_floor = jnp.take_along_axis(ordered, last[:, None], axis=-1)
    mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
    before = mass - jax.nn.softmax(ordered, axis=-1)
    kept = jnp.where(before < top_p[:, None], ordered, jnp.inf)
    return scaled >= jnp.maximum(k_floor, jnp.min(kept, axis=-1, keepdims=True))
