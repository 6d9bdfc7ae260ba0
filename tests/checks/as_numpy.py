"""Checks that a function of NumPy means the same under all transformations, and that its derivatives are right."""

from collections.abc import Callable
from typing import Any

import numpy as np

import minidiff as md
from tests.table.rows import random


def agree(actual: Any, expected: Any, rtol: float = 1e-10) -> None:
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=rtol, atol=1e-10)


def random_like(x: Any) -> np.ndarray:
    x, numbers = np.asarray(x), random.standard_normal((2, *np.shape(x)))
    return np.asarray(numbers[0] + 1j * numbers[1] if x.dtype.kind == "c" else numbers[0], x.dtype)[()]


def inner(xs: Any, ys: Any) -> float:
    """The pairing of cotangents and tangents: real, also of complex numbers."""
    return sum(float(np.real(np.sum(x * y))) for x, y in zip(xs, ys, strict=True))


def check_as_numpy(f: Callable, *xs: Any) -> None:
    """Check values by every route, tangents by differences, and that the pullback is the adjoint of the tangents."""
    expected = f(*xs)
    tape = md.make_tape(f)(*xs)
    tape.check()
    assert tape.out_types == [md.typeof(expected)]
    active = [i for i, x in enumerate(xs) if np.asarray(x).dtype.kind in "fc"]
    of_active = lambda *ys: f(*[dict(zip(active, ys)).get(i, x) for i, x in enumerate(xs)])  # noqa: E731
    ys = [xs[i] for i in active]
    value, pullback = md.vjp(of_active, *ys)
    for actual in (value, tape(*xs)[0], md.vmap(f)(*[np.stack([x, x]) for x in xs])[1]):
        agree(actual, expected)
    ts, ct = [random_like(y) for y in ys], random_like(expected)
    tangent = md.jvp(of_active, ys, ts)[1]
    np.testing.assert_allclose(inner(pullback(ct), ts), inner([ct], [tangent]), rtol=1e-9, atol=1e-9)
    above, below = (of_active(*[y + s * t for y, t in zip(ys, ts)]) for s in (1e-6, -1e-6))
    scale = np.max(np.abs(tangent), initial=1.0)
    np.testing.assert_allclose(tangent, (above - below) / 2e-6, rtol=1e-6, atol=1e-6 * scale)
