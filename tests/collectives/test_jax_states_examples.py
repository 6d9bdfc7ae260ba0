"""The examples of JAX's page "Autodiff and sharding", in this project's words: types, and where sums are taken.

`tests/benchmarks/jax_states.py` compares such programs with JAX.
"""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum, psum_scatter, reduced, unreduced
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close

MESH = mesh(4)
W, X, Z = (numpy.sin(numpy.arange(24.0) + k).reshape(shape) for k, shape in enumerate([(6, 4), (4, 6), (4, 6)]))
A, B = spmd.distribute(X.T, MESH, P(None, "i")), spmd.distribute(Z, MESH, P("i"))
WS, BATCHES = numpy.stack([numpy.eye(4) / 2] * 3), numpy.cos(numpy.arange(160.0)).reshape(5, 8, 4)
REDUCED = spmd.distribute(W, MESH, P(reduced={"i"}))


def mapped(f, in_specs, out_specs=P()):
    return spmd.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs)


def parts(a, b):
    """A product whose contraction is split."""
    return mapped(lambda a, b: unreduced(a @ b, "i"), (P(None, "i"), P("i")), P(unreduced={"i"}))(a, b)


def low_rank(x, w, a, b):
    return psum(unreduced(x @ w, "i") + unreduced(x @ a, "i") @ b, "i")


def squares(cast):
    return mapped(
        lambda w, x, y: psum(sum(np.sum((z @ cast(w, "i")) ** 2) for z in (x, y)), "i"), (P(), P("i"), P("i"))
    )


def loss(ws, x):
    return np.sum(md.scan(lambda x, w: (np.tanh(x @ w), None), x, ws)[0] ** 2)


def microbatches(cast, zeros, part, finish, out_specs=P()):
    """Gradients of a scan over layers, added up in a scan over microbatches."""

    def body(ws, batches):
        local = cast(ws, "i")
        step = lambda total, x: (total + md.grad(lambda ws: part(loss(ws, x), "i"))(local), None)  # noqa: E731
        return finish(md.scan(step, zeros(np.zeros(ws.shape), "i"), batches)[0], "i")

    return mapped(body, (P(), P(None, "i")), out_specs)


def same(x, axis):
    return x


OF_W, OF_BATCHES = sum(2 * x.T @ x @ W for x in (X, Z)), sum(md.grad(loss)(WS, x) for x in BATCHES)
#: A program, its arguments, and the value: the golden text shows where it sums what.
PROGRAMS = {
    "parts": (parts, (A, B), X.T @ Z),
    "a sum of parts": (lambda a, b: spmd.reshard(parts(a, b) + parts(2 * a, b), P()), (A, B), 3 * X.T @ Z),
    "a gradient of parts": (
        md.grad(lambda a, b: np.sum(spmd.reshard(parts(a, b), P()) ** 2)), (A, B), 2 * (X.T @ Z) @ Z.T,
    ),
    "a low-rank update": (
        mapped(low_rank, (P(None, "i"), P("i"), P("i"), P())), (X.T, Z, X[:, :2], Z[:2]), X.T @ (Z + X[:, :2] @ Z[:2]),
    ),
    "a gradient of weights": (md.grad(squares(same)), (W, X, Z), OF_W),
    "a gradient of weights that are cast": (md.grad(squares(reduced)), (W, X, Z), OF_W),
    "a gradient in reduced weights": (
        md.grad(lambda w: np.sum(mapped(lambda x, w: np.tanh(x @ w), (P("i"), P(reduced={"i"})), P("i"))(X, w))),
        (REDUCED,), X.T @ (1 - np.tanh(X @ W) ** 2),
    ),
    "a gradient in what is not used": (md.grad(lambda w: np.sum(X)), (REDUCED,), 0 * W),
    "microbatches, summed at the end": (microbatches(reduced, unreduced, same, psum), (WS, BATCHES), OF_BATCHES),
    "microbatches, scattered at the end": (
        microbatches(reduced, unreduced, unreduced, lambda x, i: psum_scatter(x, i, 1, tiled=True), P(None, "i")),
        (WS, BATCHES), OF_BATCHES,
    ),
    "microbatches, each summed": (microbatches(same, same, psum, same), (WS, BATCHES), OF_BATCHES),
}  # fmt: skip


def places(tape, path=""):
    for eqn in tape.equations:
        if eqn.primitive.sends(eqn.params):
            yield f"\n  {path}{eqn.primitive.name} of {eqn.inputs[0].type}"
        for body in eqn.bodies:
            yield from places(body, f"{path}{eqn.primitive.name}: ")


def test_where_programs_sum(golden):
    shown = []
    for name, (f, args, expected) in PROGRAMS.items():
        y, tape, compiled = f(*args), md.make_tape(f)(*args), spmd.rewritten(f)(*args)
        tape.check()
        assert_trees_close(spmd.reshard(y, P()), expected)
        shown.append(f"{name}: {md.typeof(y)}{''.join(places(tape))}")
        if (fewer := [*places(compiled)]) != [*places(tape)]:
            shown[-1] += f"\n compiled:{''.join(fewer) or ' none'}"
    golden("jax_states", "\n\n".join(shown))
