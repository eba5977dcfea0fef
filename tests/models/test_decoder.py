"""The decoder against a float64 numpy one: families, packing, caches, meshes, memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_decoder import logits as plain_logits

from sspjax.config import ConfigError, MeshConfig
from sspjax.mesh import island_layout, train_layout
from sspjax.models.decoder import (
    Model,
    init_params,
    parameter_axes,
    parameter_shardings,
)
from sspjax.models.presets import DecoderConfig, Llama3Scaling, preset

SMALL = DecoderConfig(
    vocab_size=64, layers=2, width=32, mlp=48, heads=4, kv_heads=2, head_dim=8, rope_theta=1e4
)
FAMILIES = {
    "llama": dataclasses.replace(SMALL, rms_eps=1e-5),
    "qwen2": dataclasses.replace(SMALL, qkv_bias=True, tied=True),
    "qwen3": dataclasses.replace(SMALL, qk_norm=True, head_dim=16),
    "llama3": dataclasses.replace(
        SMALL, head_dim=16, rope_scaling=Llama3Scaling(factor=4.0, low=1.0, high=4.0, original=24)
    ),
    "mistral": dataclasses.replace(SMALL, window=5),
}


def random_params(config, seed=0):
    """Every parameter random, biases and norms included, so that none can be forgotten."""
    params = init_params(config, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return {k: (np.asarray(v) + 0.3 * rng.normal(size=v.shape)).astype(np.float32)
            for k, v in params.items()}  # fmt: skip


def island(config, devices=1, **kwargs):
    layout = island_layout(MeshConfig(), config.kv_heads, jax.devices()[:devices])
    return Model(config, layout, jnp.float32, block=8, **kwargs)


@pytest.mark.parametrize(
    ("family", "remat"), [*((family, False) for family in FAMILIES), ("qwen3", True)]
)
def test_packed_segments_equal_single_sequences(family, remat):
    config = FAMILIES[family]
    params = random_params(config)
    model = island(config, remat=remat)
    tokens = np.random.default_rng(1).integers(0, 64, (2, 30)).astype(np.int32)
    positions = np.tile(np.r_[np.arange(12), np.arange(14), np.zeros(4)], (2, 1)).astype(np.int32)
    segments = np.tile(np.r_[np.ones(12), np.full(14, 2), np.zeros(4)], (2, 1)).astype(np.int32)
    out = jax.jit(lambda p: model.unembed(p, model.hidden(p, tokens, positions, segments)))(params)
    for row in range(2):
        for part in (slice(0, 12), slice(12, 26)):
            expected = plain_logits(config, params, tokens[row, part])
            np.testing.assert_allclose(out[row, part], expected, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_extended_cache_equals_full_context(family):
    config = FAMILIES[family]
    params = random_params(config)
    model = island(config)
    tokens = np.random.default_rng(2).integers(0, 64, (2, 21)).astype(np.int32)
    cache = model.empty_cache(5, 32)
    slots = np.array([4, 1], np.int32)
    extend = jax.jit(model.extend, donate_argnums=1)
    decode = jax.jit(model.decode, donate_argnums=1)
    lengths = np.zeros(2, np.int32)
    for counts in ([7, 3], [5, 0], [1, 7]):
        chunk = np.zeros((2, 7), np.int32)
        for row, n in enumerate(counts):
            chunk[row, :n] = tokens[row, lengths[row] : lengths[row] + n]
        cache = extend(params, cache, chunk, slots, lengths, np.array(counts, np.int32))
        lengths = lengths + np.array(counts, np.int32)
    pending, length = np.zeros(5, np.int32), np.zeros(5, np.int32)
    for _ in range(4):
        for row, slot in enumerate(slots):
            pending[slot], length[slot] = tokens[row, lengths[row]], lengths[row]
        active = np.isin(np.arange(5), slots)
        cache, out = decode(params, cache, pending, length, active)
        lengths = lengths + 1
        for row, slot in enumerate(slots):
            expected = plain_logits(config, params, tokens[row, : lengths[row]])[-1]
            np.testing.assert_allclose(out[slot], expected, atol=5e-4, rtol=1e-4)


def test_every_parameter_names_its_axes_and_is_created_sharded():
    config = preset("tiny")
    layout = train_layout(MeshConfig(fsdp=4, tensor=2))
    shardings = parameter_shardings(config, layout)
    params = jax.jit(lambda k: init_params(config, k), out_shardings=shardings)(jax.random.key(0))
    axes = parameter_axes(config)
    assert set(axes) == set(params)
    assert all(len(axes[name]) == x.ndim for name, x in params.items())
    assert params["gate"].sharding.shard_shape(params["gate"].shape) == (2, 32, 128)
    assert params["embedding"].sharding.shard_shape((1280, 128)) == (640, 32)


def test_an_axis_that_does_not_divide_is_an_error():
    layout = train_layout(MeshConfig(fsdp=1, tensor=8))
    with pytest.raises(ConfigError, match="kv_heads.*does not divide over 8"):
        parameter_shardings(preset("tiny"), layout)
    with pytest.raises(ConfigError, match="does not cover 8 devices"):
        train_layout(MeshConfig(data=3, fsdp=1))


@pytest.mark.parametrize("mesh", [dict(fsdp=8), dict(data=2, fsdp=2, tensor=2)])
def test_gradient_is_the_same_on_every_mesh(mesh):
    config = dataclasses.replace(FAMILIES["qwen3"], layers=1)
    params = random_params(config)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 64, (8, 16)).astype(np.int32)
    positions = np.tile(np.arange(16, dtype=np.int32), (8, 1))
    segments = np.ones((8, 16), np.int32)
    weight = rng.normal(size=(8, 16, 64)).astype(np.float32)

    def gradient(layout):
        model = Model(config, layout, jnp.float32, block=16, remat=False)

        def loss(p):
            hidden = model.hidden(p, tokens, positions, segments)
            return jnp.sum(model.unembed(p, hidden) * weight)

        placed = jax.device_put(params, parameter_shardings(config, layout))
        return jax.device_get(jax.jit(jax.grad(loss))(placed))

    one = gradient(train_layout(MeshConfig(), jax.devices()[:1]))
    many = gradient(train_layout(MeshConfig(**mesh)))
    for name, expected in one.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(many[name], expected, atol=2e-6 * scale, err_msg=name)


def test_bfloat16_copy_computes_what_the_trainer_computes():
    config = FAMILIES["qwen2"]
    params = random_params(config)
    layout = island_layout(MeshConfig(), 2, jax.devices()[:1])
    model = Model(config, layout, jnp.bfloat16, block=8)
    tokens = np.arange(8, dtype=np.int32)[None]
    positions, segments = np.arange(8, dtype=np.int32)[None], np.ones((1, 8), np.int32)
    copy = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    run = jax.jit(lambda p: model.unembed(p, model.hidden(p, tokens, positions, segments)))
    assert np.array_equal(run(params), run(copy))


def test_cache_is_updated_in_place():
    """12 layers, 8 slots x 2,048: the decode program's temporaries stay below a quarter of it."""
    from sspjax.rollout.engine import EngineShape, _decode, _idle

    config = dataclasses.replace(SMALL, layers=12, width=256, mlp=512, head_dim=64, vocab_size=512)
    layout = island_layout(MeshConfig(), 2, jax.devices()[:1])
    model = Model(config, layout, jnp.float32, block=256)
    shape = EngineShape(
        slots=8, length=2048, prompt_length=512, rows=2, chunk=128, decode_tokens=32
    )
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    cache = jax.eval_shape(lambda: model.empty_cache(8, 2048))
    table = jax.ShapeDtypeStruct((40, 512), jnp.int16)
    completed = jax.ShapeDtypeStruct((40,), jnp.int32)
    threshold = jax.ShapeDtypeStruct((), jnp.int32)
    bytes_of_cache = sum(x.size * 4 for x in jax.tree.leaves(cache))

    def decode(*arguments):
        return _decode(*arguments, model=model, shape=shape, end_ids=(0,))

    program = jax.jit(decode, donate_argnums=1)
    compiled = program.lower(params, cache, _idle(8), table, completed, threshold).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.25 * bytes_of_cache
    extend = jax.jit(model.extend, donate_argnums=1)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    chunk = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    compiled = extend.lower(params, cache, chunk, rows, rows, rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.25 * bytes_of_cache
