"""Shapes, parts and joins: what the table of operations does not say of them."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import minidiff as md
import minidiff.numpy as mnp
from minidiff.ops.base import broadcast_array
from tests.checks.samples import each
from tests.table import TABLE

X = np.arange(6.0).reshape(2, 3)

#: Functions of X, and their gradients.
GRADIENTS = [
    (lambda x: (np.split(x, 3, 1)[1] ** 2).sum(), [[0, 2, 0], [0, 8, 0]]),  # parts that are not used have gradient 0
    (lambda x: next(iter(x)).sum(), [[1, 1, 1], [0, 0, 0]]),
    *(
        (lambda x, f=f: f([x[0], X[1]]).sum(), [[1, 1, 1], [0, 0, 0]])
        for f in (mnp.asarray, mnp.asanyarray, mnp.ascontiguousarray, mnp.asfortranarray)
    ),
]


@each("f, expected", GRADIENTS)
def test_gradients_of_parts(f, expected):
    np.testing.assert_array_equal(md.grad(f)(X), expected)


def test_parts_of_nothing():
    assert md.jvp(lambda x: mnp.stack([*x, x.sum()]), (np.zeros(0),), (np.zeros(0),))[0].tolist() == [0.0]


@each("f", [mnp.asarray, mnp.asanyarray, mnp.ascontiguousarray, mnp.asfortranarray])
def test_conversions_of_plain_lists_are_numpys(f):
    assert type(f([1, 2], float)) is np.ndarray
    assert f.__doc__


def test_filling_with_a_plain_value_is_numpys():
    assert (mnp.full(2, 1).dtype, mnp.full_like(X, 7, dtype=int).dtype) == (int, int)
    assert md.grad(lambda v: mnp.full((2, 2), v, float).sum())(3.0) == 4.0


# ---------------------------------------------------------------- broadcasting and back


@st.composite
def broadcasts(draw):
    """An array, laid out in some way, and a shape that it can be broadcast to."""
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=3))
    dtype = draw(st.sampled_from([np.float64, np.float32, np.complex128, np.int64, np.bool_]))
    x = np.arange(np.prod(shapes.input_shapes[0], dtype=int)).reshape(shapes.input_shapes[0]).astype(dtype)
    x = draw(st.sampled_from([x, x[..., ::-1] if x.ndim else x, x.T.copy().T, x[()]]))
    return x, shapes.result_shape


@settings(deadline=None)
@given(broadcasts())
def test_a_repeated_array_is_what_numpy_makes(case):
    x, shape = case
    wide = broadcast_array(x, shape)
    np.testing.assert_array_equal(wide, np.broadcast_to(x, shape))
    assert wide.dtype == x.dtype
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


OF_INTEGERS = [
    lambda x: mnp.full(np.array([2, 2]), x[0, 0]),
    lambda x: x.reshape(np.array([3, 2])),
    lambda x: x.reshape(np.array(3), np.int64(2)),
    lambda x: x.transpose(np.array([1, 0])),
    lambda x: x.swapaxes(np.int64(0), np.array(1)),
    lambda x: x.sum(axis=np.array(1)),
    lambda x: np.reshape(x, range(6, 7)),
    lambda x: np.tensordot(x, x, axes=np.array([[0, 1], [0, 1]])),
    lambda x: np.fft.fft2(x, s=np.array([4, 4])),
    lambda x: np.roll(x, np.array([1, 2]), np.array([0, 1])),
]


@each("f", OF_INTEGERS)
def test_integers_in_arrays(f):
    for actual in (md.jvp(f, (X,), (X,))[0], md.jit(f)(X)):
        np.testing.assert_allclose(actual, f(X))


@each("f", [*(functools.partial(f, axis=1.0) for f in (np.sum, np.flip, np.cumsum, np.squeeze)), None])
def test_numbers_that_are_no_integers_are_no_axes(f):
    with pytest.raises(TypeError, match="integer"):
        md.jvp(f or (lambda x: np.reshape(x, np.array([3.0, 2.0]))), (X,), (X,))
