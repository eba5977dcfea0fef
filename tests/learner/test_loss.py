"""Every formula of the objective against float64 numpy, and what gradients must and must not do."""

import dataclasses

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from toy_policy import (
    FREE,
    TOY,
    VOCABULARY,
    demonstration,
    toy_config,
    toy_examples,
    toy_params,
)

from sspjax.config import ConfigError
from sspjax.learner.loss import (
    KL_KINDS,
    PolicyModel,
    Rows,
    Spans,
    cispo,
    clipped,
    gspo,
    k3,
    micro_batch,
    micro_loss,
    mismatch,
    row_loss,
    token_logprobs,
)
from sspjax.learner.pack import pack, pack_demonstrations, update_shape
from sspjax.learner.state import loss_constants
from sspjax.types import Act, LossConstants, Role

ROWS, LENGTH = 2, 11


def constants(**changes):
    values = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "entropy": 0.0}
    filled = {name: np.full(3, x, np.float32) for name, x in (values | changes).items()}
    return LossConstants(temperature=np.array([0.8, 1.0, 0.5], np.float32), **filled)


def random_rows(seed=0):
    """Two rows of random tokens in two segments, every field in use."""
    r = np.random.default_rng(seed)
    size = (ROWS, LENGTH)
    sampled = r.random(size) < 0.6
    weight = np.where(r.random(size) < 0.7, r.random(size), 0)
    return Rows(
        tokens=r.integers(0, VOCABULARY, size, dtype=np.int32),
        positions=np.array([[*range(6), *range(5)]] * ROWS, np.int32),
        segments=np.array([[1] * 6 + [2] * 5] * ROWS, np.int32),
        sampled=sampled,
        loss_weight=weight.astype(np.float32),
        kl_weight=(0.1 * weight * sampled).astype(np.float32),
        advantage=r.normal(size=size).astype(np.float32),
        behaviour_logprob=(-2 * r.random(size)).astype(np.float32),
        old_logprob=(-2 * r.random(size)).astype(np.float32),
        reference_logprob=(-2 * r.random(size)).astype(np.float32),
        role=np.array([[0] * 6 + [1] * 5, [1] * 6 + [2] * 5], np.int32),
    )


def free_logits(seed=1):
    shape = (ROWS, LENGTH, VOCABULARY)
    return {"logits": 2 * jax.random.normal(jax.random.key(seed), shape)}


OWN = LossConstants(
    **dict.fromkeys(("entropy", "temperature")), clip_low=0.2, clip_high=0.28, dual_clip=3.0
)
"""One role's constants, for a single token."""
ONE = Spans(segments=np.ones((1, 1), np.int32), counted=np.ones((1, 1), bool))

STATIC = ("model", "config", "chunk")
micro_gradient = jax.jit(jax.grad(micro_loss, has_aux=True), static_argnames=STATIC)
score = jax.jit(token_logprobs, static_argnums=0, static_argnames=("chunk", "entropy_gradient"))


def expected_distribution(rows, logits, temperature):
    """log softmax(logits / T) of the position before each token, f64[R, L, V]; zeros at 0."""
    z = np.zeros(logits.shape)
    z[:, 1:] = np.asarray(logits, np.float64)[:, :-1] / temperature[rows.role[:, 1:]][..., None]
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


