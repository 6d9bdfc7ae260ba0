"""Operations that share the factorization of one matrix: what comes out. `together.md` shows how many do."""

import sys

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import factorizations
from minidiff.compiler.factorizations import Lapack, find_lapack
from tests.checks.samples import each

LA = np.linalg
N = 12


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(factorizations, "MIN_ROWS", 1)


def wheel_of_numpy():
    lapack = numpy.show_config(mode="dicts")["Build Dependencies"]["lapack"]
    return lapack["name"] == "scipy-openblas" and sys.platform == "linux"


needs_lapack = pytest.mark.skipif(find_lapack() is None, reason="this NumPy's LAPACK is not found")


def test_lapack_is_found_in_numpys_wheels():
    assert find_lapack() is not None or not wheel_of_numpy()
    assert find_lapack("/no/such/file") is None


@pytest.fixture(params=["of NumPy", "of 32-bit integers"])
def lapack(request, monkeypatch):
    """NumPy's LAPACK, and SciPy's, which takes other integers. Its calls are written down."""
    if request.param == "of NumPy":
        actual = find_lapack() or pytest.skip("this NumPy's LAPACK is not found")
    else:
        extension = pytest.importorskip("scipy.linalg._flapack")
        actual = find_lapack(extension.__file__) or pytest.skip("this SciPy's LAPACK is not found")
        assert actual.integer == "i4" or not wheel_of_numpy()
    monkeypatch.setattr(factorizations, "find_lapack", lambda: actual)
    calls, call = [], Lapack.call
    monkeypatch.setattr(Lapack, "call", lambda self, name, *args: calls.append(name) or call(self, name, *args))
    return calls


def matrix(dtype, condition, n=N, seed=0):
    """A matrix with singular values from 1 down to 1 / condition."""
    rng = numpy.random.default_rng(seed)
    normal = lambda: rng.normal(size=(n, n)) + (1j * rng.normal(size=(n, n)) if dtype in "FD" else 0)  # noqa: E731
    (u, _), (v, _) = numpy.linalg.qr(normal()), numpy.linalg.qr(normal())
    return ((u * numpy.geomspace(1, 1 / condition, n)) @ v).astype(dtype)


def everything(k, b):
    return [LA.solve(k, b), LA.solve(k.T, b), LA.inv(k), LA.inv(k.T).T, *LA.slogdet(k), *LA.slogdet(k.T), LA.det(k)]


CONDITIONS = [(dtype, 10.0**power) for dtype in "dD" for power in (0, 4, 8, 12)] + [("f", 1.0), ("f", 1e4), ("F", 1e4)]


def process(k, y):
    """The likelihood of a Gaussian process."""
    return 0.5 * np.sum(y * LA.solve(k, y)) + 0.5 * LA.slogdet(k)[1]


@each("dtype, condition", CONDITIONS)
def test_values_are_numpys_to_rounding(lapack, dtype, condition):
    k = matrix(dtype, condition)
    b = numpy.random.default_rng(1).normal(size=(N, 3)).astype(k.real.dtype)
    bound = 10 * N * numpy.finfo(dtype).eps * condition
    for f in (everything, md.value_and_grad(process)) if dtype == "d" else (everything,):
        del lapack[:]
        actual = md.jit(f)(k, b)
        assert lapack.count("getrf") == 1
        for x, expected in zip(actual, f(k, b), strict=True):
            assert x.dtype == expected.dtype and x.shape == expected.shape
            atol = bound * (numpy.abs(expected).max() + (expected.ndim == 0))
            numpy.testing.assert_allclose(x, expected, rtol=0, atol=atol)
    # Solutions are exact for a matrix that differs from k by rounding, which an inverse does not give.
    for a, x in zip((k, k.T), md.jit(everything)(k, b)):
        size = numpy.linalg.norm(a, 2) * numpy.linalg.norm(x, 2)
        assert numpy.linalg.norm(a @ x - b, 2) <= bound / condition * size


