"""Tensors to sharded parameters: exact, each process its own slices, and every fault by name."""

import json
import threading

import folders
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from processes import run_processes
from safetensors.numpy import load_file, save_file

from sspjax.config import MeshConfig
from sspjax.mesh import train_layout
from sspjax.models.decoder import parameter_shardings
from sspjax.models.hugging_face.config import ModelFolderError, decoder_config_from_hf
from sspjax.models.hugging_face.load import load_params

ONE = MeshConfig()


def load(folder, dtype=jnp.float32, mesh=ONE, **kwargs):
    devices = jax.devices()[:1] if mesh == ONE else None
    layout = train_layout(mesh, devices)
    return load_params(folder, decoder_config_from_hf(folder), layout, dtype, **kwargs)


def expected(stored, name):
    """A parameter by its definition: [in, out] for a matrix, the heads apart, layers stacked."""
    f = folders
    split = {
        "q": (f.WIDTH, f.HEADS, f.HEAD_DIM),
        "k": (f.WIDTH, f.KV_HEADS, f.HEAD_DIM),
        "v": (f.WIDTH, f.KV_HEADS, f.HEAD_DIM),
        "o": (f.HEADS, f.HEAD_DIM, f.WIDTH),
    }
    theirs = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{n: f"self_attn.{n}_proj" for n in "qkvo"},
        **{n: f"self_attn.{n}" for n in ("q_norm", "k_norm")},
        **{n: f"mlp.{n}_proj" for n in ("gate", "up", "down")},
    }
    if name == "embedding":
        return stored["model.embed_tokens.weight"]
    if name == "final_norm":
        return stored["model.norm.weight"]
    if name == "head":
        return stored["lm_head.weight"].T
    layers = [stored[f"model.layers.{i}.{theirs[name]}.weight"].T for i in range(f.LAYERS)]
    return np.stack([x.reshape(split.get(name, x.shape)) for x in layers])


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("mesh", [ONE, MeshConfig(data=2, fsdp=2, tensor=2)], ids=["one", "eight"])
def test_every_number_is_in_its_place(tmp_path, files, mesh):
    stored = folders.tensors()
    folders.write(tmp_path, stored, files=files)
    params = load(tmp_path, mesh=mesh)
    config = decoder_config_from_hf(tmp_path)
    layout = train_layout(mesh, jax.devices()[:1] if mesh == ONE else None)
    shardings = parameter_shardings(config, layout)
    assert params.keys() == shardings.keys()
    for name, x in params.items():
        assert x.sharding == shardings[name]
        np.testing.assert_array_equal(x, expected(stored, name), err_msg=name)


