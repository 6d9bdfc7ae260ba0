"""Compiled, sums are started early and waited for late: what a program calls, line by line."""

import numpy as np

import minidiff as md
from collectives import psum
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.rewrites import IJ, called, data, data_parallel, mapped, parameters
from tests.checks.samples import each


def needed_late(x):
    """The operation that needs a result is recorded before those that could be computed meanwhile."""
    after = np.exp(psum(np.sin(x), "i")) + x
    return after, np.cos(np.cos(x))


#: A body, its out_specs, and the sums, sines and cosines that it calls.
PROGRAMS = {
    "other work meanwhile": (
        lambda x: (np.sin(np.cos(x)), psum(x, "i") * 2), (P(IJ), P("j")), ["psum_start", "cos", "sin", "psum_wait"],
    ),
    "needed late": (needed_late, P(IJ), ["sin", "psum_start", "cos", "cos", "psum_wait"]),
    "nothing meanwhile": (lambda x: psum(np.sin(x), "i") * 2, P("j"), ["sin", "psum"]),
    "one sum waits for another": (
        lambda x: (psum(np.sin(psum(x, "i")) * x, "i"), np.cos(np.exp(x))), (P("j"), P(IJ)),
        ["psum", "sin", "psum_start", "cos", "psum_wait"],
    ),
    "what leads to another sum goes first": (
        lambda x: (psum(psum(np.sin(x), "i") * x, "i") * x, np.cos(np.cos(x))), P(IJ),
        ["sin", "psum", "psum_start", "cos", "cos", "psum_wait"],
    ),
}  # fmt: skip


@each("name", PROGRAMS)
def test_started_early_and_waited_for_late(name):
    body, out_specs, expected = PROGRAMS[name]
    f, x = mapped(body, out_specs=out_specs), np.arange(16.0)
    names = [name for name in called(md.jit(f), x) if name.startswith(("psum", "sin", "cos"))]
    assert names == expected
    assert "psum_start" not in called(md.jit(f, without=("overlap communication",)), x)
    assert_trees_close(md.jit(f)(x), f(x))


def test_buckets_are_on_their_way_while_gradients_are_computed():
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    names = called(md.jit(md.value_and_grad(data_parallel(mesh(2))), bucket_bytes=300), params, x)
    starts, waits, products = (
        [k for k, name in enumerate(names) if part in name] for part in ("psum_start", "psum_wait", "matmul")
    )
    assert len(starts) >= 2 and starts[0] < products[-1] < min(waits)
