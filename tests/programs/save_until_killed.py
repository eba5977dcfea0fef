"""Run by test_checkpoint.py: saves step after step, resuming, until somebody kills it.

Every value of a step's state is the step's number, so a mixture of two steps is seen.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sspjax.checkpoint import Checkpoints

mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
zeros = jax.jit(lambda: {f"w{i}": jnp.zeros((64, 128)) for i in range(8)}, out_shardings=sharding)
advance = jax.jit(lambda state: jax.tree.map(lambda w: w + 1, state), donate_argnums=0)

checkpoints = Checkpoints(sys.argv[1], keep=2)
state, step = zeros(), checkpoints.latest()
if step is None:
    step = 0
else:
    abstract = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding), state
    )
    state, _ = checkpoints.restore(step, abstract)
while True:
    step += 1
    state = advance(state)
    checkpoints.save(step, state, {"seed_cursor": step, "padding": "x" * 100_000})
    checkpoints.poll()
