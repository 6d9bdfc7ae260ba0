"""Ranks of an interactive session: one that fails is an error on all that wait for it, and the next cell works."""

import itertools
import json
import subprocess
import sys

import pytest

from tests.checks.launch import INTERRUPTING, mpiexec

#: Runs cells on every rank as a Jupyter engine does; as the client does, all of them end before the next begins.
ENGINE = """
import io, json, sys
sys.ps1 = ">>> "
from IPython.core.interactiveshell import InteractiveShell
from mpi4py import MPI
shell = InteractiveShell.instance()
shell.InteractiveTB.set_mode("Minimal")
printed, sys.stdout, found = sys.stdout, io.StringIO(), []
for cell in json.loads(sys.argv[1]):
    result = shell.run_cell(cell, silent=cell.startswith("# silent"))
    error = result.error_before_exec or result.error_in_exec
    found.append(f"{type(error).__name__}: {error}" if error else repr(result.result))
    MPI.COMM_WORLD.Barrier()
sys.stdout = printed
if MPI.COMM_WORLD.rank == 0:
    everywhere = [found, *[MPI.COMM_WORLD.recv(source=r) for r in range(1, MPI.COMM_WORLD.size)]]
    print(json.dumps(everywhere))
else:
    MPI.COMM_WORLD.send(found, 0)
MPI.COMM_WORLD.Barrier()
import os
sys.stdout.flush()
os._exit(0)  # what was abandoned is never finished
"""
RANKS = 4
SETUP = (
    INTERRUPTING
    + """
import numpy as np
import spmd
from collectives import pmax, ppermute, psum
from spmd import P
mesh = spmd.make_mesh((2, 2), ("i", "j"))
rank, both = mesh.rank, ("i", "j")
def on_ranks(f, out_specs=P()):
    return spmd.shard_map(f, mesh=mesh, in_specs=P(both), out_specs=out_specs)(np.arange(4.0))
def fail_on(which, x):
    if rank == which:
        raise OSError(f"mistake on {which}")
    return x
"""
)
ALL = "(float(on_ranks(lambda x: psum(x, both))[0]), on_ranks(lambda x: psum(x, 'j'), P('i')).gather().tolist())"
SUMS = repr((6.0, [1.0, 5.0]))


def run(*cells):
    """Return each cell's outcome on each rank: the repr of its value, or its error."""
    done = mpiexec(RANKS, "-c", ENGINE, json.dumps([SETUP, *cells]))
    assert done.stdout, done.stderr  # the exit code is the launcher's: what MPI was left with counts for some
    everywhere = json.loads(done.stdout.partition("\n")[0])  # some launchers add a word about the end
    assert [actual[0] for actual in everywhere] == ["None"] * RANKS
    return [[actual[1 + k] for actual in everywhere] for k in range(len(cells))]


def waited_for(rank, error):
    return f"OtherRankError: rank {rank} failed, and this rank waited for it. There it was {error}"


def one_that_fails_is_an_error_on_all_that_wait_for_it():
    in_a_body = "_ = on_ranks(lambda x: psum(fail_on(2, x), 'i'), P('j'))"
    outside = "fail_on(1, 0)\n" + ALL
    actual = yield [ALL, in_a_body, ALL, outside, "if rank == 3: undefined", "# silent\n" + ALL, ALL]
    assert actual[0] == actual[2] == actual[6] == [SUMS] * RANKS and actual[5] == ["None"] * RANKS
    # Only rank 0 waits for rank 2 along i; the others get what they came for.
    assert actual[1] == [waited_for(2, "OSError: mistake on 2"), "None", "OSError: mistake on 2", "None"]
    waiting = waited_for(1, "OSError: mistake on 1")
    assert actual[3] == [waiting, "OSError: mistake on 1", waiting, waiting]
    assert actual[4] == ["None"] * 3 + ["NameError: name 'undefined' is not defined"]


def a_mistake_that_all_make():
    """Before anything was sent; then of one alone, where ranks are in the middle of going over to new communicators."""
    only_one = "_ = on_ranks(lambda x: psum(fail_on(1, x), 'i'), P('j'))"
    out_of_range = "on_ranks(lambda x: ppermute(x, both, [(0, 9)]))"
    actual = yield ["on_ranks(lambda x: x)", ALL, out_of_range, only_one, only_one, ALL]
    assert all(x.startswith("VarianceError") for x in actual[0]) and all(x.startswith("ValueError") for x in actual[2])
    assert actual[1] == actual[5] == [SUMS] * RANKS
    waiting = waited_for(1, "OSError: mistake on 1")
    assert actual[3] == actual[4] == [waiting, "OSError: mistake on 1", waiting, waiting]


