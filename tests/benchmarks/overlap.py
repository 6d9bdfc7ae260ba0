"""The share of communication that a compiled program hides behind its computation, on the ranks of a launcher.

    mpiexec -n 2 python -m tests.benchmarks.overlap [--rounds N] [--layers N] [--width N] [--batch N]

`data-parallel step` is the gradient of a network whose gradients are summed in buckets, one for each layer. It runs as
`jit` compiles it, with each sum waited for where it begins, and without its sums. Hidden is the part of what
communication costs, if it is waited for, that is saved.

Memory is a fast network between ranks: a share of a third or more needs a slow one. As root on Linux, in a network of
its own, MPICH over TCP:

    ip netns add slow && ip netns exec slow ip link set lo up
    ip netns exec slow tc qdisc replace dev lo root tbf rate 1gbit burst 1mb latency 400ms  # 2gbit for 4 ranks
    export MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp MPIR_CVAR_NOLOCAL=1
    ip netns exec slow mpiexec -n 2 python -m tests.benchmarks.overlap --only step

With MPIR_CVAR_ASYNC_PROGRESS=1, MPICH has a thread that makes progress; otherwise tests between products do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from unittest import mock

import numpy as np
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import pmean
from collectives.passes import overlap
from spmd import P

from .measure import chosen, options, times
from .ranks import slowest

OVERLAPPED, WAITING, SILENT = "overlapped", "waiting", "without sums"


def without_overlap(f: Callable) -> Callable:
    """A function whose program waits for each collective where it begins."""

    def run(*args):
        with mock.patch.object(overlap, "OVERLAPPED", ()):
            return f(*args)

    return run


def data_parallel(mesh: spmd.Mesh, layers: int, width: int, batch: int) -> dict[str, Callable]:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(width, width)).astype("f4") / width for _ in range(layers)]
    split = spmd.distribute(rng.normal(size=(batch * mesh.size, width)).astype("f4"), mesh, P("i"))

    def gradient(mean: Callable) -> Callable:
        def local(params, x):
            for w in params:
                x = mnp.tanh(x @ w)
            return mean(mnp.mean(x * x))

        def body(params, x):
            return md.grad(local)(params, x)

        return md.jit(
            spmd.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_rep=mean is not silent),
            bucket_bytes=4 * width * width,
        )

    silent = lambda x: x  # noqa: E731
    f, g, none = gradient(lambda x: pmean(x, "i")), gradient(lambda x: pmean(x, "i")), gradient(silent)
    expected = f(params, split)
    for p, q in zip(expected, without_overlap(g)(params, split)):
        np.testing.assert_allclose(p, q, rtol=1e-3, atol=1e-7)
    return {
        OVERLAPPED: lambda: f(params, split),
        WAITING: lambda: g(params, split),
        SILENT: lambda: none(params, split),
    }


def main(arguments: list[str] | None = None) -> None:
    asked = options(__doc__, arguments, rounds=9, only=(), layers=6, width=512, batch=1024)
    mesh = spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",), backend="mpi")
    say = print if mesh.rank == 0 else lambda *_: None
    say(f"{MPI.COMM_WORLD.size} ranks; milliseconds, medians of {asked.rounds} rounds")
    for name in chosen(["data-parallel step"], asked.only):
        actual = times(data_parallel(mesh, asked.layers, asked.width, asked.batch), asked.rounds, 0.1, slowest)
        shares = [1 - silent / waiting for silent, waiting in zip(actual[SILENT], actual[WAITING])]
        hidden = [(w - o) / (w - s) for o, w, s in zip(actual[OVERLAPPED], actual[WAITING], actual[SILENT])]
        each = ", ".join(f"{name} {1e3 * statistics.median(seconds):.1f}" for name, seconds in actual.items())
        low, middle, high = statistics.quantiles(hidden, n=4)
        share = f"communication {statistics.median(shares):.2f} of it"
        say(f"{name}: {each}; {share}, {middle:.2f} ({low:.2f} to {high:.2f}) hidden")


if __name__ == "__main__":
    main()
