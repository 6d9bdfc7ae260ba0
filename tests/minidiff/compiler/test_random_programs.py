"""Random programs of elements, reads, updates, constants and loops: compiled, they give what they give eagerly."""

import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import buffers, kernels

FLOATS, INTEGERS = ("f4", "f8"), ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
DTYPES = (*FLOATS, *INTEGERS, "?", "f2", "F", "D")
SHAPES = [(), (1,), (3,), (3, 4), (3, 1), (1, 4), (1, 7), (2, 30), (2, 3, 4), (0, 3), (2, 0)]
NUMBERS = [0, 1, -1, 2, 3, 200, True, 0.0, -0.0, 1.0, -1.0, 0.1, -1.5, 1e-30, 1e30, 1e-300, 1e300, 5e-324]
NUMBERS += [math.inf, -math.inf, math.nan, 1j, complex(-0.0, 0.0), complex(0.0, -0.0)]

#: Operations of a value, another value, and a small number.
READS: dict[str, Callable] = {
    "roll": lambda x, y, k: np.roll(x, (k, 1), (0, -1)),
    "slice": lambda x, y, k: x[k % 3 :],
    "stride": lambda x, y, k: x[..., :: (2, -1, 3)[k % 3]],
    "pad": lambda x, y, k: np.pad(x, [(k % 3, k % 2)] * x.ndim),
    "concatenate": lambda x, y, k: np.concatenate([x, y, x], k % 2),
    "flip": lambda x, y, k: x[::-1],
    "reshape": lambda x, y, k: np.ravel(x).reshape(1, -1),
    "transpose": lambda x, y, k: np.transpose(x),
    "broadcast": lambda x, y, k: np.broadcast_to(x, np.broadcast_shapes(np.shape(x), np.shape(y))),
}
UPDATES: dict[str, Callable] = {
    "set": lambda x, y, k: np.at(x)[k % len(x)].set(y[0]),
    "set to another row": lambda x, y, k: np.at(x)[k % len(x)].set(x[(k + 1) % len(x)]),
    "add to a part": lambda x, y, k: np.at(x)[k % 3 :].add(y[: len(x) - k % 3]),
    "add to rows": lambda x, y, k: np.at(x)[numpy.array([k % len(x), 0, k % len(x)])].add(y[:3]),
}
UNARY = ("negative", "absolute", "square", "sign", "floor", "ceil", "trunc", "rint", "isnan", "isfinite", "isinf")
UNARY += ("logical_not", "fabs", "invert", "copy", "positive")
BINARY = ("add", "subtract", "multiply", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
BINARY += ("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor")
#: Of two zeros, maxima give either; other operations tell them apart. A program has the ones or the others.
EXTREMA, SIGNS = ("maximum", "minimum", "fmax", "fmin"), ("divide", "copysign", "true_divide")


def elementwise(unary: tuple, binary: tuple) -> dict[str, Callable]:
    """These operations, also beside a number."""
    of_one, of_two = ([(name, getattr(np, name)) for name in names] for names in (unary, binary))
    return {
        **{name: lambda x, y, k, f=f: f(x) for name, f in of_one},
        **{name: lambda x, y, k, f=f: f(x, y) for name, f in of_two},
        **{f"{name} a number": lambda x, y, k, f=f: f(x, NUMBERS[k]) for name, f in of_two[:8]},
        **{f"a number {name}": lambda x, y, k, f=f: f(NUMBERS[k], x) for name, f in of_two[:8]},
    }


EXACT: dict[str, Callable] = {
    **elementwise(UNARY, BINARY),
    "where": lambda x, y, k: np.where(x, y, x),
    "astype": lambda x, y, k: x.astype(FLOATS[k % 2] if x.dtype.kind in "fc" else DTYPES[k % 10]),
    **READS,
    **UPDATES,
}
WITH_EXTREMA = EXACT | elementwise((), EXTREMA) | {"max": lambda x, y, k: np.max(x, axis=-1, keepdims=True)}
WITH_SIGNS = EXACT | elementwise(("reciprocal", "signbit", "sqrt"), SIGNS)
SMOOTH = elementwise(("tanh", "sin", "square", "arctan"), ("add", "subtract", "multiply", "hypot")) | READS | UPDATES


@st.composite
def arrays(draw: Any, dtypes: tuple = DTYPES, numbers: list = NUMBERS) -> list[numpy.ndarray]:
    """Arrays of special values, mostly of one shape and dtype, each in some layout."""
    shape, dtype, result = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(dtypes)), []
    for _ in range(draw(st.integers(2, 4))):
        values = draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=6))
        x = numpy.resize(numpy.array(values, complex), draw(st.sampled_from([shape, shape, shape, shape[1:], ()])))
        with numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", numpy.exceptions.ComplexWarning)
            x = x.astype(draw(st.sampled_from([dtype, dtype, dtype, *dtypes])))
        layouts = [x, numpy.asfortranarray(x), numpy.repeat(x, 2, -1)[..., ::2] if x.ndim else x]
        result.append(draw(st.sampled_from(layouts)))
    return result


