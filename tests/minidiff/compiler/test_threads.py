"""Loops in pieces, on threads: the same bits, the same warnings, and no hang."""

import os
import threading
import time

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import layout, native, pieces, threads
from minidiff.values import processes

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite")

RNG = numpy.random.default_rng(0)
X, B = RNG.normal(size=(500, 256)), RNG.normal(size=256)

PROGRAMS = {
    "adjacent": lambda x, b: np.tanh(x) * x + 1.0,
    "transposed": lambda x, b: np.tanh(x.T) * x.T + 1.0,
    "a row for all": lambda x, b: np.tanh(x + b) * x,
    "a column for all": lambda x, b: np.tanh(x + x[:, :1]) * x,
    "a number": lambda x, b: np.exp(-x * x) * x[0, 0] + x[0, 1],
    "a leading 1": lambda x, b: np.tanh(x[None] + b) * x,
    "several results": lambda x, b: (np.sin(x) * x, np.cos(x) + x),
    "booleans": lambda x, b: (np.tanh(x) > b) & (x < 0.5),
    "a sum": lambda x, b: np.sum(np.sin(x) * x),
    "a sum with a number": lambda x, b: np.sum(np.sin(x) * np.sum(b)),
    "a sum of each row": lambda x, b: np.sum(np.tanh(x) * x, axis=1),
    "a sum of each column": lambda x, b: np.sum(np.tanh(x) * b, axis=0),
    "sums and elements": lambda x, b: (np.sum(np.tanh(x), 1), np.sum(np.tanh(x), 0), np.tanh(x) * 2.0),
    "a gradient": md.grad(lambda x, b: np.sum(np.tanh(x * b) ** 2), (0, 1)),
    "rolled": lambda x, b: np.tanh(np.roll(x, 1, 0)) + np.roll(x, -1, 0) - 2 * x,
    "a slice": lambda x, b: np.tanh(x[1:, 2:]) * x[:-1, :-2],
    "joined": lambda x, b: np.tanh(np.concatenate([x, 2 * x])) + 1.0,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [numpy.float64, numpy.float32])
def test_results_have_the_same_bits_with_any_number_of_threads(name, dtype, monkeypatch):
    monkeypatch.setattr(threads, "PIECE_WORK", 1 << 15)
    calls = []
    monkeypatch.setattr(pieces, "for_each", lambda call, parts, n: calls.append(n) or threads.for_each(call, parts, n))
    f, args = PROGRAMS[name], (X.astype(dtype), B.astype(dtype))
    one, *others = [md.tree.leaves(md.jit(f, threads=n)(*args)) for n in (1, 2, 3, 16)]
    for other in others:
        for x, y in zip(one, other, strict=True):
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes()
    for x, y in zip(one, md.tree.leaves(f(*args)), strict=True):
        numpy.testing.assert_allclose(x, y, rtol=1e-5 if dtype == numpy.float32 else 1e-12, atol=1e-4)
    assert {2, 3, 16} <= {*calls} or name == "transposed"


def test_a_python_number_goes_to_every_piece():
    f = md.jit(lambda x, c: np.tanh(x) * c, threads=2)
    total = md.jit(lambda x, c: np.sum(np.tanh(x) * c), threads=2)
    x = numpy.linspace(0, 1, 1 << 18)
    numpy.testing.assert_allclose(f(x, 2.5), numpy.tanh(x) * 2.5, rtol=1e-14)
    numpy.testing.assert_allclose(total(x, 2.5), numpy.sum(numpy.tanh(x)) * 2.5, rtol=1e-12)


def test_small_arrays_are_one_piece():
    assert [*layout.cut(((0, 300), (0, 100)), threads.piece_size(30_000, 10))] == [((0, 300), (0, 100))]
    assert len([*layout.cut(((0, 10**9),), threads.piece_size(10**9, 1))]) == threads.MAX_PIECES


@pytest.mark.skipif(len(processes.usable_processors()) < 2, reason="needs two processors")
def test_pieces_run_at_once():
    """Two pieces wait for each other."""
    both = threading.Barrier(2, timeout=60)
    threads.for_each(lambda piece: both.wait(), [0, 1], 2)


def test_after_an_error_no_piece_begins():
    started = []

    def call(piece):
        started.append(piece)
        if piece == 3:
            raise KeyboardInterrupt
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        threads.for_each(call, range(1000), 2)
    count = len(started)
    assert count < 1000
    time.sleep(0.05)
    assert len(started) == count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    f = md.jit(lambda x: np.tanh(x) * x, threads=2)
    x = numpy.linspace(0, 1, 1 << 18)
    expected = f(x)
    child = os.fork()
    if not child:
        os._exit(0 if numpy.array_equal(f(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_warning_from_any_piece_is_numpys():
    x = numpy.ones(1 << 18)
    x[-1] = -1.0
    with pytest.warns(RuntimeWarning, match="invalid value encountered in log"):
        y = md.jit(lambda x: np.log(x) * x, threads=2)(x)
    assert numpy.isnan(y[-1]) and not y[:-1].any()


def test_programs_in_several_threads_share_those_of_the_process():
    f = md.jit(md.grad(lambda x: np.sum(np.tanh(x) * x)), threads=2)
    x = numpy.linspace(-1, 1, 1 << 18)
    expected, results = f(x), []
    users = [threading.Thread(target=lambda: results.extend(f(x) for _ in range(5))) for _ in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert len(results) == 15 and all(numpy.array_equal(y, expected) for y in results)


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"MINIDIFF_THREADS": "3", "OMP_NUM_THREADS": "2"}, 3),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "0"}, None),
        ({"PMI_SIZE": "4"}, 1),
        ({"PMI_SIZE": "1"}, None),
        ({"PMI_SIZE": "4", "MINIDIFF_THREADS": "2"}, 2),
        ({}, None),
    ],
)
def test_the_default_follows_the_environment(monkeypatch, environment, expected):
    for variable in ("MINIDIFF_THREADS", "OMP_NUM_THREADS", *processes.LAUNCHERS):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert threads.default_threads.__wrapped__() == (expected or len(processes.usable_processors()))


def test_the_number_must_be_positive():
    with pytest.raises(ValueError, match="threads must be a number above 0"):
        md.jit(lambda x: x, threads=0)
