"""Packing: what lands where, what weighs how much, and that it always fits."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_policy import demonstration, example, toy_config, toy_examples, trajectory

from sspjax.config import RunConfig
from sspjax.learner.pack import (
    AGGREGATIONS,
    RoleSpan,
    UpdateShape,
    pack,
    pack_demonstrations,
    pack_unweighted,
    role_spans,
    update_shape,
)
from sspjax.types import Role, Stop

ROW_FIELDS = [
    "tokens",
    "positions",
    "segments",
    "sampled",
    "loss_weight",
    "kl_weight",
    "advantage",
    "behaviour_logprob",
    "old_logprob",
    "reference_logprob",
    "role",
]


def rng():
    return np.random.default_rng(0)


def spans(config, policy="policy"):
    return [(s.role, s.start, s.stop) for s in role_spans(config, policy)]


def in_minibatch(batch, k):
    """Fields of one minibatch as [rows, L]."""
    first = batch.micro_stop[k - 1] if k else 0
    return {
        name: vars(batch)[name][first : batch.micro_stop[k]].reshape(-1, batch.tokens.shape[2])
        for name in ROW_FIELDS
    }


# Minibatches and shapes --------------------------------------------------------------------------


def test_order_of_the_minibatches():
    counts = {"proposer": 1, "solver": 2}
    solver_first = toy_config(learner={"order": "solver_first", "minibatches": counts})
    assert spans(solver_first) == [(Role.SOLVER, 0, 2), (Role.PROPOSER, 2, 3)]
    proposer_first = toy_config(learner={"order": "proposer_first", "minibatches": counts})
    assert spans(proposer_first) == [(Role.PROPOSER, 0, 1), (Role.SOLVER, 1, 3)]
    joint = toy_config(learner={"order": "joint", "minibatches": counts})
    assert spans(joint) == [(Role.SOLVER, 0, 2), (Role.PROPOSER, 0, 2)]


def test_separate_policies_have_their_own_minibatches():
    config = toy_config(proposer={"policy": "asker"}, solver={"policy": "answerer"})
    assert spans(config, "asker") == [(Role.PROPOSER, 0, 1)]
    assert spans(config, "answerer") == [(Role.SOLVER, 0, 2)]


def test_shape_of_the_published_setting():
    """256 answers, 5 rollouts, rows of one longest trajectory: 2 x 10 solver and 4 proposer
    micro-batches of 64 rows, and one to spare for an uneven cut of the solver's."""
    shape = update_shape(RunConfig(), "policy", batch_devices=64)
    assert (shape.micro_batches, shape.rows, shape.length, shape.minibatches) == (25, 64, 12288, 3)


def test_rows_of_a_micro_batch():
    assert update_shape(toy_config(), "policy").rows == 1
    assert update_shape(toy_config(), "policy", batch_devices=8).rows == 8
    wide = toy_config(learner={"micro_rows": 2})
    assert update_shape(wide, "policy", batch_devices=8).rows == 16
    assert update_shape(wide, "policy", batch_devices=3).rows == 6


def test_a_frozen_role_needs_no_room():
    both = update_shape(toy_config(), "policy")
    frozen = update_shape(toy_config(solver={"role_weight": 0.0}), "policy")
    assert frozen.minibatches == both.minibatches
    assert frozen.micro_batches < both.micro_batches


