"""Impossible requests are refused by every transformation, wherever a value enters.

docs/errors.md has the texts of the errors, each with what to write instead; it runs as a test. Here a fragment tells
one from another.
"""

import copy
import math
import operator
import pickle
import re
import traceback

import numpy
import pytest

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.of_collectives import STORED, check_stored
from tests.checks.samples import each

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
X = numpy.array([1.0, 2.0, 3.0])
I = numpy.arange(3)  # noqa: E741


def on_ranks(f, specs=P("i")):
    return spmd.shard_map(lambda x: f(x[0])[None], mesh=MESH, in_specs=P("i"), out_specs=specs)


#: f of a vector, run by each transformation.
RUN = {
    "grad": lambda f: md.grad(f)(X),
    "vjp": lambda f: md.vjp(f, X),
    "jvp": lambda f: md.jvp(f, (X,), (X,)),
    "linearize": lambda f: md.linearize(f, X),
    "jacrev": lambda f: md.jacrev(f)(X),
    "grad of grad": lambda f: md.grad(lambda x: md.grad(f)(x).sum())(X),
    "vmap": lambda f: md.vmap(f)(numpy.stack([X, X])),
    "make_tape": lambda f: md.make_tape(f)(X),
    "jit": lambda f: md.jit(f)(X),
    "checkpoint": lambda f: md.grad(md.checkpoint(f))(X),
    "shard_map": lambda f: on_ranks(f)(numpy.stack([X, X])),
}
KNOWN = ("grad", "vjp", "jvp", "linearize", "jacrev", "grad of grad", "checkpoint")  # there is a value behind

# ---------------------------------------------------------------- shapes

M = numpy.ones((4, 2))
SHAPES = {
    "operator": (lambda x: x * numpy.ones(4), "multiply", "3", "4"),
    "operator, the other way": (lambda x: numpy.ones(4) - x, "subtract", "4", "3"),
    "function": (lambda x: np.arctan2(x, numpy.ones((2, 4))), "arctan2", "3", "2, ?4"),
    "comparison": (lambda x: np.where(x > numpy.ones(4), x, 0), "greater", "3", "4"),
    "maximum": (lambda x: np.maximum(x, numpy.ones(4)), "maximum", "3", "4"),
    "clip": (lambda x: np.clip(x, numpy.zeros(4), None), "maximum", "3", "4"),
    "list": (lambda x: operator.add(x, [1.0, 2.0]), "add", "3", "2"),
    "@": (lambda x: x @ M, "matmul", "3", "4,2"),
    "dot": (lambda x: np.dot(x, M), "matmul", "3", "4,2"),
    "inner": (lambda x: np.inner(x, M), "inner", "3", "4,2"),
    "einsum": (lambda x: np.einsum("i,ij->j", x, M), "einsum", "3,", "4, 2"),
    "tensordot": (lambda x: np.tensordot(x, M, 1), "tensordot", "3", "4,2"),
    "concatenate": (lambda x: np.concatenate([x, M]), "concatenate", "3,", "4, 2"),
    "stack": (lambda x: np.stack([x, numpy.ones(4)]), "stack", "3,", "4,"),
    "where": (lambda x: np.where(numpy.array([True, False]), x, 0.0), "where", "2", "3"),
    "solve": (lambda x: np.linalg.solve(numpy.eye(4), x), "solve", "4,4", "3"),
    "set": (lambda x: x.at[:2].set(numpy.ones(3)), r"at\[...\].set", "3", "2"),
    "add": (lambda x: x.at[[0, 1]].add(numpy.ones(3)), r"at\[...\].add", "3", "2"),
    "broadcast_to": (lambda x: np.broadcast_to(x, (2, 4)), "broadcast_to", "3", "2, 4"),
    "reshape": (lambda x: x.reshape(2, 2), "reshape", "3", "2, 2"),
}


@each("transformation", ["grad", "grad of grad", "jvp", "vmap", "make_tape", "checkpoint", "shard_map"])
@each("name", SHAPES)
def test_shapes_that_do_not_fit(name, transformation):
    """The error names the operation and both shapes: those of the values that the function sees."""
    f, operation, *shapes = SHAPES[name]
    if name == "list" and transformation in ("vmap", "make_tape", "checkpoint", "shard_map"):
        return  # there a list is refused, or taken, by other rules
    with pytest.raises(ValueError, match=rf"(?s){operation}\b.*") as error:
        RUN[transformation](lambda x: f(x).sum())
    text = str(error.value).replace("[2,3]", "").replace("(2, 3)", "")
    for shape in shapes:
        assert re.search(rf"[\[( ]{shape}[\]),]", text), text


# ---------------------------------------------------------------- Python's own ways with a value

