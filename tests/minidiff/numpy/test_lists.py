"""Lists that hold traced values: arrays wherever NumPy takes a list."""

import functools
import operator

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from minidiff.core.tracer import NUMPY_FUNCTIONS
from minidiff.numpy.functions import public_callables
from tests.checks.samples import each
from tests.table import DISCRETE, TABLE

X = np.array([0.5, 2.0, -1.0, 3.0])
M = np.array([[2.0, 0.3], [0.3, 1.0]])
MASK = np.array([True, False, True, True])


def nested(x):
    """An array as nested lists of its elements."""
    return [nested(row) for row in x] if np.ndim(x) else x


def as_results(out):
    """The arrays and numbers of a result, which may be a named tuple of NumPy's."""
    return tuple(map(as_results, out)) if isinstance(out, (tuple, list)) else out + 0.0


def by_name(name):
    """The function of this name: `linalg.qr`, say."""
    return functools.reduce(getattr, name.split("."), mnp)


def calls(names, arguments):
    """A call of each function with the same arguments: of a list or an array `a`, a vector x and a matrix m."""
    return {
        name.split(".")[-1]: lambda a, x, m, name=name: by_name(name)(*arguments(a, x, m)) for name in names.split()
    }


#: Calls that the table of operations writes in another form, or has not: `a` is a list of traced values, or an array.
CALLS = {
    **calls(
        "nonzero flatnonzero argwhere unique unique_values unique_counts unique_all unique_inverse modf nansum nanmean "
        "nancumsum nancumprod nanprod nanmax nanmin nanargmax nanargmin nanvar nanstd nanmedian",
        lambda a, x, m: [a(x)],
    ),
    **calls("shape ndim size linalg.slogdet linalg.cholesky linalg.qr linalg.eigvalsh", lambda a, x, m: [a(m)]),
    **calls("tril_indices_from triu_indices_from diag_indices_from", lambda a, x, m: [mnp.array(a(m))]),
    **calls("union1d intersect1d setdiff1d setxor1d polydiv", lambda a, x, m: [a(x), a(x[:2])]),
    **calls("meshgrid ix_", lambda a, x, m: [a(x), a(x)]),
    **calls("vstack column_stack dstack", lambda a, x, m: [[a(x), a(x)]]),
    **calls("compress extract", lambda a, x, m: [MASK, a(x)]),
    "einsum": lambda a, x, m: mnp.einsum("ij,j->i", a(m), a(x[:2])),
    "einsum_path": lambda a, x, m: len(mnp.einsum_path("ij,j->i", a(m), a(x[:2]))),
    "choose": lambda a, x, m: mnp.choose(np.array([0, 1, 0, 0]), [a(x), a(2 * x)]),
    "reshape": lambda a, x, m: mnp.reshape(a(x), (2, 2)),
    "broadcast_arrays": lambda a, x, m: mnp.broadcast_arrays(a(x), a(x[0])),
    "concatenate": lambda a, x, m: mnp.concatenate([a(x), a(x[:2]), [1.0]]),
    "stack": lambda a, x, m: mnp.stack([a(x), a(x)], axis=1),
    "hstack": lambda a, x, m: mnp.hstack([a(x), a(x[:1])]),
    "block": lambda a, x, m: mnp.block([[x, 2 * x], [x, x]]),
    "array_split": lambda a, x, m: mnp.array_split(a(x), 3),
    "bincount": lambda a, x, m: mnp.bincount(np.array([0, 1, 1, 3]), a(x)),
    "nanquantile": lambda a, x, m: mnp.nanquantile(a(x), [0.25, 0.5]),
    "nanpercentile": lambda a, x, m: mnp.nanpercentile(a(x), a(np.abs(x))),
    "divmod": lambda a, x, m: mnp.divmod(a(x), a(3 * x)),
    "frexp": lambda a, x, m: mnp.frexp(a(x))[0],
    "select": lambda a, x, m: mnp.select([MASK, ~MASK], [a(x), a(2 * x)], 0.0),
    "piecewise": lambda a, x, m: mnp.piecewise(a(x), [MASK], [np.sin, np.cos]),
    "astype": lambda a, x, m: mnp.astype(mnp.array(a(x)), np.float32),
    "result_type": lambda a, x, m: np.zeros(1, mnp.result_type(*x, np.float32(1))),
    "can_cast": lambda a, x, m: mnp.can_cast(x.dtype, float),
    "min_scalar_type": lambda a, x, m: np.zeros(1, mnp.min_scalar_type(a(x))),
    "common_type": lambda a, x, m: np.zeros(1, mnp.common_type(x)),
    "multi_dot": lambda a, x, m: mnp.linalg.multi_dot([a(m), a(m), a(m)]),
    "lstsq": lambda a, x, m: mnp.linalg.lstsq(a(m), a(x[:2]), rcond=None)[0],
    "tensorinv": lambda a, x, m: mnp.linalg.tensorinv(a(m), 1),
    "tensorsolve": lambda a, x, m: mnp.linalg.tensorsolve(a(m), a(x[:2])),
    "eigh": lambda a, x, m: mnp.linalg.eigh(a(m))[0],
    "eig": lambda a, x, m: mnp.linalg.eig(a(m))[0] + 0j,
    "svd": lambda a, x, m: mnp.linalg.svd(a(m))[1],
    "histogram": lambda a, x, m: mnp.histogram(a(x), 2)[0],
    "insert": lambda a, x, m: mnp.insert(a(x), 1, a(x[:1])),
    "pad": lambda a, x, m: mnp.pad(a(x), 1, constant_values=(x[0], 2.0)),
    "empty_like": lambda a, x, m: mnp.empty_like(a(x)).shape,
    "full_like": lambda a, x, m: mnp.full_like(a(x), x[0]),
    "apply_along_axis": lambda a, x, m: mnp.apply_along_axis(np.sum, 0, a(m)),
    "linspace": lambda a, x, m: mnp.linspace(a(x), 3.0, 5),
    "where": lambda a, x, m: mnp.where(MASK, a(x), 0.0),
    "clip": lambda a, x, m: mnp.clip(X, a(x - 1), a(x + 1)),
    "append": lambda a, x, m: mnp.append([[x[0], 2.0]], [[3.0, 4.0]], axis=0),
    "mean": lambda a, x, m: mnp.mean([x[0], x[0] + 2]),
    "weights": lambda a, x, m: mnp.average(X, weights=a(x * x)),
    "polyint": lambda a, x, m: mnp.polyint(a(x), k=[x[0]]),
    "diff": lambda a, x, m: mnp.diff(a(x), prepend=a(x[:1]), append=[x[1]]),
    "reduce": lambda a, x, m: mnp.add.reduce(a(m), (0, 1)),
    "accumulate": lambda a, x, m: mnp.multiply.accumulate(a(m), 1),
    "reduceat": lambda a, x, m: mnp.add.reduceat(a(x), [0, 2]),
    "outer": lambda a, x, m: mnp.multiply.outer(a(x), a(x)),
    "take": lambda a, x, m: mnp.take(a(x), [[0, 1], [2, 1]]),
    "numpy's own": lambda a, x, m: np.add(mnp.array(a(x)), a(x)),
}
OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod, operator.matmul]
OPERATORS += [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.floordiv, divmod]
for _op in OPERATORS:
    CALLS[_op.__name__] = lambda a, x, m, op=_op: op(mnp.array(a(x)), a(x))
    CALLS[f"r{_op.__name__}"] = lambda a, x, m, op=_op: op(a(x), mnp.array(a(x)))
    if _op is not operator.matmul:
        CALLS[f"{_op.__name__} of a number"] = lambda a, x, m, op=_op: op(x[:1], a(x))


