"""Loading a GGUF file against merely dequantising its tensors with ggml's own package.

    python benchmarks/gguf_load.py [--file=MODEL.gguf]

The file is SmolLM2-135M-Instruct in the cache (`python -m sspjax.fetch smollm2`) unless one is
given. Ours reads shape and parameters and places them on the devices; theirs has its file open
already and throws every tensor away. Both by turns, CPU-seconds of the process, medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import gguf
import jax
from rich.console import Console
from rich.table import Table

from sspjax.cache import cache_folder
from sspjax.config import MeshConfig
from sspjax.fetch import SOURCES, fetch
from sspjax.mesh import train_layout
from sspjax.models.gguf.load import decoder_config_from_gguf, load_params

HERE = pathlib.Path(__file__).parent
TURNS = 7


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--file", type=pathlib.Path)
    path = arguments.parse_args().file or (
        fetch(SOURCES["smollm2"], cache_folder() / "smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    layout = train_layout(MeshConfig())
    reader = gguf.GGUFReader(path)

    def ours(dtype: str) -> Callable[[], object]:
        return lambda: jax.block_until_ready(
            load_params(path, decoder_config_from_gguf(path), layout, dtype)
        )

    def theirs() -> None:
        for tensor in reader.tensors:
            gguf.dequantize(tensor.data, tensor.tensor_type)

    contenders = {
        "gguf, dequantise": theirs,
        "float32": ours("float32"),
        "bfloat16": ours("bfloat16"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, run in contenders.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    base = medians["gguf, dequantise"]
    table = Table("what", "CPU-s", "ratio", title=path.name)
    for name, median in medians.items():
        table.add_row(name, f"{median:.2f}", f"{median / base:.2f}")
    Console().print(table)
    result = {
        "cpu_s": medians,
        "ratio": {name: median / base for name, median in medians.items()},
        "machine": f"{os.cpu_count()} x {platform.machine()}",
        "load": os.getloadavg()[0],
    }
    out = HERE / "results" / f"{datetime.date.today()}-gguf_load.json"
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
