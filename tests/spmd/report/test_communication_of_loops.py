"""Tests of the claims of `communication`'s docstring on a scan and on a Python loop."""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

MESH = spmd.make_mesh((2,), ("i",), backend="simulated")
x, w = numpy.arange(8.0).reshape(4, 2), numpy.ones(2)


def scanned(step, carry):
    return md.scan(lambda c, _: (step(c), None), carry, None, length=3)[0]


def looped(step, carry):
    for _ in range(3):
        carry = step(carry)
    return carry


def counts(f, *args, **options):
    return spmd.communication(f, **options)(*args).counts


def test_gradients_of_values_that_steps_compute_from_invariant_ones():
    def gradient(loop):
        body = lambda w, x: psum(loop(lambda c: np.tanh(c * (w * 2.0)), x).sum(), "i")  # noqa: E731
        return md.grad(spmd.shard_map(body, mesh=MESH, in_specs=(P(), P("i")), out_specs=P()))

    forward = 1
    for loop in (scanned, looped):  # the gradient of w is summed once, after the loop
        assert counts(gradient(loop), w, x) == {"psum": forward + 1}
    for loop in (scanned, looped):  # the sum of the loss has no use in its gradient
        assert counts(gradient(loop), w, x, optimized=True) == {"psum": 1}


def test_shardings_of_carries():
    sharded = spmd.distribute(x, MESH, P("i"))
    step = lambda c: np.sin(c).sum(0) * np.ones((4, 2))  # noqa: E731
    assert counts(lambda c: scanned(step, c), sharded) == {"all_gather_invariant": 1}  # before the first step
    assert counts(lambda c: looped(step, c), sharded) == {"psum": 1}  # in the first step


def test_each_step_counts():
    step = lambda c: np.sin(c) * np.sum(c)  # noqa: E731
    sharded = spmd.distribute(x, MESH, P("i"))
    assert counts(lambda c: scanned(step, c), sharded) == counts(lambda c: looped(step, c), sharded) == {"psum": 3}
