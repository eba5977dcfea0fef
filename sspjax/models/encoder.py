"""The text encoder: BERT, from token ids to one unit vector for each text.

MiniLM, E5 and BGE are this network at different sizes. Flax NNX declares the parameters; everywhere
else they are a pure nested dict. Attention is written head-major, [batch, heads, length, head_dim],
which XLA on CPU computes 1.6 times as fast as the other order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sspjax.config import ConfigError
from sspjax.types import Params

Pooling = Literal["mean", "cls"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """An encoder of the BERT family (Devlin et al. 2019), with learnt absolute positions."""

    vocab_size: int
    positions: int
    """Longest text in tokens, [CLS] and [SEP] included."""
    types: int
    """Rows of the table of segment types; texts are all of type 0."""
    layers: int
    width: int
    mlp: int
    heads: int
    norm_eps: float
    pooling: Pooling
    """The vector of a text: the mean of its tokens' vectors, or that of [CLS]."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError(
                f"encoder: width={self.width} must be a multiple of heads={self.heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Bert(nnx.Module):
    """Parameters of an encoder, float32. The layers are stacked: their arrays start with [layers].

    Linear maps have the inputs first. Initialised as BERT is: normal with deviation 0.02.
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        c, n, d, h = config, config.layers, config.width, config.head_dim

        def normal(*shape: int) -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, jnp.float32))

        def constant(value: float, *shape: int) -> nnx.Param:
            return nnx.Param(jnp.full(shape, value, jnp.float32))

        self.words, self.places, self.types = (
            normal(size, d) for size in (c.vocab_size, c.positions, c.types)
        )
        self.norm, self.norm_bias = constant(1.0, d), constant(0.0, d)
        self.q, self.k, self.v = (normal(n, d, c.heads, h) for _ in range(3))
        self.q_bias, self.k_bias, self.v_bias = (constant(0.0, n, c.heads, h) for _ in range(3))
        self.o, self.o_bias = normal(n, c.heads, h, d), constant(0.0, n, d)
        self.attention_norm = constant(1.0, n, d)
        self.attention_norm_bias = constant(0.0, n, d)
        self.up, self.up_bias = normal(n, d, c.mlp), constant(0.0, n, c.mlp)
        self.down, self.down_bias = normal(n, c.mlp, d), constant(0.0, n, d)
        self.mlp_norm, self.mlp_norm_bias = constant(1.0, n, d), constant(0.0, n, d)


NOT_STACKED = ("words", "places", "types", "norm", "norm_bias")


def init_params(config: EncoderConfig, key: jax.Array) -> Params:
    """Fresh parameters as a pure dict, float32."""
    return nnx.to_pure_dict(nnx.state(Bert(config, rngs=nnx.Rngs(params=key)), nnx.Param))


@functools.partial(jax.jit, static_argnames="config")
def encode(
    params: Params,
    tokens: Int[Array, "B T"],
    length: Int[Array, "B"],
    *,
    config: EncoderConfig,
) -> Float[Array, "B width"]:
    """Unit vectors of texts, float32; row b has `length[b]` tokens, at least one, from the left.

    A row's bits do not depend on the other rows.
    """
    count = tokens.shape[1]
    seen = jnp.arange(count)[None, :] < length[:, None]
    x = params["words"][tokens] + (params["places"][:count] + params["types"][0][None])[None]
    x = _layer_norm(x, params["norm"], params["norm_bias"], config.norm_eps)

    def layer_step(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        return _block(x, layer, seen, config), None

    stacked = {name: value for name, value in params.items() if name not in NOT_STACKED}
    x, _ = jax.lax.scan(layer_step, x, stacked)
    if config.pooling == "cls":
        pooled = x[:, 0]
    else:
        pooled = jnp.einsum("btd,bt->bd", x, seen.astype(x.dtype))
        pooled = pooled / length[:, None].astype(x.dtype)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def _block(x: jax.Array, layer: Params, seen: jax.Array, config: EncoderConfig) -> jax.Array:
    """Attention and a two-layer network, each added to its input and normalised after it."""

    def heads(name: str) -> jax.Array:
        y = jnp.einsum("btd,dnh->bnth", x, layer[name])
        return y + layer[f"{name}_bias"][None, :, None, :]

    scores = jnp.einsum("bnth,bnsh->bnts", heads("q"), heads("k")) * config.head_dim**-0.5
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    # The sum of the weights divides [T, head_dim] numbers here instead of [T, T].
    mixed = jnp.einsum("bnts,bnsh->bnth", weights, heads("v"))
    mixed = mixed / weights.sum(axis=-1, keepdims=True)
    y = jnp.einsum("bnth,nhd->btd", mixed, layer["o"]) + layer["o_bias"][None, None]
    eps = config.norm_eps
    x = _layer_norm(x + y, layer["attention_norm"], layer["attention_norm_bias"], eps)
    y = jnp.einsum("btd,df->btf", x, layer["up"]) + layer["up_bias"][None, None]
    y = jax.nn.gelu(y, approximate=False)
    y = jnp.einsum("btf,fd->btd", y, layer["down"]) + layer["down_bias"][None, None]
    return _layer_norm(x + y, layer["mlp_norm"], layer["mlp_norm_bias"], eps)


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) * scale + bias over the last axis of [B, T, width]."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * scale[None, None] + bias[None, None]
