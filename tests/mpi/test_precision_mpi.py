"""16 bits on MPI ranks."""

import pytest
from mpi4py import MPI

import spmd
from tests import precision_programs as programs

MESH = (MPI.COMM_WORLD.size,), ("i",)


@pytest.mark.parallel([2, 4])
def test_gradients_are_added_in_the_dtype_of_the_policy():
    programs.check_reductions(spmd.make_mesh(*MESH))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow is expected
@pytest.mark.parallel([2, 4])
def test_all_ranks_skip_a_step_together():
    programs.check_skipped_together(spmd.make_mesh(*MESH))


@pytest.mark.parallel([2, 4])
def test_sums_over_ranks_round_once():
    programs.check_sums_round_once(spmd.make_mesh(*MESH))


@pytest.mark.parallel([2, 3])
def test_zeros_keep_their_sign():
    programs.check_signs_of_zero(spmd.make_mesh(*MESH))
