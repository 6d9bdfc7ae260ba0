"""A study as a program: its option, its mesh, and what it prints. Studies show what the core can express."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import spmd
from spmd.examples.loop import positive_integer, show_mesh
from spmd.mesh.launch import end_when_unread, launcher_size, silence_other_ranks


def study_mesh(axes: Sequence[str], ranks: int, backend: str | None = None) -> spmd.Mesh:
    """Make a mesh of these axes, whose sizes are as equal as `ranks` allows, the largest first.

    >>> study_mesh(('rows', 'columns'), 4, 'simulated'), study_mesh(('i', 'j', 'k'), 4, 'simulated')
    (Mesh(rows: 2, columns: 2; 4 ranks, simulated), Mesh(i: 2, j: 2, k: 1; 4 ranks, simulated))
    """
    sizes: list[int] = []
    for left in range(len(axes), 0, -1):
        root = ranks ** (1 / left) - 1e-9
        size = next(n for n in range(1, ranks + 1) if n >= root and ranks % n == 0)
        sizes.append(size)
        ranks //= size
    return spmd.make_mesh(tuple(sorted(sizes, reverse=True)), tuple(axes), backend=backend)


def run_study(
    show: Callable[[spmd.Mesh], None], axes: Sequence[str], argv: Sequence[str] | None = None, ranks: int = 4
) -> None:
    """Parse the options and call `show(mesh)`; the first rank prints for all.

    The mesh has the launcher's ranks, or without a launcher `ranks` simulated ones.
    """
    module = Path(show.__globals__["__file__"]).stem
    parser = argparse.ArgumentParser(
        f"python -m spmd.examples.{module}",
        description=show.__globals__["__doc__"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=positive_integer, help=f"ranks (default: as many as the launcher started; else {ranks})"
    )
    with end_when_unread(), silence_other_ranks():
        options = parser.parse_args(argv)
        mesh = study_mesh(axes, options.ranks or launcher_size() or ranks)
        show_mesh(mesh)
        show(mesh)


def print_calls(title: str, program: Callable, *args: Any) -> Any:
    """Run a program, print the collectives that a rank calls in it, and return its result."""
    result = program(*args)
    counts = spmd.communication(program)(*args).counts
    print(f"{title}: {', '.join(f'{count} {name}' for name, count in counts.items()) or 'no collective'}")
    return result


def numbers(values: Any, digits: int = 4) -> str:
    """Return numbers as a text.

    >>> numbers([1, 0.25])
    '1.0000 0.2500'
    """
    return " ".join(f"{float(x):.{digits}f}" for x in values)