@pytest.mark.parametrize("asker", ["policy", "asker"])
def test_demonstrations_fit_the_same_shape(asker):
    """Those of all roles: a policy may be taught what it will not play."""
    config = toy_config(
        proposer={"policy": asker},
        warm_start={"steps": 1, "worlds": 1, "batch": 400},
        verify={"prompt_tokens": 12, "answer_tokens": 4},
    )
    shape = update_shape(config, asker, batch_devices=8)
    assert shape.micro_batches == 25  # 400 of 16 tokens, two a row, eight rows
    longest = [demonstration(rng(), role=Role.READER, prompt=12, turns=(4,)) for _ in range(400)]
    batch = pack_demonstrations(longest, shape, turn_weight=lambda turn: 1.0)
    assert batch.micro_stop.tolist() == [25] * shape.minibatches


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_the_config_allows_fits(data):
    """Any lengths up to the longest, any group sizes, any order and row count."""
    draw = data.draw
    order = draw(st.sampled_from(["solver_first", "proposer_first", "joint"]))
    prompt = draw(st.integers(1, 4))
    config = toy_config(
        proposer={"prompt_tokens": prompt},
        learner={
            "order": order,
            "micro_rows": draw(st.integers(1, 3)),
            "row_tokens": draw(st.sampled_from([12, 24, 31, 40])),
            "minibatches": {"proposer": draw(st.integers(1, 3)), "solver": draw(st.integers(1, 3))},
        },
    )
    longest = draw(st.booleans())
    random = np.random.default_rng(draw(st.integers(0, 999)))

    def one(role, i, size, prompt):
        response = 8 if longest else int(random.integers(1, 9))
        start = prompt if longest else int(random.integers(1, prompt + 1))
        group = str(i // size) if size else str(int(random.integers(5)))
        return example(trajectory(random, role, group, start, (response,)), 1.0)

    sizes = draw(st.tuples(st.sampled_from([0, 1]), st.sampled_from([0, 3])))
    examples = {
        Role.PROPOSER: [one(Role.PROPOSER, i, sizes[0], prompt) for i in range(8)],
        Role.SOLVER: [one(Role.SOLVER, i, sizes[1], 4) for i in range(24)],
    }
    shape = update_shape(config, "policy")
    batch = pack(examples, config, shape)
    assert batch.tokens.shape == (shape.micro_batches, shape.rows, shape.length)
    everything = sum(int(e.trajectory.sampled.sum()) for x in examples.values() for e in x)
    assert np.sum(batch.loss_weight > 0) == everything
    stop = int(batch.micro_stop[-1])
    assert not batch.segments[stop:].any()


# Rows --------------------------------------------------------------------------------------------


def test_a_row_holds_whole_trajectories():
    r = rng()
    # Lengths 7, 12, 9, 4, 8: longest first, 12 + 9 + 8 | 7 + 4.
    turns = [(4,), (4, -3, 2), (6,), (1,), (2, -2, 1)]
    made = [example(trajectory(r, turns=t, group=str(i)), i + 1.0) for i, t in enumerate(turns)]
    config = toy_config(learner={"minibatches": {"proposer": 1, "solver": 1}})
    batch = pack({Role.SOLVER: made}, config, update_shape(config, "policy"))
    assert batch.micro_stop.tolist() == [2, 2]
    first, second = batch.segments[0, 0], batch.segments[1, 0]
    assert first.tolist() == [1] * 12 + [2] * 9 + [3] * 8 + [0] * 3
    assert second.tolist() == [1] * 7 + [2] * 4 + [0] * 21
    assert batch.positions[0, 0].tolist() == [*range(12), *range(9), *range(8), 0, 0, 0]
    long = made[1].trajectory
    assert batch.tokens[0, 0, :12].tolist() == [*long.prompt.token_ids, *long.token_ids]
    assert batch.sampled[0, 0, :12].tolist() == [False] * 3 + [True] * 4 + [False] * 3 + [True] * 2
    assert batch.advantage[0, 0, :29].tolist() == [2.0] * 12 + [3.0] * 9 + [5.0] * 8
    for logprob in (batch.behaviour_logprob, batch.old_logprob):
        np.testing.assert_array_equal(logprob[0, 0, 3:12], long.logprobs)
    assert np.all(batch.role[batch.segments > 0] == Role.SOLVER.value)
    assert {a.dtype.name for a in vars(batch).values()} == {"int32", "float32", "bool"}


def test_minibatches_are_cut_between_groups():
    made = toy_examples(rng(), groups=5, size=3)
    config = toy_config(learner={"minibatches": {"proposer": 1, "solver": 2}})
    batch = pack({Role.SOLVER: made}, config, update_shape(config, "policy"))
    for k, part in enumerate([made[:9], made[9:]]):
        rows = in_minibatch(batch, k)
        advantages = np.unique(rows["advantage"][rows["sampled"]])
        expected = np.sort(np.array([e.advantage for e in part], np.float32))
        np.testing.assert_array_equal(advantages, expected)


def test_an_empty_minibatch_owns_no_micro_batch():
    config = toy_config(learner={"minibatches": {"proposer": 2, "solver": 2}})
    one_group = toy_examples(rng(), Role.PROPOSER, groups=1, size=2)
    batch = pack(
        {Role.SOLVER: [], Role.PROPOSER: one_group}, config, update_shape(config, "policy")
    )
    assert batch.micro_stop.tolist() == [0, 0, 1, 1]


def test_packing_is_deterministic():
    config = toy_config()
    shape = update_shape(config, "policy", batch_devices=2)
    first, second = (pack({Role.SOLVER: toy_examples(rng())}, config, shape) for _ in range(2))
    for name in (*ROW_FIELDS, "micro_stop"):
        np.testing.assert_array_equal(vars(first)[name], vars(second)[name])


# Weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token-mean", [1 / 10, 1 / 10, 1 / 10]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-mean", [1 / 3, 1 / 12, 1 / 15]),
        ("seq-mean-token-sum-norm", [1 / 24, 1 / 24, 1 / 24]),
    ],
)
def test_weight_of_one_token(name, expected):
    """Three sequences of 1, 4 and 5 trained tokens, a response budget of 8."""
    assert AGGREGATIONS[name](np.array([1, 4, 5]), 8) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("aggregation", "total"),
    [
        ("token-mean", 1.0),
        ("seq-mean-token-sum", 10 / 3),
        ("seq-mean-token-mean", 1.0),
        ("seq-mean-token-sum-norm", 10 / 24),
    ],
)
def test_weights_of_a_minibatch_sum_to(aggregation, total):
    r = rng()
    turns = [(1,), (2, -3, 2), (5, -1)]
    made = [example(trajectory(r, turns=t), 1.0) for t in turns]
    config = toy_config(
        solver={"aggregation": aggregation, "role_weight": 0.5},
        learner={"kl": 0.01, "minibatches": {"proposer": 1, "solver": 1}},
    )
    batch = pack({Role.SOLVER: made}, config, update_shape(config, "policy"))
    assert batch.loss_weight.sum() == pytest.approx(0.5 * total, rel=1e-6)
    np.testing.assert_allclose(batch.kl_weight, 0.01 * batch.loss_weight, rtol=1e-6)
    assert not batch.loss_weight[~batch.sampled].any()
    assert not batch.sampled[batch.loss_weight == 0].any()


