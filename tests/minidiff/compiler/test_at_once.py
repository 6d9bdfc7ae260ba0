"""Long operations that do not need each other run at once: which ones do not. (Those that do: test_programs.py.)"""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.compiler import at_once
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.minidiff.compiler.programs import AT_ONCE, SQUARE, branches

X, Y = SQUARE


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Short operations count as long, and BLAS has one thread."""
    monkeypatch.setattr(at_once, "LEAST_WORK", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def count(f, *args, **options):
    return md.jit(f, threads=2, **options).source(*args).count("= at_once")


def prints(x, y):
    md.debug.print("{}", x)
    return x @ x, y @ y


def products(x):
    return x @ x.T, x.T @ x


#: A function, its arguments, options of `jit`, and how often two operations are at once.
COUNTS = [
    (AT_ONCE["branches"], (X, Y), {}, 3),
    (AT_ONCE["products in a loop"], (X, Y), {}, 1),
    (AT_ONCE["shared products"], (X, Y), {}, 2),
    (AT_ONCE["many at once"], (X, Y), {}, 2),
    (md.grad(md.jit(lambda x, y: np.sum(branches(x, y)))), (X, Y), {}, 3),
    (lambda x: ((x @ x) @ x) @ x, (X,), {}, 0),  # they wait for each other
    (prints, (X, Y), {}, 0),
    (mapped(products, mesh(2), P("i"), P("i")), (X,), {}, 0),
    (products, (spmd.distribute(X, mesh(2), P("i")),), {}, 0),
    (branches, (X, Y), {"kernels": False}, 0),
    (branches, (X, Y), {"without": ["compute at once"]}, 0),
]


@each("f, args, options, expected", COUNTS)
def test_which_operations_are_at_once(f, args, options, expected):
    assert count(f, *args, **options) == expected


def test_with_several_threads_of_blas_only_numpys_own_operations_are_at_once(monkeypatch):
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert count(lambda x, y: branches(x, y), X, Y) == 0
    assert count(lambda x, y: (np.sort(x), np.sort(y)), X, Y) == 1


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
