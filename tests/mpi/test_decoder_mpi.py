"""The example that trains a decoder, on MPI ranks."""

import numpy as np
import pytest

from tests.programs import decoder as programs


@pytest.mark.parallel(2)
def test_all_meshes_have_the_same_losses():
    for experts, (sizes, microbatches) in ((0, ({"stages": 2}, 2)), (4, ({"experts": 2}, 1))):
        arguments = "--steps", 20, "--experts", experts
        expected = programs.train({}, 1, "simulated", arguments).losses
        actual = programs.train(sizes, microbatches, None, arguments).losses
        np.testing.assert_allclose(actual, expected, atol=1e-6, rtol=0)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("other", [None, {"feats": 2}], ids=str)
def test_killed_and_resumed(other, path):
    programs.check_resumed({"stages": 2}, other, path)