def check_alike(actual, expected):
    for x, y in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert md.typeof(x).dtype == md.typeof(y).dtype
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@each("name", CALLS)
def test_lists_are_arrays(name):
    def of(a):
        return lambda x, m: as_results(CALLS[name](a, x, m))

    lists, arrays, expected = of(nested), of(lambda x: x), of(nested)(X, M)
    check_alike(expected, of(lambda x: x)(X, M))
    value, pullback = md.vjp(lists, X, M)
    check_alike(value, expected)
    check_alike(pullback(value), md.vjp(arrays, X, M)[1](value))
    check_alike(md.jvp(lists, (X, M), (X, M)), md.jvp(arrays, (X, M), (X, M)))
    try:
        batched, staged = md.vmap(arrays)(np.stack([X, X]), np.stack([M, M])), md.jit(arrays)(X, M)
    except TypeError:  # what depends on values has no tape, and cannot be vectorized
        return
    check_alike(md.vmap(lists)(np.stack([X, X]), np.stack([M, M])), batched)
    check_alike(md.jit(lists)(X, M), staged)


def _own(function):
    """The function of `minidiff.numpy` that calls this one of NumPy's."""
    name = next((n for n, f in public_callables().items() if f is function), None)
    return None if name is None else functools.reduce(getattr, name.split("."), mnp)


