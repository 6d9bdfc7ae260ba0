"""`check_grads` on MPI ranks: each rank compares the same numbers, of whole arrays."""

import pytest

import spmd
from tests.grads_on_ranks import check_body, check_differences, check_failures, check_programs


@pytest.mark.parallel(2)
@pytest.mark.parametrize("check", [check_programs, check_failures, check_differences, check_body])
def test_sharded_arrays(check):
    check(spmd.make_mesh((2,), ("i",), backend="mpi"))
