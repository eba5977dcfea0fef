"""The compiled update against optimizer steps worked out in float64, and what must not matter."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy_policy import (
    BIGRAM,
    TOY,
    VOCABULARY,
    demonstration,
    toy_config,
    toy_examples,
    toy_params,
)

from sspjax.learner.optimizer import make_optimizer
from sspjax.learner.pack import pack, pack_demonstrations, update_shape
from sspjax.learner.scoring import make_reference_logprobs
from sspjax.learner.state import init_state, loss_constants, policy_names, state_shardings
from sspjax.learner.update import make_update, update_schedule
from sspjax.types import Role

WARM = {"steps": 1, "worlds": 1, "batch": 8}
RATE = np.float32(0.01)
RATES = np.full(len(Role), RATE)


def base_config(**learner):
    """Every term of the objective in use, chunks of logits smaller than a row."""
    return toy_config(
        proposer={"temperature": 0.8, "role_weight": 0.5},
        learner={"kl": 0.1, "entropy": 0.01} | learner,
        model={"logprob_chunk": 8},
        warm_start=WARM,
        verify={"prompt_tokens": 8, "answer_tokens": 4},
    )


CONFIG = base_config()


@functools.cache
def updater(model, config):
    return make_update(model, make_optimizer(config.learner), config)


@functools.cache
def reference_logprobs():
    return make_reference_logprobs(TOY, CONFIG)


@functools.cache
def start(policies, params):
    state = init_state(params, make_optimizer(CONFIG.learner), policies, jax.random.key(0))
    return jax.tree.map(np.asarray, state)


def fresh_state(config=CONFIG, params=toy_params):
    """The same state every time, in buffers of its own: the update donates them."""
    return jax.tree.map(jax.numpy.array, start(policy_names(config), params))


def batch_of(examples, config=CONFIG, *, rows=8, policy="policy"):
    return pack(examples, config, update_shape(config, policy, batch_devices=rows))


def examples(seed=0, proposers=8, solvers=8):
    r = np.random.default_rng(seed)
    return {
        Role.SOLVER: toy_examples(r, Role.SOLVER, groups=solvers, size=3),
        Role.PROPOSER: toy_examples(r, Role.PROPOSER, groups=proposers, size=1),
    }


def run(batch, config=CONFIG, model=TOY, state=None, rate=RATE):
    state = fresh_state(config) if state is None else state
    rates = np.full(len(Role), rate, np.float32)
    state, metrics = updater(model, config)(state, {"policy": batch}, loss_constants(config), rates)
    return state, {name: float(x) for name, x in metrics.items()}


def assert_close(a, b, *, relative):
    """Every leaf, relative to its own largest entry."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=relative * max(np.abs(y).max(), 1e-3))


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# Steps by hand -----------------------------------------------------------------------------------


