"""On MPI ranks: meshes of ranks, arrays of each rank's own blocks, trees of every class, processes."""

import copy
import pickle
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
from tests.checks.all_ranks import all_raise, line
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.checks.tree_classes import CLASSES, parts

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
everywhere = pytest.mark.parallel([2, 4])


# ---------------------------------------------------------------- meshes and processes


@everywhere
def test_a_size_that_is_left_open():
    assert spmd.make_mesh((-1,), ("i",)).is_like(line())
    assert spmd.make_mesh((2, -1), ("i", "j"), comm=WORLD).shape == {"i": 2, "j": RANKS // 2}
    for sizes, names in (((-1, 3), ("i", "j")), ((RANKS + 1,), ("i",))):
        all_raise(lambda s=sizes, n=names: spmd.make_mesh(s, n, backend="mpi"), f"{RANKS}")


@everywhere
def test_meshes_of_some_ranks_of_the_same_and_in_another_order():
    """MPI has a few thousand communicators: a script may make a mesh in each step."""
    half, turned = WORLD.Split(RANK % 2), WORLD.Split(0, -RANK)
    some, other = (spmd.make_mesh((comm.size,), ("i",), comm=comm) for comm in (half, turned))
    one, again = (spmd.make_mesh((RANKS,), ("i",)) for _ in range(2))
    assert one.is_like(again) and not one.is_like(other) and not one.is_like(mesh(RANKS))
    total = lambda on: mapped(lambda x: psum(x, "i"), on, P("i"), P())(np.ones(on.size))  # noqa: E731
    assert (total(some), total(one), total(again)) == (half.size, RANKS, RANKS)
    assert one.ranks.along(("i",)) is again.ranks.along(("i",))
    assert one.calls == again.calls == {"psum": 1}  # what they count is their own
    x, y, z = (spmd.distribute(numpy.arange(4.0 * RANKS), on, P("i")) for on in (one, again, other))
    numpy.testing.assert_array_equal((x + y).local, 2 * x.local)
    assert one.calls == again.calls == {"psum": 1} and other.calls == {}
    numpy.testing.assert_array_equal((x + z).local, 2 * x.local)
    assert other.calls == {"all_gather_invariant": 1}


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
    f = mapped(lambda x: x * spmd.process_index(), line(), P("i"), P("i"))
    all_raise(lambda: f(numpy.ones(RANKS)), r"collectives\.axis_index\('i'\)", md.VarianceError)


# ---------------------------------------------------------------- arrays of blocks


@pytest.mark.parallel(4)
def test_from_local_and_local_are_inverse():
    on, whole = mesh(2, 2, backend="mpi"), numpy.arange(64.0).reshape(8, 8)
    for spec in (P(None, "j"), P("j", "i"), P(("j", "i")), P()):
        x = spmd.distribute(whole, on, spec)
        block = x.local if spec.axes else x
        y = spmd.from_local(block, on, spec)
        assert not numpy.may_share_memory(y.local if spec.axes else y, block)
        assert spmd.spec_of(y) == spec and y.dtype == float
        numpy.testing.assert_array_equal(spmd.gather(y), whole)


@everywhere
def test_blocks_are_those_of_a_function_of_the_rank_or_what_a_rank_has_read():
    asked, spec = [], {"x": P("i"), "n": P()}

    def block_of(rank):
        asked.append(rank)
        return {"x": numpy.full((2, 3), rank), "n": numpy.float32(3)}

    for read in (block_of, block_of(RANK)):
        x = spmd.from_local(read, line(), spec)
        assert x["x"].gather()[:, 0].tolist() == [r for r in range(RANKS) for _ in range(2)]
        assert type(x["n"]) is numpy.float32 and x["n"] == 3
    assert asked == [RANK, RANK]


@pytest.mark.parallel([2, 3])
def test_padding():
    """Each rank cuts its rows, and the mask of them, from the whole, without a message."""
    line().reset_calls()
    padded, mask = spmd.pad(numpy.arange(1.0, 8.0), line(), P("i"))
    assert line().calls == {}
    rows = numpy.arange(-(-7 // RANKS)) + RANK * -(-7 // RANKS)
    assert mask.local.tolist() == (rows < 7).tolist()
    numpy.testing.assert_array_equal(padded.local[rows < 7], 1.0 + rows[rows < 7])
    assert float(np.mean(padded, where=mask)) == 4.0


@everywhere
def test_what_is_not_here_says_so():
    x = numpy.arange(4.0 * RANKS)
    y = spmd.distribute(x, line(), P("i"))
    line().reset_calls()
    assert f"; rank {RANK} at mesh coordinates " in repr(y) and str(y)  # printing never communicates
    with pytest.raises(ValueError, match=r"Call \.gather\(\) on every rank"):
        numpy.asarray(y)
    with pytest.raises(TypeError, match=r"Pickle x\.gather\(\), which every rank must call"):
        pickle.dumps({"w": y})
    assert copy.deepcopy({"w": y})["w"] is y
    assert line().calls == {}
    assert y.tolist() == x.tolist()  # all ranks gather
    assert line().calls == {"all_gather": 1}


MANY = {f"layer {k}": numpy.ones(2) for k in range(100)}
BLOCKS = {
    "one of many": (MANY, MANY | {"layer 99": numpy.ones(3)}, "block['layer 99']: f64[3]"),
    "a shape": (numpy.ones(2), numpy.ones(3), "block: f64[3]"),
    "no array": (numpy.ones(2), "text", "block: a str"),
    "nothing": ([numpy.ones(2)], [], "nothing more"),
    "a structure": ({"a": numpy.ones(2)}, {"b": numpy.ones(2)}, "block['b']: f64[2]"),
}


@everywhere
@each("name", BLOCKS)
def test_blocks_of_other_types(name):
    """All ranks raise one error, also where blocks of both types came before: nobody waits for the others."""
    one, other, shown = BLOCKS[name]
    for block in (one, other) if name != "no array" else ():
        spmd.from_local(block, line(), P("i"))
    message = rf"ranks have blocks of different types: ranks? 0.*; rank 1: {re.escape(shown)}"
    all_raise(lambda: spmd.from_local(other if RANK == 1 else one, line(), P("i")), message)
    all_raise(lambda: spmd.from_local(lambda r: numpy.ones(1 + (r == 1)), line(), P("i")), "different types")


@everywhere
def test_other_specs_and_values():
    on, block = mesh(RANKS // 2, 2, backend="mpi"), numpy.full(2, RANK)
    all_raise(lambda: spmd.from_local(numpy.ones(2), on, P("j" if RANK == 1 else "i")), r"rank 1: .*P\('j'\)")
    spmd.from_local(block, on, P("i"))  # nobody looks
    with spmd.checking():
        spmd.from_local(block, on, P(("i", "j")))
        spmd.from_local(block // 2, on, P("i"))
        all_raise(lambda: spmd.from_local(block, on, P("i")), r"different values of block: int64\[2\]")


@pytest.mark.parallel(2)
@each("name", CLASSES)
def test_trees_of_every_class(name):
    """Results and gradients of a shard_map are of the class; what ranks compare of them."""
    make, cls = CLASSES[name]
    w, b = numpy.arange(4.0), numpy.ones(4)
    p = make(spmd.distribute(w, line(), P("i")), b)
    gradient = md.grad(mapped(lambda p: psum(np.sum(parts(p)[0] ** 2 + parts(p)[1]), "i"), line(), P("i"), P()))(p)
    assert type(gradient) is cls and parts(gradient)[0].spec == P("i")
    assert [x.tolist() for x in parts(spmd.gather(gradient))] == [(2 * w).tolist(), b.tolist()]
    assert spmd.check_invariant(p, line()) is p
    path = md.tree.paths(md.tree.structure(make(w, b)))[0]
    other = make(w + (RANK == 1), b + (RANK == 1))
    all_raise(lambda: spmd.check_invariant(other, line()), re.escape(f"different values of x{path}: "))
