"""Whole arrays, whether they are sharded or not; and functions on ranks that agree with functions of whole arrays."""

from collections.abc import Callable
from typing import Any

import numpy

import minidiff as md


def whole(x: Any) -> numpy.ndarray:
    """An array or a sharded one, whole; under MPI every rank must call it."""
    return x.gather() if hasattr(x, "gather") else numpy.asarray(x)


def check_agree(
    f: Callable, of_whole: Callable, args: tuple, split: Any = None, rtol: float = 1e-9, atol: float = 1e-10
):
    """Values and gradients of `f`, eagerly and compiled, are those of a function of whole arrays.

    `f` takes `split`, arguments that are sharded, or those of the other.
    """

    def gradient(g: Callable) -> Callable:
        loss = lambda *xs: sum(md.numpy.sum(md.numpy.sin(x)) for x in md.tree.leaves(g(*xs)))  # noqa: E731
        return md.grad(loss, tuple(range(len(args))))

    for of in (lambda g: g, gradient):
        expected = md.tree.leaves(of(of_whole)(*args))
        for run in (of(f), md.jit(of(f))):
            for x, y in zip(md.tree.leaves(run(*(args if split is None else split))), expected, strict=True):
                numpy.testing.assert_allclose(whole(x), y, rtol=rtol, atol=atol)