# Log-probabilities -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
def test_logprob_and_entropy_for_any_chunk(chunk):
    rows, params, c = random_rows(), free_logits(), constants()
    logprob, entropy = score(FREE, params, rows, c.temperature, chunk=chunk)
    table = expected_distribution(rows, params["logits"], c.temperature.astype(np.float64))
    expected = np.take_along_axis(table, rows.tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprob[:, 1:], expected[:, 1:], rtol=1e-6, atol=1e-6)
    expected = -(np.exp(table) * table).sum(-1)
    np.testing.assert_allclose(entropy[:, 1:], expected[:, 1:], rtol=1e-6, atol=1e-6)
    assert logprob.dtype == entropy.dtype == jnp.float32


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_do_not_change_the_gradient(chunk):
    rows, c = random_rows(), constants(entropy=0.3)
    params = toy_params(jax.random.key(0))
    config = toy_config(learner={"entropy": 0.3}).learner

    def gradient(chunk):
        return micro_gradient(
            params, rows, c, model=TOY, config=config, chunk=chunk, fresh=False, unmoved=True
        )[0]

    for a, b in zip(*map(jax.tree.leaves, (gradient(chunk), gradient(LENGTH))), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def largest_vocabulary_array(jaxpr):
    """Elements of the largest array with a vocabulary axis anywhere in a program."""
    largest = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            shape = variable.aval.shape
            if len(shape) > 2 and shape[-1] == VOCABULARY:
                largest = max(largest, int(np.prod(shape)))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            largest = max(largest, largest_vocabulary_array(inner))
    return largest


@pytest.mark.parametrize(("chunk", "positions"), [(4, 4), (3, 3), (11, 11), (100, 11)])
def test_logits_exist_for_one_chunk_only(chunk, positions):
    rows, config = random_rows(), toy_config().learner

    def gradient(params):
        return micro_gradient(
            params, rows, constants(), model=TOY, config=config, chunk=chunk,
            fresh=False, unmoved=True,
        )  # fmt: skip

    jaxpr = jax.make_jaxpr(gradient)(toy_params(jax.random.key(0)))
    assert largest_vocabulary_array(jaxpr.jaxpr) == ROWS * positions * VOCABULARY


def test_the_entropy_is_a_constant_unless_asked_for():
    rows = random_rows()

    def total(params, entropy_gradient):
        temperature = constants().temperature
        _, entropy = score(
            FREE, params, rows, temperature, chunk=4, entropy_gradient=entropy_gradient
        )
        return jnp.sum(entropy[:, 1:])

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    assert not np.any(gradient(free_logits(), False)["logits"])
    made = np.asarray(gradient(free_logits(), True)["logits"])[:, :-1]
    # d entropy / d logit = -p (log p + entropy) / T.
    t = constants().temperature.astype(np.float64)
    table = expected_distribution(rows, free_logits()["logits"], t)[:, 1:]
    p = np.exp(table)
    entropy = -(p * table).sum(-1, keepdims=True)
    expected = -p * (table + entropy) / t[rows.role[:, 1:]][..., None]
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)


# Terms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped", "is_dual"),
    [
        (1.25, 2.0, -2.5, False, False),
        (1.30, 2.0, -2.56, True, False),  # clip-higher at 1.28
        (0.70, 2.0, -1.4, False, False),  # the lower bound does not hold good news back
        (0.70, -2.0, 1.6, True, False),  # 1 - .2
        (1.30, -2.0, 2.6, False, False),
        (4.00, -2.0, 6.0, False, True),  # dual clip at 3
        (4.00, 2.0, -2.56, True, False),
        (1.00, 0.0, 0.0, False, False),
    ],
)
def test_clipped(ratio, advantage, loss, is_clipped, is_dual):
    old = -1.5
    x = [np.full((1, 1), v, np.float32) for v in (old + np.log(ratio), old, advantage)]
    terms = clipped(*x, OWN, ONE)
    assert float(terms.loss[0, 0]) == pytest.approx(loss, rel=1e-6)
    assert float(terms.log_ratio[0, 0]) == pytest.approx(np.log(ratio), abs=1e-6)
    assert (bool(terms.clipped[0, 0]), bool(terms.clipped_dual[0, 0])) == (is_clipped, is_dual)


def test_log_ratio_is_bounded():
    x = [np.full((1, 1), v, np.float32) for v in (0.0, -50.0, 1.0)]
    assert float(clipped(*x, OWN, ONE).log_ratio[0, 0]) == 20.0


@pytest.mark.parametrize(
    ("logprob", "reference", "expected"),
    [
        (-1.0, -1.0, 0.0),
        (-1.0, -1.5, np.exp(-0.5) - 0.5),  # exp(x) - x - 1 at x = -.5
        (-2.0, -1.0, np.e - 2),
        (-9.0, -1.0, 10.0),
        (-1.0, -40.0, 10.0),
    ],
)
def test_k3(logprob, reference, expected):
    x = [np.full((1, 1), v, np.float32) for v in (logprob, reference)]
    assert float(k3(*x)[0, 0]) == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", -0.5, 1.0),
        ("abs", 0.5, -1.0),
        ("k2", 0.125, -0.5),
        ("k3", np.exp(0.5) - 1.5, 1 - np.exp(0.5)),
        ("k1+", -0.5, -0.5),
        ("k3+", np.exp(0.5) - 1.5, -0.5),
    ],
)
def test_kinds_of_kl(kind, value, slope):
    """At log p = -1.5 against a reference of -1: the difference is -1/2."""
    at = np.full((1, 1), -1.5, np.float32), np.full((1, 1), -1.0, np.float32)
    made, gradient = jax.value_and_grad(lambda x: jnp.sum(KL_KINDS[kind](x, at[1])))(at[0])
    assert float(made) == pytest.approx(value, rel=1e-6)
    assert float(gradient[0, 0]) == pytest.approx(slope, rel=1e-6)


