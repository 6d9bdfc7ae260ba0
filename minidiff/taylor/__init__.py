"""Taylor mode: `jet`, `derivatives` and `laplacian`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.api.jacobians import basis_of
from minidiff.api.vmap import vmap
from minidiff.core.types import typeof, zeros_like
from minidiff.inputs.arguments import (
    Flat,
    are_weak,
    as_value,
    as_values,
    check_function,
    check_sequences,
    check_tangent,
)
from minidiff.inputs.keywords import make_decorator
from minidiff.taylor.interpreter import push_series

__all__ = ["derivatives", "jet", "laplacian"]


def jet(f: Callable, primals: Sequence[Any], series: Sequence[Sequence[Any]]) -> tuple[Any, list]:
    """Return the Taylor series of `f` along a curve: its value, and the coefficients of t, t², …, up to the order.

    The curve is x(t) = x₀ + x₁ t + x₂ t² + …. Coefficients are normalized: the k-th derivative is k! times
    coefficient k. The time is that of `f` times, at most, the square of the order; nested `jvp`s take 2ᵏ times as long.

    Args:
        f: a function of trees of arrays.
        primals: a sequence with one tree x₀ for each argument.
        series: a sequence with the coefficients [x₁, x₂, …] of each argument: trees like the primal. There are as many
            for each argument as the order of the result.

    Returns:
        A pair of the value and a list of its coefficients, trees like the value.

    Raises:
        TypeError: if primals and series do not match.
        ValueError: if arguments have different numbers of coefficients.

    >>> import numpy as np
    >>> value, coefficients = jet(np.exp, (0.0,), ([1.0, 0.0, 0.0],))
    >>> float(value), [float(c) for c in coefficients]  # 1, 1, 1/2, 1/6
    (1.0, [1.0, 0.5, 0.16666666666666666])

    Source: Griewank and Walther, "Evaluating derivatives", chapter 13.
    """
    check_function("jet", f)
    check_sequences("jet", primals, series)
    orders = {len(x) for x in series}
    if len(orders) != 1:
        raise ValueError(f"jet: all arguments need the same number of coefficients, got {[len(x) for x in series]}")
    (order,) = orders
    paths, structure = tree.flatten_with_paths(tuple(primals), "primals")
    names = [path for path, _ in paths]
    values = as_values("jet", [x for _, x in paths], lambda: names)
    coefficients = [[x] for x in values]
    for k in range(order):
        leaves, other = tree.flatten(tuple(x[k] for x in series))
        if other != structure:
            raise TypeError(f"jet: primals and coefficients {k + 1} differ in structure: {structure} and {other}")
        for x, name, c in zip(coefficients, names, leaves):
            x.append(check_tangent(name, x[0], c))
    flat = Flat(f, structure, False, are_weak(x for _, x in paths))
    outs = push_series(flat, coefficients, order)
    result = [[zeros_like(x[0]) if c is None else c for c in x] for x in outs]
    value, *others = [tree.unflatten(flat.out_structure, [x[k] for x in result]) for k in range(order + 1)]
    return value, others


def derivatives(f: Callable, x: Any, n: int) -> list:
    """Return the derivatives of orders 0 to n of a function of a number, by one series.

    Args:
        f: a function of one array. If it has several elements, each derivative is along the direction of ones: for an
            elementwise function, that of each element.
        x: a number or an array of floating-point dtype.
        n: the highest order.

    Returns:
        A list [f(x), f'(x), …, f⁽ⁿ⁾(x)] of trees like the result.

    Raises:
        TypeError: if x is an integer.

    >>> import numpy as np
    >>> [float(d) for d in derivatives(lambda x: x**3, 2.0, 4)]
    [8.0, 12.0, 12.0, 6.0, 0.0]
    """
    check_function("derivatives", f)
    x = as_value(x)
    ones = numpy.ones(typeof(x).shape, typeof(x).dtype)
    value, coefficients = jet(f, (x,), ([ones, *[0 * ones] * (n - 1)][:n],))
    return [value, *[tree.map(lambda c, k=k: c * math.factorial(k), c) for k, c in enumerate(coefficients, 1)]]


@make_decorator
def laplacian(f: Callable) -> Callable:
    """Return a function that computes the Laplacian of `f`: the sum of its second derivatives in each element.

    It is the trace of the Hessian, computed without it: one series of order 2 for each element, all in one batch.

    Args:
        f: a function of one array.

    Returns:
        A function that returns the Laplacian, a tree like the result of `f`.

    >>> import numpy as np
    >>> float(laplacian(lambda x: (x**3).sum())(np.array([1.0, 2.0])))
    18.0
    """
    check_function("laplacian", f)

    def trace(x: Any) -> Any:
        x = as_value(x)
        (basis,) = basis_of([typeof(x)])
        second = lambda v: jet(f, (x,), ([v, zeros_like(v)],))[1][1]  # noqa: E731
        return tree.map(lambda c: 2 * c.sum(0), vmap(second)(basis))

    return trace
