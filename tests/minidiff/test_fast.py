"""What is there for speed alone: it is used, it computes the same, and without it the core's tests pass too."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import minidiff as md
from minidiff.core import reverse
from minidiff.ops.base import match
from tests import PATIENCE
from tests.minidiff.ops.test_shape import broadcasts

arrays = pytest.importorskip("minidiff.fast.arrays")
steps = pytest.importorskip("minidiff.fast.steps")

ROOT = Path(__file__).parents[2]
CORE = ("reverse", "forward", "core", "jacobian", "memory", "aliasing")


def test_the_core_with_the_folder_deleted(tmp_path):
    for name in ("minidiff", "collectives", "spmd", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "fast"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    files = [f"tests/minidiff/test_{name}.py" for name in CORE]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_gradient_takes_the_fast_path(monkeypatch):
    monkeypatch.setattr(reverse, "transpose_equation", None)
    md.grad(lambda x: np.sum(np.sin(x) * x))(np.ones(3))
    with pytest.raises(TypeError, match="not callable"):
        md.vmap(md.grad(lambda x: np.sum(np.sin(x) * x)))(np.ones((2, 3)))


def test_a_sum_is_computed_once(monkeypatch):
    def total(x):
        return np.sum(x + np.ones(3))

    assert md.grad(total)(2.0) == 3.0  # the tables know the operation from here on
    monkeypatch.setattr(steps.Sweep, "record", None)
    assert md.grad(total)(2.0) == 3.0


@settings(deadline=None)
@given(broadcasts())
def test_a_cotangent_is_summed_over_what_was_broadcast(given):
    x, shape = given
    if x.dtype.kind in "fc":
        ct = 1.0 + np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(x.dtype)
        back = arrays.match_arrays(ct, md.typeof(x))
        np.testing.assert_array_equal(back, match(ct, md.typeof(x)))
        assert md.typeof(back) == md.typeof(x)
