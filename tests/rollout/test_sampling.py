"""Sampling: what can be drawn, how often, from which random number, and what is reported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from sspjax.rollout.sampling import allowed, inverse_cdf, sample

LARGEST_UNIFORM = 1 - 2.0**-24
draw = functools.partial(jax.jit(sample, static_argnames="truncated"), truncated=True)
draw_freely = functools.partial(jax.jit(sample, static_argnames="truncated"), truncated=False)


def streams(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (count, 2), np.uint32)


def filled(count: int, temperature=1.0, top_k=0, top_p=1.0) -> tuple[np.ndarray, ...]:
    """Per-slot settings of `count` slots, in the order of `sample`."""
    return (
        np.full(count, temperature, np.float32),
        np.full(count, top_k, np.int32),
        np.full(count, top_p, np.float32),
    )


@jax.jit
def chosen(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """What each of many uniforms chooses from the same weights."""
    tiled = jnp.broadcast_to(weights[None], (*uniform.shape, *weights.shape))
    return inverse_cdf(tiled, uniform)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def allowed_set(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """By definition, in float64: value by value from the top, ties together."""
    p = np.exp(log_softmax(logits))
    kept = np.zeros(len(logits), bool)
    for value in np.unique(logits)[::-1]:
        enough = (top_k > 0 and kept.sum() >= top_k) or (top_p < 1 and p[kept].sum() >= top_p)
        if kept.any() and enough:
            break
        kept |= logits == value
    return kept


# Distribution -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "temperature", "top_k", "top_p"),
    [(12, 1.0, 0, 1.0), (300, 0.7, 0, 1.0), (300, 1.3, 40, 1.0), (12, 1.0, 0, 0.8)],
)
def test_tokens_come_as_often_as_they_should(vocab, temperature, top_k, top_p):
    logits = (1.5 * np.random.default_rng(1).normal(size=vocab)).astype(np.float32)
    p = np.exp(log_softmax(logits / temperature))
    p[~allowed_set(logits / np.float32(temperature), top_k, top_p)] = 0
    rows, rounds = 256, 64
    settings = filled(rows, temperature, top_k, top_p)
    program = draw if top_k or top_p < 1 else draw_freely
    tiled = np.tile(logits, (rows, 1))
    counts, pairs, before = np.zeros(vocab), np.zeros((2, 2)), None
    for i in range(rounds):
        token, _ = program(tiled, streams(rows), np.full(rows, i, np.int32), *settings)
        counts += np.bincount(token, minlength=vocab)
        likely = np.asarray(token) == p.argmax()
        if before is not None:
            np.add.at(pairs, (before.astype(int), likely.astype(int)), 1)
        before = likely
    assert not counts[p == 0].any()
    expected = p / p.sum() * rows * rounds
    common = expected > 10
    rest = [(counts[~common].sum(), expected[~common].sum())] if (~common & (p > 0)).any() else []
    seen = np.append(counts[common], [c for c, _ in rest])
    wanted = np.append(expected[common], [e for _, e in rest])
    assert scipy.stats.chisquare(seen, wanted).pvalue > 1e-3
    # One token says nothing about the next.
    assert scipy.stats.chi2_contingency(pairs).pvalue > 1e-3


@pytest.mark.parametrize("vocab", [5, 1000, 4096])
def test_inverse_cdf_against_exact_sums(vocab):
    """Every uniform hits the token whose exact interval holds it, up to rounding at the edges."""
    rng = np.random.default_rng(vocab)
    weights = rng.exponential(size=vocab).astype(np.float32) ** 3
    weights[rng.random(vocab) < 0.3] = 0
    weights[::16] = 0  # where a running sum in blocks of 16 rounds anew
    weights[-1] = 0
    uniform = np.r_[0, LARGEST_UNIFORM, rng.random(1500)].astype(np.float32)
    uniform = np.minimum(uniform, np.float32(LARGEST_UNIFORM))
    token = chosen(weights, uniform)
    assert (weights[token] > 0).all()
    edges = np.r_[0, np.cumsum(weights, dtype=np.float64)] / weights.sum(dtype=np.float64)
    assert (edges[token] - 1e-6 <= uniform).all() and (uniform <= edges[token + 1] + 1e-6).all()
    assert token[0] == np.flatnonzero(weights)[0]


def test_no_uniform_ever_gives_a_token_of_weight_zero():
    """Uniforms right at every edge of the running sum, where rounding could open a gap."""
    vocab = 384
    weights = np.random.default_rng(3).exponential(size=vocab).astype(np.float32)
    weights[::2] = 0
    weights /= weights.sum()
    edges = np.cumsum(weights, dtype=np.float64).astype(np.float32)
    around = [edges]
    for direction in (-np.inf, np.inf):
        near = edges
        for _ in range(4):
            near = np.nextafter(near, np.float32(direction))
            around.append(near)
    uniform = np.clip(np.concatenate(around), 0, np.float32(LARGEST_UNIFORM))
    token = chosen(weights, uniform)
    assert (weights[token] > 0).all()


def test_only_one_token_has_weight():
    weights = np.zeros((vocab := 200, vocab), np.float32)
    weights[np.arange(vocab), np.arange(vocab)] = 1e-30
    for u in (0.0, 0.5, LARGEST_UNIFORM):
        token = jax.jit(inverse_cdf)(weights, np.full(vocab, u, np.float32))
        assert np.array_equal(token, np.arange(vocab))


# Top-k and top-p ----------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [1, 6])
def test_allowed_tokens_are_those_of_the_definition(digits):
    """With one digit there are many ties."""
    rng = np.random.default_rng(digits)
    logits = np.round(3 * rng.normal(size=(400, 97)), digits).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 7, 50, 97, 500], 400).astype(np.int32)
    top_p = rng.choice([0.0, 0.05, 0.5, 0.9, 0.999, 1.0], 400).astype(np.float32)
    got = np.asarray(jax.jit(allowed)(logits, top_k, top_p))
    for row in range(400):
        expected = allowed_set(logits[row], top_k[row], top_p[row])
        assert np.array_equal(got[row], expected), (top_k[row], top_p[row])


def test_allowed_tokens_by_hand():
    logits = np.log(np.array([0.1, 0.4, 0.1, 0.2, 0.2], np.float32))
    cases = {
        (0, 1.0): [0, 1, 2, 3, 4],
        (1, 1.0): [1],
        (2, 1.0): [1, 3, 4],  # the second and the third tie
        (0, 0.39): [1],
        (0, 0.41): [1, 3, 4],
        (0, 0.0): [1],
        (4, 0.75): [1, 3, 4],
        (0, 0.95): [0, 1, 2, 3, 4],
    }
    top_k, top_p = (np.array(x) for x in zip(*cases, strict=True))
    got = jax.jit(allowed)(np.tile(logits, (len(cases), 1)), top_k, top_p.astype(np.float32))
    assert [np.flatnonzero(row).tolist() for row in np.asarray(got)] == list(cases.values())


def test_top_p_of_one_allows_everything_though_the_masses_round_to_more_than_one():
    logits = np.random.default_rng(0).normal(size=(64, 1000)).astype(np.float32)
    logits[:, 0] = -30
    assert np.asarray(jax.jit(allowed)(logits, *filled(64)[1:])).all()


# Temperature, greedy, log-probabilities -----------------------------------------------------------


def test_logprob_is_that_of_the_whole_softmax_at_the_slot_s_temperature():
    rng = np.random.default_rng(5)
    logits = (4 * rng.normal(size=(256, 300))).astype(np.float32)
    temperature = rng.choice([0.1, 0.8, 1.0, 2.5], 256).astype(np.float32)
    top_k = rng.choice([0, 3], 256).astype(np.int32)
    top_p = rng.choice([1.0, 0.6], 256).astype(np.float32)
    token, logprob = draw(logits, streams(256), np.zeros(256, np.int32), temperature, top_k, top_p)
    expected = log_softmax(logits.astype(np.float64) / temperature[:, None])
    np.testing.assert_allclose(logprob, expected[np.arange(256), token], atol=2e-5, rtol=0)
    for row in range(256):
        assert allowed_set(logits[row] / temperature[row], top_k[row], top_p[row])[token[row]]


def test_temperature_zero_takes_the_first_best_and_reports_temperature_one():
    logits = np.round(np.random.default_rng(6).normal(size=(256, 300)), 1).astype(np.float32)
    for program, settings in (
        (draw, filled(256, 0.0, 5, 0.3)),
        (draw_freely, filled(256, 0.0)),
    ):
        token, logprob = program(logits, streams(256), np.zeros(256, np.int32), *settings)
        assert np.array_equal(token, logits.argmax(-1))
        np.testing.assert_allclose(logprob, log_softmax(logits).max(-1), atol=1e-5, rtol=0)


def test_far_logits_do_not_overflow():
    logits = np.full((256, 300), -3e4, np.float32)
    logits[:, 7], logits[:, 8] = 3e4, 2.99e4
    for temperature in (0.0, 0.01, 1.0):
        token, logprob = draw_freely(
            logits, streams(256), np.zeros(256, np.int32), *filled(256, temperature)
        )
        assert (token == 7).all() and (logprob == 0).all()


# What a draw depends on ---------------------------------------------------------------------------


def test_a_draw_is_a_function_of_stream_and_count_alone():
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(256, 300)).astype(np.float32)
    drawn = rng.integers(0, 1000, 256).astype(np.int32)
    order = rng.permutation(256)
    key, settings = streams(256), filled(256, 0.8)
    token, logprob = draw_freely(logits, key, drawn, *settings)
    moved, moved_logprob = draw_freely(logits[order], key[order], drawn[order], *settings)
    assert np.array_equal(moved, token[order]) and np.array_equal(moved_logprob, logprob[order])

    others = np.r_[logits[:1], rng.normal(size=(255, 300))].astype(np.float32)
    again, again_logprob = draw_freely(others, np.r_[key[:1], key[:255]], drawn, *settings)
    assert again[0] == token[0] and again_logprob[0] == logprob[0]

    same = np.tile(logits[:1], (256, 1))
    count = np.arange(256, dtype=np.int32)
    by_count, _ = draw_freely(same, np.tile(key[:1], (256, 1)), count, *settings)
    by_stream, _ = draw_freely(same, key, np.zeros(256, np.int32), *settings)
    assert len(set(by_count.tolist())) > 20 and len(set(by_stream.tolist())) > 20


def test_top_k_and_top_p_that_are_off_change_nothing():
    logits = np.random.default_rng(8).normal(size=(256, 300)).astype(np.float32)
    arguments = (logits, streams(256), np.zeros(256, np.int32), *filled(256))
    assert np.array_equal(draw(*arguments)[0], draw_freely(*arguments)[0])
