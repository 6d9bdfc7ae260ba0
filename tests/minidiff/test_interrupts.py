"""Ctrl-C at any moment: the interpreter stack is empty afterwards, and the next results are right."""

import itertools
import signal
import threading
import time

import numpy as np
import pytest

import minidiff as md
from minidiff.core.interpreter import EVALUATE, current_interpreter, set_interpreter
from spmd import P, make_mesh, shard_map
from tests.checks.samples import each

X = np.linspace(0.1, 1.0, 4)


def f(x):
    return np.sin(x * x).sum()


def loop(x):
    return md.scan(lambda c, k: (c * k, c), x, X, length=4)[0].sum()


def newly_compiled(x):
    return md.jit(md.grad(f))(x)


CALLS = {
    "grad": md.grad(f),
    "jvp": lambda x: md.jvp(f, (x,), (x,)),
    "vjp": lambda x: md.vjp(f, x)[1](1.0),
    "vmap": md.vmap(lambda x: np.sin(x) * x),
    "jit": newly_compiled,
    "make_tape": lambda x: len(md.make_tape(md.grad(f))(x).equations),
    "hessian": md.hessian(f),
    "scan": loop,
    "grad of scan": md.grad(loop),
    "checkpoint": md.grad(md.checkpoint(f)),
    "transpose": lambda x: len(md.transpose(md.make_tape(lambda x: x * 2.0)(x), 0).equations),
    "shard_map": lambda x: np.asarray(shard_map(np.sin, make_mesh((2,), ("i",)), in_specs=P("i"), out_specs=P("i"))(x)),
    "nested": lambda x: md.vmap(md.grad(lambda a: md.jvp(np.sin, (a,), (a,))[1]))(x),
}


@pytest.fixture
def interrupts():
    """A timer's signal raises KeyboardInterrupt, as Ctrl-C's does."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are for the main thread")
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    set_interpreter(EVALUATE)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there is no such timer")
@each("name", CALLS)
def test_an_interrupt_leaves_no_interpreter_current(interrupts, name):
    call = CALLS[name]
    expected = call(X)
    start = time.perf_counter()
    call(X)
    duration = time.perf_counter() - start
    for k in itertools.count():
        delay = 2e-5 + 1.5 * duration * (k * 0.6180339887 % 1)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            late = time.perf_counter() + delay + 0.1
            while time.perf_counter() < late:  # Python ignores an interrupt in a destructor
                call(X)
        except KeyboardInterrupt:
            assert current_interpreter() is EVALUATE
        if k >= 10 and time.perf_counter() > start + 0.2:
            break
    for a, b in zip(md.tree.leaves(call(X)), md.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
