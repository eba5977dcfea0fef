"""The islands' copy: the trainer's numbers, laid out anew, alive when the trainer's are gone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sspjax.config import MeshConfig
from sspjax.islands import IslandCopy
from sspjax.mesh import island_layout, train_layout
from sspjax.metrics import CompileCounter
from sspjax.models.decoder import init_params, parameter_shardings
from sspjax.models.presets import DecoderConfig

SMALL = DecoderConfig(
    vocab_size=128, layers=2, width=32, mlp=48, heads=4, kv_heads=2, head_dim=8, rope_theta=1e4,
    qkv_bias=True, qk_norm=True,
)  # fmt: skip

MESHES = {
    "one device": (dict(), 1, dict(), 1, jnp.float32),
    "4x2": (dict(fsdp=4, tensor=2), 8, dict(), 8, jnp.bfloat16),
    "8x1": (dict(data=2, fsdp=2, tensor=2), 8, dict(island_tensor=1), 8, jnp.float32),
    "one of four islands": (dict(fsdp=8), 8, dict(island_tensor=2), 2, jnp.float32),
}
"""(the trainer's mesh, its devices, the island's mesh, its devices, the copy's dtype)"""


@pytest.mark.parametrize("mesh", MESHES)
def test_copy_holds_the_trained_numbers_and_outlives_them(mesh):
    trained_on, devices, island_on, own, dtype = MESHES[mesh]
    train = train_layout(MeshConfig(**trained_on), jax.devices()[:devices])
    island = island_layout(MeshConfig(**island_on), SMALL.kv_heads, jax.devices()[:own])
    made = jax.device_get(init_params(SMALL, jax.random.key(0)))
    trained = jax.device_put(made, parameter_shardings(SMALL, train))
    copy = IslandCopy(SMALL, train, island, dtype)
    first = copy(trained)
    with CompileCounter() as compiles:
        copy(trained)
        assert compiles.take() == 0
    for x in trained.values():
        x.delete()
    expected = parameter_shardings(SMALL, island)
    for name, x in first.items():
        assert x.sharding.is_equivalent_to(expected[name], x.ndim), name
        assert np.array_equal(np.asarray(x), made[name].astype(dtype)), name


def test_an_island_in_another_order_is_refused():
    """Its shards would be read as those of other devices."""
    train = train_layout(MeshConfig(fsdp=4, tensor=2))
    backwards = island_layout(MeshConfig(), SMALL.kv_heads, jax.devices()[::-1])
    with pytest.raises(ValueError, match="runs of 4 x 2 devices, in order, got .*7, 6, 5"):
        IslandCopy(SMALL, train, backwards, jnp.float32)
