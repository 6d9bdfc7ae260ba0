"""`md.debug.print` on MPI ranks: each prints its own lines, in the order of the program."""

import contextlib
import io

import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean, psum
from spmd import P


def printed(f, *args):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        f(*args)
    return out.getvalue().splitlines()


def body(w, x):
    md.debug.print("x = {}", x)
    total = psum((w * x).sum(), "i")
    md.debug.print("total = {}", total)

    def step(c, e):
        md.debug.print("c = {:.1f}, e = {:.1f}", c, e)
        return pmean(c * e, "i"), None

    return md.scan(step, total, x)[0]


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
