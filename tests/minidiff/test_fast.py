"""The fast paths are for speed alone: without them the core's tests pass too."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minidiff as md
from minidiff.core import reverse
from tests import PATIENCE

ROOT = Path(__file__).parents[2]
CORE = ("reverse", "forward", "core", "jacobian", "memory", "aliasing")


def test_the_core_without_fast_paths():
    files = [f"tests/minidiff/test_{name}.py" for name in CORE]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.without_fast", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_gradient_takes_the_fast_path(monkeypatch):
    monkeypatch.setattr(reverse, "transpose_equation", None)
    md.grad(lambda x: np.sum(np.sin(x) * x))(np.ones(3))
    with pytest.raises(TypeError, match="not callable"):
        md.vmap(md.grad(lambda x: np.sum(np.sin(x) * x)))(np.ones((2, 3)))
