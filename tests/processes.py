"""Real processes for tests: the same program n times, joined the way a pod is joined.

A program says what it found with `report`: gloo writes to its standard output from many threads.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
REPORT = "TEST_REPORT"


def python_environment(devices: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment for a child with `devices` CPU devices and the checkout importable."""
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    path = [str(ROOT), str(ROOT / "tests"), environment.get("PYTHONPATH", "")]
    return environment | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
        **(extra or {}),
    }


def report(value: Any) -> None:
    """Hands a JSON-able value to the test that runs this program through `run_processes`."""
    pathlib.Path(os.environ[REPORT]).write_text(json.dumps(value))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_processes(
    arguments: Sequence[str],
    *,
    count: int,
    devices: int,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `python *arguments` in `count` processes and returns what each reported, or None.

    The first failure or the timeout (seconds) ends all of them; AssertionError then shows the end
    of every process's output.
    """
    joined = {
        "SSPJAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "SSPJAX_NUM_PROCESSES": str(count),
    }
    with tempfile.TemporaryDirectory() as folder:
        reports = [pathlib.Path(folder, f"{i}.json") for i in range(count)]
        outputs = [pathlib.Path(folder, f"{i}.out") for i in range(count)]
        children = []
        for i in range(count):
            own = {"SSPJAX_PROCESS_ID": str(i), REPORT: str(reports[i])}
            # Output goes to files: a full pipe nobody reads would hold the whole group back.
            with outputs[i].open("wb") as out:
                children.append(
                    subprocess.Popen(
                        [sys.executable, *arguments],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                        env=python_environment(devices, {**joined, **own, **(environment or {})}),
                    )
                )
        try:
            codes = _wait(children, time.monotonic() + timeout)
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(code != 0 for code in codes):
            tails = "\n".join(
                f"--- process {i}, exit code {code}\n{outputs[i].read_text()[-4000:]}"
                for i, code in enumerate(codes)
            )
            raise AssertionError(f"{list(arguments)} in {count} processes failed\n{tails}")
        return [json.loads(r.read_text()) if r.exists() else None for r in reports]


def _wait(children: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Exit codes; None for a process that was still running when the group was given up."""
    while True:
        codes = [child.poll() for child in children]
        failed = any(code not in (None, 0) for code in codes)
        if all(code is not None for code in codes) or failed or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)
