"""The four states on MPI ranks: values, gradients, calls and errors as on simulated ranks."""

import functools

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.diagnostics.errors import VarianceError
from spmd import P
from tests.samples import each
from tests.state_programs import ROWS, array_of, example, global_value, loss_of, sharded, spec_of_states

RANKS = MPI.COMM_WORLD.size
MOVES = ("psum", "psum_scatter", "all_gather_reduced")
few = pytest.mark.parallel([2, 4])


@functools.cache
def mesh_of(shape, backend):
    return spmd.make_mesh(shape, ("i", "j")[: len(shape)], backend=backend)


def check_as_simulated(f, arguments, shape=(RANKS,)):
    """Compare the list that `f(mesh, *arguments(mesh))` returns, and what each rank called. Return that."""
    results = []
    for backend in ("mpi", "simulated"):
        mesh = mesh_of(shape, backend)
        args = arguments(mesh)
        mesh.reset_calls()
        results.append((f(mesh, *args), dict(mesh.calls), dict(mesh.bytes)))
    (found, *calls), (expected, *simulated) = results
    for x, y in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(global_value(x), global_value(y), 1e-9, 1e-12)
        assert spmd.spec_of(x) == spmd.spec_of(y)
    assert calls == simulated
    return calls[0]


@few
@each("beside", "IVUR")
@each("name", ROWS)
def test_collectives_and_transposes(name, beside):
    """Along one axis of two: the operation and its transpose call what the table says, once."""
    collective, (before, after), transpose = ROWS[name]
    specs = [spec_of_states({"i": beside, "j": s}) for s in (before, after)]

    def mapped(mesh):
        return spmd.shard_map(lambda x: collective(x, "j"), mesh=mesh, in_specs=specs[0], out_specs=specs[1])

    def arguments(mesh):
        x = array_of(specs[0], mesh, 1, (2 * RANKS, 3))
        return x, array_of(specs[1].transposed(), mesh, 2, mapped(mesh)(x).shape)

    shape = (RANKS // 2, 2)
    called = check_as_simulated(lambda mesh, x, ct: [mapped(mesh)(x)], arguments, shape)
    pulled = check_as_simulated(lambda mesh, x, ct: md.linear_transpose(mapped(mesh), x)(ct), arguments, shape)
    operation = {"all_gather": "all_gather_reduced", "psum of varying": "psum"}.get(name, name)
    assert (called, pulled) == tuple({k: 1} if k in MOVES else {} for k in (operation, transpose))


@few
@each("seed", range(8))
def test_random_programs(seed):
    program = numpy.random.default_rng(seed).integers(0, 60, (4, 4)).tolist()
    check_as_simulated(lambda mesh, *args: sharded(program, mesh)(*args), example)
    check_as_simulated(lambda mesh, *args: md.jit(md.grad(loss_of(program, mesh), (0, 1, 2, 3)))(*args), example)


@few
def test_outside_of_bodies():
    """A reshard takes the sum once; each rank has its part; and what needs the sum says so on every rank."""
    spec = P(unreduced={"i"})

    def run(mesh, u):
        total = spmd.shard_map(lambda x: psum(3 * x, "i"), mesh=mesh, in_specs=spec, out_specs=P())
        return [u + u, spmd.reshard(u, P()), spmd.reshard(u, P("i")), *md.value_and_grad(lambda u: total(u)[0])(u)]

    assert check_as_simulated(run, lambda mesh: [array_of(spec, mesh, 0, (RANKS,))]) == {"psum": 2, "psum_scatter": 1}
    u = array_of(spec, mesh_of((RANKS,), "mpi"), 0, (RANKS,))
    with pytest.raises(VarianceError, match=r"tanh of .*hold parts of a sum"):
        np.tanh(u)
    with pytest.raises(ValueError, match=r"Call \.gather"):
        numpy.asarray(u)
