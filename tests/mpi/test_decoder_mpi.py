"""A decoder on all axes of a mesh of MPI ranks, and the example that trains it."""

import numpy as np
import pytest
from mpi4py import MPI

from tests import decoder_programs as programs

RANKS = MPI.COMM_WORLD.size


@pytest.mark.parallel([2, 4, 8])
def test_losses_and_gradients_are_those_of_one_device():
    for sizes, microbatches in programs.MESHES[RANKS][:1]:
        programs.check_numbers(sizes, microbatches)


@pytest.mark.parallel([2, 4, 8])
def test_experts_are_those_computed_token_by_token():
    expected = programs.mixture_of_one_device()
    for sizes, microbatches in programs.WITH_EXPERTS[RANKS][:1]:
        programs.check_numbers(sizes, microbatches, None, programs.MIXTURE, expected)


@pytest.mark.parallel(2)
def test_all_meshes_have_the_same_losses():
    for experts, (sizes, microbatches) in ((0, ({"stages": 2}, 2)), (4, ({"experts": 2}, 1))):
        arguments = "--steps", 20, "--experts", experts
        expected = programs.train({}, 1, "simulated", arguments).losses
        found = programs.train(sizes, microbatches, None, arguments).losses
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("other", [None, {"feats": 2}], ids=str)
def test_killed_and_resumed(other, path):
    programs.check_resumed({"stages": 2}, other, path)
