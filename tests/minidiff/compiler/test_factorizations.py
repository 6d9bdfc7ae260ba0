"""Operations that factorize one matrix share the factorization: how often it is computed, and what comes out."""

import sys

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import factorizations
from minidiff.compiler.factorizations import Lapack, find_lapack

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


@pytest.mark.parametrize("dtype, condition", CONDITIONS)
def test_values_are_numpys_to_rounding(lapack, dtype, condition):
    k = matrix(dtype, condition)
    b = numpy.random.default_rng(1).normal(size=(N, 3)).astype(k.real.dtype)
    eps = numpy.finfo(dtype).eps
    actual = md.jit(everything)(k, b)
    assert lapack.count("getrf") == 1
    for x, expected in zip(actual, everything(k, b), strict=True):
        assert x.dtype == expected.dtype and x.shape == expected.shape
        bound = 10 * N * eps * condition * (numpy.abs(expected).max() + (expected.ndim == 0))
        numpy.testing.assert_allclose(x, expected, rtol=0, atol=bound)
    # Solutions are exact for a matrix that differs from k by rounding, which an inverse does not give.
    for a, x in zip((k, k.T), actual):
        size = numpy.linalg.norm(a, 2) * numpy.linalg.norm(x, 2)
        assert numpy.linalg.norm(a @ x - b, 2) <= 10 * N * eps * size


def process(k, y):
    return 0.5 * np.sum(y * LA.solve(k, y)) + 0.5 * LA.slogdet(k)[1]


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e8, 1e12])
def test_the_likelihood_of_a_gaussian_process(lapack, condition):
    """One factorization for the value and the gradient, which is as accurate as NumPy's operations one by one."""
    k, y = matrix("d", condition), numpy.random.default_rng(1).normal(size=(N, 1))
    run = md.jit(md.value_and_grad(process))
    value, gradient = run(k, y)
    assert lapack.count("getrf") == 1
    expected, slope = md.value_and_grad(process)(k, y)
    bound = 10 * N * numpy.finfo("d").eps * condition
    numpy.testing.assert_allclose(value, expected, rtol=bound)
    numpy.testing.assert_allclose(gradient, slope, rtol=0, atol=bound * numpy.abs(slope).max())
    assert "lu(" in run.source(k, y) and not {"lu", "lu_solve"} & names(md.make_tape(run)(k, y))


def names(tape):
    return {eqn.primitive.name for eqn in tape.equations}


@needs_lapack
def test_what_is_shared():
    k, y = matrix("d", 10.0), numpy.ones((N, 1))
    count = lambda f, *args, **options: md.jit(f, **options).source(*args).count("lu(")  # noqa: E731
    both = lambda k, y: (LA.solve(k, y), LA.det(k))  # noqa: E731
    assert count(both, k, y) == 1
    assert count(lambda k, y: (LA.solve(k, y), LA.solve(k, 2 * y)), k, y) == 1
    assert count(lambda k, y: (both(k, y), both(k + 1.0, y)), k, y) == 2
    assert count(lambda k, y: md.scan(lambda c, _: (both(k * c[0, 0], c)[0], c), y, None, 3), k, y) == 0
    assert (
        count(lambda k, y: md.scan(lambda c, _: (sum(both(k * c[0, 0], c)), c), y, None, 3), k, y) == 1
    )  # in its body
    assert count(lambda y: (LA.solve(k, y), LA.solve(k, 2 * y)), y) == 1  # of a constant
    # not shared: one operation, other dtypes, stacks, and where it is switched off
    assert count(lambda k, y: (LA.solve(k, y), LA.solve(k + 1.0, y)), k, y) == 0
    assert count(both, k.astype("f"), y) == 0
    assert count(md.vmap(both), numpy.stack([k, k]), numpy.stack([y, y])) == 0
    assert count(both, k, y, kernels=False) == 0
    factorizations.MIN_ROWS = N + 1  # the fixture puts it back
    assert count(both, k, y) == 0


def test_without_lapack_programs_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(factorizations, "find_lapack", lambda: None)
    k, y = matrix("d", 10.0), numpy.ones((N, 1))
    run = md.jit(md.value_and_grad(process))
    assert "lu" not in run.source(k, y)
    numpy.testing.assert_allclose(run(k, y)[1], md.grad(process)(k, y), rtol=1e-10)


