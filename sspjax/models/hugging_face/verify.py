"""A model folder read twice: by this package and by transformers, to see that both mean the same.

Needs torch (extra `parity`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sspjax.errors import UserError
from sspjax.mesh import Layout
from sspjax.models.decoder import Model
from sspjax.models.hugging_face.config import decoder_config_from_hf
from sspjax.models.hugging_face.load import load_params
from sspjax.types import Params

LIMIT = 1e-4
"""Largest difference that rounding explains, as a share of the largest logit, in float32."""

_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Logits of random token ids, by both."""

    difference: float
    """Largest absolute difference."""
    largest: float
    """Largest absolute logit of transformers."""
    same_best: float
    """Share of places where both find the same token the most likely."""

    @property
    def passed(self) -> bool:
        return self.difference <= LIMIT * self.largest


def require_torch(wish: str) -> None:
    """Raises UserError, naming what asked for it, where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"{wish}: expected torch, which transformers computes with, got no such package; "
            "pip install 'sspjax[parity]', or leave it out"
        )


def compare_with_transformers(folder: str | Path, layout: Layout, seed: int = 0) -> Comparison:
    """Runs both over the same rows of random ids, on float32 copies of the folder's numbers."""
    config = decoder_config_from_hf(folder)
    rows = max(2, layout.ways("batch"))
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (rows, _TOKENS), np.int32)
    ours, theirs = _ours(folder, layout, tokens), _theirs(folder, tokens)
    return Comparison(
        difference=float(np.abs(ours - theirs).max()),
        largest=float(np.abs(theirs).max()),
        same_best=float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    )


def _ours(folder: str | Path, layout: Layout, tokens: np.ndarray) -> np.ndarray:
    config = decoder_config_from_hf(folder)
    model = Model(config, layout, jnp.float32)
    params = load_params(folder, config, layout, jnp.float32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    def logits(params: Params, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        hidden = model.hidden(params, tokens, positions, jnp.ones_like(tokens))
        return model.unembed(params, hidden)

    program = jax.jit(logits, out_shardings=layout.replicated())
    return np.asarray(program(params, tokens, positions))


def _theirs(folder: str | Path, tokens: np.ndarray) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()