CONCRETE = {
    "if": (lambda x: x if x[0] > 0 else -x, "a Python condition"),
    "while": (lambda x: next(iter(())) if not x[0] > 0 else x, "a Python condition"),
    "and": (lambda x: x[0] > 0 and x[1] > 0, "a Python condition"),
    "in": (lambda x: x[0] in [5.0], "a Python condition"),
    "max": (lambda x: max(x[0], x[1]), "a Python condition"),
    "int": (lambda x: int(x[0]), "int()"),
    "range": (lambda x: range(x[0].astype(int)), "a size, an index of a list or range()"),
    "index of a list": (lambda x: [1, 2, 3, 4][x[0].astype(int)], "a size, an index of a list or range()"),
    "slice": (lambda x: x[: x[0].astype(int)], "a bound of a slice"),
    "float": (lambda x: float(x[0]), "float()"),
    "math": (lambda x: math.sin(x[0]), "float()"),
    "floor": (lambda x: math.floor(x[0]), "float()"),
    "complex": (lambda x: complex(x[0]), "complex()"),
    "item": (lambda x: x[0].item(), "item()"),
    "mask": (lambda x: x[x > 0], "a boolean mask"),
}


@each("transformation", ["make_tape", "jit", "vmap", "shard_map"])
@each("name", CONCRETE)
def test_what_needs_a_concrete_value(name, transformation):
    f, use = CONCRETE[name]
    needs = {"vmap": "needs one concrete value", "shard_map": "needs one value, but"}
    kind = md.VarianceError if transformation == "shard_map" else md.TracerError
    with pytest.raises(kind, match=re.escape(f"{use} {needs.get(transformation, 'needs a concrete value')}")):
        RUN[transformation](f)


@pytest.mark.parametrize("transformation", KNOWN)
def test_python_sees_the_values_under_a_derivative(transformation):
    def f(x):
        assert x[0] > 0 and x[0] in [1.0] and int(x[1]) == 2 and max(x[0], x[2]) == 3.0
        assert [10, 20][x[0].astype(int)] == 20 and list(range(x[1].astype(int))) == [0, 1]
        return (x if x[0] > 0 else -x).sum() * round(x[1])

    RUN[transformation](f)
    assert md.grad(f)(X)[0] == 2.0


@each("transformation", KNOWN)
@each("use", [float, math.sin, math.floor, complex, lambda x: x.item(), lambda x: x.tolist(), "%.2f".__mod__])
def test_what_would_lose_a_derivative(use, transformation):
    with pytest.raises(
        md.TracerError, match=r"would lose its derivative.*stop_gradient\(x\)\.item\(\).*instead of math\.sin, np\.sin"
    ):
        RUN[transformation](lambda x: use(x[0]))


@each("transformation", KNOWN)
def test_numbers_without_a_derivative_are_taken(transformation):
    """Those to print or to log, and those that are integers or booleans, whose derivative is zero."""

    def f(x):
        y = md.stop_gradient(x)
        assert (y[0].item(), y.tolist(), float(y[1]), complex(y[2])) == (1.0, [1.0, 2.0, 3.0], 2.0, 3 + 0j)
        assert (x > 1).tolist() == [False, True, True] and np.argmax(x).item() == 2
        return x.sum() * (x[1] > 0).item()

    RUN[transformation](f)


@pytest.mark.parametrize("transformation", RUN)
def test_what_works_on_every_traced_value(transformation):
    """Keys, members of sets, copies, printing in all ways."""

    def f(x):
        assert {x: 1}[x] == 1 and len({x, x}) == 1
        assert copy.copy(x) is x and copy.deepcopy({"x": [x]})["x"][0] is x
        assert all(isinstance(s, str) for s in (str(x), repr(x), f"{x}", f"{x[0]:.3f}", f"{x[0]:>12}", f"{x[0]!r}"))
        return x.sum()

    RUN[transformation](lambda x: np.stack([f(x)]) if transformation == "shard_map" else f(x))


@pytest.mark.parametrize("transformation", RUN)
def test_pickling(transformation):
    for dump in (pickle.dumps, lambda x: pickle.dumps({"x": [x]}, 0)):
        with pytest.raises(md.TracerError, match=r"a traced value \(f64\[3\].*\) cannot be pickled.*pickle the result"):
            RUN[transformation](dump)


# ---------------------------------------------------------------- writing


@each("transformation", RUN)
@each("write", [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow])
def test_in_place_operators_bind_the_name_anew(write, transformation):
    def f(x):
        y = x
        y = write(y, 2)
        assert y is not x
        return x.sum() + y.sum()

    RUN[transformation](lambda x: np.stack([f(x)]) if transformation == "shard_map" else f(x))


def _write(x):
    x[0] = 1.0


def _write_slice(x):
    x[:2] += 1.0


def _into_plain(x):
    numpy.zeros(3)[:] = x


def _into_plain_number(x):
    numpy.zeros(3)[0] = x[0]


def _into_plain_slice(x):
    numpy.zeros(3)[:2] = x[:2]


