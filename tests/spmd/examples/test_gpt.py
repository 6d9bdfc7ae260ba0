"""`gpt` and its `text`: losses on all meshes, and runs that are killed and go on; `training_gpt.md` has the script."""

import numpy as np

from tests.programs import decoder as programs


def test_all_meshes_have_the_same_losses():
    """And fall; `check_numbers` of other meshes is in `tests/checks/ranks.py`."""
    for experts, meshes in ((0, programs.MESHES), (4, programs.WITH_EXPERTS)):
        arguments = "--steps", 12, "--experts", experts
        first, other = [programs.train(*pair, "simulated", arguments).losses for pair in (meshes[1][0], meshes[8][1])]
        np.testing.assert_allclose(other, first, atol=1e-6, rtol=0)
        assert len(first) == 12 and first[-1] < first[0] - 0.1


def test_killed_and_resumed(tmp_path):
    programs.check_resumed({"data": 2, "stages": 2}, {"data": 4}, tmp_path, "simulated")