def test_each_minibatch_and_role_has_its_own_mean():
    config = toy_config(proposer={"role_weight": 0.25}, learner={"order": "joint", "kl": 0.1})
    r = rng()
    examples = {
        Role.SOLVER: toy_examples(r, Role.SOLVER, groups=5),
        Role.PROPOSER: toy_examples(r, Role.PROPOSER, groups=7, size=1),
    }
    batch = pack(examples, config, update_shape(config, "policy"))
    for k in range(2):
        rows = in_minibatch(batch, k)
        for role, total in ((Role.SOLVER, 1.0), (Role.PROPOSER, 0.25)):
            weight = rows["loss_weight"][rows["role"] == role.value]
            assert weight.sum() == pytest.approx(total, rel=1e-6)


def test_an_example_without_advantage_counts_but_takes_no_row():
    r = rng()
    made = [example(trajectory(r, turns=(4,)), a) for a in (1.0, 0.0, 0.0, 0.0)]
    config = toy_config(learner={"minibatches": {"proposer": 1, "solver": 1}})
    shape = update_shape(config, "policy")
    batch = pack({Role.SOLVER: made}, config, shape)
    assert batch.segments.max() == 1
    assert batch.loss_weight[batch.sampled].tolist() == [np.float32(1 / 16)] * 4
    for term in ("kl", "entropy"):
        read = toy_config(learner={term: 0.01, "minibatches": {"proposer": 1, "solver": 1}})
        assert np.sum(pack({Role.SOLVER: made}, read, shape).loss_weight > 0) == 16


def test_a_trajectory_without_sampled_tokens_does_not_count():
    r = rng()
    made = [example(trajectory(r, turns=t), 1.0) for t in ((4,), (-4,), ())]
    config = toy_config(learner={"kl": 0.01, "minibatches": {"proposer": 1, "solver": 1}})
    batch = pack({Role.SOLVER: made}, config, update_shape(config, "policy"))
    assert batch.loss_weight[batch.sampled].tolist() == [0.25] * 4


def test_a_frozen_role_takes_no_row():
    config = toy_config(solver={"role_weight": 0.0}, learner={"kl": 0.01})
    batch = pack({Role.SOLVER: toy_examples(rng())}, config, update_shape(config, "policy"))
    assert batch.micro_stop.tolist() == [0, 0, 0]


# Demonstrations ----------------------------------------------------------------------------------


def test_demonstrations_are_weighted_by_turn():
    r = rng()
    config = toy_config()
    made = [
        demonstration(r, role=Role.SOLVER, turns=(2, -5, 3)),
        demonstration(r, role=Role.PROPOSER, turns=(4,)),
        demonstration(r, role=Role.READER, prompt=9, turns=(1,)),
    ]
    tools = {id(t) for m in made for t in m.turns[1::2]}
    batch = pack_demonstrations(
        made, update_shape(config, "policy"), turn_weight=lambda t: 0.1 if id(t) in tools else 1.0
    )
    # 10 tokens written at 1 and 5 shown at .1.
    assert batch.loss_weight.sum() == pytest.approx(1, rel=1e-6)
    values, counts = np.unique(batch.loss_weight[batch.loss_weight > 0], return_counts=True)
    assert values == pytest.approx([0.1 / 10.5, 1 / 10.5], rel=1e-6)
    assert counts.tolist() == [5, 10]
    assert not batch.sampled.any()
    assert not batch.kl_weight.any()
    assert np.all(batch.advantage[batch.loss_weight > 0] == 1)
    assert set(np.unique(batch.role[batch.segments > 0])) == {0, 1, 2}
    assert batch.micro_stop.tolist() == [1, 1, 1]


