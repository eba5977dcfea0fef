"""Meshes, and the one table that says which logical axis lies on which mesh axis.

Parameters and activations name their dimensions ("embed", "heads", "batch", ...); a `Layout` maps
the names to mesh axes. An axis that does not divide is an error, never silently replicated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sspjax.config import ConfigError, MeshConfig

Axes = tuple[str | None, ...]

TRAIN_RULES: Mapping[str, tuple[str, ...] | None] = {
    "micro": None,
    "batch": ("data", "fsdp"),
    "length": None,
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "head_dim": None,
    "layers": None,
    "activation": None,
}
"""The update: rows over data and fsdp, parameters over fsdp (embed) and tensor (the rest)."""

ISLAND_RULES: Mapping[str, tuple[str, ...] | None] = {
    "batch": ("slots",),
    "slots": ("slots",),
    "length": None,
    "embed": None,
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "head_dim": None,
    "layers": None,
    "activation": None,
}
"""Rollouts: slots are split over replicas, each replica is tensor-sharded."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rules. Hashable, so that a model can hold it as static data."""

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...] | None], ...]

    def spec(self, axes: Axes) -> PartitionSpec:
        """The partition of an array whose dimensions are named `axes` (None: not split)."""
        table = dict(self.rules)
        return PartitionSpec(*(table[a] if a is not None else None for a in axes))

    def sharding(self, axes: Axes, shape: Sequence[int], name: str = "array") -> NamedSharding:
        """Sharding of an array; raises ConfigError where a dimension does not divide."""
        for axis, size in zip(axes, shape, strict=True):
            if axis is not None and size % self.ways(axis):
                raise ConfigError(
                    f"config.mesh: {name} has {size} along '{axis}', which does not divide over "
                    f"{self.ways(axis)} devices of mesh axes {dict(self.rules)[axis]}; "
                    f"choose a divisor of {size}"
                )
        return NamedSharding(self.mesh, self.spec(axes))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pins an activation's layout inside jit, on every platform alike."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape, "activation"))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def ways(self, axis: str) -> int:
        """Devices over which the logical axis is split."""
        return math.prod(self.mesh.shape[p] for p in dict(self.rules)[axis] or ())


def train_layout(config: MeshConfig, devices: Sequence[Any] | None = None) -> Layout:
    """The global mesh `data x fsdp x tensor` over all devices of all processes."""
    if devices is None:
        # Islands are runs of this order, so a process's devices must stand together.
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    sizes = [config.data, config.fsdp, config.tensor]
    fixed = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and len(devices) % fixed == 0:
        sizes[sizes.index(-1)] = len(devices) // fixed
    if math.prod(s for s in sizes if s != -1) != len(devices):
        raise ConfigError(
            f"config.mesh: data={config.data} fsdp={config.fsdp} tensor={config.tensor} does not "
            f"cover {len(devices)} devices; the product must be {len(devices)} (-1: what is left)"
        )
    return _layout(np.asarray(devices).reshape(sizes), ("data", "fsdp", "tensor"), TRAIN_RULES)


def island_layout(
    config: MeshConfig, kv_heads: int, devices: Sequence[Any] | None = None
) -> Layout:
    """This process's rollout mesh `slots x tensor` over its own devices."""
    devices = jax.local_devices() if devices is None else devices
    tensor = config.island_tensor or max(
        d for d in range(1, kv_heads + 1) if kv_heads % d == 0 and len(devices) % d == 0
    )
    if len(devices) % tensor or kv_heads % tensor:
        raise ConfigError(
            f"config.mesh.island_tensor={tensor}: must divide both the island's {len(devices)} "
            f"devices and the {kv_heads} kv heads"
        )
    return _layout(np.asarray(devices).reshape(-1, tensor), ("slots", "tensor"), ISLAND_RULES)


def _layout(devices: np.ndarray, names: tuple[str, ...], rules: Mapping[str, Any]) -> Layout:
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    return Layout(mesh, tuple(rules.items()))