class ByHand:
    """A bigram policy, logits = table[previous token], trained in float64 one token at a time."""

    def __init__(self, table, config, rate):
        self.table = np.asarray(table, np.float64)
        self.config, self.rate = config, rate
        self.m, self.v, self.steps = 0 * self.table, 0 * self.table, 0
        self.tokens, self.pg_losses, self.norms = [], [], []

    def role(self, example):
        c = self.config
        return c.solver if example.trajectory.prompt.role is Role.SOLVER else c.proposer

    def score(self, example):
        """(previous token, token, log p of every token, index) of each sampled token."""
        t = example.trajectory
        whole = [*t.prompt.token_ids, *t.token_ids]
        for i in np.flatnonzero(t.sampled):
            previous, token = whole[
                len(t.prompt.token_ids) + i - 1 : len(t.prompt.token_ids) + i + 1
            ]
            z = self.table[previous] / self.role(example).temperature
            yield previous, token, z - np.log(np.exp(z).sum()), i

    def logprobs(self, members):
        return {(id(e), i): table[token] for e in members for _, token, table, i in self.score(e)}

    def minibatch(self, members, old):
        """One optimizer step; `old` gives old log-probabilities by (example, index)."""
        learner, gradient, pg_loss = self.config.learner, 0 * self.table, 0.0
        for e in members:
            role, a = self.role(e), e.advantage
            others = sum(self.role(m) is role for m in members)
            weight = role.role_weight / (others * e.trajectory.sampled.sum())
            for previous, token, table, i in self.score(e):
                d = table[token] - old[id(e), i]
                free = -a * np.exp(d)
                bound = -a * np.clip(np.exp(d), 1 - learner.clip_low, 1 + learner.clip_high)
                dual = a < 0 and max(free, bound) > -a * learner.dual_clip
                pg_loss += weight * (-a * learner.dual_clip if dual else max(free, bound))
                by_logprob = 0 if dual or bound > free else free
                # k3 against a reference of log p = 0: d/dlogprob of exp(-lp) + lp - 1.
                x = -table[token]
                by_logprob += learner.kl * (1 - np.exp(x)) * (np.exp(x) - x - 1 < 10)
                p, one_hot = np.exp(table), np.eye(VOCABULARY)[token]
                entropy = -(p * table).sum()
                by_logits = by_logprob * (one_hot - p) + learner.entropy * p * (table + entropy)
                gradient[previous] += weight * by_logits / role.temperature
                behaviour = float(e.trajectory.logprobs[i])
                self.tokens.append(
                    (self.steps, -d, bound > free, entropy, behaviour - table[token])
                )
        self.pg_losses.append(pg_loss)
        self.norms.append(np.sqrt((gradient**2).sum()))
        gradient *= min(1, learner.grad_clip / self.norms[-1])
        self.steps += 1
        self.m = learner.b1 * self.m + (1 - learner.b1) * gradient
        self.v = learner.b2 * self.v + (1 - learner.b2) * gradient**2
        m, v = self.m / (1 - learner.b1**self.steps), self.v / (1 - learner.b2**self.steps)
        self.table -= self.rate * (m / (np.sqrt(v) + 1e-8) + learner.weight_decay * self.table)


def bigram_params(key):
    return {"table": jax.random.normal(key, (VOCABULARY, VOCABULARY))}


