"""Ranks of an interactive session: one that fails is an error on all that wait for it, and the next cell works."""

import json
import re
import subprocess
import sys

from tests.checks.launch import INTERRUPTING, mpiexec

#: Runs cells on every rank as a Jupyter engine does; as the client does, all of them end before the next begins.
ENGINE = """
import io, json, sys
sys.ps1 = ">>> "
from IPython.core.interactiveshell import InteractiveShell
from mpi4py import MPI
shell = InteractiveShell.instance()
shell.InteractiveTB.set_mode("Minimal")
printed, sys.stdout, outcomes = sys.stdout, io.StringIO(), []
for cell in json.loads(sys.argv[1]):
    result = shell.run_cell(cell, silent=cell.startswith("# silent"))
    error = result.error_before_exec or result.error_in_exec
    outcomes.append(f"{type(error).__name__}: {error}" if error else repr(result.result))
    MPI.COMM_WORLD.Barrier()
sys.stdout = printed
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps([outcomes, *[MPI.COMM_WORLD.recv(source=r) for r in range(1, MPI.COMM_WORLD.size)]]))
else:
    MPI.COMM_WORLD.send(outcomes, 0)
MPI.COMM_WORLD.Barrier()
import os
sys.stdout.flush()
os._exit(0)  # what was abandoned is never finished
"""
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
def total(t):
    return float(on_ranks(lambda x: psum(x.astype(t), both))[0])
def interrupt(*call):  # rank 3 does not come the third time, when ranks do not compare values
    on_ranks(*call), on_ranks(*call)
    if rank == 0:
        interrupt_once_it_waits()
    if rank != 3:
        on_ranks(*call)
"""
)
ALL = "[total(float), on_ranks(lambda x: psum(x, 'j'), P('i')).gather().tolist()]"
ONE = "_ = on_ranks(lambda x: psum(fail_on(1, x), 'i'), P('j'))"
#: Cells after each of which the one above works.
CELLS = [
    "_ = on_ranks(lambda x: psum(fail_on(2, x), 'i'), P('j'))",  # rank 0 alone waits for rank 2 along i
    f"fail_on(1, 0)\n{ALL}",
    "if rank == 3: undefined",
    f"# silent\n{ALL}",
    "on_ranks(lambda x: x)",  # all make this mistake, before anything was sent
    ("on_ranks(lambda x: ppermute(x, both, [(0, 9)]))", ONE, ONE),  # in the middle of going over to new communicators
    "_ = on_ranks(lambda x: psum(x.astype('f4' if rank == 1 else 'i4'), both))",
    "_ = on_ranks(lambda x: pmax(x, both) if rank == 1 else psum(x, both))",
    f"total('f4'), total('i4')\n_ = [total(t) for t in (('i4', 'f4') if rank == 1 else ('f4', 'i4'))]\n{ALL}",
    "interrupt(lambda x: psum(x, both))",
    "interrupt(lambda x: pmax(x, both))",
    "interrupt(lambda x: ppermute(x, both, [(3, 0)]), P(both))",  # nobody but rank 0 waits for the source
]


def transcript(session):
    """The cells of a session, but for the one that works, and what becomes of each on each rank."""
    lines = []
    for cell, of_ranks in session:
        lines += ["", f">>> {cell}".replace("\n", "\n... ")] if cell != ALL else []
        for outcome in dict.fromkeys(of_ranks) if cell != ALL else ():
            ranks = ", ".join(str(rank) for rank, x in enumerate(of_ranks) if x == outcome)
            lines.append(f"{ranks}: {re.sub('; line .*', '', outcome)}".rstrip())
    return "\n".join(lines[1:])


def test_the_next_cell_works(golden):
    cells = [SETUP, ALL]
    for mistakes in CELLS:
        cells += [mistakes, ALL] if isinstance(mistakes, str) else [*mistakes, ALL]
    done = mpiexec(4, "-c", ENGINE, json.dumps(cells))
    assert done.stdout, done.stderr  # the exit code is the launcher's: what MPI was left with counts for some
    outcomes = list(zip(*json.loads(done.stdout.partition("\n")[0])))  # some launchers add a word about the end
    assert {outcomes[k] for k, cell in enumerate(cells) if cell == ALL} == {("[6.0, [1.0, 5.0]]",) * 4}
    golden("interactive_session", transcript([*zip(cells, outcomes)][2:]))


def test_without_ipython_an_interrupted_mesh_says_so(tmp_path):
    program = """
total(float), total(float)  # the third time, ranks do not compare values
if rank == 0:
    interrupt_once_it_waits()
    for _ in range(2):
        try:
            total(float)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    open(sys.argv[1], "x").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os._exit(0)
"""
    done = mpiexec(4, "-c", "import sys; sys.ps1 = '>>> '\n" + SETUP + program, str(tmp_path / "printed"))
    assert done.stdout.splitlines()[0] == "KeyboardInterrupt: "
    assert done.stdout.splitlines()[1].startswith("RuntimeError: a collective of this mesh was interrupted")


def test_scripts_are_left_alone():
    program = "import spmd; print(type(spmd.make_mesh((2,), ('i',)).ranks.comm).__name__)"
    assert mpiexec(2, "-c", program).stdout.replace("\n", "") == "WatchedComm" * 2
    assert subprocess.run([sys.executable, "-c", "import collectives.guards.notebook"], check=True).returncode == 0
