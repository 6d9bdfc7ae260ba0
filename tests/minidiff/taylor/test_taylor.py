"""`jet` against nested `jvp`s, also on ranks; `series.md` has known series, `derivatives` and `laplacian`."""

import math

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import ppermute, psum
from spmd import P
from tests.checks.meshes import mapped, mesh

ORDER = 4
RANDOM = np.random.default_rng(0)
X, V = RANDOM.uniform(0.2, 0.8, (3, 4)), RANDOM.normal(size=(3, 4))
A = RANDOM.normal(size=(4, 4)) + 4 * np.eye(4)


def nested(f, x, v, order):
    """The coefficients by nested forward mode."""
    functions = [f]
    for _ in range(order):
        functions.append(lambda x, g=functions[-1]: md.jvp(g, (x,), (v,))[1])
    return [np.asarray(g(x)) / math.factorial(k) for k, g in enumerate(functions)]


def along(f, x, v, order):
    value, coefficients = md.jet(f, (x,), ([v, *[0 * v] * (order - 1)],))
    return [value, *coefficients]


def check(f, x=X, v=V, order=ORDER):
    expected = nested(f, x, v, order)
    for run in (lambda x: along(f, x, v, order), md.jit(lambda x: along(f, x, v, order))):
        for actual, wanted in zip(run(x), expected, strict=True):
            np.testing.assert_allclose(np.asarray(actual), wanted, rtol=1e-9, atol=1e-9 * (1 + abs(wanted).max()))


OPERATIONS = {
    "sin": mnp.sin,
    "tan": mnp.tan,
    "log": mnp.log,
    "tanh": mnp.tanh,
    "arctan": mnp.arctan,
    "power 3": lambda x: x**3,
    "power 2.5": lambda x: x**2.5,
    "power x": lambda x: x**x,
    "cumprod": lambda x: mnp.cumprod(x, axis=1),
    "matmul": lambda x: x @ A @ x.T,
    "einsum of three": lambda x: mnp.einsum("ij,ik,il->jkl", x, x, mnp.sin(x)),
    "solve": lambda x: mnp.linalg.solve(A + mnp.diag(x[0]), x.T),
    "det": lambda x: mnp.linalg.det(x.T @ x + A),
    "cholesky": lambda x: mnp.linalg.cholesky(x.T @ x + 4 * np.eye(4)),
    "eigh": lambda x: mnp.linalg.eigh(x.T @ x + np.diag(np.arange(4.0)))[0],
    "svd": lambda x: mnp.linalg.svd(x, compute_uv=False),
    "qr": lambda x: mnp.linalg.qr(x.T)[1],
    "gelu": lambda x: md.nn.gelu(x),
    "norm": mnp.linalg.norm,
    "max": lambda x: x.max(axis=1),
    "sort": mnp.sort,
    "where": lambda x: mnp.where(x > 0.5, x * x, mnp.sin(x)),
    "gather": lambda x: (x * x)[np.array([0, 2, 2])],
    "convolve": lambda x: mnp.convolve(x[0], x[1]),
    "complex": lambda x: (mnp.exp(1j * x) * (1 + 2j)).imag,
    "arctan2": lambda x: mnp.arctan2(x, 1 + x * x),
    "scan": lambda x: md.scan(lambda c, t: (mnp.sin(c) * t, c + t), x[0], x)[1],
    "fori_loop": lambda x: md.fori_loop(0, 3, lambda i, c: mnp.sin(c) * x, x),
    "while_loop": lambda x: md.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, mnp.sin(c[1]) * x), (0, x))[1],
    "cond": lambda x: md.cond(x[0, 0] > 0, mnp.sin, lambda x: x, x),
    "checkpoint": md.checkpoint(lambda x: mnp.sin(x) * x),
    "jit": md.jit(lambda x: mnp.sin(x) * x),
    "vmap": md.vmap(lambda row: row * row.sum()),
    "grad": md.grad(lambda x: mnp.sum(mnp.sin(x) * x**2)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_against_nested_jvp(name):
    check(OPERATIONS[name])


def test_curves_and_several_arguments():
    """A curve with higher coefficients, against the composition with a polynomial of t."""
    f = lambda x, y: mnp.exp(x) * mnp.sin(y) / (2 + x * y)  # noqa: E731
    x, y = [X, V, V**2, -V], [X + 1, 2 * V, X, V]
    value, coefficients = md.jet(f, (x[0], y[0]), (x[1:], y[1:]))
    at = lambda t: f(*[sum(c * t**k for k, c in enumerate(z)) for z in (x, y)])  # noqa: E731
    expected = nested(at, np.array(0.0), np.array(1.0), 3)
    for actual, wanted in zip([value, *coefficients], expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-9)


def test_operations_grow_at_most_with_the_square_of_the_order():
    f = lambda x: mnp.exp(mnp.sin(x) * x) / (1 + x * x)  # noqa: E731
    counts = [len(md.make_tape(lambda x, n=n: along(f, x, 1.0, n))(0.5).equations) for n in (4, 8, 16)]
    assert counts[1] < 4.5 * counts[0] and counts[2] < 4.5 * counts[1]


def test_custom_rules():
    f = md.custom_jvp(lambda x: mnp.sin(x))
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * mnp.cos(primals[0])))
    check(f)
    g = md.custom_vjp(lambda x: 2 * x)
    g.defvjp(lambda x: (g(x), None), lambda _, ct: (2 * ct,))
    with pytest.raises(TypeError):
        md.derivatives(g, 0.3, 2)


# ---------------------------------------------------------------- ranks


def body(x, w):
    return mnp.sin(x * psum(mnp.sum(x * w), "i")) * ppermute(x, "i", [(0, 1), (1, 2)])


def test_shard_map_around_and_inside():
    x, w, v = np.linspace(0.1, 0.9, 8), np.arange(2.0) + 0.5, np.ones(8)
    line = mesh(4)
    f = lambda x: mapped(body, line, (P("i"), P()), P("i"))(x, w)  # noqa: E731
    check(f, x, v, 3)
    closing = lambda x: mapped(lambda y: y * mnp.sum(mnp.sin(x)), line, P("i"), P("i"))(x)  # noqa: E731
    check(closing, x, v, 3)
    third = lambda x, w: along(lambda x: body(x, w), x, mnp.ones_like(x), 3)[3]  # noqa: E731
    inside = mapped(third, line, (P("i"), P()), P("i"))(x, w)
    np.testing.assert_allclose(np.asarray(inside), nested(f, x, v, 3)[3], rtol=1e-9)
    assert spmd.communication(lambda x: along(f, x, v, 3))(x).counts == {"psum": 4, "ppermute": 4}  # each coefficient
