"""Engines that notebooks start: they end with the notebook, also where that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests import PATIENCE

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
SOURCE = """
import logging, sys
import ipyparallel as ipp
sys.path.insert(0, sys.argv[1])
from engines import end_with_notebook
cluster = ipp.Cluster(engines="mpi", n=2, log_level=logging.ERROR)
cluster.start_cluster_sync()
end_with_notebook(cluster)
rc = cluster.connect_client_sync()
rc.wait_for_engines(2, timeout=900, interactive=False)
engines = rc[:]
engines.execute("import spmd; from collectives import psum; from spmd import P; import numpy as np").get(timeout=900)
engines.execute("mesh = spmd.make_mesh((2,), ('i',))").get(timeout=900)
total = "spmd.shard_map(lambda x: psum(x, 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())(np.ones(2))"
print(*engines.apply_sync(lambda: __import__("os").getpid()), cluster.controller.pid, flush=True)
engines.execute("if mesh.rank == 0: " + total)  # it waits forever
sys.stdin.read()
"""


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_a_notebook_that_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", SOURCE, str(NOTEBOOKS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
    ) as notebook:
        pids = list(map(int, notebook.stdout.readline().split()))
        assert len(pids) == 3 and all(map(is_running, pids))
        notebook.send_signal(signal.SIGKILL)
    give_up = time.monotonic() + PATIENCE
    while any(map(is_running, pids)) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert not any(map(is_running, pids))
