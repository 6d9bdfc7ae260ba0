"""The interpreter that is current: of each thread and task, restored after exceptions and Ctrl-C at any moment."""

import asyncio
import functools
import signal
import threading
import time

import numpy as np
import pytest

import minidiff as md
from minidiff.core.interpreter import EVALUATE, current_interpreter, running, set_interpreter
from minidiff.core.tape import Recorder
from tests.checks.samples import each
from tests.checks.transformations import NESTED, TRANSFORMATIONS

X = np.linspace(0.1, 1.0, 4)


def loop(x):
    return md.scan(lambda c, k: (c * k, c), x, X, length=4)[0].sum()


CALLS = {
    **{name: functools.partial(run, lambda x: np.sin(x * x)) for name, run in {**TRANSFORMATIONS, **NESTED}.items()},
    "hessian": md.hessian(loop),
    "grad of scan": md.grad(loop),
    "transpose": lambda x: len(md.transpose(md.make_tape(lambda x: x * 2.0)(x), 0).equations),
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
    for k in range(12):
        delay = 2e-5 + 1.5 * duration * (k * 0.6180339887 % 1)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            late = time.perf_counter() + delay + 0.1
            while time.perf_counter() < late:  # Python ignores an interrupt in a destructor
                call(X)
        except KeyboardInterrupt:
            assert current_interpreter() is EVALUATE
    md.tree.map(np.testing.assert_array_equal, call(X), expected)


@each("transform", [md.grad, md.make_tape, lambda f: lambda x: md.vmap(f)(np.ones(2))])
def test_an_exception_restores_the_interpreter(transform):
    with pytest.raises(ZeroDivisionError):
        transform(lambda x: 1 // 0)(1.0)
    assert current_interpreter() is EVALUATE


def test_each_thread_has_its_own_interpreter():
    seen = []

    def f(x):
        thread = threading.Thread(target=lambda: seen.append((current_interpreter() is EVALUATE, md.grad(np.sin)(0.0))))
        thread.start()
        thread.join()
        return x * x

    assert md.grad(f)(3.0) == 6.0
    assert seen == [(True, 1.0)]


def test_each_asynchronous_task_has_its_own_interpreter():
    async def work():
        with running(Recorder(EVALUATE)) as local:
            await asyncio.sleep(0)  # the other one goes on
            return current_interpreter() is local

    async def main():
        return await asyncio.gather(work(), work())

    assert asyncio.run(main()) == [True, True]
