"""Distributions against SciPy's, and their derivatives against differences."""

import numpy as np
import pytest
import scipy.stats

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.scipy import stats
from tests.checks.samples import each

#: The shapes of each distribution.
CONTINUOUS = dict.fromkeys(("norm", "cauchy", "laplace", "logistic", "uniform", "expon"), ())
CONTINUOUS |= {"t": (3.5,), "gamma": (2.2,), "chi2": (3.3,), "beta": (2.1, 1.7)}
DISCRETE = {"poisson": (2.3,), "binom": (5, 0.3), "bernoulli": (0.3,)}

X = np.array([-2.0, -0.3, 0.0, 0.2, 0.5, 0.9, 1.0, 1.4, 3.0, np.nan])
K = np.array([-2.0, -1, -0.3, 0, 1, 1.5, 2, 4, 5, 6, 7])
Q = np.array([-0.1, 0.0, 1e-3, 0.15, 0.5, 0.7, 0.999, 1.0, 1.1, np.nan])
OF_VALUES = ("cdf", "sf", "logcdf", "logsf")
#: Distribution -> shapes, values, methods, and locations and scales.
DISTRIBUTIONS = {
    name: (shapes, X, ("pdf", "logpdf", *OF_VALUES), ((), (0.3, 1.7), (0.0, -1.0)))
    for name, shapes in CONTINUOUS.items()
} | {name: (shapes, K, ("pmf", "logpmf", *OF_VALUES), ((), (1,))) for name, shapes in DISCRETE.items()}


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_values_and_quantiles_are_scipys(name):
    shapes, values, methods, places = DISTRIBUTIONS[name]
    for method, x in (*((m, values) for m in methods), ("ppf", Q), ("isf", Q)):
        for others in places:
            actual, expected = (getattr(getattr(d, name), method)(x, *shapes, *others) for d in (stats, scipy.stats))
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-13, err_msg=f"{method} {others}")


@each("name", CONTINUOUS)
def test_quantiles_are_inverse_in_tails(name):
    f, shapes, q = getattr(stats, name), CONTINUOUS[name], np.array([1e-30, 0.02, 0.6, 0.999])
    np.testing.assert_allclose(f.cdf(f.ppf(q, *shapes), *shapes), q, rtol=1e-11)
    q = q[1:] if name in ("beta", "uniform") else q  # in which 1 - 1e-30 is 1
    np.testing.assert_allclose(f.sf(f.isf(q, *shapes), *shapes), q, rtol=1e-11)


def test_arguments_are_named_as_scipys():
    assert stats.t.pdf(0.4, df=3.0, scale=2.0) == stats.t.pdf(0.4, 3.0, 0.0, 2.0)
    with pytest.raises(TypeError):
        stats.gamma.pdf(1.0)


def test_normal_distribution_of_several_numbers():
    rng = np.random.default_rng(0)
    root, x, mean = rng.normal(size=(3, 3)), rng.normal(size=(4, 3)), rng.normal(size=3)
    cov = root @ root.T + np.eye(3)
    ours, theirs = stats.multivariate_normal, scipy.stats.multivariate_normal
    for singular in (False, True):
        np.testing.assert_allclose(ours.logpdf(x, mean, cov, singular), theirs.logpdf(x, mean, cov), rtol=1e-9)
        check_grads(lambda x, m, c, s=singular: ours.logpdf(x, m, 0.5 * (c + c.T), s), (x, mean, cov), order=1)
    np.testing.assert_allclose(ours.pdf(x[0]), theirs.pdf(x[0], np.zeros(3)))
    np.testing.assert_allclose(ours.entropy(mean, cov), theirs.entropy(mean, cov))
    flat, points = np.diag([1.0, 2.0, 0.0]), np.array([[1.0, 1, 0], [1, 1, 1]])
    expected = theirs.logpdf(points, np.zeros(3), flat, allow_singular=True)
    np.testing.assert_allclose(ours.logpdf(points, 0.0, flat, True), expected)
    assert expected[1] == -np.inf


