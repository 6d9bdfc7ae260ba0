"""Ranks that fail: the job ends, soon, with one traceback that says which rank it was."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.lockstep import LINE, Kind, agree, disagreement
from collectives.watch import Call, State, stuck

SETUP = """
import numpy as np
import spmd
from collectives import psum
from spmd import P
"""
RUN = """
mesh = spmd.make_mesh((4,), ("i",))
total = spmd.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
total(np.ones(4))
"""

FAILURES = {
    # what goes wrong: (program, rank that speaks, last line of its traceback)
    "on one rank, while the others wait in a psum": (
        SETUP + RUN + "if mesh.rank == 2: raise RuntimeError('no such file')\n" + "total(np.ones(4))",
        2,
        "RuntimeError: no such file",
    ),
    "on one rank, in a body": (
        SETUP
        + RUN
        + "rank = mesh.rank\n"
        + "f = lambda x: psum(x / (1 if rank != 3 else 'three'), 'i')\n"
        + "spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.ones(4))",
        3,
        "TypeError: ",
    ),
    "on one rank, before there is a mesh": (
        SETUP + "from spmd.launch import launcher_rank\nif launcher_rank() == 1: raise KeyError('data')\n" + RUN,
        1,
        "KeyError: 'data'",
    ),
    "on all ranks": (SETUP + RUN + "total(np.ones(5))", 0, "ValueError: args[0] has shape (5,)"),
    "a mesh of another size than there are ranks": (
        SETUP + "spmd.make_mesh((4, 2), ('x', 'y'))",
        0,
        "ValueError: make_mesh: a mesh of 4 x 2 needs 8 ranks, but MPI has 4. Start the program with `mpirun -n 8`",
    ),
}


def launching(ranks, *command):
    """A process that runs a Python command on ranks, as a user does: outside of what this process knows of MPI.

    The launcher is that of this Python's own MPI, if it has one. With None for ranks there is no launcher.
    """
    launcher = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or "mpiexec"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI_", "HYDRA", "OMPI_COMM"))}
    launched = [launcher, "-n", str(ranks)] if ranks else []
    return subprocess.Popen(
        [*launched, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def mpiexec(ranks, *command, timeout=60):
    """What came of a command on ranks."""
    with launching(ranks, *command) as job:
        try:
            out, err = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


@pytest.mark.parametrize("what", FAILURES)
def test_the_job_ends(what):
    program, rank, message = FAILURES[what]
    start = time.monotonic()
    run = mpiexec(4, "-c", program)
    assert run.returncode != 0
    assert time.monotonic() - start < 10
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    assert f"[rank {rank}] {message}" in run.stderr
    assert f"[rank {rank}] rank {rank} of 4 failed; the job ends." in run.stderr


WAITS = {
    # what some ranks wait for: (program, what is said of ranks)
    "one that left, with exit code 0": (
        "if mesh.rank == 1: sys.exit(0)\ntotal(np.ones(4))",
        [(1, "has come to the end of its program"), (3, "is in an MPI Allreduce with 0, 1, 2; line ")],
    ),
    "rank 0, that left": ("if mesh.rank: total(np.ones(4))", [(0, "has come to the end of its program")]),
    "one that is in another collective": (
        "gather = spmd.shard_map(lambda x: x, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.ones(4)).gather\n"
        "gather()\n"
        "total(np.ones(4)) if mesh.rank != 2 else gather()",
        [(0, "is in an MPI Allreduce with "), (2, "is in an MPI Allgather with ")],
    ),
    "one that permutes": (
        "turn = lambda x: ppermute(x, 'i', [(0, 1), (1, 2), (2, 3), (3, 0)])\n"
        "turned = spmd.shard_map(turn, mesh=mesh, in_specs=P('i'), out_specs=P('i'))\n"
        "turned(np.ones(4))\n"
        "total(np.ones(4)) if mesh.rank != 3 else turned(np.ones(4))",
        [(0, "is in an MPI Allreduce with "), (3, "is in an MPI Waitall with ")],
    ),
    "one along another axis": (
        "grid = spmd.make_mesh((2, 2), ('x', 'y'))\n"
        "along = lambda a: spmd.shard_map(lambda x: psum(x, a), mesh=grid, in_specs=P(a), out_specs=P())(np.ones(4))\n"
        "along('x'), along('y'), along('y' if mesh.rank == 3 else 'x')",
        [(3, "is in an MPI Allreduce with 2; line "), (1, "is in an MPI Allreduce with 3; line ")],
    ),
    "one that came to a call of a new kind": (
        "total(np.ones(8 if mesh.rank == 1 else 4))",
        [
            (1, "has come to shard_map of <lambda> over 'i' (sizes=(4,), digest="),
            (2, "is in an MPI Allreduce"),
        ],
    ),
    "one that takes another one of two meshes": (
        "meshes = [spmd.make_mesh(sizes, ('x', 'y')) for sizes in ((2, 2), (4, 1))]\n"
        "f = lambda x: psum(x, ('x', 'y'))\n"
        "spmd.shard_map(f, mesh=meshes[mesh.rank == 3], in_specs=P('x'), out_specs=P())(np.ones(4))",
        [
            (0, "has come to shard_map of <lambda> over 'x', 'y' (sizes=(2, 2), digest="),
            (3, "has come to shard_map of <lambda> over 'x', 'y' (sizes=(4, 1), digest="),
        ],
    ),
    "one that clears up after an error": (
        "try:\n    if mesh.rank == 1: raise ValueError('no file')\n    total(np.ones(4))\nfinally: total(np.ones(8))",
        [(1, "has come to shard_map of <lambda> over 'i' (sizes=(4,), digest=")],
    ),
    "one that uses another mesh": (
        "on = [spmd.make_mesh((4,), (a,)) for a in 'ab']\n"
        "for m in on if mesh.rank else on[::-1]:\n"
        "    a = m.axis_names[0]\n"
        "    spmd.shard_map(lambda x: psum(x, a), mesh=m, in_specs=P(a), out_specs=P())(np.ones(4))",
        [(0, "has come to shard_map of <lambda> over 'b' "), (3, "has come to shard_map of <lambda> over 'a' ")],
    ),
    "one that left, on ranks of a user's": (
        "from mpi4py import MPI\n"
        "half = MPI.COMM_WORLD.Split(mesh.rank // 2, -mesh.rank)\n"
        "pair = spmd.make_mesh((2,), ('i',), comm=half)\n"
        "both = spmd.shard_map(lambda x: psum(x, 'i'), mesh=pair, in_specs=P('i'), out_specs=P())\n"
        "both(np.ones(2))\n"
        "if mesh.rank != 2: both(np.ones(2))",
        [(2, "has come to the end of its program"), (3, "is in an MPI Allreduce with 2; line ")],
    ),
}


@pytest.mark.parametrize("what", WAITS)
def test_ranks_that_would_wait_for_ever(what):
    program, said = WAITS[what]
    run = mpiexec(4, "-c", "import sys\nfrom collectives import ppermute\n" + SETUP + RUN + program)
    assert run.returncode != 0
    speaks = re.search(r"^\[rank (\d)\] (Ranks wait|A rank waits) for others that never come:$", run.stderr, re.M)
    assert speaks[1] == ("3" if "user's" in what else "0")  # the first rank of those
    for rank, text in said:
        assert f"[rank {speaks[1]}]   rank {rank} {text}" in run.stderr
    assert ("; it is handling ValueError: no file\n" in run.stderr) == ("after an error" in what)


def test_what_is_not_the_same_at_the_end():
    """All of them come to it: what they called since they last compared is compared there."""
    order = "for t in ('f4', 'i4'): total(np.ones(4, t))\n"
    swapped = "for t in (('i4', 'f4') if mesh.rank == 2 else ('f4', 'i4')): total(np.ones(4, t))\n"
    run = mpiexec(4, "-c", SETUP + RUN + order + swapped)
    assert run.returncode != 0
    assert "[rank 0] ranks do not call the same collective, of values of the same types:\n" in run.stderr
    assert "[rank 0]   ranks 0, 1, 3: psum over 'i' of f32[1]; line " in run.stderr
    assert "[rank 0]   rank 2: psum over 'i' of i32[1]; line " in run.stderr


def test_the_same_in_other_lines():
    """What ranks call must be the same; in which lines is up to the program."""
    program = (
        "x = spmd.distribute(np.ones(8), mesh, P('i'))\n"
        "if mesh.rank:\n    x.gather()\nelse:\n    spmd.distribute(np.ones(8), mesh, P('i')).gather()\n"
        "spmd.distribute(np.ones(8), mesh, P('i')).gather()\n"
        "print('done')"
    )
    run = mpiexec(4, "-c", SETUP + RUN + program)
    assert (run.returncode, run.stderr, run.stdout.count("done")) == (0, "", 4)


def test_ranks_that_are_late_are_waited_for():
    """In a program that computes, and where rank 0 is the first to end, or the last."""
    program = (
        "import time\n"
        "time.sleep(3.5 * (mesh.rank == 2))\n"
        "total(np.ones(4))\n"
        "time.sleep(3.5 * (mesh.rank == 3))\n"
        "print('done')"
    )
    run = mpiexec(4, "-c", SETUP + RUN + program)
    assert (run.returncode, run.stderr, run.stdout.count("done")) == (0, "", 4)


def call(number, *ranks, on="a", method="Allreduce"):
    return Call((on,), number, method, ranks)


@pytest.mark.parametrize(
    "states, expected",
    [
        ([(0, call(5, 0, 1), {"a": 5})], []),  # 1 computes
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(5, 0, 1), {"a": 5})], []),  # they are at it
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(5, 0, 1, method="Bcast"), {"a": 5})], [0, 1]),
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(6, 0, 1), {"a": 6})], []),  # 0 is about to come to 6
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(1, 0, 1, on="b"), {"a": 4, "b": 1})], [0, 1]),
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(1, 0, 1, on="b"), {"a": 5, "b": 1})], []),
        ([(0, call(5, 0, 1), {"a": 5}), (1, None, {"a": 4})], [0]),
        ([(0, call(5, 0, 1), {"a": 5}), (1, None, {"a": 5})], [0]),  # what it came to was something else
        ([(0, call(5, 0, 1, 2), {"a": 5}), (1, None, {"a": 5})], []),  # 2 computes
        ([(0, call(5, 0, 1), {"a": 5}), (1, call(1, 1, 2, on="b"), {"a": 4, "b": 1})], []),  # 2 computes
        (
            [
                (0, call(1, 0, 1), {"a": 1}),
                (1, call(1, 1, 2, on="b"), {"b": 1}),
                (2, call(1, 0, 2, on="c"), {"c": 1}),
            ],
            [0, 1, 2],
        ),
    ],
)
def test_who_waits_for_ever(states, expected):
    states = {rank: State(rank, call, {(on,): n for on, n in begun.items()}) for rank, call, begun in states}
    assert stuck(states) == expected


@given(st.data())
def test_ranks_of_one_program_never_wait_for_ever(data):
    """Ranks that make the same calls in one order, each as far as it has come; some compute.

    (One that all others of a call have left behind, and the program too, is about to be through.)
    """
    ranks = range(4)
    groups = data.draw(st.lists(st.sampled_from([(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]), max_size=8))
    done = dict.fromkeys(ranks, 0)  # how many of the groups' calls are behind each rank
    for _ in range(data.draw(st.integers(0, 20))):
        r = data.draw(st.sampled_from(ranks))
        k = done[r]
        if k < len(groups) and (r not in groups[k] or all(done[m] >= k for m in groups[k])):
            done[r] += 1
    states = {}
    for r, k in done.items():
        begun = Counter((group,) for group in groups[: k + 1] if r in group)
        if k == len(groups):
            states[r] = State(r, None, begun)
        elif r in groups[k] and min(done[m] for m in groups[k] if m != r) < len(groups) and data.draw(st.booleans()):
            states[r] = State(r, Call((groups[k],), begun[groups[k],], "Allreduce", groups[k]), begun)
    assert stuck(states) == []


KINDS = st.builds(Kind, st.sampled_from("abc"), st.sampled_from(["", "line 1", "ü" * 900]), st.just(1))


@given(st.lists(st.lists(KINDS, max_size=5), min_size=2, max_size=3))
def test_the_first_call_that_is_not_the_same(made):
    """Whatever the lines are, which may be too long to be said in full."""
    texts = [[kind.text for kind in kinds] for kinds in made]
    said = {rank: [str(kind) for kind in kinds] for rank, kinds in enumerate(made)}
    assert all(len(line.encode()) < LINE for lines in said.values() for line in lines)
    assert agree(said.values()) == all(t == texts[0] for t in texts)
    if not agree(said.values()):
        same = next(n for n in range(6) if len({tuple(t[: n + 1]) for t in texts}) > 1)
        report = disagreement(said)
        for rank, kinds in enumerate(made):
            call = str(kinds[same]) if same < len(kinds) else "no further one"
            assert re.search(rf"  ranks? ([0-9, ]+, )?{rank}(, [0-9, ]+)?: {re.escape(call)}\n", report)


def test_a_job_that_succeeds_exits_with_zero():
    run = mpiexec(4, "-c", SETUP + RUN + "if mesh.rank == 3: print(mesh.backend, mesh.calls)")
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "mpi {'psum': 1}\n")


def test_asarray_of_what_is_elsewhere():
    program = (
        SETUP
        + RUN
        + (
            "y = spmd.shard_map(lambda x: x, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.arange(4.0))\n"
            "assert 'rank %d at mesh coordinates (i,) = (%d,) has' % (mesh.rank, mesh.rank) in repr(y)\n"
            "assert y.gather().tolist() == [0.0, 1.0, 2.0, 3.0]\n"
            "np.asarray(y)\n"
        )
    )
    run = mpiexec(4, "-c", program)
    assert run.returncode != 0
    assert "is split over the ranks of Mesh(i: 4; 4 ranks, mpi) as P('i')" in run.stderr
    assert "Call .gather() on every rank" in run.stderr


def test_unmapped_values_are_compared_where_the_environment_asks_for_it(monkeypatch):
    program = (
        "w = np.random.default_rng(mesh.rank // 3).normal(size=2)\n"
        "f = spmd.shard_map(lambda w, x: psum(w * x, 'i'), mesh=mesh, in_specs=(P(), P('i')), out_specs=P())\n"
        "md.jit(f)(w, np.ones((4, 2)))\n"
        "print('done')"
    )
    for switch, found in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("SPMD_CHECKING", switch)
        run = mpiexec(4, "-c", "import minidiff as md\n" + SETUP + RUN + program)
        assert (run.returncode != 0, "done" in run.stdout) == (found, not found), run.stderr
        said = "ValueError: ranks have different values of args[0]: float64[2] (line 13): ranks 0, 1, 2: "
        assert (said in run.stderr) == found, run.stderr
