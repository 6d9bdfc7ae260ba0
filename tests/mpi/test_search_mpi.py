"""The search for partition specs: its prices are those of the program on MPI ranks."""

import pytest

import spmd
from tests.search_programs import check_prices


@pytest.mark.parallel(4)
def test_prices_are_those_of_the_program():
    check_prices(spmd.make_mesh((-1,), ("feats",)))
