"""Python numbers promote weakly (NEP 50) in every transformation, as in NumPy; `python_numbers.md` shows results."""

import contextlib
import functools
import itertools
import operator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.compiler.program import rewrites
from minidiff.values.dtypes import float0
from spmd import P, make_mesh, shard_map
from tests.checks.samples import each

MESH = make_mesh((2,), ("i",), backend="simulated")
DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
NUMBERS = [True, False, 2, -3, 0, 2.5, -0.1, 1e5, 1.5 - 2j]

UNARY = [operator.neg, abs, operator.attrgetter("real"), np.sin, np.square, np.isnan]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.lt]
BINARY += [operator.eq, operator.and_, operator.or_, operator.xor, np.add, np.multiply, np.maximum, np.less]
CHOICE = lambda x, y: np.where(x != y, x, y)  # noqa: E731

leaves = st.sampled_from([lambda s, x: s, lambda s, x: x, *(lambda s, x, n=n: n for n in NUMBERS)])


def of(operation, *inner):
    return lambda s, x: operation(*[f(s, x) for f in inner])


def extended(inner):
    return st.builds(of, st.sampled_from(UNARY), inner) | st.builds(
        of, st.sampled_from([*BINARY, CHOICE]), inner, inner
    )


#: Functions of a number s and an array x.
functions = st.recursive(leaves, extended, max_leaves=5)


def tangent_of(x):
    x = np.asarray(x)
    return np.ones(x.shape, x.dtype if x.dtype.kind in "fc" else float0)[()]


def with_rules(f):
    """`f` with the derivative that it has."""
    g = md.custom_jvp(f)
    g.defjvp(lambda primals, tangents: md.jvp(f, primals, tangents))
    return g


def exact_jit(f):
    return md.jit(f, without=tuple(rewrites()))


def in_scan(f, s, x):
    return md.scan(lambda c, _: (c, f(s, x)), 0, length=2)[1][1]


def mapped(f, arguments=2):
    return shard_map(f, mesh=MESH, in_specs=(P(),) * arguments, out_specs=P())


#: By name: `f(s, x)`, computed under a transformation or several.
TRANSFORMED = {
    "jit": lambda f, s, x: exact_jit(f)(s, x),
    "make_tape": lambda f, s, x: md.make_tape(f)(s, x)(np.asarray(s)[()], x)[0],
    "checkpoint": lambda f, s, x: md.checkpoint(f)(s, x),
    "vmap": lambda f, s, x: md.vmap(f, (None, 0))(s, x[None])[0],
    "jvp": lambda f, s, x: md.jvp(with_rules(f), (s, x), (tangent_of(s), tangent_of(x)))[0],
    "vjp": lambda f, s, x: md.vjp(f, s, x)[0],
    "cond": lambda f, s, x: exact_jit(lambda p, s, x: md.cond(p, f, f, s, x))(True, s, x),
    "scan": in_scan,
    "fori_loop": lambda f, s, x: md.fori_loop(0, 1, lambda i, _: f(s, x), np.asarray(f(s, x))),
    "shard_map": lambda f, s, x: mapped(f)(s, x),
    "jit of scan": lambda f, s, x: exact_jit(lambda s, x: in_scan(f, s, x))(s, x),
    "vmap of jit": lambda f, s, x: md.vmap(md.jit(f), (None, 0))(s, x[None])[0],
    "vjp of jit": lambda f, s, x: md.vjp(md.jit(f), s, x)[0],
    "vjp of shard_map": lambda f, s, x: md.vjp(mapped(f), s, x)[0],
}


def same(actual, expected, name=""):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, NumPy {expected.dtype}"
    np.testing.assert_array_equal(actual, expected, err_msg=name)


def numpy_result(f, s, x):
    """Return NumPy's result; programs that it refuses are skipped."""
    try:
        out = f(s, x)
    except (TypeError, OverflowError, ZeroDivisionError):
        assume(False)
    assume(np.asarray(out).dtype != object)
    return out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=25, deadline=None)
@given(functions, st.sampled_from(NUMBERS), st.sampled_from(DTYPES), st.sampled_from([(2,), ()]))
def test_values_and_dtypes_are_those_of_numpy(f, s, dtype, shape):
    x = np.broadcast_to(np.asarray([3, 2], dtype)[: 2 if shape else 1].reshape(shape), shape).copy()
    expected = numpy_result(f, s, x)
    for name, transformed in TRANSFORMED.items():
        same(transformed(f, s, x), expected, name)
    assert np.asarray(md.jit(f)(s, x)).dtype == np.asarray(expected).dtype


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=20, deadline=None)
@given(functions, st.sampled_from([2.5, -0.1]), st.sampled_from(["f2", "f4", "f8"]))
def test_derivatives_have_the_dtypes_of_arguments_and_results(f, s, dtype):
    x = np.asarray([3, 2], dtype)
    out = np.asarray(numpy_result(f, s, x))
    assume(out.dtype.kind == "f")
    loss = lambda s, x: np.sum(f(s, x))  # noqa: E731
    for g in (f, with_rules(f), md.jit(f), md.checkpoint(f)):
        assert np.asarray(md.jvp(g, (s, x), (1.0, np.ones_like(x)))[1]).dtype == out.dtype
        ds, dx = md.vjp(g, s, x)[1](np.ones_like(out)[()])
        assert (ds.dtype, dx.dtype) == (np.float64, x.dtype)
    value, (ds, dx) = md.jit(md.value_and_grad(loss, (0, 1)))(s, x)
    assert (value.dtype, ds.dtype, dx.dtype) == (np.asarray(loss(s, x)).dtype, np.float64, x.dtype)


