# ruff: noqa: F401
"""Names of the programs of `tests/mpi/faults.md`: meshes of all ranks, sums over them, alarms and threads."""

import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from mpi4py import MPI

import minidiff as md
import spmd
from collectives import pmax, ppermute, psum
from collectives.guards import deadlock
from spmd import P, data
from tests.checks.launch import interrupt_once_it_waits

USUAL_PACE, deadlock.TICK = deadlock.TICK, 0.1  # the watchdog looks more often, so that the tests are short
SIZE = spmd.mesh.launch.launcher_size()


def on(mesh, f):
    axes = mesh.axis_names
    return spmd.shard_map(f, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_rep=False)


def sums(mesh):
    return on(mesh, lambda x: psum(x, mesh.axis_names))


def shift(mesh, by):
    return on(mesh, lambda x: ppermute(x, mesh.axis_names, [(k, (k + by) % mesh.size) for k in range(mesh.size)]))


def start():
    """A mesh of all ranks, this rank, numbers, and their sum over the ranks, which has been taken once."""
    mesh, x = spmd.make_mesh((SIZE,), ("i",)), np.arange(float(SIZE))
    total = sums(mesh)
    total(x)
    return mesh, mesh.rank, x, total


def compiled(mesh):
    """A compiled sum that has run, so that all that can be decided has been."""
    f, x = md.jit(sums(mesh)), np.arange(float(SIZE))
    f(x), f(x)
    return f


def two_meshes():
    return [sums(spmd.make_mesh((SIZE,), (name,))) for name in "ab"]


def two_communicators():
    return [sums(spmd.make_mesh((SIZE,), ("i",), comm=MPI.COMM_WORLD.Dup())) for _ in range(2)]


def joined(mesh, broken=-1):
    """Batches of all ranks, of which this rank cannot read one."""

    def read():
        for k in range(6):
            if k == broken:
                raise OSError("no file")
            yield np.ones(2)

    return data.join(read(), mesh, P("i"))


def alarm(rank):
    """An exception on rank 0, one second from now."""

    def raise_timeout(*_):
        raise TimeoutError

    if rank == 0:
        signal.signal(signal.SIGALRM, raise_timeout)
        signal.setitimer(signal.ITIMER_REAL, 1)


def run(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def overflow(mesh, warn, size):
    """Take sums, one of which overflows in the arithmetic of ranks 0 and 1: every rank raises, and skips it."""
    warnings.simplefilter(warn)
    f, steps = on(mesh, lambda x: psum(x, "i") + 0 * psum(x[:1], "i")), []
    for x in ([1] * SIZE, [3e38, 3e38, 5, 5][:SIZE], [10] * SIZE, [100] * SIZE):
        try:
            with np.errstate(over="warn" if warn == "error" else "raise"):
                steps.append(f(np.repeat(np.array(x, "f4"), size)).gather()[0])
        except (FloatingPointError, RuntimeWarning):
            steps.append("skipped")
    assert steps == [SIZE, "skipped", 10 * SIZE, 100 * SIZE], steps
