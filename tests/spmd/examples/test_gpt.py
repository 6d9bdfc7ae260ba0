"""`gpt` and its `text`: losses on all meshes, and runs that are killed and go on; `training_gpt.md` has the script."""

import dataclasses

import numpy as np
import pytest

from spmd.examples import gpt
from spmd.examples.text import Text, load_text
from spmd.parallel.decoder import decoder_mesh
from tests.programs.decoder import MESHES, SMALL, WITH_EXPERTS


class Killed(BaseException):
    """End the process as SIGKILL does: nothing catches it."""


@dataclasses.dataclass(frozen=True)
class UntilKilled(Text):
    """A text whose reader is killed when it asks for the batch of step `last`."""

    last: int

    def batch(self, seed, step, examples, length):
        if step == self.last:
            raise Killed
        return super().batch(seed, step, examples, length)


def losses_of(sizes, microbatches, *arguments, text=None):
    """The losses of a small network's run."""
    options = gpt.parse([*SMALL, "--microbatches", str(microbatches), *map(str, arguments)])
    mesh = decoder_mesh("simulated", **sizes)
    return gpt.train(mesh, gpt.config_of(options), text or load_text(), options, progress=False).losses


def test_all_meshes_have_the_same_losses():
    """And fall; `check_numbers` of other meshes is in `tests/checks/ranks.py`."""
    for experts, meshes in ((0, MESHES), (4, WITH_EXPERTS)):
        first, other = [losses_of(*meshes[n][k], "--steps", 12, "--experts", experts) for n, k in ((1, 0), (8, 1))]
        np.testing.assert_allclose(other, first, atol=1e-6, rtol=0)
        assert len(first) == 12 and first[-1] < first[0] - 0.1


def test_killed_and_resumed(tmp_path):
    """Killed twice, a run goes on with the same losses, also on another mesh."""
    sizes, steps, saved = {"data": 2, "stages": 2}, ("--steps", 9), ("--checkpoint", tmp_path)
    for last in (6, 8):
        with pytest.raises(Killed):
            losses_of(sizes, 1, *steps, *saved, text=UntilKilled(**vars(load_text()), last=last))
    resumed, expected = losses_of({"data": 4}, 1, *steps, *saved), losses_of(sizes, 1, *steps)
    np.testing.assert_allclose(resumed, expected, atol=1e-6, rtol=0)