def _add_into_plain(x):
    numpy.zeros(3)[1:] += x[1:]


_ASSIGNED = r"y\[i\] = x cannot write a traced value x \(\w+\[\d?\]\S*\) into a plain"

WRITES = {
    "x[i] = v": (_write, "cannot be written into"),
    "x[i] += v": (_write_slice, "cannot be written into"),
    "a[:] = x": (_into_plain, _ASSIGNED),
    "a[:2] = x[:2]": (_into_plain_slice, _ASSIGNED),
    "a[i] += x": (_add_into_plain, r"np\.add cannot write"),
    "out=": (lambda x: np.add(x, x, out=numpy.zeros(3)), r"np\.add cannot write"),
    "out=(a,)": (lambda x: np.sin(x, out=(numpy.zeros(3),)), r"np\.sin cannot write"),
    "out= of a reduction": (lambda x: np.sum(x, out=numpy.zeros(())), r"np\.sum cannot write"),
    "a += x": (lambda x: operator.iadd(numpy.zeros(3), x), r"np\.add cannot write .*a = a \+ x"),
    "fill": (lambda x: x.fill(0.0), r"x\.fill\(\) would write"),
    "sort": (lambda x: x.sort(), r"x\.sort\(\) would write.*np\.sort"),
    "np.add.at": (lambda x: np.add.at(x, [0], 1.0), r"np\.add\.at writes into"),
    "np.copyto": (lambda x: np.copyto(numpy.zeros(3), x), r"np\.copyto is not supported"),
}


@each("transformation", ["grad", "vmap", "jit", "make_tape", "checkpoint", "shard_map"])
@each("name", WRITES)
def test_writing(name, transformation):
    f, message = WRITES[name]
    with pytest.raises(md.TracerError if message == _ASSIGNED else TypeError, match=message):
        RUN[transformation](f)


@pytest.mark.parametrize("dtype", [float, int, bool, complex, "f4"])
@pytest.mark.parametrize("transformation", ["grad", "vmap", "jit", "make_tape", "checkpoint", "shard_map"])
def test_writing_a_number_into_a_plain_array(transformation, dtype):
    """NumPy's own error says nothing of it: it gets the message of its cause."""

    def write(x):
        numpy.zeros(3, dtype)[0] = x[0] > 1 if dtype is bool else x[0].astype(int) if dtype is int else x[0]
        return x.sum()

    if dtype in (int, bool) and transformation in ("grad", "checkpoint"):
        RUN[transformation](write)  # no derivative is lost
        return
    with pytest.raises((ValueError, md.TracerError)) as error:
        RUN[transformation](write)
    assert re.search(_ASSIGNED, str(error.value))
    shown = "".join(traceback.format_exception(error.value))
    assert "sequence" not in shown and "numpy.zeros(3, dtype)[0] = " in shown, shown


# ---------------------------------------------------------------- functions and arguments that are not supported

UNSUPPORTED = {
    "frompyfunc": (lambda x: numpy.frompyfunc(lambda t: t, 1, 1)(x), "is not supported on traced values"),
    "where=": (lambda x: np.exp(x, where=X > 1), "does not take where="),
    "unknown keyword": (lambda x: np.sum(x, axiss=0), "unexpected keyword argument 'axiss'"),
    "unknown keyword of a method": (lambda x: x.sum(axiss=0), r"^sum\(\) got an unexpected keyword argument 'axiss'"),
    "text": (lambda x: x + "a", "got str: 'a'"),
    "None": (lambda x: x * None, "expected an array or a number, got NoneType: None.*return the value"),
    "view": (lambda x: x.view(int), r"x\.view\(\) would read the bytes"),
}


@each("transformation", ["grad", "vmap", "jit"])
@each("name", UNSUPPORTED)
def test_what_is_not_supported(name, transformation):
    f, message = UNSUPPORTED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        RUN[transformation](f)


# ---------------------------------------------------------------- derivatives that do not exist

total = lambda x: (x * 1.0).sum()  # noqa: E731
as_int = lambda x: x.astype(int)  # noqa: E731
square = lambda z: z * z  # noqa: E731
COMPLEX = "pass holomorphic=True if the function is holomorphic"

