"""python -m spmd: report the environment; with run script.py, run a script.

A script runs as one job: an exception on one rank ends all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import runpy
import shutil
import socket
import sys
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
from minidiff.errors.tracebacks import shorten
from spmd.mesh import launch
from spmd.mesh.launch import end_when_unread, note_exit, silence_other_ranks, wait_for_first_rank
from spmd.mesh.mesh import make_mesh
from spmd.mesh.specs import P
from spmd.mesh.supervised import note, note_failure, watch_this_rank
from spmd.shard_map.shard_map import shard_map
from spmd.show import Table, number_ranges
from spmd.supervisor import supervise


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["run"]:
        return run(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m spmd",
        description="Prints versions, the MPI library, ranks, the launcher, and which backend is chosen and why; then "
        "problems, if there are any. Under mpirun, once for all ranks. Exit status 1: ranks cannot work together.",
        epilog="python -m spmd run script.py …, or run -m module …, runs a program: an exception on one rank ends the "
        "job from its first line to its last, also before it imports spmd, and in what it registers with atexit; with "
        "--restarts, the job starts again (python -m spmd run --help). "
        "python -m spmd.examples lists the examples.",
    )
    parser.add_argument("--version", action="version", version=f"minidiff {minidiff.__version__}")
    with end_when_unread(), silence_other_ranks():
        parser.parse_args(argv)
        report = environment()
        print(report, flush=True)
    if not report.works:
        wait_for_first_rank()
    return int(not report.works)


def run(argv: list[str]) -> int:
    """Run a script, or `-m` a module, with its arguments; with `-n` or `--restarts` under a supervisor.

    spmd is imported before it, and so guards the job from the script's first line.
    """
    parser = _parser_of_run()
    try:
        with silence_other_ranks():
            call = parser.parse_args(argv)
            sys.path[0] = os.getcwd() if call.is_module else os.path.dirname(os.path.abspath(call.program))
            if not _is_there(call.program, call.is_module):
                kind = "module" if call.is_module else "script"
                parser.error(f"there is no {kind} {call.program!r} in {os.getcwd()}")
            if call.restarts < 0 or (call.ranks is not None and call.ranks < 1):
                parser.error("-n must be at least 1, and --restarts at least 0")
            supervised = bool(call.ranks or call.restarts)
            mpiexec = _mpiexec(parser, call) if supervised else ""
    except SystemExit as error:
        if error.code:
            wait_for_first_rank()
        raise
    if supervised:  # by the first process; the others may end
        program, ranks = ["-m"] * call.is_module + [call.program, *call.arguments], call.ranks or launch.launcher_size()
        return 0 if launch.launcher_rank() else supervise(program, mpiexec, ranks, call.restarts, call.shrink)
    watch_this_rank()
    sys.argv[:] = [call.program, *call.arguments]
    try:
        if call.is_module:
            runpy.run_module(call.program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(call.program, run_name="__main__")
    except SystemExit as error:
        note_exit(error)
        raise
    except Exception as error:
        note_failure(1, type(error).__name__)
        shorten(error)  # the frames above the program's, which no function of the library has left
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        note(f"end-{launch.launcher_rank()}", "")
    return 0


def _parser_of_run() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spmd run",
        usage="%(prog)s [options] script.py [arguments]\n       %(prog)s [options] -m module [arguments]",
        description="Runs a program as one job: an exception on one rank ends all of them. With --restarts, the job "
        "starts again when a rank has died, by a signal, an exception or os._exit, and the program goes on from its "
        "last checkpoint. It does not start again if it fails twice in the same way and has saved nothing in between. "
        "The exit code is that of the rank that failed; after a signal, 128 plus its number.",
    )
    add = parser.add_argument
    add("-n", type=int, dest="ranks", metavar="N", help="start N ranks by mpiexec, when no launcher has")
    add("--restarts", type=int, default=0, metavar="N", help="how often the job may start again (default: 0)")
    shrink = (
        "start again on as many ranks as are left, by default on as many as before; and on fewer, while the program "
    )
    add("--shrink", action="store_true", help=f"{shrink}refuses their number by a ValueError before its first step")
    add("-m", action="store_true", dest="is_module", help="run a module, by its name")
    add("program", help="a script, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, help="the program's")
    return parser


def _mpiexec(parser: argparse.ArgumentParser, call: argparse.Namespace) -> str:
    """Return the launcher for a program under a supervisor; end with an error message if it cannot start the ranks."""
    launched = launch.launcher_size()
    if launched and (call.ranks or launch.is_by_srun() or launch.ranks_on_this_machine() < launched):
        problem = "the launcher has started ranks" if call.ranks else "under srun, or on several machines, none can"
        parser.error(
            f"-n and --restarts start ranks, but {problem}. Without the launcher: python -m spmd run -n {launched} "
            f"--restarts {call.restarts} {call.program} … (a scheduler, or HYDRA_HOST_FILE, names several machines)"
        )
    mpiexec = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
    if mpiexec is None and (call.ranks or launched):
        parser.error(f"there is no mpiexec, which starts the ranks: install it with {launch.INSTALL_MPI}")
    return mpiexec or ""


def _is_there(program: str, is_module: bool) -> bool:
    """Return whether a script, or a module, can be found."""
    try:
        return importlib.util.find_spec(program) is not None if is_module else os.path.exists(program)
    except ModuleNotFoundError:  # a package of its name
        return False


# ---------------------------------------------------------------- the environment


#: Optional packages, and their use.
OPTIONAL = {
    "tqdm": "progress bars",
    "graphviz": "md.draw",
    "matplotlib": "plots",
    "nbclient": "notebooks",
    "ipyparallel": "MPI ranks from Jupyter",
}
#: The problem of two projects whose packages have one name: pip writes the files of one over those of the other.
OTHER_PROJECT = "another project `collectives` is installed, too: uninstall it, then reinstall minidiff"


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
    on_mpi = "mpi, since an MPI launcher started this process; backend='simulated' overrides"
    simulated = "simulated, since no MPI launcher started this process; for real ranks: mpirun -n 4 python -m spmd"
    facts["backend"] = on_mpi if launched else simulated
    facts["optional"] = ", ".join(f"{name} {_version(name) or 'missing'} ({use})" for name, use in OPTIONAL.items())
    facts["pictures"] = _pictures()
    problems = [missing] if launched and missing else []
    if launched and mpi and launched != ranks:
        problems.append(launch.other_launcher_message(mpi.library(), ranks))
    if _version("collectives"):
        problems.append(OTHER_PROJECT)
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
    return str(Table(header, lines, ["total", len(processes), sum(line[2] for line in lines), ""]))


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


if __name__ == "__main__":
    sys.exit(main())