def what_is_not_the_same_is_an_error_on_all_and_the_next_cell_works():
    """A dtype, a collective, and the order of two that were called before."""
    sums = "[float(on_ranks(lambda x: psum(x.astype(t), both))[0]) for t in "
    differ = [
        "_ = on_ranks(lambda x: psum(x.astype('f4' if rank == 1 else 'i4'), both))",
        "_ = on_ranks(lambda x: pmax(x, both) if rank == 1 else psum(x, both))",
        sums + "('f4', 'i4')]\n_ = " + sums + "(('i4', 'f4') if rank == 1 else ('f4', 'i4'))]\n" + ALL,
    ]
    actual = yield [ALL, *[cell for d in differ for cell in (d, ALL)]]
    assert actual[0] == actual[2] == actual[4] == actual[6] == [SUMS] * RANKS
    message = [
        ("psum", "i32[1]", "psum", "f32[1]"),
        ("psum", "f64[1]", "pmax", "f64[1]"),
        ("psum", "f32[1]", "psum", "i32[1]"),
    ]
    for errors, (name, type, other, another) in zip(actual[1::2], message):
        assert len(set(errors)) == 1 and errors[0].startswith("DisagreementError: ranks do not call the same")
        assert f"\n  ranks 0, 2, 3: {name} over 'i', 'j' of {type}; line " in errors[0]
        assert f"\n  rank 1: {other} over 'i', 'j' of {another}; line " in errors[0]


def what_waits_can_be_interrupted():
    """Rank 3 does not come the third time, when ranks do not compare values, which would be a wait for it too.

    Of the permutation, it is the source: nobody but rank 0 waits.
    """
    interrupt = """
def call():
    on_ranks(lambda x: {}, {})
call()
call()
if rank == 0:
    interrupt_once_it_waits()
if rank != 3:
    call()
"""
    calls = [("psum(x, both)", "P()"), ("pmax(x, both)", "P()"), ("ppermute(x, both, [(3, 0)])", "P(both)")]
    cells = [cell for call in calls for cell in (interrupt.format(*call), ALL)]
    actual = yield [ALL, *cells]
    assert actual[0] == actual[2] == actual[4] == actual[6] == [SUMS] * RANKS
    waiting = waited_for(0, "KeyboardInterrupt: ")
    assert actual[1] == actual[3] == ["KeyboardInterrupt: ", waiting, waiting, "None"]
    assert actual[5] == ["KeyboardInterrupt: ", "None", "None", "None"]


#: Each says which cells to run, and looks at what they give.
CHECKS = [
    one_that_fails_is_an_error_on_all_that_wait_for_it,
    a_mistake_that_all_make,
    what_is_not_the_same_is_an_error_on_all_and_the_next_cell_works,
    what_waits_can_be_interrupted,
]


def test_the_next_cell_works():
    """Whatever happened in those before: all of them are of one session."""
    checks = {check.__name__: check() for check in CHECKS}
    cells = {name: next(check) for name, check in checks.items()}
    results = iter(run(*itertools.chain.from_iterable(cells.values())))
    for name, check in checks.items():
        with pytest.raises(StopIteration):  # it has come to its end
            check.send(list(itertools.islice(results, len(cells[name]))))


def test_without_ipython_an_interrupted_mesh_says_so(tmp_path):
    program = (
        INTERRUPTING
        + """
sys.ps1 = ">>> "
import numpy as np
import spmd
from collectives import psum
from spmd import P
mesh = spmd.make_mesh((2,), ("i",))
total = spmd.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
total(np.ones(2))
if mesh.rank == 0:
    interrupt_once_it_waits()
    for _ in range(2):
        try:
            total(np.ones(2))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    open(sys.argv[1], "x").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os._exit(0)
"""
    )
    done = mpiexec(2, "-c", program, str(tmp_path / "printed"))
    assert done.stdout.splitlines()[0] == "KeyboardInterrupt: "
    assert done.stdout.splitlines()[1].startswith("RuntimeError: a collective of this mesh was interrupted")


def test_scripts_are_left_alone():
    program = "import spmd; print(type(spmd.make_mesh((2,), ('i',)).ranks.comm).__name__)"
    assert mpiexec(2, "-c", program).stdout.replace("\n", "") == "WatchedComm" * 2
    assert subprocess.run([sys.executable, "-c", "import collectives.guards.notebook"], check=True).returncode == 0