#: Errors of texts that docs/errors.md has, in further calls: a fragment, the error, and the calls that have both.
REFUSED = [
    ("argument 0 of <lambda> has type bool[]; only", TypeError, [lambda: md.grad(total)(True)]),
    ("jacrev: argument 0 of <lambda> has type i64[3]", TypeError, [lambda: md.jacrev(total)(I)]),
    ("argument 0 of <lambda> has type i64[3], but only", TypeError, [lambda: md.hessian(total)(I)]),
    (
        "primals[0] has type i64[3], which carries no derivative",
        TypeError,
        [lambda: md.hvp(total, (I,), (I,)), lambda: md.linearize(total, I)[1](I)],
    ),
    ("got bool[]; integers and booleans carry", TypeError, [lambda: md.grad(lambda x: (x > 0).all())(X)]),
    (
        "the result of <lambda> has type i64[3], but only",
        TypeError,
        [lambda: md.jacrev(as_int)(X), lambda: md.hessian(as_int)(X)],
    ),
    ("has type f64[3], but its cotangent ct has type i64[3]", TypeError, [lambda: md.vjp(lambda x: x, X)[1](I)]),
    (f"jacrev: the result of <lambda> has type c128[3]; {COMPLEX}", TypeError, [lambda: md.jacrev(square)(X * 1j)]),
    (f"c128[]; {COMPLEX}", TypeError, [lambda: md.hessian(lambda z: square(z).sum())(X * 1j)]),
    ("jacfwd: argument 1 of <lambda>: expected", TypeError, [lambda: md.jacfwd(lambda x, y: x, (0, 1))(1.0, "a")]),
    ("grad of <lambda>: the result: expected", TypeError, [lambda: md.grad(lambda x: "a")(X)]),
    ("grad takes a function, got float64: write grad(f)(x), not grad(f(x))", TypeError, [lambda: md.grad(np.sin(1.0))]),
    ("jacrev takes a function, got float: write jacrev(f)(x), not", TypeError, [lambda: md.jacrev(3.0)]),
    ("jacfwd takes a function, got float: write jacfwd(f)(x), not", TypeError, [lambda: md.jacfwd(3.0)]),
    ("hessian takes a function, got float: write hessian(f)(x), not", TypeError, [lambda: md.hessian(3.0)]),
    ("value_and_grad takes a function, got float: write", TypeError, [lambda: md.value_and_grad(3.0)]),
    ("jvp takes a function, got float: write jvp(f, (x,), (t,)), not", TypeError, [lambda: md.jvp(3.0, (X,), (X,))]),
    ("hvp takes a function, got float: write hvp(f, (x,), (t,)), not", TypeError, [lambda: md.hvp(3.0, (X,), (X,))]),
    ("vjp takes a function, got float: write vjp(f, x), not vjp(f(x))", TypeError, [lambda: md.vjp(3.0, X)]),
    ("linearize takes a function, got float: write", TypeError, [lambda: md.linearize(3.0, X)]),
    ("must return one scalar, got None; is a `return` missing?", TypeError, [lambda: md.grad(lambda x: None)(1.0)]),
    ("to pass all of an argument to each call, write None", ValueError, [lambda: md.vmap(lambda x, y: x)(X, X[:2])]),
    ("jacrev: argnums names argument 3", TypeError, [lambda: md.jacrev(total, 3)(X)]),
    ("jacfwd: argnums must be an int or a tuple of ints, got 0.5", TypeError, [lambda: md.jacfwd(total, 0.5)(X)]),
    ("differ in structure: ([*],) and ((*,),)", TypeError, [lambda: md.jvp(total, ([X],), ((X,),))]),
    ("has the structure None, but the result has *", TypeError, [lambda: md.vjp(lambda x: x, X)[1](None)]),
    ("hvp: primals and tangents must be tuples", TypeError, [lambda: md.hvp(total, X, X)]),
    ("not hashable: {1: [1]}", TypeError, [lambda: md.jit(lambda x, n: x, static_argnums=1)(X, [1])]),
    ("out_axes has 3 entries for 2 values", ValueError, [lambda: md.vmap(lambda x: (x, x), out_axes=(0,) * 3)(X)]),
    (
        "dimensions (args[0]: f64[]); to pass all of it to each call, write None",
        ValueError,
        [lambda: md.vmap(lambda x: x)(1.0)],
    ),
]


@pytest.mark.parametrize("fragment, kind, calls", REFUSED, ids=[fragment for fragment, *_ in REFUSED])
def test_other_calls_are_refused_in_the_same_words(fragment, kind, calls):
    for call in calls:
        with pytest.raises(kind, match=re.escape(fragment)):
            call()


def test_argnums_may_be_negative_and_of_numpy():
    for argnums in (-1, 1, numpy.int64(1)):
        numpy.testing.assert_array_equal(md.grad(np.dot, argnums)(X, 2 * X), X)
        numpy.testing.assert_array_equal(md.jacfwd(np.dot, argnums)(X, 2 * X), X)
    assert len(md.grad(np.dot, [0, -1])(X, X)) == 2


# ---------------------------------------------------------------- values that are not plain arrays


class Table:
    """A class with the interface of a pandas Series or an xarray DataArray."""

    shape, dtype, ndim, size = (3,), numpy.dtype(float), 1, 3

    def to_numpy(self):
        return X

    def __array__(self, dtype=None, copy=None):
        return X


