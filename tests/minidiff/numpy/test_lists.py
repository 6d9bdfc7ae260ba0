"""Lists that hold traced values: arrays wherever NumPy takes a list."""

import functools
import operator
import types

import numpy as np

import minidiff as md
import minidiff.numpy as mnp
from minidiff.core.tracer import NUMPY_FUNCTIONS, Tracer
from minidiff.numpy.functions import public_callables
from tests.checks.samples import each
from tests.table import DISCRETE, TABLE
from tests.table.rows import Row, form, row

X, M = np.array([0.5, 2.0, -1.0, 3.0]), np.array([[2.0, 0.3], [0.3, 1.0]])
NAMES = {f: name for name, f in public_callables().items()}

OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod, operator.matmul]
OPERATORS += [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.floordiv, divmod]

#: Beside the rows of the table of operations: functions that need values, or answer from types, and operators.
MORE = [
    *(row(f, X) for f in (np.nonzero, np.flatnonzero, np.argwhere, np.unique, np.unique_values, np.unique_counts)),
    *(row(f, X) for f in (np.unique_all, np.unique_inverse)),
    *(row(f, M) for f in (np.shape, np.ndim, np.size)),
    *(row(f, X, X[:2]) for f in (np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d)),
    row(np.min_scalar_type, M, f=lambda x: np.zeros(1, np.min_scalar_type(x))),
    row(np.result_type, X, f=lambda x: np.zeros(1, np.result_type(*x, np.float32(1)))),
    row(np.common_type, M, f=lambda x: np.zeros(1, np.common_type(mnp.array(x)))),
    row(np.can_cast, M, f=lambda x: np.can_cast(mnp.array(x).dtype, float)),
    *(form("array and list", f.__name__, lambda x, y, f=f: f(mnp.array(x), y), M, M + 1) for f in OPERATORS),
    *(form("list and array", f.__name__, lambda x, y, f=f: f(x, mnp.array(y)), M, M + 1) for f in OPERATORS),
    form("numbers", "mean", lambda x: mnp.mean([x[0], x[0] + 2]), X),
    form("numbers", "diff", lambda x: mnp.diff(x, prepend=x[:1], append=[x[1]]), X),
    form("numbers", "append", lambda x: mnp.append([[x[0], 2.0]], [[3.0, 4.0]], axis=0), X),
    form("numbers", "promoted", lambda x: mnp.add([x[0], 1], np.ones(2, "f4")) + mnp.sum([x[0], np.float32(1)]), X),
    form("NumPy's own", "add", lambda x: np.add(mnp.array(x), x), X),
    form("lists alone", "add", lambda x: mnp.add([x[0], 1.0], [2.0, 3.0]), X),
    form("a method", "reduce", lambda x: mnp.add.reduce([x[0], 2 * x[1]]), X),
    form("a method", "outer", lambda x: mnp.multiply.outer([x[0], 1.0], [x[1]]), X),
    row(np.histogram_bin_edges, X, bins="auto"),
    *(
        row(f, M, f=lambda x, f=f: np.stack(f(mnp.array(x))))
        for f in (np.tril_indices_from, np.triu_indices_from, np.diag_indices_from)
    ),
    row(np.compress, X, f=lambda x: np.compress([True, False, True, True], x)),
    row(np.piecewise, X, f=lambda x: np.piecewise(x, [X > 1], [np.sin, np.cos])),
    row(np.einsum_path, M, X[:2], f=lambda x, y: len(np.einsum_path("ij,j->i", x, y))),
    row(np.linalg.tensorinv, M, ind=1),
    row(np.linalg.tensorsolve, M, X[:2]),
    row(np.empty_like, X, f=lambda x: np.zeros(np.empty_like(x).shape)),
]


def nested(x):
    """An array as nested lists of its elements; a number and an integer array as they are."""
    return [nested(r) for r in x] if np.ndim(x) and md.typeof(x).dtype.kind in "fc" else x


def with_lists(f):
    """The function with `minidiff.numpy`, which takes lists, in place of NumPy wherever it calls it."""
    if isinstance(f, functools.partial):
        return functools.partial(with_lists(f.func), **{name: with_lists(x) for name, x in f.keywords.items()})
    if callable(f) and f in NAMES:
        return functools.reduce(getattr, NAMES[f].split("."), mnp)
    if not isinstance(f, types.FunctionType) or not f.__module__.startswith("tests."):
        return f
    called = {name: f.__globals__[name] for name in f.__code__.co_names if name in f.__globals__ and name != f.__name__}
    scope = {**f.__globals__, **{name: with_lists(x) for name, x in called.items()}, "np": mnp, "LA": mnp.linalg}
    cells = tuple(types.CellType(with_lists(cell.cell_contents)) for cell in f.__closure__ or ())
    defaults = tuple(map(with_lists, f.__defaults__ or ()))
    copy = types.FunctionType(f.__code__, scope, f.__name__, defaults, cells)
    copy.__kwdefaults__ = f.__kwdefaults__
    return copy


def takes_lists(r: Row) -> bool:
    sizes = [np.size(x) for x in r.args]
    if not any(np.ndim(r.args[i]) for i in r.active) or not 0 < min(sizes) <= max(sizes) < 30:
        return False
    try:
        r.f(*[x.tolist() if isinstance(x, np.ndarray) else x for x in r.args])
    except (AttributeError, IndexError, TypeError, ValueError):
        return False
    return True


LISTS: dict = {}
for _row in MORE + [r for r in TABLE if r.function in NAMES]:
    if takes_lists(_row):
        LISTS.setdefault(_row.key if isinstance(_row.function, str) else _row.function, _row)

#: Functions that take no list in NumPy either, since they ask for its shape.
OF_ARRAYS = {np.take_along_axis, np.split, np.hsplit, np.vsplit, np.dsplit, np.rollaxis, np.trim_zeros, np.astype}
OF_ARRAYS |= {np.apply_over_axes, getattr(np, "unstack", None)}


def check_alike(actual, expected):
    for x, y in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert md.typeof(x).dtype == md.typeof(y).dtype
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@each("r", LISTS.values(), ids=[r.key for r in LISTS.values()])
def test_lists_are_arrays(r):
    local = with_lists(r.f)
    arrays, args = r.closed()
    lists, _ = r._replace(f=lambda *xs: local(*[nested(x) if isinstance(x, Tracer) else x for x in xs])).closed()
    value, pullback = md.vjp(lists, *args)
    check_alike(value, arrays(*args))
    ct = md.tree.map(np.ones_like, value)
    if r.function not in DISCRETE and all(md.typeof(x).dtype.kind in "fc" for x in md.tree.leaves(value)):
        check_alike(pullback(ct), md.vjp(arrays, *args)[1](ct))
        check_alike(md.jvp(lists, args, args), md.jvp(arrays, args, args))
    try:
        tape = md.make_tape(arrays)(*args)
    except TypeError:  # what depends on values has no tape
        return
    check_alike(md.make_tape(lists)(*args)(*args), tape(*args))
    check_alike(md.vmap(lists)(*[np.stack([x]) for x in args]), md.vmap(arrays)(*[np.stack([x]) for x in args]))


def test_every_function_is_tested_with_lists():
    integers = {f for f in NUMPY_FUNCTIONS if isinstance(f, np.ufunc) and f.types[0][0] in "?bB" and f in DISCRETE}
    assert set(NUMPY_FUNCTIONS) & set(NAMES) - set(LISTS) - integers - OF_ARRAYS == set()
