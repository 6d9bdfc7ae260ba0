"""16-bit floats: operations, derivatives and sums; `half_precision.md` has dtypes and TF32, `precision.md` policies."""

import functools
import operator
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from minidiff.numpy.functions import SUMS, full_name
from spmd import P
from tests import PATIENCE
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import check_each, each
from tests.table import TABLE

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF = [np.dtype(np.float16), BFLOAT16]
X = np.linspace(0.1, 1, 12).reshape(3, 4)
W = np.linspace(-1, 1, 8).reshape(4, 2)

#: Functions of x [3, 4] and w [4, 2], whose results are 16-bit floats if these are.
FUNCTIONS = {
    "python numbers": lambda x, w: 2.0 * x / 3 - 1,
    "matmul": lambda x, w: x @ w,
    "einsum": lambda x, w: np.einsum("ij,jk->ki", x, w),
    "mean": lambda x, w: x.mean(1),
    "gelu": lambda x, w: md.nn.gelu(md.nn.softmax(x)),
    "clip": lambda x, w: np.clip(np.where(x > 0.5, x, 0.5), 0.2, 0.8),
    "power": lambda x, w: x**0.5 + x**2,
    "index": lambda x, w: x[1:, ::2] * x[0, [1, 1]],
    "rows": lambda x, w: np.sort(np.concatenate([x, 0.5 * x]), 0)[::-1],
    "max": lambda x, w: x.max(0),
    "scan": lambda x, w: md.scan(lambda c, row: (0.5 * c + row, c.sum()), x[0], x),
    "cond": lambda x, w: md.cond(True, lambda x: 2.0 * x, lambda x: x, x),
    "checkpoint": lambda x, w: md.checkpoint(lambda x: np.sin(x) * 2.0)(x),
    "vmap": lambda x, w: md.vmap(lambda row: row @ w)(x),
    "quantile": lambda x, w: np.quantile(np.nan_to_num(x), 0.3),
    "linspace": lambda x, w: np.linspace(x[0], x[1], 3),
}


def as_single(values):
    return [np.asarray(x, np.float32) for x in md.tree.leaves(values)]


def everything(f):
    """The results, tangents and gradients of a function."""

    def derivatives(x, w):
        leaves = lambda x, w: md.tree.leaves(f(x, w))  # noqa: E731
        out, pull = md.vjp(leaves, x, w)
        # Not all alike: a softmax's derivative then is 0, and there would be nothing but rounding to compare.
        cotangents = [np.linspace(1, 2, y.size).reshape(y.shape).astype(y.dtype) for y in out]
        return out, md.jvp(leaves, (x, w), (x, w))[1], pull(cotangents)

    return derivatives


@each("dtype", HALF, ids=str)
@each("f", FUNCTIONS.values(), FUNCTIONS)
@each("way", [lambda f: f, md.jit], ["eager", "jit"])
def test_values_and_derivatives_are_those_of_float32_and_have_the_dtype(f, dtype, way):
    x, w = X.astype(dtype), W.astype(dtype)
    expected = as_single(everything(f)(x.astype(np.float32), w.astype(np.float32)))
    tolerance = 8 * float(md.values.dtypes.finfo(dtype).eps)
    actual = way(everything(f))(x, w)
    assert {y.dtype for y in md.tree.leaves(actual)} == {dtype}
    for y, z in zip(as_single(actual), expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=tolerance, atol=tolerance * abs(z).max())


# ---------------------------------------------------------------- one rule for sums

