"""The processes of a job, and the meshes whose ranks they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from collectives.backends.base import Backend
from collectives.backends.one_rank import LauncherError
from collectives.exact_sums import SimulatedRanks, exact_ranks
from spmd.mesh import launch
from spmd.mesh.checks import check_mesh, check_no_body, check_shape, fill_in
from spmd.mesh.mesh import Launcher, make_mesh


class MPILauncher(Launcher):
    """The launcher of MPI's ranks, `mpirun`, `mpiexec` or `srun`; without one, ranks are simulated."""

    check_mesh = staticmethod(check_mesh)
    check_no_body = staticmethod(check_no_body)

    def start(
        self, axis_shapes: Sequence[int], axis_names: Sequence[str], backend: str | None, comm: Any, exact_sums: bool
    ) -> tuple[dict[str, int], Backend]:
        shape, launched = check_shape(axis_shapes, axis_names), launch.launcher_size()
        if backend is None:
            backend = "mpi" if launched is not None or comm is not None else "simulated"
        if backend == "simulated":
            shape = fill_in(shape, launched)
            return shape, SimulatedRanks(shape, exact_sums=exact_sums)
        if backend != "mpi":
            raise ValueError(f"make_mesh: backend must be 'mpi', 'simulated' or None, got {backend!r}")
        mpi = launch.import_mpi()
        ranks = (mpi.world() if comm is None else comm).Get_size()
        if comm is None and launched is not None and launched != ranks:
            raise LauncherError(launch.other_launcher_message(mpi.library(), ranks))
        shape = fill_in(shape, ranks)
        size = math.prod(shape.values())
        if ranks != size:
            raise ValueError(
                f"make_mesh: a mesh of {' x '.join(map(str, shape.values()))} needs {size} ranks, but MPI has {ranks}. "
                f"Start the program with `mpirun -n {size}`, or simulate the ranks with backend='simulated'"
            )
        return shape, exact_ranks(mpi.Ranks)(shape, comm, exact_sums=exact_sums)


def process_count() -> int:
    """The number of processes that the MPI launcher started; 1 without a launcher.

    Raises ImportError and LauncherError as `make_mesh` does.

    >>> process_count()
    1
    """
    launched = launch.launcher_size()
    if launched is None:
        return 1
    mpi = launch.import_mpi()
    count = mpi.world().Get_size()
    if count != launched:
        raise LauncherError(launch.other_launcher_message(mpi.library(), count))
    return count


def process_index() -> int:
    """The index of this process among those that run the program, from 0.

    It is 0 without an MPI launcher. Use it for work that one process does alone and that does not communicate:
    printing, writing a file. Simulated ranks are all in one process. Raises VarianceError in the body of a `shard_map`,
    where `collectives.axis_index` says which rank runs; ImportError and LauncherError as `make_mesh` does.

    >>> if process_index() == 0:
    ...     print("written once")
    written once
    """
    check_no_body("process_index()")
    return launch.import_mpi().world().Get_rank() if process_count() > 1 else 0


def barrier() -> None:
    """Wait until all processes that run this program have called it.

    Every process must call it. Use it, for example, so that no process reads a file before another has written it.
    Collectives synchronize by themselves. Without an MPI launcher there is nothing to wait for.

    >>> barrier()
    """
    if process_count() > 1:
        make_mesh((-1,), ("process",), backend="mpi").ranks.barrier()
