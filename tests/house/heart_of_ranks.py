"""A program for the heart of ranks alone: the JEP's examples, the tutorial's, and gradients, on simulated ranks.

`test_hearts.py` runs it in a copy of the library that has nothing else of `collectives` and `spmd`.
"""

from __future__ import annotations

import sys

import numpy
from numpy.testing import assert_allclose

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, all_to_all, axis_index, pmean, ppermute, psum, psum_scatter
from minidiff.errors import VarianceError
from spmd import P
from tests.checks.whole import whole
from tests.programs.jep_examples import EXAMPLES


def check_jep_examples(mesh: spmd.Mesh) -> None:
    """Check the value, the transpose, the type and the communication of each example."""
    for example in EXAMPLES.values():
        f, (x, *others) = example.on(mesh), example.arguments(mesh.size)
        mesh.reset_calls()
        y, pull = md.vjp(lambda x, f=f, others=others: f(x, *others), x)
        assert mesh.calls == example.forward
        assert_allclose(whole(y), example.whole(mesh.size, x, *others), rtol=1e-12)
        mesh.reset_calls()
        (x_bar,) = pull(np.ones_like(y))
        assert mesh.calls == example.backward
        assert_allclose(np.sum(x_bar * x), np.sum(y), rtol=1e-12)  # the transpose is the adjoint
        assert example.tape(mesh).out_types[0].shape == np.shape(y)


def check_matrix_product() -> None:
    """The tutorial's product of matrices: blocks of rows and columns, and a sum that is scattered."""
    mesh = spmd.make_mesh((4, 2), ("i", "j"))
    rng = numpy.random.default_rng(0)
    a, b = rng.normal(size=(8, 16)), rng.normal(size=(16, 4))

    def body(a_block, b_block):
        return psum_scatter(a_block @ b_block, "j", scatter_dimension=0, tiled=True)

    f = spmd.shard_map(body, mesh=mesh, in_specs=(P("i", "j"), P("j", None)), out_specs=P(("i", "j"), None))
    assert_allclose(f(a, b), a @ b, rtol=1e-12)
    ga, gb = md.grad(lambda a, b: np.sum(f(a, b) ** 2), (0, 1))(a, b)
    assert_allclose(ga, 2 * (a @ b) @ b.T, rtol=1e-12)
    assert_allclose(gb, 2 * a.T @ (a @ b), rtol=1e-12)


def check_data_parallel_training(mesh: spmd.Mesh) -> None:
    """The tutorial's network on a split batch: one all-reduce for each parameter, and the unsharded gradient."""
    rng = numpy.random.default_rng(1)
    params = [(rng.normal(size=(3, 5)), np.zeros(5)), (rng.normal(size=(5, 1)), np.zeros(1))]
    x, y = rng.normal(size=(16, 3)), rng.normal(size=(16, 1))

    def loss(params, x, y):
        for w, b in params:
            x = np.tanh(x @ w + b)
        return np.mean((x - y) ** 2)

    sharded = spmd.shard_map(
        lambda *args: pmean(loss(*args), "i"), mesh=mesh, in_specs=(P(), P("i"), P("i")), out_specs=P()
    )
    mesh.reset_calls()
    actual, expected = md.grad(sharded)(params, x, y), md.grad(loss)(params, x, y)
    assert mesh.calls == {"psum": 1 + len(md.tree.leaves(params))}
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected)):
        assert_allclose(a, e, rtol=1e-12)
    tangents = md.tree.map(np.ones_like, params)
    second = md.jvp(lambda p: md.grad(sharded)(p, x, y), (params,), (tangents,))[1]
    expected = md.jvp(lambda p: md.grad(loss)(p, x, y), (params,), (tangents,))[1]
    for a, e in zip(md.tree.leaves(second), md.tree.leaves(expected)):
        assert_allclose(a, e, rtol=1e-9, atol=1e-12)


def check_collectives(mesh: spmd.Mesh) -> None:
    """Blocks that move between ranks, and a batch of functions of them."""
    n, x = mesh.size, numpy.arange(mesh.size**2 * 1.0)
    over = lambda f: spmd.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))  # noqa: E731
    assert_allclose(over(lambda x: ppermute(x, "i", [(k, (k + 1) % n) for k in range(n)]))(x), numpy.roll(x, n))
    assert_allclose(over(lambda x: all_to_all(x, "i", 0, 0, tiled=True))(x), x.reshape(n, n).T.ravel())
    assert_allclose(over(lambda x: all_gather(x, "i", tiled=True)[axis_index("i") * n][None])(x), x[::n])
    assert_allclose(md.vmap(over(lambda x: x * psum(np.sum(x), "i")))(np.stack([x, 2 * x]))[1], 4 * x * x.sum())
    try:
        spmd.shard_map(lambda x: x, mesh=mesh, in_specs=P("i"), out_specs=P())(x)
    except VarianceError as error:
        assert "may differ from rank to rank along 'i'" in str(error)
    else:
        raise AssertionError("a varying result left as an invariant one")


def main() -> None:
    ranks = spmd.make_mesh((8,), ("i",))
    check_jep_examples(ranks)
    check_matrix_product()
    check_data_parallel_training(ranks)
    check_collectives(ranks)
    print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("collectives", "spmd")))


if __name__ == "__main__":
    main()
