"""Checks of derivatives against numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.core import typeof
from minidiff.forward import jvp
from minidiff.reverse import vjp


def check_grads(
    f: Callable,
    args: Sequence[Any],
    order: int = 2,
    modes: Sequence[str] = ("fwd", "rev"),
    eps: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compare derivatives of `f` at `args` with central differences, to `order`, in forward and reverse mode.

    `args` is a sequence of trees of floating-point arrays. Each order checks the derivative functions of the
    order before. Directions are random but the same in each run. Raises AssertionError, naming the mode, the
    order and both numbers.

    >>> import numpy as np
    >>> check_grads(lambda x: np.sin(x).sum(), (np.ones(3),))
    """
    single = any(typeof(x).dtype.itemsize < 8 for x in tree.leaves(tuple(args)))
    eps = (1e-2 if single else 1e-5) if eps is None else eps
    rtol = (2e-2 if single else 1e-5) if rtol is None else rtol
    atol = (2e-2 if single else 1e-6) if atol is None else atol
    _check(f, tuple(args), order, tuple(modes), numpy.random.default_rng(0), eps, rtol, atol, ())


def _check(f, args, order, modes, rng, eps, rtol, atol, history):
    tangents = tree.map(lambda x: _random_like(x, rng), args)
    expected = _central_difference(f, args, tangents, eps)
    for mode in modes:
        name = " of ".join([*reversed((*history, mode))])
        if mode == "fwd":
            _compare(jvp(f, args, tangents)[1], expected, rtol, atol, f"{name}: the tangent")
        elif mode == "rev":
            out, pullback = vjp(f, *args)
            ct = tree.map(lambda x: _random_like(x, rng), out)
            _compare(_inner(pullback(ct), tangents), _inner(ct, expected), rtol, atol, f"{name}: <cotangent, tangent>")
        else:
            raise ValueError(f"check_grads: a mode is 'fwd' or 'rev', got {mode!r}")
    if order > 1:
        for mode in modes:
            derivative = _derivative(f, args, tangents, mode, rng)
            _check(derivative, args, order - 1, modes, rng, eps, rtol, atol, (*history, mode))


def _derivative(f, args, tangents, mode, rng):
    """The derivative of `f` in a fixed direction, as a function of its arguments."""
    if mode == "fwd":
        return lambda *xs: jvp(f, xs, tangents)[1]
    ct = tree.map(lambda x: _random_like(x, rng), f(*args))
    return lambda *xs: vjp(f, *xs)[1](ct)


def _random_like(x, rng):
    t = typeof(x)
    if t.dtype.kind == "c":
        return (rng.standard_normal(t.shape) + 1j * rng.standard_normal(t.shape)).astype(t.dtype)[()]
    if t.dtype.kind != "f":
        raise TypeError(f"check_grads: arguments and results must be floating-point, got {t}")
    return numpy.asarray(rng.standard_normal(t.shape), t.dtype)[()]


def _central_difference(f, args, tangents, eps):
    ahead = f(*tree.map(lambda x, t: _moved(x, eps, t), args, tangents))
    behind = f(*tree.map(lambda x, t: _moved(x, -eps, t), args, tangents))
    return tree.map(lambda a, b: (numpy.asarray(a) - numpy.asarray(b)) / (2 * eps), ahead, behind)


def _moved(x, step, t):
    return numpy.asarray(x + step * t, typeof(x).dtype)[()]


def _inner(xs, ys):
    return sum(numpy.sum(numpy.asarray(x) * numpy.asarray(y)).real for x, y in zip(tree.leaves(xs), tree.leaves(ys)))


def _compare(actual, expected, rtol, atol, what):
    pairs = zip(tree.flatten_with_paths(actual)[0], tree.leaves(expected), strict=True)
    for (path, a), e in pairs:
        numpy.testing.assert_allclose(
            numpy.asarray(a), e, rtol=rtol, atol=atol, err_msg=f"{what}{path} by the rules (actual), by differences"
        )
