"""`md.pure_callback` on MPI ranks: each calls it with its own block."""

import pytest

import spmd
from tests.minidiff.ops.test_callback import check_calls_of_ranks, check_on_ranks, check_sharded


@pytest.mark.parallel(2)
@pytest.mark.parametrize("check_rep", [True, False], ids=["typed", "untyped"])
def test_as_numpy(check_rep):
    check_on_ranks(spmd.make_mesh((2,), ("i",), backend="mpi"), check_rep)


@pytest.mark.parallel(2)
def test_calls():
    check_calls_of_ranks(spmd.make_mesh((2,), ("i",), backend="mpi"))


@pytest.mark.parallel(2)
def test_sharded():
    check_sharded(spmd.make_mesh((2,), ("i",), backend="mpi"))
