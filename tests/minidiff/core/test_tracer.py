"""Python's own ways with a traced value, under every transformation; `docs/errors.md` has the texts of the errors."""

import copy
import functools
import math
import operator
import pickle
import re
import traceback

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from tests.checks.samples import each
from tests.checks.transformations import DERIVATIVES, OTHERS, TRANSFORMATIONS, on_copies

X = numpy.array([1.0, 2.0, 3.0])

SOME = ["grad", "vmap", "jit", "make_tape", "grad of checkpoint", "shard_map"]

# ---------------------------------------------------------------- what needs a value

CONCRETE = {
    "if": (lambda x: x if x[0] > 0 else -x, "a Python condition"),
    "int": (lambda x: int(x[0]), "int()"),
    "range": (lambda x: range(x[0].astype(int)), "a size, an index of a list or range()"),
    "slice": (lambda x: x[: x[0].astype(int)], "a bound of a slice"),
    "float": (lambda x: float(x[0]), "float()"),
    "item": (lambda x: x[0].item(), "item()"),
    "mask": (lambda x: x[x > 0], "a boolean mask"),
}


@each("transformation", OTHERS)
@each("name", CONCRETE)
def test_what_needs_a_concrete_value(name, transformation):
    f, use = CONCRETE[name]
    kind = md.VarianceError if transformation == "shard_map" else md.TracerError
    with pytest.raises(kind, match=re.escape(f"{use} needs ")):
        TRANSFORMATIONS[transformation](f, X)


@each("transformation", DERIVATIVES)
def test_python_sees_the_values_under_a_derivative(transformation):
    def f(x):
        assert x[0] > 0 and x[0] in [1.0] and int(x[1]) == 2 and max(x[0], x[2]) == 3.0
        assert [10, 20][x[0].astype(int)] == 20 and list(range(x[1].astype(int))) == [0, 1]
        return (x if x[0] > 0 else -x).sum() * round(x[1])

    TRANSFORMATIONS[transformation](f, X)
    assert md.grad(f)(X)[0] == 2.0


LOSING = [float, math.sin, math.floor, complex, numpy.float64, lambda x: x.item(), lambda x: x.tolist(), "%.2f".__mod__]


@each("transformation", DERIVATIVES)
@each("use", [*LOSING, lambda x: numpy.fromiter([x], float)])
def test_what_would_lose_a_derivative(use, transformation):
    with pytest.raises((md.TracerError, ValueError), match="derivative"):
        TRANSFORMATIONS[transformation](lambda x: use(x[0]), X)


@each("transformation", DERIVATIVES)
def test_numbers_without_a_derivative_are_taken(transformation):
    """Those to print or to log, and those that are integers or booleans, whose derivative is zero."""

    def f(x):
        y = md.stop_gradient(x)
        assert (y[0].item(), y.tolist(), float(y[1]), complex(y[2])) == (1.0, [1.0, 2.0, 3.0], 2.0, 3 + 0j)
        assert (x > 1).tolist() == [False, True, True] and np.argmax(x).item() == 2
        return x.sum() * (x[1] > 0).item()

    TRANSFORMATIONS[transformation](f, X)


# ---------------------------------------------------------------- what works on every traced value


@each("transformation", TRANSFORMATIONS)
def test_keys_members_copies_and_texts(transformation):
    def f(x):
        assert {x: 1}[x] == 1 and len({x, x}) == 1
        assert copy.copy(x) is x and copy.deepcopy({"x": [x]})["x"][0] is x
        assert all(isinstance(s, str) for s in (str(x), repr(x), f"{x}", f"{x[0]:.3f}", f"{x[0]:>12}", f"{x[0]!r}"))
        return x.sum()

    TRANSFORMATIONS[transformation](f, X)


@each("transformation", TRANSFORMATIONS)
@each("write", [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow])
def test_in_place_operators_bind_the_name_anew(write, transformation):
    def f(x):
        assert write(x, 2) is not x
        return x.sum()

    TRANSFORMATIONS[transformation](f, X)


