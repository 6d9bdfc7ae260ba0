"""Operations that run at once: their errors, and NumPy's settings. (Values: test_programs.py; which: together.md.)"""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import at_once
from tests.checks.samples import each


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Short operations count as long, and BLAS has one thread."""
    monkeypatch.setattr(at_once, "LEAST_WORK", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@each("first", [True, False])
def test_errors_and_settings_of_numpy_are_those_of_the_caller(first):
    f = md.jit(lambda x, y: (np.linalg.cholesky(x), np.linalg.cholesky(y)), threads=2)
    g = md.jit(lambda x, y: (x @ x, y @ y), threads=2)
    good, big = numpy.eye(3), numpy.full((3, 3), 1e200)
    with pytest.raises(numpy.linalg.LinAlgError):
        f(*(good, -good)[:: 1 if first else -1])
    args = (good, big)[:: 1 if first else -1]
    with numpy.errstate(all="raise"), pytest.raises(FloatingPointError):
        g(*args)
    with numpy.errstate(all="ignore"):
        assert max(map(numpy.max, g(*args))) == numpy.inf
