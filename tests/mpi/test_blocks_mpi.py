"""On MPI ranks: meshes of all ranks there are, arrays of each rank's own blocks, trees of every class, processes."""

import re
import time

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.tree_classes import CLASSES, parts

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
everywhere = pytest.mark.parallel([2, 4])


def of_all():
    return spmd.make_mesh((-1,), ("i",))


def all_raise(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert len(set(WORLD.allgather(str(raised.value)))) == 1


@everywhere
def test_a_size_that_is_left_open():
    assert of_all().shape == {"i": RANKS} and of_all().is_like(spmd.make_mesh((RANKS,), ("i",)))
    assert spmd.make_mesh((-1, 2), ("i", "j")).shape == {"i": RANKS // 2, "j": 2}
    assert spmd.make_mesh((2, -1), ("i", "j"), comm=WORLD).shape == {"i": 2, "j": RANKS // 2}
    assert spmd.make_mesh((-1,), ("i",), backend="simulated").size == RANKS
    all_raise(lambda: spmd.make_mesh((-1, 3), ("i", "j")), ValueError, rf"the {RANKS} ranks .* divided by .*\(j: 3\)")


@everywhere
def test_processes(tmp_path):
    assert (spmd.process_index(), spmd.process_count()) == (RANK, RANKS)
    file = WORLD.bcast(tmp_path) / "written"
    for late in range(RANKS):
        if late == RANK:
            time.sleep(0.05)
            file.write_text(str(late))
        spmd.barrier()
        assert file.read_text() == str(late)
        spmd.barrier()


@everywhere
def test_the_number_of_a_process_in_a_body():
    f = spmd.shard_map(lambda x: x * spmd.process_index(), mesh=of_all(), in_specs=P("i"), out_specs=P("i"))
    all_raise(lambda: f(numpy.ones(RANKS)), md.VarianceError, r"process_index\(\) .*collectives\.axis_index\('i'\)")


@everywhere
def test_from_local_and_local_are_inverse():
    mesh, whole = spmd.make_mesh((-1, 2), ("i", "j")), numpy.arange(64.0).reshape(8, 8)
    for spec in (P("i"), P(None, "j"), P("j", "i"), P(("j", "i")), P()):
        x = spmd.distribute(whole, mesh, spec)
        block = x.local if spec.axes else x
        y = spmd.from_local(block, mesh, spec)
        assert not numpy.may_share_memory(y.local if spec.axes else y, block)
        assert spmd.spec_of(y) == spec and y.dtype == float
        numpy.testing.assert_array_equal(spmd.gather(y), whole)


@everywhere
def test_a_function_of_the_rank_is_one_program_for_both_backends():
    asked = []

    def block_of(rank):
        asked.append(rank)
        return {"x": numpy.full((2, 3), rank), "n": numpy.float32(3)}

    for backend, ranks in (("mpi", [RANK]), ("simulated", [*range(RANKS)])):
        asked.clear()
        mesh = spmd.make_mesh((RANKS,), ("i",), backend=backend)
        x = spmd.from_local(block_of, mesh, {"x": P("i"), "n": P()})
        assert asked == ranks
        assert x["x"].gather()[:, 0].tolist() == [r for r in range(RANKS) for _ in range(2)] and x["n"] == 3
    mesh = of_all()
    if RANKS > 1:
        message = "different types"
        all_raise(lambda: spmd.from_local(lambda r: numpy.ones(1 + (r == 1)), mesh, P("i")), ValueError, message)


@everywhere
def test_an_array_of_what_each_rank_has_read():
    mesh = of_all()
    x = spmd.from_local({"x": numpy.full((2, 3), RANK), "n": numpy.float32(3)}, mesh, {"x": P("i"), "n": P()})
    assert x["x"].shape == (2 * RANKS, 3) and type(x["n"]) is numpy.float32
    assert x["x"].gather()[:, 0].tolist() == [r for r in range(RANKS) for _ in range(2)]
    w = spmd.from_local(numpy.array([1.0 + RANK]), mesh, P("i"))
    gradient = md.grad(lambda w: np.sum(w**3))(w)
    assert gradient.spec == P("i") and gradient.local.tolist() == [3 * (1.0 + RANK) ** 2]


MANY = {f"layer {k}": numpy.ones(2) for k in range(100)}
BLOCKS = {
    "one of many": (MANY, MANY | {"layer 99": numpy.ones(3)}, "block['layer 99']: f64[3]"),
    "a shape": (numpy.ones(2), numpy.ones(3), "block: f64[3]"),
    "a dtype": (numpy.ones(2), numpy.ones(2, numpy.float32), "block: f32[2]"),
    "no array": (numpy.ones(2), "text", "block: a str"),
    "nothing": ([numpy.ones(2)], [], "nothing more"),
    "a structure": ({"a": numpy.ones(2)}, {"b": numpy.ones(2)}, "block['b']: f64[2]"),
}


@everywhere
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_other_types(name):
    """All ranks raise one error, also where blocks of both types came before: nobody waits for the others."""
    one, other, shown = BLOCKS[name]
    mesh = of_all()
    for block in (one, other):
        if name != "no array":
            spmd.from_local(block, mesh, P("i"))
    message = rf"ranks have blocks of different types: ranks? 0.*; rank 1: {re.escape(shown)}"
    all_raise(lambda: spmd.from_local(other if RANK == 1 else one, mesh, P("i")), ValueError, message)


@everywhere
def test_other_specs_and_values():
    mesh = spmd.make_mesh((-1, 2), ("i", "j"))
    all_raise(
        lambda: spmd.from_local(numpy.ones(2), mesh, P("j" if RANK == 1 else "i")), ValueError, r"rank 1: .*P\('j'\)"
    )
    block = numpy.full(2, RANK)
    spmd.from_local(block, mesh, P("i"))  # nobody looks
    with spmd.checking():
        spmd.from_local(block, mesh, P(("i", "j")))
        spmd.from_local(block // 2, mesh, P("i"))
        all_raise(lambda: spmd.from_local(block, mesh, P("i")), ValueError, r"different values of block: int64\[2\]")


@everywhere
@pytest.mark.parametrize("name", CLASSES)
def test_trees_of_every_class(name):
    """Arguments, specs and results of a shard_map; gradients, compiled too; what ranks compare of them."""
    make, cls = CLASSES[name]
    mesh, w, b, x = of_all(), numpy.arange(4.0), numpy.ones(4), numpy.arange(4.0)
    p = make(spmd.distribute(w, mesh, P("i")), b)

    def loss(p, x):
        body = lambda p, x: psum(np.sum(np.sin(parts(p)[0] * x) + parts(p)[1]), "i")  # noqa: E731
        return spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P())(p, x)

    for gradient in (md.grad(loss), md.jit(md.grad(loss))):
        actual = gradient(p, x)
        assert type(actual) is cls and parts(actual)[0].spec == P("i")
        for part, expected in zip(parts(spmd.gather(actual)), (x * numpy.cos(w * x), b)):
            numpy.testing.assert_allclose(part, expected)
    assert spmd.check_invariant(p, mesh) is p
    doubled = spmd.shard_map(lambda p: md.tree.map(lambda x: 2 * x, p), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    assert [part.gather().tolist() for part in parts(doubled(p))] == [(2 * w).tolist(), (2 * b).tolist()]
    path = md.tree.paths(md.tree.structure(make(w, b)))[0]
    other = make(w + (RANK == 1), b + (RANK == 1))
    all_raise(lambda: spmd.check_invariant(other, mesh), ValueError, re.escape(f"different values of x{path}: "))
