"""Two independent branches of a program, one after the other and in two threads: `notebooks/dataflow.py`, `md.jit`.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.threads

Without OMP_NUM_THREADS=1 a product of matrices takes all processors for itself.
"""

import functools
import os

import numpy as np

import minidiff as md
from notebooks.dataflow import Dataflow

from .measure import Run, machine, time_of, times


def two_branches(f):
    """A program of two branches that do not need each other."""

    def program(x, y):
        for _ in range(4):
            x, y = f(x), f(y)
        return x + y

    return program


#: What a branch does four times, and the size of its arrays.
PROGRAMS = {
    "products of 100 × 100": (lambda x: x @ x * 1e-2, (100, 100)),
    "products of 200 × 200": (lambda x: x @ x * 1e-2, (200, 200)),
    "products of 600 × 600": (lambda x: x @ x * 1e-3, (600, 600)),
    "singular values, 200 × 200": (lambda x: np.linalg.svd(x)[0], (200, 200)),
    "FFT of 10⁵ numbers": (lambda x: np.fft.fft(x).real * 1e-3, (100_000,)),
    "sort of 10⁵ numbers": (lambda x: np.sort(-x), (100_000,)),
    "exp of 10⁶ numbers": (lambda x: np.exp(-x), (1000, 1000)),
    "sums of 10⁶ numbers": (lambda x: x + 1.0, (1000, 1000)),
    "exp of 100 numbers": (lambda x: np.exp(-x), (100,)),
}


def after_one_more(run: Run, calls: int) -> float:
    run()  # the threads of the one before have ended
    return time_of(run, calls)


def measure(rounds: int = 15) -> list[tuple[str, list[float]]]:
    """The least seconds of each program: as a graph and compiled, with one thread and with two, in turn."""
    rows = []
    for name, (f, shape) in PROGRAMS.items():
        args, program = np.random.default_rng(0).random((2, *shape)), two_branches(f)
        graph = Dataflow(md.make_tape(program)(*args))
        runs = [functools.partial(graph.run, *args, workers=n) for n in (0, 2)]
        runs += [functools.partial(md.jit(program, threads=n), *args) for n in (1, 2)]
        seconds = times(dict(zip(range(4), runs)), rounds, 0, after_one_more)
        rows.append((name, [*map(min, seconds.values())]))
    return rows


if __name__ == "__main__":
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    print(f"{machine()}, {os.cpu_count()} processors, {load}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}")
    for name, (one, two, alone, together) in measure():
        print(
            f"{name:27} graph {1e3 * one:8.2f} ms, in two threads {1e3 * two:8.2f} ms: {one / two:.2f} ×;  "
            f"jit {1e3 * alone:8.2f} ms, {1e3 * together:8.2f} ms: {alone / together:.2f} ×"
        )