class Sparse:
    """A class like SciPy's sparse matrices: NumPy makes an array of one object of it."""

    shape, dtype, ndim = (3,), numpy.dtype(float), 1

    def toarray(self):
        return X


class Foreign:
    """An object that NumPy converts, and that is not an array."""

    def __array__(self, dtype=None, copy=None):
        return X


class WithUnit(numpy.ndarray):
    """A subclass of arrays, which may mean more than its numbers."""


#: Values, and what the error says of them.
NOT_PLAIN = {
    "masked": (numpy.ma.masked_array(X, [0, 0, 1]), r"got MaskedArray: .*x\.filled\(value\)"),
    "matrix": (numpy.matrix(X), r"got matrix: write numpy\.asarray\(x\)"),
    "subclass": (X.view(WithUnit), r"got WithUnit: write numpy\.asarray\(x\)"),
    "recarray": (numpy.rec.array([(1.0, 2)] * 3, [("a", float), ("b", int)]), r"got one of dtype .*x\['a'\]"),
    "structured": (numpy.zeros(3, [("a", float)]), r"got one of dtype .*x\['a'\]"),
    "dates": (
        numpy.array(["2024-02-29"] * 3, "M8[D]"),
        r"dtype datetime64\[D\]: .*\(x - x\[0\]\) / numpy\.tim",
    ),
    "a date": (numpy.datetime64("2024-02-29"), r"dtype datetime64\[D\]"),
    "durations": (numpy.arange(3).astype("m8[s]"), r"dtype timedelta64\[s\]: .*x / numpy\.timedelta64"),
    "text": (numpy.array(["a", "b", "c"]), r"dtype <U[0-9]+: .*x\.astype\(float\)"),
    "bytes": (numpy.array([b"a", b"b", b"c"]), r"dtype \|S[0-9]+: .*x\.astype\(float\)"),
    "objects": (numpy.array([None, 1.0, 2.0]), r"dtype object: .*x\.astype\(float\)"),
    "table": (Table(), r"got Table: write x\.to_numpy\(\)"),
    "sparse": (Sparse(), r"got Sparse: write x\.toarray\(\)"),
    "foreign": (Foreign(), r"got Foreign: write numpy\.asarray\(x\)"),
    "large": (10**30, "of more than 64 bits"),
}

double = md.custom_vjp(lambda x: 2.0 * x)
double.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (2.0 * ct,))
triple = md.custom_jvp(lambda x: 3.0 * x)
triple.defjvp(lambda primals, tangents: (3.0 * primals[0], 3.0 * tangents[0]))


def in_a_body(f, specs=P()):
    return spmd.shard_map(lambda x: f(), mesh=MESH, in_specs=P(), out_specs=specs)(X)


#: Where values enter, as an argument, a result, or what a collective or a derivative is applied to.
ENTRANCES = {
    "grad": lambda v: md.grad(total)(v),
    "grad, in a tree": lambda v: md.grad(lambda p: p["a"][0].sum())({"a": [v]}),
    "vjp": lambda v: md.vjp(total, v),
    "jvp": lambda v: md.jvp(total, (v,), (v,)),
    "tangent": lambda v: md.jvp(total, (X,), (v,)),
    "linearize": lambda v: md.linearize(total, v),
    "tangent of linearize": lambda v: md.linearize(total, X)[1](v),
    "cotangent": lambda v: md.vjp(np.sin, X)[1](v),
    "jacrev": lambda v: md.jacrev(total)(v),
    "hvp": lambda v: md.hvp(total, (X,), (v,)),
    "vmap": lambda v: md.vmap(np.sin)(v),
    "jit": lambda v: md.jit(total)(v),
    "make_tape": lambda v: md.make_tape(total)(v),
    "checkpoint": lambda v: md.checkpoint(total)(v),
    "scan": lambda v: md.scan(lambda c, x: (c, x), 0.0, v),
    "carry": lambda v: md.scan(lambda c, x: (c, x), v, X),
    "fori_loop": lambda v: md.fori_loop(0, 2, lambda i, c: c, v),
    "while_loop": lambda v: md.while_loop(lambda c: False, lambda c: c, v),
    "cond": lambda v: md.cond(True, total, total, v),
    "pred": lambda v: md.cond(v, lambda: 1.0, lambda: 2.0),
    "switch": lambda v: md.switch(0, [total], v),
    "custom_vjp": lambda v: double(v),
    "custom_jvp": lambda v: triple(v),
    "stop_gradient": lambda v: md.stop_gradient(v),
    "linear_transpose": lambda v: md.linear_transpose(lambda x: 2.0 * x, X)(v),
    "result of vjp": lambda v: md.vjp(lambda x: v, X),
    "result of jit": lambda v: md.jit(lambda x: v)(X),
    "result of vmap": lambda v: md.vmap(lambda x: v)(X),
    "result of a step": lambda v: md.scan(lambda c, x: (c, v), 0.0, X),
    "result of checkpoint": lambda v: md.checkpoint(lambda x: v)(X),
    "shard_map": lambda v: spmd.shard_map(total, mesh=MESH, in_specs=P(), out_specs=P())(v),
    "result of shard_map": lambda v: in_a_body(lambda: v),
    "distribute": lambda v: spmd.distribute(v, MESH, P()),
    "reshard": lambda v: spmd.reshard(v, P()),
    "psum": lambda v: in_a_body(lambda: collectives.psum(v, "i")),
    "pmax": lambda v: in_a_body(lambda: collectives.pmax(v, "i")),
    "all_gather": lambda v: in_a_body(lambda: collectives.all_gather(v, "i"), P("i")),
    "ppermute": lambda v: in_a_body(lambda: collectives.ppermute(v, "i", [(0, 1)]), P("i")),
    "collective of vmap": lambda v: md.vmap(lambda x: collectives.psum(v, "i"), axis_name="i")(X),
    "array": lambda v: md.grad(lambda x: np.array([x, v]).sum())(X),
    "softmax": lambda v: md.nn.softmax(v),
}

