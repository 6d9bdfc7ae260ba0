"""Slopes of times over the sizes of programs, on logarithmic scales.

    python -m tests.benchmarks.growth [--largest N] [--only NAME …] [--rounds 3]

A slope of 1 means that twice the size takes twice the time. It is fitted by least squares to the least time of each
size, without those below a tenth of the longest, in which what a call costs anyway hides the growth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P

from .measure import chosen, machine, options, times

Run = Callable[[], Any]


class Row(NamedTuple):
    name: str
    unit: str
    sizes: Sequence[int]
    prepare: Callable[[int], Run]
    limit: float | None = 1.15  # None where the page says why it grows faster


def chain(n: int) -> Callable:
    """A function with a tape of `n` operations, each on 8 numbers."""

    def f(x):
        for _ in range(n // 2):
            x = np.sin(x) * 1.01
        return np.sum(x)

    return f


def of_chain(transform: Callable[[Callable], Callable]) -> Callable[[int], Run]:
    return lambda n: lambda: transform(chain(n))(numpy.ones(8))


def compiled_call(n: int) -> Run:
    gradient = md.jit(md.grad(chain(n)))
    return lambda: gradient(numpy.ones(8))


def leaves(transform: Callable[[Callable], Callable]) -> Callable[[int], Run]:
    """The gradient with respect to a dict of `n` arrays."""

    def prepare(n: int) -> Run:
        gradient = transform(lambda p: sum(np.sum(v * v) for v in p.values()))
        tree = {f"w{i}": numpy.ones(4) for i in range(n)}
        return lambda: gradient(tree)

    return prepare


def nested(wrap: Callable, x: Any, last: Callable = lambda f: f) -> Callable[[int], Run]:
    """A transformation applied `n` times to a function of three operations, and another one at last."""

    def prepare(n: int) -> Run:
        def f(x):
            return np.sum(np.sin(x) * x)

        for _ in range(n):
            f = wrap(f)
        whole = last(f)
        return lambda: whole(x(n))

    return prepare


def vmapped(n: int) -> Run:
    """A `vmap` of `n` examples."""
    f = md.vmap(md.grad(lambda x: np.sum(np.tanh(x) * x)))
    x = numpy.ones((n, 8))
    return lambda: f(x)


def on_ranks(transform: Callable[[Callable], Callable]) -> Callable[[int], Run]:
    """A gradient with one `psum` over `n` simulated ranks, each of which has a block of 4 numbers."""

    def prepare(n: int) -> Run:
        mesh = spmd.make_mesh((n,), ("i",), backend="simulated")
        body = spmd.shard_map(
            lambda w, x: psum(np.sum(np.tanh(w * x)), "i"), mesh=mesh, in_specs=(P(), P("i")), out_specs=P()
        )
        run, x = transform(body), numpy.ones(4 * n)
        return lambda: run(1.5, x)

    return prepare


def message(n: int) -> Run:
    """A compiled `psum` of `n` bytes over 2 simulated ranks."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    run = md.jit(spmd.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    x = numpy.ones(n // 4)  # two blocks of n bytes
    return lambda: run(x)


def derivatives(n: int) -> Run:
    """The `n`-th derivative of a product of two sines."""

    def f(x):
        return np.sin(x) * np.sin(2.0 * x)

    for _ in range(n):
        f = md.grad(f)
    return lambda: f(0.7)


checkpoints = nested(md.checkpoint, lambda n: numpy.ones(4), md.grad)
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
RANKS = (4, 64, 1_024, 16_384)

ROWS = [
    Row("record a chain", "operations", LENGTHS, of_chain(md.make_tape)),
    Row("its gradient", "operations", LENGTHS, of_chain(md.grad)),
    Row("its vmap", "operations", LENGTHS, lambda n: lambda: md.vmap(chain(n))(numpy.ones((2, 8)))),
    Row("compile it", "operations", LENGTHS, of_chain(md.jit)),
    Row("compile its gradient", "operations", LENGTHS, of_chain(lambda f: md.jit(md.grad(f)))),
    Row("call it compiled", "operations", LENGTHS, compiled_call),
    Row("gradient of a dict", "leaves", (100, 1_000, 10_000), leaves(md.grad)),
    Row("the same, compiled call", "leaves", (100, 1_000, 10_000), leaves(lambda f: md.jit(md.grad(f)))),
    Row("vmap of a gradient", "examples", (1_000, 10_000, 100_000, 1_000_000), vmapped),
    Row("vmap of vmap …", "levels", (1, 2, 4, 8), nested(md.vmap, lambda n: numpy.ones((1,) * n + (4,))), None),
    Row("jit of jit …", "levels", (4, 16, 64), nested(md.jit, lambda n: numpy.ones(4))),
    Row("checkpoint of checkpoint …, gradient", "levels", (1, 2, 4, 8), checkpoints, None),
    Row("derivative of derivative …", "levels", (1, 2, 3, 4), derivatives, None),
    Row("tape of a gradient with a psum", "ranks", RANKS, on_ranks(lambda f: md.make_tape(md.grad(f)))),
    Row("its communication", "ranks", RANKS, on_ranks(lambda f: spmd.communication(md.grad(f)))),
    Row("run it, eager", "ranks", RANKS, on_ranks(md.grad)),
    Row("run it, compiled", "ranks", RANKS, on_ranks(lambda f: md.jit(md.grad(f)))),
    Row("psum of a block, compiled", "bytes", (4_096, 65_536, 1 << 20, 1 << 24, 1 << 26), message, None),
]


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent by which the times grow, fitted where they are at least a tenth of the longest, or to two sizes."""
    first = min(next(i for i, t in enumerate(seconds) if t >= 0.1 * max(seconds)), len(sizes) - 2)
    x, y = numpy.log(sizes[first:]), numpy.log(seconds[first:])
    return float(numpy.polyfit(x, y, 1)[0])


def measure(row: Row, largest: int, rounds: int) -> dict[str, Any]:
    """The times of one row, up to a size."""
    sizes = [n for n in row.sizes if n <= largest]
    sizes = sizes if len(sizes) > 1 else list(row.sizes[:2])
    seconds = [min(times({row.name: row.prepare(n)}, rounds, 0)[row.name]) for n in sizes]
    return {"name": row.name, "unit": row.unit, "sizes": sizes, "seconds": seconds, "slope": slope(sizes, seconds)}


def line(result: dict[str, Any], limit: float | None) -> str:
    """A row of the table."""
    times = "  ".join(f"{n:,}: {_seconds(t)}" for n, t in zip(result["sizes"], result["seconds"]))
    verdict = "" if limit is None or result["slope"] <= limit else f"  more than {limit}"
    return f"{result['name']:38} {result['slope']:5.2f}  {result['unit']} {times}{verdict}"


def _seconds(t: float) -> str:
    unit = min(3, max(0, -math.floor(math.log10(t) / 3)))
    return f"{t * 1000**unit:.3g} {('s', 'ms', 'µs', 'ns')[unit]}"


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    asked = options(__doc__, arguments, largest=100_000_000, rounds=3, only=())
    print(f"{machine()}: slopes, times")
    results = []
    names = chosen([row.name for row in ROWS], asked.only)
    for row in (row for row in ROWS if row.name in names):
        results.append(measure(row, asked.largest, asked.rounds))
        print(line(results[-1], row.limit), flush=True)
    return results


if __name__ == "__main__":
    main()
