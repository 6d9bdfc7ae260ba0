"""minidiff.random: distributions, transformations, blocks, and keys; `random.md` has known numbers, and dropout."""

import math
from unittest import mock

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import scipy.special
from hypothesis import strategies as st
from scipy import stats

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.ops.special import ndtri_p
from minidiff.random import Block
from tests.checks.samples import each

random = md.random
KEY = random.key(7)
N = 40_000


MEAN, COV = np.array([1.0, 2.0]), np.array([[1.0, 0.6], [0.6, 2.0]])

#: Samplers by `draw(key, shape)`, and their distribution functions.
SAMPLERS = {
    "uniform": (random.uniform, lambda x: x),
    "uniform, scaled": (lambda k, shape: random.uniform(k, shape, float, -3.0, 2.0), lambda x: (x + 3) / 5),
    "normal": (random.normal, stats.norm.cdf),
    "normal, f32": (lambda k, shape: random.normal(k, shape, np.float32), stats.norm.cdf),
    "truncated": (lambda k, shape: random.truncated_normal(k, -1.0, 2.0, shape), stats.truncnorm(-1, 2).cdf),
    "tail": (lambda k, shape: -random.truncated_normal(k, 6.0, np.inf, shape), stats.truncnorm(-np.inf, -6).cdf),
    "exponential": (random.exponential, stats.expon.cdf),
    "gumbel": (random.gumbel, stats.gumbel_r.cdf),
    "laplace": (random.laplace, stats.laplace.cdf),
    "gamma": (lambda k, shape: random.gamma(k, 2.5, shape), stats.gamma(2.5).cdf),
    "gamma, f32": (lambda k, shape: random.gamma(k, 0.3, shape, np.float32), stats.gamma(0.3).cdf),
    "gamma, large": (lambda k, shape: random.gamma(k, 1e9, shape), stats.gamma(1e9).cdf),
    "loggamma": (lambda k, shape: random.loggamma(k, 1e-3, shape), stats.loggamma(1e-3).cdf),
    "beta": (lambda k, shape: random.beta(k, 0.5, 3.0, shape), stats.beta(0.5, 3).cdf),
    "dirichlet": (lambda k, n: random.dirichlet(k, np.array([1.0, 2.0, 3.0]), n)[..., 1], stats.beta(2, 4).cdf),
    "multivariate": (lambda k, n: random.multivariate_normal(k, MEAN, COV, n).sum(-1), stats.norm(3, 4.2**0.5).cdf),
    "orthogonal": (lambda k, n: random.orthogonal(k, 3, n)[..., 1, 2] / 2 + 0.5, lambda x: x),  # Archimedes: uniform
}

#: Those of integers, booleans, and keys.
DISCRETE = {
    "bits": random.bits,
    "randint": lambda k, shape: random.randint(k, shape, 0, 50),
    "bernoulli": lambda k, shape: random.bernoulli(k, 0.4, shape),
    "poisson": lambda k, shape: random.poisson(k, 12.0, shape),
    "rademacher": random.rademacher,
    "choice": lambda k, shape: random.choice(k, 9, shape),
    "categorical": lambda k, shape: random.categorical(k, np.arange(4.0), shape=shape),
    "split": random.split,
}


#: Samplers by `draw(key, shape)`.
BLOCKED = {**{name: draw for name, (draw, _) in SAMPLERS.items()}, **DISCRETE}


@each("name", SAMPLERS)
def test_distributions(name):
    draw, cdf = SAMPLERS[name]
    x = draw(KEY, (N,))
    assert stats.kstest(x, cdf).statistic < 2 / math.sqrt(N)  # exceeded with probability 0.0007
    assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 4 / math.sqrt(N)
    assert x.dtype == (np.float32 if "f32" in name else float)


def poisson(rate):
    counts = random.poisson(KEY, rate, (N,))
    return counts, stats.poisson(rate).pmf(np.arange(counts.max() + 1))


def without_replacement():
    """The first and the second of two choices as one number, and the probabilities of all pairs."""
    pairs = md.vmap(lambda k: random.choice(k, 4, (2,), replace=False, p=P))(random.split(KEY, 4000))
    return pairs @ [4, 1], (np.outer(P / (1 - P), P) * (1 - np.eye(4))).ravel()


def permutations():
    rows = md.vmap(lambda k: random.permutation(k, 3))(random.split(KEY, 3000))
    return np.unique(rows, axis=0, return_inverse=True)[1].ravel(), np.full(6, 1 / 6)


