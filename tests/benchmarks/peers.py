"""The libraries that are compared: each turns a problem into a function of no arguments that gives `(loss, grads)`.

A peer that is not installed raises ImportError when it is loaded, and is shown as missing. One that lacks a function
which a problem needs raises `Unsupported` at the first call, and has no time in that problem's row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy

from . import libraries
from .problems import Problem, Unsupported

Run = Callable[[], tuple]


def by_hand(problem: Problem) -> Run:
    return lambda: problem.by_hand(problem.params, problem.data)


def tuned() -> Callable[[Problem], Run]:
    return lambda problem: lambda: (problem.tuned or problem.by_hand)(problem.params, problem.data)


def _numbered(problem: Problem, np) -> tuple[Callable, tuple[int, ...]]:
    """The loss as a function of one argument a parameter, and the numbers of all its arguments."""
    return (lambda *params: problem.loss(np, params, problem.data)), tuple(range(len(problem.params)))


def _by(value_and_grad: Callable, np, compiled: Callable = lambda f: f) -> Callable[[Problem], Run]:
    """The value and the gradients by a library's own transformation."""

    def prepare(problem: Problem) -> Run:
        both = compiled(value_and_grad(*_numbered(problem, np)))
        return lambda: both(*problem.params)

    return prepare


def minidiff(**options) -> Callable[[Problem], Run]:
    import minidiff as md
    import minidiff.numpy as np

    return _by(md.value_and_grad, np, lambda f: md.jit(f, **options) if options else f)


def autograd() -> Callable[[Problem], Run]:
    import autograd.numpy as np
    from autograd import value_and_grad

    return _by(value_and_grad, np)


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
    jax = libraries.jax()
    if jax is None:
        raise ImportError("jax is not installed")
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
    "minidiff jit": lambda: minidiff(kernels=True),
    "without loops": lambda: minidiff(kernels=False),
    "autograd": autograd,
    "PyTorch": torch,
    "numba": numba,
    "JAX": lambda: _jax(jit=False),
    "JAX jit": lambda: _jax(jit=True),
}


def load(names=PEERS) -> tuple[dict[str, Callable], dict[str, str]]:
    """The peers that are installed, by name, and why others are not."""
    actual, missing = {}, {}
    for name, loader in PEERS.items():
        if name in names:
            try:
                actual[name] = loader()
            except ImportError as error:
                missing[name] = str(error)
    return actual, missing
