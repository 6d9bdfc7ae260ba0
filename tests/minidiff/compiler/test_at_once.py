"""Long operations that do not need each other run at once: which ones, in which order, and with the same results."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.compiler import at_once
from spmd import P

X, Y = numpy.random.default_rng(0).normal(size=(2, 4, 4))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Short operations count as long, and BLAS has one thread."""
    monkeypatch.setattr(at_once, "LEAST_WORK", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def branches(x, y):
    for _ in range(3):
        x, y = np.tanh(x @ x), np.tanh(y @ y)
    return x + y


def loop(x, y):
    return md.scan(lambda c, _: ((c[0] @ c[0] / 4, np.sin(c[1] @ c[1])), None), (x, y), length=3)[0]


def transforms(x, y):
    return np.fft.ifft(np.fft.fft(x)).real * np.sort(y), np.linalg.eigh(x + x.T)[0], np.linalg.svd(y)[1]


def shared(x, y):
    """One product needs both of the others."""
    return (x @ y) @ (y @ x), x @ x


PROGRAMS = {
    "branches": (branches, 3),
    "branches of a backward pass": (md.grad(lambda x, y: np.sum(branches(x, y)), argnums=(0, 1)), None),
    "a layer's two cotangents": (md.grad(lambda x, y: np.sum(np.sin(np.tanh(x @ y) @ y)), argnums=(0, 1)), None),
    "a loop": (loop, 1),
    "transforms": (transforms, None),
    "shared": (shared, 2),
    "a gradient of a compiled program": (md.grad(md.jit(lambda x, y: np.sum(branches(x, y)), threads=2)), None),
    "many at once": (lambda x, y: sum(np.sum(x @ (y + k)) for k in range(5)), 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_the_same_bits(name):
    f, pairs = PROGRAMS[name]
    one, two, four = (md.jit(f, threads=n) for n in (1, 2, 4))
    expected = md.tree.leaves(one(X, Y))
    for g in (two, four):
        for x, y in zip(md.tree.leaves(g(X, Y)), expected, strict=True):
            numpy.testing.assert_array_equal(x, y)
    assert "at_once" not in one.source(X, Y)
    calls = two.source(X, Y).count("= at_once")
    assert calls == pairs if pairs else calls > 0


def test_operations_that_wait_for_each_other_stay_in_order():
    chain = md.jit(lambda x: ((x @ x) @ x) @ x, threads=2)
    assert "at_once" not in chain.source(X)
    effects = md.jit(lambda x, y: (md.debug.print("{}", x), x @ x, y @ y)[1:], threads=2)
    assert "at_once" not in effects.source(X, Y)


def test_with_several_threads_of_blas_only_numpys_own_operations_are_at_once(monkeypatch):
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # programs for two threads may be in the cache
    assert "at_once" not in md.jit(branches, threads=3).source(X, Y)
    sorts = md.jit(lambda x, y: (np.sort(x), np.sort(y)), threads=3)
    assert sorts.source(X, Y).count("= at_once") == 1
    without = md.jit(branches, threads=3, without=["compute at once"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "at_once" not in without.source(X, Y)


def test_errors_and_settings_of_numpy_are_those_of_the_caller():
    f = md.jit(lambda x, y: (np.linalg.cholesky(x), np.linalg.cholesky(y)), threads=2)
    good = numpy.eye(3)
    with pytest.raises(numpy.linalg.LinAlgError):
        f(good, -good)
    with pytest.raises(numpy.linalg.LinAlgError):
        f(-good, good)
    g = md.jit(lambda x, y: (x @ x, y @ y), threads=2)
    big = numpy.full((2, 2), 1e200)
    for args in ((good[:2, :2], big), (big, good[:2, :2])):
        with numpy.errstate(all="raise"), pytest.raises(FloatingPointError):
            g(*args)
        with numpy.errstate(all="ignore"):
            assert max(map(numpy.max, g(*args))) == numpy.inf


def test_ranks_and_exported_programs_are_unchanged():
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    f = md.jit(spmd.shard_map(lambda x: (x @ x.T, x.T @ x), mesh=mesh, in_specs=P("i"), out_specs=P("i")), threads=2)
    sharded = md.jit(lambda x: (x @ x.T, x.T @ x), threads=2)
    x = spmd.distribute(X, mesh, P("i"))
    assert "at_once" not in f.source(X) and "at_once" not in sharded.source(x)
    assert "at_once" not in md.jit(branches, threads=2, kernels=False).source(X, Y)
    for a, b in zip(sharded(x), (X @ X.T, X.T @ X)):
        numpy.testing.assert_allclose(a, b, rtol=1e-12)
