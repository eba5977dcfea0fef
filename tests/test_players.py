"""Roles at play: sizes and rules from the config, policies by role, work that is counted once."""

import dataclasses

import jax
import numpy as np
import pytest

from sspjax.config import MeshConfig, freeze
from sspjax.mesh import train_layout
from sspjax.metrics import CompileCounter
from sspjax.models.decoder import init_params, parameter_shardings
from sspjax.models.presets import DecoderConfig
from sspjax.players import Players, engine_shape
from sspjax.rollout.engine import EngineCounts
from sspjax.rollout.tokenizer import train_tokenizer
from sspjax.types import Act, Document, PolicyState, Prompt, Role, Seed, TrainState

SMALL = DecoderConfig(
    vocab_size=384, layers=1, width=32, mlp=48, heads=2, kv_heads=2, head_dim=16, rope_theta=1e4
)


def small_config(**groups):
    role = {
        "prompt_tokens": 16, "response_tokens": 100, "turn_tokens": 12, "observation_tokens": 60,
        "max_turns": 2,
    }  # fmt: skip
    standard = {
        "world": {"kind": "miniwiki"},
        "batch": 4,
        "model": {"dtype": "float32", "prompts": "tiny", "attention_block": 32},
        "proposer": role | {"policy": "asking", "temperature": 0.7},
        "solver": role | {"policy": "answering", "group_size": 3},
        "verify": {"prompt_tokens": 40, "answer_tokens": 8},
        "learner": {"row_tokens": 128, "kl": 0.0},
        "rollout": {"slots": 16, "extend_rows": 4, "chunk": 16, "decode_tokens": 8},
    }
    return freeze(standard | {name: standard[name] | own for name, own in groups.items()})


class Nothing:
    """A retriever that finds one passage."""

    def search(self, queries, topk):
        return [(Document(id="d", title="t", text="text"),)] * len(queries)


@pytest.fixture(scope="module")
def players():
    tokenizer = train_tokenizer(["<search> name </search> <answer> name </answer>\n"] * 3, 384)
    return Players(small_config(), SMALL, train_layout(MeshConfig()), tokenizer, Nothing())


@pytest.fixture(scope="module")
def state():
    shardings = parameter_shardings(SMALL, train_layout(MeshConfig()))
    policies = {
        name: PolicyState(
            params=jax.device_put(init_params(SMALL, jax.random.key(i)), shardings), opt_state=()
        )
        for i, name in enumerate(("asking", "answering"))
    }
    return TrainState(step=np.int32(0), policies=policies)


def prompts(role: Role, groups: int, size: int) -> list[Prompt]:
    """Members of different groups in turn."""
    return [
        Prompt(
            role=role,
            subject=Seed(uid=f"s{g}", answer="a"),
            group=f"g{g}",
            messages=(),
            token_ids=np.arange(40, 45 + g, dtype=np.int32),
        )
        for _ in range(size)
        for g in range(groups)
    ]


def test_the_engine_has_room_for_every_role():
    shape = engine_shape(small_config(), 4)
    assert (shape.slots, shape.rows, shape.chunk, shape.decode_tokens) == (16, 4, 16, 8)
    assert shape.length == 128 and shape.prompt_length == 40 and not shape.truncated
    long_reader = small_config(verify={"prompt_tokens": 180, "answer_tokens": 13})
    assert engine_shape(long_reader, 1).length == 256
    assert engine_shape(long_reader, 1).prompt_length == 180
    defaults = small_config(rollout={"slots": 24, "extend_rows": 0})
    assert engine_shape(defaults, 1).rows == 6 and engine_shape(defaults, 4).rows == 8
    for cut in ({"top_k": 5}, {"top_p": 0.9}):
        proposer = dataclasses.replace(defaults.proposer, **cut)
        assert engine_shape(dataclasses.replace(defaults, proposer=proposer), 1).truncated


def test_rules_of_the_roles(players):
    proposer, solver, reader = (players.rules(role) for role in Role)
    assert [r.final for r in (proposer, solver, reader)] == [Act.QUESTION, Act.ANSWER, Act.ANSWER]
    assert [tuple(r.tools) for r in (proposer, solver, reader)] == [(Act.SEARCH,)] * 2 + [()]
    assert (reader.max_turns, reader.response_tokens, reader.turn_tokens) == (1, 8, 8)
    assert [r.sampling.temperature for r in (proposer, solver, reader)] == [0.7, 1.0, 0.1]
    assert players.rules(Role.SOLVER, temperature=0.0).sampling.temperature == 0.0
    assert not players.rules(Role.SOLVER, tools=False).tools


def test_play_counts_loads_and_compiles_once(players, state):
    players.load(state, 3)
    with CompileCounter() as compiles:
        played = players.play(Role.PROPOSER, prompts(Role.PROPOSER, 3, 2), randomness=(0, 0, 3))
        compiles.take()
        asked = [p.group for p in prompts(Role.PROPOSER, 3, 2)]
        assert [t.uid for t in played] == [f"proposer/{g}/{i // 3}" for i, g in enumerate(asked)]
        assert {t.policy_step for t in played} == {3}
        work = players.take_work()
        assert work.counts.generated == sum(int(t.sampled.sum()) for t in played)
        assert players.take_work().counts == EngineCounts()

        # The roles have policies of their own: the same prompts and numbers, other tokens.
        rules = dataclasses.replace(players.rules(Role.PROPOSER), final=Act.ANSWER)
        same = [dataclasses.replace(p, role=Role.PROPOSER) for p in prompts(Role.SOLVER, 3, 2)]
        other = players.play(Role.SOLVER, same, randomness=(0, 0, 3), rules=rules)
        assert [t.uid for t in other] == [t.uid for t in played]
        assert all(
            not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(other, played, strict=True)
        )

        # Loaded again, the same again; other roles, temperatures and counts compile nothing.
        players.load(state, 4)
        again = players.play(Role.PROPOSER, prompts(Role.PROPOSER, 3, 2), randomness=(0, 0, 3))
        assert [t.token_ids.tolist() for t in again] == [t.token_ids.tolist() for t in played]
        players.play(Role.READER, prompts(Role.READER, 5, 1), randomness=(0, 0, 4))
        greedy = players.rules(Role.SOLVER, tools=False, temperature=0.0)
        players.play(Role.SOLVER, prompts(Role.SOLVER, 7, 4), randomness=(0,), rules=greedy)
        assert compiles.take() == 0