#: What a traced value meets.
MEETINGS = {
    "*": lambda x, v: x * v,
    "@": lambda x, v: x @ v,
    "function": lambda x, v: np.arctan2(x, v),
    "list": lambda x, v: np.stack([x, v]),
    "einsum": lambda x, v: np.einsum("i,i->i", x, v),
    "where": lambda x, v: np.where(x > 1, x, v),
    "at": lambda x, v: x.at[:].set(v),
}


@each("entrance", ENTRANCES)
def test_values_that_are_not_plain_are_refused(entrance):
    for value, (x, message) in NOT_PLAIN.items():
        if (entrance, value) != ("array", "large"):  # numbers stand beside arrays in no list
            with pytest.raises(TypeError, match=f"expected an array (of numbers|or a number), .*{message}"):
                ENTRANCES[entrance](x)


class Settings:
    """No array, and no node of a tree."""

    def __repr__(self):
        return "Settings(a=1)"


#: Where values enter that are no leaves of trees.
NO_TREES = ("array", "softmax", "pred")


@each("entrance", [e for e in ENTRANCES if e not in NO_TREES])
def test_values_of_unknown_classes_say_what_trees_are_made_of(entrance):
    expected = re.escape(f"got Settings: Settings(a=1) (trees are made of {', '.join(md.tree.class_names())})")
    with pytest.raises(TypeError, match=expected):
        ENTRANCES[entrance](Settings())


def test_operands_of_unknown_classes_say_nothing_of_trees():
    with pytest.raises(TypeError, match=r"got Settings: Settings\(a=1\)$"):
        md.grad(lambda x: np.arctan2(x, Settings()).sum())(X)


#: A function of a vector, run as it is: what it returns is a result of that.
RESULTS = {
    "grad": lambda f: md.grad(f)(X),
    "value_and_grad": lambda f: md.value_and_grad(f)(X),
    "vjp": lambda f: md.vjp(f, X),
    "jvp": lambda f: md.jvp(f, (X,), (X,)),
    "linearize": lambda f: md.linearize(f, X),
    "jacrev": lambda f: md.jacrev(f)(X),
    "jacfwd": lambda f: md.jacfwd(f)(X),
    "vmap": lambda f: md.vmap(f)(X),
    "make_tape": lambda f: md.make_tape(f)(X),
    "jit": lambda f: md.jit(f)(X),
    "checkpoint": lambda f: md.checkpoint(f)(X),
    "custom_jvp": lambda f: md.grad(with_rule(f))(X),
    "shard_map": lambda f: spmd.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P())(X),
}


def with_rule(f):
    f = md.custom_jvp(f)
    f.defjvp(lambda primals, tangents: (f(*primals), f(*tangents)))
    return f


STEPS = {
    "the step's result for init: ": lambda: md.scan(lambda c, x: ("a", x), 0.0, X),
    "scan of <lambda>: a step's y['y']: ": lambda: md.scan(lambda c, x: (c, {"y": "a"}), 0.0, X),
    "fori_loop: the step's result for init_val['c']: ": lambda: md.fori_loop(0, 2, lambda i, c: {"c": "a"}, {"c": 1.0}),
    "while_loop: the step's result for init_val: ": lambda: md.while_loop(lambda c: c < 1, lambda c: "a", 0.0),
}


@pytest.mark.parametrize("where", STEPS)
def test_a_result_of_a_step_that_is_not_an_array_is_named(where):
    for call in (STEPS[where], lambda: md.make_tape(STEPS[where])()):
        with pytest.raises(TypeError, match=re.escape(f"{where}expected an array or a number, got str: 'a'")):
            call()