@pytest.mark.parametrize(
    ("mode", "order", "epochs"),
    [
        ("behaviour", "solver_first", 1),
        ("step_start", "solver_first", 1),
        ("role_start", "solver_first", 1),
        ("behaviour", "proposer_first", 1),
        ("step_start", "proposer_first", 2),
        ("role_start", "proposer_first", 2),
        ("role_start", "joint", 1),
    ],
)
def test_optimizer_steps_by_hand(mode, order, epochs):
    """Two solver minibatches and a proposer one, at a rate that drives ratios past the clip."""
    rate = np.float32(0.1)
    config = base_config(old_logprobs=mode, grad_clip=0.3, order=order, epochs=epochs)
    made = examples()
    state = fresh_state(config, bigram_params)
    hand = ByHand(state.policies["policy"].params["table"], config, float(rate))
    solver, proposer = made[Role.SOLVER], made[Role.PROPOSER]
    phases = {
        "solver_first": [[solver[:12], solver[12:]], [proposer]],
        "proposer_first": [[proposer], [solver[:12], solver[12:]]],
        "joint": [[solver[:12] + proposer[:4], solver[12:] + proposer[4:]]],
    }[order]
    everything = solver + proposer
    behaviour = {
        (id(e), i): float(e.trajectory.logprobs[i])
        for e in everything
        for i in np.flatnonzero(e.trajectory.sampled)
    }
    old = {"behaviour": behaviour}.get(mode, hand.logprobs(everything))
    visited = []
    for phase in phases:
        if mode == "role_start":
            old = hand.logprobs(everything)
        for members in phase * epochs:
            hand.minibatch(members, old)
            visited.append({hand.role(e) for e in members})

    state, metrics = run(batch_of(made, config), config, BIGRAM, state, rate)
    table = state.policies["policy"].params["table"]
    # optax rounds 1 - b2 to 1.3e-5 of itself, half of which reaches a step of about .1 an entry.
    np.testing.assert_allclose(table, hand.table, rtol=0, atol=5e-6)

    step, ppo_kl, is_clipped, entropy, behind = map(np.array, zip(*hand.tokens, strict=True))
    assert metrics["actor/pg_loss"] == pytest.approx(np.mean(hand.pg_losses), rel=1e-4)
    assert metrics["actor/grad_norm"] == pytest.approx(np.mean(hand.norms), rel=1e-4)
    assert metrics["actor/entropy"] == pytest.approx(entropy.mean(), rel=1e-4)
    if order != "joint":
        for name, own in (("solver", config.solver), ("proposer", config.proposer)):
            steps = [k for k, roles in enumerate(visited) if own in roles]
            loss = np.mean([hand.pg_losses[k] for k in steps])
            assert metrics[f"{name}/actor/pg_loss"] == pytest.approx(loss, rel=1e-4)
            of_role = entropy[np.isin(step, steps)].mean()
            assert metrics[f"{name}/actor/entropy"] == pytest.approx(of_role, rel=1e-4)
    assert metrics["actor/ppo_kl"] == pytest.approx(ppo_kl.mean(), rel=1e-4, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(is_clipped.mean(), rel=1e-6)
    assert metrics["actor/pg_clipfrac"] > 0
    # Only the first minibatch is scored by the parameters the tokens were sampled from.
    assert metrics["rollout_corr/kl"] == pytest.approx(behind[step == 0].mean(), rel=1e-4)
    assert metrics["actor/updates"] == len(visited)
    assert metrics["actor/skipped_updates"] == 0
    assert metrics["actor/lr"] == rate
    assert int(state.step) == 1


def test_schedules():
    def schedule(mode, order):
        made = update_schedule(base_config(old_logprobs=mode, order=order), "policy")
        return made.fresh.tolist(), made.refresh_stop.tolist(), made.refreshes

    assert schedule("behaviour", "solver_first") == ([False, False, False], [1, 2, 3], False)
    assert schedule("step_start", "solver_first") == ([True, False, False], [3, 2, 3], True)
    assert schedule("role_start", "solver_first") == ([True, False, True], [2, 2, 3], True)
    assert schedule("role_start", "proposer_first") == ([True, True, False], [1, 3, 3], True)
    assert schedule("role_start", "joint") == ([True, False], [2, 2], True)


def test_epochs_visit_a_role_again_before_the_next_role():
    schedule = update_schedule(base_config(epochs=2), "policy")
    assert schedule.minibatch.tolist() == [0, 1, 0, 1, 2, 2]
    assert schedule.role.tolist() == [Role.SOLVER.value] * 4 + [Role.PROPOSER.value] * 2
    assert schedule.fresh.tolist() == [True, False, False, False, True, False]
    # The first of a role is scored too: its second visit no longer meets its own policy.
    refreshed = list(zip(schedule.refresh_start, schedule.refresh_stop, strict=True))
    assert refreshed[0] == (0, 2)
    assert refreshed[4] == (2, 3)
    assert all(start == stop for start, stop in refreshed[1:4] + refreshed[5:])
    assert schedule.again.tolist() == [False, False, True, True, False, True]


def test_demonstrations_are_learned_once_whatever_the_epochs():
    config = base_config(epochs=2)
    shape = update_shape(config, "policy", batch_devices=8)
    batch = pack_demonstrations(
        [demonstration(np.random.default_rng(0))], shape, turn_weight=lambda turn: 1.0
    )
    _, metrics = run(batch, config)
    assert metrics["actor/updates"] == 1


@pytest.mark.parametrize("role", [Role.PROPOSER, Role.SOLVER])
def test_each_role_has_its_own_rate(role):
    """At rate 0 a role leaves the parameters where they are; at another it moves them."""
    made = {role: examples()[role]}

    def parameters(**rates):
        given = np.array([rates.get(r.name, 0.0) for r in Role], np.float32)
        state, metrics = updater(TOY, CONFIG)(
            fresh_state(), {"policy": batch_of(made)}, loss_constants(CONFIG), given
        )
        assert float(metrics["actor/updates"]) > 0
        return state.policies["policy"].params

    (other,) = {Role.PROPOSER, Role.SOLVER} - {role}
    start = fresh_state().policies["policy"].params
    assert_same_bits(parameters(**{other.name: 0.5}), start)
    moved = parameters(**{role.name: 0.5})
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(start), strict=True):
        assert np.max(np.abs(x - y)) > 0.1


