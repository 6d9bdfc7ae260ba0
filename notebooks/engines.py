"""Ranks for a notebook: engines that end with it, and scripts on ranks of their own."""

import os
import shutil
import subprocess
import sys

import ipyparallel as ipp

#: Where this Python's own programs are. If an MPI is installed beside it, that one is to be started.
_PROGRAMS = os.path.dirname(sys.executable)
if shutil.which("mpiexec", path=_PROGRAMS):
    os.environ["PATH"] = os.pathsep.join([_PROGRAMS, os.environ.get("PATH", "")])

# Open MPI, which starts no more ranks than there are processors, is told to (before version 5, and since).
os.environ.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
os.environ.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")

#: Waits until the kernel that started it has ended, in whatever way, and ends what is left of these processes.
_GUARD = """
import sys, psutil
started = []
for pid in map(int, sys.argv[1:]):
    try:
        started.append(psutil.Process(pid))
    except psutil.NoSuchProcess:
        pass
sys.stdin.read()
left = [p for root in started if root.is_running() for p in [*root.children(recursive=True), root]]
for process in left:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass
"""

_guards: list[subprocess.Popen] = []  # what they wait for is that their pipes are closed


def end_with_notebook(cluster: ipp.Cluster) -> None:
    """Have the processes of this cluster killed when this notebook's kernel has ended, if they are still there then.

    Call it when the cluster has been started. (A kernel that ends as usual stops its clusters itself; one that is
    killed does not.)
    """
    pids = [str(launcher.pid) for launcher in (cluster.controller, *cluster.engines.values())]
    command = [sys.executable, "-c", _GUARD, *pids]
    _guards.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))


def run_script(source: str, ranks: int, timeout: float = 120.0) -> subprocess.CompletedProcess:
    """Run a Python script on MPI ranks of its own, as `mpiexec -n <ranks> python script.py` does.

    Its outputs are `stdout` and `stderr` of what is returned. Raises subprocess.TimeoutExpired, and ends the ranks,
    where it takes longer than `timeout` seconds.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "MPI_", "HYDRA", "OMPI_COMM"))}
    command = ["mpiexec", "-n", str(ranks), sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
