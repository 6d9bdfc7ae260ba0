"""Properties of numerical functions: distributions, differential equations, and matrices where rules divide."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence

import numpy
import scipy.integrate
import scipy.linalg
import scipy.special as sp
import scipy.stats

import minidiff as md
import minidiff.numpy as np
from minidiff.scipy import integrate, special, stats
from tests.fuzz.properties.agree import agree

# ---------------------------------------------------------------- distributions, and special functions


def slope_of_rgamma(x: numpy.ndarray) -> numpy.ndarray:
    """By Cauchy's formula on a circle around x."""
    z = numpy.exp(2j * numpy.pi * (numpy.arange(64) + 0.5) / 64)
    return numpy.mean(sp.rgamma(x[..., None] + 0.25 * z) / (0.25 * z), -1).real


def derivatives_of(f: Callable, arrays: Sequence, argnum: int) -> numpy.ndarray:
    """Return the derivatives of f at each point, which are the same by every transformation."""
    along = lambda x: f(*[x if i == argnum else y for i, y in enumerate(arrays)])  # noqa: E731
    gradient = lambda *xs: md.grad(lambda *xs: f(*xs).sum(), argnum)(*xs)  # noqa: E731
    expected, x = gradient(*arrays), arrays[argnum]
    tangent = md.jvp(along, (x,), (numpy.ones_like(x),))[1]
    agree(
        [md.jit(gradient)(*arrays), md.vmap(md.grad(f, argnum))(*arrays), tangent],
        [expected] * 3,
        rtol=1e-9 if x.dtype == float else 1e-3,
    )
    return expected


def special_function(name: str, points: Sequence[float], slope: Callable) -> None:
    """Values are SciPy's, and derivatives those of an identity."""
    f, x = getattr(special, name), numpy.array(points)
    agree(f(x), getattr(sp, name)(x), rtol=1e-14)
    agree(derivatives_of(f, [x], 0), slope(x), rtol=1e-9, atol=1e-11)


def distribution(name: str, arrays: Sequence, argnum: int, loc: Sequence, scale: Sequence, dtype: str) -> None:
    """Values of all methods are SciPy's; a density is the derivative of the cdf, and that of a logarithm a quotient."""
    ours, theirs = getattr(stats, name), getattr(scipy.stats, name)
    discrete = name in ("poisson", "binom", "bernoulli")
    arrays = numpy.broadcast_arrays(*arrays, loc, *[scale] * (not discrete))
    arrays = [numpy.array(row, dtype) for row in arrays]
    density, argnum = "pmf" if discrete else "pdf", argnum % len(arrays)
    wide = [x.astype(float) for x in arrays]
    invalid = numpy.isnan(getattr(theirs, density)(*wide))  # SciPy's discrete logcdf of these is 0, or NaN
    for method in (density, f"log{density}", "cdf", "sf", "logcdf", "logsf"):
        value, expected = (getattr(d, method)(*xs) for d, xs in ((ours, arrays), (theirs, wide)))
        assert value.dtype == arrays[0].dtype
        expected = numpy.where(invalid, numpy.nan, expected)
        known = (expected > -600) & (expected < 1e30) | numpy.isnan(expected)  # SciPy's logarithms end there
        if dtype == "float32":  # in which a number may be rounded to an edge
            beside = [getattr(theirs, method)(wide[0] + shift, *wide[1:]) for shift in (-1e-6, 1e-6)]
            known &= numpy.isfinite(value) & numpy.isclose(*beside, rtol=1e-2)
        tolerances = {"rtol": 1e-8} if dtype == "float64" else {"rtol": 2e-3, "atol": 1e-5}
        agree(value[known], expected[known].astype(value.dtype), **tolerances)
        agree(md.jit(getattr(ours, method))(*arrays), value, **tolerances)
        if method != density and dtype == "float64":
            _check_slopes(ours, theirs, method, density, arrays, argnum, invalid)


def _check_slopes(ours, theirs, method, density, arrays, argnum, invalid) -> None:
    try:
        slope = derivatives_of(getattr(ours, method), arrays, argnum)
    except TypeError:
        return  # a shape in which SciPy has no derivative
    infinite = numpy.isinf(getattr(theirs, density)(*arrays))  # there a derivative in the scale is infinity times 0
    number, value = ~numpy.isnan(arrays[0]), getattr(ours, method)(*arrays)
    assert numpy.isnan(slope[invalid & number]).all()
    assert not numpy.isnan(slope[~invalid & ~infinite & numpy.isfinite(value)]).any(), (method, slope)
    if argnum or density == "pmf" or method == f"log{density}":
        return
    tail = getattr(ours, method[3:])(*arrays) if method.startswith("log") else numpy.ones_like(value)
    at = (tail > 1e-200) & number
    quotient = getattr(ours, density)(*arrays)[at] / tail[at]
    agree(slope[at], quotient * (1 if method.endswith("cdf") else -1), rtol=1e-8)