@each("transformation", RESULTS)
def test_a_result_that_is_not_an_array_is_named(transformation):
    def step(x):
        return {"loss": x * 2, "log": [x, "done"]}

    if transformation in ("jit", "make_tape"):  # a string in a tree is a setting of the program
        return RESULTS[transformation](step)
    name = {"value_and_grad": "grad", "custom_jvp": "step", "checkpoint": "step"}.get(transformation, transformation)
    who = name if name == "step" else f"{name} of step"
    with pytest.raises(TypeError, match=rf"{who}: the result\['log'\]\[1\]: expected an array .* got str: 'done'"):
        RESULTS[transformation](step)


@each("meeting", MEETINGS)
@each("transformation", ["grad", "jvp", "vmap", "make_tape", "checkpoint", "shard_map"])
def test_traced_values_meet_no_values_that_are_not_plain(transformation, meeting):
    for value, (x, message) in NOT_PLAIN.items():
        if value != "large":  # a Python number promotes weakly
            with pytest.raises(TypeError, match=f"expected an array .*{message}"):
                RUN[transformation](lambda traced, x=x: MEETINGS[meeting](traced, x).sum())


@pytest.mark.parametrize("transformation", RUN)
def test_memory_maps_are_arrays(transformation, tmp_path):
    numpy.save(tmp_path / "x.npy", X)
    mapped = numpy.load(tmp_path / "x.npy", mmap_mode="r")
    assert type(mapped) is numpy.memmap

    def f(x):
        return (np.sin(x) * mapped).sum()

    expected = RUN[transformation](lambda x: np.stack([(np.sin(x) * X).sum()]).sum())
    actual = RUN[transformation](f)
    for a, b in zip(md.tree.leaves(actual), md.tree.leaves(expected)):
        assert transformation in ("make_tape", "vjp", "linearize") or numpy.array_equal(a, b)
    gradient = md.grad(lambda x: (x * x).sum())(mapped)
    assert type(gradient) is numpy.ndarray and numpy.array_equal(gradient, 2 * X)
    assert type(md.jit(lambda x: x)(mapped)) is numpy.ndarray


def test_other_byte_orders_and_layouts_are_arrays():
    packed = numpy.zeros(3, [("pad", "i1"), ("x", float)])["x"]
    packed[:] = X
    assert not packed.flags.aligned
    for x in (X.astype(X.dtype.newbyteorder("S")), packed, numpy.stack([X, X])[:, ::2][0], X[::-1][::-1]):
        numpy.testing.assert_array_equal(md.grad(lambda y, x=x: (y * x).sum())(numpy.ones_like(x)), x)
        numpy.testing.assert_array_equal(md.grad(total_of_squares)(x), 2 * x)


@pytest.mark.parametrize("kind", STORED)
def test_collectives_of_arrays_that_are_stored_in_other_ways(kind):
    check_stored(MESH, ("i",), kind)


def total_of_squares(x):
    return (x * x).sum()


def test_a_type_of_another_library_is_refused():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = X.astype(ml_dtypes.float8_e4m3fn)
    for run in (md.grad(total), md.jit(total), md.vmap(np.sin), lambda x: spmd.distribute(x, MESH, P())):
        with pytest.raises(TypeError, match=r"dtype float8_e4m3fn: convert it, as in x\.astype\(numpy\.float32\)"):
            run(x)


# ---------------------------------------------------------------- values that leaked

saved = []


def loss(x):
    saved.append(x)
    return x.sum()


def loss_of_number(s):
    saved.append(s)
    return s * s


class Holder:
    value = None


def by_attribute(x):
    Holder.value = x
    return x.sum()


def by_exception(x):
    error = KeyError("inside")
    error.value = x
    raise error


def step(carry, x):
    saved.append(carry)
    return carry, x


