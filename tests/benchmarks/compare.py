"""Times of this version beside another one: `make bench-compare BASE=rev`.

    python -m tests.benchmarks.compare REV [--rounds 9] [--only NAME …] [--instructions]

The other version is checked out into a temporary directory. In each round, a process of each version runs all rows; a
ratio compares two processes of one round, so that what slows the machine slows both. The table has the median over
rounds and the quartiles. With `--instructions`, valgrind counts instructions instead: no load changes these numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Run = Callable[[], object]

ROOT = pathlib.Path(__file__).resolve().parents[2]


def rows() -> dict[str, Callable[[], Run]]:
    """Rows by name: each prepares a call of what every version has."""
    import numpy

    import minidiff as md
    import minidiff.numpy as np
    import spmd
    from collectives import psum
    from spmd import P

    w, x, big = numpy.full((6, 3), 0.1), numpy.linspace(0.1, 1, 24).reshape(4, 6), numpy.linspace(0, 1, 100_000)

    def layer(w, x=x):
        return np.mean(np.tanh(x @ w) ** 2)

    def wave(x):
        return np.sum(np.sin(x) * np.exp(-x * x))

    def step(c, _):
        return (c[0] + 0.01 * c[1], c[1] - 0.01 * np.sin(c[0])), None

    def on_ranks():
        mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
        body = spmd.shard_map(lambda w, x: psum(layer(w, x), "i"), mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
        return body, mesh

    def call(f, *args) -> Run:
        return lambda: f(*args)

    return {
        "gradient of a number, eager": lambda: call(md.grad(lambda s: np.sin(s) * s + s**2), 0.7),
        "gradient of a layer, eager": lambda: call(md.grad(layer), w),
        "gradient of a layer, compiled": lambda: call(md.jit(md.grad(layer)), w),
        "gradient of a dict, eager": lambda: call(md.grad(lambda p: layer(p["w"] * p["b"])), {"w": w, "b": w}),
        "jvp of a layer": lambda: call(md.jvp, layer, (w,), (w,)),
        "vmap of a gradient": lambda: call(md.vmap(md.grad(layer), (None, 0)), w, x[:, None]),
        "gradient of 10⁵ numbers, eager": lambda: call(md.grad(wave), big),
        "gradient of 10⁵ numbers, compiled": lambda: call(md.jit(md.grad(wave)), big),
        "100 steps of a scan, eager": lambda: call(lambda: md.scan(step, (1.0, 0.0), None, 100)),
        "100 steps of a scan, compiled": lambda: call(md.jit(lambda c: md.scan(step, c, None, 100)[0]), (1.0, 0.0)),
        "shard_map, eager": lambda: call(on_ranks()[0], w, x),
        "gradient of a shard_map, eager": lambda: call(md.grad(on_ranks()[0]), w, x),
        "gradient of a shard_map, compiled": lambda: call(md.jit(md.grad(on_ranks()[0])), w, x),
        "tape of a layer's gradient": lambda: call(md.make_tape(md.grad(layer)), w),
    }


def time_of(run: Run, seconds: float = 0.05) -> float:
    """The least microseconds of a call, in 5 groups of calls, after half a second of warming up."""
    end, calls = time.perf_counter() + 0.5, 0
    while time.perf_counter() < end or not calls:
        run()
        calls += 1
    group = max(1, int(calls * seconds / 0.5))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(group):
            run()
        best = min(best, (time.perf_counter() - start) / group)
    return best * 1e6


def child(names: Sequence[str], calls: int) -> None:
    """Print the times of rows as JSON; or, with a number of calls, only make them."""
    table = rows()
    if calls:
        run = table[names[0]]()
        for _ in range(calls):
            run()
    else:
        print(json.dumps({name: time_of(table[name]()) for name in names}))


def start(tree: str, names: Sequence[str], calls: int = 0, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess:
    """Run `child` in a process that imports the library from `tree`."""
    environment = {**os.environ, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [*prefix, sys.executable, str(pathlib.Path(__file__)), "--child", str(calls), "--only", *names]
    return subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)


def instructions(tree: str, name: str) -> float:
    """Instructions a call, as valgrind counts them: the difference between 300 calls and 100."""
    counts = []
    for calls in (100, 300):
        prefix = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={os.devnull}"]
        text = start(tree, [name], calls, prefix).stderr
        counts.append(int(re.search(r"Collected : (\d+)", text)[1]))
    return (counts[1] - counts[0]) / 200


@contextmanager
def checkout(rev: str) -> Iterator[str]:
    """A directory with the version `rev`, for a while."""
    with tempfile.TemporaryDirectory() as directory:
        archive = subprocess.run(["git", "archive", rev], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", directory], input=archive, check=True)
        yield directory


def compare(base: str, here: str, names: Sequence[str], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each row, pairs of the microseconds in the other version and in this one."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds):
        order = (base, here) if number % 2 else (here, base)
        actual = {tree: json.loads(start(tree, names).stdout) for tree in order}
        for name in names:
            pairs[name].append((actual[base][name], actual[here][name]))
    return pairs


def line(name: str, pairs: Sequence[tuple[float, float]], unit: str) -> str:
    ratios = sorted(new / old for old, new in pairs)
    old, new = (statistics.median(column) for column in zip(*pairs))
    spread = "" if len(ratios) == 1 else f" ({ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f})"
    return f"{name:36} {old:12,.1f} {new:12,.1f} {unit}  {statistics.median(ratios):.3f}{spread}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compare", description=__doc__)
    parser.add_argument("rev", nargs="?", default="HEAD", help="the other version, as git names it (HEAD)")
    parser.add_argument("--rounds", type=int, default=9, help="how many pairs of processes (9)")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="rows whose names contain one of these")
    parser.add_argument("--instructions", action="store_true", help="count instructions with valgrind")
    parser.add_argument("--child", type=int, metavar="CALLS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        child(options.only, options.child)
        return
    print(f"{platform.machine()}, Python {platform.python_version()}: {options.rev}, this version, ratio (quartiles)")
    names = [name for name in rows() if any(text in name for text in options.only)]
    with checkout(options.rev) as base:
        if options.instructions:
            for name in names:
                counts = instructions(base, name), instructions(str(ROOT), name)
                print(line(name, [counts], "instructions"), flush=True)
        else:
            for name, pairs in compare(base, str(ROOT), names, options.rounds).items():
                print(line(name, pairs, "µs"))


if __name__ == "__main__":
    main()