def test_without_lapack_programs_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(factorizations, "find_lapack", lambda: None)
    k, y = matrix("d", 10.0), numpy.ones((N, 1))
    run = md.jit(md.value_and_grad(process))
    assert "lu" not in run.source(k, y)
    numpy.testing.assert_allclose(run(k, y)[1], md.grad(process)(k, y), rtol=1e-10)


SINGULAR = [numpy.zeros((N, N)), numpy.diag(numpy.arange(float(N)))]
OF_SINGULAR = [
    process,
    lambda k, y: LA.slogdet(k)[1] + np.sum(LA.inv(k)),
    lambda k, y: LA.det(k) + LA.inv(k.T)[0, 0],
]


@needs_lapack
@each("k", SINGULAR)
@each("f", OF_SINGULAR)
def test_singular_matrices_are_treated_as_numpy_does(f, k):
    for run in (f, md.jit(f), md.jit(md.grad(f))):
        with pytest.raises(numpy.linalg.LinAlgError, match="Singular matrix"):
            run(k, numpy.ones((N, 1)))
    value, gradient = md.jit(md.value_and_grad(lambda k: LA.slogdet(k)[1]))(k)
    assert value == -numpy.inf and numpy.isnan(gradient).all()
    determinants = md.jit(lambda k: [*LA.slogdet(k), *LA.slogdet(k.T), LA.det(k)])
    assert determinants(k) == [0.0, -numpy.inf, 0.0, -numpy.inf, 0.0]


@needs_lapack
def test_operations_keep_the_users_lines():
    def f(k):
        logarithm = LA.slogdet(k)[1]
        return LA.inv(k) * logarithm

    tape = md.jit(f).program(numpy.eye(N)).tape
    places = {eqn.primitive.name: eqn.source.line - f.__code__.co_firstlineno for eqn in tape.equations}
    assert places == {"lu": 1, "lu_slogdet": 1, "lu_inv": 2, "multiply": 2}
    assert not {"lu", "lu_inv"} & {eqn.primitive.name for eqn in md.make_tape(md.jit(f))(numpy.eye(N)).equations}


@needs_lapack
@each("value", [numpy.nan, numpy.inf, -numpy.inf])
@each("dtype", "dD")
def test_matrices_that_are_not_finite(value, dtype):
    k = matrix(dtype, 10.0)
    k[3, 4] = value
    f = lambda k: [*LA.slogdet(k), LA.inv(k), LA.solve(k, np.ones((N, 1)))]  # noqa: E731
    with numpy.errstate(all="ignore"):
        for actual, expected in zip(md.jit(f)(k), f(k), strict=True):
            numpy.testing.assert_array_equal(numpy.isfinite(actual), numpy.isfinite(expected))


STEPS = {
    "solve": lambda k, y: LA.solve(k, y),
    "solve with the transpose": lambda k, y: LA.solve(k.T, y),
    "solve, row by row": lambda k, y: LA.solve(k, y.T[..., None])[..., 0].T,
    "inv": lambda k, y: LA.inv(k) @ y,
    "inv of the transpose": lambda k, y: LA.inv(k.T) @ y,
    "slogdet": lambda k, y: y * LA.slogdet(k)[1],
    "det": lambda k, y: y + LA.det(k.T),
    "another matrix": lambda k, y: y / (1 + np.sum(y * y)),
}


@needs_lapack
@hypothesis.given(
    st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=6),
    st.sampled_from("dD"),
    st.integers(0, 99),
    st.sampled_from([numpy.copy, numpy.asfortranarray, lambda k: k.repeat(2, 0)[::-2]]),
)
@hypothesis.settings(max_examples=20, deadline=None)
def test_random_programs(steps, dtype, seed, layout):
    k = layout(matrix(dtype, 4.0, 5, seed))
    y = numpy.random.default_rng(seed).normal(size=(5, 2))

    def f(k, y):
        for name in steps:
            y = STEPS[name](k, y)
            if name == "another matrix":
                k = k @ k.T + 3 * k
        return np.sum(np.real(y))

    run = md.value_and_grad(f, argnums=(0, 1))
    for actual, expected in zip(md.tree.leaves(md.jit(run)(k, y)), md.tree.leaves(run(k, y)), strict=True):
        numpy.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-8 * (1 + numpy.abs(expected).max()))