# One row of two trajectories, of three and two trained tokens; the second token is a tool's.
SPANS = Spans(
    segments=np.array([[1, 1, 1, 1, 2, 2, 0]], np.int32),
    counted=np.array([[1, 0, 1, 1, 1, 1, 0]], bool),
)


def of_tokens(trained, other=9.0):
    """The values of five trained tokens in the places of `SPANS`; nonsense elsewhere."""
    row = np.full((1, 7), other, np.float32)
    row[SPANS.counted] = trained
    return row


def test_sums_and_means_of_trajectories():
    values = of_tokens([1.0, 2.0, 4.0, 10.0, -4.0])
    total, mean = SPANS.total(values)[0], SPANS.mean(values)[0]
    assert total[:6].tolist() == [7.0] * 4 + [6.0] * 2
    np.testing.assert_allclose(mean[:6], [7 / 3] * 4 + [3.0] * 2, rtol=1e-6)
    nobody = SPANS._replace(counted=np.zeros((1, 7), bool))
    assert not np.any(nobody.mean(values))


@pytest.mark.parametrize("bounds", [(0.2, 0.28), (3e-4, 4e-4)])
def test_gspo(bounds):
    """Ratios exp(.2 - .1 + .2) / 3 and exp(-.1): one for each trajectory, clipped as a whole."""
    old, drift = np.float64([-1, -2, -3, -1, -1]), np.float64([0.2, -0.1, 0.2, -0.3, 0.1])
    advantage = np.float64([2, 2, 2, -1, -1])
    own = OWN.replace(clip_low=bounds[0], clip_high=bounds[1])
    weight = of_tokens([0.3, 0.3, 0.3, 0.5, 0.5], 0.0)

    def loss(logprob):
        terms = gspo(logprob, of_tokens(old), of_tokens(advantage), own, SPANS)
        return jnp.sum(weight * terms.loss), terms

    gradient, terms = jax.grad(loss, has_aux=True)(of_tokens(old + drift))
    ratio = np.exp(np.repeat([0.1, -0.1], [3, 2]))
    held = np.clip(ratio, 1 - bounds[0], 1 + bounds[1])
    expected = np.maximum(-advantage * ratio, -advantage * held)
    np.testing.assert_allclose(terms.loss[SPANS.counted], expected, rtol=1e-6)
    np.testing.assert_allclose(np.exp(terms.log_ratio[SPANS.counted]), ratio, rtol=1e-6)
    # The sequence's ratio r has d r / d log p_t = r / T, and T tokens of equal weight share it.
    by_hand = np.where(expected > -advantage * ratio, 0, -advantage * ratio)
    by_hand *= weight[SPANS.counted]
    np.testing.assert_allclose(gradient[SPANS.counted], by_hand, rtol=1e-6)
    assert bool(terms.clipped[0, 0]) == (bounds[1] < 0.1)
    assert not np.any(terms.clipped_dual)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.25, 2.0, 1.25), (1.5, 2.0, 1.28), (0.5, 2.0, 0.8), (1.5, -2.0, 1.28), (0.9, -2.0, 0.9)],
)
def test_cispo(ratio, advantage, weight):
    old = np.full((1, 1), -1.5, np.float32)
    a = np.full((1, 1), advantage, np.float32)

    def loss(logprob):
        terms = cispo(logprob, old, a, OWN, ONE)
        return jnp.sum(terms.loss), terms

    logprob = old + np.float32(np.log(ratio))
    gradient, terms = jax.grad(loss, has_aux=True)(logprob)
    expected = -advantage * weight * (-1.5 + np.log(ratio))
    assert float(terms.loss[0, 0]) == pytest.approx(expected, rel=1e-6)
    assert float(gradient[0, 0]) == pytest.approx(-advantage * weight, rel=1e-6)
    assert bool(terms.clipped[0, 0]) == (weight != ratio)


# Sampler against trainer --------------------------------------------------------------------------

RATIOS = np.float64([1.5, 3.0, 0.2, 2.5, 1.6])
"""Trainer over sampler: products .9 and 4, geometric means .965 and 2."""


