"""The sums of a gradient that is not compiled are one call, after its backward pass."""

import numpy as np
import pytest

import minidiff as md
import spmd
from collectives import psum
from collectives.passes import SETTINGS
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.rewrites import IJ, MESH, data, data_parallel, fused, mapped, parameters
from tests.checks.samples import each

PARAMS, X = parameters(5, 7, 6, 3), data("float64", (8, 5))


def test_one_rank_alone_sums_without_communicating():
    on = mesh(1)
    step = md.value_and_grad(data_parallel(on))
    assert fused(spmd.rewritten(step)(PARAMS, X)) == [1] * 7  # there is no call that could be saved
    on.reset_calls()
    for out in (step(PARAMS, X), md.jit(step)(PARAMS, X)):
        assert_trees_close(out, md.value_and_grad(data_parallel(MESH))(PARAMS, X))
    assert on.calls == {} and str(spmd.communication(step)(PARAMS, X)) == "no communication"


@each("ranks", [2, 4])
@each("size, expected", [(1, [1] * 7), (560, [1, 4, 2]), (None, [1, 6])])
def test_the_loss_and_then_all_gradients(ranks, size, expected):
    on = mesh(ranks)
    step = md.value_and_grad(data_parallel(on))
    with pytest.MonkeyPatch.context() as patch:
        if size is not None:
            patch.setitem(SETTINGS, "bucket_bytes", size)
        assert fused(md.make_tape(step)(PARAMS, X)) == expected
        on.reset_calls()
        out = step(PARAMS, X)
        assert on.calls == {"psum": len(expected)}
    assert_trees_close(out, step(PARAMS, X))


def test_cotangents_of_what_is_pbroadcast_and_of_what_is_not():
    """Inputs used as they are too, of several dtypes, pbroadcast along one axis or two: as with all inputs whole."""

    def body(a, b, c, d, x):
        invariant = np.sum(np.sin(a)) + np.sum(b * b)
        first = psum(np.sum(a * b * x), IJ) + psum(np.sum(c * x.astype(c.dtype)), IJ) * 1.0
        row = psum(np.sum(x, 0), "j")
        return invariant * first + psum(np.sum(np.sin(d * row) * b), "i")

    f, untyped = (mapped(body, (*[P()] * 4, P(IJ)), P(), check_rep=typed) for typed in (True, False))
    args = [data("float32" if k == 3 else "float64", (3,), k) for k in range(1, 5)] + [data("float64", (8, 3), 5)]
    md.testing.check_grads(f, tuple(a.astype(float) for a in args), order=2)
    gradient = md.grad(f, (0, 1, 2, 3))
    tape = md.make_tape(gradient)(*args)
    tape.check()
    assert_trees_close(tape(*args), gradient(*args), rtol=1e-6)
    assert max(fused(tape)) > 1
    assert_trees_close(gradient(*args), md.grad(untyped, (0, 1, 2, 3))(*args), rtol=1e-5, atol=1e-5)
