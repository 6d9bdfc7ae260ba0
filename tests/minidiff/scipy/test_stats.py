"""Distributions against SciPy's, and derivatives against differences; `distributions.md` has edges and tails."""

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


ROOT, POINTS, MEAN = (np.random.default_rng(k).normal(size=s) for k, s in enumerate(((3, 3), (4, 3), (3,))))
COVARIANCE, FLAT = ROOT @ ROOT.T + np.eye(3), np.diag([1.0, 2.0, 0.0])
SHARES = np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
#: Functions of SciPy's module, or of this one.
OF_SEVERAL = [
    lambda s: s.multivariate_normal.logpdf(POINTS, MEAN, COVARIANCE),
    lambda s: s.multivariate_normal.logpdf(POINTS, MEAN, COVARIANCE, True),
    lambda s: s.multivariate_normal.logpdf(np.array([[1.0, 1, 0], [1, 1, 1]]), np.zeros(3), FLAT, True),
    lambda s: s.multivariate_normal.entropy(MEAN, COVARIANCE),
    *(lambda s, v=v: s.multivariate_normal.entropy(np.zeros(3), v) for v in (2.0, np.array([0.25, 1.0, 4.0]))),
    *(lambda s, a=a: s.multivariate_normal.entropy(*a) for a in ((), (0.0, 2.0))),
    *(lambda s, f=f: getattr(s.dirichlet, f)(SHARES.T, np.array([1.2, 2.0, 0.7])) for f in ("pdf", "logpdf")),
]


@each("f", OF_SEVERAL)
def test_distributions_of_several_numbers_are_scipys(f):
    np.testing.assert_allclose(f(stats), f(scipy.stats), rtol=1e-9)


@each("singular", [False, True])
def test_derivatives_in_covariances(singular):
    f = lambda x, m, c: stats.multivariate_normal.logpdf(x, m, 0.5 * (c + c.T), singular)  # noqa: E731
    check_grads(f, (POINTS, MEAN, COVARIANCE), order=1)


@each("transformation", [lambda f: f, lambda f: md.grad(lambda x: f(x).sum()), md.vmap])
def test_one_triangular_system_for_all_points(transformation):
    """The points are its columns: it is not solved for each of them."""
    density = transformation(lambda x: stats.multivariate_normal.logpdf(x, np.zeros(2), np.eye(2)))
    solved = [e for e in md.make_tape(density)(np.ones((300, 2))).equations if str(e.primitive) == "solve_triangular"]
    assert solved and {e.outputs[0].type.shape for e in solved} == {(2, 300)}


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
