"""Networks on MPI ranks: losses and gradients of the unsharded one, and what they communicate."""

import pytest
from mpi4py import MPI

from tests import networks

everywhere = pytest.mark.parallel([4, 8])


@everywhere
def test_losses_and_gradients_are_those_of_the_whole_network():
    for name, shape in networks.cases(MPI.COMM_WORLD.size):
        networks.check_numbers(name, shape)


@everywhere
def test_collectives_are_where_the_documentation_says():
    for name, shape in networks.cases(MPI.COMM_WORLD.size):
        networks.check_communication(name, shape)
