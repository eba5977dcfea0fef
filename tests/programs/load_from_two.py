"""Run by test_hf_load.py in two processes: counts the numbers that each reads from the files, and
writes them to another folder.
"""

import sys
import threading
from pathlib import Path

import jax
import numpy as np
import safetensors
from processes import report
from safetensors.numpy import load_file

from sspjax import processes
from sspjax.config import MeshConfig
from sspjax.mesh import train_layout
from sspjax.models.hugging_face import load
from sspjax.models.hugging_face.config import decoder_config_from_hf
from sspjax.models.hugging_face.save import save_params

read = 0
lock = threading.Lock()


class CountedSlice:
    def __init__(self, view):
        self._view = view

    def __getitem__(self, index):
        global read
        block = self._view[index]
        with lock:
            read += block.size
        return block


class CountedFile:
    """Only what may be asked of a file here: slices."""

    def __init__(self, path, framework):
        self._file = safetensors.safe_open(path, framework=framework)

    def __enter__(self):
        self._open = self._file.__enter__()
        return self

    def __exit__(self, *reason):
        self._file.__exit__(*reason)

    def get_slice(self, name):
        return CountedSlice(self._open.get_slice(name))


load.safe_open = CountedFile
processes.initialize()
folder = Path(sys.argv[1])
layout = train_layout(MeshConfig(fsdp=2, tensor=2))
params = load.load_params(folder, decoder_config_from_hf(folder), layout, np.float32)
stored = {}
for file in folder.glob("*.safetensors"):
    stored |= load_file(file)
gate = np.stack([stored[f"model.layers.{i}.mlp.gate_proj.weight"].T for i in range(2)])
right = all(np.array_equal(s.data, gate[s.index]) for s in params["gate"].addressable_shards)
made = Path(sys.argv[2])
save_params(made, decoder_config_from_hf(folder), params, "float32")
report({"read": read, "right": right, "process": jax.process_index()})
processes.barrier("end")
