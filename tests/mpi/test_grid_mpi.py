"""Products and networks on a square grid of MPI ranks, and on two such grids that share the examples."""

import pytest
from mpi4py import MPI

from spmd.parallel import cannon, summa
from tests.grid_programs import PRODUCTS, check_network, check_product

COPIES = MPI.COMM_WORLD.size // 4
everywhere = pytest.mark.parallel([4, 8])


@everywhere
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_those_of_whole_matrices_and_communicate_as_documented(product):
    check_product(product, 2, copies=COPIES)


@everywhere
@pytest.mark.parametrize("product", [summa, cannon])
def test_networks_are_whole_ones_and_communicate_as_documented(product):
    check_network(product, 2, copies=COPIES)
