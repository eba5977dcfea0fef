"""The decoder: one block for Qwen2, Qwen3, Llama and Mistral, in three uses.

`hidden` runs packed training rows, `extend` prefills and extends cache rows, `decode` feeds one
token to every slot. All three go through the same `_block`; only where keys come from differs.
Flax NNX declares and initialises the parameters; everywhere else they are a pure nested dict.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from sspjax.mesh import Axes, Layout
from sspjax.models.attention import attention
from sspjax.models.presets import DecoderConfig
from sspjax.types import Cache, Params

Layer = dict[str, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Decoder(nnx.Module):
    """Parameters of a decoder, float32. The layers are stacked: every array starts with `layers`.

    Each parameter carries its logical axes as metadata (`axes`), read by `parameter_axes`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config

        def normal(*shape: int, axes: Axes, inputs: int) -> nnx.Param:
            """Variance 1 / inputs, which keeps the scale of what goes through at any width."""
            value = inputs**-0.5 * jax.random.normal(rngs.params(), shape, jnp.float32)
            return nnx.Param(value, axes=axes)

        def constant(value: float, *shape: int, axes: Axes) -> nnx.Param:
            return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)

        n, d, h = c.layers, c.width, c.head_dim
        self.embedding = normal(c.vocab_size, d, axes=("vocab", "embed"), inputs=d)
        self.attention_norm = constant(1.0, n, d, axes=("layers", None))
        self.q = normal(n, d, c.heads, h, axes=("layers", "embed", "heads", "head_dim"), inputs=d)
        self.k = normal(
            n, d, c.kv_heads, h, axes=("layers", "embed", "kv_heads", "head_dim"), inputs=d
        )
        self.v = normal(
            n, d, c.kv_heads, h, axes=("layers", "embed", "kv_heads", "head_dim"), inputs=d
        )
        self.o = normal(
            n, c.heads, h, d, axes=("layers", "heads", "head_dim", "embed"), inputs=c.heads * h
        )
        if c.qkv_bias:
            self.q_bias = constant(0.0, n, c.heads, h, axes=("layers", "heads", "head_dim"))
            self.k_bias = constant(0.0, n, c.kv_heads, h, axes=("layers", "kv_heads", "head_dim"))
            self.v_bias = constant(0.0, n, c.kv_heads, h, axes=("layers", "kv_heads", "head_dim"))
        if c.qk_norm:
            self.q_norm = constant(1.0, n, h, axes=("layers", None))
            self.k_norm = constant(1.0, n, h, axes=("layers", None))
        self.mlp_norm = constant(1.0, n, d, axes=("layers", None))
        self.gate = normal(n, d, c.mlp, axes=("layers", "embed", "mlp"), inputs=d)
        self.up = normal(n, d, c.mlp, axes=("layers", "embed", "mlp"), inputs=d)
        self.down = normal(n, c.mlp, d, axes=("layers", "mlp", "embed"), inputs=c.mlp)
        self.final_norm = constant(1.0, d, axes=(None,))
        if not c.tied:
            self.head = normal(d, c.vocab_size, axes=("embed", "vocab"), inputs=d)


NOT_STACKED = ("embedding", "final_norm", "head")


def init_params(config: DecoderConfig, key: jax.Array) -> Params:
    """Fresh parameters as a pure dict, float32."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)), nnx.Param))


@functools.cache
def parameter_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Shape of every parameter, by name."""
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return types.MappingProxyType({name: x.shape for name, x in params.items()})


@functools.cache
def parameter_axes(config: DecoderConfig) -> Mapping[str, Axes]:
    """Logical axes of every parameter, by name."""
    module = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return types.MappingProxyType(
        {
            str(path[-1]): variable.get_metadata()["axes"]
            for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
        }
    )


