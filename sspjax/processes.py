"""Several processes running one program: how they start, meet, and hand each other bytes.

Every process runs the same text. Between two meetings they may do different amounts of work; at a
meeting (`exchange`, `barrier`, a jitted update on the global mesh) all of them must arrive, in the
same order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from sspjax.errors import UserError

log = logging.getLogger(__name__)

COORDINATOR = "SSPJAX_COORDINATOR"
PROCESS_ID = "SSPJAX_PROCESS_ID"
NUM_PROCESSES = "SSPJAX_NUM_PROCESSES"
DISTRIBUTED = "SSPJAX_DISTRIBUTED"

# How long a process that ends, well or badly, waits for the others to end too. A failure is told to
# them after this time; a run that ends well meets in a last `barrier` first.
SHUTDOWN_SECONDS = 20

# Bytes one round of `exchange` puts on every device, all processes together.
ROUND_BYTES = 32 << 20
SMALLEST_CHUNK = 64 << 10


class ProcessError(UserError, RuntimeError):
    """The processes cannot start together, or did not meet as they should."""


def _several(environ: Mapping[str, str], name: str) -> bool:
    count = environ.get(name, "")
    return count.isdigit() and int(count) > 1


CLUSTERS: dict[str, Callable[[Mapping[str, str]], bool]] = {
    "slurm step": lambda environ: _several(environ, "SLURM_STEP_NUM_TASKS"),
    "Open MPI": lambda environ: _several(environ, "OMPI_COMM_WORLD_SIZE"),
    "TPU pod": lambda environ: "," in environ.get("TPU_WORKER_HOSTNAMES", ""),
}
"""Signs in the environment that a launcher started more than one process."""


def initialize(environ: Mapping[str, str] = os.environ) -> None:
    """Joins the other processes of the run; does nothing where there are none.

    Must come before anything touches a device. Three ways, first match wins:

    1. `SSPJAX_COORDINATOR` (host:port of process 0), `SSPJAX_PROCESS_ID` and
       `SSPJAX_NUM_PROCESSES`: exactly these processes, on any hardware.
    2. `SSPJAX_DISTRIBUTED=auto`, or one of `CLUSTERS` is seen and `SSPJAX_DISTRIBUTED` is not
       `off`: JAX's own detection (Cloud TPU, Slurm, Open MPI, Kubernetes).
    3. Otherwise one process.

    Raises:
      ProcessError: the variables are incomplete or contradict each other.
    """
    if jax.distributed.is_initialized():
        return
    given = [name for name in (COORDINATOR, PROCESS_ID, NUM_PROCESSES) if environ.get(name)]
    wish = environ.get(DISTRIBUTED, "")
    if wish not in ("", "auto", "off"):
        raise ProcessError(f"{DISTRIBUTED}={wish}: expected auto, off, or nothing")
    if given:
        coordinator, process, count = _explicit(environ, given)
        log.info("process %d of %d, coordinator %s", process, count, coordinator)
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=count,
            process_id=process,
            cluster_detection_method="deactivate",
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
        return
    seen = [name for name, detect in CLUSTERS.items() if detect(environ)]
    if wish == "auto" or (seen and wish != "off"):
        log.info("joining the cluster: %s", ", ".join(seen) or f"{DISTRIBUTED}=auto")
        jax.distributed.initialize(shutdown_timeout_seconds=SHUTDOWN_SECONDS)


def _explicit(environ: Mapping[str, str], given: list[str]) -> tuple[str, int, int]:
    missing = [name for name in (COORDINATOR, PROCESS_ID, NUM_PROCESSES) if name not in given]
    if missing:
        raise ProcessError(
            f"{', '.join(given)} given without {', '.join(missing)}: set all three or none"
        )
    coordinator, process, count = (environ[n] for n in (COORDINATOR, PROCESS_ID, NUM_PROCESSES))
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ProcessError(f"{COORDINATOR}={coordinator}: expected host:port of process 0")
    if not process.isdigit() or not count.isdigit() or int(process) >= int(count):
        raise ProcessError(
            f"{PROCESS_ID}={process}, {NUM_PROCESSES}={count}: expected 0 <= id < number"
        )
    return coordinator, int(process), int(count)


def index() -> int:
    """Number of this process among those of the run, from 0."""
    return jax.process_index()


def is_main() -> bool:
    """True in the one process that writes logs, metrics and host state."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when every process has called it with this `name`; a different name is an error."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def exchange(payload: bytes) -> list[bytes]:
    """Every process's payload, in the order of process ids, in every process.

    Payloads may differ in length. They travel through the devices in rounds of one fixed chunk
    size, so that two small programs serve every length and nothing compiles later.

    Raises:
      ProcessError: a payload of 2 GiB or more.
    """
    if jax.process_count() == 1:
        return [payload]
    if len(payload) >= 1 << 31:
        raise ProcessError(f"a payload of {len(payload)} bytes: must stay below 2 GiB")
    header = np.array([jax.process_index(), len(payload)], np.int32)
    headers = multihost_utils.process_allgather(header)
    chunk = max(SMALLEST_CHUNK, ROUND_BYTES // jax.process_count())
    rounds = -(-int(headers[:, 1].max()) // chunk)
    padded = np.zeros(rounds * chunk, np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    gathered = [multihost_utils.process_allgather(part) for part in padded.reshape(-1, chunk)]
    # Rows come in device order, which need not be the order of process ids.
    received = {
        int(process): b"".join(rows[i].tobytes() for rows in gathered)[:length]
        for i, (process, length) in enumerate(headers)
    }
    return [received[process] for process in range(jax.process_count())]
