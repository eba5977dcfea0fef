"""The decoder against transformers: tiny random models of every family, through their folders."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sspjax.config import MeshConfig
from sspjax.mesh import island_layout
from sspjax.models.decoder import Model
from sspjax.models.hugging_face.config import decoder_config_from_hf
from sspjax.models.hugging_face.load import load_params

torch = pytest.importorskip("torch", reason="needs torch: pip install 'sspjax[parity]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

VOCAB = 96
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    attn_implementation="eager",
)
LONGER = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "llama": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LONGER, rms_norm_eps=1e-5),
    "smollm2": lambda: transformers.LlamaConfig(
        **{**SMALL, "num_attention_heads": 3, "hidden_size": 24, "num_key_value_heads": 1},
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=7),
}
LENGTHS = (40, 23, 1)
"""Sequences of the batch: beyond Llama's original context of 16 and Mistral's window of 7."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same model twice."""

    theirs: "transformers.PreTrainedModel"
    ours: Model
    params: dict

    def expected(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [T, vocab] of one sequence."""
        with torch.no_grad():
            return self.theirs(torch.tensor(tokens[None])).logits[0].numpy()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]())
    # Every number random, biases and norms included, so that none can be forgotten.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    config = decoder_config_from_hf(folder)
    layout = island_layout(MeshConfig(), config.kv_heads, jax.devices()[:1])
    params = load_params(folder, config, layout, jnp.float32)
    return Pair(model.eval(), Model(config, layout, jnp.float32, block=8), params)


@pytest.fixture
def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in LENGTHS]


def logits(pair: Pair, tokens, positions, segments):
    def run(params):
        return pair.ours.unembed(params, pair.ours.hidden(params, tokens, positions, segments))

    return np.asarray(jax.jit(run)(pair.params))


def test_logits_of_a_padded_batch(pair, sequences):
    tokens, mask, positions = np.zeros((3, len(LENGTHS), max(LENGTHS)), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
        positions[row] = np.arange(max(LENGTHS))
    with torch.no_grad():
        theirs = pair.theirs(torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits
    ours = logits(pair, tokens, positions, mask)
    assert np.abs(theirs.numpy()).max() > 1
    seen = mask.astype(bool)
    np.testing.assert_allclose(ours[seen], theirs.numpy()[seen], atol=1e-4, rtol=0)


def test_logits_of_packed_segments(pair, sequences):
    tokens = np.concatenate([*sequences, np.zeros(4, np.int32)])[None]
    positions = np.concatenate([*(np.arange(n) for n in LENGTHS), np.zeros(4)])[None]
    segments = np.repeat([1, 2, 3, 0], [*LENGTHS, 4])[None]
    ours = logits(pair, tokens, positions.astype(np.int32), segments.astype(np.int32))[0]
    start = 0
    for sequence in sequences:
        own = ours[start : start + len(sequence)]
        np.testing.assert_allclose(own, pair.expected(sequence), atol=1e-4, rtol=0)
        start += len(sequence)


def test_logits_of_an_extended_cache_and_greedy_tokens(pair, sequences):
    """The prompt in three pieces into slot 2, one token that was given, then 32 that are chosen."""
    prompt, model = sequences[0][:30], pair.ours
    cache = model.empty_cache(3, 72)
    extend, decode = jax.jit(model.extend), jax.jit(model.decode)
    start = 0
    for size in (11, 11, 7):
        chunk = np.zeros((1, 11), np.int32)
        chunk[0, :size] = prompt[start : start + size]
        slots, begin, count = (np.array([n], np.int32) for n in (2, start, size))
        cache = extend(pair.params, cache, chunk, slots, begin, count)
        start += size
    active = np.array([False, False, True])
    text = list(prompt)
    for step in range(33):
        pending, length = np.zeros(3, np.int32), np.zeros(3, np.int32)
        pending[2], length[2] = text[-1], len(text) - 1
        cache, out = decode(pair.params, cache, pending, length, active)
        if step in (0, 1, 20):
            expected = pair.expected(np.array(text))[-1]
            np.testing.assert_allclose(out[2], expected, atol=1e-4, rtol=0)
        text.append(int(np.argmax(out[2])))
    theirs = pair.theirs.generate(
        torch.tensor(prompt[None]), max_new_tokens=32, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert text[:62] == theirs[0].tolist()