def test_dirichlet():
    alpha, x = np.array([1.2, 2.0, 0.7]), np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]]).T
    for method in ("pdf", "logpdf"):
        actual, expected = (getattr(d.dirichlet, method)(x, alpha) for d in (stats, scipy.stats))
        np.testing.assert_allclose(actual, expected, rtol=1e-12)


@each("transformation", [lambda f: f, lambda f: md.grad(lambda x: f(x).sum()), md.vmap])
def test_one_triangular_system_for_all_points(transformation):
    """The points are its columns: it is not solved for each of them."""
    density = transformation(lambda x: stats.multivariate_normal.logpdf(x, np.zeros(2), np.eye(2)))
    solved = [e for e in md.make_tape(density)(np.ones((300, 2))).equations if str(e.primitive) == "solve_triangular"]
    assert solved and {e.outputs[0].type.shape for e in solved} == {(2, 300)}


def test_entropies_of_numbers_and_variances():
    for args in ((), (0.0, 2.0), (np.zeros(3), 2.0), (np.zeros(3), np.array([0.25, 1.0, 4.0]))):
        expected = scipy.stats.multivariate_normal.entropy(*args)
        np.testing.assert_allclose(stats.multivariate_normal.entropy(*args), expected)


# ---------------------------------------------------------------- edges of parameters and supports

grad = md.grad
#: Derivatives by their formulas: what is computed, and what is right.
AT_EDGES = {
    "poisson, no count at rate 0": (lambda: grad(lambda mu: stats.poisson.logpmf(0, mu))(0.0), -1),
    "poisson, a count at rate 0": (lambda: grad(lambda mu: stats.poisson.pmf(1, mu))(0.0), 1),
    "poisson, cdf at rate 0": (lambda: grad(lambda mu: stats.poisson.cdf(0, mu))(0.0), -1),
    "poisson, tail of the sf": (lambda: grad(lambda mu: stats.poisson.logsf(50, mu))(1e-9), 51e9 - 51 / 52),
    "binom at p = 0": (lambda: grad(lambda p: stats.binom.logpmf(0, 5, p))(0.0), -5),
    "binom, pmf at p = 0": (lambda: grad(lambda p: stats.binom.pmf(1, 5, p))(0.0), 5),
    "binom at p = 1": (lambda: grad(lambda p: stats.binom.logpmf(5, 5, p))(1.0), 5),
    "binom, cdf at p = 0": (lambda: grad(lambda p: stats.binom.cdf(0, 5, p))(0.0), -5),
    "binom, sf at p = 1": (lambda: grad(lambda p: stats.binom.sf(4, 5, p))(1.0), 5),
    "binom, quantile": (lambda: grad(lambda p: stats.binom.ppf(0.3, 5, p))(0.3), 0),
    "binom of no trial": (lambda: grad(lambda p: stats.binom.logpmf(0, 0, p))(0.3), 0),
    "bernoulli at p = 0": (lambda: grad(lambda p: stats.bernoulli.pmf(1, p))(0.0), 1),
    "bernoulli, log at p = 1": (lambda: grad(lambda p: stats.bernoulli.logpmf(1, p))(1.0), 1),
    "edges and others": (lambda: grad(lambda mu: stats.poisson.logpmf(np.array([0, 2]), mu).sum())(np.array([0, 3.0])),
                         [-1, -1 / 3]),
    "gamma of shape 2 at 0": (lambda: grad(stats.gamma.pdf)(0.0, 2.0), 1),
    "gamma of shape 3/2 at 0, in the scale": (lambda: grad(stats.gamma.pdf, 3)(0.0, 1.5, 0.0, 2.0), 0),
    "beta of shapes 2, 3 at 0, 1": (lambda: md.vmap(lambda x: grad(stats.beta.pdf)(x, 2.0, 2.0))(np.array([0, 1.0])),
                                    [6, -6]),
    "chi2 of 4 at 0": (lambda: grad(stats.chi2.pdf)(0.0, 4.0), 0.25),
    "expon, far": (lambda: grad(stats.expon.logsf)(2000.0), -1),
    "gamma, far": (lambda: grad(stats.gamma.logsf)(2000.0, 2.0), -2000 / 2001),
    "laplace, far": (lambda: grad(stats.laplace.logsf)(800.0), -1),
    "cauchy, far": (lambda: grad(stats.cauchy.logpdf)(1e200), -2e-200),
    "norm, far": (lambda: grad(stats.norm.logcdf)(-1e10), 1e10),
    "laplace at 0": (lambda: grad(stats.laplace.cdf)(0.0), 0.5),
    "beta, sf near 0": (lambda: stats.beta.logsf(1e-12, 0.5, 2.0), -1.5000011250006247e-06),
    "outside": (lambda: [grad(stats.gamma.cdf)(-1.0, 0.5), grad(stats.beta.cdf)(3.0, 0.5, 0.5),
                         grad(stats.beta.pdf, 2)(-1.0, 0.5, 0.5), grad(stats.norm.pdf)(np.inf)], [0] * 4),
}  # fmt: skip


