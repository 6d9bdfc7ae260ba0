"""Explicit bodies and partial sums on MPI ranks: the same numbers, communication and errors as on simulated ones."""

import functools

import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast, pmean, psum
from spmd import P
from tests.collective_checks import whole
from tests.explicit_programs import replayed, without_one
from tests.partial_sum_programs import PROGRAMS, W, X, sharded
from tests.programs import LOOPS, STEPS, Program, assert_trees_close, example, run_and_count

RANKS = MPI.COMM_WORLD.size
few = pytest.mark.parallel([2, 4])


@functools.cache
def mesh_of(shape, backend="mpi"):
    return spmd.make_mesh(shape, ("i", "j")[: len(shape)], backend=backend)


@few
def test_programs_written_out():
    """Values, gradients, and the error where one pbroadcast is left out: on every rank alike."""
    mesh = mesh_of((RANKS,))
    for k, name in enumerate(sorted(set(STEPS) - LOOPS)):  # loops take what carries start as, pbroadcast or not
        args = example(Program([name, "scale by a parameter"]), rows=RANKS, seed=k)
        program = Program([name, "scale by a parameter"]).sharded(mesh, ("i",))
        structure, leaves = md.tree.structure(args), md.tree.leaves(args)

        def automatic(*leaves, program=program, structure=structure):
            return program(*md.tree.unflatten(structure, leaves))

        written = replayed(automatic, *leaves)
        gradients = [md.value_and_grad(f, tuple(range(len(leaves)))) for f in (written, automatic)]
        actual, expected = (run_and_count(g, mesh, *leaves) for g in gradients)
        assert_trees_close(actual, md.tree.map(whole, expected))
        for wrong in without_one(automatic, *leaves):
            with pytest.raises(md.VarianceError, match=r"pbroadcast|axis_size|leave those axes out"):
                wrong(*leaves)


@few
def test_errors_before_anything_is_sent():
    mesh = mesh_of((RANKS,))
    bodies = {
        r"multiply: operands f64\[2\]\{i\} and f64\[2\] disagree": lambda x, w: psum(x * w, "i"),
        r"psum over 'i' takes a value that varies there": lambda x, w: psum(w, "i"),
        r"x\[0\]: pmean over 'i' takes a value that varies .* it is the mean": lambda x, w: pmean((w, x), "i")[0],
        r"where: operands bool\[2\] and f64\[2\]\{i\} .* for the first": lambda x, w: md.nn.logsumexp(x, b=w),
        r"update: operands f64\[2\] and f64\[\]\{i\} .* for the first": lambda x, w: w.at[0].set(x[0]),
        r"pbroadcast over 'i' takes a value that is the same": lambda x, w: pmean(pbroadcast(x, "i"), "i"),
    }
    for message, body in bodies.items():
        f = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=P(), auto_pbroadcast=False)
        mesh.reset_calls()
        with pytest.raises(md.VarianceError, match=message):
            f(np.ones(2 * RANKS), np.ones(2))
        assert mesh.calls == {}


@few
def test_what_is_written_is_what_communicates():
    mesh = mesh_of((RANKS,))
    x, w = np.arange(2.0 * RANKS), np.array([0.5, -0.5])

    def of(body):
        return spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=P(sum="i"), auto_pbroadcast=False)

    def once(x, w):
        v = pbroadcast(w, "i")
        return np.sum(x * v + np.sin(x) * v)

    f = of(once)
    expected = md.value_and_grad(lambda x, w: np.sum((x + np.sin(x)) * np.concatenate([w] * RANKS)), (0, 1))(x, w)
    assert_trees_close(run_and_count(md.value_and_grad(f, (0, 1)), mesh, x, w), expected)
    assert spmd.communication(md.grad(f, 1))(x, w).counts == {"psum": 2}
    twice = of(lambda x, w: np.sum(x * pbroadcast(w, "i") + np.sin(x) * pbroadcast(w, "i")))
    assert_trees_close(run_and_count(md.value_and_grad(twice, (0, 1)), mesh, x, w), expected)
    report = spmd.communication(md.grad(twice, 1))(x, w)
    assert (report.counts, report.bytes) == ({"psum": 2}, 8 + 2 * w.nbytes)  # two are summed in one call


