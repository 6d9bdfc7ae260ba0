"""Search for partition specs: try all for a few named dimensions, and price the tape of each.

The loss is a function of whole arrays. Parameters and batch are sharded by specs, and operations on them communicate as
on any sharded arrays. So the tape of the loss and its gradient says what each choice of specs costs a rank: the time of
its collectives (according to `spmd.CostModel`), the matrix products of its blocks, the bytes of its blocks. The program
does not run.

A choice assigns mesh axes to names: each dimension with that name is split along the axis. With a axes and n names
there are (a + 1)^n choices.

Source: Xu et al., "GSPMD: General and scalable parallelization for ML computation graphs".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import minidiff as md
from minidiff import tree
from minidiff.core.types import typeof
from spmd.arrays.reshard import distribute
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec, part_count
from spmd.report.communication import price_tape
from spmd.report.forecast import CostModel, show_number
from spmd.report.table import Table, show_seconds


@dataclass(frozen=True)
class Choice:
    """An assignment of mesh axes to names of dimensions, and what it costs a rank.

    It sends `bytes` and holds `memory` bytes; `seconds` are those of communication and of products, `flops`.
    """

    axes: dict[str, str]  # name of a dimension -> axis of the mesh
    specs: tuple
    bytes: int
    memory: int
    flops: int
    seconds: float

    def __str__(self) -> str:
        return ", ".join(f"{name} along {axis}" for name, axis in self.axes.items()) or "nothing is split"


@dataclass(frozen=True, repr=False)
class Search(Table):
    """The best choices, the fastest first: a table to print."""

    choices: tuple[Choice, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Choice:
        return self.choices[0]

    def _table(self):
        header = ["split", "time", "bytes sent", "bytes held", "flops"]
        lines = [
            [str(c), show_seconds(c.seconds), *map(show_number, (c.bytes, c.memory, c.flops))] for c in self.choices
        ]
        return header, lines, None


def search(
    loss: Callable,
    params: Any,
    batch: Any,
    mesh: Mesh,
    names: tuple,
    *,
    model: CostModel | None = None,
    flops_per_second: float = 1e11,
    memory: float = math.inf,
    count: int = 10,
) -> Search:
    """Find the partition specs with which a step of `loss(params, batch)` takes the least time.

    `names` are the names of the dimensions of (params, batch): a prefix of that tree, of strings such as
    "features hidden"; "_" is a dimension that is not split. A choice is left out if an axis does not divide a
    dimension, or if a rank would hold more than `memory` bytes of parameters and batch. `model` prices communication,
    by default at 1 µs a step and 1 ns a byte. Raises ValueError if no choice is left, and for names that do not fit
    their array.

    >>> import minidiff.numpy as np
    >>> import spmd
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> loss = lambda w, x: np.sum((x @ w) ** 2)
    >>> found = search(loss, np.ones((8, 8)), np.ones((4096, 8)), mesh, ('k n', 'batch k'))
    >>> str(found.best)
    'n along i'
    """
    model = model or CostModel(alpha=1e-6, beta=1e-9)
    leaves, structure = tree.flatten((params, batch))
    given = tree.broadcast_prefix(names, (params, batch), lambda x: isinstance(x, str), "names")
    labels, types = [label.split() for label in given], [*map(typeof, leaves)]
    for path, label, t in zip(tree.paths(structure, "arrays"), labels, types):
        if len(label) != t.ndim:
            raise ValueError(f"search: {path} has type {t}, but its dimensions have {len(label)} names: {label}")
    known = [*dict.fromkeys(name for label in labels for name in label if name != "_")]
    choices, too_large = [], 0
    for axes in itertools.product((None, *mesh.axis_names), repeat=len(known)):
        chosen = {name: axis for name, axis in zip(known, axes) if axis is not None}
        specs: list[Any] = [_spec(label, t.shape, chosen, mesh.shape) for label, t in zip(labels, types)]
        if None in specs:
            continue
        held = sum(t.nbytes // part_count(spec.axes, mesh.shape) for t, spec in zip(types, specs))
        if held > memory:
            too_large += 1
            continue
        arrays = tree.unflatten(structure, [distribute(x, mesh, spec) for x, spec in zip(leaves, specs)])
        cost = price_tape(md.make_tape(md.value_and_grad(loss))(*arrays))
        seconds = sum(map(model.of_row, cost.rows)) + cost.flops / flops_per_second
        choices.append(Choice(chosen, tree.unflatten(structure, specs), cost.bytes, held, cost.flops, seconds))
    if not choices:
        raise ValueError(
            f"search: of {(len(mesh.axis_names) + 1) ** len(known)} assignments of {mesh} to {known}, {too_large} need "
            f"more than {memory:,.0f} bytes on a rank, and for the others an axis does not divide a dimension"
        )
    notes = (f"{too_large} choices need more than {memory:,.0f} bytes on a rank",) if too_large else ()
    return Search(tuple(sorted(choices, key=lambda c: (c.seconds, c.memory))[:count]), notes)


def _spec(label: Sequence[str], shape: tuple[int, ...], axes: dict[str, str], sizes: dict) -> PartitionSpec | None:
    """The spec of an array; None if an axis would split two dimensions, or does not divide one."""
    dims = [(axes[name],) if name in axes else () for name in label]
    used = [axis for dim in dims for axis in dim]
    fits = all(n % part_count(dim, sizes) == 0 for n, dim in zip(shape, dims))
    return PartitionSpec.of_dims(dims) if fits and len(set(used)) == len(used) else None
