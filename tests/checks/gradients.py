"""Programs for `check_grads` on simulated and MPI ranks: right and wrong derivatives of sharded arrays."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.ops.base import Elementwise
from spmd import P
from tests.checks.properties import shows

X = numpy.linspace(0.3, 1.7, 4)
wrong = Elementwise("wrong", numpy.sin, (lambda out, x: np.sin(x),))


def on_ranks(f, mesh, out_specs=P("i")):
    return spmd.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=out_specs)


#: Functions of an array x, given the mesh. Results are mapped, or not, or both.
PROGRAMS = {
    "mapped": lambda mesh: on_ranks(np.sin, mesh),
    "unmapped": lambda mesh: on_ranks(lambda x: psum(np.sin(x).sum(), "i"), mesh, P()),
    "both": lambda mesh: on_ranks(lambda x: {"all": psum(x**2, "i"), "own": x**3}, mesh, {"all": P(), "own": P("i")}),
    "operations": lambda mesh: lambda x: (np.tanh(x) * x, (x**2).sum()),
    "resharded": lambda mesh: lambda x: spmd.distribute(np.outer(x, np.sin(x)), mesh, P(None, "i")),
}


@shows("derivatives")
def check_programs(mesh):
    """Check whole, sharded and complex arguments, and trees of them."""
    for program in PROGRAMS.values():
        f, split = program(mesh), spmd.distribute(X, mesh, P("i"))
        for x in (X, split):
            md.testing.check_grads(f, (x,))
    f = PROGRAMS["mapped"](mesh)
    md.testing.check_grads(f, (spmd.distribute(X + 1j * X[::-1], mesh, P("i")),))
    md.testing.check_grads(lambda p, n: {"w": f(p["w"]) * p["b"] * n, "n": n}, ({"w": split, "b": 0.5}, 3), order=1)


@shows("errors")
def check_failures(mesh):
    """A wrong derivative is found on all ranks, and the argument and the operation are named."""
    split = spmd.distribute(X, mesh, P("i"))
    for f, x in ((wrong.bind, split), (on_ranks(wrong.bind, mesh), X), (on_ranks(wrong.bind, mesh), split)):
        pattern = rf"(?s)in args\[0\] \(f64\[4\]\): .* by the rules.*shard_map, number {1 if x is X else 2} on the tape"
        for mode in ("fwd", "rev"):
            with pytest.raises(AssertionError, match=pattern):
                md.testing.check_grads(f, (x,), modes=[mode])


@shows("reference")
def check_differences(mesh):
    """Difference quotients of sharded arrays are whole arrays, and as those of whole ones."""
    split = spmd.distribute(X, mesh, P("i"))
    for f in (np.sin, lambda x: (x**2).sum()):
        for direction in (None, X):
            actual = md.numerical.central_difference(f, split, direction=None if direction is None else split)
            expected = md.numerical.central_difference(f, X, direction=direction)
            numpy.testing.assert_allclose(actual, expected, rtol=1e-8)
    assert md.numerical.errors(np.sin, split).best["central"] > 1e-8


@shows("errors")
def check_body(mesh):
    """In a body there are no numbers to compare: the error says where to call it."""

    def body(x):
        md.testing.check_grads(np.sin, (x,))
        return x

    with pytest.raises(md.TracerError, match=r"args\[0\] is a traced value \(f64\[2\]\{i\}\): call it outside of"):
        on_ranks(body, mesh)(X)
