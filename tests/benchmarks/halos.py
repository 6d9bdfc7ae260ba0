"""Fields on a grid beside the same loops by hand in NumPy and mpi4py, on the ranks that a launcher started.

    mpiexec -n 2 python -m tests.benchmarks.halos [--quick] [--rounds N] [--only NAME …]

Each row is checked before it is timed: the fields are the same to the last bit, gradients to rounding. By hand, a rank
has its rows in an array with a margin; it copies columns, sends rows by `Sendrecv`, and computes with `out=` (heat) or
as one writes formulas (shallow water). The adjoint of the heat equation by hand is the same loop, as it is symmetric.
Read the ratios: they are medians, with quartiles, of rounds in turn.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd.examples import heat, shallow_water
from spmd.examples.fields import AXES, FIELD, bumps, repeat, scan_steps

from .measure import beside, chosen, options, times
from .ranks import slowest

WORLD = MPI.COMM_WORLD


class Row(NamedTuple):
    """Two functions of no arguments that do the same, in so many steps."""

    name: str
    steps: int
    by_hand: Callable[[], Any]
    ours: Callable[[], Any]


# ---------------------------------------------------------------- by hand


class Margin:
    """A rank's rows with one more on each side; between walls, where the edge is repeated."""

    def __init__(self, block: numpy.ndarray, columns: str):
        self.values = numpy.empty((*block.shape[:-2], block.shape[-2] + 2, block.shape[-1] + 2))
        self.inside = self.values[..., 1:-1, 1:-1]
        self.inside[...] = block
        rank, last = WORLD.rank, WORLD.size - 1
        self.above = rank - 1 if rank else MPI.PROC_NULL
        self.below = rank + 1 if rank < last else MPI.PROC_NULL
        self.sources = {"edge": (1, -2), "periodic": (-2, 1)}[columns]
        self.buffers = numpy.empty((2, *self.values[..., 0, :].shape))

    def exchange(self) -> numpy.ndarray:
        """Fill the margin."""
        x, (sent, got) = self.values, self.buffers
        for source, here, to, row in ((self.above, 0, self.below, -2), (self.below, -1, self.above, 1)):
            sent[...] = x[..., row, :]
            WORLD.Sendrecv(sent, to, 0, got, source, 0)
            x[..., here, :] = got if source != MPI.PROC_NULL else x[..., 1 if here == 0 else -2, :]
        x[..., 0], x[..., -1] = x[..., self.sources[0]], x[..., self.sources[1]]
        return x


def heat_by_hand(block: numpy.ndarray, steps: int) -> numpy.ndarray:
    margin = Margin(block, "edge")
    p, u = margin.values, margin.inside
    new, four = numpy.empty((2, *u.shape))
    for _ in range(steps):
        margin.exchange()
        numpy.add(p[:-2, 1:-1], p[2:, 1:-1], out=new)
        numpy.add(new, p[1:-1, :-2], out=new)
        numpy.add(new, p[1:-1, 2:], out=new)
        numpy.multiply(4, u, out=four)
        numpy.subtract(new, four, out=new)
        numpy.multiply(heat.CONDUCTIVITY, new, out=new)
        numpy.add(u, new, out=u)
    return u


def heat_adjoint_by_hand(block: numpy.ndarray, steps: int) -> tuple[float, numpy.ndarray]:
    """The sum of squares after so many steps, and its gradient."""
    u = heat_by_hand(block, steps)
    total = WORLD.allreduce(float(numpy.sum(u * u)))
    return total, heat_by_hand(2 * u, steps)


def water_by_hand(state: numpy.ndarray, steps: int) -> numpy.ndarray:
    margin, rows = Margin(state, "periodic"), state.shape[1]

    def halo(state, *_):
        margin.inside[...] = state
        return margin.exchange()

    first = WORLD.rank * rows
    tendency = partial(shallow_water.tendencies, first=first, rows=rows * WORLD.size, halo=halo)
    return repeat(partial(shallow_water.advance, tendency=tendency), (state, tendency(state)), steps)[0]


# ---------------------------------------------------------------- rows


def local(x: numpy.ndarray, axis: int = 0) -> numpy.ndarray:
    """This rank's rows."""
    return numpy.array_split(x, WORLD.size, axis)[WORLD.rank]