# ---------------------------------------------------------------- all functions

#: Exact numbers, so that values are compared to the bit.
PLAIN = [2, True, 2.0, 2j]
OF_EVERY_DTYPE = [np.full(2, 2 if dtype != "?" else 1, dtype) for dtype in [*DTYPES, "g"]]
OF_EVERY_DTYPE += [np.dtype(dtype).type(2) for dtype in ("i1", "u8", "f2", "f4", "f8", "c8")]
UFUNCS = sorted(
    {f for f in vars(np).values() if isinstance(f, np.ufunc) and f.signature is None and f.nin < 3}, key=str
)
EXACT = {"square", "add", "ldexp", "conjugate", "divide", "gcd", "lcm", "bitwise_and", "left_shift", "maximum"}
METHODS = {
    **{name: operator.methodcaller(name) for name in ("sum", "mean", "max", "argmax", "prod", "cumsum", "var", "std")},
    **{name: operator.methodcaller(name) for name in ("all", "argsort", "ravel", "copy", "conj", "conjugate", "round")},
    **{name: operator.attrgetter(name) for name in ("real", "imag", "T")},
    "clip": lambda x: x.clip(0, 1),
    "round()": round,
    "abs": abs,
    "squared": lambda x: x**2,
    "isfinite, squared": lambda x: np.isfinite(x) ** 2,
    "cov": np.cov,
    "geomspace": lambda x: np.geomspace(x, 2 * x, 2),
    "linspace": lambda x: np.linspace(x, 2 * x, 3),
    "quantile": lambda x: np.quantile(x, 0.5),
}


def compare_all(calls, exact=False):
    """Check the results of calls `(f, args)` under `jit` and `vjp`, one program of all that NumPy takes."""
    accepted = []
    for f, args in calls:
        with contextlib.suppress(TypeError, AttributeError, OverflowError, ZeroDivisionError):
            accepted.append((f, args, f(*args)))

    def program(*arguments):
        return [f(*args) for (f, _, _), args in zip(accepted, arguments, strict=True)]

    arguments = [args for _, args, _ in accepted]
    for way in (exact_jit(program), lambda *args: md.vjp(program, *args)[0]):
        for actual, (_, args, expected) in zip(way(*arguments), accepted, strict=True):
            for x, y in zip(*[z if isinstance(z, tuple) else [z] for z in (actual, expected)], strict=True):
                same(x, y, str(args)) if exact else same(np.zeros_like(x), np.zeros_like(y), str(args))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ufunc", UFUNCS, ids=lambda f: f.__name__)
def test_ufuncs_have_the_dtypes_of_numpy(ufunc):
    calls = [(ufunc, (x,)) for x in (*PLAIN, *OF_EVERY_DTYPE)]
    if ufunc.nin == 2:
        pairs = [*itertools.product(PLAIN, [*PLAIN, *OF_EVERY_DTYPE])]
        calls = [(ufunc, pair[:: (-1) ** k]) for k, pair in enumerate(pairs)]  # in one order, and the other
        calls += [(functools.partial(ufunc, x), (y,)) for x, y in pairs if np.ndim(y)]  # a constant
    with np.errstate(all="ignore"):
        compare_all(calls, exact=ufunc.__name__ in EXACT)


@pytest.mark.filterwarnings("ignore")
@each("name", METHODS)
def test_methods_have_the_dtypes_of_numpy(name):
    compare_all((METHODS[name], (x,)) for x in OF_EVERY_DTYPE)


# ---------------------------------------------------------------- examples

X = np.array([1.0, 2.0, 3.0], "f4")


