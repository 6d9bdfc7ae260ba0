"""A report of the environment: versions, MPI, ranks, the backend, and problems.

`python -m spmd` prints it; under `mpirun -n 4 python -m spmd`, once for all ranks.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy

import minidiff
from collectives import psum
from collectives.backends.one_rank import LauncherError
from spmd.mesh import launch
from spmd.mesh.mesh import make_mesh
from spmd.mesh.specs import P
from spmd.shard_map.shard_map import shard_map
from spmd.show.table import Table, number_ranges

#: Optional packages, and their use.
OPTIONAL = {
    "tqdm": "progress bars",
    "graphviz": "md.draw",
    "matplotlib": "plots",
    "nbclient": "notebooks",
    "ipyparallel": "MPI ranks from Jupyter",
}


class Process(NamedTuple):
    """One rank's part of the report."""

    rank: int
    host: str
    usable: set[int]  # the processors that it may run on; a launcher may have bound it to a few
    threads: str  # those of NumPy: OMP_NUM_THREADS, or a share of the processors
    versions: tuple[str, ...]  # of Python, NumPy and minidiff


class Environment(NamedTuple):
    """The report: facts, ranks, problems and what to do; `works` if the processes can communicate."""

    facts: dict[str, str]
    processes: list[Process]
    problems: list[str]
    works: bool

    def __str__(self) -> str:
        width = max(map(len, self.facts))
        lines = [f"{name:{width}}  {text}" for name, text in self.facts.items()]
        lines += ["", _table(self.processes)]
        if self.problems:
            lines += ["", "Problems:", *[f"- {problem}" for problem in self.problems]]
        return "\n".join(lines)


def environment() -> Environment:
    """Report on this process's environment.

    Under MPI it is a collective: every rank must call it. Missing packages and other problems are reported, not raised.

    >>> print(environment().facts['backend'])
    simulated, since no MPI launcher started this process; for real ranks: mpirun -n 4 python -m spmd
    """
    facts = {
        "minidiff": minidiff.__version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "NumPy": numpy.__version__,
        "mpi4py": _version("mpi4py") or f"is not installed: {launch.INSTALL_MPI}",
    }
    try:
        mpi, missing = launch.import_mpi(), ""
        facts["MPI library"] = mpi.library()
    except (ImportError, LauncherError) as error:
        mpi, missing = None, str(error)
        loaded = isinstance(error, LauncherError)
        facts["MPI library"] = "does not start under this launcher" if loaded else "none can be loaded"
    launched, variable = launch.launcher_size(), launch.launcher_variable()
    facts["launcher"] = f"{launched} processes, says {variable}" if launched else "none: no MPI launcher started this"
    ranks = mpi.world().Get_size() if mpi else 1
    everywhere = mpi.world().allgather if mpi else lambda process: [process]
    processes = everywhere(_process(mpi.world().Get_rank() if mpi else 0))
    facts["ranks"] = f"{ranks}, on {_count_of(len({p.host for p in processes}), 'machine')}"
    facts["backend"] = (
        "simulated, since no MPI launcher started this process; for real ranks: mpirun -n 4 python -m spmd"
    )
    if launched:
        facts["backend"] = "mpi, since an MPI launcher started this process; backend='simulated' overrides"
    facts["optional"] = ", ".join(f"{name} {_version(name) or 'missing'} ({use})" for name, use in OPTIONAL.items())
    facts["pictures"] = _pictures()
    problems = [missing] if launched and missing else []
    if launched and mpi and launched != ranks:
        problems.append(launch.other_launcher_message(mpi.library(), ranks))
    problems += _sharing_problems(processes)
    works = not launched or (mpi is not None and launched == ranks)
    if works:
        facts["an all-reduce"] = _all_reduce(launched or 4)
    return Environment(facts, processes, problems, works)


def _pictures() -> str:
    """Return the program that computes the layout of `md.draw`'s graphs."""
    if (dot := shutil.which("dot")) is not None:
        return f"by {dot}"
    version = _version("pygraphviz")
    return f"by pygraphviz {version}" if version else "none: `pip install pygraphviz`, or install Graphviz"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _count_of(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"


def _process(rank: int) -> Process:
    """Return this rank's part of the report."""
    versions = platform.python_version(), numpy.__version__, minidiff.__version__
    threads = os.environ.get("OMP_NUM_THREADS") or str(launch.share_processors() or "")
    return Process(rank, socket.gethostname(), launch.usable_processors(), threads, versions)


def _by_host(processes: Sequence[Process]) -> Iterator[tuple[str, list[Process], int]]:
    """Yield each host, its ranks, and the number of processors that they may use together."""
    for host, group in groupby(sorted(processes, key=itemgetter(1, 0)), key=itemgetter(1)):
        members = list(group)
        yield host, members, len(set().union(*[p.usable for p in members]))


def _table(processes: Sequence[Process]) -> str:
    lines: list[list[Any]] = [
        [host, ", ".join(number_ranges([p.rank for p in members])), processors, members[0].threads or "not limited"]
        for host, members, processors in _by_host(processes)
    ]
    header = ["machine", "ranks", "processors", "threads of a rank"]
    total = ["total", len(processes), sum(line[2] for line in lines), ""]
    return str(Table(header, lines, total))


def _sharing_problems(processes: Sequence[Process]) -> Iterator[str]:
    """Yield the problems of ranks that share a machine, or have different versions."""
    for host, members, processors in _by_host(processes):
        n = len(members)
        if n > processors:
            yield (
                f"{n} ranks share {_count_of(processors, 'processor')} of {host}: that is fine for trying a program, "
                "but not for timing it, since ranks that wait keep a processor busy. Start fewer, or use more machines"
            )
        elif n > 1 and not members[0].threads:
            yield (
                f"the {n} ranks on {host} may each start threads for all {processors} processors: "
                "`pip install threadpoolctl`, or `export OMP_NUM_THREADS=1` before mpirun"
            )
    if len({p.versions for p in processes}) > 1:
        versions = "; ".join(f"rank {p.rank}: Python {p.versions[0]}, NumPy {p.versions[1]}" for p in processes)
        yield f"not all ranks have the same versions ({versions}): use one environment that all machines see"


def _all_reduce(ranks: int) -> str:
    """Sum over the ranks, through all layers; say if it is right, and its time."""
    mesh = make_mesh((ranks,), ("ranks",))
    total = shard_map(lambda x: psum(x, "ranks"), mesh=mesh, in_specs=P("ranks"), out_specs=P())
    ones: Any = numpy.ones(ranks)
    total(ones)
    start = time.perf_counter()
    right = float(total(ones)[0]) == ranks
    took = (time.perf_counter() - start) * 1e6
    return f"over {ranks} {mesh.backend} ranks: {'right' if right else 'WRONG'}, in {took:,.0f} µs"
