"""A small model folder, written by the safetensors package from numpy arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LAYERS, WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 16, 24, 4, 2, 8, 32

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def tensors(dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of the model, random."""
    rng = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (WIDTH,),
            f"{layer}.post_attention_layernorm.weight": (WIDTH,),
            f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, WIDTH),
            f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            f"{layer}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
            f"{layer}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{layer}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{layer}.mlp.gate_proj.weight": (MLP, WIDTH),
            f"{layer}.mlp.up_proj.weight": (MLP, WIDTH),
            f"{layer}.mlp.down_proj.weight": (WIDTH, MLP),
        }
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write(folder: Path, stored: dict[str, np.ndarray], *, files: int = 1) -> None:
    """The folder, its tensors dealt out over so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if files == 1:
        save_file(stored, folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    where = {name: names[i % files] for i, name in enumerate(stored)}
    for file in names:
        save_file({n: x for n, x in stored.items() if where[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