def steps(operations: dict, most: int = 23) -> st.SearchStrategy:
    step = st.tuples(st.sampled_from([*operations]), st.integers(0, 3), st.integers(0, 3), st.integers(0, most))
    return st.lists(step, min_size=3, max_size=9)


def run(operations: dict, program: list, values: list) -> list:
    """The results of all steps."""
    values = [*values]
    for name, i, j, k in program:
        values.append(operations[name](values[-1 - i % len(values)], values[-1 - j % len(values)], k))
    return values[len(values) - len(program) :]


REFUSALS = (TypeError, ValueError, OverflowError, IndexError, ZeroDivisionError)


def allowed(operations: dict, program: list, values: list) -> tuple[list, list]:
    """The steps that NumPy computes, and those up to the last one that it refuses."""
    computed, refused = [], []
    for step in program:
        try:
            run(operations, [*computed, step], values)
            computed.append(step)
        except REFUSALS:
            refused = [*computed, step]
    return computed, refused


def jitted(f: Callable, *args: Any, **options: Any) -> list:
    """The results of kernels for arrays of any size, which write into memory of any size."""
    limits = dict.fromkeys(("MIN_ELEMENTS", "MIN_WORK", "MIN_COLUMNS"), 1)
    with mock.patch.multiple(kernels, **limits), mock.patch.object(buffers, "REUSED_BYTES", 0):
        return md.tree.leaves(md.jit(f, **options)(*args))


def check_bits(actual: Any, expected: Any) -> None:
    """Check that types and bits agree, except for the kind of a NaN."""
    assert md.typeof(actual) == md.typeof(expected)
    for part in (numpy.real, numpy.imag):
        a, e = part(numpy.asarray(actual)), part(numpy.asarray(expected))
        numpy.testing.assert_array_equal(a, e)
        numpy.testing.assert_array_equal(numpy.signbit(a) | numpy.isnan(a), numpy.signbit(e) | numpy.isnan(e))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.data(), arrays(), st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_exact_programs_have_the_same_bits(data, xs, has_extrema):
    operations, (constant, *xs) = WITH_EXTREMA if has_extrema else WITH_SIGNS, xs
    program, refused = allowed(operations, data.draw(steps(operations)), [*xs, constant])
    f = lambda *xs: run(operations, program, [*xs, constant])  # noqa: E731
    before = [x.copy() for x in xs]
    for options in ({}, {"kernels": False}):
        for actual, expected in zip(jitted(f, *xs, **options), md.tree.leaves(f(*xs)), strict=True):
            check_bits(actual, expected) if not has_extrema else numpy.testing.assert_array_equal(actual, expected)
    for x, y in zip(xs, before):
        check_bits(x, y)
    if refused:
        with pytest.raises(REFUSALS):
            jitted(lambda *xs: run(operations, refused, [*xs, constant]), *xs)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(steps(SMOOTH, 12), arrays(("f8",), [0.3, -1.5, 2.0, 0.0]))
def test_smooth_programs_and_their_gradients(program, xs):
    program, _ = allowed(SMOOTH, program, xs)

    def total(*xs):
        # Of arctan, since values may be large: the derivative of sin would then be that of their last digits.
        return sum([np.sum(np.arctan(v)) for v in run(SMOOTH, program, [*xs])], xs[0].sum())

    def loop(*xs):
        return md.fori_loop(0, 3, lambda i, c: [*c, *run(SMOOTH, program, c)][-len(c) :], [*xs])

    functions = [total, md.grad(total, argnums=tuple(range(len(xs))))]
    if [v.shape for v in [*xs, *run(SMOOTH, program, xs)][-len(xs) :]] == [x.shape for x in xs]:
        functions.append(loop)
    for f in functions:
        expected = md.tree.leaves(md.jit(f, kernels=False)(*xs))
        for actual, wanted in zip(jitted(f, *xs), expected, strict=True):
            scale = max(1.0, numpy.max(numpy.abs(wanted), initial=0.0))
            numpy.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-12 * scale)