#: Logarithms of probabilities that underflow, by mpmath.
TAILS = {
    "gamma, above": (lambda: stats.gamma.logsf(2000.0, 2.0), -1992.398597665417),
    "gamma, below": (lambda: stats.gamma.logcdf(1e-10, 50.0), -1299.770313448894),
    "beta, below": (lambda: stats.beta.logcdf(1e-10, 50.0, 5000.0), -873.6664588900263),
    "t, below": (lambda: stats.t.logcdf(-1e10, 40.0), -850.0260757250469),
    "cauchy": (lambda: stats.cauchy.logpdf(1e200), -922.1787670834677),
    "laplace": (lambda: stats.laplace.logsf(800.0), -800.6931471805599),
    "cauchy, cdf": (lambda: stats.cauchy.logcdf(1e10), -3.183098861888567e-11),
    "poisson, above": (lambda: stats.poisson.logsf(50, 1e-9), -1209.2961502697451),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("f, expected", (AT_EDGES | TAILS).values(), AT_EDGES | TAILS)
def test_edges_and_tails(f, expected):
    np.testing.assert_allclose(f(), expected, rtol=1e-12)


def test_shapes_in_tails_that_underflow():
    """Logarithms of tails, against differences, where the tail and its derivative are below all numbers."""
    cases = [(stats.gamma.logsf, 2000.0, 2.0), (stats.gamma.logcdf, 1e-10, 50.0), (stats.t.logcdf, -1e10, 40.0)]
    cases += [(lambda x, a: stats.beta.logcdf(x, a, 5000.0), 1e-10, 50.0), (stats.chi2.logsf, 4000.0, 3.0)]
    for f, x, a in cases:
        h = 1e-4 * a
        difference = (f(x, a + h) - f(x, a - h)) / (2 * h)
        np.testing.assert_allclose(md.grad(f, 1)(x, a), difference, rtol=1e-6)
        np.testing.assert_allclose(md.grad(md.grad(f, 1), 1)(x, a), md.jvp(md.grad(f, 1), (x, a), (0.0, 1.0))[1])


def test_invalid_parameters_are_nan_with_their_derivatives():
    calls = [
        lambda p: stats.binom.pmf(2, 5, p),
        lambda p: stats.poisson.logpmf(1, p),
        lambda p: stats.gamma.logsf(1.0, 2.0, scale=p),
        lambda p: stats.norm.cdf(0.0, 0.0, p),
        lambda p: stats.beta.pdf(2.0, p, 1.0),
    ]
    for f in calls:
        assert np.isnan([f(-1.0), md.grad(f)(-1.0), md.jvp(f, (-1.0,), (1.0,))[1], md.jit(md.grad(f))(-1.0)]).all()
    assert np.isnan(stats.binom.pmf(0, 2.5, 0.3))