# ---------------------------------------------------------------- differential equations

EXPLICIT, REAL, IMPLICIT = ("RK45", "RK23", "DOP853"), ("Radau", "LSODA", "odeint"), ("Radau", "BDF", "LSODA", "odeint")


def _problem(rng: numpy.random.Generator, n: int, method: str, back: bool) -> tuple:
    """Return rates, two matrices, and arguments: y0, p and times."""
    rates = -(10 ** rng.uniform(-1, 3 if method in IMPLICIT else 2, n))
    times = numpy.array([0.0, *numpy.sort(rng.uniform(0.1, 2, rng.integers(1, 5)))])
    if back:
        rates, times = -rates, -times
    q = numpy.linalg.qr(rng.normal(size=(n, n)))[0] + 0.1 * rng.normal(size=(n, n))
    A, B = q @ numpy.diag(rates) @ numpy.linalg.inv(q), rng.normal(size=(n, n))
    y0, p = rng.normal(size=n), rng.normal(size=2)
    if method not in REAL and rng.random() < 0.3:
        A, y0 = A + 1j * rng.normal(size=(n, n)), y0 + 1j * rng.normal(size=n)
    return rates, A, B, (y0, p, times)


def _between_steps(rate: Callable, y0, p, times, method: str, tolerance: float) -> float:
    """Return the error of an explicit method between steps, where a gradient reads it, and SciPy controls nothing."""
    coarse, exact = [
        scipy.integrate.solve_ivp(lambda t, y: rate(t, y, p), times[[0, -1]], y0, m, rtol=r, atol=r, dense_output=True)
        for m, r in ((method, tolerance / 10), ("DOP853", 1e-12))
    ]
    between = (coarse.t[1:] + coarse.t[:-1]) / 2
    return abs(coarse.sol(between) - exact.sol(between)).max()


def ode(f: Callable, n: int, method: str, seed: int, tolerance: float, run: Callable, linear: bool, back: bool) -> None:
    """Reverse mode is forward mode's adjoint, and of linear equations the matrix exponential's derivative."""
    rng = numpy.random.default_rng(seed)
    rates, A, B, args = _problem(rng, n, method, back)
    y0, p, times = args
    weights = rng.normal(size=(len(times) - 1, n)) * (rng.random(len(times) - 1) < 0.7)[:, None]
    rate = lambda t, y, p: f(t, y, p, A + p[0] * B)  # noqa: E731

    def loss(y0, p, times, tol=tolerance):
        if method == "odeint":
            ys = integrate.odeint(rate, y0, times, (p,), tfirst=True, mxstep=10**5, rtol=tol, atol=tol)[1:]
        else:
            span = (times[0], times[-1])
            ys = integrate.solve_ivp(rate, span, y0, method, times[1:], (p,), rtol=tol, atol=tol).y.T
        return np.sum(weights * np.real(ys))

    allowed = 100 * tolerance
    if method in EXPLICIT:
        allowed += 10 * _between_steps(rate, *args, method, tolerance)
    actual = run(md.grad(loss, (0, 1, 2)))(*args)
    fastest = max(1, abs(rates).max())  # a moving time turns an error of the state into one of its rate
    ts = rng.normal(size=n) + 0 * y0, rng.normal(size=2), rng.normal(size=len(times)) / fastest
    pushed = md.jvp(lambda *args: loss(*args, tol=tolerance / 10), args, ts)[1]
    dot = sum(np.real(np.sum(x * t)) for x, t in zip(actual, ts))
    size = sum(abs(np.sum(abs(x * t))) for x, t in zip(actual, ts))
    agree(dot, pushed, rtol=0, atol=allowed * max(1, size, abs(weights).sum()))
    if linear:
        M = A + p[0] * B
        exponentials = [scipy.linalg.expm_frechet(M * s, B * s) for s in times[1:] - times[0]]
        ends = [(w @ e, w @ d @ y0, w @ M @ e @ y0) for w, (e, d) in zip(weights, exponentials)]
        of_times = numpy.array([-sum(x.real for _, _, x in ends), *[x.real for _, _, x in ends]])
        expected = sum(x for x, _, _ in ends), numpy.array([sum(x for _, x, _ in ends).real, 0.0]), of_times
        for x, y, factor in zip(actual, expected, (1, 1, fastest)):
            agree(x, y, rtol=0, atol=factor * allowed * max(1, abs(y).max(), abs(weights).sum()))


# ---------------------------------------------------------------- matrices


def adjoint(x):
    return np.conjugate(np.swapaxes(x, -1, -2))


def symmetric(x):
    return (x + adjoint(x)) / 2


