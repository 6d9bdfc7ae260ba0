"""Shapes, parts and joins: what the table of operations cannot say of them."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import minidiff as md
import minidiff.numpy as mnp
from minidiff.ops.base import broadcast_array
from tests.minidiff.refusals import refusals
from tests.table import TABLE

X = np.arange(6.0).reshape(2, 3)


def names(f, *args):
    """The operations on the tape of `f`."""
    return [str(e.primitive) for e in md.make_tape(f)(*args).equations]


# ---------------------------------------------------------------- tapes that are short


def test_parts_are_one_operation_and_so_is_their_transpose():
    assert names(lambda x: np.split(x, 3, axis=1), X) == ["split"]
    assert names(lambda ct: md.linear_transpose(lambda x: tuple(np.split(x, 2)), X)(ct), (X[:1], X[:1])) == [
        "concatenate"
    ]
    assert names(lambda x: [*x], X) == ["unstack"]
    gradient = md.make_tape(md.grad(lambda x: sum(r[0] for r in x)))(np.ones((50, 2)))
    assert [str(e.primitive) for e in gradient.equations].count("unslice") == 50  # of rows, not of the whole


def test_parts_that_are_not_used_have_gradient_zero():
    np.testing.assert_array_equal(md.grad(lambda x: (np.split(x, 3, 1)[1] ** 2).sum())(X), [[0, 2, 0], [0, 8, 0]])
    np.testing.assert_array_equal(md.grad(lambda x: next(iter(x)).sum())(X), [[1, 1, 1], [0, 0, 0]])


def test_what_changes_nothing_is_no_operation():
    assert (
        names(lambda x: (x.reshape(2, 3), np.squeeze(x), np.atleast_2d(x), x.transpose(0, 1), np.split(x, 1)), X) == []
    )


def test_parts_of_nothing():
    assert md.jvp(lambda x: mnp.stack([*x, x.sum()]), (np.zeros(0),), (np.zeros(0),))[0].tolist() == [0.0]


# ---------------------------------------------------------------- conversions

CONVERSIONS = [mnp.asarray, mnp.asanyarray, mnp.ascontiguousarray, mnp.asfortranarray]


@pytest.mark.parametrize("f", CONVERSIONS, ids=lambda f: f.__name__)
def test_conversions_pass_traced_values(f):
    may_copy = f in (mnp.ascontiguousarray, mnp.asfortranarray)  # NumPy copies what has another order in memory
    assert names(f, X) == ["copy"] * may_copy
    np.testing.assert_array_equal(md.grad(lambda x: f([x[0], X[1]]).sum())(X), [[1, 1, 1], [0, 0, 0]])
    assert type(f([1, 2], float)) is np.ndarray
    assert f.__doc__


def test_filling_with_a_traced_value():
    for f in (
        lambda v: mnp.full((2, 2), v),
        lambda v: mnp.full_like(X[:, :2], v),
        lambda v: mnp.full((2, 2), v, float),
    ):
        assert md.grad(lambda v, f=f: f(v).sum())(3.0) == 4.0
    assert mnp.full(2, 1).dtype == int
    assert mnp.full_like(X, 7, dtype=int).dtype == int


# ---------------------------------------------------------------- errors

ERRORS = [
    (lambda x: np.reshape(x, (3, 2), order="Z"), ValueError, r"reshape: order must be 'C', 'F', 'A' or 'K', got 'Z'"),
    (lambda x: x.reshape(-2, -3), ValueError, r"6 elements, which do not fill the shape \(-2, -3\)"),
    (lambda x: x[0].mT, ValueError, r"matrix_transpose: Input array must be at least 2-dimensional.* got f64\[3\]"),
    (lambda x: np.meshgrid(x, indexing="yx"), ValueError, r"indexing must be 'xy' or 'ij', got 'yx'"),
    (lambda x: np.ix_(x), ValueError, r"ix_: arguments must have one dimension, got f64\[2,3\]"),
    (lambda x: np.stack([x], dtype="int64"), TypeError, r"f64\[1,2,3\] cannot be cast to int64 with"),
    (lambda x: np.block([x, [x]]), ValueError, r"block: all lists must be nested to the same depth, and"),
    (lambda x: np.split(x, 2, axis=1), ValueError, r"split: .* does not result in an equal division, got f64\[2,3\]"),
    (lambda x: np.array_split(x, 0), ValueError, r"number sections must be larger than 0.*, got f64\[2,3\]"),
    (lambda x: np.vsplit(x[0], 1), ValueError, r"vsplit: .* 2 or more dimensions, got f64\[3\]"),
    (lambda x: [*x[0, 0]], TypeError, r"iteration over a 0-d value \(f64\[\]\)"),
]
test_errors_say_what_does_not_fit = refusals(ERRORS, lambda f: md.make_tape(f)(X))


@pytest.mark.skipif(not hasattr(np, "unstack"), reason="NumPy before 2.1 has no unstack")
def test_nothing_to_unstack():
    with pytest.raises(ValueError, match=r"unstack: a value of type f64\[\] has no axis"):
        md.make_tape(lambda x: np.unstack(x[0, 0]))(X)


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
            # The order of a norm (`p` of cond) is no size; np.rollaxis writes into the array that is given for `start`.
            for form in in_other_forms(v) if name not in ("ord", "p", "start") else ():
                yield row._replace(
                    f=functools.partial(row.f.func, **{**row.f.keywords, name: form}), note=f"{name}={v}"
                )


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


OF_INTEGERS = {
    "full": lambda x: mnp.full(np.array([2, 2]), x[0, 0]),
    "method with a shape": lambda x: x.reshape(np.array([3, 2])),
    "method with sizes": lambda x: x.reshape(np.array(3), np.int64(2)),
    "method with axes": lambda x: x.transpose(np.array([1, 0])),
    "method with two axes": lambda x: x.swapaxes(np.int64(0), np.array(1)),
    "method with an axis": lambda x: x.sum(axis=np.array(1)),
    "range": lambda x: np.reshape(x, range(6, 7)),
    "tensordot": lambda x: np.tensordot(x, x, axes=np.array([[0, 1], [0, 1]])),
    "fft2": lambda x: np.fft.fft2(x, s=np.array([4, 4])),
    "roll": lambda x: np.roll(x, np.array([1, 2]), np.array([0, 1])),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_in_arrays(name):
    f = OF_INTEGERS[name]
    np.testing.assert_allclose(md.jvp(f, (X,), (X,))[0], f(X))
    np.testing.assert_allclose(md.jit(f)(X), f(X))


@pytest.mark.parametrize("f", [np.sum, np.flip, np.cumsum, np.squeeze])
def test_numbers_that_are_no_integers_are_no_axes(f):
    with pytest.raises(TypeError, match="integer"):
        md.jvp(lambda x: f(x, axis=1.0), (X,), (X,))
    with pytest.raises(TypeError, match="integer"):
        md.jvp(lambda x: np.reshape(x, np.array([3.0, 2.0])), (X,), (X,))
