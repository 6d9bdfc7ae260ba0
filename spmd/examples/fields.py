"""The common part of examples of fields on a grid: mesh, halos of whole arrays, options, and comparison with NumPy.

A step is a function of a field and of the function that puts a halo around it: `spmd.halo` in the body of a
`shard_map`, or `whole_halo`, which is NumPy's `pad` of a whole array. So both do the same to each element.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
import spmd
from spmd import P
from spmd.examples.loop import positive_integer, show_mesh
from spmd.mesh.launch import end_when_unread, launcher_size, silence_other_ranks

AXES = ("rows", "columns")
FIELD = P(*AXES)

#: NumPy's names of the modes of halos.
_PAD_MODES: dict[str, Any] = {"periodic": "wrap", "zeros": "constant", "edge": "edge"}


def grid_mesh(ranks: int, backend: str | None = None) -> spmd.Mesh:
    """A mesh that is as square as `ranks` allows, with no fewer rows than columns."""
    columns = next(n for n in range(math.isqrt(ranks), 0, -1) if ranks % n == 0)
    return spmd.make_mesh((ranks // columns, columns), AXES, backend=backend)


def whole_halo(x: Any, widths: Any, axes: Any, mode: str | Sequence[str] = "periodic") -> numpy.ndarray:
    """The halo of a whole array, by `numpy.pad`: what `spmd.halo` of its blocks is compared with."""
    modes = [mode] * x.ndim if isinstance(mode, str) else mode
    for dim, (width, outside) in enumerate(zip(numpy.broadcast_to(widths, (x.ndim, 2)), modes)):
        around = [(0, 0)] * x.ndim
        around[dim] = tuple(width)
        x = numpy.pad(x, around, mode=_PAD_MODES[outside])
    return x


def laplacian(p: Any) -> Any:
    """The sum of the four neighbors less four times the value, of a field with a halo of width 1."""
    return p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * p[1:-1, 1:-1]


def bumps(shape: tuple[int, int]) -> numpy.ndarray:
    """A field with two bumps, one sharper than the other."""
    y, x = (numpy.arange(n).reshape(-1, 1) / n for n in shape)
    sharp = numpy.exp(-((y - 0.4) ** 2 + (x.T - 0.3) ** 2) / 0.01)
    return sharp + 0.5 * numpy.exp(-((y - 0.6) ** 2 + (x.T - 0.7) ** 2) / 0.02)


def repeat(step: Callable[[Any], Any], state: Any, steps: int) -> Any:
    """The state after so many steps, by a loop."""
    for _ in range(steps):
        state = step(state)
    return state


def scan_steps(step: Callable[[Any], Any], state: Any, steps: int) -> Any:
    """The state after so many steps, as one operation under `jit`."""
    return md.scan(lambda state, _: (step(state), None), state, length=steps)[0]


def parser_of(example: str, description: str | None, shape: tuple[int, int], steps: int) -> argparse.ArgumentParser:
    """A parser of the options that these examples have."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m spmd.examples.{example}", None, description, formatter_class=raw)
    add = parser.add_argument
    default = " (default: {} {})".format(*shape)
    add("--shape", type=positive_integer, nargs=2, default=shape, help="the grid's rows and columns" + default)
    add("--steps", type=positive_integer, default=steps, help="steps in time (default: %(default)s)")
    add("--ranks", type=positive_integer, help="ranks (default: as many as the launcher started; else 4, simulated)")
    return parser


def run(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, act: Callable[[spmd.Mesh, argparse.Namespace], None]
) -> None:
    """Parse the options, and call `act(mesh, options)`; the first rank prints for all."""
    with end_when_unread(), silence_other_ranks():
        options = parser.parse_args(argv)
        mesh = grid_mesh(options.ranks or launcher_size() or 4)
        show_mesh(mesh)
        act(mesh, options)


def compare(program: Callable, plain: Callable, field: Any, spec: spmd.PartitionSpec, mesh: spmd.Mesh) -> Any:
    """Run a program on ranks, and NumPy's of the whole field; print whether they agree, and what the first sends."""
    blocks = spmd.distribute(field, mesh, spec)
    compiled = md.jit(program)
    seconds = []
    for _ in range(2):  # the first call compiles
        began = time.perf_counter()
        result = compiled(blocks)
        seconds.append(time.perf_counter() - began)
    same = numpy.array_equal(spmd.gather(result), plain(field))
    print(f"\n{seconds[0]:.2f} s, and compiled {seconds[1]:.2f} s")
    print(f"The same as plain NumPy, to the last bit: {'yes' if same else 'NO'}\n")
    print(spmd.communication(program)(blocks), flush=True)
    return result
