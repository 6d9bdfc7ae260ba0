"""The interpreter and other settings: of each thread and task, restored after exceptions and Ctrl-C at any moment."""

import asyncio
import functools
import sys
import threading
from contextvars import Context, copy_context

import numpy as np
import pytest

import minidiff as md
from minidiff.core.interpreter import EVALUATE, current_interpreter, running
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
    "scan": loop,
    "checkpoint": lambda x: md.checkpoint(loop, policy=md.checkpoint_policies.selective)(x),
    "transpose": lambda x: len(md.transpose(md.make_tape(lambda x: x * 2.0)(x), 0).equations),
}


class Interrupt:
    """A profile function that raises KeyboardInterrupt at one of the moments at which Ctrl-C may, the `at`-th."""

    def __init__(self, at=None):
        self.at, self.moments = at, 0

    def __call__(self, frame, event, value):
        if event in ("call", "return", "c_return"):
            self.moments += 1
            if self.moments == self.at:
                raise KeyboardInterrupt

    def during(self, call):
        sys.setprofile(self)
        try:
            call(X)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        return self.moments


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python ignores it in a destructor
@each("name", CALLS)
def test_an_interrupt_changes_no_setting(name):
    call, before = CALLS[name], copy_context()
    result = call(X)
    moments = Interrupt().during(call)
    for at in range(1, moments, max(1, moments // 100)):
        Interrupt(at).during(call)
        for variable, value in copy_context().items():
            previous = before[variable] if variable in before else Context().run(variable.get)
            is_numpys = variable.name.startswith("numpy.")  # that of `with numpy.errstate()`
            assert value is previous or is_numpys, (variable, at)
    md.tree.map(np.testing.assert_array_equal, call(X), result)


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