@pytest.mark.parametrize(
    ("settings", "weight", "capped", "kept"),
    [
        ({}, [1] * 5, [0] * 5, [1] * 5),
        ({"importance": "token"}, [1.5, 2, 0.2, 2, 1.6], [0, 1, 0, 1, 0], [1] * 5),
        ({"importance": "sequence"}, [0.9] * 3 + [2] * 2, [0] * 3 + [1] * 2, [1] * 5),
        ({"importance": "sequence", "importance_cap": 8.0}, [0.9] * 3 + [4] * 2, [0] * 5, [1] * 5),
        ({"rejection": "token"}, [1] * 5, [0] * 5, [1, 0, 0, 0, 1]),
        ({"rejection": "sequence", "rejection_high": 1.9}, [1] * 5, [0] * 5, [1, 1, 1, 0, 0]),
        ({"rejection": "sequence", "rejection_low": 0.97}, [1] * 5, [0] * 5, [0, 0, 0, 1, 1]),
    ],
)
def test_mismatch(settings, weight, capped, kept):
    config = toy_config(learner={"rejection_high": 2.001} | settings).learner
    behaviour = of_tokens([-1.0, -2.0, -0.5, -1.0, -3.0])
    old = behaviour + of_tokens(np.log(RATIOS))
    made = mismatch(old, behaviour, SPANS, config)
    np.testing.assert_allclose(made.weight[SPANS.counted], weight, rtol=1e-6)
    assert made.capped[SPANS.counted].tolist() == [bool(c) for c in capped]
    assert made.kept[SPANS.counted].tolist() == [bool(k) for k in kept]
    assert np.all(made.weight[~SPANS.counted] == 1)
    assert np.all(made.kept[~SPANS.counted])


def test_correction_needs_something_to_compare():
    for name in ("importance", "rejection"):
        with pytest.raises(ConfigError, match=f"{name}=token: with old_logprobs=behaviour"):
            toy_config(learner={name: "token", "old_logprobs": "behaviour"})


def test_loss_with_weights_and_rejection():
    """As without, of the rows in which rejected tokens weigh nothing and others their ratio."""
    rows, c = random_rows(4), constants(entropy=0.05)
    r = np.random.default_rng(6)
    logprob, entropy = (s * r.random((ROWS, LENGTH)).astype(np.float32) for s in (-2, 2))
    settings = {"kl": 0.1, "entropy": 0.05}
    both = {"importance": "token", "rejection": "token", "rejection_high": 2.0}
    config = toy_config(learner=settings | both).learner
    loss, sums = row_loss(logprob, entropy, rows, c, config, fresh=False, unmoved=True)
    ratio = np.exp(np.float64(rows.old_logprob) - rows.behaviour_logprob)
    trained = rows.sampled & (rows.loss_weight > 0)
    out = trained & ((ratio < 0.5) | (ratio > 2))
    assert 0 < out.sum() < trained.sum()
    left = rows._replace(
        loss_weight=np.where(out, 0, rows.loss_weight), kl_weight=np.where(out, 0, rows.kl_weight)
    )
    plain, plain_sums = expected_loss(
        left, logprob, entropy, c, fresh=False, kl_coefficient=0.1,
        importance=np.where(trained, np.minimum(ratio, 2), 1),
    )  # fmt: skip
    assert float(loss) == pytest.approx(plain, rel=1e-5)
    np.testing.assert_allclose(sums.pg_loss, plain_sums["pg_loss"], rtol=1e-5)
    assert float(jnp.sum(sums.rejected)) == out.sum()
    assert float(jnp.sum(sums.offered)) == trained.sum()
    assert float(jnp.sum(sums.capped)) == np.sum(trained & (ratio > 2))
    mean = np.sum(np.minimum(ratio, 2)[trained])
    assert float(jnp.sum(sums.importance)) == pytest.approx(mean, rel=1e-5)