SINGULAR = {"zeros": numpy.zeros((N, N)), "a row of zeros": numpy.diag(numpy.arange(float(N)))}


@needs_lapack
@pytest.mark.parametrize("name", SINGULAR)
def test_singular_matrices_are_treated_as_numpy_does(name):
    k, y = SINGULAR[name], numpy.ones((N, 1))
    for f in (process, lambda k, y: LA.slogdet(k)[1] + np.sum(LA.inv(k)), lambda k, y: LA.det(k) + LA.inv(k.T)[0, 0]):
        assert "lu(" in md.jit(f).source(k, y)
        for run in (f, md.jit(f), md.jit(md.grad(f))):
            with pytest.raises(numpy.linalg.LinAlgError, match="Singular matrix"):
                run(k, y)
    logarithm = md.jit(md.value_and_grad(lambda k: LA.slogdet(k)[1]))
    assert "lu(" in logarithm.source(k)
    value, gradient = logarithm(k)
    assert value == -numpy.inf and numpy.isnan(gradient).all()
    determinants = md.jit(lambda k: [*LA.slogdet(k), *LA.slogdet(k.T), LA.det(k)])
    assert determinants(k) == [0.0, -numpy.inf, 0.0, -numpy.inf, 0.0]


@needs_lapack
def test_operations_keep_the_users_lines():
    def f(k):
        logarithm = LA.slogdet(k)[1]
        return LA.inv(k) * logarithm

    tape = md.jit(f).program(numpy.eye(N)).tape
    first = f.__code__.co_firstlineno
    places = {eqn.primitive.name: eqn.source.line - first for eqn in tape.equations}
    assert places == {"lu": 1, "lu_slogdet": 1, "lu_inv": 2, "multiply": 2}


@needs_lapack
@pytest.mark.parametrize("value", [numpy.nan, numpy.inf, -numpy.inf])
@pytest.mark.parametrize("dtype", "dD")
def test_matrices_that_are_not_finite(value, dtype):
    k = matrix(dtype, 10.0)
    k[3, 4] = value
    f = lambda k: [*LA.slogdet(k), LA.inv(k), LA.solve(k, np.ones((N, 1)))]  # noqa: E731
    with numpy.errstate(all="ignore"):
        for actual, expected in zip(md.jit(f)(k), f(k), strict=True):
            numpy.testing.assert_array_equal(numpy.isfinite(actual), numpy.isfinite(expected))


@needs_lapack
def test_other_layouts_of_memory():
    y = numpy.ones((N, 1))
    for k in (numpy.asfortranarray(matrix("d", 10.0)), matrix("d", 10.0, 2 * N)[::2, ::-2], matrix("d", 10.0)[::-1]):
        before = k.copy()
        numpy.testing.assert_allclose(md.jit(md.grad(process))(k, y), md.grad(process)(k, y), rtol=1e-10)
        numpy.testing.assert_array_equal(k, before)


@needs_lapack
def test_in_other_transformations():
    k, y = matrix("d", 10.0, 4), numpy.ones((4, 1))
    stack = numpy.stack([k, k.T, 2 * k])
    jitted, close = md.jit(process), lambda a, b: numpy.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    close(md.grad(jitted)(k, y), md.grad(process)(k, y))
    close(md.jit(md.hessian(process))(k, y), md.hessian(process)(k, y))
    close(
        md.jit(md.grad(lambda k: np.sum(md.grad(process)(k, y) ** 2)))(k),
        md.hvp(process, (k, y), (2 * md.grad(process)(k, y), 0 * y))[0],
    )
    for f in (md.vmap(jitted, (0, None)), md.jit(md.vmap(process, (0, None)))):
        close(f(stack, y), [process(a, y) for a in stack])
    close(md.jit(md.vmap(md.grad(process), (0, None)))(stack, y), [md.grad(process)(a, y) for a in stack])
    right = np.arange(12.0).reshape(3, 4, 1)  # one matrix for all: one factorization
    many = md.jit(md.vmap(process, (None, 0)))
    assert many.source(k, right).count("lu(") == 1
    close(many(k, right), [process(k, b) for b in right])


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
    st.lists(st.sampled_from([*STEPS]), min_size=1, max_size=6), st.sampled_from("dD"), st.integers(0, 99)
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_random_programs(steps, dtype, seed):
    k = matrix(dtype, 4.0, 5, seed)
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
