"""Compiled loops over large arrays on one thread and on all processors: `python -m tests.benchmarks.cores`.

Each row is a program; the numbers say how many times as fast it is with a thread for each processor:
medians of paired rounds, with quartiles. Results have the same bits.

    python -m tests.benchmarks.cores [--rounds 9] [--seconds 0.05] [--rows N …]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy

import minidiff as md
import minidiff.numpy as np
from minidiff.values.processes import usable_processors

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


def main(arguments: list[str] | None = None) -> None:
    options = measure.options(__doc__, arguments, rounds=9, seconds=0.05, rows=ROWS)
    threads = len(usable_processors())
    print(f"{measure.machine()}, {threads} threads beside one")
    for name, f in PROGRAMS.items():
        texts = []
        for rows in options.rows:
            x = numpy.random.default_rng(0).normal(size=(rows, 1024))
            programs = {str(n): md.jit(f, threads=n) for n in (1, threads)}
            one, several = (numpy.asarray(program(x)) for program in programs.values())
            assert one.tobytes() == several.tobytes(), name
            runs = {key: lambda program=program, x=x: program(x) for key, program in programs.items()}
            times = measure.times(runs, options.rounds, options.seconds)
            texts.append(f"{x.nbytes / 2**20:g} MB {measure.beside(times, '1', str(threads))}")
        print(f"{name:36} {'   '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
