"""Meshes: ranks arranged along named axes, and the backend that runs them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from collectives.backends.base import Backend
from collectives.backends.simulated import Simulated
from minidiff.core.interpreter import current_scope
from minidiff.errors import VarianceError
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
        if not (isinstance(shape, dict) and isinstance(ranks, Backend)):
            raise TypeError(
                "a mesh is made by make_mesh, from its axes' sizes and names, as in make_mesh((4, 2), ('x', 'y')); got "
                f"{shape!r} and {ranks!r}. Its ranks are the launcher's (mpirun -n 8), or simulated: do not list them"
            )
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
        check_no_body("mesh.rank")
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
        if self is other:
            return True
        return [*self.shape.items()] == [*other.shape.items()] and self.ranks.same_ranks(other.ranks)

    def __deepcopy__(self, memo: dict) -> Mesh:
        return self  # there are no further ranks

    def __repr__(self) -> str:
        axes = ", ".join(f"{a}: {n}" for a, n in self.shape.items())
        return f"Mesh({axes}; {self.size} ranks, {self.backend})"


@explain_keywords
def make_mesh(
    axis_shapes: Sequence[int], axis_names: Sequence[str] = (), backend: str | None = None, comm: Any = None
) -> Mesh:
    """A mesh with axes of the given sizes and names.

    One size may be -1: that axis gets the launcher's ranks divided by the other sizes, so `make_mesh((-1, 2), …)` has
    half of them along its first axis. Without a launcher it gets one simulated rank.

    `backend` is "mpi" (this process is one rank), "simulated" (all ranks are in this process), or None: MPI if an MPI
    launcher (`mpirun`, `srun`) started this process, else simulated. `comm` is the mpi4py communicator whose
    ranks the mesh takes, by default COMM_WORLD; the mesh works on a duplicate of it.

    Raises ValueError if the product of the sizes is not the number of MPI ranks, or a size of -1 cannot be computed
    from it; ImportError if there is a launcher but no mpi4py; LauncherError if the launcher belongs to another MPI
    than mpi4py's.

    >>> make_mesh((4, 2), ('x', 'y'), backend='simulated')
    Mesh(x: 4, y: 2; 8 ranks, simulated)
    """
    shape = _check_shape(axis_shapes, axis_names)
    launched = launcher.size()
    if backend is None:
        backend = "mpi" if launched is not None or comm is not None else "simulated"
    if backend == "simulated":
        shape = fill_in(shape, launched)
        return Mesh(shape, Simulated(shape))
    if backend != "mpi":
        raise ValueError(f"make_mesh: backend is 'mpi', 'simulated' or None, got {backend!r}")
    return Mesh(*launcher.ranks(shape, comm))


class Launcher:
    """The launcher of this process: here none, and `spmd.mesh.launch` installs that of MPI."""

    def size(self) -> int | None:
        """Return the number of processes that it started; None without a launcher."""
        return None

    def ranks(self, shape: dict[str, int], comm: Any) -> tuple[dict[str, int], Backend]:
        """Return the shape of a mesh without -1, and its ranks, of which this process is one."""
        raise ImportError("make_mesh: backend='mpi' is installed by `import spmd`")


launcher = Launcher()


def _check_shape(axis_shapes: Sequence[int], axis_names: Sequence[str]) -> dict[str, int]:
    if isinstance(axis_shapes, dict):
        sizes = tuple(axis_shapes.values())
        raise TypeError(
            "make_mesh takes the sizes of the axes, and then their names: write "
            f"make_mesh({sizes}, {tuple(axis_shapes)}), got {axis_shapes!r}"
        )
    if not all(hasattr(x, "__len__") and not isinstance(x, (str, dict)) for x in (axis_shapes, axis_names)):
        raise TypeError(
            f"make_mesh takes a tuple of sizes and a tuple of names, as in make_mesh((4, 2), ('x', 'y')); "
            f"got {axis_shapes!r} and {axis_names!r}"
        )
    if len(axis_shapes) != len(axis_names):
        raise ValueError(
            f"make_mesh: {len(axis_shapes)} sizes for {len(axis_names)} axis names: {tuple(axis_shapes)} and "
            f"{tuple(axis_names)}; give one size and one name for each axis"
        )
    for name, size in zip(axis_names, axis_shapes):
        if not isinstance(name, str):
            raise TypeError(f"make_mesh: the name of an axis is a string, as in ('x', 'y'); got {name!r}")
        if axis_names.count(name) > 1:
            raise ValueError(
                f"make_mesh: the axis name {name!r} occurs twice in {tuple(axis_names)}; rename one of them"
            )
        if not hasattr(size, "__index__"):
            raise TypeError(f"make_mesh: the axis {name!r} has size {size!r}; a size is an integer: write int({size})")
        if operator.index(size) < 1 and operator.index(size) != -1:
            raise ValueError(
                f"make_mesh: the axis {name!r} has size {size}; a size is at least 1, or -1 for all ranks that are left"
            )
    shape = dict(zip(axis_names, map(operator.index, axis_shapes)))
    if list(shape.values()).count(-1) > 1:
        raise ValueError(f"make_mesh: the sizes {tuple(shape.values())} leave several axes open: at most one is -1")
    return shape


def fill_in(shape: dict[str, int], ranks: int | None) -> dict[str, int]:
    """Return the shape with -1 replaced by the size that `ranks` leaves for it; by 1 if they are unknown."""
    axis = next((name for name, size in shape.items() if size == -1), None)
    if axis is None:
        return shape
    known = -math.prod(shape.values())
    ranks = known if ranks is None else ranks
    if ranks % known:
        other_sizes = ", ".join(f"{name}: {size}" for name, size in shape.items() if name != axis)
        raise ValueError(
            f"make_mesh: the axis {axis!r} has size -1, but the {ranks} ranks of the launcher cannot be divided by the "
            f"other axes ({other_sizes}): start the program with a multiple of {known}, as in `mpirun -n {2 * known}`"
        )
    return {**shape, axis: ranks // known}


def check_no_body(name: str) -> None:
    """Raise VarianceError if `name`, a rank's number, is used in a body."""
    scope = current_scope()
    if scope is not None:
        axes = tuple(scope.axes) if len(scope.axes) > 1 else next(iter(scope.axes), "")
        raise VarianceError(
            f"{name} in the body of a shard_map: it is a plain number, whose type does not say that it differs "
            f"from rank to rank, and 0 where ranks are simulated. Write collectives.axis_index({axes!r}), whose "
            "type does, and np.where in the place of an `if`"
        )
