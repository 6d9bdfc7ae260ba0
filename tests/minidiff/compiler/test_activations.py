"""Activations, losses and normalizations compile to fused loops, whose values are those of the same operations eagerly.

`count_kernels` counts what is left of a program on large arrays: loops, and operations that are NumPy's.
"""

import functools

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff import nn
from minidiff.compiler import native
from minidiff.compiler.buffers import fused_p
from minidiff.core.types import ShapedArray
from minidiff.ops.shape import split_p

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite")


@md.custom_jvp
def scaled(x):
    return 2.0 * np.tanh(x)


@scaled.defjvp
def _scaled_tangent(primals, tangents):
    (x,), (t,) = primals, tangents
    y = np.tanh(x)
    return 2.0 * y, 2.0 * (1 - y * y) * t


@md.custom_vjp
def clipped(x):
    return np.exp(-x * x)


clipped.defvjp(
    lambda x: (clipped(x), x),
    lambda x, ct: (np.clip(ct, -1.0, 1.0) * -2.0 * x * np.exp(-x * x),),
)

#: Functions of the elements of an array.
ELEMENTWISE = {
    **{name: getattr(nn, name) for name in (
        "relu", "gelu", "silu", "mish", "elu", "celu", "selu", "softplus", "log_sigmoid", "sigmoid", "leaky_relu",
        "relu6", "hard_sigmoid", "hard_silu", "hard_tanh", "soft_sign", "squareplus", "glu", "erf", "erfc",
    )},
    "gelu (erf)": lambda x: nn.gelu(x, approximate=False),
    "relu(2x+1)*3": lambda x: nn.relu(2 * x + 1) * 3,
    "custom_jvp": lambda x: scaled(x) + 1.0,
    "custom_vjp": lambda x: clipped(x) + 1.0,
    "a jitted function": lambda x: md.jit(nn.silu)(x) * 2.0,
}  # fmt: skip

#: Functions of the rows of a matrix.
ROWS = {
    "softmax": nn.softmax,
    "log_softmax": nn.log_softmax,
    "logsumexp": lambda x: nn.logsumexp(x, axis=-1, keepdims=True),
    "cross_entropy": lambda x: nn.logsumexp(x, axis=-1, keepdims=True) - x[:, 3:4],
    "layer_norm": lambda x: nn.layer_norm(x, np.arange(x.shape[-1], dtype=x.dtype), 1.0),
    "rms_norm": nn.rms_norm,
    "standardize": lambda x: nn.standardize(np.tanh(x)),
    "var": lambda x: x / np.var(x, axis=-1, keepdims=True),
    "range": lambda x: (x - np.min(x, -1, keepdims=True)) / np.ptp(x, -1, keepdims=True),
    "two softmaxes": lambda x: nn.softmax(nn.softmax(x) * 3.0),
}


def large_operations(tape, size):
    """The operations of a program with operands of at least this size, but views."""
    return [e for e in tape.equations if not e.primitive.shares_memory and any(
        getattr(a.type if hasattr(a, "type") else a, "size", 0) >= size for a in [*e.inputs, *e.outputs])]  # fmt: skip


