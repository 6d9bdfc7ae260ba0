"""Finite differences: a check of the rules, and the reason to prefer rules.

A difference quotient has two errors. Its *truncation* error is the rest of the Taylor series, and falls with the step:
as `h` for one-sided differences, as `h**2` for central ones. Its *round-off* error is due to the subtraction of nearly
equal numbers, and grows as `1/h`. The total error has its minimum between the two, far above machine precision.
`errors` measures it.

>>> import numpy as np
>>> round(float(central_difference(np.sin, 0.0, 1e-4)), 10)
0.9999999983
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.api.derivatives import jvp
from minidiff.core.types import typeof
from minidiff.errors.other_libraries import finish_module
from minidiff.inputs.arguments import as_value
from minidiff.values.dtypes import finfo, is_differentiable

__all__ = ["Errors", "backward_difference", "central_difference", "errors", "forward_difference"]

#: By scheme: pairs (offset from x in steps, weight), and the order of the truncation error.
SCHEMES = {
    "forward": (((1, 1.0), (0, -1.0)), 1),
    "backward": (((0, 1.0), (-1, -1.0)), 1),
    "central": (((1, 0.5), (-1, -0.5)), 2),
}


def forward_difference(f: Callable, x: Any, step: float | None = None, direction: Any = None) -> Any:
    """Differentiate `f` at `x` by `(f(x + step) - f(x)) / step`.

    Args:
        f: a function of a number, an array or a tree of them.
        x: the argument.
        step: the step; by default the one that balances both errors if the derivatives of `f` are near 1.
        direction: a tree like `x` for the directional derivative; without it the result has all partial derivatives.

    Returns:
        The same as `central_difference`.

    >>> float(forward_difference(lambda x: x * x, 3.0, 0.5))
    6.5
    """
    return _differentiate("forward", f, x, step, direction)


def backward_difference(f: Callable, x: Any, step: float | None = None, direction: Any = None) -> Any:
    """Differentiate `f` at `x` by `(f(x) - f(x - step)) / step`.

    Args:
        f: a function of a number, an array or a tree of them.
        x: the argument.
        step: the step; by default the one that balances both errors if the derivatives of `f` are near 1.
        direction: a tree like `x` for the directional derivative; without it the result has all partial derivatives.

    Returns:
        The same as `central_difference`.

    >>> float(backward_difference(lambda x: x * x, 3.0, 0.5))
    5.5
    """
    return _differentiate("backward", f, x, step, direction)


def central_difference(f: Callable, x: Any, step: float | None = None, direction: Any = None) -> Any:
    """Differentiate `f` at `x` by `(f(x + step) - f(x - step)) / (2 step)`.

    With respect to a complex number x + iy, the derivative is df/dx - i df/dy if `f` is real, as in `grad`; otherwise
    `f` must be holomorphic.

    Args:
        f: a function of a number, an array or a tree of them; without a `direction` it returns one array.
        x: the argument. Integers and booleans in it are held constant.
        step: the step; by default the one that balances both errors if the derivatives of `f` are near 1.
        direction: a tree like `x` for the directional derivative; without it the result has all partial derivatives,
            and `f` is called twice for each number in `x`.

    Returns:
        With a `direction` a tree like the result of `f`. Without one a tree like `x`, where each array has the shape
        of the result of `f` followed by its own: if `f` returns a number, the gradient.

    >>> central_difference(lambda x: (x ** 2).sum(), numpy.array([1.0, 2.0]), 0.5)
    array([2., 4.])
    """
    return _differentiate("central", f, x, step, direction)


def _precision(x: Any) -> float:
    """Return the largest machine precision of a leaf, or 0 if none is differentiable."""
    dtypes = [typeof(leaf).dtype for leaf in tree.leaves(x)]
    return max((float(finfo(dtype).eps) for dtype in dtypes if is_differentiable(dtype)), default=0.0)


def _differentiate(scheme: str, f: Callable, x: Any, step: float | None, direction: Any) -> Any:
    if step is None:  # the one that balances both errors if `f` and its derivatives are near 1
        step = float((_precision(x) or numpy.finfo(float).eps) ** (1 / (SCHEMES[scheme][1] + 1)))
    f, x = use_whole_arrays(f, x)
    if direction is not None:
        return _differentiate_along(scheme, f, x, tree.map(gather_if_sharded, direction), step)
    leaves, structure = tree.flatten(x)
    return tree.unflatten(structure, [_partials(scheme, f, leaves, structure, i, step) for i in range(len(leaves))])


def _differentiate_along(scheme: str, f: Callable, x: Any, direction: Any, step: float) -> Any:
    (at_one, one), (at_other, other) = SCHEMES[scheme][0]

    def at(steps: int) -> Any:
        def step_along(p: Any, d: Any) -> Any:
            dtype = typeof(p).dtype
            return numpy.asarray(p + steps * step * d, dtype)[()] if steps and is_differentiable(dtype) else p

        return f(tree.map(step_along, x, direction))

    return tree.map(lambda a, b: (one * numpy.asarray(a) + other * numpy.asarray(b)) / step, at(at_one), at(at_other))


def _partials(scheme: str, f: Callable, leaves: list, structure: tree.Structure, i: int, step: float) -> Any:
    """Return the partial derivatives with respect to all numbers of leaf `i`."""
    x = numpy.asarray(leaves[i])
    if not is_differentiable(x.dtype):
        return numpy.zeros(x.shape)[()]

    def directional(entry: int, unit: complex) -> numpy.ndarray:
        direction = numpy.zeros(x.size, x.dtype)
        direction[entry] = unit
        zeros: list[Any] = [0.0] * len(leaves)
        zeros[i] = direction.reshape(x.shape)[()]
        out = _differentiate_along(scheme, f, tree.unflatten(structure, leaves), tree.unflatten(structure, zeros), step)
        if not numpy.isscalar(out) and not isinstance(out, numpy.ndarray):
            raise TypeError("partial derivatives need a result of one array; for several arrays, pass a direction")
        return numpy.asarray(out)

    def partial(entry: int) -> numpy.ndarray:
        real = directional(entry, 1.0)
        return real - 1j * directional(entry, 1j) if x.dtype.kind == "c" and real.dtype.kind != "c" else real

    if not x.size:
        out = numpy.asarray(f(tree.unflatten(structure, leaves)))
        return numpy.zeros(out.shape + x.shape, out.dtype)
    partials = numpy.stack([partial(entry) for entry in range(x.size)], axis=-1)
    return partials.reshape(partials.shape[:-1] + x.shape)[()]


def use_whole_arrays(f: Callable, x: Any) -> tuple[Callable, Any]:
    """Make `f` take and return whole arrays instead of sharded ones, and gather `x`: then all ranks compare numbers.

    The function shards its argument like `x`, and gathers `f`'s result. Both steps are differentiable.
    """
    shardings = [typeof(leaf).sharding for leaf in tree.leaves(x)]

    def of_whole(whole: Any) -> Any:
        leaves, structure = tree.flatten(whole)
        split = [leaf if to is None else to.reshard(leaf) for to, leaf in zip(shardings, leaves)]
        return tree.map(gather_if_sharded, f(tree.unflatten(structure, split)))

    return of_whole, tree.map(gather_if_sharded, x)


def gather_if_sharded(x: Any) -> Any:
    """Gather a sharded array on every rank; return any other unchanged."""
    sharding = typeof(x).sharding
    return x if sharding is None else sharding.gather(x)


# ---------------------------------------------------------------- their errors


class Errors(NamedTuple):
    """Errors of each scheme at each of `steps`, and the optimal and best steps: dicts by scheme.

    `optimal` estimates the step with the least error from the function's exact value and higher derivatives. `best` is
    the one of `steps` with the least measured error.

    >>> measured = errors(numpy.sin, 1.0, steps=[1e-1, 1e-5, 1e-14])
    >>> measured.forward.shape, measured.best["forward"]
    ((3,), 1e-05)
    """

    steps: numpy.ndarray
    forward: numpy.ndarray
    backward: numpy.ndarray
    central: numpy.ndarray
    optimal: dict[str, float]
    best: dict[str, float]


def errors(f: Callable, x: Any, steps: Sequence[float] | None = None, direction: Any = None) -> Errors:
    """Measure the error of differences of `f` at `x`, for each scheme and step.

    Plot it with logarithmic axes: `plt.loglog(e.steps, e.forward)`.

    Args:
        f: a function of a number, an array or a tree of them.
        x: the argument.
        steps: a sequence of steps; by default 1, 10**-0.25, …, 10**-16.
        direction: the direction of the derivative, a tree like `x`; by default of ones.

    Returns:
        The `Errors`: each is the largest one of all numbers in the result.

    Raises:
        TypeError: if no number in `x` can be differentiated.

    >>> e = errors(numpy.exp, 1.0)
    >>> bool(1e-9 < e.best["forward"] < 1e-7 < 1e-6 < e.optimal["central"] < 1e-4)
    True
    """
    f, x = use_whole_arrays(f, x)
    f, leaves, chosen = restrict_to_differentiable(f, x)
    if not leaves:
        raise TypeError(
            f"errors: no argument carries a derivative ({', '.join(map(str, map(typeof, tree.leaves(x))))})"
        )
    tangents = (
        [numpy.ones_like(p)[()] for p in leaves]
        if direction is None
        else chosen(tree.map(gather_if_sharded, direction))
    )
    sizes = numpy.logspace(0, -16, 65) if steps is None else numpy.asarray(steps, float)
    functions = [f]  # and its derivatives along `tangents`, by the rules
    for _ in range(3):
        functions.append(lambda x, g=functions[-1]: jvp(g, (x,), (tangents,))[1])
    value, *exact = [g(leaves) for g in functions]

    def error(scheme: str, step: float) -> float:
        difference = _differentiate_along(scheme, f, leaves, tangents, step)
        return _largest(tree.map(lambda a, b: numpy.asarray(a) - numpy.asarray(b), difference, exact[0]))

    by_scheme = {scheme: numpy.array([error(scheme, step) for step in sizes]) for scheme in SCHEMES}
    lost = _precision(leaves) * (_largest(value) + _largest(leaves) * _largest(exact[0]))
    least = _precision(leaves) * _largest(exact[0])  # of a difference, also where no digits are lost
    derivatives = [*map(_largest, exact)]
    optimal = {scheme: _optimal_step(order, lost, least, derivatives) for scheme, (_, order) in SCHEMES.items()}
    best = {scheme: float(sizes[numpy.nanargmin(e)]) for scheme, e in by_scheme.items()}
    return Errors(sizes, **by_scheme, optimal=optimal, best=best)


def _optimal_step(order: int, lost: float, least: float, derivatives: Sequence[float]) -> float:
    """Return the step at which the first term `c h**p` of the truncation error outgrows `lost`, or the `least` error.

    The terms are `h/2 d2f + h**2/6 d3f` for one-sided differences, which lose `2 lost/h`, and the second one for
    central ones, which lose `lost/h`. The step is infinite where the derivatives of these terms are 0.
    """
    steps = [float("inf")]
    for p in range(order, len(derivatives)):
        if c := derivatives[p] / math.factorial(p + 1):
            steps.append(max((lost * (3 - order) / (p * c)) ** (1 / (p + 1)), (least / c) ** (1 / p)))
    return min(steps)


def _largest(x: Any) -> float:
    return max((float(numpy.abs(leaf).max(initial=0.0)) for leaf in tree.leaves(x)), default=0.0)


def restrict_to_differentiable(f: Callable, x: Any) -> tuple[Callable, list, Callable]:
    """Restrict `f` to differentiable leaves; hold integers and booleans constant.

    Returns a function from the list of differentiable leaves of `x` to the list of those of `f`'s result; that list for
    `x`; and a function that picks it from any tree like `x`.
    """
    leaves, structure = tree.flatten(x)
    values = [as_value(leaf) for leaf in leaves]
    active = [is_differentiable(v.dtype) for v in values]

    def chosen(like: Any) -> list:
        leaves_of_like, other = tree.flatten(like)
        if other != structure:
            raise ValueError(f"the direction has the structure {other}, but the argument has {structure}")
        return [leaf for leaf, is_active in zip(leaves_of_like, active) if is_active]

    def restricted(some: list) -> list:
        actives = iter(some)
        full = [next(actives) if is_active else leaf for leaf, is_active in zip(leaves, active)]
        outs = tree.leaves(f(tree.unflatten(structure, full)))
        return [out for out in outs if is_differentiable(typeof(out).dtype)]

    return restricted, [v for v, is_active in zip(values, active) if is_active], chosen


finish_module(globals())
