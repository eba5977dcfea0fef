"""A run whose policy starts from a GGUF file: shape, vocabulary and parameters are the file's."""

import jax.numpy as jnp
import numpy as np
from gguf_files import Tiny, metadata, write
from miniature import config
from vocabularies import smollm_spec

from sspjax import train
from sspjax.models.gguf.load import decoder_config_from_gguf
from sspjax.reopen import given_policies, open_weights


def test_a_run_starts_from_a_gguf_file(tmp_path):
    path, tiny = tmp_path / "tiny.gguf", Tiny(vocab=400, tied=True)
    tensors = tiny.tensors(np.random.default_rng(0))
    stored = write(path, tiny, tensors, metadata=metadata(smollm_spec(), "smollm"))
    settings = {"model.weights": path, "model.vocab_size": 0, "warm_start.steps": 0}
    # The small vocabulary needs more tokens for the same texts.
    roomy = {"learner.row_tokens": 2048, "retrieval.document_tokens": 128}
    for role in ("proposer", "solver"):
        roomy |= {f"{role}.prompt_tokens": 512, f"{role}.response_tokens": 1024}
        roomy |= {f"{role}.observation_tokens": 256}
    own = config(settings | roomy)

    setup = train.build(own, tmp_path / "run")
    assert setup.decoder == decoder_config_from_gguf(path)
    assert setup.tokenizer.eos_id == 2 and setup.tokenizer.vocab_size == 400
    (policy,) = setup.trainer.start().policies.values()
    np.testing.assert_array_equal(policy.params["embedding"], stored["token_embd.weight"])
    assert policy.params["q"].dtype == jnp.float32

    asked = open_weights(own, str(path), tmp_path / "run")
    (given,) = given_policies(asked).policies.values()
    rounded = stored["token_embd.weight"].astype(jnp.dtype(own.model.dtype))
    np.testing.assert_array_equal(given.params["embedding"], rounded)