P = np.array([0.1, 0.2, 0.3, 0.4])
#: Whole numbers, and the probabilities of 0, 1, ...
FREQUENCIES = {
    **{f"poisson {rate}": lambda rate=rate: poisson(rate) for rate in (0.0, 0.3, 9.9, 10.0, 47.0, 1e5)},
    "randint": lambda: (random.randint(KEY, (N,), -3, 4) + 3, np.full(7, 1 / 7)),
    "bernoulli": lambda: (random.bernoulli(KEY, 0.3, (N,)).astype(int), [0.7, 0.3]),
    "bernoulli of 0 and 1": lambda: (random.bernoulli(KEY, np.arange(2) * np.ones((N, 1))) @ [2, 1], [0, 1]),
    "rademacher": lambda: ((random.rademacher(KEY, (N,)) + 1) // 2, [0.5, 0.5]),
    "bits": lambda: (random.bits(KEY, (N,), np.uint8), np.full(256, 1 / 256)),
    "categorical": lambda: (random.categorical(KEY, np.log(P), shape=(N,)), P),
    "categorical along axis 0": lambda: (random.categorical(KEY, np.tile(np.log(P)[:, None], N), axis=0), P),
    "categorical, one possible": lambda: (random.categorical(KEY, np.array([-np.inf, 0.0]), shape=N), [0, 1]),
    "choice": lambda: (random.choice(KEY, 4, (N,)), np.full(4, 0.25)),
    "choice of probabilities": lambda: (random.choice(KEY, 4, (N,), p=P), P),
    "choice, one impossible": lambda: (random.choice(KEY, 3, (N,), p=[0.5, 0.0, 0.5]), [0.5, 0, 0.5]),
    "choice without replacement": without_replacement,
    "permutation": permutations,
}


@each("draw", FREQUENCIES.values(), FREQUENCIES)
def test_frequencies(draw):
    """Kolmogorov and Smirnov's distance, of integers; those that are impossible are never drawn."""
    numbers, expected = draw()
    counts = np.bincount(numbers, minlength=len(expected))
    assert len(counts) == len(expected) and not counts[np.equal(expected, 0)].any()
    assert np.abs(np.cumsum(counts / len(numbers) - expected)).max() < 2 / math.sqrt(len(numbers))


def test_covariances_and_orthogonality():
    x = random.multivariate_normal(KEY, MEAN, COV, (N,))
    np.testing.assert_allclose(np.cov(x.T), COV, atol=8 * math.sqrt(2 / N))
    check_grads(lambda mean, cov: random.multivariate_normal(KEY, mean, cov @ cov.T, 2), (MEAN, COV))
    up, down = md.jacfwd(lambda ab: random.beta(KEY, *ab))(MEAN)
    assert up > 0 > down
    for n, m in ((3, 3), (2, 4), (4, 2)):
        q = random.orthogonal(KEY, n, (5,), m=m)
        product = q @ q.swapaxes(1, 2) if n <= m else q.swapaxes(1, 2) @ q
        np.testing.assert_allclose(product, np.tile(np.eye(min(n, m)), (5, 1, 1)), atol=1e-14)
        assert q.shape == (5, n, m)
    np.testing.assert_allclose(random.dirichlet(KEY, np.full((2, 1, 3), 1e-3), (2, 50)).sum(-1), 1)


@each("a", [0.01, 0.5, 4.0, 1e4])
def test_gamma_draws_have_derivatives_at_a_constant_probability(a):
    draw, h = lambda a: random.gamma(KEY, a, 40), 2e-3 * min(a, a**0.5)
    x, slopes = draw(a), md.jacfwd(draw)(a)

    def in_shape(cdf):
        return (8 * (cdf(a + h, x) - cdf(a - h, x)) - cdf(a + 2 * h, x) + cdf(a - 2 * h, x)) / (12 * h)

    below = np.where(x < a, in_shape(scipy.special.gammainc), -in_shape(scipy.special.gammaincc))
    np.testing.assert_allclose(slopes, -below / stats.gamma(a).pdf(x), rtol=3e-9)
    np.testing.assert_allclose(md.jit(md.grad(lambda a: draw(a).sum()))(a), slopes.sum(), rtol=1e-12)
    np.testing.assert_allclose(md.vmap(md.jacfwd(draw))(np.array([a]))[0], slopes, rtol=1e-12)


def test_gamma_draws_have_second_derivatives():
    draw, step = lambda a: random.gamma(KEY, a, 5), 1e-4
    low, here, high = (stats.gamma(2 + d).ppf(stats.gamma(2.0).cdf(draw(2.0))) for d in (-step, 0, step))
    np.testing.assert_allclose(md.jacfwd(md.jacfwd(draw))(2.0), (low - 2 * here + high) / step**2, atol=1e-4)


def test_quantiles():
    p = np.array([*np.linspace(0.001, 0.999, 101), 1e-9, 1e-14, 1e-30, 1e-300, 1 - 1e-12, 0, 1, -1, 2, np.nan])
    np.testing.assert_allclose(ndtri_p.bind(p), scipy.special.ndtri(p), rtol=1e-14, atol=1e-15)
    check_grads(ndtri_p.bind, (np.array([0.01, 0.4, 0.97]),), order=1, rtol=1e-4)


# ---------------------------------------------------------------- transformations

DRAWS = {
    **{name: lambda k, draw=draw: draw(k, (2, 5)) for name, draw in BLOCKED.items()},
    "arrays of bounds": lambda k: random.truncated_normal(k, np.array([-1.0, 2.0]), 3.0, (4, 2)),
    "randint, i16": lambda k: random.randint(k, (3,), np.array([0, 5, 100]), 1000, np.int16),
    "arrays of probabilities": lambda k: random.bernoulli(k, np.linspace(0.2, 0.7, 20)),
    "gammas": lambda k: random.gamma(k, np.array([0.1, 1.0, 30.0]), (2, 3)),
    "betas, f32": lambda k: random.beta(k, np.array([0.5, 2.0]), 3.0, dtype=np.float32),
    "poisson, i32": lambda k: random.poisson(k, np.array([0.5, 5.0, 50.0, 5000.0]), (2, 4), np.int32),
    "orthogonal, 2 × 3": lambda k: random.orthogonal(k, 2, m=3),
    "choice of some": lambda k: random.choice(k, np.arange(50.0), (4,), p=np.linspace(0, 2 / 50, 50)),
    "permutation": lambda k: random.permutation(k, np.arange(12.0).reshape(3, 4), axis=1),
    "categorical, axis 0": lambda k: random.categorical(k, np.zeros((3, 4)), axis=0, shape=(2, 4)),
    "fold_in": lambda k: random.fold_in(k, k[0]),
    "key": lambda k: random.key(k[1]),
}


#: Draws that are rounded after functions whose last digit depends on how they are computed.
ROUNDED = {"beta", "betas", "gamma", "gammas", "loggamma", "dirichlet", "exponential", "laplace", "gumbel"}
ROUNDED |= {"multivariate", "orthogonal"}


def same(actual, expected, name=""):
    assert md.typeof(actual) == md.typeof(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-6 if name.split(",")[0] in ROUNDED else 0, atol=0)


@each("name", DRAWS)
def test_transformations_draw_the_same_numbers(name):
    draw, keys = DRAWS[name], random.split(KEY, 4)
    expected = np.stack([draw(k) for k in keys])
    assert len(np.unique(expected.reshape(4, -1), axis=0)) == 4
    if name != "key":
        with pytest.raises((TypeError, IndexError)):
            draw(np.zeros(2))
    same(md.jit(draw)(keys[0]), expected[0], name)
    same(md.vmap(draw)(keys), expected, name)
    same(md.scan(lambda c, k: (c, draw(k)), 0, keys)[1], expected, name)
    nested = md.vmap(md.vmap(draw), in_axes=1, out_axes=1)(keys.reshape(2, 2, 2))
    same(nested, expected.reshape(2, 2, *expected.shape[1:]), name)


def test_draws_have_a_derivative_in_their_bounds():
    for draw in (lambda a, b: random.uniform(KEY, 4, float, a, b), lambda a, b: random.truncated_normal(KEY, a, b, 4)):
        check_grads(draw, (0.3, 1.4))
        check_grads(draw, (-1.3, 1.4))


# ---------------------------------------------------------------- keys


@hypothesis.given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=20, deadline=None)
def test_new_keys(seed, number):
    key = random.key(seed)
    assert key.tolist() == [seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF]
    created = np.concatenate([[key], random.split(key, 5), [random.fold_in(key, 5 + number)]])
    assert len(np.unique(created, axis=0)) == 7
    same(random.split(key, 5)[[3, 0, 1]], np.stack([random.fold_in(key, 3), *random.split(key)]))
    assert len(np.unique(md.vmap(lambda k: random.bits(k, 9))(created))) == 7 * 9


