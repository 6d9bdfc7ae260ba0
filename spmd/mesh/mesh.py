"""Meshes: ranks arranged along named axes, and the backend that runs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from collectives.backends.base import Backend
from collectives.backends.simulated import Simulated
from minidiff.inputs.keywords import explain_keywords


class Mesh:
    """Ranks along named axes. Made by `make_mesh`.

    `shape` is a dict of the axes' sizes, in order; `axis_names` and `size` (the number of ranks) follow from it.
    `backend` is "mpi" or "simulated". Ranks are numbered in the order of the axes; the last one varies fastest.

    >>> mesh = make_mesh((2, 3), ('x', 'y'), backend='simulated')
    >>> mesh.shape, mesh.axis_names, mesh.size, mesh.backend, mesh.rank
    ({'x': 2, 'y': 3}, ('x', 'y'), 6, 'simulated', 0)
    """

    def __init__(self, shape: dict[str, int], ranks: Backend):
        launcher.check_mesh(shape, ranks)
        self.shape = dict(shape)
        self.ranks = ranks  # the backend itself

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape.values())

    @property
    def backend(self) -> str:
        return self.ranks.name

    @property
    def rank(self) -> int:
        """This process's rank; 0 if all ranks are simulated in it.

        Raises VarianceError in the body of a `shard_map`: use `axis_index` there, whose type says that it varies.
        """
        launcher.check_no_body("mesh.rank")
        return self.ranks.rank

    @property
    def calls(self) -> dict[str, int]:
        """The number of runs of each collective on this mesh, as the backend counts: {"psum": 3, …}."""
        return {name: counter.calls for name, counter in self.ranks.counters.items() if counter.calls}

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes that each rank has passed to each collective."""
        return {name: counter.bytes for name, counter in self.ranks.counters.items() if counter.calls}

    def reset_calls(self) -> None:
        """Reset `calls` and `bytes` to zero."""
        for counter in self.ranks.counters.values():  # which programs hold
            counter.calls = counter.bytes = 0

    def is_like(self, other: Mesh) -> bool:
        """Whether another mesh has the same axes over the same ranks.

        Shardings over the two are then equal.

        >>> one, two = (make_mesh((4,), (name,), backend='simulated') for name in 'ij')
        >>> one.is_like(make_mesh((4,), ('i',), backend='simulated')), one.is_like(two)
        (True, False)
        """
        return self is other or ([*self.shape.items()] == [*other.shape.items()] and self.ranks.same_ranks(other.ranks))

    def __deepcopy__(self, memo: dict) -> Mesh:
        return self  # there are no further ranks

    def __repr__(self) -> str:
        axes = ", ".join(f"{a}: {n}" for a, n in self.shape.items())
        return f"Mesh({axes}; {self.size} ranks, {self.backend})"


@explain_keywords
def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[str] = (),
    backend: str | None = None,
    comm: Any = None,
    exact_sums: bool = False,
) -> Mesh:
    """A mesh with axes of the given sizes and names.

    One size may be -1: that axis gets the launcher's ranks divided by the other sizes, so `make_mesh((-1, 2), …)` has
    half of them along its first axis. Without a launcher it gets one simulated rank.

    `backend` is "mpi" (this process is one rank), "simulated" (all ranks are in this process), or None: MPI if an MPI
    launcher (`mpirun`, `srun`) started this process, else simulated. `comm` is the mpi4py communicator whose
    ranks the mesh takes, by default COMM_WORLD; the mesh works on a duplicate of it.

    With `exact_sums`, all sums over ranks, in the backward pass too, are rounded once: they have the same bits in any
    order, fused or not, compiled or not (see `psum`). Such a sum takes longer, and sends about twice the bytes.

    Raises ValueError if the product of the sizes is not the number of MPI ranks, or a size of -1 cannot be computed
    from it; ImportError if there is a launcher but no mpi4py; LauncherError if the launcher belongs to another MPI
    than mpi4py's.

    >>> make_mesh((4, 2), ('x', 'y'), backend='simulated')
    Mesh(x: 4, y: 2; 8 ranks, simulated)
    """
    return Mesh(*launcher.start(axis_shapes, axis_names, backend, comm, exact_sums))


class Launcher:
    """The start of ranks: here all are simulated. `spmd.mesh.processes` installs MPI's launcher, and the checks."""

    def start(
        self, axis_shapes: Sequence[int], axis_names: Sequence[str], backend: str | None, comm: Any, exact_sums: bool
    ) -> tuple[dict[str, int], Backend]:
        """Return the shape of a mesh, and its ranks: see `make_mesh`."""
        shape = dict(zip(axis_names, axis_shapes))
        return shape, Simulated(shape)

    def check_mesh(self, shape: dict[str, int], ranks: Backend) -> None:
        """Raise TypeError if a mesh is made of anything else."""

    def check_no_body(self, name: str) -> None:
        """Raise VarianceError if `name`, a rank's number, is used in a body."""


launcher = Launcher()