#: Functions of 16-bit floats whose sums, or sums on the way, are large.
LARGE = {
    "softmax": (md.nn.softmax, np.zeros(70000)),
    "logsumexp": (md.nn.logsumexp, np.zeros(70000)),
    "loss": (lambda x: md.optim.softmax_cross_entropy_with_integer_labels(x, np.array(3)), np.zeros(70000)),
    "attention": (
        lambda x: md.nn.dot_product_attention(x[:1, None, None], x[:, None, None], x[:, None, None]),
        np.linspace(0, 1, 70000),
    ),
    "cumsum": (mnp.cumsum, np.full(5000, 1.1)),
    "std": (mnp.std, np.linspace(-900, 900, 3000)),
    "norm": (mnp.linalg.norm, np.full(3000, 300.0)),
    "average": (lambda x: mnp.average(x, weights=x), np.full(3000, 300.0)),
    "mean of some": (lambda x: mnp.mean(x, where=x > 0), np.full(3000, 300.0)),
    "sum from a start": (lambda x: mnp.sum(x, initial=-60000.0), np.full(1000, 100.0)),
    "matmul": (lambda x: mnp.matmul(x, x), np.full(3000, 1.1)),
    "three operands": (lambda x: mnp.einsum("i,i,j->j", x, x, x[:1]), np.full(3000, 0.1)),
    "added at one place": (lambda x: mnp.at(-x[:1])[np.zeros(3000, int)].add(x), np.full(3000, 1.1)),
    "read at one place": (lambda x: x[np.zeros(3000, int)], np.full(1, 1.1)),
    "broadcast": (lambda x: x + np.zeros(3000, x.dtype), np.full(1, 1.1)),
    "layer_norm": (md.nn.layer_norm, np.linspace(-900, 900, 3000)),
    "avg_pool": (lambda x: md.nn.avg_pool(x[:, None], (200,)), np.full(200, 999.0)),
    "logaddexp": (mnp.logaddexp.reduce, np.zeros(3000)),
}
#: The function by every route.
ROUTES = [
    *(lambda f: f, md.jit, lambda f: md.jit(f, kernels=False), lambda f: lambda x: md.jvp(f, (x,), (x,))[0]),
    lambda f: lambda x: md.vmap(f)(x[None])[0],
    lambda f: mapped(lambda x: np.ravel(f(x)), mesh(2), P(), P(None)),
]


@each("name", LARGE)
@each("dtype", HALF, ids=str)
def test_sums_are_those_of_float64_rounded_once(name, dtype):
    """And so are their derivatives."""
    f, x = LARGE[name]
    x = x.astype(dtype)
    expected, pullback = md.vjp(f, x.astype(float))
    slope = pullback(np.ones_like(expected))[0]
    eps = 2.0**-10 if dtype == np.float16 else 2.0**-7
    for route in ROUTES:
        y = route(f)(x)
        assert y.dtype == dtype
        np.testing.assert_allclose(np.ravel(y).astype(float), np.ravel(expected), rtol=eps, atol=4e-8)
    for run in (lambda g: g, md.jit):
        ct = run(lambda x: md.vjp(f, x)[1](np.ones(expected.shape, dtype))[0])(x)
        assert ct.dtype == dtype
        np.testing.assert_allclose(ct.astype(float), slope, rtol=4 * eps, atol=4 * eps * abs(slope).max() + 6e-8)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_functions_that_add_are_listed(dtype):
    """Those in `SUMS` are the same functions of plain arrays as of traced ones; no others add 16-bit floats."""

    def check(row):
        cast = lambda x: np.asarray(x, dtype)[()] if np.asarray(x).dtype.kind == "f" else x  # noqa: E731
        f = functools.partial(operator.attrgetter(full_name(row.function)[3:])(mnp), **row.f.keywords)
        places, args = row.active, [cast(x) for x in row.args]

        def of_active(*xs):
            known = dict(zip(places, xs))
            return f(*[known.get(i, x) for i, x in enumerate(args)])

        try:
            tape = md.make_tape(of_active)(*[args[i] for i in places])
        except TypeError:
            return  # NumPy's function of float64 alone, or of values
        if full_name(row.function)[3:] not in SUMS:
            floats = [e for e in tape.equations if e.primitive.accumulates and e.inputs[0].type.dtype == dtype]
            assert not floats or row.function is np.median  # whose NumPy adds two in float32
            return
        for x, y in zip(md.tree.leaves(f(*args)), tape(*[args[i] for i in places]), strict=True):
            assert np.asarray(x).dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x).astype(float), y.astype(float))

    rows = [r for r in TABLE if isinstance(r.f, functools.partial) and r.f.func is r.function]
    rows = [r for r in rows if isinstance(r.function, np.ufunc) or r.function.__module__.startswith("numpy")]
    rows = [r for r in rows if not any(np.iscomplexobj(x) for x in r.args)]
    check_each((row.key, functools.partial(check, row)) for row in rows if row.active)


PROGRAM = """
import numpy, ml_dtypes, minidiff as md
f = md.precision.Policy("bfloat16").apply(lambda x: md.nn.dropout(md.random.key(0), x * 1.1, 0.5))
first = str(md.make_tape(f)(numpy.ones(4, "f4")))
md.typeof(numpy.ones(4, ml_dtypes.bfloat16))
print(str(md.make_tape(f)(numpy.ones(4, "f4"))) == first, "f32[4] = multiply" in first)
"""


def test_programs_do_not_depend_on_what_was_traced_before():
    """A process that has not seen bfloat16 yet, and one that has."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "True False\n", done.stderr
