"""Decoders from GGUF files: shape, parameters, layouts, and everything that can be wrong."""

import dataclasses
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import KINDS, Tiny, write
from processes import python_environment
from real_models import smollm2

from sspjax.config import MeshConfig
from sspjax.mesh import train_layout
from sspjax.models.decoder import Model, init_params
from sspjax.models.gguf.file import GgufError, open_gguf
from sspjax.models.gguf.load import decoder_config_from_gguf, load_params
from sspjax.models.presets import DecoderConfig, Llama3Scaling

TINY = Tiny()
ONE = train_layout(MeshConfig(), jax.devices()[:1])
EIGHT = train_layout(MeshConfig(fsdp=4, tensor=2))


@pytest.fixture
def tensors():
    return TINY.tensors(np.random.default_rng(0))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tiny.gguf"


def load(path, layout=ONE, dtype=jnp.float32, **options):
    return load_params(path, decoder_config_from_gguf(path), layout, dtype, **options)


def rotate_half_rows(rows: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """Rows of q or k by index: pair i of a head stands at 2i, 2i + 1 in the file."""
    result = np.empty_like(rows)
    for head in range(heads):
        for i in range(head_dim // 2):
            for part in range(2):
                result[head * head_dim + part * head_dim // 2 + i] = rows[
                    head * head_dim + 2 * i + part
                ]
    return result


def expected_params(tiny: Tiny, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The decoder's parameters, one matrix at a time."""
    n, h = tiny.layers, tiny.head_dim

    def rows(name, layer, heads=0):
        matrix = stored[f"blk.{layer}.{name}"]
        turned = heads and tiny.architecture == "llama"
        return rotate_half_rows(matrix, heads, h) if turned else matrix

    def stack(name, shape, heads=0):
        return np.stack([rows(name, i, heads).T.reshape(shape) for i in range(n)])

    params = {
        "embedding": stored["token_embd.weight"],
        "final_norm": stored["output_norm.weight"],
        "attention_norm": stack("attn_norm.weight", (-1,)),
        "mlp_norm": stack("ffn_norm.weight", (-1,)),
        "q": stack("attn_q.weight", (-1, tiny.heads, h), tiny.heads),
        "k": stack("attn_k.weight", (-1, tiny.kv_heads, h), tiny.kv_heads),
        "v": stack("attn_v.weight", (-1, tiny.kv_heads, h)),
        "o": stack("attn_output.weight", (tiny.heads, h, -1)),
        "gate": stack("ffn_gate.weight", (tiny.width, -1)),
        "up": stack("ffn_up.weight", (tiny.width, -1)),
        "down": stack("ffn_down.weight", (tiny.mlp, -1)),
    }
    if not tiny.tied:
        params["head"] = stored["output.weight"].T
    if tiny.architecture == "qwen2":
        for name in "qkv":
            params[f"{name}_bias"] = stack(f"attn_{name}.bias", (-1, h))
    if tiny.architecture == "qwen3":
        for name in "qk":
            params[f"{name}_norm"] = stack(f"attn_{name}_norm.weight", (h,))
    return params


# What is read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", [ONE, EIGHT], ids=["one device", "eight devices"])
def test_parameters_are_where_the_decoder_wants_them(path, architecture, layout):
    tiny = Tiny(architecture, tied=architecture == "qwen3")
    stored = write(path, tiny, tiny.tensors(np.random.default_rng(1)))
    params = load(path, layout)
    expected = expected_params(tiny, stored)
    config = decoder_config_from_gguf(path)
    assert params.keys() == expected.keys() == init_params(config, jax.random.key(0)).keys()
    for name, value in expected.items():
        assert params[name].dtype == jnp.float32
        np.testing.assert_array_equal(params[name], value, err_msg=name)


def test_the_shape_is_read_from_the_metadata(path, tensors):
    write(path, TINY, tensors)
    assert decoder_config_from_gguf(path) == dataclasses.replace(
        decoder_config_from_gguf(path),
        vocab_size=96,
        layers=2,
        width=64,
        mlp=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        rope_theta=5e5,
        rms_eps=1e-5,
        qkv_bias=False,
        qk_norm=False,
        tied=False,
        context=512,
        rope_scaling=None,
    )


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """By wavelength, as Llama 3.1's report has it: long waves wholly, short ones not at all."""
    divisors = []
    for i in range(head_dim // 2):
        wave = 2 * np.pi * theta ** (2 * i / head_dim)
        if wave < 8192 / 4:
            divisors.append(1.0)
        elif wave > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama_3s_rotations_are_recognised(path, tensors):
    tensors["rope_freqs.weight"] = llama3_divisors(5e5, TINY.head_dim, 32.0)
    assert len(set(tensors["rope_freqs.weight"].tolist())) > 1
    write(path, TINY, tensors)
    scaling = Llama3Scaling(factor=32.0, low=1.0, high=4.0, original=8192)
    assert decoder_config_from_gguf(path).rope_scaling == scaling
    assert load(path).keys() == load(path, EIGHT).keys()
    for divisors in (tensors["rope_freqs.weight"] * 1.01, np.ones(5, np.float32)):
        write(path, TINY, {**tensors, "rope_freqs.weight": divisors})
        with pytest.raises(GgufError, match="rope_freqs.weight is not Llama 3.1's scaling"):
            decoder_config_from_gguf(path)


def test_rotations_agree_with_the_interleaved_form(path, tensors):
    """Scores of q and k do not depend on how the pairs are stored: float64, both ways."""
    stored = write(path, TINY, tensors)
    params, h, t = load(path), TINY.head_dim, np.arange(5)
    x = np.random.default_rng(2).normal(size=(5, TINY.width))
    angle = t[:, None, None] * 5e5 ** (-np.arange(h // 2) / (h // 2))
    turn = np.exp(1j * angle)

    def interleaved(name, heads):
        y = (x @ stored[f"blk.0.{name}"].T.astype(np.float64)).reshape(5, heads, h // 2, 2)
        return (y[..., 0] + 1j * y[..., 1]) * turn

    def halves(name):
        y = np.einsum("td,dnh->tnh", x, np.asarray(params[name][0], np.float64))
        return (y[..., : h // 2] + 1j * y[..., h // 2 :]) * turn

    for name, ours, heads in (("attn_q.weight", "q", 4), ("attn_k.weight", "k", 2)):
        np.testing.assert_allclose(halves(ours), interleaved(name, heads), atol=1e-12)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32"])
def test_storage_types_reach_the_parameters(path, tensors, kind):
    kinds = {name: KINDS[kind] for name, x in tensors.items() if x.ndim == 2}
    expected = expected_params(TINY, write(path, TINY, tensors, kinds))
    params = load(path, EIGHT)
    for name, value in expected.items():
        np.testing.assert_array_equal(params[name], value, err_msg=name)


def test_other_types_are_rounded_to_nearest(path, tensors):
    expected = expected_params(TINY, write(path, TINY, tensors))
    for name, x in load(path, EIGHT, jnp.bfloat16).items():
        assert x.dtype == jnp.bfloat16
        rounded = expected[name].astype(jnp.bfloat16)
        np.testing.assert_array_equal(x.view(jnp.uint16), rounded.view(np.uint16), err_msg=name)


def test_a_donated_step_changes_its_own_copy_only(path, tensors):
    """Devices take host memory over as it is, and devices with the same shard share it."""
    expected = expected_params(TINY, write(path, TINY, tensors))
    layout = train_layout(MeshConfig(data=8, fsdp=1))
    params = load(path, layout)
    again = load(path, layout)
    step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    moved = step(params)
    for name, value in expected.items():
        np.testing.assert_array_equal(moved[name], value + 1, err_msg=name)
        for shard in again[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index], err_msg=name)


# What is wrong ------------------------------------------------------------------------------------


def test_another_architecture_is_named(path):
    write(path, Tiny("bert"), {})
    with pytest.raises(GgufError, match=r"tiny.gguf: expected .* llama, qwen2, qwen3, got 'bert'"):
        decoder_config_from_gguf(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention.sliding_window": 4096}, "llama.attention.sliding_window=4096"),
        ({"rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"expert_count": 8}, "llama.expert_count=8"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count to be .* 16, got 8"),
        ({"attention.head_count": None}, "an integer under llama.attention.head_count, got None"),
        ({"attention.head_count_kv": 0}, "llama.attention.head_count_kv=0: expected a positive"),
        ({"block_count": 2**31}, "2147483648 layers, but 21 tensors"),
        ({"feed_forward_length": "96"}, "llama.feed_forward_length, got '96'"),
        ({"embedding_length": 0}, "llama.embedding_length=0: expected a positive"),
    ],
)
def test_settings_of_other_maths_are_named(path, tensors, settings, message):
    write(path, TINY, tensors, settings=settings)
    with pytest.raises(GgufError, match=message):
        decoder_config_from_gguf(path)


def test_settings_that_change_nothing_are_accepted(path, tensors):
    neutral = {"rope.scaling.type": "none", "expert_count": 0, "vocab_size": 96}
    write(path, TINY, tensors, settings=neutral)
    assert decoder_config_from_gguf(path).rope_theta == 5e5


def test_wrong_tensors_are_listed_together(path, tensors):
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(64, np.float32)
    tensors["blk.0.attn_k.weight"] = np.zeros((64, 64), np.float32)
    write(path, TINY, tensors)
    with pytest.raises(GgufError) as raised:
        load(path)
    for problem in (
        "blk.1.ffn_up.weight is missing",
        "blk.0.attn_q.bias is not expected",
        "blk.0.attn_k.weight has shape (64, 64) instead of (32, 64)",
    ):
        assert problem in str(raised.value)


def test_a_type_that_cannot_be_read_is_named(path):
    tiny = Tiny(width=256, head_dim=64, mlp=256)
    tensors = tiny.tensors(np.random.default_rng(0))
    write(path, tiny, tensors)
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    kind = data.index(name) + len(name) + 4 + 2 * 8
    assert data[kind] == KINDS.Q8_0
    data[kind] = KINDS.IQ4_XS
    path.write_bytes(data)
    with pytest.raises(GgufError, match="blk.0.ffn_up.weight is stored as IQ4_XS.*Q4_K"):
        load(path)


def test_numbers_that_are_not_finite_are_found_on_request(path, tensors):
    tensors["blk.1.ffn_norm.weight"][3] = np.nan
    write(path, TINY, tensors)
    assert np.isnan(load(path)["mlp_norm"]).sum() == 1
    with pytest.raises(GgufError, match="tiny.gguf: tensor blk.1.ffn_norm.weight is not finite"):
        load(path, check_finite=True)


def test_a_file_cut_anywhere_is_refused(path, tensors):
    """In the header at every byte, in the tensors at some."""
    write(path, TINY, tensors)
    whole = path.read_bytes()
    header = min(info.start for info in open_gguf(path).tensors.values())
    cuts = [*range(0, header, 7), *range(header, len(whole), 5000), len(whole) - 64]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(GgufError, match="tiny.gguf"):
            load(path)
    assert "cut short: tensor" in refusal(path)


def refusal(path) -> str:
    with pytest.raises(GgufError) as raised:
        load(path)
    return str(raised.value)


def test_a_damaged_header_is_refused_or_read_but_nothing_else(path, tensors):
    write(path, TINY, tensors)
    whole = path.read_bytes()
    header = min(info.start for info in open_gguf(path).tensors.values())
    rng, refused = np.random.default_rng(0), 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            data[rng.integers(0, header)] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            load(path)
        except (GgufError, ValueError) as error:
            assert str(path) in str(error) or "decoder: heads" in str(error)
            refused += 1
    assert refused > 100


def test_other_files_are_refused(path, tmp_path):
    for content, message in (
        (b"", "expected a GGUF file"),
        (b"PK\x03\x04" + bytes(100), r"begins with GGUF, got b'PK"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 2 or 3, little endian, got 0x3000000"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "got 0x1"),
    ):
        path.write_bytes(content)
        with pytest.raises(GgufError, match=message):
            open_gguf(path)
    with pytest.raises(GgufError, match="none.gguf: expected a GGUF file, got: .*No such file"):
        open_gguf(tmp_path / "none.gguf")


# A real model -------------------------------------------------------------------------------------

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def smol() -> tuple[DecoderConfig, dict]:
    path = smollm2()
    config = decoder_config_from_gguf(path)
    return config, load_params(path, config, ONE, jnp.float32)


def conversation(tokenizer) -> list[int]:
    start, end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
    user = [start, *tokenizer.encode(f"user\n{QUESTION}"), end, *tokenizer.encode("\n")]
    return [*user, start, *tokenizer.encode("assistant\n")]


def logits(config, params, ids):
    model = Model(config, ONE, jnp.float32, block=64, remat=False)
    tokens = jnp.asarray([ids])
    positions = jnp.arange(len(ids))[None]
    hidden = model.hidden(params, tokens, positions, jnp.ones_like(tokens))
    return model.unembed(params, hidden)[0]


def test_smollm2_knows_a_capital(smol):
    from sspjax.rollout.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2())
    config, params = smol
    assert sum(x.size for x in params.values()) == 134_515_008
    prompt = conversation(tokenizer)
    step = jax.jit(logits, static_argnums=0)
    ids = list(prompt)
    while len(ids) < len(prompt) + 12 and ids[-1] != tokenizer.eos_id:
        padded = ids + [tokenizer.pad_id] * (40 - len(ids))
        ids.append(int(step(config, params, jnp.asarray(padded))[len(ids) - 1].argmax()))
    assert tokenizer.decode(ids[len(prompt) :]) == "The capital of France is Paris."
    assert ids[-1] == tokenizer.special("<|im_end|>")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_smollm2_computes_what_transformers_computes(smol):
    torch = pytest.importorskip("torch", reason="torch is not installed (extra parity)")
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from sspjax.rollout.tokenizer import load_tokenizer

    path = str(smollm2())
    theirs = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(path)["config"])).eval()
    checkpoint = load_gguf_checkpoint(path, return_tensors=True, model_to_load=theirs)
    missing = theirs.load_state_dict(checkpoint["tensors"], strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    theirs.tie_weights()
    ids = conversation(load_tokenizer(smollm2()))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    found = np.asarray(jax.jit(logits, static_argnums=0)(smol[0], smol[1], jnp.asarray(ids)))
    assert np.abs(expected).max() > 10
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-4)
    assert (found.argmax(-1) == expected.argmax(-1)).all()


WATCHED = """
import sys, threading
import jax, jax.numpy as jnp
from sspjax.config import MeshConfig
from sspjax.mesh import train_layout
from sspjax.models.gguf.load import decoder_config_from_gguf, load_params

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

layout = train_layout(MeshConfig())
jnp.zeros(1).block_until_ready()
start = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
config = decoder_config_from_gguf(sys.argv[1])
params = jax.block_until_ready(load_params(sys.argv[1], config, layout, sys.argv[2]))
done.set()
watcher.join()
print(max(peak, anonymous()) - start, sum(x.nbytes for x in params.values()))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_stays_near_what_is_placed(dtype):
    """Of anonymous memory, at most the parameters and twice the largest tensor in float32."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(smollm2()), dtype],
        env=python_environment(devices=1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, placed = map(int, done.stdout.split())
    assert placed == 134_515_008 * (4 if dtype == "float32" else 2)
    assert placed <= peak <= placed + 2 * 49_152 * 576 * 4
