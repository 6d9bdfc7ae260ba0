"""Rearrangements against NumPy at random arguments, and what the table of operations cannot say of them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.core.tracer import NUMPY_FUNCTIONS
from minidiff.ops import declare_all
from tests.minidiff.refusals import refusals

X = np.arange(6.0).reshape(2, 3)


def check(f: Any, x: np.ndarray) -> None:
    """The same as NumPy, with derivatives that are those of a linear or piecewise linear function."""
    expected = f(x)
    value, pullback = md.vjp(f, x)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    tape = md.make_tape(f)(x)
    tape.check()
    assert tape.out_types == [md.typeof(expected)]
    np.testing.assert_allclose(tape(x)[0], expected, rtol=1e-12)
    t, ct = np.cos(x), np.sin(1.0 + np.arange(expected.size)).reshape(expected.shape)
    tangent = md.jvp(f, (x,), (t,))[1]
    np.testing.assert_allclose(np.sum(pullback(ct)[0] * t), np.sum(ct * tangent), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(tangent, (f(x + 1e-6 * t) - f(x - 1e-6 * t)) / 2e-6, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- pad

MODES: list[tuple] = [
    *(
        ("edge", {}),
        ("wrap", {}),
        ("constant", {"constant_values": ((1.0, 2.0),)}),
        ("linear_ramp", {"end_values": 3.0}),
    ),
    *((m, {"reflect_type": t}) for m in ("reflect", "symmetric") for t in ("even", "odd")),
    *((m, {"stat_length": n}) for m in ("mean", "maximum", "minimum") for n in (None, 1, ((2, 3),))),
]
declare_all()
if np.median in NUMPY_FUNCTIONS:
    MODES += [("median", {}), ("median", {"stat_length": (1, 2)})]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.tuples(st.integers(0, 6), st.integers(0, 6))), min_size=1, max_size=2),
    st.sampled_from(MODES),
)
def test_pad_is_numpys(axes, mode):
    shape, widths = zip(*axes)
    x = np.random.default_rng(0).standard_normal(shape)  # medians, too, without ties
    check(lambda x: np.pad(x, widths, mode[0], **mode[1]), x)


@pytest.mark.parametrize("mode", ["edge", "constant", "linear_ramp", "mean", "maximum"])
def test_integers_are_padded_as_by_numpy(mode):
    if mode == "mean" and np.rint not in NUMPY_FUNCTIONS:
        pytest.skip("rounding is not there")
    x = np.array([1, 4, 6])
    tape = md.make_tape(lambda x: np.pad(x, 2, mode))(x)
    np.testing.assert_array_equal(tape(x)[0], np.pad(x, 2, mode))
    assert tape.out_types == [md.typeof(x).update(shape=(7,))]


def test_widths_by_axis():
    try:
        expected = np.pad(X, {-1: (1, 2)})
    except TypeError:
        pytest.skip("this NumPy takes no dictionary")
    np.testing.assert_array_equal(md.jvp(lambda x: np.pad(x, {-1: (1, 2)}), (X,), (X,))[1], expected)


def test_padding_with_zeros_is_one_operation():
    assert [str(e.primitive) for e in md.make_tape(lambda x: np.pad(x, 1))(X).equations] == ["unslice"]


# ---------------------------------------------------------------- insert, delete, repeat, roll, …

places = (
    st.integers(-3, 3)
    | st.lists(st.integers(-3, 3), max_size=4)
    | st.builds(slice, *[st.none() | st.integers(-3, 3)] * 2)
)


@settings(max_examples=80, deadline=None)
@given(places, st.sampled_from([None, 0, 1]), st.booleans())
def test_insert_and_delete_are_numpys(obj, axis, several):
    x = np.arange(1.0, 10.0).reshape(3, 3)
    try:
        np.delete(x, obj, axis)
    except IndexError:
        with pytest.raises(IndexError):
            md.make_tape(lambda x: np.delete(x, obj, axis))(x)
    else:
        check(lambda x: np.delete(x, obj, axis), x)
    count = np.size(np.insert(np.arange(3), obj, 0)) - 3
    shape = {None: (count,), 0: (count, 3), 1: (3, count)}[axis] if several else ()
    v = np.random.default_rng(0).standard_normal(shape)
    try:
        np.insert(x, obj, v, axis)
    except ValueError:  # values of several rows do not always fit
        return
    check(lambda x: np.insert(x, obj, v, axis), x)
    check(lambda v: np.insert(x, obj, v, axis), v)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rolls_tiles_repeats_and_turns_are_numpys(data):
    x = np.arange(1.0, 25.0).reshape(2, 3, 4)
    draw, some = data.draw, st.integers(-5, 5)
    axes = draw(st.lists(st.integers(-3, 2), min_size=1, max_size=3))
    shifts = draw(some | st.lists(some, min_size=len(axes), max_size=len(axes)))
    reps = draw(st.lists(st.integers(0, 2), max_size=4))
    repeats = draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
    plane = draw(st.sampled_from([(0, 1), (2, 0), (1, -1)]))
    turns = draw(some)
    check(lambda x: np.roll(x, shifts, tuple(axes)), x)
    check(lambda x: np.tile(x, reps), x)
    check(lambda x: np.repeat(x, repeats, axis=1), x)
    check(lambda x: np.rot90(x, turns, plane), x)
    check(lambda x: np.diagonal(x, turns, *plane), x)
    check(lambda x: np.tril(x, turns), x)


@pytest.mark.parametrize("trim", ["f", "b", "fb"])
def test_zeros_are_trimmed(trim):
    x = np.array([0.0, 0.0, 1.2, 0.0, -2.0, 0.0])
    value, tangent = md.jvp(lambda x: np.trim_zeros(x, trim), (x,), (x,))
    np.testing.assert_array_equal(value, np.trim_zeros(x, trim))
    np.testing.assert_array_equal(tangent, value)
    np.testing.assert_array_equal(
        md.jvp(lambda x: np.trim_zeros(x, trim), (0 * x,), (x,))[0], np.trim_zeros(0 * x, trim)
    )


# ---------------------------------------------------------------- functions of vectors


def test_functions_along_an_axis_see_values():
    def f(row, scale, power=1):
        return scale * row**power if row[0] > 1 else row[:1] * np.ones(3)

    g = md.grad(lambda x: np.apply_along_axis(f, 1, x, 2.0, power=2).sum())(X)
    np.testing.assert_array_equal(g, [[3, 0, 0], [12, 16, 20]])


# ---------------------------------------------------------------- errors

ERRORS = [
    (lambda x: np.pad(x, 1, "empty"), TypeError, r"pad: mode 'empty' is not supported on traced values"),
    (lambda x: np.pad(x, 1, lambda *a: None), TypeError, r"join arrays with np\.concatenate"),
    (lambda x: np.pad(x, 1, "mirror"), ValueError, r"mode must be one of constant, .*, got 'mirror'"),
    (lambda x: np.pad(x, 1, "edge", end_values=1), ValueError, r"mode 'edge' takes no end_values"),
    (lambda x: np.pad(x, -1), ValueError, r"widths cannot be negative"),
    (lambda x: np.pad(x[:0], 1, "edge"), ValueError, r"axis 0 of f64\[0,3\] has no elements"),
    (lambda x: np.rot90(x, axes=(0, 0)), ValueError, r"rot90: an axis is named twice in \(0, 0\)"),
    (lambda x: np.rot90(x, axes=(0,)), ValueError, r"rot90: expected two axes, got \(0,\)"),
    (lambda x: np.diag(x[None]), ValueError, r"diag: expected a vector or a matrix, got f64\[1,2,3\]"),
    (lambda x: np.diagonal(x[0]), ValueError, r"diagonal: .* at least two dimensions.*, got f64\[3\]"),
    (lambda x: np.diagonal(x, 0, 1, -1), ValueError, r"diagonal: axis1 and axis2 cannot be the same, got f64\[2,3\]"),
    (lambda x: np.tril(x[0, 0]), ValueError, r"tril: expected an array of at least one dimension, got f64\[\]"),
    (lambda x: np.vander(x), ValueError, r"vander: expected a vector, got f64\[2,3\]"),
    (lambda x: np.tril_indices_from(x[0]), ValueError, r"must be 2-d, got f64\[3\]"),
    (lambda x: np.diag_indices_from(x), ValueError, r"of equal length, got f64\[2,3\]"),
    (lambda x: np.trim_zeros(x[0], "x"), ValueError, r"trim must consist of 'f' and 'b', got 'x'"),
    (lambda x: np.trim_zeros(x[0]), md.TracerError, r"np\.trim_zeros .* needs a concrete value"),
    (lambda x: np.apply_along_axis(np.sum, 1, x[:0]), ValueError, r"no vector along axis 1 in f64\[0,3\]"),
]
test_errors_say_what_does_not_fit = refusals(ERRORS, lambda f: md.make_tape(f)(X))


def test_counts_that_are_traced():
    with pytest.raises(md.TracerError, match=r"np\.repeat \(the shape of its result depends on the repeats\) needs a"):
        md.make_tape(lambda n: np.repeat(n, n))(np.array([1, 2]))