def near(n: int, first: int, gap: float, seed: int) -> numpy.ndarray:
    """Return values in ascending order: blocks of values that are equal or nearly so, of which one is first."""
    rng, values = numpy.random.default_rng(seed), []
    for block in range(n):
        start = float(rng.integers(3)) if not block else values[-1] + rng.choice([0.5, 1.0, 2.0])
        values += [start + i * gap for i in range(rng.integers(1, 3) if block else first)]
    # Beside exp(w) such differences are rounding, which no rule sees.
    return numpy.array(values[:n]) if values[n - 1] > 0.1 else numpy.zeros(n)


def _unitary(rng: numpy.random.Generator, n: int, complexes: bool) -> numpy.ndarray:
    q = numpy.linalg.qr(rng.normal(size=(n, n)) + 1j * complexes * rng.normal(size=(n, n)))[0]
    q = q if rng.random() < 0.6 else numpy.eye(n) + 0j
    return q if complexes else q.real


def hermitian(values: numpy.ndarray, seed: int, complexes: bool) -> numpy.ndarray:
    q = _unitary(numpy.random.default_rng(seed), len(values), complexes)
    return numpy.asarray(symmetric(q * values @ adjoint(q)))


def rectangular(values: numpy.ndarray, m: int, n: int, seed: int, complexes: bool) -> numpy.ndarray:
    """Return a matrix of m times n with these singular values, in descending order."""
    rng, k = numpy.random.default_rng(seed), min(m, n)
    return _unitary(rng, m, complexes)[:, :k] * values[:k][::-1] @ adjoint(_unitary(rng, n, complexes)[:, :k])


def matrix(n: int, rank: int, kind: str, seed: int) -> numpy.ndarray:
    """Return a square matrix of a rank, symmetric or not, or of equal numbers."""
    rng = numpy.random.default_rng(seed)
    b = rng.normal(size=(n, min(n, rank)))
    other = b.T if kind == "symmetric" else rng.normal(size=b.T.shape)
    return b @ other if kind != "equal" else numpy.full((n, n), float(rank > 1))


def polynomial(x):
    """Return the determinant, as a sum over permutations."""
    sign = lambda p: round(numpy.linalg.det(numpy.eye(len(p))[list(p)]))  # noqa: E731
    orders = itertools.permutations(range(len(x)))
    return sum(sign(p) * math.prod(x[i, j] for i, j in enumerate(p)) for p in orders)


def projector(x, k: int, values: numpy.ndarray):
    """Return the projector on the eigenvectors of the first k eigenvalues, by Newton's iteration for the sign."""
    if k >= len(x):
        return np.eye(len(x)) + 0 * x
    y = x - (values[k - 1] + values[k]) / 2 * np.eye(len(x))
    for _ in range(30):
        y = (y + np.linalg.inv(y)) / 2
    return (np.eye(len(x)) - y) / 2


def right_or_refused(actual: Callable, expected: Callable, **tolerances: float) -> None:
    """A derivative is right, or it is NaN, and a warning says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = md.tree.map(numpy.array, actual())
    if any(numpy.isnan(x).any() for x in md.tree.leaves(actual)):
        assert any("NaN" in str(m.message) for m in caught), "a NaN without a warning"
        return
    agree(actual, expected(), **tolerances)


def equal(f: Callable, x: numpy.ndarray, values: Sequence, orders: Sequence[str], run: Callable, seed: int) -> None:
    """Two ways to compute a function of a matrix have the same derivatives.

    Values of x are eigenvalues or singular values: the nearer they are, the larger is the error of a quotient.
    """
    rng = numpy.random.default_rng(seed)
    gap = min([b - a for a, b in itertools.pairwise(sorted(values)) if b - a > 1e-14] or [1.0])
    c, scale = rng.normal(size=numpy.shape(f(x)[1])), rng.choice([1.0, 1e-3, 1e3])
    left, right = (lambda x, i=i: scale * np.real(np.sum(c * f(x)[i])) for i in (0, 1))
    left, t = run(left), rng.normal(size=x.shape) + 0 * x
    t = np.asarray(symmetric(t)) if x.shape[0] == x.shape[1] and numpy.array_equal(x, adjoint(x)) else t
    derivatives = {
        "gradient": lambda f: md.grad(f)(x),
        "tangent": lambda f: md.jvp(f, (x,), (t,))[1],
        "second": lambda f: md.jvp(md.grad(f), (x,), (t,))[1],
        "hessian": lambda f: md.hessian(f)(x),
        "jit of hessian": lambda f: md.jit(md.hessian(f))(x),
        "vmap of hessian": lambda f: md.vmap(md.hessian(f))(x[None])[0],
        "jacrev": lambda f: md.jacrev(md.grad(f))(x),
    }
    for order in orders:
        if order == "gradient" or (gap > 1e-3 and max(values, default=1.0) > 1e-3):
            of, rtol = derivatives[order], 1e-6 if order in ("gradient", "tangent") else 1e-5
            right_or_refused(lambda: of(left), lambda: of(right), rtol=rtol, atol=scale * (rtol / 100 + 1e-13 / gap))  # noqa: B023
