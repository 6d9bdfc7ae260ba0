"""Ranks that do not call the same are an error on all of them, which says who calls what; after that they go on."""

import itertools
import re

import numpy as np
import pytest
from mpi4py import MPI

import minidiff as md
import spmd
from collectives import all_gather, pmax, ppermute, psum, psum_scatter
from collectives.guards.mismatch import OFTEN, DisagreementError
from spmd import P

WORLD = MPI.COMM_WORLD
RANKS, OTHER = WORLD.size, WORLD.size // 2  # the rank that does something else
several = pytest.mark.parallel([2, 3, 4])
new_shapes = itertools.count(5)


@pytest.fixture(autouse=True)
def communicator():
    """One for each test: what ranks compare depends on which kinds of calls a communicator knows already.

    They compare no values, which they do at calls that depend on how often each function was called.
    """
    of_all.mesh = spmd.make_mesh((RANKS,), ("i",), comm=WORLD.Dup())
    with spmd.checking(False):
        yield


def of_all():
    return of_all.mesh


def on_ranks(f, x, mesh=None, jit=False):
    mapped = spmd.shard_map(f, mesh=mesh or of_all(), in_specs=P("i"), out_specs=P("i"), check_rep=False)
    return (md.jit(mapped) if jit else mapped)(x)


def total(x, **options):
    return on_ranks(lambda x: psum(x, "i"), x, **options)


def check_in_step():
    """All ranks call the same: a kind that none of them knows, so that all is compared."""
    x = np.ones(RANKS * next(new_shapes), np.float32)
    assert total(x).gather().sum() == x.sum() * RANKS


def fails(do, ours, theirs):
    """Run `do` with whether this rank is the one that does something else."""
    local = [f"rank {r}" for r in range(RANKS) if r != OTHER]
    others = local[0] if len(local) == 1 else f"ranks {', '.join(r for r in map(str, range(RANKS)) if r != str(OTHER))}"
    with pytest.raises(DisagreementError) as error:
        do(WORLD.rank == OTHER)
    message = WORLD.allgather(str(error.value))
    assert message == [message[0]] * RANKS
    assert re.search(rf"^  {others}: {re.escape(ours)}; test_mismatch_mpi.py:\d+: ", message[0], re.M), message[0]
    assert re.search(rf"^  rank {OTHER}: {re.escape(theirs)}; test_mismatch_mpi.py:\d+: ", message[0], re.M), message[0]
    name, _, of = ours.partition(" of ")
    alike = theirs.startswith(f"{name} of ") and "(" not in of + theirs
    assert ("An array has a different shape or dtype there" in message[0]) == alike, message[0]
    check_in_step()


def kinds(*makes):
    """A call of one of two kinds, both of which ranks know."""
    for make in makes:
        make()
    return lambda other: makes[other]()


PSUM = {dtype: f"psum over 'i' of {name}[2]" for dtype, name in (("f4", "f32"), ("i4", "i32"), ("f8", "f64"))}


@several
@pytest.mark.parametrize("jit", [False, True])
def test_other_types(jit):
    def of(n, dtype):
        return on_ranks(lambda x: psum(np.broadcast_to(x[0], (n,)).astype(dtype), "i"), np.ones(RANKS), jit=jit)

    fails(lambda other: of(2, "i4" if other else "f4"), PSUM["f4"], PSUM["i4"])
    fails(lambda other: of(3 if other else 2, "f8"), PSUM["f8"], "psum over 'i' of f64[3]")
    fails(lambda other: of(*((1, "c16") if other else (2, "f8"))), PSUM["f8"], "psum over 'i' of c128[1]")
    fails(lambda other: of(*((2, "u1") if other else (2, "i1"))), "psum over 'i' of i8[2]", "psum over 'i' of u8[2]")


@several
def test_other_collectives():
    x = np.arange(2.0 * RANKS)
    call = {
        "psum over 'i' of f64[2]": lambda x: psum(x, "i"),
        "pmax over 'i' of f64[2]": lambda x: pmax(x, "i"),
        "all_gather over 'i' of f64[2] (axis=0, tiled=True)": lambda x: all_gather(x, "i", tiled=True),
        "all_gather over 'i' of f64[2] (axis=1, tiled=False)": lambda x: all_gather(x, "i", axis=1),
        "ppermute over 'i' of f64[2] (perm=((0, 1),))": lambda x: ppermute(x, "i", [(0, 1)]),
        "ppermute over 'i' of f64[2] (perm=((1, 0),))": lambda x: ppermute(x, "i", [(1, 0)]),
        "all_gather over 'i' of f64[2]": None,
    }
    for ours, theirs in itertools.pairwise(call):
        if theirs == "all_gather over 'i' of f64[2]":
            split = spmd.distribute(x, of_all(), P("i"))
            on_ranks(lambda x: x, x)  # so that the call of shard_map is known
            fails(lambda other, f=call[ours]: split.gather() if other else on_ranks(f, x), ours, theirs)  # noqa: B023
        else:
            fails(lambda other, ours=ours, theirs=theirs: on_ranks(call[theirs if other else ours], x), ours, theirs)


