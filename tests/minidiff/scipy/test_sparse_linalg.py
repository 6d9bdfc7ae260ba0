"""Linear systems without matrices: SciPy's numbers, derivatives against `solve`; `linear_systems.md` shows others."""

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.scipy.sparse.linalg import cg, gmres
from tests.checks.samples import each

N = 6
FINE = {"rtol": 1e-13}
SQUARE = np.random.default_rng(0).standard_normal((2, N, N))
B = np.cos(np.arange(N)) + 1j * np.sin(np.arange(1, N + 1) ** 2)

#: A method, a matrix A, and b.
CASES = {
    "cg": (cg, SQUARE[0] @ SQUARE[0].T + np.eye(N), B.real),
    "cg complex": (cg, (c := SQUARE[0] + 1j * SQUARE[1]) @ c.conj().T + np.eye(N), B),
    "cg complex A, real b": (cg, c @ c.conj().T + np.eye(N), B.real),
    "gmres": (gmres, SQUARE[0] + 4 * np.eye(N), B.real),
    "gmres complex": (gmres, c + 4 * np.eye(N), B),
    "gmres complex b, real A": (gmres, SQUARE[0] + 4 * np.eye(N), B),
}


def hermitian(solve, a):
    return a if solve is gmres else (a + a.conj().T) / 2


@pytest.mark.parametrize("name", CASES)
def test_solutions_are_scipys(name):
    solve, a, b = CASES[name]
    of_scipy = getattr(scipy.sparse.linalg, solve.__name__)
    expected, (x, info) = np.linalg.solve(a, b), solve(a, b, **FINE)
    np.testing.assert_allclose(x, expected, atol=1e-10)
    assert info == 0 == of_scipy(a, b, **FINE)[1]
    assert x.dtype == expected.dtype
    x, info = solve(a, 0 * b, b)
    assert info == 0 and not x.any()
    assert not md.grad(lambda b: np.sum(np.abs(0 * solve(a, b)[0])))(b).any()
    for options in ({"M": np.diag(1 / np.diag(a))}, {"x0": b}, {"x0": expected}, {"x0": 0 * b}):
        x, info = solve(lambda v: a @ v, b, **options, **FINE)
        np.testing.assert_allclose(x, expected, atol=1e-10)
        assert info == 0


def test_steps_are_scipys():
    for solve, a, b in (CASES["cg"], CASES["gmres"]):
        of_scipy = getattr(scipy.sparse.linalg, solve.__name__)
        for options in ({"rtol": 1e-3}, {"rtol": 0.0, "atol": 1e-2}, {"maxiter": 2}):
            seen, of_scipys = [], []
            kind = {"callback_type": "pr_norm"} if solve is gmres else {}
            expected, stopped = of_scipy(a, b, callback=lambda x: of_scipys.append(np.copy(x)), **kind, **options)  # noqa: B023
            x, info = solve(a, b, callback=lambda x: seen.append(np.copy(x)), **options)  # noqa: B023
            np.testing.assert_allclose(x, expected, atol=1e-12)
            np.testing.assert_allclose(seen, of_scipys, atol=1e-10)
            compiled = []
            run = lambda b, o=options, s=solve, c=compiled: s(lambda t: a @ t, b, callback=c.append, **o)[0]  # noqa: B023, E731
            md.jit(run)(b)
            np.testing.assert_allclose(compiled, seen, atol=1e-10)
            assert (info > 0) == (stopped > 0)
            assert solve is gmres or info == stopped


@each("name", CASES)
def test_derivatives_are_those_of_solve(name):
    solve, a, b = CASES[name]
    f = lambda a, b: solve(lambda x: hermitian(solve, a) @ x, b, M=lambda x: x / 9, **FINE)[0]  # noqa: E731
    check_grads(f, (a, b), order=1)
    loss = lambda f: lambda a, b: np.sum(np.abs(f(a, b)) ** 2)  # noqa: E731
    exact = loss(lambda a, b: np.linalg.solve(hermitian(solve, a), b))
    for g, expected in ((md.grad(loss(f), (0, 1)), md.grad(exact, (0, 1))), (second(loss(f)), second(exact))):
        for x, y in zip(g(a, b), expected(a, b), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


@each("solve", [cg, gmres])
@each("sparse", [False, True])
@each("transform", [lambda g: g, md.jit, lambda g: lambda a: md.vmap(g)(np.stack([a, 2 * a]))[0]])
def test_matrices_that_are_differentiated(solve, sparse, transform):
    a = hermitian(solve, SQUARE[0])
    places = np.unravel_index(np.arange(N * N), (N, N))
    pattern = md.scipy.sparse.coo_array((a.ravel(), places), (N, N))
    of = lambda a: pattern._replace(values=a.ravel()) if sparse else a  # noqa: E731
    f = lambda a: np.sum(solve(of(a), B.real, M=None if sparse else a / 9, **FINE)[0])  # noqa: E731
    exact = md.grad(lambda a: np.sum(np.linalg.solve(a, B.real)))(a)
    np.testing.assert_allclose(transform(md.grad(f))(a), exact, rtol=1e-8, atol=1e-10)


def second(f):
    """Return the gradient of a function of the gradient."""
    return md.grad(lambda a, b: np.sum(np.abs(md.grad(f)(a, b)) ** 2), (0, 1))


@each("solve", [cg, gmres])
def test_transformations(solve):
    _, a, b = CASES["cg"]
    f = lambda a, b: solve(lambda x: a @ x, b, **FINE)[0]  # noqa: E731
    stacks = np.stack([a, 2 * a, np.eye(N)]), np.stack([b, 0 * b, b])
    expected = np.linalg.solve(stacks[0], stacks[1][..., None])[..., 0]
    for g in (md.vmap(f), md.jit(md.vmap(f))):
        np.testing.assert_allclose(g(*stacks), expected, atol=1e-10)
    gradient = lambda f: md.grad(lambda a, b: np.sum(np.sin(f(a, b))), (0, 1))  # noqa: E731
    expected = md.vmap(gradient(np.linalg.solve), (0, None))(stacks[0], b)
    for g in (md.vmap(gradient(f), (0, None)), md.jit(md.vmap(gradient(f), (0, None)))):
        for x, y in zip(g(stacks[0], b), expected):
            np.testing.assert_allclose(x, y, atol=1e-9)
    looped = lambda b: md.scan(lambda b, _: (f(a, b), None), b, None, 2)[0]  # noqa: E731
    np.testing.assert_allclose(md.jacrev(looped)(b), np.linalg.matrix_power(np.linalg.inv(a), 2), atol=1e-9)
    np.testing.assert_allclose(md.jacfwd(md.checkpoint(looped))(b), md.jacrev(looped)(b), atol=1e-9)


def test_sparse_matrices_of_scipy():
    laplacian = scipy.sparse.diags([-1.0, 2.5, -1.0], [-1, 0, 1], (9, 9)).tocsr()
    skewed = scipy.sparse.diags([-1.0, 2.5, -0.3], [-1, 0, 1], (9, 9)).tocsc()
    b = np.sin(np.arange(9.0))
    for solve, a in ((cg, laplacian), (gmres, skewed), (gmres, skewed * (1 + 1j))):
        f = lambda b: solve(a, b, M=scipy.sparse.eye(9), **FINE)[0]  # noqa: B023, E731
        for g in (f, md.jit(f), lambda b: md.vmap(f)(b[None])[0]):  # noqa: B023
            np.testing.assert_allclose(g(b), scipy.sparse.linalg.spsolve(a.tocsc(), b), atol=1e-11)
        check_grads(f, (b,), order=1)
