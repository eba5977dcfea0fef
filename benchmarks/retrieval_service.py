"""The retrieval service under load: 32 clients that ask for 4 queries each, one after another.

    python benchmarks/retrieval_service.py [--passages=100000] [--seconds=30] [--clients=32]

Makes a corpus of random words and an exact index of it, serves them from a process of its own, and
asks from this one over loopback. Prints errors, requests a second, median and 99th percentile of
the time a request takes and their ratio, CPU time and memory of the server. Clients begin one after
another within a second; requests of the first two seconds are not counted. Writes
benchmarks/results/DATE-retrieval_service.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from rich.console import Console
from rich.table import Table

from retrieval_index.build import build
from sspjax.retrieval.client import RetrievalError
from sspjax.retrieval.remote import HttpRetriever, Patience
from sspjax.retrieval.server import listen
from sspjax.retrieval.store import write_store

HERE = pathlib.Path(__file__).parent
WARM_UP = 2.0
WORDS = [f"w{number}" for number in range(20_000)]
WEIGHTS = [1 / (number + 10) for number in range(20_000)]


def main() -> None:
    arguments = argparse.ArgumentParser(description="the retrieval service under load")
    arguments.add_argument("--passages", type=int, default=100_000)
    arguments.add_argument("--seconds", type=float, default=30.0)
    arguments.add_argument("--clients", type=int, default=32)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(pathlib.Path(name), options.passages, options.seconds, options.clients)
    result["machine"] = f"{os.cpu_count()} x {platform.machine()}"
    result["load"] = os.getloadavg()[0]
    table = Table("what", "figure", title=f"{options.clients} clients x 4 queries")
    for what, figure in result.items():
        table.add_row(what, f"{figure:.4g}" if isinstance(figure, float) else str(figure))
    Console().print(table)
    out = HERE / "results" / f"{datetime.date.today()}-retrieval_service.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({**vars(options), **result}, indent=2) + "\n")


def measure(folder: pathlib.Path, passages: int, seconds: float, clients: int) -> dict:
    rng = random.Random(0)
    with open(folder / "corpus.jsonl", "w") as file:
        for row in range(passages):
            text = " ".join(rng.choices(WORDS, WEIGHTS, k=60))
            file.write(json.dumps({"id": str(row), "title": f"Title {row}", "text": text}) + "\n")
    write_store(folder / "corpus.jsonl", folder / "store")
    build(
        corpus_path=folder / "corpus.jsonl",
        encoder_name="tfidf",
        out=folder / "index",
        queries_path=None,
    )
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "sspjax.retrieval.server", f"--port={port}"]
    server = subprocess.Popen(
        [*program, f"--index={folder / 'index'}", f"--corpus={folder / 'store'}"]
    )
    try:
        return loaded(server.pid, f"http://127.0.0.1:{port}", seconds, clients)
    finally:
        server.terminate()
        server.wait()


def loaded(server: int, url: str, seconds: float, clients: int) -> dict:
    """What the clients see in so many seconds, and what it costs the server."""
    patience = Patience(timeout=30, retries=0)
    first = HttpRetriever([url])
    first.connect(3)  # Returns when the server is up.
    first.close()
    took: list[float] = []
    errors: list[str] = []
    began = time.monotonic()
    until = began + WARM_UP + seconds

    def ask(number: int) -> None:
        rng = random.Random(number)
        client = HttpRetriever([url], patience=patience, remember=0)
        time.sleep(number / clients)
        while time.monotonic() < until:
            queries = [" ".join(rng.choices(WORDS, WEIGHTS, k=4)) for _ in range(4)]
            sent = time.monotonic()
            try:
                found = client.search(queries, 3)
            except RetrievalError as error:
                errors.append(str(error))
                continue
            errors.extend("no result" for one in found if one is None)
            if sent - began > WARM_UP:
                took.append(time.monotonic() - sent)
        client.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP)
    memory, cpu = used(server)
    time.sleep(seconds / 2)
    memory_half_way, _ = used(server)
    for thread in threads:
        thread.join()
    memory_after, cpu_after = used(server)
    percentiles = statistics.quantiles(took, n=100)
    return {
        "requests": len(took),
        "errors": len(errors),
        "requests/s": len(took) / seconds,
        "median ms": 1000 * percentiles[49],
        "p99 ms": 1000 * percentiles[98],
        "p99 / median": percentiles[98] / percentiles[49],
        "server CPU-ms a request": 1000 * (cpu_after - cpu) / len(took),
        "server MB after 2 s": memory / 1e6,
        "server MB half-way": memory_half_way / 1e6,
        "server MB at the end": memory_after / 1e6,
    }


def used(process: int) -> tuple[int, float]:
    """Anonymous bytes in memory (what is mapped from files can be read again), and CPU-seconds."""
    lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    anonymous = next(line.split()[1] for line in lines if line.startswith("Anonymous:"))
    fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return 1024 * int(anonymous), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
