"""Properties of programs on MPI ranks: they are those of simulated ranks, or end everywhere; all raise, or none."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_size, psum
from collectives.guards import deadlock
from spmd import P
from tests.checks.meshes import mesh
from tests.fuzz.properties.agree import line


def turn() -> list[tuple[int, int]]:
    """Pairs of ranks by which each block goes to the next rank."""
    return [(r, (r + 1) % axis_size("i")) for r in range(axis_size("i"))]


def _mapped(f: Callable, ranks: spmd.Mesh) -> Callable:
    whole = lambda x: f(psum(x, "j")) if "j" in ranks.axis_names else f(x)  # noqa: E731
    specs = {"in_specs": P(ranks.axis_names), "out_specs": P(ranks.axis_names)}
    return spmd.shard_map(whole, mesh=ranks, **specs, check_rep=False)


def _blocks(k: int, n: int, size: int, dtype: str) -> numpy.ndarray:
    """Small integers, of which sums are exact in any order."""
    x = numpy.random.default_rng(k).integers(0, 3, n * size * size).astype(dtype)
    return x + numpy.array(k % 5, dtype)


def _expected(f: Callable, size: int, grid: bool, x: numpy.ndarray) -> numpy.ndarray:
    """Return this rank's block of what simulated ranks compute."""
    blocks = _mapped(f, mesh(2, 2) if grid else mesh(size))(x).gather()
    return numpy.split(blocks, size)[line(size).rank]


def _check(step: int, y: Any, expected: numpy.ndarray) -> None:
    actual = numpy.asarray(y.data)
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape) or not numpy.array_equal(actual, expected):
        print(f"WRONG: step {step}: {actual.ravel()[:4]}, not {expected.ravel()[:4]}", flush=True)
        raise AssertionError("WRONG")


def as_simulated(f: Callable, dtype: str, n: int, run: Callable, grid: bool) -> None:
    """Functions of blocks give the same on MPI ranks and on simulated ones, again and again."""
    size = line(1).size
    grid = grid and size == 4
    g = run(_mapped(f, spmd.make_mesh((2, 2), ("i", "j")) if grid else line(size)))
    for k in range(3):
        x = _blocks(k, n, size, dtype)
        with numpy.errstate(all="ignore"):
            try:
                expected = _expected(f, size, grid, x)
            except TypeError:  # no order of complex numbers
                return
            _check(k, g(x), expected)


# ---------------------------------------------------------------- arguments that differ


def _change(x: Any, other: str, at: int) -> Any:
    """Return a copy of an array, or a number, with another value of the element `at`."""
    array = numpy.array(x, order="C")
    flat, others = array.reshape(-1), {"7": 7, "inf": numpy.inf, "nan": numpy.nan}
    old = flat[at % flat.size]
    new = {"larger": old * 1 + 1, "negative": -(old * 1) - 1, **others}[other]
    if new == old or old != old:
        new = 1 if old != old else 8
    if array.dtype.kind in "iub" and not numpy.isfinite(new):
        new = old + 1
    flat[at % flat.size] = new if array.dtype != bool else not old
    return array if isinstance(x, numpy.ndarray) else type(x)(array)


def arguments_differ(leaves: Sequence, around: Callable, seed: int, other: str, anew: bool, differ: bool) -> None:
    """All ranks say that arguments differ, at the calls that compare them, and never where they agree."""
    rng, size, rank = numpy.random.default_rng(seed), line(1).size, line(1).rank
    half, leaf, who = rng.integers(0, len(leaves) + 1), rng.integers(len(leaves)), rng.integers(size)
    calls, begins, at = 9, rng.integers(1, 10), rng.integers(2**20)
    v = []
    for make, spec in leaves:
        shape = rng.integers(1, 5, rng.integers(1, 4))
        v.append(make(rng, (*shape[:1] * (size if spec else 1), *shape[1:])))
    tree = lambda v: ({k: [v[k]] for k in range(half)}, v[half:])  # noqa: E731

    def total(*args: Any) -> Any:
        return psum(sum([np.sum(np.abs(x * 1.0)) for x in md.tree.leaves(args)]) * 1.0 + np.zeros(1)[0], "i")

    total.__name__ = f"f{seed}"  # calls are counted by it
    specs = tree([spec for _, spec in leaves])
    make = lambda: around(spmd.shard_map(total, line(1), in_specs=specs, out_specs=P(), check_rep=False))  # noqa: E731
    f, differ = make(), differ and size > 1
    for call in range(1, calls + 1):
        if differ and call == begins and rank == who:
            v[leaf] = _change(v[leaf], other, at)
        message = ""
        try:
            (make() if anew else f)(*tree(v))
        except ValueError as error:
            message = str(error)
        due = differ and call >= begins and call & (call - 1) == 0
        assert bool(message) == due, f"call {call}, differs from {begins}, {due}: {message}"
        if due:
            name = f"args[0][{leaf}][0]" if leaf < half else f"args[1][{leaf - half}]"
            assert f"ranks have different values of {name} of {total.__name__}: " in message, message
            break
    spmd.barrier()


# ---------------------------------------------------------------- exceptions in waits


class Stop(BaseException):
    """An exception that no library catches by name."""


ERRORS = (TimeoutError, KeyboardInterrupt, MemoryError, Stop)


def _by_alarm(error: type, seconds: float) -> None:
    def handler(*_: Any) -> None:
        raise error("interrupted")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _by_line(error: type, count: int) -> None:
    folders = tuple(os.path.join(os.path.dirname(collectives.__file__), name) for name in ("backends", "guards"))

    def trace(frame: Any, event: str, arg: Any) -> Callable | None:
        nonlocal count
        if not frame.f_code.co_filename.startswith(folders):
            return None
        count -= event == "line"
        if count == 0 and event == "line":
            raise error("interrupted")
        return trace

    sys.settrace(trace)


def _interrupt(fault: tuple, rank: int, size: int) -> None:
    """On some ranks, raise an exception soon; the others are late."""
    _, who, way, error, amount, late = fault
    if rank not in {"first": [0], "last": [size - 1], "two": [0, 1], "all": range(size)}[who]:
        time.sleep(late)
    elif way == "alarm":
        _by_alarm(ERRORS[error], amount * 1e-5 * (1 + 1000 * late))
    else:
        _by_line(ERRORS[error], amount)


def interrupted(f: Callable, dtype: str, n: int, run: Callable, faults: Sequence[tuple], overflow: int) -> None:
    """After exceptions on some ranks, at a random point of a step, ranks go on and are right, or refuse."""
    deadlock.TICK = 0.1
    size, rank = line(1).size, line(1).rank
    g = run(_mapped(f, line(size)))
    for k in range(24):
        x = _blocks(k, n, size, dtype)
        large = overflow == k and dtype in ("float32", "float64")
        expected = None if large else _expected(f, size, False, x)
        x = x + numpy.array(numpy.finfo(dtype).max * 0.9, dtype) if large else x
        try:
            try:
                with numpy.errstate(all="raise" if large else "ignore"):
                    for fault in faults:
                        if fault[0] == k:
                            _interrupt(fault, rank, size)
                    y = g(x)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                sys.settrace(None)
        except (*ERRORS, FloatingPointError) as error:
            print(f"rank {rank}: {type(error).__name__} at step {k}", flush=True)
        except RuntimeError as error:
            if "no further calls" not in str(error):
                raise
            print(f"rank {rank} refuses at step {k}: {error}"[:200], flush=True)
            break
        else:
            if not large:
                _check(k, y, expected)
