"""16 bits on simulated ranks."""

import pytest

import spmd
from tests import precision_programs as programs


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_added_in_the_dtype_of_the_policy(ranks):
    programs.check_reductions(spmd.make_mesh((ranks,), ("i",), backend="simulated"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflow is expected
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_skip_a_step_together(ranks):
    programs.check_skipped_together(spmd.make_mesh((ranks,), ("i",), backend="simulated"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_ranks_round_once(ranks):
    programs.check_sums_round_once(spmd.make_mesh((ranks,), ("i",), backend="simulated"))


@pytest.mark.parametrize("ranks", [2, 3])
def test_zeros_keep_their_sign(ranks):
    programs.check_signs_of_zero(spmd.make_mesh((ranks,), ("i",), backend="simulated"))