def test_what_sampler_and_trainer_disagree_on_is_weighed_and_left_out():
    """Behaviour log-probabilities are raised so far that every other trajectory is rejected."""
    config = base_config(
        old_logprobs="step_start", importance="token", rejection="sequence",
        minibatches={"proposer": 1, "solver": 1},
    )  # fmt: skip
    made = {Role.SOLVER: examples()[Role.SOLVER]}
    state = fresh_state(config, bigram_params)
    hand = ByHand(state.policies["policy"].params["table"], config, 0.01)
    scored = hand.logprobs(made[Role.SOLVER])
    batch = batch_of(made, config)
    r = np.random.default_rng(0)
    behaviour, expected, masked, high = np.array(batch.behaviour_logprob), 0.0, [], []
    for n, e in enumerate(made[Role.SOLVER]):
        tokens = np.array([scored[id(e), i] for i in np.flatnonzero(e.trajectory.sampled)])
        log_ratio = r.normal(-2.0 if n % 2 else 0.1, 0.3, len(tokens))
        where = (batch.advantage == np.float32(e.advantage)) & batch.sampled
        behaviour[where] = tokens - log_ratio
        ratio = np.exp(log_ratio)
        kept = 0.5 <= np.exp(log_ratio.mean()) <= 2
        masked += [not kept] * len(tokens)
        high += (ratio > 2).tolist()
        # On policy the surrogate of a token is -A, times its weight.
        expected += kept * np.mean(np.minimum(ratio, 2)) * -e.advantage / len(made[Role.SOLVER])
    _, metrics = run(batch.replace(behaviour_logprob=behaviour), config, BIGRAM, state)
    assert 0.3 < np.mean(masked) < 0.7
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(np.mean(masked))
    high = metrics["rollout_corr/rollout_is_ratio_fraction_high"] - np.mean(high)
    assert high == pytest.approx(0, abs=1e-7)
    assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-4)


def test_one_minibatch_needs_no_extra_pass():
    config = base_config(minibatches={"proposer": 1, "solver": 1})
    assert not update_schedule(config, "policy").refreshes


# What must not matter ----------------------------------------------------------------------------


def test_many_micro_batches_equal_one():
    """The same examples in one micro-batch of 8 rows a minibatch, and in several of one."""
    made = examples()
    few, many = batch_of(made), batch_of(made, rows=1)
    assert few.micro_stop.tolist() == [1, 2, 3]
    assert np.diff(many.micro_stop, prepend=0).tolist() == [4, 3, 3]
    (a, x), (b, y) = run(few), run(many)
    assert_close(a, b, relative=2e-6)
    assert x == pytest.approx(y, rel=1e-5, abs=1e-7)


def test_rows_may_come_in_any_order():
    made = examples()
    shuffled = {
        Role.SOLVER: made[Role.SOLVER][11::-1] + made[Role.SOLVER][:11:-1],
        Role.PROPOSER: made[Role.PROPOSER][::-1],
    }
    first, second = batch_of(made), batch_of(shuffled)
    assert not np.array_equal(first.tokens, second.tokens)
    (a, x), (b, y) = run(first), run(second)
    assert_close(a, b, relative=2e-6)
    assert x == pytest.approx(y, rel=1e-5, abs=1e-7)


def test_nothing_is_compiled_twice():
    compiles = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(event)

    state, _ = run(batch_of(examples()))
    others = [
        batch_of(examples(1, proposers=3, solvers=7)),
        batch_of(examples(2, proposers=0, solvers=1)),
        batch_of({}),
        pack_demonstrations(
            [demonstration(np.random.default_rng(0))],
            update_shape(CONFIG, "policy", batch_devices=8),
            turn_weight=lambda turn: 1.0,
        ),
    ]
    before = updater(TOY, CONFIG)._cache_size()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for batch in others:
            state, _ = run(batch, state=state)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiles == []
    assert updater(TOY, CONFIG)._cache_size() == before
    assert int(state.step) == 5