#: Functions of a number and float32, and numbers to try: what begins as a Python number stays one until it meets them.
EXAMPLES = {
    "product": (lambda s, x: (s**2 - 1) * x, (0.1, 3, np.float64(2.0), True, 2**24 + 1)),
    "function": (lambda s, x: np.sin(s) * x, (0.1, 3)),
    "where": (lambda s, x: np.where(x > s, x, s), (0.1, 3, True, 2**24 + 1)),
    "an array as the condition": (lambda s, x: np.where(x, s, 1), (1e-9, -3)),
    "a number as the condition": (lambda s, x: np.where(s, x, 1), (1e-9, -3)),
    "an integer condition": (lambda s, x: np.where(x.astype("i8"), s, np.float32(3)), (1e-9, -3)),
    "a half": (lambda s, x: np.where(s * 1e-3, x.astype("f2"), s), (1e-9, -3)),
    "unsigned": (lambda s, x: np.where(x > 0, s, x.astype("u1")), (1e-9, -3)),
    "no element": (lambda s, x: np.where(x[:0] > 0, s, x[:0].astype("u2")), (1e-9, -3)),
    "clipped": (lambda s, x: np.clip(s, -1, x), (0.3,)),
    "a limit": (lambda s, x: np.clip(s, x, None), (0.3,)),
    "complex": (lambda s, x: np.float64(1) + (s + 2j) * np.float64(2) / np.float32(4) ** np.float64(2), (1.5,)),
    "selected": (lambda s, x: np.select([x > 5, x < 0], [s, x.astype("i1")], 1), (2,)),
}


@each("name", TRANSFORMED)
@each("f, numbers", EXAMPLES.values(), EXAMPLES)
def test_examples(name, f, numbers):
    for s in numbers:
        with contextlib.suppress(OverflowError):  # newer NumPys do not wrap -3 to an unsigned integer
            expected = f(s, X)
            same(TRANSFORMED[name](f, s, X), expected)


# ---------------------------------------------------------------- carries of loops


#: Steps from carries that begin as Python numbers: what they meet decides on their dtypes, in whichever step.
CARRIES = {
    "one after the other": (lambda c, x: (c[0] + x, c[1] + c[0], c[2] * 1.5 + c[1]), (0.0, 0, 1.0)),
    "a counter beside": (lambda c, x: (c[0] + 1, c[1] + x * c[0]), (0, 0.0)),
    "an integer becomes a float": (lambda c, x: (c[0] + 0.5, c[1] + c[0] * x), (0, 0)),
    "a float becomes complex": (lambda c, x: (c[0] + 1j, c[1] + c[0] * x), (0.0, 0)),
    "a constant": (lambda c, x: (0.5, c[1] + x * c[0]), (1.0, 0.0)),
    "another": (lambda c, x: (c[0] + x, c[1] + c[0]), (0.0, np.float64(0))),
    "a dict": (lambda c, x: {"a": c["a"] + c["b"], "b": c["b"] * x}, {"a": 0.0, "b": 1}),
    "in a branch": (lambda c, x: md.cond(x > 0.3, lambda c: c + np.float32(1), lambda c: 2 * c, c), 1),
    "functions": (lambda c, x: (np.maximum(c[0], x), np.where(x > 0.3, c[0], c[1])), (-1.0, 3)),
}
ROWS = np.arange(1, 6, dtype=np.float32) / 8


#: The loop of the steps from `init` over ROWS, which may be an argument of the loop.
SCANS = {
    "scan": lambda scan: scan(ROWS),
    "jit": lambda scan: md.jit(scan)(ROWS),
    "jvp": lambda scan: md.jvp(scan, (ROWS,), (ROWS,))[0],
    "vjp": lambda scan: md.vjp(scan, ROWS)[0],
    "vmap": lambda scan: md.tree.map(lambda y: y[1], md.vmap(scan)(np.stack([-ROWS, ROWS]))),
    "shard_map": lambda scan: md.tree.map(np.asarray, mapped(scan, 1)(ROWS)),
}


def loops_of(step, init):
    """The loop of these steps, by every route: functions without arguments that return the last carry."""
    scan = lambda rows, init=init, **options: md.scan(lambda c, x: (step(c, x), None), init, rows, **options)[0]  # noqa: E731
    indexed = lambda i, c: step(c, md.dynamic_index_in_dim(ROWS, i, keepdims=False))  # noqa: E731
    fori = lambda: md.fori_loop(0, 5, indexed, init)  # noqa: E731
    going, advance = lambda s: s[0] < 5, lambda s: (s[0] + 1, indexed(*s))
    repeat = lambda: md.while_loop(going, advance, (0, init))[1]  # noqa: E731
    of_init = lambda init: scan(ROWS, init)  # noqa: E731
    yield from (lambda run=run: run(scan) for run in SCANS.values())
    yield from (fori, md.jit(fori), repeat, md.jit(repeat), lambda: scan(ROWS, unroll=2))
    yield from (lambda: md.jit(of_init)(init), lambda: md.vjp(of_init, init)[0])


@each("name", CARRIES)
def test_carries_that_begin_as_python_numbers(name):
    """They end with the dtypes of a Python loop."""
    step, init = CARRIES[name]
    expected = init
    for x in ROWS:
        expected = step(expected, x)
    for loop in loops_of(step, init):
        for x, e in zip(md.tree.leaves(loop()), md.tree.leaves(expected), strict=True):
            assert np.asarray(x).dtype == np.asarray(e).dtype
            np.testing.assert_allclose(x, e, rtol=1e-6)
