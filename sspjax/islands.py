"""Islands: where rollouts run. One process's devices, its own mesh, its own copy of the policy.

Once a step one compiled cast and reshard gives every island a copy of the trained parameters,
tensor-sharded inside and replicated over its slot groups. From there an island works alone; the
processes meet again at `processes.exchange`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from sspjax.mesh import Layout
from sspjax.models.decoder import cast_params, parameter_axes
from sspjax.models.presets import DecoderConfig
from sspjax.types import Params


class IslandCopy:
    """The cast and reshard, compiled once: trainer parameters in, this island's copy out."""

    def __init__(self, config: DecoderConfig, train: Layout, island: Layout, dtype: Any):
        axes = parameter_axes(config)
        slots, tensor = island.mesh.devices.shape
        # Every island side by side, in the order of the global mesh's devices.
        devices = train.mesh.devices.reshape(-1, slots, tensor)
        world = Mesh(devices, ("island", "slots", "tensor"), axis_types=(AxisType.Auto,) * 3)
        if not any(np.array_equal(row, island.mesh.devices) for row in devices):
            raise ValueError(
                f"expected the island to be one of the training mesh's runs of {slots} x {tensor} "
                f"devices, in order, got {[d.id for d in island.mesh.devices.flat]} of "
                f"{[d.id for d in train.mesh.devices.flat]}"
            )
        out = {name: NamedSharding(world, island.spec(a)) for name, a in axes.items()}
        self._local = {name: NamedSharding(island.mesh, island.spec(a)) for name, a in axes.items()}
        self._copy = jax.jit(lambda params: cast_params(params, dtype), out_shardings=out)

    def __call__(self, params: Params) -> Params:
        """A new copy; the argument stays valid."""
        world = self._copy(params)
        return {name: _on_island(x, self._local[name]) for name, x in world.items()}


def _on_island(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The island's view of an array that every island holds whole: no data moves."""
    pieces = {shard.device: shard.data for shard in x.addressable_shards}
    own = sharding.addressable_devices_indices_map(x.shape)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [pieces[d] for d in own])


def sharded(layout: Layout, x: np.ndarray, axes: tuple[str | None, ...]) -> jax.Array:
    """A host array that every process holds whole, split over the mesh by its axes' names."""
    sharding = layout.sharding(axes, x.shape, "batch")
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
