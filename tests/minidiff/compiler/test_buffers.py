"""Donated arguments are written into, and nothing else; loops copy their first carries alone."""

import functools
import tracemalloc

import numpy

import minidiff as md
import minidiff.numpy as np
from tests.checks.samples import each
from tests.minidiff.compiler.programs import LOOPS
from tests.minidiff.compiler.test_programs import frozen

x = numpy.arange(1200.0).reshape(40, 30)


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


def test_operands_write_over_themselves():
    source = md.jit(lambda x: np.tanh(np.sin(x) + 1), kernels=False).source(np.ones(1000))
    assert source.count("out=") == 2


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


# ---------------------------------------------------------------- donated arguments


@each("how", [{"donate_argnums": 0}, {"donate_argnames": "state"}, {"donate_argnums": (-2,)}])
def test_a_donated_argument_is_written_into(how):
    run = md.jit(lambda state, batch: np.at(state["w"])[0].set(batch), **how)
    state, expected = {"w": x.copy()}, np.at(x)[0].set(2.0)
    actual = run(state, 2.0)
    assert numpy.shares_memory(actual, state["w"])
    numpy.testing.assert_array_equal(actual, expected)
    named = {"batch": 2.0} if how != {"donate_argnums": (-2,)} else {}
    numpy.testing.assert_array_equal(run({"w": x.copy()}, *[] if named else [2.0], **named), expected)


#: Arguments, the first of which is donated, and cannot be written into: it is read-only, or shares memory.
KEPT = [lambda: (frozen(x), x), lambda: (x.copy()[:20], x), lambda: [x.copy()] * 2]
KEPT += [lambda: ((y := x.copy()), y[::2])]


@each("arguments", KEPT)
def test_what_is_not_donated_stays(arguments):
    run, (a, b) = md.jit(lambda a, b: (np.at(a)[0].set(b[1]), np.at(b)[0].set(1.0)), donate_argnums=0), arguments()
    saved, expected = b.copy(), a.copy()
    expected[0] = b[1]
    actual = run(a, b)
    numpy.testing.assert_array_equal(actual[0], expected)
    numpy.testing.assert_array_equal(b, saved)


def test_results_are_copied_into_donated_arguments_that_are_there_no_more():
    """One result each; the other one has memory of its own."""

    def f(a, b):
        c = b * np.sum(a)
        return b @ c, b.T @ c

    square, donated = x[:30], x[:30].copy()
    whole, actual = f(square, square), md.jit(f, donate_argnums=0)(donated, square)
    assert [numpy.shares_memory(result, donated) for result in actual] == [True, False]
    for a, b in zip(actual, whole):
        numpy.testing.assert_allclose(a, b)