def test_demonstrations_without_weight_are_nothing():
    batch = pack_demonstrations(
        [demonstration(rng())], update_shape(toy_config(), "policy"), turn_weight=lambda t: 0.0
    )
    assert batch.micro_stop.tolist() == [0, 0, 0]


# To be scored ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8)), max_size=40))
def test_what_is_to_be_scored_is_found_again(lengths):
    """Every trajectory whole, once, in a segment of its own; nothing of it has weight."""
    r = rng()
    shape = UpdateShape(
        micro_batches=2, rows=3, length=12, minibatches=2, spans=role_spans(toy_config(), "policy")
    )
    made = [trajectory(r, Role.PROPOSER, "g", p, (n,) if n else ()) for p, n in lengths]
    packed = pack_unweighted(made, shape)
    assert len(packed) >= 1
    assert sorted(i for p in packed for i in p.places) == list(range(len(made)))
    for p in packed:
        batch = p.batch
        assert batch.tokens.shape == (2, 3, 12)
        for name in ("loss_weight", "kl_weight", "advantage"):
            assert not vars(batch)[name].any()
        used = {place.micro_batch for place in p.places.values()}
        assert batch.micro_stop.tolist() == [max(used, default=-1) + 1] * 2
        for i, place in p.places.items():
            first = place.start - lengths[i][0]
            own = (place.micro_batch, place.row, slice(first, place.stop))
            whole = np.concatenate([made[i].prompt.token_ids, made[i].token_ids])
            assert batch.tokens[own].tolist() == whole.tolist()
            assert batch.positions[own].tolist() == list(range(len(whole)))
            (segment,) = set(batch.segments[own].tolist())
            row = batch.segments[place.micro_batch, place.row]
            assert np.sum(row == segment) == len(whole)
            assert set(batch.role[own].tolist()) == {Role.PROPOSER.value}
    assert sum(int((p.batch.segments > 0).sum()) for p in packed) == sum(p + n for p, n in lengths)


def test_more_than_one_shape_holds_takes_more_batches():
    shape = UpdateShape(
        micro_batches=2, rows=3, length=12, minibatches=1, spans=role_spans(toy_config(), "policy")
    )
    whole = [trajectory(rng(), prompt=4, turns=(8,)) for _ in range(13)]
    packed = pack_unweighted(whole, shape)
    assert [len(p.places) for p in packed] == [6, 6, 1]
    assert [p.batch.micro_stop.tolist() for p in packed] == [[2], [2], [1]]
    (empty,) = pack_unweighted([], shape)
    assert (empty.places, empty.batch.micro_stop.tolist()) == ({}, [0])


# Refusals ----------------------------------------------------------------------------------------


def refuse(match, made, role=Role.SOLVER, shape=None):
    config = toy_config()
    with pytest.raises(ValueError, match=match):
        pack({role: made}, config, shape or update_shape(config, "policy"))


def test_pack_refuses():
    r = rng()
    refuse("expected at most 32 tokens, got 33", [example(trajectory(r, turns=(30,)), 1.0)])
    refuse("the prompt is empty", [example(trajectory(r, prompt=0), 1.0)])
    refuse("expected a finite advantage, got nan", [example(trajectory(r), float("nan"))])
    failed = dataclasses.replace(trajectory(r), stop=Stop.TOOL_FAILED)
    refuse("its tool failed", [example(failed, 1.0)])
    refuse("expected examples of SOLVER, PROPOSER, got READER", [], role=Role.READER)
    small = UpdateShape(
        micro_batches=1,
        rows=1,
        length=32,
        minibatches=1,
        spans=(RoleSpan(role=Role.SOLVER, start=0, stop=1),),
    )
    refuse("expected at most 1 micro-batches of 1 rows, got 4", toy_examples(r), shape=small)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_demonstrations_refuse_weights(weight):
    with pytest.raises(ValueError, match="turn_weight must be finite and not negative"):
        pack_demonstrations(
            [demonstration(rng())],
            update_shape(toy_config(), "policy"),
            turn_weight=lambda turn: weight,
        )


def test_demonstrations_refuse_sampled_turns():
    with pytest.raises(ValueError, match="expected forced turns only"):
        pack_demonstrations(
            [trajectory(rng())], update_shape(toy_config(), "policy"), turn_weight=lambda turn: 1.0
        )
