"""Folders that are written: bit for bit what was read, in files of any number, and loadable."""

import json

import folders
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from sspjax.config import MeshConfig
from sspjax.mesh import train_layout
from sspjax.models.hugging_face.config import ModelFolderError, decoder_config_from_hf
from sspjax.models.hugging_face.load import load_params, weight_files
from sspjax.models.hugging_face.save import save_config, save_params
from sspjax.models.presets import preset

MESH = MeshConfig(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize("max_file_bytes", [1 << 30, 3000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_read_is_written_bit_for_bit(tmp_path, dtype, max_file_bytes):
    stored = folders.tensors(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    folders.write(tmp_path / "given", stored)
    config, layout = decoder_config_from_hf(tmp_path / "given"), train_layout(MESH)
    params = load_params(tmp_path / "given", config, layout, jnp.float32)
    made = tmp_path / "made"
    made.mkdir()
    save_params(made, config, params, dtype, max_file_bytes=max_file_bytes)
    save_config(made, config, dtype, {"eos_token_id": [1, 2], "pad_token_id": 1})

    files = sorted(made.glob("*.safetensors"))
    assert (len(files) == 1) == (max_file_bytes > 3000)
    found = {name: x for file in files for name, x in load_file(file).items()}
    assert found.keys() == stored.keys()
    for name, x in stored.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == x.tobytes(), name
    if len(files) > 1:
        index = json.loads((made / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in stored.values())
        assert {n: own.file.name for n, own in weight_files(made).items()} == index["weight_map"]
    assert decoder_config_from_hf(made) == config
    again = load_params(made, config, layout, jnp.float32)
    assert all(np.asarray(again[n]).tobytes() == np.asarray(x).tobytes() for n, x in params.items())


def test_a_file_ends_before_the_tensor_that_would_make_it_longer(tmp_path):
    folders.write(tmp_path / "given", folders.tensors())
    config = decoder_config_from_hf(tmp_path / "given")
    params = load_params(
        tmp_path / "given", config, train_layout(MeshConfig(), jax.devices()[:1]), jnp.float32
    )
    save_params(tmp_path, config, params, "float32", max_file_bytes=3000)
    for file in tmp_path.glob("*.safetensors"):
        sizes = [x.nbytes for x in load_file(file).values()]
        assert sum(sizes) <= 3000 or len(sizes) == 1


def test_a_shape_of_two_families_has_no_folder(tmp_path):
    import dataclasses

    mixed = dataclasses.replace(preset("tiny"), qkv_bias=True)
    with pytest.raises(ModelFolderError, match="the marks of qwen2 and qwen3"):
        save_config(tmp_path, mixed, "float32", {})