def expected_loss(rows, logprob, entropy, c, *, fresh, kl_coefficient, importance=None):
    """Loss and sums per token by the formulas, in float64, one token at a time."""
    total, by_token = 0.0, []
    for index in np.ndindex(rows.tokens.shape):
        f = {
            name: x[index].astype(np.float64) if x.dtype == np.float32 else x[index]
            for name, x in rows._asdict().items()
        }
        lp, h = float(logprob[index]), float(entropy[index])
        low, high, dual, bonus = (
            float(x[f["role"]]) for x in (c.clip_low, c.clip_high, c.dual_clip, c.entropy)
        )
        old = f["old_logprob"] if f["sampled"] and not fresh else lp
        d = np.clip(lp - old, -20, 20)
        a = f["advantage"]
        l1, l2 = -a * np.exp(d), -a * np.clip(np.exp(d), 1 - low, 1 + high)
        upper = max(l1, l2)
        pg = min(upper, -a * dual) if a < 0 else upper
        pg *= 1 if importance is None else importance[index]
        x = np.clip(f["reference_logprob"] - lp, -20, 20)
        kl = np.clip(np.exp(x) - x - 1, -10, 10)
        total += f["loss_weight"] * pg + f["kl_weight"] * kl
        total -= f["loss_weight"] * bonus * h if f["sampled"] else 0
        trained = f["sampled"] and f["loss_weight"] > 0
        by_token.append(
            (
                f["role"],
                {
                    "weight": f["loss_weight"],
                    "pg_loss": f["loss_weight"] * pg,
                    "kl_loss": f["kl_weight"] * kl / kl_coefficient,
                    "nll": 0 if f["sampled"] else -f["loss_weight"] * lp,
                    "forced_weight": 0 if f["sampled"] else f["loss_weight"],
                    "tokens": trained,
                    "entropy": h * trained,
                    "ppo_kl": -d * trained,
                    "clipped": (l2 > l1) * trained,
                    "clipped_dual": (a < 0 and upper > -a * dual) * trained,
                    "compared": trained,
                    "rollout_kl": (f["behaviour_logprob"] - lp) * trained,
                    "rollout_k3": trained
                    * (np.exp(lp - f["behaviour_logprob"]) - (lp - f["behaviour_logprob"]) - 1),
                },
            )
        )
    sums = {
        name: [sum(t[name] for role, t in by_token if role == i) for i in range(3)]
        for name in by_token[0][1]
    }
    return total, sums