def parameter_shardings(config: DecoderConfig, layout: Layout) -> Params:
    """Sharding of every parameter under a layout, as a pure dict."""
    axes = parameter_axes(config)
    return {
        name: layout.sharding(axes[name], shape, name)
        for name, shape in parameter_shapes(config).items()
    }


def cast_params(params: Params, dtype: Any) -> Params:
    """What the model computes with: islands hold this copy, the trainer makes it in its forward."""
    return jax.tree.map(lambda x: x.astype(dtype), params)


@dataclasses.dataclass(frozen=True)
class Model:
    """The decoder's pure functions under one layout. Hashable: a static argument of jit."""

    config: DecoderConfig
    layout: Layout
    dtype: Any
    block: int = 512
    remat: bool = True

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "R L"],
        positions: Int[Array, "R L"],
        segments: Int[Array, "R L"],
    ) -> Float[Array, "R L width"]:
        """Final hidden states of packed rows; a token sees its own segment only."""
        params = cast_params(params, self.dtype)
        x = self._embed(params, tokens, "batch")

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention(
                q, k, v, positions, segments, None, block=self.block, window=self.config.window
            )

        def layer_step(x: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
            return self._block(x, layer, positions, attend, "batch"), None

        step = jax.checkpoint(layer_step) if self.remat else layer_step
        x, _ = jax.lax.scan(step, x, _stacked(params))
        return _rms_norm(x, params["final_norm"], self.config.rms_eps)

    def unembed(
        self, params: Params, hidden: Float[Array, "... width"]
    ) -> Float[Array, "... vocab"]:
        """Logits in float32."""
        head = params["embedding"].T if self.config.tied else params["head"]
        return jnp.einsum(
            "...d,dv->...v", hidden, head.astype(self.dtype), preferred_element_type=jnp.float32
        )

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: Int[Array, "B T"],
        slots: Int[Array, "B"],
        start: Int[Array, "B"],
        count: Int[Array, "B"],
    ) -> Cache:
        """Appends `count[b]` tokens to slot `slots[b]`, whose cache holds `start[b]` tokens.

        A row with count 0 does nothing. Slots must be distinct among the rows that do something.
        """
        offset = jnp.arange(tokens.shape[1])
        positions = start[:, None] + offset[None, :]
        # Padding is written out of bounds, which drops it.
        capacity = cache.keys.shape[2]
        target = jnp.where(offset[None, :] < count[:, None], positions, capacity)
        rows = slots[:, None]
        kv_length = jnp.where(count > 0, start + count, 0)
        cache, _ = self._cached(params, cache, tokens, positions, kv_length, rows, target, slots)
        return cache

    def decode(
        self,
        params: Params,
        cache: Cache,
        tokens: Int[Array, "S"],
        length: Int[Array, "S"],
        active: Bool[Array, "S"],
    ) -> tuple[Cache, Float[Array, "S vocab"]]:
        """Feeds one token to every active slot; returns the logits of the next one."""
        capacity = cache.keys.shape[2]
        target = jnp.where(active, length, capacity)[:, None]
        rows = jnp.arange(tokens.shape[0])[:, None]
        kv_length = jnp.where(active, length + 1, 0)
        cache, x = self._cached(
            params, cache, tokens[:, None], length[:, None], kv_length, rows, target, None
        )
        x = _rms_norm(x[:, 0], params["final_norm"], self.config.rms_eps)
        return cache, self.layout.constrain(self.unembed(params, x), "slots", "vocab")

    def empty_cache(self, slots: int, length: int) -> Cache:
        """Zeros of shape [layers, slots, length, kv_heads, head_dim] in the model's dtype."""
        c = self.config
        shape = (c.layers, slots, length, c.kv_heads, c.head_dim)
        axes = ("layers", "slots", "length", "kv_heads", "head_dim")
        sharding = self.layout.sharding(axes, shape, "cache")

        def zeros() -> jax.Array:
            return jax.lax.with_sharding_constraint(jnp.zeros(shape, self.dtype), sharding)

        return Cache(keys=zeros(), values=zeros())

    def _cached(self, params, cache, tokens, positions, kv_length, rows, target, slots):
        batch = "slots" if slots is None else "batch"
        x = self._embed(params, tokens, batch)

        def layer_step(carry, inputs):
            x, keys, values = carry
            index, layer = inputs

            def attend(q, k, v):
                nonlocal keys, values
                keys = keys.at[index, rows, target].set(k, mode="drop")
                values = values.at[index, rows, target].set(v, mode="drop")
                return attention(
                    q, keys, values, positions, None, kv_length, layer=index, slots=slots,
                    block=self.block, window=self.config.window,
                )  # fmt: skip

            x = self._block(x, layer, positions, attend, batch)
            return (x, keys, values), None

        layers = (jnp.arange(self.config.layers), _stacked(params))
        (x, keys, values), _ = jax.lax.scan(layer_step, (x, cache.keys, cache.values), layers)
        return Cache(keys=keys, values=values), x

    def _embed(self, params: Params, tokens: jax.Array, batch: str) -> jax.Array:
        # Rows are read from a table that is whole along width: gathering from one that is split
        # there would replicate the activations instead.
        table = self.layout.constrain(params["embedding"], "vocab", None)
        return self.layout.constrain(table[tokens], batch, "length", "activation")

    def _block(
        self, x: jax.Array, layer: Layer, positions: jax.Array, attend: Attend, batch: str
    ) -> jax.Array:
        """Pre-norm attention and SwiGLU, each added to the residual stream [B, T, width]."""
        c, pin = self.config, self.layout.constrain
        y = _rms_norm(x, layer["attention_norm"], c.rms_eps)
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, layer[name]) for name in ("q", "k", "v"))
        if c.qkv_bias:
            q, k, v = (
                a + layer[name][None, None]
                for a, name in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias"))
            )
        if c.qk_norm:
            q = _rms_norm(q, layer["q_norm"], c.rms_eps)
            k = _rms_norm(k, layer["k_norm"], c.rms_eps)
        frequencies = rope_frequencies(c)
        q, k = (_rotate(a, positions, frequencies) for a in (q, k))
        q = pin(q, batch, "length", "heads", "head_dim")
        k = pin(k, batch, "length", "kv_heads", "head_dim")
        v = pin(v, batch, "length", "kv_heads", "head_dim")
        x = x + jnp.einsum("btnh,nhd->btd", attend(q, k, v), layer["o"])
        x = pin(x, batch, "length", "activation")
        y = _rms_norm(x, layer["mlp_norm"], c.rms_eps)
        y = jax.nn.silu(jnp.einsum("btd,df->btf", y, layer["gate"])) * jnp.einsum(
            "btd,df->btf", y, layer["up"]
        )
        y = pin(y, batch, "length", "mlp")
        x = x + jnp.einsum("btf,fd->btd", y, layer["down"])
        return pin(x, batch, "length", "activation")


def _stacked(params: Params) -> Layer:
    return {name: x for name, x in params.items() if name not in NOT_STACKED}


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis; the mean of squares is float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - scale.ndim))


def rope_frequencies(config: DecoderConfig) -> np.ndarray:
    """Radians a token of each rotation, f32[head_dim / 2], fastest first.

    They are rounded as in the code that published models were trained with: an angle is a frequency
    times a position, so after 100,000 tokens the last bit of a frequency is seen.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    period = np.power(config.rope_theta, exponent.astype(np.float64)).astype(np.float32)
    frequency = np.float32(1) / period
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original * frequency.astype(np.float64) / (2 * np.pi)
    fast = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return (frequency * (fast + (1 - fast) / scaling.factor)).astype(np.float32)


def _rotate(x: jax.Array, positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Rotary embedding, rotate-half form (Su et al., 2021); angles in float32. x: [B, T, n, h]."""
    half = len(frequencies)
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