@few
def test_partial_sums_over_one_axis():
    mesh = mesh_of((RANKS,))
    x = np.sin(np.arange(4.0 * RANKS)).reshape(2 * RANKS, 2)
    for check_rep in (True, False):
        f = spmd.shard_map(np.sin, mesh=mesh, in_specs=P("i"), out_specs=P(sum="i"), check_rep=check_rep)
        expected = np.sin(x).reshape(RANKS, 2, 2).sum(0)
        for run in (f, md.jit(f)):
            np.testing.assert_allclose(run_and_count(run, mesh, x), expected)
        value, pullback = md.vjp(f, x)
        mesh.reset_calls()
        ct = pullback(value)[0]
        assert mesh.calls == {}
        np.testing.assert_allclose(ct.gather(), np.cos(x) * np.concatenate([value] * RANKS))


@pytest.mark.parallel([4])
def test_partial_sums_on_two_axes():
    mesh = mesh_of((2, 2))
    for name, (_, _, _, of_whole) in PROGRAMS.items():
        for options in ({}, {"check_rep": False}):
            f = sharded(name, mesh, **options)
            value = run_and_count(f, mesh, X, W)
            assert_trees_close(value, of_whole(X, W))
            simulated = sharded(name, mesh_of((2, 2), "simulated"), **options)(X, W)
            assert getattr(value, "spec", None) == getattr(simulated, "spec", None)

            expected, pullback = md.vjp(of_whole, X, W)
            pulled = run_and_count(lambda ct, f=f: md.vjp(f, X, W)[1](ct), mesh, expected)
            assert_trees_close(pulled, pullback(expected))
            pushed = run_and_count(lambda *xs, f=f: md.jvp(f, xs, xs), mesh, X, W)
            assert_trees_close(pushed, md.jvp(of_whole, (X, W), (X, W)))
            gradients = [md.jit(md.grad(lambda x, w, f=f: np.sum(np.sin(f(x, w))), (0, 1))) for f in (f, of_whole)]
            assert_trees_close(*[g(X, W) for g in gradients])
            both = np.stack([X, -X]), np.stack([W, W])
            assert_trees_close(md.vmap(f)(*both), md.vmap(of_whole)(*both))


@few
def test_partial_sums_cost_what_they_must():
    """Compiled, they are summed in one call with what is summed inside; what does not vary is multiplied."""
    mesh = mesh_of((RANKS,))
    x, w = np.arange(2.0 * RANKS), np.array([0.5, 2.0])
    for check_rep in (True, False):

        def loss(w, x, check_rep=check_rep):
            f = spmd.shard_map(
                lambda w, x: np.sum(np.tanh(x * w)),
                mesh=mesh,
                in_specs=(P(), P("i")),
                out_specs=P(sum="i"),
                check_rep=check_rep,
            )
            return f(w, x)

        step = md.jit(md.value_and_grad(loss))
        mesh.reset_calls()
        found = step(w, x)
        assert mesh.calls == {"psum": 1 if check_rep else 2}  # a body without types is not fused with the sum
        assert_trees_close(found, md.value_and_grad(lambda w: np.sum(np.tanh(x.reshape(RANKS, 2) * w)))(w))
    copies = spmd.shard_map(np.sin, mesh=mesh, in_specs=P(), out_specs=P(sum="i"))
    mesh.reset_calls()
    value, pullback = md.vjp(copies, w)
    assert_trees_close((value, pullback(w)[0]), (RANKS * np.sin(w), RANKS * np.cos(w) * w))
    assert not mesh.calls
