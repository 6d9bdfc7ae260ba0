"""The fault matrix: what goes wrong on some ranks, and what becomes of the job.

Each row is a program that `mpiexec` runs on 2 or 4 ranks. It ends, with the message and the exit code that it should
have, though other ranks would go on for an hour; or it goes on, where it must. Most of a row's time is waiting, so a
test runs some rows of one kind at a time. Rows marked `slow` (the watchdog at its usual pace, long computations,
thousands of meshes) run by hand:

    SPMD_ALL_FAULTS=1 python -m pytest tests/mpi/test_faults_mpi.py
"""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from mpi4py.MPI import Get_library_version

from spmd.mesh.launch import launcher_size
from tests import PATIENCE
from tests.collectives.guards.test_failures import INTERRUPTING, launching

pytestmark = pytest.mark.skipif(launcher_size() is not None, reason="it launches ranks itself")

#: Ranks compare calls, but not values, which would add comparisons; test_agreement_mpi.py has those.
CALLS_ALONE = "import os\nos.environ.setdefault('SPMD_CHECKING', '0')\n"
VALUES_TOO = "import os\nos.environ['SPMD_CHECKING'] = ''\n"
START = f"""{INTERRUPTING}
{CALLS_ALONE}
import os, signal, sys, threading, time
import numpy as np
import spmd
from collectives import pmax, ppermute, psum
from spmd import P
"""
MESH = """
SIZE = spmd.mesh.launch.launcher_size()
mesh = spmd.make_mesh((SIZE,), ("i",))
rank, x = mesh.rank, np.arange(float(SIZE))
def on(mesh, f):
    axes = mesh.axis_names
    return spmd.shard_map(f, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_rep=False)
def sums(mesh):
    return on(mesh, lambda x: psum(x, mesh.axis_names))
def shift(mesh, by):
    return on(mesh, lambda x: ppermute(x, mesh.axis_names, [(k, (k + by) % mesh.size) for k in range(mesh.size)]))
total = sums(mesh)
total(x)
"""
#: The watchdog looks more often than it does for users, so that the tests are short.
SOON = "from collectives.guards import deadlock\ndeadlock.TICK = 0.1\n"
MPI = "from mpi4py import MPI\n"
DEADLOCK = r"\[rank 0\] (Ranks wait|A rank waits) for others that never arrive:"
ENDED = "rank {} has reached the end of its program"
WAITS = r"rank {} waits in {} \(MPI {}\) with ranks "
FAILED = r"\[rank {}\] rank {} of \d failed; the job ends\."

LEFT = r"\[rank {}\] RuntimeError: {} left {} on this rank, so this rank makes no further calls: .* are out of sync"
INTERRUPTED_SUM = LEFT.format(1, "KeyboardInterrupt", r"MPI Allreduce \(psum over 'i' of f64\[1\]; .*\)")
#: A compiled program that has run, so that all that can be decided has been.
COMPILED = "import minidiff as md\nf = md.jit(sums(mesh))\nf(x), f(x)\n"
#: What ranks say at Ctrl-C. The launcher of Open MPI does not pass it on: it ends them itself, and they say nothing.
INTERRUPTED = () if "Open MPI" in Get_library_version() else (r"\[rank [01]\] KeyboardInterrupt",)

#: A sum that overflows in the arithmetic of ranks 0 and 1, which every rank raises and skips.
OVERFLOWS = """
import warnings
warnings.simplefilter({0})
f = on(mesh, lambda x: psum(x, "i") + 0 * psum(x[:1], "i"))
steps = []
for x in ([1] * SIZE, [3e38, 3e38, 5, 5][:SIZE], [10] * SIZE, [100] * SIZE):
    try:
        with np.errstate(over="warn" if {0} == "error" else "raise"):
            steps.append(f(np.repeat(np.array(x, "f4"), {1})).gather()[0])
    except (FloatingPointError, RuntimeWarning) as error: steps.append("skipped")
assert steps == [SIZE, "skipped", 10 * SIZE, 100 * SIZE], steps
print("done")
"""
#: An exception on rank 0, one second from now.
ALARM = """
def raise_timeout(*_): raise TimeoutError
if rank == 0:
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, 1)
"""
THREADS = """
def run(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
TWO = MPI + "one, two = [sums(spmd.make_mesh((SIZE,), ('i',), comm=MPI.COMM_WORLD.Dup())) for _ in range(2)]\n"
JOINED = """
from spmd import data
def read():
    for k in range(6):
        if k == {}: raise OSError("no file")
        yield np.ones(2)
steps = data.join(read(), mesh, P("i"))
for k, (x, mask) in enumerate(steps):
    {}
    total(x)