@each("transformation", TRANSFORMATIONS)
def test_traced_values_cannot_be_pickled(transformation):
    with pytest.raises(md.TracerError):
        TRANSFORMATIONS[transformation](lambda x: pickle.dumps({"x": [x]}), X)


# ---------------------------------------------------------------- writing

INTO_PLAIN = [
    lambda x: operator.setitem(numpy.zeros(3), slice(None), x),
    lambda x: operator.setitem(numpy.zeros(3), slice(2), x[:2]),
]
INTO_OTHERS = [
    lambda x: operator.setitem(x, 0, 1.0),
    lambda x: operator.iadd(numpy.zeros(3)[1:], x[1:]),
    lambda x: np.add(x, x, out=numpy.zeros(3)),
    lambda x: np.sum(x, out=numpy.zeros(())),
    lambda x: x.fill(0.0),
    lambda x: x.sort(),
]


@each("transformation", SOME)
@each("write", [*INTO_PLAIN, *INTO_OTHERS])
def test_nothing_is_written_into_or_written_with(write, transformation):
    with pytest.raises(md.TracerError if write in INTO_PLAIN else TypeError):
        TRANSFORMATIONS[transformation](write, X)


@each("dtype", [float, int, bool, complex, "f4"])
@each("transformation", SOME)
def test_a_number_written_into_a_plain_array(transformation, dtype):
    """NumPy's own error says nothing of it: it gets the message of its cause."""

    def write(x):
        numpy.zeros(3, dtype)[0] = x[0] > 1 if dtype is bool else x[0].astype(int) if dtype is int else x[0]
        return x.sum()

    if dtype in (int, bool) and transformation in ("grad", "grad of checkpoint"):
        TRANSFORMATIONS[transformation](write, X)  # no derivative is lost
        return
    with pytest.raises((ValueError, md.TracerError), match="cannot write a traced value") as error:
        TRANSFORMATIONS[transformation](write, X)
    shown = "".join(traceback.format_exception(error.value))
    assert "sequence" not in shown and "numpy.zeros(3, dtype)[0] = " in shown, shown


# ---------------------------------------------------------------- values that leaked

saved = []


def leak(x, *_):
    saved.append(x)
    return x * 1.0


#: By the innermost transformation that is named.
LEAKS = {
    **{name: functools.partial(run, leak, X) for name, run in TRANSFORMATIONS.items()},
    "checkpoint": lambda: md.jvp(md.checkpoint(leak), (X,), (X,)),
    "scan": lambda: md.make_tape(lambda x: md.scan(lambda c, x: (leak(c), x), x, x))(X),
    "(grad of <lambda>, in shard_map": lambda: md.grad(lambda x: on_copies(leak)(x).sum())(X),
    "a number in grad": lambda: md.grad(leak)(2.0),
}
USES = {
    "operator": lambda t: t + 1.0,
    "function": np.sin,
    "float": float,
    "debug.print": lambda t: md.debug.print("{}", t),
    "argument": lambda t: md.grad(np.sum)(t),
    "closed over, jit": lambda t: md.jit(lambda y: y * t)(X),
    "closed over, shard_map": lambda t: on_copies(lambda y: y * t)(X),
    "cond": lambda t: md.cond(t.any(), lambda: 1.0, lambda: 2.0),
    "index": lambda t: t[..., 0],
    "iteration": list,
}


@each("name", LEAKS)
def test_values_that_leaked_are_told_with_the_function(name):
    saved.clear()
    LEAKS[name]()
    leaked = saved.pop(0)
    assert isinstance(str(leaked), str) and isinstance(repr(leaked), str) and isinstance(f"{leaked}", str)
    for use in [*USES.values()][: None if leaked.ndim else -2]:
        with pytest.raises(md.LeakedTracerError, match=rf"{re.escape(name.split(' ')[-1])} of [\w<]"):
            use(leaked)