LEAKS = {
    "grad": ("grad of loss", lambda: md.grad(loss)(X)),
    "value_and_grad": ("grad of loss", lambda: md.value_and_grad(loss)(X)),
    "vjp": ("vjp of loss", lambda: md.vjp(loss, X)),
    "jvp": ("jvp of loss", lambda: md.jvp(loss, (X,), (X,))),
    "linearize": ("linearize of loss", lambda: md.linearize(loss, X)),
    "jacfwd": ("jacfwd of loss", lambda: md.jacfwd(loss)(X)),
    "jacrev": ("jacrev of loss", lambda: md.jacrev(loss)(X)),
    "vmap": ("vmap of loss", lambda: md.vmap(loss)(numpy.stack([X, X]))),
    "make_tape": ("make_tape of loss", lambda: md.make_tape(loss)(X)),
    "jit": ("jit of ", lambda: md.jit(loss)(X)),
    "checkpoint": ("checkpoint of loss", lambda: md.grad(md.checkpoint(loss))(X)),
    "checkpoint, forward": ("checkpoint of loss", lambda: md.jvp(md.checkpoint(loss), (X,), (X,))),
    "scan": ("scan of step", lambda: md.make_tape(lambda x: md.scan(step, x, x))(X)),
    "fori_loop": (
        "fori_loop of ",
        lambda: md.make_tape(lambda x: md.fori_loop(0, 3, lambda i, c: step(c, i)[0], x))(X),
    ),
    "cond": ("cond of loss", lambda: md.make_tape(lambda x: md.cond(x[0] > 0, loss, np.sum, x))(X)),
    "shard_map": (
        "shard_map of loss",
        lambda: spmd.shard_map(loss, mesh=MESH, in_specs=P(), out_specs=P())(X),
    ),
    "grad of shard_map": (
        r"grad of loss, in shard_map of loss",
        lambda: md.grad(spmd.shard_map(loss, mesh=MESH, in_specs=P(), out_specs=P()))(X),
    ),
    "grad, after an exception": ("grad of by_exception", lambda: saved.append(raised(md.grad(by_exception)))),
    "vmap, after an exception": ("vmap of by_exception", lambda: saved.append(raised(md.vmap(by_exception, 0)))),
    "a Python number": ("grad of loss_of_number", lambda: md.grad(loss_of_number)(2.0)),
    "an attribute": ("grad of by_attribute", lambda: md.grad(by_attribute)(X) is None or saved.append(Holder.value)),
}


def raised(f):
    with pytest.raises(KeyError) as error:
        f(X)
    return error.value.value


USES = {
    "operator": lambda t: t + 1.0,
    "operator, the other way": lambda t: X * t,
    "function": np.sin,
    "reduction": lambda t: t.sum(),
    "index": lambda t: t[..., 0],
    "iteration": list,
    "float": float,
    "if": bool,
    "item": lambda t: t.item(),
    "asarray": numpy.asarray,
    "debug.print": lambda t: md.debug.print("{}", t),
    "stack": lambda t: np.stack([t, t]),
    "einsum": lambda t: np.einsum("i->", t),
    "argument": lambda t: md.grad(total)(t),
    "closed over, grad": lambda t: md.grad(lambda y: (y * t).sum())(X),
    "closed over, vmap": lambda t: md.vmap(lambda y: y * t)(numpy.stack([X, X])),
    "closed over, jit": lambda t: md.jit(lambda y: y * t)(X),
    "closed over, shard_map": lambda t: spmd.shard_map(lambda y: y * t, mesh=MESH, in_specs=P(), out_specs=P())(X),
    "cond": lambda t: md.cond(t.any(), lambda: 1.0, lambda: 2.0),
}


@each("name", LEAKS)
def test_values_that_leaked_are_told_with_the_function(name):
    origin, run = LEAKS[name]
    saved.clear()
    run()
    leaked = saved[0]
    saved.clear()
    assert isinstance(str(leaked), str) and isinstance(repr(leaked), str) and isinstance(f"{leaked}", str)
    for use in USES.values():
        if name in ("vmap, after an exception", "a Python number") and use in (
            list,
            USES["index"],
            USES["iteration"],
            USES["einsum"],
        ):
            continue  # it is a number there, which has no elements
        with pytest.raises(md.LeakedTracerError, match=rf"traced value of type .* outside the .*\({origin}.*return it"):
            use(leaked)


# ---------------------------------------------------------------- where it was


def of_the_wrong_size(x):
    return np.reshape(x, (3, -1))


def of_the_programs_own(x):
    raise ValueError("no such thing")


#: f of a vector with four elements in each body, itself run by a transformation.
BODIES = {
    "shard_map": lambda f: spmd.shard_map(f, mesh=MESH, in_specs=P("i"), out_specs=P("i")),
    "checkpoint": md.checkpoint,
    "jit": md.jit,
    "scan": lambda f: lambda x: md.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: md.cond(x.sum() > 0, lambda: f(x), lambda: x),
    "shard_map of scan": lambda f: BODIES["shard_map"](BODIES["scan"](f)),
}


@each("wrong", [of_the_wrong_size, of_the_programs_own])
@each("outside", ["grad", "jvp", "vmap", "jit", "make_tape"])
@each("body", BODIES)
def test_the_line_in_the_body_is_in_the_traceback(body, outside, wrong):
    f, x = BODIES[body](wrong), numpy.ones(8 if "shard_map" in body else 4)
    runs = {
        "grad": lambda: md.grad(lambda x: f(x).sum())(x),
        "jvp": lambda: md.jvp(f, (x,), (x,)),
        "vmap": lambda: md.vmap(f)(x[None]),
        "jit": lambda: md.jit(f)(x),
        "make_tape": lambda: md.make_tape(f)(x),
    }
    with pytest.raises(ValueError, match=r"no such thing|do not fill the shape|cannot reshape") as actual:
        runs[outside]()
    assert wrong.__name__ in [entry.name for entry in actual.traceback]
    assert " of f64" not in str(actual.value)  # nothing is said of the operation around it
