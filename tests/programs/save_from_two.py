"""Run by test_checkpoint.py in two processes: saves, retires, rolls back, restores."""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import report

from sspjax import processes
from sspjax.checkpoint import Checkpoints

processes.initialize()
mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, PartitionSpec("fsdp", "data"))
values = np.arange(32, dtype=np.float32).reshape(4, 8)


def state(step):
    return {"w": jax.make_array_from_callback((4, 8), sharding, lambda i: values[i] + step)}


checkpoints = Checkpoints(sys.argv[1], keep=2)
before = checkpoints.latest()
for step in (1, 2, 3):
    checkpoints.save(step, state(step), {"written_by": jax.process_index()})
    checkpoints.poll()
checkpoints.wait()
kept = checkpoints.steps()
checkpoints.drop_after(2)
left = checkpoints.steps()
checkpoints.save(3, state(30), {"written_by": jax.process_index()})
checkpoints.wait()
turned = NamedSharding(mesh, PartitionSpec("data", "fsdp"))
restored, host = checkpoints.restore(
    3, {"w": jax.ShapeDtypeStruct((4, 8), np.float32, sharding=turned)}
)
expected = values + 30
right = all(
    np.array_equal(shard.data, expected[shard.index]) for shard in restored["w"].addressable_shards
)
checkpoints.close()
report({"before": before, "kept": kept, "left": left, "right": right, "host": host})
processes.barrier("end")
