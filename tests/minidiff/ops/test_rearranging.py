"""Rearrangements at random arguments, against NumPy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from tests.checks.as_numpy import check_as_numpy
from tests.checks.samples import each

MODES: list[tuple[str, dict[str, Any]]] = [
    ("edge", {}),
    ("wrap", {}),
    ("constant", {"constant_values": ((1.0, 2.0),)}),
    ("linear_ramp", {"end_values": 3.0}),
    *((m, {"reflect_type": t}) for m in ("reflect", "symmetric") for t in ("even", "odd")),
    *((m, {"stat_length": n}) for m in ("mean", "maximum", "minimum") for n in (None, 1, ((2, 3),))),
    *(("median", options) for options in ({}, {"stat_length": (1, 2)})),
]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.tuples(st.integers(0, 6), st.integers(0, 6))), min_size=1, max_size=2),
    st.sampled_from(MODES),
)
def test_pad_is_numpys(axes, mode):
    shape, widths = zip(*axes)
    x = np.random.default_rng(0).standard_normal(shape)  # medians, too, without ties
    check_as_numpy(lambda x: np.pad(x, widths, mode[0], **mode[1]), x)


@each("mode", ["edge", "constant", "linear_ramp", "mean", "maximum"])
def test_integers_are_padded_as_by_numpy(mode):
    x = np.array([1, 4, 6])
    tape = md.make_tape(lambda x: np.pad(x, 2, mode))(x)
    np.testing.assert_array_equal(tape(x)[0], np.pad(x, 2, mode), strict=True)


def test_widths_by_axis():
    f = lambda x: np.pad(x, {-1: (1, 2)})  # noqa: E731
    try:
        f(np.ones((2, 3)))
    except TypeError:
        pytest.skip("this NumPy takes no dictionary")
    check_as_numpy(f, np.ones((2, 3)))


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
        check_as_numpy(lambda x: np.delete(x, obj, axis), x)
    count = np.size(np.insert(np.arange(3), obj, 0)) - 3
    shape = {None: (count,), 0: (count, 3), 1: (3, count)}[axis] if several else ()
    v = np.random.default_rng(0).standard_normal(shape)
    try:
        np.insert(x, obj, v, axis)
    except ValueError:  # values of several rows do not always fit
        return
    check_as_numpy(lambda x, v: np.insert(x, obj, v, axis), x, v)


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
    check_as_numpy(lambda x: np.roll(x, shifts, tuple(axes)), x)
    check_as_numpy(lambda x: np.tile(x, reps), x)
    check_as_numpy(lambda x: np.repeat(x, repeats, axis=1), x)
    check_as_numpy(lambda x: np.rot90(x, turns, plane), x)
    check_as_numpy(lambda x: np.diagonal(x, turns, *plane), x)
    check_as_numpy(lambda x: np.tril(x, turns), x)


@each("trim", ["f", "b", "fb"])
@each("x", [np.array([0.0, 0.0, 1.2, 0.0, -2.0, 0.0]), np.zeros(6)])
def test_zeros_are_trimmed(trim, x):
    value, tangent = md.jvp(lambda x: np.trim_zeros(x, trim), (x,), (x,))
    np.testing.assert_array_equal([value, tangent], [np.trim_zeros(x, trim)] * 2)


def test_functions_along_an_axis_see_values():
    def f(row, scale, power=1):
        return scale * row**power if row[0] > 1 else row[:1] * np.ones(3)

    g = md.grad(lambda x: np.apply_along_axis(f, 1, x, 2.0, power=2).sum())(np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(g, [[3, 0, 0], [12, 16, 20]])
