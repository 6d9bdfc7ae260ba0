"""Tapes as graphs of Switch and Merge nodes: their results are those of the tapes, in one thread and in several."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

import minidiff as md
from notebooks.dataflow import Dataflow
from tests.checks.samples import each


def branches(x, y):
    return md.cond(x > y, lambda x, y: (np.sin(x) * y, x), lambda x, y: (x - y, 1.0), x, y)


def power(x, n):
    return md.while_loop(lambda c: c[1] < n, lambda c: (c[0] * x, c[1] + 1), (1.0, 0))


def nested(x, n):
    """A loop in a loop, and a branch in both, whose two sides take different times."""

    def inner(c):
        k, y = c
        return k + 1, md.cond(k % 2 == 0, lambda y: np.sum(np.ones(1000) * y) / 1000 + x, lambda y: y * 0.5, y)

    def outer(c):
        k, y = c
        return k + 1, md.while_loop(lambda c: c[0] < k, inner, (0, y))[1]

    return md.while_loop(lambda c: c[0] < n, outer, (0, x))[1]


def derivative(x, n):
    return md.grad(lambda x: md.cond(x > n, lambda x: x**3, np.sin, x))(x)


def rows(x, n, reverse=False):
    """A scan with a closed-over value, integers, a branch in its step, and no stacked or no carried values."""

    def step(c, row):
        y, k = row
        c = md.cond(k % 2 == 0, lambda c: np.sin(c) * y, lambda c: c + y / x, c)
        return c, (c * y, k)

    c, (ys, ks) = md.scan(step, x, (np.arange(n) * x, np.arange(n)), reverse=reverse)
    return c, ys, ks, md.scan(lambda c, _: (c * x, None), 1.0, length=n)[0], md.map(np.sin, ys)


def backward(x, n):
    def total(x):
        (c, ys, _, power, sines), (_, reversed_ys, *_) = rows(x, n), rows(x, n, reverse=True)
        return c + power + np.sum(ys) + np.sum(sines) + np.sum(reversed_ys)

    return md.grad(total)(x)


def second_derivative(x, n):
    return md.grad(lambda x: backward(x, n))(x)


CASES = [(f, args) for f in (branches, derivative) for args in ((1.0, 2.0), (3.0, 2.0))]
CASES += [(f, (1.5, n)) for f in (power, nested) for n in (0, 1, 6)]
SCANS = [(f, (1.5, n)) for f in (rows, backward, second_derivative) for n in (0, 3)]


@each("workers", [0, 3])
@each("f, args", CASES)
def test_results_are_those_of_the_tape(workers, f, args):
    tape = md.make_tape(f)(*args)
    np.testing.assert_allclose(Dataflow(tape).run(*args, workers=workers), tape(*args), rtol=1e-14)


@each("f, args", SCANS)
def test_scans_and_their_derivatives(f, args):
    """The number of steps is a constant: the array has a row for each."""
    x, n = args
    tape = md.make_tape(lambda x: f(x, n))(x)
    graph = Dataflow(tape)
    expected = tape(x)
    for workers in (0, 2) if f is rows else (0,):
        for actual, wanted in zip(graph.run(x, workers=workers), expected):
            np.testing.assert_allclose(actual, wanted, rtol=1e-12, strict=True)
    assert not any(node.label in ("scan", "cond") for node in graph.nodes)


def test_only_the_branch_that_is_taken_computes():
    with pytest.raises(ZeroDivisionError):
        Dataflow(md.make_tape(divided)(0.0)).run(0.0)
    assert Dataflow(md.make_tape(divided)(0.0)).run(1.0) == [1.0]


def divided(x):
    def fails(x):
        return md.pure_callback(lambda x: np.asarray(1 // int(x * 0), float), x, x)

    return md.cond(x > 0.5, lambda x: x, fails, x)


def test_two_branches_are_in_threads_at_once():
    """Each waits for the other: one after the other, neither could end."""
    meet = threading.Barrier(2, timeout=60)

    def wait(x):
        meet.wait()
        return x

    tape = md.make_tape(lambda x, y: md.pure_callback(wait, x, x) + md.pure_callback(wait, y, y))(1.0, 2.0)
    assert Dataflow(tape).run(1.0, 2.0, workers=2) == [3.0]


def test_the_picture_in_the_docs_is_the_graph():
    source = (Path(__file__).parents[2] / "docs/control_flow.dot").read_text()
    assert source.endswith(Dataflow(md.make_tape(power)(2.0, 3)).dot())
    assert len(re.findall('label="Switch"', source)) == len(re.findall('label="Merge"', source)) == 4
