"""Shapes, parts and joins: what the table of operations does not say of them."""

import functools

import numpy as np

import minidiff as md
from minidiff.ops.base import broadcast_array
from tests.checks.samples import each
from tests.table import TABLE

X = np.arange(6.0).reshape(2, 3)


@each("x", [X, X.astype(np.float32), X[..., ::-1], X.T.copy().T, X > 2, X[0].astype(int), np.float64(2), X[:0]])
@each("more", [(), (2,), (3, 0)])
def test_a_repeated_array_is_what_numpy_makes(x, more):
    for of in (x, x[..., :1] if np.ndim(x) else x):
        wide = broadcast_array(of, (*more, *np.shape(x)))
        np.testing.assert_array_equal(wide, np.broadcast_to(of, (*more, *np.shape(x))), strict=True)
        assert not wide.flags.writeable


# ---------------------------------------------------------------- integers, as NumPy takes them


def in_other_forms(v):
    """An integer, or several, as NumPy's integers and as arrays of them."""
    if type(v) is int:
        return [np.int64(v), np.array(v)]
    if isinstance(v, (tuple, list)) and v and all(type(n) is int for n in v):
        return [np.array(v), [np.int32(n) for n in v]]
    rows = isinstance(v, (tuple, list)) and all(isinstance(r, (tuple, list)) for r in v)
    return [np.array(v)] if rows and len({len(r) for r in v}) == 1 and np.array(v).dtype.kind == "i" else []


def rows_of_integers():
    """Calls in the table of operations with a shape, an axis, a size or the like in another form."""
    for row in TABLE:
        for name, v in getattr(row.f, "keywords", {}).items():
            # The order of a norm (`p` of cond) is no size; np.rollaxis writes into the array that is passed as `start`.
            for form in in_other_forms(v) if name not in ("ord", "p", "start") else ():
                yield row._replace(f=functools.partial(row.f.func, **{**row.f.keywords, name: form}))


def test_shapes_axes_and_sizes_are_integers_as_numpy_takes_them():
    count = 0
    for row in rows_of_integers():
        f, args = row.closed()
        try:
            expected = f(*args)
        except (TypeError, ValueError):  # NumPy does not take this form here
            continue
        count += 1
        for a, e in zip(md.tree.leaves(md.jvp(f, args, args)[0]), md.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, err_msg=row.key)
    assert count > 1000
