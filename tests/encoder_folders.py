"""Folders of tiny random BERT encoders, as sentence-transformers saves them."""

import json
import pathlib

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

TEXT = "bravik tolen was born in the city of tormoor and works for halden guild who ? 12 km"
WORDS = TEXT.split()
CONFIG = {
    "model_type": "bert",
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "position_embedding_type": "absolute",
}


def tensors(rng: np.random.Generator, config: dict = CONFIG) -> dict[str, np.ndarray]:
    """Random tensors under transformers' names; large enough that every part shows."""
    d, f = config["hidden_size"], config["intermediate_size"]
    own = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], d),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], d),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], d),
        "embeddings.LayerNorm.weight": (d,),
        "embeddings.LayerNorm.bias": (d,),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, (out, inputs) in {
            "attention.self.query": (d, d),
            "attention.self.key": (d, d),
            "attention.self.value": (d, d),
            "attention.output.dense": (d, d),
            "intermediate.dense": (f, d),
            "output.dense": (d, f),
        }.items():
            own[f"encoder.layer.{layer}.{name}.weight"] = (out, inputs)
            own[f"encoder.layer.{layer}.{name}.bias"] = (out,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            own[f"encoder.layer.{layer}.{name}.weight"] = (d,)
            own[f"encoder.layer.{layer}.{name}.bias"] = (d,)
    return {n: rng.normal(0, 0.5, shape).astype(np.float32) for n, shape in own.items()}


def write(
    folder: pathlib.Path, *, pooling: str = "mean_tokens", prefix: str = "", **changes
) -> dict[str, np.ndarray]:
    """Writes an encoder; returns its tensors by transformers' names, without the prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    made = tensors(np.random.default_rng(0), config)
    extra = {"pooler.dense.weight": np.zeros((24, 24), np.float32)}
    save_file({prefix + n: x for n, x in {**made, **extra}.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if pooling:
        parts = ["Transformer", "Pooling", "Normalize"]
        places = ["", "1_Pooling", "2_Normalize"]
        modules = [
            {"type": f"sentence_transformers.models.{part}", "path": place}
            for part, place in zip(parts, places, strict=True)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        modes = {f"pooling_mode_{m}": m == pooling for m in ("mean_tokens", "cls_token", "max")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    vocabulary |= {"##s": len(vocabulary), ":": len(vocabulary) + 1, "query": len(vocabulary) + 2}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    # Folders come with settings of their own, which are not ours.
    tokenizer.enable_padding(length=48)
    tokenizer.enable_truncation(8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return made
