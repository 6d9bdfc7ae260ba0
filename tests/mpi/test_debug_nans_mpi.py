"""debug_nans on MPI ranks: each rank looks at what it has itself, and names itself."""

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P


@pytest.mark.parallel(2)
def test_the_rank_that_makes_it_names_itself():
    mesh, rank = spmd.make_mesh((2,), ("i",), backend="mpi"), MPI.COMM_WORLD.rank
    root = spmd.shard_map(np.sqrt, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x = numpy.array([1.0, 0.0])  # rank 1 has the zero
    for gradient in (md.grad(lambda x: root(x).sum()), md.jit(md.grad(lambda x: root(x).sum()))):
        with md.debug_nans():
            if rank == 0:
                gradient(x)
            else:
                with pytest.raises(FloatingPointError, match=r"backward pass of .*, on rank 1 at mesh coordinates"):
                    gradient(x)


@pytest.mark.parallel(2)
def test_sums_are_compared_with_the_operands_of_all_ranks():
    mesh, rank = spmd.make_mesh((2,), ("i",), backend="mpi"), MPI.COMM_WORLD.rank
    total = spmd.shard_map(lambda x: psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    with md.debug_nans():
        assert numpy.isinf(total(numpy.array([numpy.inf, 1.0])))
        with pytest.raises(FloatingPointError, match=rf"psum of f16\[1\]{{i}} made an infinity.*, on rank {rank} at"):
            total(numpy.array([6e4, 6e4], numpy.float16))
