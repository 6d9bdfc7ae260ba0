"""Times of first calls: of `jit` of an MLP's step, and of a transformer block's, each in a new process.

    python -m tests.benchmarks.first [--rounds 9] [--beside CHECKOUT]

A first call records, simplifies and writes the program, and compiles its loops, or loads them if the cache on disk has
them. `--row NAME` measures one in this process. With `--beside`, processes of another version take turns with those of
this one: its rows are compared.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from .measure import options

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = ("mlp", "block")


def mlp() -> tuple[Callable, tuple]:
    """A step of gradient descent of three layers, and its arguments."""
    import numpy

    import minidiff as md
    import minidiff.numpy as np

    rng, sizes, rate = numpy.random.default_rng(0), (64, 128, 128, 10), numpy.float32(0.1)
    params = [(rng.normal(size=s).astype("f4") / 8, numpy.zeros(s[1], "f4")) for s in itertools.pairwise(sizes)]
    inputs, targets = rng.normal(size=(64, 64)).astype("f4"), rng.normal(size=(64, 10)).astype("f4")

    def loss(params, x):
        for w, b in params[:-1]:
            x = np.tanh(x @ w + b)
        w, b = params[-1]
        return np.mean((x @ w + b - targets) ** 2)

    def step(params, x):
        return md.tree.map(lambda p, g: p - rate * g, params, md.grad(loss)(params, x))

    return md.jit(step), (params, inputs)


def measure(row: str) -> None:
    """Print the milliseconds that a first call takes in this process, without running the program once."""
    if row == "block":
        from tests.benchmarks import activations

        f, args = activations.block(activations.minidiff())
    else:
        f, args = mlp()
    start = time.perf_counter()
    f(*args)
    first = time.perf_counter()
    f(*args)
    print(1e3 * (2 * first - start - time.perf_counter()))


def run(checkout: pathlib.Path, row: str, cache: str) -> float:
    env = {**os.environ, "MINIDIFF_CACHE": cache, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    code = [sys.executable, "-m", "tests.benchmarks.first", "--row", row]
    return float(subprocess.run(code, env=env, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    chosen = options(__doc__, None, rounds=9, beside="", row="")
    if chosen.row:
        measure(chosen.row)
        return
    checkouts = [ROOT, *([pathlib.Path(chosen.beside).resolve()] if chosen.beside else [])]
    for row in ROWS:
        times: dict = {}
        for _ in range(chosen.rounds):
            for checkout in checkouts:
                cache = tempfile.mkdtemp()
                for state in ("without a cache", "with it"):
                    times.setdefault((state, checkout), []).append(run(checkout, row, cache))
                shutil.rmtree(cache)
        for (state, checkout), values in times.items():
            quartiles = ", ".join([f"{q:.1f}" for q in statistics.quantiles(values, n=4)])
            ratios = [a / b for a, b in zip(values, times[state, checkouts[-1]])]
            print(f"{row:6} {state:16} {quartiles:>24} ms  {statistics.median(ratios):5.2f}  {checkout}", flush=True)


if __name__ == "__main__":
    main()