@pytest.mark.parametrize("fresh", [False, True])
def test_loss_and_sums(fresh):
    rows, c = random_rows(3), constants(entropy=0.05)
    r = np.random.default_rng(5)
    logprob, entropy = (s * r.random((ROWS, LENGTH)).astype(np.float32) for s in (-2, 2))
    config = toy_config(learner={"kl": 0.1, "entropy": 0.05}).learner
    loss, sums = row_loss(logprob, entropy, rows, c, config, fresh=fresh, unmoved=True)
    expected, expected_sums = expected_loss(
        rows, logprob, entropy, c, fresh=fresh, kl_coefficient=0.1
    )
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert sum(expected_sums["clipped"]) > 0 or fresh
    for name, values in expected_sums.items():
        np.testing.assert_allclose(
            np.asarray(sums._asdict()[name]), values, rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_only_unmoved_parameters_are_compared_with_the_sampler():
    rows, zeros = random_rows(), np.zeros((ROWS, LENGTH), np.float32)
    config = toy_config().learner
    _, sums = row_loss(zeros, zeros, rows, constants(), config, fresh=False, unmoved=False)
    assert not np.any(sums.compared)
    assert not np.any(sums.rollout_kl)
    assert np.any(sums.tokens)


# Gradients ---------------------------------------------------------------------------------------


def packed(config, **kwargs):
    batch = pack(*kwargs.values(), config, update_shape(config, "policy"))
    return micro_batch(batch, 0)


def gradient_of_logits(rows, config, *, fresh=False, scale=1.0):
    shape = (*rows.tokens.shape, VOCABULARY)
    params = {"logits": scale * jax.random.normal(jax.random.key(2), shape)}
    gradient, _ = micro_gradient(
        params, rows, loss_constants(config), model=FREE, config=config.learner, chunk=8,
        fresh=fresh, unmoved=True,
    )  # fmt: skip
    return params, np.asarray(gradient["logits"])


def test_no_gradient_at_prompts_tools_and_padding():
    config = toy_config(learner={"kl": 0.1, "entropy": 0.1, "clip_low": 0.9, "clip_high": 9.0})
    examples = {Role.SOLVER: toy_examples(np.random.default_rng(0))}
    rows = packed(config, examples=examples)
    _, gradient = gradient_of_logits(rows, config)
    # Logits at a position predict the next token.
    predicts_sampled = np.zeros(rows.tokens.shape, bool)
    predicts_sampled[:, :-1] = rows.sampled[:, 1:]
    assert not gradient[~predicts_sampled].any()
    assert np.all(np.abs(gradient[predicts_sampled]).max(-1) > 0)


def test_fresh_gradient_is_that_of_reinforce():
    """With ratio one: -weight x advantage x (one-hot - p) / T."""
    config = toy_config(solver={"temperature": 0.7})
    rows = packed(config, examples={Role.SOLVER: toy_examples(np.random.default_rng(0))})
    params, gradient = gradient_of_logits(rows, config, fresh=True)
    t = np.array([1, 0.7, 1])
    p = np.exp(
        expected_distribution(rows._replace(role=np.asarray(rows.role)), params["logits"], t)
    )
    one_hot = np.eye(VOCABULARY)[np.asarray(rows.tokens)]
    expected = np.zeros(gradient.shape)
    factor = (np.asarray(rows.loss_weight, np.float64) * rows.advantage)[..., None]
    expected[:, :-1] = (-factor * (one_hot - p) / 0.7)[:, 1:]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_gradient_of_demonstrations_is_that_of_likelihood():
    config = toy_config()
    made = [demonstration(np.random.default_rng(i), turns=(3, -2, 2)) for i in range(3)]
    batch = pack_demonstrations(
        made,
        update_shape(config, "policy"),
        turn_weight=lambda turn: 0.1 if turn.act is Act.NONE else 1.0,
    )
    rows, params = micro_batch(batch, 0), toy_params(jax.random.key(0))

    def likelihood(params):
        hidden = TOY.hidden(params, rows.tokens, rows.positions, rows.segments)
        table = jax.nn.log_softmax(TOY.unembed(params, hidden))[:, :-1]
        logprob = jnp.take_along_axis(table, rows.tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(rows.loss_weight[:, 1:] * logprob)

    expected_nll, expected = jax.value_and_grad(likelihood)(params)
    made, sums = micro_gradient(
        params, rows, loss_constants(config), model=TOY, config=config.learner, chunk=8,
        fresh=False, unmoved=True,
    )  # fmt: skip
    for a, b in zip(*map(jax.tree.leaves, (made, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert float(jnp.sum(sums.nll)) == pytest.approx(float(expected_nll), rel=1e-6)
    assert float(jnp.sum(sums.forced_weight)) == pytest.approx(1, rel=1e-6)


def test_clipped_tokens_have_no_gradient():
    config = toy_config()
    rows = packed(config, examples={Role.SOLVER: toy_examples(np.random.default_rng(0))})
    # The old policy found every token e^5 times less likely: good ones are past the clip.
    params, _ = gradient_of_logits(rows, config)
    logprob, _ = score(FREE, params, rows, loss_constants(config).temperature, chunk=8)
    _, gradient = gradient_of_logits(rows._replace(old_logprob=logprob - 5), config)
    good = np.zeros(rows.tokens.shape, bool)
    good[:, :-1] = (rows.sampled & (rows.advantage > 0))[:, 1:]
    assert good.any()
    assert not gradient[good].any()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
        {"loss": "cispo"},
        {"loss": "gspo", "clip_high": 2.0, "importance": "sequence", "rejection": "sequence"},
    ],
    ids=["clipped", "gspo", "cispo", "corrected"],
)
def test_a_packed_row_equals_rows_of_one(settings):
    """Each trajectory alone in a row, against all of them side by side."""
    examples = toy_examples(np.random.default_rng(1), groups=3)
    config = toy_config(
        learner={"kl": 0.1, "minibatches": {"proposer": 1, "solver": 1}, "micro_rows": 16}
        | settings
    )
    shape = update_shape(config, "policy")
    apart = dataclasses.replace(shape, length=12)
    params, total = toy_params(jax.random.key(0)), []
    for s in (shape, apart):
        rows = micro_batch(pack({Role.SOLVER: examples}, config, s), 0)
        total.append(
            micro_gradient(
                params,
                rows,
                loss_constants(config),
                model=TOY,
                config=config.learner,
                chunk=64,
                fresh=False,
                unmoved=True,
            )  # fmt: skip
        )
    assert jax.tree.structure(total[0]) == jax.tree.structure(total[1])
    for a, b in zip(*map(jax.tree.leaves, total), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-7)


def test_segments_matter():
    """The toy model does look at segments: merged ones give other numbers."""
    rows, params = random_rows(), toy_params(jax.random.key(0))
    temperature = constants().temperature
    merged = rows._replace(segments=np.ones_like(rows.segments))
    a, b = (score(TOY, params, x, temperature, chunk=4)[0] for x in (rows, merged))
    assert float(jnp.max(jnp.abs(a - b))) > 0.1


def test_models_are_two_callables():
    assert PolicyModel._fields == ("hidden", "unembed")