def rows(quick: bool) -> Iterator[Row]:
    mesh = spmd.make_mesh((WORLD.size, 1), AXES, backend="mpi")
    steps = 3 if quick else 200
    for n in (8,) if quick else (64, 256):
        u = bumps((n, n))
        blocks, local_value = spmd.distribute(u, mesh, FIELD), local(u)
        program = heat.plate(mesh, steps)
        yield Row(
            f"heat, {n} x {n}", steps, partial(heat_by_hand, local_value, steps), partial(md.jit(program), blocks)
        )
        gradient = md.jit(md.value_and_grad(lambda u, f=program: np.sum(f(u) ** 2)))
        by_hand = partial(heat_adjoint_by_hand, local_value, steps)
        yield Row(f"heat, {n} x {n}, value and gradient", steps, by_hand, partial(gradient, blocks))
    for shape in ((8, 16),) if quick else ((60, 120), (180, 360)):
        state = shallow_water.jet(shape)
        blocks, local_value = spmd.distribute(state, mesh, shallow_water.STATE), local(state, 1)
        ours = partial(md.jit(shallow_water.ocean(mesh, steps)), blocks)
        yield Row(f"shallow water, {shape[0]} x {shape[1]}", steps, partial(water_by_hand, local_value, steps), ours)
    steps, n = (9, 8) if quick else (10_000, 64)
    u = bumps((n, n))
    ours = partial(md.jit(heat.plate(mesh, steps)), spmd.distribute(u, mesh, FIELD))
    yield Row(f"heat, {n} x {n}, {steps} steps", steps, partial(heat_by_hand, local(u), steps), ours)


def check(row: Row) -> None:
    """Raise AssertionError unless both compute the same."""
    expected, actual = row.by_hand(), row.ours()
    if isinstance(expected, tuple):
        numpy.testing.assert_allclose(float(actual[0]), expected[0])
        numpy.testing.assert_allclose(actual[1].data, expected[1], rtol=1e-9, atol=1e-12)
    else:
        numpy.testing.assert_array_equal(actual.data, expected)


# ---------------------------------------------------------------- memory


def checkpointed(mesh: spmd.Mesh, steps: int, segment: int) -> Callable:
    """The gradient of a sum after many steps of a nonlinear equation, u' = laplacian(u) + u - u^3, in segments."""
    step = lambda u: heat.step(u) + 0.01 * (u - u * u * u)  # noqa: E731

    def body(u):
        through = lambda u: scan_steps(step, u, segment)  # noqa: E731
        return scan_steps(md.checkpoint(through) if segment < steps else through, u, steps // segment)

    mapped = spmd.shard_map(body, mesh=mesh, in_specs=FIELD, out_specs=FIELD)
    return md.jit(md.value_and_grad(lambda u: np.sum(mapped(u))))


def segment_of(steps: int) -> int:
    """Return the largest divisor of `steps` that is at most its square root."""
    return next(n for n in range(math.isqrt(steps), 0, -1) if steps % n == 0)


def resident_growth(segment: int, steps: int, n: int) -> tuple[float, float]:
    """Seconds of a gradient, and the bytes by which the process's memory grew, as the system counts them."""
    mesh = spmd.make_mesh((WORLD.size, 1), AXES, backend="mpi")
    u = spmd.distribute(bumps((n, n)), mesh, FIELD)
    checkpointed(mesh, 4, 2)(u)
    before = peak_resident()
    began = time.perf_counter()
    checkpointed(mesh, steps, segment)(u)
    return time.perf_counter() - began, peak_resident() - before


def peak_resident() -> int:
    """The most memory that this process has had, in bytes."""
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(argv: list[str] | None = None) -> None:
    asked = options(__doc__, argv, quick=False, rounds=7, only=())
    say = print if WORLD.rank == 0 else lambda *_: None
    if not asked.only or "memory" in asked.only:
        steps, n = (9, 8) if asked.quick else (10_000, 64)
        seconds, grown = resident_growth(segment_of(steps), steps, n)
        saved = steps * n * n * 8 // WORLD.size
        size = f"{steps} nonlinear steps of {n} x {n}"
        say(f"gradient through {size}, in segments of {segment_of(steps)}: {seconds:.1f} s")
        say(f"memory grew by {grown / 1e6:.0f} MB; one field of each step is {saved / 1e6:.0f} MB")
    say(f"{WORLD.size} ranks; microseconds a step (median), and the ratio with its quartiles")
    for row in rows(asked.quick):
        if chosen([row.name], asked.only):
            check(row)
            runs = {"by hand": row.by_hand, "ours": row.ours}
            actual = times(runs, 1 if asked.quick else asked.rounds, 0, slowest)
            hand, ours = (1e6 * statistics.median(actual[name]) / row.steps for name in runs)
            say(f"{row.name:40} {hand:8.1f} {ours:8.1f}  {beside(actual, 'ours', 'by hand')}")


if __name__ == "__main__":
    main()