@several
def test_another_order_of_known_ones():
    """They are compared when there were so many, where something new is called, or at once where they are large."""
    orders = [("f4", "i4"), ("i4", "f4")]
    floats, integers = np.ones(2 * RANKS, "f4"), np.ones(2 * RANKS, "i4")
    call = kinds(lambda: total(floats), lambda: total(integers))
    fails(lambda other: [call(other ^ (k % 2)) for k in range(OFTEN)], PSUM[orders[0][0]], PSUM[orders[1][0]])
    call = kinds(lambda: total(floats), lambda: total(integers))
    fails(lambda other: [call(other), call(not other), check_in_step()], PSUM["f4"], PSUM["i4"])
    long = np.ones(9 * RANKS, "f4")  # short sums are messages: MPI itself would complain of a longer one
    call = kinds(lambda: total(floats), lambda: total(long))
    fails(lambda other: [call(other), call(not other), check_in_step()], PSUM["f4"], "psum over 'i' of f32[9]")
    large = [np.ones(2**21 * RANKS, dtype) for dtype in orders[0]]
    call = kinds(lambda: total(large[0]), lambda: total(large[1]))
    fails(call, "psum over 'i' of f32[2097152]", "psum over 'i' of i32[2097152]")


@several
@pytest.mark.parametrize("seed", range(4))
def test_one_call_that_is_another(seed):
    """Anywhere in a random sequence. Without it, there is no error."""
    rng = np.random.default_rng(seed)
    x = {dtype: np.ones(RANKS, dtype) for dtype in ("f4", "i4", "u4")}
    bodies = [
        lambda x: psum(x, "i"),
        lambda x: pmax(x, "i"),
        lambda x: psum_scatter(x * np.ones(RANKS, "?"), "i", tiled=True),
    ]
    calls = [(bodies[rng.integers(3)], str(rng.choice([*x]))) for _ in range(rng.integers(1, 150))]
    for f, dtype in calls:
        on_ranks(f, x[dtype])
    check_in_step()
    at = rng.integers(len(calls))
    (f, dtype), others = calls[at], [*x]
    with pytest.raises(DisagreementError):
        other = others[others.index(dtype) - 1]
        for k, (f, dtype) in enumerate(calls):
            on_ranks(f, x[other if k == at and WORLD.rank == OTHER else dtype])
        check_in_step()
    check_in_step()


@pytest.mark.parallel(4)
def test_axes_whose_communicators_are_not_there_yet():
    # A communicator of its own: meshes of one shape on the same ranks use the same ones again.
    grid = spmd.make_mesh((2, 2), ("row", "column"), comm=WORLD.Dup())

    def along(axis):
        f = spmd.shard_map(lambda x: psum(x, axis), grid, in_specs=P(("row", "column")), out_specs=P(("row", "column")))
        return f(np.ones(4))

    with pytest.raises(DisagreementError, match=r"rank 2: the first collective over 'column'; test_mismatch"):
        along("column" if WORLD.rank == OTHER else "row")
    assert along("row").gather().tolist() == along("column").gather().tolist() == [2.0] * 4


@several
def test_meshes_on_communicators_of_a_users():
    half = WORLD.Split(WORLD.rank % 2, -WORLD.rank)
    mesh = spmd.make_mesh((half.size,), ("i",), comm=half)
    if WORLD.rank % 2 or half.size == 1:  # the others know nothing of it
        assert total(np.ones(half.size), mesh=mesh).gather().sum() == half.size**2
        return
    with pytest.raises(DisagreementError, match=r"rank 0: args\[0\]: f64\[2\]; (.*\n)+  rank 2: args\[0\]: i64\[2\]; "):
        total(np.ones(half.size, int if WORLD.rank == 2 else float), mesh=mesh)
    assert total(np.ones(half.size), mesh=mesh).gather().sum() == half.size**2
