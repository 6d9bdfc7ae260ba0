"""Slices that start where a value says: what they take and leave, on tapes, in compiled programs and on ranks."""

import numpy as np

import minidiff as md
from minidiff.ops import slices
from tests.table import TABLE

X = np.arange(12.0).reshape(3, 4)


def test_every_one_is_in_the_table():
    assert set(slices.__all__) <= {r.function for r in TABLE}
    assert set(slices.__all__) <= set(md.__all__)


def test_a_start_that_is_known_is_a_slice_and_one_that_is_traced_one_operation():
    tape = str(md.make_tape(lambda x: md.dynamic_slice_in_dim(x, -1, 2, 1))(X))
    assert "slice(a, [:, 2:4])" in tape and "gather" not in tape
    tape = md.make_tape(lambda x, i: md.dynamic_slice_in_dim(x, i, 2, 1))(X, 1)
    assert "c:f64[3,2] = dynamic_slice(a, b, axis=1, size=2)" in str(tape)
    tape = md.make_tape(lambda x, v, i: md.dynamic_update_slice_in_dim(x, v, i, 1))(X, X[:, :2], 1)
    assert "d:f64[3,4] = dynamic_update(a, b, c, axis=1)" in str(tape)
    assert str(md.make_tape(lambda x, i: md.dynamic_slice_in_dim(x, i, 3))(X, 1)).count("=") == 0  # all of it


def test_a_loop_writes_row_by_row():
    def f(x):
        def step(i, out):
            row = md.dynamic_index_in_dim(x, i, keepdims=False)
            return md.dynamic_update_index_in_dim(out, row * row, 2 - i, 0)

        return md.fori_loop(0, 3, step, np.zeros((3, 4)))

    for g in (f, md.jit(f), lambda x: md.make_tape(f)(x)(x)[0]):
        np.testing.assert_array_equal(g(X), X[::-1] ** 2)
    np.testing.assert_array_equal(md.grad(lambda x: f(x).sum())(X), 2 * X)
