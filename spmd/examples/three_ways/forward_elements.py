"""A library of elements in forward mode: each call takes values and their derivatives, and returns both of its result.

    python -m spmd.examples.three_ways.forward_elements

The program prints ln(x) + x y - sin(y) at (2, 5), step by step, with the derivatives in x and y.

`t, dt = ad_mul(x, y, dx, dy)` has the values of the operands first, then their derivatives, then those of the result.
The user breaks a formula up into calls by hand, and starts with dx = 1 for the derivative in x, and 0 for the others:

>>> x, y, dx, dy = 2.0, 5.0, 1.0, 0.0
>>> t1, dt1 = ad_log(x, dx)
>>> t2, dt2 = ad_mul(x, y, dx, dy)
>>> t3, dt3 = ad_add(t1, t2, dt1, dt2)
>>> t3, dt3
(10.693147180559945, 5.5)

Nothing is recorded, so memory does not grow, but each input needs a run of its own, or a number in arrays of
derivatives: `jacobian` runs once with dx = [1, 0] and dy = [0, 1].

Source: C. L. Lawson, "Computing derivatives using W-arithmetic and U-arithmetic", 1971; R. E. Wengert, "A simple
automatic derivative evaluation program", 1964.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

Pair = tuple[float, Any]  # a value, and its derivative: a number, or an array with one for each input


def ad_add(x: float, y: float, dx: Any, dy: Any) -> Pair:
    return x + y, dx + dy


def ad_sub(x: float, y: float, dx: Any, dy: Any) -> Pair:
    return x - y, dx - dy


def ad_mul(x: float, y: float, dx: Any, dy: Any) -> Pair:
    return x * y, dx * y + x * dy


def ad_div(x: float, y: float, dx: Any, dy: Any) -> Pair:
    t = x / y
    return t, (dx - t * dy) / y


def ad_neg(x: float, dx: Any) -> Pair:
    return -x, -dx


def ad_sin(x: float, dx: Any) -> Pair:
    return math.sin(x), math.cos(x) * dx


def ad_cos(x: float, dx: Any) -> Pair:
    return math.cos(x), -math.sin(x) * dx


def ad_exp(x: float, dx: Any) -> Pair:
    t = math.exp(x)
    return t, t * dx


def ad_log(x: float, dx: Any) -> Pair:
    return math.log(x), dx / x


def ad_sqrt(x: float, dx: Any) -> Pair:
    t = math.sqrt(x)
    return t, dx / (2 * t)


def ad_tanh(x: float, dx: Any) -> Pair:
    t = math.tanh(x)
    return t, (1 - t * t) * dx


def jacobian(f: Callable[..., Sequence[Pair]], *inputs: float) -> tuple[list[float], numpy.ndarray]:
    """Return the results of `f(x, y, ..., dx, dy, ...)` and their Jacobian: a row for each result, from one run.

    >>> values, rows = jacobian(lambda x, y, dx, dy: [ad_mul(x, y, dx, dy), ad_exp(x, dx)], 0.0, 5.0)
    >>> values, rows.tolist()
    ([0.0, 1.0], [[5.0, 0.0], [1.0, 0.0]])
    """
    values, rows = zip(*f(*inputs, *numpy.eye(len(inputs))))
    return list(values), numpy.array([numpy.broadcast_to(row, len(inputs)) for row in rows])


def main(argv: Sequence[str] | None = None) -> None:
    x, y = 2.0, 5.0
    dx, dy = numpy.eye(2)
    t1, dt1 = ad_log(x, dx)
    t2, dt2 = ad_mul(x, y, dx, dy)
    t3, dt3 = ad_add(t1, t2, dt1, dt2)
    t4, dt4 = ad_sin(y, dy)
    t5, dt5 = ad_sub(t3, t4, dt3, dt4)
    steps = {
        "x": (x, dx),
        "y": (y, dy),
        "t1 = ln x": (t1, dt1),
        "t2 = x y": (t2, dt2),
        "t3 = t1 + t2": (t3, dt3),
        "t4 = sin y": (t4, dt4),
        "t5 = t3 - t4": (t5, dt5),
    }
    print("                   value     in x     in y")
    for step, (value, (in_x, in_y)) in steps.items():
        print(f"{step:15}{value:9.4f}{in_x:9.4f}{in_y:9.4f}")


if __name__ == "__main__":
    main()
