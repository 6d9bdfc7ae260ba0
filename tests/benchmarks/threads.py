"""Two independent branches of a graph, one after the other and in two threads: `notebooks/dataflow.py`.

    python -m tests.benchmarks.threads

Set OMP_NUM_THREADS=1, so that a product of matrices does not take all processors for itself.
"""

import os
import platform
import time

import numpy as np

import minidiff as md
from notebooks.dataflow import Dataflow


def two_branches(f):
    """A program of two branches that do not need each other."""

    def program(x, y):
        for _ in range(4):
            x, y = f(x), f(y)
        return x + y

    return program


#: What a branch does four times, and the size of its arrays.
PROGRAMS = {
    "products of 600 × 600": (lambda x: x @ x * 1e-3, (600, 600)),
    "exp of 10⁶ numbers": (lambda x: np.exp(-x), (1000, 1000)),
    "sums of 10⁶ numbers": (lambda x: x + 1.0, (1000, 1000)),
    "exp of 100 numbers": (lambda x: np.exp(-x), (100,)),
}


def measure(rounds: int = 15) -> list[tuple[str, float, float]]:
    """The least seconds of each program, one node after the other and in two threads, in turn."""
    rows = []
    for name, (f, shape) in PROGRAMS.items():
        args = np.random.default_rng(0).random((2, *shape))
        graph = Dataflow(md.make_tape(two_branches(f))(*args))
        times = {0: [], 2: []}
        for _ in range(rounds):
            for workers, actual in times.items():
                start = time.perf_counter()
                graph.run(*args, workers=workers)
                actual.append(time.perf_counter() - start)
        rows.append((name, *map(min, times.values())))
    return rows


if __name__ == "__main__":
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(
        f"{platform.machine()}, {os.cpu_count()} processors{load}, NumPy {np.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    for name, one, two in measure():
        print(f"{name:25} {1e3 * one:8.2f} ms {1e3 * two:8.2f} ms in two threads: {one / two:.2f} ×")
