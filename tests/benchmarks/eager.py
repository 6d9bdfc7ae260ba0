"""Eager calls and gradients on simulated ranks, beside the same function without ranks and a gradient by hand.

    python -m tests.benchmarks.eager [--only NAME …] [--rounds 15] [--json FILE]

The function is the mean of tanh(x @ w)². In each round all programs run in turn; a ratio is the median over rounds of a
program's time and its baseline's, with the quartiles. A program with a limit that it exceeds is marked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean
from spmd import P

from . import measure

REPEATS = 40  # calls before the first round: by then, what repeats is planned or compiled


class Row(NamedTuple):
    """A program, the row that it is compared with, and how many times as long it may take."""

    run: Callable[[], object]
    baseline: str
    limit: float


def rows(rows_of_x: int = 128, width: int = 16) -> dict[str, Row]:
    """Programs by name."""
    x = numpy.sin(numpy.arange(1.0 * rows_of_x * width)).reshape(rows_of_x, width)
    w = numpy.cos(numpy.arange(1.0 * width * width)).reshape(width, width) / width
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    split = spmd.distribute(x, mesh, P("i"))

    def layer(w, x):
        return np.mean(np.tanh(x @ w) ** 2)

    def by_hand():
        h = numpy.tanh(x @ w)
        value = numpy.mean(h**2)
        ct = h * (2 / h.size)
        ct *= 1 - h * h
        return value, x.T @ ct

    mapped = spmd.shard_map(lambda w, x: pmean(layer(w, x), "i"), mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    of_layer, of_mapped, compiled = md.value_and_grad(layer), md.value_and_grad(mapped), md.jit(md.grad(mapped))
    results = [by_hand(), of_layer(w, x), of_mapped(w, x), of_layer(w, split)]
    for value, gradient in results:
        numpy.testing.assert_allclose(value, results[0][0], rtol=1e-12)
        numpy.testing.assert_allclose(gradient, results[0][1], atol=1e-14)
    return {
        "value": Row(lambda: layer(w, x), "value", 1.0),
        "gradient by hand": Row(by_hand, "gradient by hand", 1.0),
        "gradient": Row(lambda: of_layer(w, x), "gradient by hand", 1.5),
        "shard_map, value": Row(lambda: mapped(w, x), "value", 4.0),
        "shard_map, gradient": Row(lambda: of_mapped(w, x), "shard_map, value", 2.5),
        "shard_map, gradient, compiled": Row(lambda: compiled(w, x), "shard_map, value", 1.0),
        "sharded array, value": Row(lambda: layer(w, split), "shard_map, value", 2.5),
        "sharded array, gradient": Row(lambda: of_layer(w, split), "shard_map, gradient", 2.5),
    }


def main(arguments: list[str] | None = None) -> list[dict]:
    options = measure.options(__doc__, arguments, only=(), rounds=15, seconds=0.02, json="")
    every = rows()
    names = measure.chosen(every, options.only)
    needed = {*names, *[every[name].baseline for name in names]}
    needed |= {every[name].baseline for name in needed}
    runs = {name: row.run for name, row in every.items() if name in needed}
    for run in runs.values():
        for _ in range(REPEATS):
            run()
    actual = measure.times(runs, options.rounds, options.seconds)
    results = []
    print(f"{measure.machine()}, {options.rounds} rounds; microseconds")
    print(f"{'':32}{'median':>9}  {'ratio (quartiles)':24}{'limit':>6}  beside")
    for name in names:
        _, baseline, limit = every[name]
        ratio = measure.ratio(actual, name, baseline)
        time = 1e6 * statistics.median(actual[name])
        results.append({"row": name, "microseconds": time, "ratio": ratio, "limit": limit})
        mark = "  exceeds its limit" if ratio > limit else ""
        print(f"{name:32}{time:9.1f}  {measure.beside(actual, name, baseline):24}{limit:6.1f}  {baseline}{mark}")
    measure.save(options.json, {"machine": measure.machine(), "rows": results})
    return results


if __name__ == "__main__":
    main()
