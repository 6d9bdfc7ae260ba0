"""Products and networks on a square grid of MPI ranks."""

import pytest

from spmd.parallel import cannon, summa
from tests.grid_programs import PRODUCTS, check_network, check_product


@pytest.mark.parallel(4)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_those_of_whole_matrices_and_communicate_as_documented(product):
    check_product(product, 2)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("product", [summa, cannon])
def test_networks_are_whole_ones_and_communicate_as_documented(product):
    check_network(product, 2)