# What must leave no trace ------------------------------------------------------------------------


def test_the_state_is_donated():
    state = fresh_state()
    run(batch_of({}), state=state)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.policies))


def test_an_empty_batch_takes_no_step():
    state, metrics = run(batch_of({}))
    assert_same_bits(state.policies, fresh_state().policies)
    assert int(state.step) == 1
    assert metrics["actor/updates"] == 0
    assert all(np.isfinite(x) for x in metrics.values())


def test_weights_of_zero_take_no_step():
    """Even where micro-batches are there: no decay, no moment moves."""
    batch = batch_of(examples())
    zeros = np.zeros_like(batch.loss_weight)
    state, metrics = run(batch.replace(loss_weight=zeros, kl_weight=zeros))
    assert_same_bits(state.policies, fresh_state().policies)
    assert metrics["actor/updates"] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(bad):
    batch = batch_of(examples())
    advantage = batch.advantage.copy()
    first = advantage[: batch.micro_stop[0]]
    first[batch.loss_weight[: batch.micro_stop[0]] > 0] = bad
    state, metrics = run(batch.replace(advantage=advantage))
    assert metrics["actor/skipped_updates"] == 1
    assert metrics["actor/updates"] == 2
    assert all(np.isfinite(x) for x in metrics.values())
    # As if the minibatch had not been there.
    weightless = batch.loss_weight.copy(), batch.kl_weight.copy()
    for weight in weightless:
        weight[: batch.micro_stop[0]] = 0
    without, _ = run(batch.replace(loss_weight=weightless[0], kl_weight=weightless[1]))
    assert_same_bits(state, without)


# Two policies ------------------------------------------------------------------------------------


def test_two_policies_are_two_updates():
    config = dataclasses.replace(
        CONFIG,
        proposer=dataclasses.replace(CONFIG.proposer, policy="asker"),
        solver=dataclasses.replace(CONFIG.solver, policy="answerer"),
    )
    made, update = examples(), updater(TOY, config)

    def play(asks, answers):
        batches = {
            "asker": batch_of({Role.PROPOSER: asks}, config, policy="asker"),
            "answerer": batch_of({Role.SOLVER: answers}, config, policy="answerer"),
        }
        state, metrics = update(fresh_state(config), batches, loss_constants(config), RATES)
        return state.policies, {name: float(x) for name, x in metrics.items()}

    both, metrics = play(made[Role.PROPOSER], made[Role.SOLVER])
    only, _ = play([], made[Role.SOLVER])
    assert_same_bits(only["asker"], fresh_state(config).policies["asker"])
    assert_same_bits(only["answerer"], both["answerer"])
    # The shared policy's program agrees on the role that it updates first.
    shared, _ = run(batch_of({Role.SOLVER: made[Role.SOLVER]}))
    assert_close(both["answerer"], shared.policies["policy"], relative=2e-6)
    assert metrics["solver/actor/updates"] == 2
    assert metrics["proposer/actor/updates"] == 1
    assert metrics["actor/updates"] == 3
    norms = 2 * metrics["solver/actor/grad_norm"] + metrics["proposer/actor/grad_norm"]
    assert metrics["actor/grad_norm"] == pytest.approx(norms / 3, rel=1e-6)
    assert update._cache_size() == 1


# Likelihood and reference ------------------------------------------------------------------------


def test_demonstrations_are_learned():
    made = [demonstration(np.random.default_rng(i), turns=(4, -2, 2)) for i in range(4)]
    shape = update_shape(CONFIG, "policy", batch_devices=8)
    batch = pack_demonstrations(made, shape, turn_weight=lambda turn: 1.0)
    state, first = run(batch, rate=np.float32(0.05))
    for _ in range(20):
        state, last = run(batch, state=state, rate=np.float32(0.05))
    assert last["actor/nll"] < 0.5 * first["actor/nll"]
    assert last["solver/actor/nll"] == pytest.approx(last["actor/nll"])
    assert last["reader/actor/nll"] == 0
    assert last["actor/entropy"] == 0  # of sampled tokens: there are none


