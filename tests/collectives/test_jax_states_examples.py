"""The examples of JAX's page "Autodiff and sharding", in this project's words: types, and where sums are taken.

`tests/benchmarks/jax_states.py` compares such programs with JAX.
"""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum, psum_scatter, reduced, unreduced
from spmd import P
from tests.checks.meshes import mesh
from tests.programs.on_blocks import assert_trees_close

MESH = mesh(4)
W, X, Z = (numpy.sin(numpy.arange(24.0) + k).reshape(shape) for k, shape in enumerate([(6, 4), (4, 6), (4, 6)]))
A, B = spmd.distribute(X.T, MESH, P(None, "i")), spmd.distribute(Z, MESH, P("i"))
LAYERS, BATCHES = numpy.stack([numpy.eye(4) / 2] * 3), numpy.cos(numpy.arange(160.0)).reshape(5, 8, 4)


def mapped(f, in_specs, out_specs=P()):
    return spmd.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs)


def places(tape, path=""):
    for eqn in tape.equations:
        if eqn.primitive.sends(eqn.params):
            yield f"{path}{eqn.primitive.name} of {eqn.inputs[0].type}"
        for body in eqn.bodies:
            yield from places(body, f"{path}{eqn.primitive.name}: ")


def sums(f, *args, compiled=False):
    """The collectives of a function, each with the operations around it and the type of its operand."""
    tape = spmd.rewritten(f)(*args) if compiled else md.make_tape(f)(*args)
    tape.check()
    return [*places(tape)]


def parts(a, b):
    return mapped(lambda a, b: unreduced(a @ b, "i"), (P(None, "i"), P("i")), P(unreduced={"i"}))(a, b)


def test_a_matmul_with_a_split_contraction_gives_parts():
    total, c = ["shard_map: psum of f64[6,6]{U:i}"], parts(A, B)
    assert str(md.typeof(c)) == str(md.typeof(c + parts(2 * A, B))) == "f64[6,6]{U:i}" and sums(parts, A, B) == []
    numpy.testing.assert_allclose(c.local[1], numpy.outer(X[1], Z[1]))
    assert_trees_close(spmd.reshard(c, P()), X.T @ Z)
    assert sums(lambda a, b: spmd.reshard(parts(a, b), P()), A, B) == total
    assert sums(lambda a, b: spmd.reshard(parts(a, b) + parts(2 * a, b), P()), A, B) == total

    # The derivative sums nothing: the one sum is the value's, which transposes to a cast to reduced.
    gradient = md.grad(lambda a, b: np.sum(spmd.reshard(parts(a, b), P()) ** 2), (0, 1))
    assert sums(gradient, A, B) == total
    assert md.make_tape(gradient)(A, B).equations[-1].params["in_specs"][-1] == P(reduced={"i"})
    assert_trees_close(gradient(A, B)[0].gather(), 2 * (X.T @ Z) @ Z.T)


def test_low_rank_updates_share_one_sum():
    layer = lambda x, w, a, b: psum(unreduced(x @ w, "i") + unreduced(x @ a, "i") @ b, "i")  # noqa: E731
    f, args = mapped(layer, (P(None, "i"), P("i"), P("i"), P())), (X.T, Z, X[:, :2], W[:2].repeat(2, 1)[:, :6])
    assert sums(f, *args) == ["shard_map: psum of f64[6,6]{U:i}"]
    assert_trees_close(f(*args), args[0] @ (args[1] + args[2] @ args[3]))


@pytest.mark.parametrize("cast, of", [(lambda w, i: w, "{i}"), (reduced, "{U:i}")], ids=["plain", "reduced"])
@pytest.mark.parametrize("xs", [(X,), (X, Z)], ids=["one use", "two uses"])
def test_a_gradient_is_summed_once_where_the_weights_are_cast(cast, of, xs):
    f = mapped(lambda w, *xs: psum(sum(np.sum((x @ cast(w, "i")) ** 2) for x in xs), "i"), (P(), *[P("i")] * len(xs)))
    value, gradient = "shard_map: psum of f64[]{i}", f"shard_map: psum of f64[6,4]{of}"
    assert sums(md.value_and_grad(f), W, *xs) == [value, gradient]
    assert sums(md.grad(f), W, *xs, compiled=True) == [gradient]
    assert_trees_close(md.grad(f)(W, *xs), sum(2 * x.T @ x @ W for x in xs))


def test_a_layer_of_reduced_weights_has_unreduced_gradients():
    layer = mapped(lambda x, w: np.tanh(x @ w), (P("i"), P(reduced={"i"})), P("i"))
    w, x = spmd.distribute(W, MESH, P(reduced={"i"})), spmd.distribute(X, MESH, P("i"))
    gradient = md.grad(lambda w: np.sum(layer(x, w)))
    for f in (gradient, md.jit(gradient), md.grad(lambda w: np.sum(x))):  # zeros, if it is not used
        assert (str(md.typeof(w)), str(md.typeof(f(w)))) == ("f64[6,4]{R:i}", "f64[6,4]{U:i}")
        assert {*sums(f, w)} <= {"shard_map: psum of f64[]{i}"}  # the loss
    assert_trees_close(spmd.reshard(gradient(w), P()), X.T @ (1 - np.tanh(X @ W) ** 2))


def loss(ws, x):
    return np.sum(md.scan(lambda x, w: (np.tanh(x @ w), None), x, ws)[0] ** 2)


def step(cast, zeros, part, finish, state, out_specs=P()):
    """A scan over layers in a scan over microbatches, whose gradients are added up."""

    def body(ws, batches):
        def microbatch(total, x):
            gradient = md.grad(lambda ws: part(loss(ws, x), "i"))(local)
            assert str(md.typeof(gradient)) == str(md.typeof(total)) == f"f64[3,4,4]{state}"
            return total + gradient, None

        local = cast(ws, "i")
        return finish(md.scan(microbatch, zeros(np.zeros(ws.shape), "i"), batches)[0], "i")

    return mapped(body, (P(), P(None, "i")), out_specs)


def test_gradients_of_microbatches_are_summed_where_their_type_says():
    same, scatter = lambda x, i: x, lambda total, i: psum_scatter(total, i, 1, tiled=True)
    for f, place, count in (
        (step(reduced, unreduced, same, psum, "{U:i}"), "psum of f64[3,4,4]{U:i}", 1),
        (step(reduced, unreduced, unreduced, scatter, "{U:i}", P(None, "i")), "psum_scatter of f64[3,4,4]{U:i}", 1),
        (step(same, same, psum, same, ""), "scan: psum of f64[3,4,4]{i}", 5),
    ):
        assert sums(f, LAYERS, BATCHES, compiled=True) == [f"shard_map: {place}"]
        assert sum(spmd.communication(f, optimized=True)(LAYERS, BATCHES).counts.values()) == count
        assert_trees_close(np.asarray(f(LAYERS, BATCHES)), sum(md.grad(loss)(LAYERS, x) for x in BATCHES))