def gradient(f):
    return lambda x, ct: md.vjp(f, x)[1](ct)[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", {**ELEMENTWISE, **ROWS})
def test_a_function_is_one_loop(name, dtype):
    """A single operation that NumPy computes in one loop may stay with NumPy; the gradient of `glu` is two halves.

    Beside a loop over rows there may be what puts a gradient into a column (`cross_entropy`).
    """
    f, t = {**ELEMENTWISE, **ROWS}[name], ShapedArray((64, 1024), numpy.dtype(dtype))
    out = md.eval_shape(f, t)
    for tape in (md.jit(f).program(t).tape, md.jit(gradient(f)).program(t, out).tape):
        operations = large_operations(tape, t.size if name in ROWS else out.size)
        assert len(operations) == 1 or name in ("glu", "cross_entropy")
        kernels = [e for e in tape.equations if e.primitive is fused_p]
        assert len(kernels) == 1 or name in ELEMENTWISE
        assert kernels or isinstance(operations[0].primitive.impl, numpy.ufunc)


#: Functions of a matrix whose results are split; of `SPLIT`, loops need only the parts.
BIAS, MATRIX = numpy.linspace(-1.0, 1.0, 1024), numpy.cos(numpy.arange(64.0 * 1024)).reshape(64, 1024)
SPLIT = {
    "glu": lambda x: nn.glu(np.tanh(x * BIAS) + 1.0),
    "glu of rows": lambda x: nn.glu(x * BIAS + BIAS[:64, None], axis=0),
    "a whole constant": lambda x: nn.glu(x * MATRIX + MATRIX[:1] * BIAS[:, None][:64]),
    "four gates": lambda x: functools.reduce(np.multiply, np.split(x * x + BIAS, 4, axis=-1)),
    "one part": lambda x: np.exp(np.split(np.exp(-x * x) + 1.0, 2, axis=-1)[1]),
    "booleans": lambda x: np.where(*np.split((x + BIAS > 0) == (x > 1.0), 2, axis=1), x[:, :512]),
    "twice": lambda x: nn.glu(nn.glu(x * BIAS + 1.0) * 2.0 - BIAS[:512]),
}
STORED = {
    "a result": lambda x: (lambda a, b: (a, np.exp(b)))(*np.split(np.exp(-x * x) + 1.0, 2, axis=-1)),
    "used twice": lambda x: (lambda y: (nn.glu(y), y))(np.exp(-x * x) + 1.0),
    "unequal parts": lambda x: (lambda a, b: (np.exp(a), np.exp(b)))(*np.split(np.exp(-x * x) + 1.0, [100], axis=-1)),
    "a product": lambda x: (lambda a, b: (a @ b.T, np.exp(a)))(*np.split(np.exp(-x * x) + 1.0, 2, axis=-1)),
    "a norm": lambda x: nn.glu(nn.layer_norm(x * BIAS)),
}


@pytest.mark.parametrize("name", {**SPLIT, **STORED})
def test_loops_compute_parts_from_parts(name):
    f, x = {**SPLIT, **STORED}[name], example((64, 1024), "float64")
    tape, expected = md.jit(f).program(x).tape, md.tree.leaves(md.jit(f, kernels=False)(x))
    assert any(e.primitive is split_p for e in tape.equations) == (name in STORED)
    assert name in (*STORED, "twice") or len(large_operations(tape, x.size // 4)) == 1
    for actual, wanted in zip(md.tree.leaves(md.jit(f)(x)), expected):
        assert_near(actual, wanted, 8)
    total = lambda x: sum(np.sum(y * y) for y in md.tree.leaves(f(x)) if y.dtype == float)  # noqa: E731
    assert_near(md.jit(md.grad(total))(x), md.grad(total)(x), 64)


def test_the_gradient_of_log_softmax_has_one_exp_for_each_element():
    t = ShapedArray((64, 1024), numpy.dtype(float))
    source = md.jit(lambda x, ct: md.value_and_grad(lambda x: np.sum(nn.log_softmax(x) * ct))(x)).source(t, t)
    assert source.count("exp(") == source.count("log(") == 1


def example(shape, dtype, seed=0):
    return numpy.random.default_rng(seed).normal(0, 2, shape).astype(dtype)


def assert_near(actual, expected, ulps):
    actual, expected = numpy.asarray(actual), numpy.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    scale = numpy.max(numpy.abs(expected), initial=1.0, where=numpy.isfinite(expected))
    atol = ulps * numpy.finfo(expected.dtype).eps * scale
    numpy.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", {**ELEMENTWISE, **ROWS})
def test_values_and_gradients_are_those_without_loops(name, dtype):
    f = {**ELEMENTWISE, **ROWS}[name]
    x = example((17, 100) if name in ROWS else (1, 1700), dtype)
    ct = example(md.eval_shape(f, x).shape, dtype, 1)
    assert_near(md.jit(f)(x), f(x), 16)
    assert_near(md.jit(gradient(f))(x, ct), gradient(f)(x, ct), 64)


#: Rows of special values, and their softmax without loops.
SPECIAL = numpy.array([[numpy.inf], [-numpy.inf], [numpy.nan], [0.0], [-0.0], [1e300], [-1e300]])


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_rows_with_special_values(name):
    x = numpy.repeat(example((1, 100), float), 14, 0)
    x[:7, 50:51] = x[7:, :] = SPECIAL
    x[0, 2] = numpy.inf  # twice: they share the total
    with numpy.errstate(all="ignore"):
        actual, expected = md.jit(ROWS[name])(x), ROWS[name](x)
    numpy.testing.assert_allclose(actual, expected, rtol=1e-14)
    assert (numpy.signbit(actual) == numpy.signbit(expected)).all()


def layouts(x):
    """The same array, and others that are not adjacent, and broadcast."""
    wide = numpy.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return x, wide[..., ::2], numpy.asfortranarray(x), numpy.broadcast_to(x[:1], x.shape), x[:, ::-1]


@pytest.mark.parametrize("columns", [64, 100, 257, 600])
def test_rows_of_other_layouts_and_lengths(columns):
    f = lambda x, s: (nn.layer_norm(x, s) * 2.0, nn.softmax(x), np.sum(x * s, 0), np.max(x, -1))  # noqa: E731
    s = example(columns, "float32", 2)
    compiled = md.jit(f)
    for x in layouts(example((9, columns), "float32")):
        for actual, expected in zip(compiled(x, s), f(x, s)):
            assert_near(actual, expected, 32)


@pytest.mark.parametrize("shape, axis", [((2000,), 0), ((3, 5, 120), 2), ((3, 12, 10), (1, 2)), ((120, 7), 0)])
def test_along_other_axes(shape, axis):
    x = example(shape, float)
    for f in (lambda x: nn.softmax(x, axis), lambda x: nn.layer_norm(x, axis=axis)):
        assert_near(md.jit(f)(x), f(x), 16)
        g = md.grad(lambda x, f=f: np.sum(f(x) ** 2 * np.cos(x)))
        assert_near(md.jit(g)(x), g(x), 64)


def test_a_mask_that_broadcasts():
    """The loop has three dimensions, of which NumPy walks over the first."""
    x, mask = example((4, 3, 70, 70), "float32"), numpy.tri(70, dtype=bool)
    f = lambda x, mask: nn.softmax(np.where(mask, x * 0.5, -1e30))  # noqa: E731
    assert len([e for e in md.jit(f).program(x, mask).tape.equations if e.primitive is fused_p]) == 1
    assert_near(md.jit(f)(x, mask), f(x, mask), 4)


def test_long_rows_are_not_stored():
    """A row of so many elements is not in the cache for the next stage: each has a loop."""
    x = example((2, 1 << 15), "float32")
    assert_near(md.jit(nn.softmax)(x), nn.softmax(x), 8)
    assert len(md.jit(nn.softmax).program(x).tape.equations) > 1


def test_an_operation_on_rows_that_something_else_needs_first():
    def f(x, w):
        largest = np.max(x, -1, keepdims=True)
        y = x - largest
        return y @ (w * np.sum(largest)), np.exp(y) / np.sum(y, -1, keepdims=True)

    x, w = example((40, 80), float), example((80, 8), float, 1)
    for actual, expected in zip(md.jit(f)(x, w), f(x, w)):
        assert_near(actual, expected, 32)


def test_source_shows_the_stages():
    text = md.jit(lambda x: np.exp(x) / np.sum(np.exp(x), -1, keepdims=True)).source(numpy.ones((64, 80)))
    assert text.startswith(
        """\
def fused(c):  # one loop, compiled; f64[64,80]
    for i0 in range(64):
        e = 0
        for i1 in range(80):
            d[i0, i1] = exp(c[i0, i1])
            e += d[i0, i1]
        for i1 in range(80):
            f[i0, i1] = d[i0, i1] / e
    return f
"""
    )


def test_warnings_of_rows_are_numpys():
    f = md.jit(lambda x: np.log(x - np.min(x, -1, keepdims=True)) * 2.0)
    with pytest.warns(RuntimeWarning, match="divide by zero encountered in log"):
        f(example((20, 100), float))