def test_reference_logprobs():
    """Used micro-batches hold the model's own log-probabilities, the rest stays 0."""
    params = toy_params(jax.random.key(3))
    batch = batch_of(examples(proposers=2))
    filled = reference_logprobs()(params, batch, loss_constants(CONFIG))
    logprobs = np.asarray(filled.reference_logprob)
    assert not logprobs[batch.micro_stop[-1] :].any()
    for m, role, temperature in ((1, Role.SOLVER, 1.0), (2, Role.PROPOSER, 0.8)):
        hidden = TOY.hidden(params, batch.tokens[m], batch.positions[m], batch.segments[m])
        logits = np.asarray(TOY.unembed(params, hidden), np.float64)[0]
        assert set(batch.role[m, 0, batch.sampled[m, 0]]) == {role.value}
        for i in np.flatnonzero(batch.sampled[m, 0]):
            z = logits[i - 1] / temperature
            expected = z[batch.tokens[m, 0, i]] - np.log(np.exp(z).sum())
            assert logprobs[m, 0, i] == pytest.approx(expected, rel=1e-5)


def test_a_policy_that_is_its_own_reference_has_no_kl_in_its_first_step():
    batch = batch_of({Role.SOLVER: examples()[Role.SOLVER][:3]})
    params = fresh_state().policies["policy"].params
    _, metrics = run(reference_logprobs()(params, batch, loss_constants(CONFIG)))
    assert metrics["actor/updates"] == 1
    assert metrics["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    _, metrics = run(batch)
    assert metrics["actor/kl_loss"] > 0.1


# Devices -----------------------------------------------------------------------------------------


def test_eight_devices_equal_one():
    """Parameters over fsdp, rows over data x fsdp: equal to rounding, 1e-6 of the largest entry."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "fsdp"))
    lay = functools.partial(NamedSharding, mesh)
    params = {
        "embedding": lay(PartitionSpec(None, "fsdp")),
        "place": lay(PartitionSpec("fsdp")),
        "head": lay(PartitionSpec("fsdp", None)),
    }
    optimizer = make_optimizer(CONFIG.learner)
    shardings = state_shardings(params, optimizer, ("policy",), mesh)
    rows = lay(PartitionSpec(None, ("data", "fsdp"), None))
    update = make_update(TOY, optimizer, CONFIG, shardings=shardings, batch_sharding=rows)
    reference = make_reference_logprobs(TOY, CONFIG, batch_sharding=rows)
    state = init_state(toy_params, optimizer, ("policy",), jax.random.key(0), shardings)
    start = jax.tree.map(np.asarray, state.policies["policy"].params)
    constants, losses = loss_constants(CONFIG), []
    for seed in (0, 1):
        host = batch_of(examples(seed))
        stops = jax.device_put(host.micro_stop, shardings.step)
        batch = jax.device_put(host.replace(micro_stop=None), rows).replace(micro_stop=stops)
        state, metrics = update(
            state, {"policy": reference(state.policies["policy"].params, batch, constants)},
            constants, RATES,
        )  # fmt: skip
        losses.append(float(metrics["actor/pg_loss"]))
    assert update._cache_size() == 1
    assert jax.tree.map(lambda x: x.sharding, state.policies) == shardings.policies

    alone = fresh_state()
    assert_same_bits(start, alone.policies["policy"].params)
    for seed, loss in zip((0, 1), losses, strict=True):
        params = alone.policies["policy"].params
        batch = reference_logprobs()(params, batch_of(examples(seed)), constants)
        alone, metrics = run(batch, state=alone)
        assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-5)
    assert_close(state.policies["policy"].params, alone.policies["policy"].params, relative=1e-6)
    assert_close(
        state.policies["policy"].opt_state, alone.policies["policy"].opt_state, relative=1e-6
    )
