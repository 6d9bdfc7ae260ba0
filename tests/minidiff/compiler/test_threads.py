"""Loops in pieces, on threads: at once, after an error, in a child, with NumPy's warnings. (Bits: test_programs.py.)"""

import os
import threading
import time

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.compiler import native, pieces, threads
from minidiff.values import processes
from tests.checks.samples import each

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite")

LARGE = numpy.linspace(0, 1, 1 << 18)


def test_a_number_of_threads_run_the_pieces(monkeypatch):
    calls = []
    monkeypatch.setattr(pieces, "for_each", lambda call, parts, n: calls.append(n) or threads.for_each(call, parts, n))
    for n in (1, 2, 3, 16):
        md.jit(lambda x: np.tanh(x) * x, threads=n)(LARGE)
    assert [n for n in calls if n > 1] == [2, 3, 16]


def test_a_python_number_goes_to_every_piece():
    f = md.jit(lambda x, c: (np.tanh(x) * c, np.sum(np.tanh(x) * c)), threads=2)
    product, total = f(LARGE, 2.5)
    numpy.testing.assert_allclose(product, numpy.tanh(LARGE) * 2.5, rtol=1e-14)
    numpy.testing.assert_allclose(total, numpy.sum(numpy.tanh(LARGE)) * 2.5, rtol=1e-12)


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
    time.sleep(0.05)
    assert len(started) == count < 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    f = md.jit(lambda x: np.tanh(x) * x, threads=2)
    expected = f(LARGE)
    child = os.fork()
    if not child:
        os._exit(0 if numpy.array_equal(f(LARGE), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_warning_from_any_piece_is_numpys():
    x = numpy.ones(1 << 18)
    x[-1] = -1.0
    with pytest.warns(RuntimeWarning, match="invalid value encountered in log"):
        y = md.jit(lambda x: np.log(x) * x, threads=2)(x)
    assert numpy.isnan(y[-1]) and not y[:-1].any()


def test_programs_in_several_threads_share_those_of_the_process():
    f = md.jit(md.grad(lambda x: np.sum(np.tanh(x) * x)), threads=2)
    expected, results = f(LARGE), []
    users = [threading.Thread(target=lambda: results.extend(f(LARGE) for _ in range(5))) for _ in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert len(results) == 15 and all(numpy.array_equal(y, expected) for y in results)


#: Settings of the environment, and the number of threads; None for that of the processors.
ENVIRONMENTS = [
    ({"MINIDIFF_THREADS": "3", "OMP_NUM_THREADS": "2"}, 3),
    ({"OMP_NUM_THREADS": "2"}, 2),
    ({"OMP_NUM_THREADS": "4,2"}, 4),
    ({"OMP_NUM_THREADS": "0"}, None),
    ({"PMI_SIZE": "4"}, 1),
    ({"PMI_SIZE": "1"}, None),
    ({"PMI_SIZE": "4", "MINIDIFF_THREADS": "2"}, 2),
    ({}, None),
]


@each("environment, expected", ENVIRONMENTS)
def test_the_default_follows_the_environment(monkeypatch, environment, expected):
    for variable in ("MINIDIFF_THREADS", "OMP_NUM_THREADS", *processes.LAUNCHERS):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert threads.default_threads.__wrapped__() == (expected or len(processes.usable_processors()))
