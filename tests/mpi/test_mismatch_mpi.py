"""Ranks that do not call the same are an error on all of them, which says who calls what; after that they go on."""

import itertools
import re

import numpy as np
import pytest
from mpi4py import MPI

import spmd
from collectives import all_gather, pmax, ppermute, psum, psum_scatter
from collectives.guards.mismatch import OFTEN, DisagreementError
from spmd import P
from tests.checks.all_ranks import all_raise
from tests.checks.samples import each

WORLD = MPI.COMM_WORLD
RANKS, OTHER = WORLD.size, WORLD.size // 2  # the rank that does something else
IS_OTHER = WORLD.rank == OTHER
several = pytest.mark.parallel([2, 3])
new_shapes = itertools.count(5)


@pytest.fixture
def line():
    """A mesh of its own for each test: ranks compare calls by the kinds that a communicator knows already.

    They compare no values, which they do at calls that depend on how often each function was called.
    """
    with spmd.checking(False):
        yield spmd.make_mesh((RANKS,), ("i",), comm=WORLD.Dup())


def on_ranks(line, f, x):
    return spmd.shard_map(f, mesh=line, in_specs=P("i"), out_specs=P("i"), check_rep=False)(x)


def total(line, n, dtype="f8"):
    return on_ranks(line, lambda x: psum(x, "i"), np.ones(line.size * n, dtype))


def check_in_step(line):
    """All ranks call the same: a kind that none of them knows, so that all is compared."""
    n = next(new_shapes)
    assert total(line, n, dtype="f4").gather().sum() == n * RANKS**2


def fails(line, do, ours, theirs):
    """All ranks raise one error when one rank does something else: it says what that rank, and the others, call."""
    rest = [str(r) for r in range(RANKS) if r != OTHER]
    others = f"rank{'s' * (len(rest) > 1)} {', '.join(rest)}"
    message = all_raise(do, error=DisagreementError)
    for who, text in ((others, ours), (f"rank {OTHER}", theirs)):
        assert re.search(rf"^  {who}: {re.escape(text)}; test_mismatch_mpi.py:\d+: ", message, re.M), message
    name, _, of = ours.partition(" of ")
    alike = theirs.startswith(f"{name} of ") and "(" not in of + theirs
    assert ("An array has a different shape or dtype there" in message) == alike, message
    check_in_step(line)


CALLS = {
    "psum over 'i' of f64[2]": lambda x: psum(x, "i"),
    "psum over 'i' of f32[2]": lambda x: psum(x.astype("f4"), "i"),
    "psum over 'i' of i32[2]": lambda x: psum(x.astype("i4"), "i"),
    "psum over 'i' of f64[1]": lambda x: psum(x[:1], "i"),
    "pmax over 'i' of f64[2]": lambda x: pmax(x, "i"),
    "all_gather over 'i' of f64[2] (axis=0, tiled=True)": lambda x: all_gather(x, "i", tiled=True),
    "all_gather over 'i' of f64[2] (axis=1, tiled=False)": lambda x: all_gather(x, "i", axis=1),
    "ppermute over 'i' of f64[2] (perm=((0, 1),))": lambda x: ppermute(x, "i", [(0, 1)]),
    "ppermute over 'i' of f64[2] (perm=((1, 0),))": lambda x: ppermute(x, "i", [(1, 0)]),
}


@several
@each("ours, theirs", itertools.pairwise(CALLS))
def test_other_collectives(ours, theirs, line):
    fails(line, lambda: on_ranks(line, CALLS[theirs if IS_OTHER else ours], np.arange(2.0 * RANKS)), ours, theirs)


@several
def test_a_gather_where_others_permute(line):
    x, (text, f) = np.arange(2.0 * RANKS), [*CALLS.items()][-1]
    split = spmd.distribute(x, line, P("i"))
    on_ranks(line, lambda x: x, x)  # so that the call of shard_map is known
    do = lambda: split.gather() if IS_OTHER else on_ranks(line, f, x)  # noqa: E731
    fails(line, do, text, "all_gather over 'i' of f64[2]")


@several
@each("way, one, other", [
    ("often", ("f4", 2, "f32"), ("i4", 2, "i32")),
    ("before a new kind", ("f4", 2, "f32"), ("i4", 2, "i32")),
    ("before a new kind", ("f4", 2, "f32"), ("f4", 9, "f32")),  # short sums are messages: MPI itself would complain
    ("once", ("f4", 2**21, "f32"), ("i4", 2**21, "i32")),
])  # fmt: skip
def test_another_order_of_known_calls(way, one, other, line):
    """They are compared when there were so many, where something new is called, or at once where they are large."""
    known = [lambda kind=kind: total(line, kind[1], dtype=kind[0]) for kind in (one, other)]
    for call in known:
        call()
    times = {"often": OFTEN, "before a new kind": 2, "once": 1}[way]

    def do():
        for k in range(times):
            known[IS_OTHER ^ (k % 2)]()
        if way == "before a new kind":
            check_in_step(line)

    fails(line, do, *[f"psum over 'i' of {name}[{n}]" for _, n, name in (one, other)])


BODIES = [
    lambda x: psum(x, "i"),
    lambda x: pmax(x, "i"),
    lambda x: psum_scatter(x * np.ones(RANKS, "?"), "i", tiled=True),
]


@several
@each("seed", range(2))
def test_one_call_that_is_another(seed, line):
    """Anywhere in a random sequence. Without it, there is no error."""
    rng, dtypes = np.random.default_rng(seed), ["f4", "i4", "u4"]
    calls = [(BODIES[rng.integers(3)], str(rng.choice(dtypes))) for _ in range(rng.integers(1, 100))]
    for f, dtype in calls:
        on_ranks(line, f, np.ones(RANKS, dtype))
    check_in_step(line)
    at = rng.integers(len(calls))
    wrong = dtypes[dtypes.index(calls[at][1]) - 1]
    with pytest.raises(DisagreementError):
        for k, (f, dtype) in enumerate(calls):
            on_ranks(line, f, np.ones(RANKS, wrong if k == at and IS_OTHER else dtype))
        check_in_step(line)
    check_in_step(line)


@pytest.mark.parallel(4)
def test_axes_whose_communicators_are_not_there_yet():
    # A communicator of its own: meshes of one shape on the same ranks use the same ones again.
    grid = spmd.make_mesh((2, 2), ("row", "column"), comm=WORLD.Dup())

    def along(axis):
        f = spmd.shard_map(lambda x: psum(x, axis), grid, in_specs=P(("row", "column")), out_specs=P(("row", "column")))
        return f(np.ones(4))

    with pytest.raises(DisagreementError, match=r"rank 2: the first collective over 'column'; test_mismatch"):
        along("column" if IS_OTHER else "row")
    assert along("row").gather().tolist() == along("column").gather().tolist() == [2.0] * 4


@several
def test_meshes_on_communicators_of_a_users():
    half = WORLD.Split(WORLD.rank % 2, -WORLD.rank)
    mesh = spmd.make_mesh((half.size,), ("i",), comm=half)
    if not WORLD.rank % 2 and half.size > 1:  # the others know nothing of it
        with pytest.raises(DisagreementError, match=r"rank 0: args\[0\]: f64\[2\]; (.*\n)+  rank 2: args\[0\]: i64"):
            total(mesh, 1, dtype=int if WORLD.rank == 2 else float)
    assert total(mesh, 1).gather().sum() == half.size**2
