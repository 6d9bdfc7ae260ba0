"""The libraries that are compared: each turns a problem into a function of no arguments that gives `(loss, grads)`.

A peer that is not installed raises ImportError when it is loaded, and is shown as missing. One that lacks a function
which a problem needs raises `Unsupported` at the first call, and has no time in that problem's row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy

from .problems import Problem, Unsupported

Run = Callable[[], tuple]


def by_hand(problem: Problem) -> Run:
    return lambda: problem.by_hand(problem.params, problem.data)


def tuned() -> Callable[[Problem], Run]:
    return lambda problem: lambda: problem.tuned(problem.params, problem.data)


def _numbered(problem: Problem, np) -> tuple[Callable, tuple[int, ...]]:
    """The loss as a function of one argument a parameter, and the numbers of all its arguments."""
    return (lambda *params: problem.loss(np, params, problem.data)), tuple(range(len(problem.params)))


def minidiff() -> Callable[[Problem], Run]:
    import minidiff as md
    import minidiff.numpy as np

    def prepare(problem: Problem) -> Run:
        both = md.value_and_grad(*_numbered(problem, np))
        return lambda: both(*problem.params)

    return prepare


def minidiff_jit(kernels: bool) -> Callable[[Problem], Run]:
    import minidiff as md
    import minidiff.numpy as np

    def prepare(problem: Problem) -> Run:
        both = md.jit(md.value_and_grad(*_numbered(problem, np)), kernels=kernels)
        return lambda: both(*problem.params)

    return prepare


def autograd() -> Callable[[Problem], Run]:
    import autograd.numpy as np
    from autograd import value_and_grad

    def prepare(problem: Problem) -> Run:
        both = value_and_grad(*_numbered(problem, np))
        return lambda: both(*problem.params)

    return prepare


def mygrad() -> Callable[[Problem], Run]:
    mg = importlib.import_module("mygrad")

    def prepare(problem: Problem) -> Run:
        def run():
            params = [mg.tensor(p, copy=False) for p in problem.params]
            try:
                loss = problem.loss(mg, params, problem.data)
            except AttributeError as error:
                raise Unsupported(error) from None
            loss.backward()
            return loss.item(), [p.grad for p in params]

        return run

    return prepare


def torch() -> Callable[[Problem], Run]:
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)

    def prepare(problem: Problem) -> Run:
        # Of Python's floats, PyTorch would make float32.
        params = [torch.tensor(numpy.asarray(p), requires_grad=True) for p in problem.params]
        data = [torch.tensor(x) for x in problem.data]

        def run():
            loss = problem.loss(torch, params, data)
            return loss.detach(), torch.autograd.grad(loss, params)

        return run

    return prepare


def numba() -> Callable[[Problem], Run]:
    """The gradient by hand, compiled."""
    numba = importlib.import_module("numba")
    errors = numba.core.errors

    def prepare(problem: Problem) -> Run:
        compiled, params, data = numba.njit(problem.by_hand), tuple(problem.params), tuple(problem.data)

        def run():
            try:
                return compiled(params, data)
            except (errors.NumbaError, errors.UnsupportedBytecodeError) as error:
                raise Unsupported(error) from None

        return run

    return prepare


def _jax(jit: bool) -> Callable[[Problem], Run]:
    jax = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)
    np = jax.numpy

    def prepare(problem: Problem) -> Run:
        params, data = [np.asarray(p) for p in problem.params], [np.asarray(x) for x in problem.data]
        numbers = tuple(range(len(params)))
        both = jax.value_and_grad(lambda *params: problem.loss(np, params, data), numbers)
        both = jax.jit(both) if jit else both
        return lambda: jax.block_until_ready(both(*params))

    return prepare


PEERS: dict[str, Callable[[], Callable[[Problem], Run]]] = {
    "tuned": tuned,
    "minidiff": minidiff,
    "minidiff jit": lambda: minidiff_jit(kernels=True),
    "without loops": lambda: minidiff_jit(kernels=False),
    "autograd": autograd,
    "MyGrad": mygrad,
    "PyTorch": torch,
    "numba": numba,
    "JAX": lambda: _jax(jit=False),
    "JAX jit": lambda: _jax(jit=True),
}


def load(names=None) -> tuple[dict[str, Callable], dict[str, str]]:
    """The peers that are installed, by name, and why others are not."""
    actual, missing = {}, {}
    for name, loader in PEERS.items():
        if names is None or name in names:
            try:
                actual[name] = loader()
            except ImportError as error:
                missing[name] = str(error)
    return actual, missing
