"""Random numbers on MPI ranks."""

import pytest
from mpi4py import MPI

from spmd import P
from tests import random_programs
from tests.random_programs import mesh_for

everywhere = pytest.mark.parallel([2, 4])


@everywhere
def test_states_and_blocks():
    mesh, _ = mesh_for(MPI.COMM_WORLD.size)
    random_programs.check_states(mesh)
    random_programs.check_keys_for_each_rank(mesh)
    random_programs.check_blocks(mesh, [P("i"), P(None, "i")])
    random_programs.check_initialize(mesh, ("i", None))


@everywhere
def test_dropout_of_transformers():
    random_programs.check_dropout_of_transformers(mesh_for(MPI.COMM_WORLD.size)[1])
