"""Slices that start where a value says: what they take and leave, on tapes, in compiled programs and on ranks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.ops import slices
from tests.table import TABLE

X = np.arange(12.0).reshape(3, 4)


def test_every_one_is_in_the_table():
    assert set(slices.__all__) <= {r.function for r in TABLE}
    assert set(slices.__all__) <= set(md.__all__)


def window(shape, starts, sizes):
    """Return NumPy's reference: a negative start counts from the end, and starts are clamped to the array."""
    counted = [i + n if i < 0 else i for i, n in zip(starts, shape)]
    return tuple(slice(i, i + m) for i, m in zip(np.clip(counted, 0, np.subtract(shape, sizes)), sizes))


@st.composite
def cases(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    sizes = [draw(st.integers(0, n)) for n in shape]
    return shape, sizes, [draw(st.integers(-2 * n, 2 * n)) for n in shape]


@settings(max_examples=80, deadline=None)
@given(cases())
def test_slices_and_updates_are_numpys_of_a_window_that_is_moved_inside(case):
    shape, sizes, starts = case
    x, v = np.random.default_rng(0).standard_normal((2, 4, 4, 4))
    x, v = (a[tuple(slice(n) for n in s) + (0,) * (3 - len(s))] for a, s in ((x, shape), (v, sizes)))
    at = window(shape, starts, sizes)
    written = x.copy()
    written[at] = v

    def both(x, v, starts):
        return md.dynamic_slice(x, starts, sizes), md.dynamic_update_slice(x, v, starts)

    known = both(x, v, starts)
    staged = md.make_tape(both)(x, v, np.array(starts))
    staged.check()
    for taken, updated in (known, staged(x, v, np.array(starts)), md.jit(both)(x, v, np.array(starts))):
        np.testing.assert_array_equal(taken, x[at])
        np.testing.assert_array_equal(updated, written)


def test_a_start_that_is_known_is_a_slice_and_one_that_is_traced_one_operation():
    tape = str(md.make_tape(lambda x: md.dynamic_slice_in_dim(x, -1, 2, 1))(X))
    assert "slice(a, [:, 2:4])" in tape and "gather" not in tape
    tape = md.make_tape(lambda x, i: md.dynamic_slice_in_dim(x, i, 2, 1))(X, 1)
    assert "c:f64[3,2] = dynamic_slice(a, b, axis=1, size=2)" in str(tape)
    tape = md.make_tape(lambda x, v, i: md.dynamic_update_slice_in_dim(x, v, i, 1))(X, X[:, :2], 1)
    assert "d:f64[3,4] = dynamic_update(a, b, c, axis=1)" in str(tape)
    assert str(md.make_tape(lambda x, i: md.dynamic_slice_in_dim(x, i, 3))(X, 1)).count("=") == 0  # all of it


def test_what_is_sliced_is_not_written_into():
    """Compiled, a slice is a view of what it is taken of: memory that later results may not take."""

    def f(x, i):
        y = np.sin(x)
        part = md.dynamic_slice_in_dim(y, i, 200)
        z = np.cos(y)
        return part, np.exp(z) + 1

    x = np.arange(40000.0).reshape(400, 100)
    for actual, expected in zip(md.jit(f, kernels=False)(x, 150), f(x, 150)):
        np.testing.assert_array_equal(actual, expected)


def test_a_loop_writes_row_by_row():
    def f(x):
        def step(i, out):
            row = md.dynamic_index_in_dim(x, i, keepdims=False)
            return md.dynamic_update_index_in_dim(out, row * row, 2 - i, 0)

        return md.fori_loop(0, 3, step, np.zeros((3, 4)))

    for g in (f, md.jit(f), lambda x: md.make_tape(f)(x)(x)[0]):
        np.testing.assert_array_equal(g(X), X[::-1] ** 2)
    np.testing.assert_array_equal(md.grad(lambda x: f(x).sum())(X), 2 * X)
