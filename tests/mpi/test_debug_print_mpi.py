"""`md.debug.print` on MPI ranks: each prints its own lines, in the order of the program."""

import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.minidiff.test_debug_print import body, printed


@pytest.mark.parallel(2)
def test_each_rank_prints_what_a_simulated_one_prints():
    rank = MPI.COMM_WORLD.rank
    f, simulated = (
        spmd.shard_map(body, spmd.make_mesh((2,), ("i",), backend=backend), (P(), P("i")), P())
        for backend in ("mpi", "simulated")
    )
    x = np.arange(4.0)
    name = f"rank {rank} at mesh coordinates (i,) = ({rank},): "
    expected = [line for line in printed(simulated, 0.5, x) if line.startswith(name)]
    assert expected[0] == f"{name}x = {x[2 * rank : 2 * rank + 2]}"
    assert len(expected) == 4
    for use in (f, md.jit(f), md.grad(f), md.jit(md.grad(f))):
        assert printed(use, 0.5, x) == expected
