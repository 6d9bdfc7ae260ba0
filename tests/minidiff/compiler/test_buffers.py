"""The memory of programs: loops copy their first carries alone. `donated.md` shows what is written into."""

import functools
import tracemalloc

import numpy

import minidiff as md
import minidiff.numpy as np
from tests.minidiff.compiler.programs import LOOPS


def peak(f, *args):
    """The most memory that a call needs, after a first one."""
    f(*args)
    tracemalloc.start()
    f(*args)
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return size


def test_a_loop_copies_its_first_carry_and_no_other():
    large = numpy.ones((500, 400))
    assert peak(md.jit(LOOPS["for"]), large) < 1.5 * large.nbytes


def test_a_checkpointed_function_needs_less():
    def layer(x):
        for _ in range(6):
            x = np.sin(np.exp(-x))
        return x

    def gradient(layer):
        return md.jit(md.grad(lambda x: functools.reduce(lambda x, _: layer(x), range(6), x).sum()), kernels=False)

    assert peak(gradient(md.checkpoint(layer)), np.ones(100_000)) < 0.6 * peak(gradient(layer), np.ones(100_000))


def test_the_parts_of_a_sum_are_not_all_there_at_once():
    ws, x = np.ones((12, 64, 64)) / 64, np.ones((8, 64))
    f = md.jit(md.grad(lambda ws: functools.reduce(lambda x, k: np.tanh(x @ ws[k]), range(12), x).sum()))
    assert peak(f, ws) < 6 * ws.nbytes