FAR = [(-40.0, -39.0), (39.0, 40.0), (-np.inf, -39.0), (40.0, np.inf), (-31.0, -30.0001), (-30.5, -29.9)]
FAR += [(-1000.01, -1000.0)]
jitted = md.jit(lambda low, high: random.truncated_normal(KEY, low, high, (N // 4,)))


@each("low, high", FAR)
def test_far_tails(low, high):
    """By Kolmogorov and Smirnov's distance, and derivatives in the bounds by differences."""
    x = random.truncated_normal(KEY, low, high, (N // 4,))
    assert x.min() >= low and x.max() <= high and len(np.unique(x)) > 0.9 * len(x)
    assert stats.kstest(x, stats.truncnorm(low, high).cdf).statistic < 2 / math.sqrt(len(x))
    np.testing.assert_allclose(jitted(low, high), x, rtol=1e-13)
    if np.isfinite((low, high)).all():
        check_grads(lambda a, b: random.truncated_normal(KEY, a, b, 4), (low, high), rtol=1e-4, order=1)


@each("high", [31.0, np.inf])
def test_the_two_formulas_of_tails_agree(high):
    """Beyond 30, probabilities are ratios by a series."""
    below, above = (random.truncated_normal(KEY, 30 + x, high, (1000,)) for x in (-1e-13, 1e-13))
    np.testing.assert_allclose(below, above, rtol=1e-12)


ENDS = [(0, 1), (1000, 1001), (-1e4, 5), (0, 1e-7), (1, 1.002), (5, 2), (-6e4, 6e4), (-3e38, 3e38)]


@each("dtype", [np.float16, np.float32, float, ml_dtypes.bfloat16])
def test_uniform_numbers_are_below_the_upper_bound(dtype):
    draw = lambda low, high: random.uniform(KEY, (N,), dtype, low, high)  # noqa: E731
    jitted = md.jit(draw)
    for pair in ENDS:
        low, high = ends = [np.float64(x).astype(dtype) for x in pair]
        if low == high or not np.isfinite(np.array(ends, float)).all():
            continue
        for x in (draw(*pair), jitted(*ends)):
            assert x.dtype == dtype and np.isfinite(x.astype(float)).all()
            inside = (x >= low) & (x < high) if low < high else (x <= low) & (x > high)
            assert inside.all(), pair


def test_samplers_are_finite_at_extremes():
    ends = [np.zeros(2, np.uint64), np.full(2, 2**64 - 1, np.uint64)]
    for name in ("normal", "exponential", "gumbel", "laplace"):
        for bits in ends:
            with mock.patch("minidiff.random._random_bits", lambda *args, bits=bits: bits):
                assert np.isfinite(getattr(random, name)(KEY, 2)).all(), name
    for x in (random.beta(KEY, 1e-300, 5e-324, N), random.dirichlet(KEY, np.full(3, 1e-310), N)):
        assert np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1


# ---------------------------------------------------------------- ranges, permutations, blocks


@hypothesis.given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 2**64 - 1))
@hypothesis.settings(max_examples=20, deadline=None)
def test_ranges(low, width):
    x = random.randint(KEY, 100, low, min(low + width, 2**63))
    assert (x.dtype, low <= x.min(), x.max() < low + width) == (int, True, True)


@hypothesis.given(st.integers(0, 50), st.integers(0, 99))
@hypothesis.settings(max_examples=20, deadline=None)
def test_permutations(n, seed):
    key = random.key(seed)
    p = random.permutation(key, n)
    same(np.sort(p), np.arange(n))
    x = np.arange(2.0 * n).reshape(2, n)
    same(random.permutation(key, x, axis=1), x[:, p])
    same(np.sort(random.choice(key, n, (n,), False, p=np.arange(1.0, n + 1) / max(n * (n + 1) / 2, 1))), np.arange(n))
    assert random.choice(key, x.T, (n, 1), False).shape == (n, 1, 2)


@hypothesis.given(st.data(), st.sampled_from(sorted(BLOCKED)))
@hypothesis.settings(max_examples=20, deadline=None)
def test_a_block_is_a_slice_of_the_whole(data, name):
    whole = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in whole]
    block = Block(tuple(b - a for a, b in ends), tuple(a for a, _ in ends), whole)
    draw = BLOCKED[name]
    same(draw(KEY, block), draw(KEY, whole)[tuple(slice(a, b) for a, b in ends)], name)


def test_large_draws_are_the_same_in_parts():
    """Longer than the blocks in which they are computed, and counters of more than 32 bits."""
    whole = random.bits(KEY, 100_000)
    for start in (0, 1, 32_768, 99_000):
        same(random.bits(KEY, Block((1000,), (start,), (100_000,))), whole[start : start + 1000])
    actual = random.bits(KEY, Block((2, 1), (2**31, 5), (2**32, 8)))
    assert actual[1, 0] >> 32 == random.fold_in(KEY, (2**31 + 1) * 8 + 5)[0]
    same(md.vmap(lambda k: random.bits(k, 20_000))(random.split(KEY))[1], random.bits(random.split(KEY)[1], 20_000))
