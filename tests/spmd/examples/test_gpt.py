"""`gpt` and its `text`: the script, losses on all meshes, and runs that are killed and go on."""

import re

import numpy as np
import pytest

from spmd.examples import gpt
from spmd.examples.text import load_text, ngram_loss
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


def test_the_script(capsys):
    options = ["--mesh", "shards=2,feats=2", "--steps", "2", "--report", "--sample", "5", "--prompt", "Thus"]
    gpt.main([*programs.SMALL, *options])
    shown = capsys.readouterr().out
    assert re.search(r"\['params'\]\['embedding'\] +\[72, 8\] +P\('feats', 'shards'\) +4,608 +1,152\n", shown)
    assert re.search(r"shards +backward +psum_scatter +21 ", shown)
    losses = r"held-out loss \d\.\d{4}, a trigram model's 1\.98\d\d nats per character\n"
    assert re.search(losses + r"\nThus.{5}\n\n\d+ characters a second", shown, re.S)


def test_options_that_do_not_fit_end_the_script(capsys):
    for argument, error in (
        ("--mesh=data=2,rows=2", "'rows=2' in 'data=2,rows=2': write axis=size"),
        ("--mesh=data", "'data' in"),
        ("--mesh=feats=8", "heads=4 is not a multiple of the 8 ranks along 'feats'"),
        ("--mesh=tokens=8", "8 tokens are not a multiple of 16, two blocks for each rank along 'tokens'"),
        ("--heads=3", "features must be a multiple of 2 * heads"),
    ):
        with pytest.raises(SystemExit):
            gpt.main([*programs.SMALL, argument])
        assert error in capsys.readouterr().err


def test_text():
    text = load_text()
    assert text.decode(text.encode("Satan")) == "Satan"
    with pytest.raises(ValueError, match=r"\['~'\] do not occur in the text"):
        text.encode("~")
    inputs, labels = text.batch(0, 1, 3, 8)
    assert np.array_equal(inputs[:, 1:], labels[:, :-1]) and not np.array_equal(inputs, text.batch(0, 2, 3, 8)[0])
    held = np.concatenate([inputs.ravel() for inputs, _ in text.held_out_batches(4, 16)])
    assert np.array_equal(held, text.held_out[: len(held)]) and len(text.held_out) - len(held) <= 65
    assert ngram_loss(text, 2) < ngram_loss(text, 1)
