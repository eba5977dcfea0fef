"""Run by test_processes.py in several processes: exchanges payloads, reports what came."""

import hashlib

import jax
from processes import report

from sspjax import processes
from sspjax.metrics import CompileCounter

processes.initialize()
processes.initialize()  # A second call finds the group joined.
process = jax.process_index()
chunk = processes.ROUND_BYTES // jax.process_count()
counter = CompileCounter()

payloads = [f"from {process}".encode(), b"x" * process, bytes([process]) * (chunk + 7 * process)]
received = []
compiles = []
for payload in payloads:
    received.append(processes.exchange(payload))
    compiles.append(counter.take())
processes.barrier("first")
counter.take()
processes.barrier("second")
compiles.append(counter.take())

report(
    {
        "process": process,
        "main": processes.is_main(),
        "devices": [jax.local_device_count(), jax.device_count()],
        "short": [p.decode() for p in received[0]],
        "lengths": [[len(p) for p in row] for row in received],
        "digests": [hashlib.sha256(p).hexdigest() for p in received[2]],
        "compiles": compiles,
    }
)
