"""Compiled loops, and two branches of a program, on one thread and on several: `python -m tests.benchmarks.cores`.

A row says how many times as fast a program is with more threads: medians of rounds in turn, with quartiles. Results
have the same bits. Loops over large arrays have a thread for each processor; of two branches that do not need each
other, each may have one, by `md.jit`, or in the graph of `notebooks/dataflow.py`.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.cores [--rounds 9] [--seconds 0.05] [--rows N …] [--only NAME …]

Without OMP_NUM_THREADS=1 a product of matrices takes all processors for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy

import minidiff as md
import minidiff.numpy as np
from minidiff.values.processes import usable_processors
from notebooks.dataflow import Dataflow

from . import measure

PROGRAMS: dict[str, Callable] = {
    "x * 2 + 1 - x": lambda x: x * 2.0 + 1.0 - x,
    "tanh(x) * x + 1": lambda x: np.tanh(x) * x + 1.0,
    "tanh(x + row) * x": lambda x: np.tanh(x + x[:1]) * x,
    "sum(sin(x) * x)": lambda x: np.sum(np.sin(x) * x),
    "sum(tanh(x) * x, axis=0)": lambda x: np.sum(np.tanh(x) * x, axis=0),
    "sum(tanh(x) * x, axis=1)": lambda x: np.sum(np.tanh(x) * x, axis=1),
    "gradient of sum(sin(x) * exp(-x²))": md.grad(lambda x: np.sum(np.sin(x) * np.exp(-x * x))),
    "softmax(x)": md.nn.softmax,
    "diffusion": lambda x: x + 0.1 * (np.roll(x, 1, 0) + np.roll(x, -1, 0) - 2.0 * x),
}

#: Rows of 1,024 numbers of 8 bytes: 0.5, 1, 8 and 64 MB.
ROWS = (64, 128, 1_024, 8_192)
#: Functions that each of two branches applies four times, and the size of their arrays.
BRANCHES = {
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


def two_branches(f: Callable, x: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
    for _ in range(4):
        x, y = f(x), f(y)
    return x + y


def after_one_more(run: measure.Run, calls: int) -> float:
    run()  # the threads of the one before have ended
    return measure.time_of(run, calls)


def rows(sizes: Sequence[int]) -> Iterator[tuple[str, dict[str, Callable], int]]:
    rng, threads = numpy.random.default_rng(0), len(usable_processors())
    for (name, f), size in ((item, size) for item in PROGRAMS.items() for size in sizes):
        x = rng.normal(size=(size, 1024))
        runs = {f"{n} threads": functools.partial(md.jit(f, threads=n), x) for n in dict.fromkeys((1, threads))}
        yield f"{name}, {x.nbytes / 2**20:g} MB", runs, 1
    for name, (f, shape) in BRANCHES.items():
        args, program = rng.random((2, *shape)), functools.partial(two_branches, f)
        yield name, {f"jit, {n}": functools.partial(md.jit(program, threads=n), *args) for n in (1, 2)}, 1
        graph = Dataflow(md.make_tape(program)(*args))
        yield name, {f"graph, {n}": functools.partial(graph.run, *args, workers=n) for n in (0, 2)}, 1


def _checked(row: tuple) -> tuple:
    measure.check(*row[:2], rtol=0)
    return row


def main(arguments: list[str] | None = None) -> None:
    options = measure.options(__doc__, arguments, rounds=9, seconds=0.05, rows=ROWS, only=(), json="")
    print(f"{measure.machine()}, {len(usable_processors())} processors")
    chosen = (row for row in rows(options.rows) if measure.chosen([row[0]], options.only))
    measure.compared(map(_checked, chosen), options, after_one_more)


if __name__ == "__main__":
    main()
