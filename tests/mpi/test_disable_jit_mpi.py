"""`md.disable_jit` on MPI ranks."""

import pytest

import spmd
from tests.minidiff.test_disable_jit import check_on_ranks


@pytest.mark.parallel(2)
def test_on_ranks():
    check_on_ranks(spmd.make_mesh((2,), ("i",), backend="mpi"))