@pytest.mark.parametrize("stored_as", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_numbers_are_converted_to_the_dtype_that_is_asked_for(tmp_path, stored_as, dtype):
    stored = folders.tensors(stored_as)
    folders.write(tmp_path, stored)
    for name, x in load(tmp_path, dtype).items():
        assert x.dtype == dtype
        wide = expected(stored, name).astype(np.float32)
        assert np.asarray(x).tobytes() == wide.astype(dtype).tobytes(), name


def test_a_head_that_is_stored_twice_and_buffers_that_follow_are_left_out(tmp_path):
    stored = folders.tensors()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    folders.write(tmp_path, stored)
    (tmp_path / "config.json").write_text(
        json.dumps({**folders.CONFIG, "tie_word_embeddings": True})
    )
    assert "head" not in load(tmp_path)


@pytest.mark.multiprocess
def test_two_processes_read_half_each(tmp_path):
    """fsdp over two processes: matrices are read once altogether, norms by both; together they
    write what was there.
    """
    given, made = tmp_path / "given", tmp_path / "made"
    folders.write(given, folders.tensors(), files=2)
    made.mkdir()
    reports = run_processes(
        ["tests/programs/load_from_two.py", str(given), str(made)], count=2, devices=2
    )
    stored = folders.tensors()
    norms = sum(x.size for x in stored.values() if x.ndim == 1)
    matrices = sum(x.size for x in stored.values() if x.ndim == 2)
    assert [r["read"] for r in reports] == [matrices // 2 + norms] * 2
    assert all(r["right"] for r in reports)
    found = load_file(made / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(np.array_equal(found[name], x) for name, x in stored.items())


def resident() -> int:
    """Anonymous bytes of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


def test_beside_the_parameters_no_more_than_two_tensors_exist(tmp_path):
    """A megabyte of slack on 85 MB is for the interpreter's own objects."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**folders.CONFIG, **wide}))
    config = decoder_config_from_hf(tmp_path)
    layout = train_layout(ONE, jax.devices()[:1])
    from sspjax.models.hugging_face.tensors import model_tensors

    shapes = {t.name: t.shape for t in model_tensors(config)}
    save_file(
        {n: np.zeros(s, ml_dtypes.bfloat16) for n, s in shapes.items()},
        tmp_path / "model.safetensors",
    )
    placed = 4 * sum(int(np.prod(s)) for s in shapes.values())
    largest = 4 * max(int(np.prod(s)) for s in shapes.values())
    load_params(tmp_path, config, layout, jnp.float32)  # What is made once is made now.
    peak, done = [0], threading.Event()

    def watch():
        while not done.wait(0.0005):
            peak[0] = max(peak[0], resident())

    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    params = load_params(tmp_path, config, layout, jnp.float32)
    jax.block_until_ready(params)
    done.set()
    watcher.join()
    assert sum(x.nbytes for x in params.values()) == placed
    assert peak[0] - before <= placed + 2 * largest + (1 << 20)


# Faults -------------------------------------------------------------------------------------------


def test_every_tensor_that_does_not_fit_is_in_one_message(tmp_path):
    stored = folders.tensors()
    del stored["model.layers.1.mlp.up_proj.weight"]
    stored["model.layers.0.self_attn.q_proj.bias"] = np.zeros(8, np.float32)
    stored["model.norm.weight"] = np.ones(folders.WIDTH + 1, np.float32)
    stored["lm_head.weight"] = stored["lm_head.weight"].astype(np.int8)
    folders.write(tmp_path, stored)
    with pytest.raises(ModelFolderError) as told:
        load(tmp_path)
    for words in (
        f"{tmp_path}: 4 of its tensors",
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.0.self_attn.q_proj.bias is not part of this model (model.safetensors)",
        "model.norm.weight: expected shape (16,), got (17,) (model.safetensors)",
        "lm_head.weight: expected F32, BF16, F16, got I8 (model.safetensors)",
    ):
        assert words in str(told.value)


def test_a_file_that_is_cut_off_names_itself_and_the_tensor(tmp_path):
    folders.write(tmp_path, folders.tensors())
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    last = max(
        (entry["data_offsets"][1], name)
        for name, entry in json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")]).items()
        if name != "__metadata__"
    )[1]
    with pytest.raises(ModelFolderError, match=f"model.safetensors: cut off inside {last}"):
        load(tmp_path)
    for length in (100, 4, 0):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelFolderError, match=f"model.safetensors: .* got {length} bytes"):
            load(tmp_path)


def test_an_index_that_names_what_is_not_there(tmp_path):
    folders.write(tmp_path, folders.tensors(), files=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ModelFolderError, match=r"index.json: model-00002-of-00002.* is not there \(12 tensors"
    ):
        load(tmp_path)
    folders.write(tmp_path, folders.tensors(), files=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.bias"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelFolderError, match="00001.* does not hold model.norm.bias"):
        load(tmp_path)


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(folders.CONFIG))
    with pytest.raises(ModelFolderError, match="got neither"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelFolderError, match=".bin files only, which are pickles"):
        load(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_found_when_asked_for(tmp_path, bad):
    stored = folders.tensors()
    name = "model.layers.1.self_attn.o_proj.weight"
    stored[name][3, 5] = bad
    folders.write(tmp_path, stored)
    load(tmp_path)
    with pytest.raises(ModelFolderError, match=rf"model.safetensors: {name} holds numbers"):
        load(tmp_path, check_finite=True)