print("done")
"""
NAMED = "one, two = [sums(spmd.make_mesh((SIZE,), (name,))) for name in 'ab']\n"


@dataclass
class Fault:
    """A program, and what becomes of it: what it says, and its exit code. If that is 0, all ranks print "done"."""

    program: str
    says: tuple[str, ...] = ()  # patterns in what is printed to stderr
    code: int | None = 1  # None: any but 0
    ranks: int = 2
    before: str = START + MESH + SOON
    run: tuple[str, ...] = ()  # what runs the program, before its file
    interrupt: bool = False  # by Ctrl-C, once each rank has printed a line
    tracebacks: int | None = 0  # None: those of threads, too
    once: tuple[str, ...] = ()  # what it says once
    slow: bool = False


def goes_on(program, **options):
    return Fault(program, code=0, **options)


#: By kind and name.
FAULTS = {
    "exceptions": {
        "an exception, while others wait": Fault(
            "if rank == 2: raise RuntimeError('no such file')\ntotal(x)",
            (r"\[rank 2\] RuntimeError: no such file", FAILED.format(2, 2)),
            ranks=4,
            tracebacks=1,
        ),
        "an exception in a body": Fault(
            "on(mesh, lambda x: psum(x / ('three' if rank else 1), 'i'))(x)",
            (r"\[rank 1\] TypeError: ", FAILED.format(1, 1)),
            tracebacks=1,
        ),
        "an exception before there is a mesh": Fault(
            "from spmd.mesh.launch import launcher_rank\nif launcher_rank() == 1: raise KeyError('data')\n" + MESH,
            (r"\[rank 1\] KeyError: 'data'", FAILED.format(1, 1)),
            before=START,
            tracebacks=1,
        ),
        "an exception before spmd is imported, in spmd run": Fault(
            "import os\nif '1' in map(os.environ.get, ('PMI_RANK', 'OMPI_COMM_WORLD_RANK')): raise KeyError('data')\n"
            + START
            + MESH,
            (r"\[rank 1\] KeyError: 'data'", FAILED.format(1, 1)),
            before="",
            run=("-m", "spmd", "run"),
            tracebacks=1,
        ),
        "an exception on all ranks": Fault(
            "total(np.ones(9))",
            (
                r"\[rank 0\] ValueError: args\[0\] has shape \(9,\)",
                FAILED.format(0, 0),
                r"\[rank 0\] ranks (1, 2, 3|1, 2|1, 3|2, 3) failed with the same error|rank [123] failed with the same",
            ),
            ranks=4,
            tracebacks=1,
            once=("args[0] has shape",),
        ),
        "exceptions on the higher ranks": Fault(
            "if rank: raise KeyError(['data', 'other'][rank // 2])\ntotal(x)",
            (
                r"\[rank 1\] KeyError: 'data'",
                FAILED.format(1, 1),
                r"\[rank 1\] ranks 2, 3 failed: KeyError: 'other'",
            ),
            ranks=4,
            tracebacks=1,
            once=("KeyError: 'other'",),
        ),
        "a mesh of another size than there are ranks": Fault(
            "spmd.make_mesh((4, 2), ('x', 'y'))",
            ("ValueError: make_mesh: a mesh of 4 x 2 needs 8 ranks, but MPI has 2. Start .* with `mpirun -n 8`",),
            before=START,
            tracebacks=1,
        ),
        "a whole array of what is elsewhere": Fault(
            "y = on(mesh, lambda x: x)(x)\n"
            "assert 'rank %d at mesh coordinates (i,) = (%d,) has' % (rank, rank) in repr(y)\n"
            "assert y.gather().tolist() == x.tolist()\n"
            "np.asarray(y)",
            (
                r"is split over the ranks of Mesh\(i: 2; 2 ranks, mpi\) as P",
                r"Call \.gather\(\) on every rank",
            ),
            tracebacks=1,
        ),
        "clearing up after an error": Fault(
            "try:\n    if rank == 1: raise ValueError('no file')\n    total(x)\nfinally: total(np.ones(2 * SIZE))",
            (DEADLOCK, "rank 1 compares its next call, shard_map of <lambda> .*; it is handling ValueError: no file"),
        ),
    },
    "joined loops": {
        "an exception in the loop of one rank": Fault(
            JOINED.format(-1, "if rank == 2 and k == 3: raise RuntimeError('no loss')"),
            (r"\[rank 2\] RuntimeError: no loss", FAILED.format(2, 2)),
            ranks=4,
            tracebacks=1,
        ),
        "data that one rank cannot read": Fault(
            JOINED.format("(3 if rank else -1)", ""),
            (
                r"\[rank 0\] ValueError: join: reading failed: rank 0: no error; rank 1: OSError: no file",
                "the same error",
            ),
            tracebacks=1,
        ),
        "a rank that leaves its loop alone": Fault(
            JOINED.format(-1, "if rank == 1 and k == 3: break"), (DEADLOCK, ENDED.format(1))
        ),
        "a rank by whose word all leave": goes_on(JOINED.format(-1, "if rank == 1 and k == 3: steps.stop()"), ranks=4),
    },
    "exits": {
        "a rank that leaves with exit code 0": Fault(
            "if rank == 1: sys.exit(0)\ntotal(x)",
            (DEADLOCK, WAITS.format(0, r"psum over 'i' of f64\[1\]", "Allreduce"), ENDED.format(1)),
            ranks=4,
        ),
        "rank 0 leaves": Fault(
            "if rank: total(x)", (DEADLOCK, ENDED.format(0), WAITS.format(1, r"psum over 'i' of f64\[1\]", "Allreduce"))
        ),
        "sys.exit(3) while others wait": Fault(
            "if rank == 1: sys.exit(3)\ntotal(x)", (DEADLOCK, ENDED.format(1) + ", with exit code 3"), code=3
        ),
        "raise SystemExit(3) while others wait, in spmd run": Fault(
            "if rank == 1: raise SystemExit(3)\ntotal(x)",
            (DEADLOCK, ENDED.format(1) + ", with exit code 3"),
            code=3,
            run=("-m", "spmd", "run"),
        ),
        "sys.exit(3) on one rank": Fault("if rank == 1: sys.exit(3)", code=3),
        "sys.exit(3) on all": Fault("sys.exit(3)", code=3),
        "raise SystemExit(3) in a body": Fault("def body(x):\n    raise SystemExit(3)\non(mesh, body)(x)", code=3),
        "a collective at exit on one rank, in spmd run": Fault(
            "import atexit\n@atexit.register\ndef last():\n    if rank: total(x)\n" + START + MESH + SOON,
            (DEADLOCK, ENDED.format(0)),
            before="",
            run=("-m", "spmd", "run"),
        ),
        "a collective at exit, on all ranks": goes_on(
            "import atexit\n@atexit.register\ndef last():\n    total(x)\n    os.write(1, b'done\\n')"
        ),
        "MPI is finalized by the program": goes_on(MPI + "print('done', flush=True)\nMPI.Finalize()"),
    },
    "signals": {
        "SIGKILL": Fault("if rank: os.kill(os.getpid(), signal.SIGKILL)\ntotal(x)", code=None),
        "SIGTERM": Fault("if rank: os.kill(os.getpid(), signal.SIGTERM)\ntotal(x)", code=None),
        "SIGINT of a rank that waits": Fault(
            "if rank: interrupt_once_it_waits()\nelse: time.sleep(3600)\ntotal(x)",
            (r"\[rank 1\] KeyboardInterrupt", FAILED.format(1, 1)),
            tracebacks=1,
        ),
        "SIGINT of a rank that waits, in a compiled program": Fault(
            "import minidiff as md\n"
            "def body(x):\n"
            "    y = ppermute(x, 'i', [(0, 1), (1, 0)])\n"
            "    return psum(x.sum(), 'i') * psum(np.sin(x), 'i') + y\n"
            "f = md.jit(on(mesh, body))\n"
            "f(x), f(x)\n"
            "if rank: interrupt_once_it_waits()\n"
            "else: time.sleep(3600)\n"
            "f(x)",
            (r"\[rank 1\] KeyboardInterrupt", FAILED.format(1, 1)),
            tracebacks=1,
        ),
        "SIGINT of a rank that waits, and is caught": Fault(
            "caught = __file__ + '.caught'\n"
            "if rank: interrupt_once_it_waits()\n"
            "while not rank and not os.path.exists(caught): time.sleep(0.01)\n"
            "try: total(x)\n"
            "except KeyboardInterrupt: open(caught, 'x').close()\n"
            "else: assert not rank\n"
            "for _ in range(100): assert total(x).gather()[0] == x.sum()",
            (
                LEFT.format(1, "KeyboardInterrupt", r"MPI Allreduce \(psum over 'i' of f64\[1\]; .*\)"),
                FAILED.format(1, 1),
            ),
            tracebacks=1,
        ),
        "SIGINT of a rank that waits in a compiled program, and is caught": Fault(
            COMPILED + "caught = __file__ + '.caught'\n"
            "if rank: interrupt_once_it_waits()\n"
            "while not rank and not os.path.exists(caught): time.sleep(0.01)\n"
            "try: f(x)\n"
            "except KeyboardInterrupt: open(caught, 'x').close()\n"
            "else: assert not rank\n"
            "for _ in range(100): assert f(x).gather()[0] == x.sum()",
            (
                LEFT.format(1, "KeyboardInterrupt", r"MPI Allreduce \(psum over 'i' of f64\[1\]; .*\)"),
                FAILED.format(1, 1),
            ),
            tracebacks=1,
        ),
        "SIGINT in a comparison of calls, and is caught": Fault(
            "from collectives.guards.mismatch import MismatchCheck\n"
            "def interrupted(check, *args):\n"
            "    MismatchCheck._extremes = extremes\n"
            "    extremes(check, *args)\n"
            "    raise KeyboardInterrupt\n"
            "extremes = MismatchCheck._extremes\n"
            "if rank == 1: MismatchCheck._extremes = interrupted\n"
            "try: total(np.ones(3 * SIZE))\n"
            "except KeyboardInterrupt: pass\n"
            "total(x)",
            (LEFT.format(1, "KeyboardInterrupt", "a comparison of calls .*"), FAILED.format(1, 1)),
            tracebacks=1,
        ),
        "SIGINT between the beginning of a call and its start, and is caught": Fault(
            "grid = spmd.make_mesh((SIZE, 1), ('i', 'j'))\n"
            "on_grid = sums(grid)\n"
            "on_grid(x)\n"
            "comm = mesh.ranks.comm\n"
            "def interrupted(*args): raise KeyboardInterrupt\n"
            "try: comm.watched('Allreduce', interrupted if rank else comm._comm.Iallreduce)(x, np.ones(SIZE))\n"
            "except KeyboardInterrupt: pass\n"
            "on_grid(x)",
            (LEFT.format(1, "KeyboardInterrupt", "MPI Allreduce .*"), FAILED.format(1, 1)),
            tracebacks=1,
        ),
        "Ctrl-C while the job ends": Fault(
            "sleep = time.sleep\n"
            "def interrupted(seconds):\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "    sleep(seconds)\n"
            "if rank:\n"
            "    time.sleep = interrupted\n"
            "    raise ValueError('no file')\n"
            "total(x)",
            (r"\[rank 1\] ValueError: no file", FAILED.format(1, 1)),
            tracebacks=1,
        ),
        "Ctrl-C while all compute, or wait": Fault(
            "total(x)\nprint('ready', flush=True)\nif rank: time.sleep(3600)\ntotal(x)",
            INTERRUPTED,
            code=None,
            interrupt=True,
        ),
    },
    "exceptions that are caught": {
        "a short sum that overflows on two of four ranks": goes_on(OVERFLOWS.format("'ignore'", 1), ranks=4),
        "a short sum that overflows, where warnings are errors": goes_on(OVERFLOWS.format("'error'", 1), ranks=4),
        "a long sum of two ranks that overflows": goes_on(OVERFLOWS.format("'ignore'", 10000)),
        "an exception between the messages of a permutation": goes_on(
            "from collectives import ppermute\n"
            "from collectives.backends.mpi import ranks as module\n"
            "start, n = module.start_messages, 10**5\n"
            "def interrupted(*args):\n"
            "    yield from start(*args)\n"
            "    raise MemoryError\n"
            "if rank: time.sleep(0.2)\n"
            "else: module.start_messages = interrupted\n"
            "f = on(mesh, lambda x: ppermute(x + 1, 'i', [(0, 1), (1, 0)]))\n"
            "try: y = f(np.arange(2.0 * n))\n"
            "except MemoryError: pass\n"
            "else: assert np.array_equal(y.local, np.arange(n) + 1.0)\n"
            "others = [np.full(n, -1.0) for _ in range(20)]\n"
            "print('done')"
        ),
        "the split of an argument on one rank": Fault(
            "place = type(mesh.ranks).place\n"
            "def interrupted(*args): raise MemoryError\n"
            "total(x)\n"
            "if rank: type(mesh.ranks).place = interrupted\n"
            "try: total(x)\n"
            "except MemoryError: type(mesh.ranks).place = place\n"
            "total(2 * x)",
            (
                DEADLOCK,
                r"rank 1 compares its next call, psum .* \(now, because MemoryError left a body on this mesh\)",
                WAITS.format(0, "psum .*", "Allreduce"),
            ),
        ),
        "arithmetic of one rank, before a sum": Fault(
            "f = on(mesh, lambda x: psum(1 / x, 'i'))\n"
            "with np.errstate(divide='raise'):\n"
            "    try: f(x)\n"
            "    except FloatingPointError: pass\n"
            "    f(x + 1)",
            (
                DEADLOCK,
                r"rank 0 compares its next call, psum .* \(now, because FloatingPointError left a body on this mesh\)",
                WAITS.format(1, "psum .*", "Allreduce"),
            ),
        ),
        "the same exception in a body on all ranks": goes_on(
            "def body(x):\n"
            "    y = psum(x, 'i')\n"
            "    if bad: raise OSError('no file')\n"
            "    return psum(y, 'i')\n"
            "f, bad = on(mesh, body), False\n"
            "f(x)\n"
            "for k in range(30):\n"
            "    bad = k % 3 == 1\n"
            "    try: assert f(x).gather()[0] == SIZE * x.sum()\n"
            "    except OSError: assert bad\n"
            "print('done')",
            ranks=4,
        ),
        "an argument that one rank alone gets wrong": goes_on(
            "if rank == 1:\n"
            "    try: total(np.ones(7))\n"
            "    except ValueError: pass\n"
            "assert total(x).gather()[0] == x.sum()\n"
            "print('done')"
        ),
        "of an alarm, while a rank waits": Fault(
            ALARM + "if rank == 1: time.sleep(3)\n"
            "try: total(x)\n"
            "except TimeoutError: pass\n"
            "try: total(x)\n"
            "except RuntimeError as error: print(error, file=sys.stderr)\n"
            "time.sleep(3600 * (rank == 0))",
            (
                r"^TimeoutError left MPI Allreduce .* so this rank makes no further calls: ",
                DEADLOCK,
                r"rank 0 makes no further calls, since TimeoutError left MPI Allreduce \(psum over .i. of ",
            ),
            ranks=4,
        ),
        "of an alarm, while a compiled program waits for overlapped messages": Fault(
            "import minidiff as md\n"
            "body = lambda x: ppermute(x, 'i', [(0, 1), (1, 0)]) + 0 * (x @ x)\n"
            "f = md.jit(on(mesh, body))\n"
            "f(x), f(x)\n" + ALARM + "if rank == 1: time.sleep(3)\n"
            "for _ in range(2):\n"
            "    try: f(x)\n"
            "    except TimeoutError: pass",
            (LEFT.format(0, "TimeoutError", r"MPI Waitall .*"), FAILED.format(0, 0)),
            tracebacks=1,
        ),
        "between two messages": Fault(
            "from collectives.backends.mpi import short_messages\n"
            "wait_for = short_messages.wait_for\n"
            "def interrupted(requests):\n"
            "    wait_for(requests)\n"
            "    raise MemoryError\n"
            "if rank == 3: short_messages.wait_for = interrupted\n"
            "for _ in range(2):\n"
            "    try: total(x)\n"
            "    except MemoryError: pass",
            (LEFT.format(3, "MemoryError", r"MPI Allreduce .*"), FAILED.format(3, 3)),
            ranks=4,
            tracebacks=1,
        ),
        "in another thread, on another mesh": Fault(
            THREADS + "grid = spmd.make_mesh((SIZE, 1), ('i', 'j'))\n"
            "on_grid = sums(grid)\n"
            "on_grid(x)\n" + ALARM + "if rank == 1: time.sleep(3)\n"
            "try: total(x)\n"
            "except TimeoutError: run(lambda: on_grid(x))\n"
            "total(x)",
            (r"RuntimeError: TimeoutError left MPI Allreduce .* no further calls", FAILED.format(0, 0)),
            tracebacks=None,
        ),
    },
    "the order of collectives": {
        "a barrier that one rank leaves out": Fault(
            "spmd.barrier()\nif rank != 1: spmd.barrier()\ntotal(x)",
            (DEADLOCK, WAITS.format(0, "barrier over 'process'", "Barrier"), WAITS.format(1, "psum.*", ".*")),
        ),
        "an array of the blocks that some ranks have": Fault(
            "if rank != 1: spmd.from_local(x, mesh, P('i'))\ntotal(x)",
            (r"\[rank 0\] (Ranks wait for others that never arrive|ranks do not call the same collective)",),
            code=None,
        ),
        "a checkpoint that only one rank saves": Fault(
            "from spmd.checkpoint import Checkpoints\n"
            "saved = Checkpoints(__file__ + '-saved', mesh)\n"
            "saved.save(1, {'w': x})\n"
            "if rank == 0: saved.save(2, {'w': x})",
            (DEADLOCK, r"rank 0 compares its next call, comparison of values over 'i', with", ENDED.format(1)),
        ),
        "known permutations in another order": Fault(
            "left, right = shift(mesh, 1), shift(mesh, -1)\n"
            "left(x), right(x)\n"
            "first, second = (left, right) if rank != 2 else (right, left)\n"
            "first(x), second(x)",
            (
                DEADLOCK,
                r"rank 3 waits in ppermute over 'i' of f64\[1\] \(perm=\(\(0, 1\), .* \(MPI Waitall\)",
                r"rank 2 waits in ppermute over 'i' of f64\[1\] \(perm=\(\(0, 3\), .* \(MPI Waitall\)",
            ),
            ranks=4,
        ),
        "a gather where others sum": Fault(
            "split = on(mesh, lambda x: x)(x)\nsplit.gather()\ntotal(x) if rank != 1 else split.gather()",
            (
                r"\[rank 0\] (Ranks wait for others that never arrive|ranks do not call the same collective)",
                "rank 0(: | waits in )psum over 'i' of f64",
                "rank 1(: | waits in )all_gather over 'i' of f64",
            ),
        ),
        "a permutation where others sum": Fault(
            "turned = shift(mesh, 1)\nturned(x)\ntotal(x) if rank != 3 else turned(x)",
            (DEADLOCK, WAITS.format(3, "ppermute .*", "Waitall")),
            ranks=4,
        ),
        "a call of a new kind, of a compiled program": Fault(
            COMPILED + "f(np.ones(2 * SIZE) if rank else x)",
            (DEADLOCK, r"rank 1 compares its next call, shard_map of <lambda> over 'i' .*, with ranks 0, 1"),
        ),
        "a compiled program that one rank does not run": Fault(
            COMPILED + "if rank != 1: f(x)",
            (DEADLOCK, WAITS.format(0, r"psum over 'i' of f64\[1\]", "Allreduce"), ENDED.format(1)),
        ),
        "a compiled program, and the line that calls it": Fault(
            "import minidiff as md\n"
            "def body(x):\n"
            "    y = psum(x, 'i')\n"
            "    return y\n"
            "f = md.jit(on(mesh, body))\n"
            "f(x), f(x)\n"
            "if rank != 1:\n"
            "    f(x) + 1  # alone\n",
            (DEADLOCK, r"rank 0 waits in psum .*, called at program\d+\.py:\d+: f\(x\) \+ 1  # alone"),
        ),
        "a comparison of values that one rank does not make": Fault(
            "f = spmd.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P(), out_specs=P())\nf(x)\nif rank != 1: f(x)",
            (DEADLOCK, r"rank 0 compares its next call, comparison of values over 'i', with ranks 0, 1"),
            before=VALUES_TOO + START + MESH + SOON,
        ),
        "other functions of known kinds": Fault(
            "def one(x): return psum(x, 'i')\n"
            "def two(x): return psum(x * 2, 'i')\n"
            "one, two = on(mesh, one), on(mesh, two)\n"
            "one(x), two(x)\n"
            "one(x) if rank else two(x)",
            (
                r"DisagreementError: ranks compare different values:",
                r"rank 0: args\[0\] of two: float64\[2\]\n.* rank 1: args\[0\] of one: float64\[2\]\n",
            ),
            before=VALUES_TOO + START + MESH + SOON,
            code=None,
            tracebacks=None,
        ),
        "a call of a new kind": Fault(
            "total(np.ones(2 * SIZE if rank else SIZE))",
            (DEADLOCK, r"rank 1 compares its next call, shard_map of <lambda> over 'i' .*, with ranks 0, 1"),
        ),
        "along another axis": Fault(
            "grid = spmd.make_mesh((2, 2), ('x', 'y'))\n"
            "over = lambda a: spmd.shard_map(lambda x: psum(x, a), mesh=grid, in_specs=P(a), out_specs=P())\n"
            "for a in ('x', 'y', 'y' if rank == 3 else 'x'): over(a)(np.ones(4))",
            (
                DEADLOCK,
                r"rank 3 waits in psum over 'y' .* with ranks 2, 3",
                "rank 1 waits in psum over 'x' .* ranks 1, 3",
            ),
            ranks=4,
        ),
        "what is not the same at the end": Fault(
            "for t in ('f4', 'i4'): total(np.ones(SIZE, t))\n"
            "for t in (('i4', 'f4') if rank == 1 else ('f4', 'i4')): total(np.ones(SIZE, t))",
            (
                r"\[rank 0\] ranks do not call the same collective, of values of the same types:",
                r"\[rank 0\]   rank 0: psum over 'i' of f32\[1\]; ",
                r"\[rank 0\]   rank 1: psum over 'i' of i32\[1\]; ",
            ),
        ),
        "the same in other lines": goes_on(
            "x = spmd.distribute(x, mesh, P('i'))\n"
            "if rank:\n    x.gather()\nelse:\n    spmd.distribute(np.ones(2), mesh, P('i')).gather()\n"
            "print('done')"
        ),
    },
    "meshes and communicators": {
        "meshes of different shapes": Fault(
            "sums(spmd.make_mesh((2, 2) if rank else (4, 1), ('a', 'b')))(x)",
            (r"\[rank 0\] .*ranks (do not call the same|make different)", r"ranks 1, 2, 3: .*2, .*2"),
            ranks=4,
            tracebacks=1,
        ),
        "meshes in another order": Fault(
            "meshes = [spmd.make_mesh((SIZE,), (a,)) for a in 'ab']\n"
            "for m in meshes if rank else meshes[::-1]: sums(m)(x)",
            (DEADLOCK, r"rank 0 compares .* over 'b'", r"rank 1 compares .* over 'a'"),
        ),
        "another one of two meshes": Fault(
            "meshes = [spmd.make_mesh(sizes, ('a', 'b')) for sizes in ((2, 2), (4, 1))]\nsums(meshes[rank == 3])(x)",
            (
                DEADLOCK,
                r"rank 0 compares its next call, shard_map of <lambda> over 'a', 'b' \(sizes=\(2, 2\), ",
                r"rank 3 compares its next call, shard_map of <lambda> over 'a', 'b' \(sizes=\(4, 1\), ",
            ),
            ranks=4,
        ),
        "meshes on two communicators, in another order": Fault(
            TWO + "one(x), two(x)\n[one, two][rank](x), [two, one][rank](x)",
            (DEADLOCK, WAITS.format(0, "psum .*", "Allreduce"), WAITS.format(1, "psum .*", "Allreduce")),
        ),
        "rows and columns, and no mesh of all": Fault(
            MPI
            + SOON
            + "r = MPI.COMM_WORLD.rank\n"
            + "SIZE = 2\n"
            + MESH.partition("def on")[1]
            + MESH.partition("def on")[2].partition("total =")[0]
            + "comms = [MPI.COMM_WORLD.Split(c) for c in (r // 2, r % 2)]\n"
            + "row, column = [sums(spmd.make_mesh((2,), ('i',), comm=comm)) for comm in comms]\n"
            "x = np.ones(2)\n"
            "row(x), column(x)\n"
            "(row if r in (0, 3) else column)(x)",
            (DEADLOCK, r"rank 0 waits in psum .* with ranks 0, 1", r"rank 3 waits in psum .* with ranks 2, 3"),
            before=START,
            ranks=4,
        ),
        "a mesh that one rank does not make": Fault(
            MPI + "comm = MPI.COMM_WORLD.Dup()\nif rank: spmd.make_mesh((SIZE,), ('i',), comm=comm)\ntotal(x)",
            (DEADLOCK, WAITS.format(1, "make_mesh", "Allreduce"), WAITS.format(0, "psum .*", "Allreduce")),
        ),
        "a rank that leaves a user's communicator": Fault(
            MPI
            + "half = MPI.COMM_WORLD.Split(rank // 2, -rank)\n"
            + "both = sums(spmd.make_mesh((2,), ('i',), comm=half))\n"
            + "both(np.ones(2))\n"
            + "if rank != 2: both(np.ones(2))",
            (DEADLOCK, ENDED.format(2), r"rank 3 waits in psum .* with ranks 3, 2"),
            ranks=4,
        ),
        "meshes on a hundred communicators": goes_on(
            MPI
            + "meshes = [spmd.make_mesh((SIZE,), ('i',), comm=MPI.COMM_WORLD.Dup()) for _ in range(100)]\n"
            + "assert all(sums(m)(x).gather()[0] == x.sum() for m in meshes)\n"
            + "assert threading.active_count() == 2\n"
            + "print('done')"
        ),
        "meshes that are dropped": goes_on(
            "for k in range(2500):\n    m = spmd.make_mesh((SIZE,), (f'a{k}',))\n    if k % 50 == 0: sums(m)(x)\n"
            "print('done')"
        ),
        "meshes that are dropped at different times": goes_on(
            "kept, rng = {}, np.random.default_rng(rank)\n"
            "for k in range(300):\n"
            "    kept[k] = sums(spmd.make_mesh((SIZE,), (f'a{k}',)))\n"
            "    assert kept[k](x).gather()[0] == x.sum()\n"
            "    for old in [j for j in kept if rng.random() < 0.2]: del kept[old]\n"
            "    names = [f'a{j}' for j in kept]\n"
            "print('done')"
        ),
        "20,000 meshes": goes_on(
            "for k in range(20000):\n    m = spmd.make_mesh((SIZE,), (f'a{k}',))\n    if k % 50 == 0: sums(m)(x)\n"
            "print('done')",
            slow=True,
        ),
        "communicators that are freed": goes_on(
            MPI
            + "for k in range(2500):\n"
            + "    comm = MPI.COMM_WORLD.Dup()\n"
            + "    f = sums(spmd.make_mesh((SIZE,), ('i',), comm=comm))\n"
            + "    if k % 50 == 0: f(x)\n"
            + "    del f; comm.Free()\n"
            + "print('done')",
            slow=True,
        ),
    },
    "threads": {
        "two threads that compute in turn": goes_on(
            NAMED
            + THREADS
            + "def work(f, late):\n"
            + "    for _ in range(2):\n"
            + "        time.sleep(1.2 * (rank == late))\n"
            + "        f(x)\n"
            + "run(lambda: work(one, 0), lambda: work(two, 1))\n"
            + "print('done')"
        ),
        "two threads that compute in turn, for long": goes_on(
            NAMED
            + THREADS
            + "def work(f, late):\n"
            + "    for _ in range(2):\n"
            + "        time.sleep(6 * (rank == late))\n"
            + "        f(x)\n"
            + "run(lambda: work(one, 0), lambda: work(two, 1))\n"
            + "print('done')",
            before=START + MESH,
            slow=True,
        ),
        "threads of a pool, which take any mesh": goes_on(
            TWO
            + "from concurrent.futures import ThreadPoolExecutor\n"
            + "def work(f, late):\n    time.sleep(rng.random() * 0.8)\n    f(x)\n"
            + "rng = np.random.default_rng(rank)\n"
            + "with ThreadPoolExecutor(2) as pool:\n"
            + "    for _ in range(3): [task.result() for task in [pool.submit(work, f, 0) for f in (one, two)]]\n"
            + "print('done')"
        ),
        "two threads in a deadlock": Fault(
            MPI
            + THREADS
            + "a, b = [spmd.make_mesh((SIZE,), ('i',), comm=MPI.COMM_WORLD.Dup()) for _ in range(2)]\n"
            + "one = on(a, lambda x: psum(x, 'i') + 1)\n"
            + "two = on(b, lambda x: psum(x, 'i') + 2)\n"
            + "def work(f, through):\n"
            + "    f(x)\n"
            + "    if rank != through: f(x)\n"
            + "run(lambda: work(one, 0), lambda: work(two, 1))\n"
            + "total(x)",
            (DEADLOCK, r"rank 0 waits in psum .* on\(b, lambda", r"rank 1 waits in psum .* on\(a, lambda"),
        ),
        "four threads on one mesh": Fault(
            THREADS
            + "started = threading.Barrier(4)\n"
            + "def work():\n"
            + "    started.wait()\n"
            + "    for _ in range(20): total(x)\n"
            + "if rank: time.sleep(0.5)\n"
            + "run(*[work] * 4)\n"
            + "total(x)",
            (
                r"RuntimeError: rank 0: the thread 'Thread-\d .*' makes a call on a mesh while",
                r"while the thread 'Thread-\d .*' is in another one on it\. .* use a mesh from one thread at a time",
                r"\[rank [01]\] (RuntimeError: |Ranks wait |A rank waits )",
            ),
            tracebacks=None,
        ),
        "a compiled program that another thread runs": goes_on(
            COMPILED
            + THREADS
            + "def work():\n"
            + "    for _ in range(100): assert f(x).gather()[0] == x.sum()\n"
            + "run(work)\n"
            + "work()\n"
            + "run(work)\n"
            + "print('done')"
        ),
        "compiled programs of two threads, on a mesh each": goes_on(
            COMPILED
            + TWO
            + THREADS
            + "def work(f):\n"
            + "    for _ in range(100): assert f(x).gather()[0] == x.sum()\n"
            + "run(lambda: work(md.jit(one)), lambda: work(md.jit(two)))\n"
            + "print('done')"
        ),
        "a compiled program that four threads run": Fault(
            COMPILED
            + THREADS
            + "started = threading.Barrier(4)\n"
            + "def work():\n"
            + "    started.wait()\n"
            + "    for _ in range(20): f(x)\n"
            + "if rank: time.sleep(0.5)\n"
            + "run(*[work] * 4)\n"
            + "f(x)",
            (
                r"RuntimeError: rank 0: the thread 'Thread-\d .*' makes a call on a mesh while",
                r"while the thread 'Thread-\d .*' is in another one on it\. .* use a mesh from one thread at a time",
                r"\[rank [01]\] (RuntimeError: |Ranks wait |A rank waits )",
            ),
            tracebacks=None,
        ),
        "MPI without threads": goes_on(
            START + MESH + "if rank == 1: time.sleep(2)\ntotal(x)\nprint('done')",
            says=(r"RuntimeWarning: the deadlock watchdog is off, since MPI was started without MPI_THREAD_MULTIPLE",),
            before="import mpi4py\nmpi4py.rc.threads = False\n",
        ),
    },
    "slow ranks": {
        "ranks that are late": goes_on(
            "time.sleep(1.5 * (rank == 2))\ntotal(x)\ntime.sleep(1.5 * (rank == 3))\nprint('done')", ranks=4
        ),
        "a rank that computes for six seconds": goes_on(
            "time.sleep(6 * (rank == 2))\ntotal(x)\ntime.sleep(6 * (rank == 3))\nprint('done')",
            ranks=4,
            before=START + MESH,
            slow=True,
        ),
        "a deadlock, found by the watchdog at its usual pace": Fault(
            "if rank == 1: sys.exit(0)\ntotal(x)", (DEADLOCK, ENDED.format(1)), before=START + MESH, slow=True
        ),
        "nothing": goes_on("print('done')", before=START + MESH),
    },
}
SLOW_TOO = "SPMD_ALL_FAULTS" in os.environ
AT_ONCE = 3  # programs


def check(fault, script):
    script.write_text(fault.before + fault.program + "\n")
    with launching(fault.ranks, *fault.run, str(script)) as job:
        if fault.interrupt:
            for _ in range(fault.ranks):
                job.stdout.readline()
            job.send_signal(signal.SIGINT)
        try:
            out, err = job.communicate(timeout=PATIENCE)
        except BaseException:
            job.kill()
            raise
    if fault.code == 0:
        assert (job.returncode, out.count("done")) == (0, fault.ranks), err
        assert fault.says or not err, err
    else:
        assert job.returncode != 0 if fault.code is None else job.returncode == fault.code, err
    for pattern in fault.says:
        assert re.search(pattern, err), err
    assert all(err.count(text) == 1 for text in fault.once), err
    assert "digest" not in err, err
    if not fault.interrupt:
        assert fault.tracebacks in (None, err.count("Traceback (most recent call last)")), err
        assert not re.search(r'File ".*/(minidiff|collectives|spmd)/\w+\.py"', err), err  # but the program's own


@pytest.mark.skipif(launcher_size() is not None, reason="starts launchers, which needs no launcher around it")
@pytest.mark.parametrize("kind", FAULTS)
def test_faults(kind, tmp_path):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = {
            name: pool.submit(check, fault, tmp_path / f"program{k}.py")
            for k, (name, fault) in enumerate(FAULTS[kind].items())
            if SLOW_TOO or not fault.slow
        }
    failures = {name: error for name, result in results.items() if (error := result.exception()) is not None}
    assert not failures, "\n\n".join(f"{name}: {error!r}"[:4000] for name, error in failures.items())


@pytest.mark.skipif(launcher_size() is not None, reason="starts launchers, which needs no launcher around it")
def test_a_deadlock_under_pytest(tmp_path):
    """The watchdog's text is not lost in what pytest captures, and follows what the test has printed."""
    (tmp_path / "test_program.py").write_text(
        START
        + MESH
        + SOON
        + "import pytest\n"
        + "@pytest.fixture\ndef nothing(): pass\n"
        + "def test_one(request):\n"
        + "    print('printed by the test')\n"
        + "    request.getfixturevalue(os.environ['FIXTURE'])\n"
        + "    if rank == 1: raise ValueError('no file')\n"
        + "    spmd.barrier()\n"
        + "def test_two(): total(x)\n"
    )

    def run(options, fixture):
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tmp_path / "test_program.py")]
        with launching(
            2,
            "-c",
            f"import os, runpy, sys; os.environ['FIXTURE'] = {fixture!r}; "
            f"sys.argv = {command[1:]!r}; runpy.run_module('pytest', run_name='__main__')",
        ) as job:
            try:
                return job.communicate(timeout=PATIENCE)
            except BaseException:
                job.kill()
                raise

    ways = [((), "nothing"), (("-s",), "nothing"), (("--capture=sys",), "nothing"), ((), "capfd"), ((), "capsys")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for way, (out, err) in zip(ways, pool.map(lambda way: run(*way), ways)):
            assert re.search(DEADLOCK, err), (way, out, err)
            assert re.search(r"\[rank 0\]   rank 0 .*spmd\.barrier\(\)", err), (way, err)
            assert "printed by the test" in out, (way, out, err)


@pytest.mark.skipif(launcher_size() is not None, reason="starts launchers, which needs no launcher around it")
@pytest.mark.parametrize("interrupted", ["rank", "True"], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_many_interrupts_that_a_program_catches(interrupted, compiled, tmp_path):
    """The job ends, whatever they interrupt, and what it says is text."""
    (tmp_path / "program.py").write_text(
        f"""{START}{MESH}{SOON}
def body(x):
    one, two = psum((x, x), "i")
    return one + psum(x * 2, "i") + two + ppermute(x, "i", [(0, 1), (1, 0)])
f, left = on(mesh, body), 40
if {compiled}:
    import minidiff as md
    f = md.jit(f)
    for n in range(1, 41): f(np.ones(SIZE * n))
def interrupt():
    for _ in range(left):
        time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)
if {interrupted}: threading.Thread(target=interrupt, daemon=True).start()
n = 0
while n < 300:
    try:
        while n < 300:
            n += 1
            f(np.ones(SIZE * (1 + n % 40)))
    except KeyboardInterrupt:
        pass
"""
    )
    with launching(2, str(tmp_path / "program.py")) as job:
        try:
            _, err = job.communicate(timeout=60)
        except BaseException:
            job.kill()
            raise
    message = err.replace("-\n\0", "-\n")  # a page of Open MPI's launcher ends so
    assert all(c.isprintable() or c == "\n" for c in message), err
    assert "Error in" not in err, err
