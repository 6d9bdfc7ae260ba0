"""Masked functions of sharded arrays and in bodies: those of what is left. See `tests/programs/masked.py`."""

import itertools

import numpy
import pytest

import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs import masked

LINE, KINDS = mesh(4), ("rows", "columns", "elements")
#: A mean of nothing is NaN, as NumPy warns.
quiet = pytest.mark.filterwarnings("ignore:invalid value|Mean of empty|Degrees of freedom")


@quiet
@each("name, kind", zip(sorted(masked.FUNCTIONS), itertools.cycle(KINDS)))
def test_masked_functions_of_sharded_arrays(name, kind):
    masked.check_on_ranks(name, LINE, kind)


@quiet
@each("name, kind", zip([*masked.BODIES, *masked.LOCAL], itertools.cycle(KINDS)))
def test_masked_functions_in_bodies(name, kind):
    body, of_whole = masked.BODIES.get(name) or (masked.FUNCTIONS[name], masked.FUNCTIONS[name])
    masked.check_in_body(body, of_whole, P() if name in masked.BODIES else P("i"), LINE, kind)


@quiet
@each("name", sorted(masked.FUNCTIONS))
def test_masked_functions_are_those_of_what_is_left(name):
    """Rows and columns that are left out might as well not be there."""
    keep_all = numpy.ones((1, 1), bool)
    for kind, left in (("rows", (slice(9), slice(None))), ("columns", (slice(None), slice(3)))):
        if kind == "columns" and ("norm" in name or "cross" in name):
            continue  # scales and labels are of all columns
        x, mask = masked.example(kind)
        small = numpy.ascontiguousarray(x[left])

        def select(y, left=left):
            axis = {(): (), (masked.COLUMNS,): left[1:], (masked.ROWS,): left[:1]}.get(tuple(y.shape), left)
            return masked.every(y[axis] if axis else y)

        actual = masked.derivatives(masked.loss_of(masked.FUNCTIONS[name], select), x, mask)
        expected = masked.derivatives(masked.loss_of(masked.FUNCTIONS[name], masked.every), small, keep_all)
        assert_trees_close((actual[0], actual[1][left], actual[2][left]), expected)


@each("name", ["softmax", "log_softmax", "cross entropy", "cross entropy of labels", "layer_norm", "batch_norm"])
def test_nothing_is_left(name, recwarn):
    """Without any element, these are 0, and so are their derivatives; there is no warning."""
    x = numpy.full((masked.ROWS, masked.COLUMNS), numpy.nan)
    for array in masked.derivatives(
        masked.loss_of(masked.FUNCTIONS[name], masked.every), x, numpy.zeros((masked.ROWS, 1), bool)
    ):
        assert not numpy.any(array)
    assert not recwarn.list


@each("split", [lambda x: x, lambda x: spmd.distribute(x, LINE, P("i"))], ids=["whole", "sharded"])
def test_a_mean_of_nothing_is_numpy_s(split):
    x, nothing = split(numpy.ones((4, 3))), split(numpy.zeros((4, 1), bool))
    with pytest.warns(RuntimeWarning):
        assert numpy.isnan(spmd.gather(np.mean(x, axis=1, where=nothing))).all()
    assert float(np.sum(x, where=nothing)) == 0
    with pytest.raises(ValueError, match="initial"):
        np.max(x, where=nothing)