#: Functions that take no list in NumPy either, since they ask for its shape.
OF_ARRAYS = {np.take_along_axis, np.split, np.hsplit, np.vsplit, np.dsplit, np.rollaxis, np.trim_zeros}
OF_ARRAYS |= {np.apply_over_axes, getattr(np, "unstack", None)}


def _rows_of_lists():
    """The first call of each function in the table of operations that NumPy takes lists in."""
    result = {}
    for row in TABLE:
        f, sizes = row.function, [np.size(x) for x in row.args]
        of_arrays = any(np.ndim(row.args[i]) for i in row.active) and 0 < min(sizes) <= max(sizes) < 30
        if getattr(row.f, "func", None) is f and _own(f) and of_arrays and f not in OF_ARRAYS:
            result.setdefault(f, row)
    return list(result.values())


LISTS = _rows_of_lists()


@each("row", LISTS, ids=lambda row: row.key)
def test_functions_of_lists_are_those_of_arrays(row):
    local = functools.partial(_own(row.function), **row.f.keywords)
    arrays, args = row.closed()
    lists, _ = row._replace(
        f=lambda *xs: local(*[nested(x) if isinstance(x, md.core.tracer.Tracer) else x for x in xs])
    ).closed()
    value, pullback = md.vjp(lists, *args)
    check_alike(value, arrays(*args))
    ct = md.tree.map(lambda x: np.ones_like(x), value)
    if row.function not in DISCRETE:
        check_alike(pullback(ct), md.vjp(arrays, *args)[1](ct))
    try:
        tape = md.make_tape(arrays)(*args)
    except TypeError:
        return
    check_alike(md.make_tape(lists)(*args)(*args), tape(*args))


def test_every_function_is_tested_with_lists():
    names = {row.function for row in LISTS} | {f for n, f in public_callables().items() if n.split(".")[-1] in CALLS}
    integers = {f for f in NUMPY_FUNCTIONS if isinstance(f, np.ufunc) and f.types[0][0] in "?bB" and f in DISCRETE}
    assert set(NUMPY_FUNCTIONS) & set(public_callables().values()) - names - integers - OF_ARRAYS == set()


def test_functions_that_answer_from_values_take_lists():
    seen = []
    md.grad(lambda x: seen.append(mnp.histogram2d([x, 2 * x], [x, x], 2)[0].tolist()) or x)(1.0)
    assert seen == [[[0.0, 1.0], [0.0, 1.0]]]


def test_lists_of_numbers_promote_as_in_numpy():
    def f(x, y):
        return mnp.add([x, y], np.ones(2, np.float32)), mnp.sum([x, np.float32(1)])

    actual, expected = md.jvp(f, (2.0, 3.0), (1.0, 1.0))[0], f(2.0, 3.0)
    check_alike(actual, expected)


def test_uneven_lists_say_so():
    with pytest.raises(ValueError):
        md.grad(lambda x: mnp.sum([[x, x], [x]]))(1.0)
