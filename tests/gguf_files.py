"""GGUF files of tiny random decoders, written by ggml's own package."""

import dataclasses
import pathlib

import gguf
import numpy as np

KINDS = gguf.GGMLQuantizationType


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Shape of a tiny decoder; rows are whole blocks of 32."""

    architecture: str = "llama"
    vocab: int = 96
    layers: int = 2
    width: int = 64
    mlp: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    tied: bool = False

    def tensors(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Random float32 tensors by their names in the file, the outputs first."""
        d, q, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"token_embd.weight": (self.vocab, d), "output_norm.weight": (d,)}
        if not self.tied:
            shapes["output.weight"] = (self.vocab, d)
        for layer in range(self.layers):
            own = {
                "attn_norm.weight": (d,),
                "attn_q.weight": (q, d),
                "attn_k.weight": (kv, d),
                "attn_v.weight": (kv, d),
                "attn_output.weight": (d, q),
                "ffn_norm.weight": (d,),
                "ffn_gate.weight": (self.mlp, d),
                "ffn_up.weight": (self.mlp, d),
                "ffn_down.weight": (d, self.mlp),
            }
            if self.architecture == "qwen2":
                own |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
            if self.architecture == "qwen3":
                own |= {f"attn_{n}_norm.weight": (self.head_dim,) for n in "qk"}
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
        return {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}

    def settings(self) -> dict[str, int | float | str]:
        return {
            "block_count": self.layers,
            "context_length": 512,
            "embedding_length": self.width,
            "feed_forward_length": self.mlp,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": 5e5,
        }


ADD = {int: "add_uint32", float: "add_float32", str: "add_string", bool: "add_bool"}


def write(
    path: pathlib.Path,
    tiny: Tiny,
    tensors: dict[str, np.ndarray],
    kinds: dict[str, KINDS] | None = None,
    settings: dict | None = None,
    metadata: dict | None = None,
) -> dict[str, np.ndarray]:
    """Writes matrices as Q8_0 (or as `kinds` says), the rest as F32; returns what is in the file.

    The values that come back are those of ggml's own reader.
    """
    writer = gguf.GGUFWriter(path, tiny.architecture)
    for key, value in {**tiny.settings(), **(settings or {})}.items():
        if value is not None:
            vars(gguf.GGUFWriter)[ADD[type(value)]](writer, f"{tiny.architecture}.{key}", value)
    for key, value in (metadata or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            vars(gguf.GGUFWriter)[ADD[type(value)]](writer, key, value)
    stored = {}
    for name, tensor in tensors.items():
        default = KINDS.Q8_0 if tensor.ndim == 2 else KINDS.F32
        kind = (kinds or {}).get(name, default)
        raw = gguf.quantize(tensor, kind)
        stored[name] = gguf.dequantize(raw, kind).reshape(tensor.shape)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def metadata(spec: dict, pre: str) -> dict:
    """What a converter writes: 3 for control tokens, 4 for other additions, 1 for the rest."""
    added = {token["content"]: token for token in spec["added_tokens"]}
    ids = {**spec["model"]["vocab"], **{name: token["id"] for name, token in added.items()}}
    tokens = sorted(ids, key=lambda token: ids[token])
    assert [ids[token] for token in tokens] == list(range(len(ids)))
    kinds = [1 if t not in added else 3 if added[t]["special"] else 4 for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.chat_template": "{{ messages }}",
    }
