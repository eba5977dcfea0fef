"""The trainer's scores of whole trajectories against the decoder written once more."""

import logging

import jax
import numpy as np
import pytest
from plain_decoder import logits as plain_logits

from sspjax.config import MeshConfig, freeze
from sspjax.mesh import train_layout
from sspjax.models.presets import DecoderConfig
from sspjax.trainer import Trainer
from sspjax.types import Act, Example, Prompt, Role, Seed, Stop, Trajectory, Turn

SMALL = DecoderConfig(
    vocab_size=128, layers=1, width=32, mlp=48, heads=2, kv_heads=1, head_dim=16, rope_theta=1e4,
    qk_norm=True,
)  # fmt: skip
TEMPERATURE = 0.7


def made(rng, role=Role.PROPOSER, prompt=3, turns=(2, -4, 3)):
    """A trajectory of random tokens; `turns` are lengths, negative for a tool's."""
    parts = [
        Turn(
            token_ids=rng.integers(0, SMALL.vocab_size, abs(n), dtype=np.int32),
            logprobs=np.full(abs(n), -1.0 if n > 0 else 0.0, np.float32),
            sampled=n > 0,
            text="",
            act=Act.SEARCH if n > 0 else Act.NONE,
        )
        for n in turns
    ]
    start = Prompt(
        role=role,
        subject=Seed(uid="s", answer="a"),
        group="g",
        messages=(),
        token_ids=rng.integers(0, SMALL.vocab_size, prompt, dtype=np.int32),
    )
    return Trajectory(uid="t", prompt=start, turns=tuple(parts), stop=Stop.QUESTION, policy_step=0)


def by_hand(params, trajectory, temperature):
    """f64[response length]: one sequence at a time, unpacked."""
    tokens = np.concatenate([trajectory.prompt.token_ids, trajectory.token_ids])
    z = plain_logits(SMALL, params, tokens) / temperature
    logprobs = z - np.log(np.exp(z).sum(-1, keepdims=True))
    first = len(trajectory.prompt.token_ids)
    return np.array([logprobs[i - 1, tokens[i]] for i in range(first, len(tokens))])


@pytest.fixture(scope="module")
def trainer():
    """Rows over two devices; a batch of the update has room for 16 rows of two trajectories."""
    role = {"prompt_tokens": 6, "response_tokens": 10, "max_turns": 3, "observation_tokens": 4}
    config = freeze(
        {
            "world": {"kind": "miniwiki"},
            "batch": 8,
            "model": {"dtype": "float32", "attention_block": 16, "remat": False},
            "proposer": role | {"temperature": TEMPERATURE},
            "solver": role | {"group_size": 2},
            "learner": {
                "row_tokens": 32,
                "kl": 0.1,
                "order": "joint",
                "minibatches": {"solver": 1},
            },
        }
    )  # fmt: skip
    return Trainer(config, SMALL, train_layout(MeshConfig(), jax.devices()[:2]))


def test_scores_are_those_of_the_decoder_written_again(trainer, caplog):
    """Any number of trajectories, packed into as many batches as they need, by the one program
    that also scores an update's batch for its KL term."""
    rng = np.random.default_rng(0)
    state = trainer.start()
    reference = trainer.reference(state)
    params = jax.device_get(reference["policy"])
    lengths = [(1, (1,)), (6, (3, -4, 3)), (2, (2, -4, 4)), (5, (8,)), (3, ()), (4, (1, -1))]
    mixed = [made(rng, Role.PROPOSER, *lengths[i % 6]) for i in range(11)]
    mixed += [made(rng, Role.SOLVER, *lengths[1])]
    # Three full batches and a bit: 16-token trajectories, two a row.
    many = [made(rng, Role.PROPOSER, *lengths[1]) for _ in range(70)]

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert trainer.score(reference["policy"], [], policy="policy") == []
        scored = [trainer.score(reference["policy"], t, policy="policy") for t in (mixed, many)]
        moved = Example(trajectory=mixed[1], reward=1.0, advantage=1.0, terms={})
        _, row = trainer.update(state, {Role.PROPOSER: [moved], Role.SOLVER: []}, reference, 1)
    compiled = [m for m in caplog.messages if m.startswith("Finished XLA compilation")]
    assert sum("reference_logprobs" in m for m in compiled) == 1
    assert row["actor/updates"] == 1

    for trajectories, logprobs in zip((mixed, many), scored, strict=True):
        assert len(logprobs) == len(trajectories)
        for trajectory, own in zip(trajectories, logprobs, strict=True):
            temperature = TEMPERATURE if trajectory.prompt.role is Role.PROPOSER else 1.0
            expected = by_hand(params, trajectory, temperature)
            assert own.dtype == np.float32
            # f32 sums of a few dozen terms, of logits of size 1.
            np.testing.assert_allclose(own, expected, rtol=0, atol=2e-5)


def test_what_does_not_fit_a_row_is_refused(trainer):
    long = made(np.random.default_rng(0), turns=(30,))
    with pytest.raises(ValueError, match="expected at most 32 tokens, got 33"):
        trainer.score({}, [long], policy="policy")
