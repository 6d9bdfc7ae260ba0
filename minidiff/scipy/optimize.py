"""`scipy.optimize`, differentiable: roots and minima, with derivatives by the implicit function theorem.

A root x of F(x, args) moves by dx with `F_x dx = -F_args dargs`; a minimum is a root of the gradient. So derivatives do
not depend on how x was found, and cost one linear system of n equations; they are as accurate as x is. The solver runs
as one operation that calls SciPy: it works under `jit`, `vmap` and in the body of a `shard_map`, where each rank solves
its own problem; the function must not communicate. It may close over traced values. The first guess has no derivative.

Source: S. G. Krantz, H. R. Parks, "The implicit function theorem", 2002.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import scipy.optimize

from minidiff.core.interpreter import EVALUATE, running
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.higher_order.custom_rules import custom_jvp
from minidiff.jacobians import jacfwd
from minidiff.ops.arrays import as_array
from minidiff.ops.callback import pure_callback
from minidiff.ops.decomposition import as_floating, solve
from minidiff.scipy.closures import close
from minidiff.transforms.derivatives import grad, jvp

__all__ = ["Result", "minimize", "root"]


class Result(NamedTuple):
    """What `root` and `minimize` return: the solution x [n], the function there, and whether SciPy has found one.

    >>> found = root(lambda x: x - 1.0, numpy.zeros(1))
    >>> found.x, found.fun, bool(found.success)
    (array([1.]), array([0.]), True)
    """

    x: Value
    fun: Value
    success: Value


def _run(solver: Callable, f: Callable, x0: numpy.ndarray, values: list) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Call SciPy with plain arrays, whatever traces the program."""
    with running(EVALUATE):
        found = solver(lambda x: f(x.astype(x0.dtype, copy=False), *values), x0)
    return numpy.asarray(found.x, x0.dtype).reshape(x0.shape), numpy.asarray(bool(found.success))


@functools.partial(custom_jvp, nondiff_argnums=(0, 1, 2))
def _solution(solver: Callable, f: Callable, equations: Callable, x0: Value, values: list) -> tuple[Value, Value]:
    """The x that `solver(f, x0)` finds, a root of `equations(f)`, and whether it is one; f takes x and the values."""
    result = ShapedArray(x0.shape, x0.dtype), ShapedArray((), numpy.dtype(bool))
    return pure_callback(functools.partial(_run, solver, f), result, x0, values)


@_solution.defjvp
def _move_solution(solver: Callable, f: Callable, equations: Callable, primals: tuple, tangents: tuple) -> tuple:
    (x0, values), (_, tangents_of_values) = primals, tangents
    x, success = _solution(solver, f, equations, x0, values)
    g = equations(f)
    moved = jvp(lambda *values: g(x, *values), tuple(values), tuple(tangents_of_values))[1] if values else 0 * x
    return (x, success), (-solve(jacfwd(g)(x, *values), moved), success)


def _solve(
    find: Callable, jac: Callable, fun: Callable, equations: Callable, x0: Value, args: tuple, /, **options: Any
) -> Result:
    """What SciPy's `find` returns for `fun`, whose derivative is `jac(fun)`: a root of `equations(fun)`."""

    def solver(f: Callable, x0: numpy.ndarray) -> Any:
        return find(f, x0, jac=jac(f), **options)

    if "jac" in options:
        raise TypeError(f"{find.__name__}: the derivative of fun is computed here; leave out jac={options['jac']!r}")
    x0 = as_floating("x0", as_array(x0))
    if typeof(x0).ndim != 1:
        raise ValueError(f"x0 must be a vector, as for SciPy, got {typeof(x0)}: write x0.ravel(), and reshape x in fun")
    f, (x0,), values = close("root", lambda x: as_array(fun(x, *args)), x0)
    x, success = _solution(solver, f, equations, x0, values)
    return Result(x, f(x, *values), success)


def root(
    fun: Callable, x0: Value, args: tuple = (), method: str = "hybr", tol: float | None = None, **kwds: Any
) -> Result:
    """`scipy.optimize.root`: x [n] with fun(x, *args) = 0, n equations, from the guess x0 [n].

    `method`, `tol` and `options` are SciPy's; the Jacobian is computed here. Where `success` is False, x is the last
    guess, and derivatives mean nothing. Raises ValueError if x0 is not a vector.

    >>> import minidiff as md
    >>> round(float(md.grad(lambda a: root(lambda x: x * x - a, numpy.ones(1)).x[0])(4.0)), 6)  # 1 / (2 sqrt(a))
    0.25
    """
    return _solve(scipy.optimize.root, jacfwd, fun, lambda f: f, x0, args, method=method, tol=tol, **kwds)


def minimize(
    fun: Callable, x0: Value, args: tuple = (), method: str = "BFGS", tol: float | None = None, **kwds: Any
) -> Result:
    """`scipy.optimize.minimize`: x [n] where the number fun(x, *args) is least nearby, from the guess x0 [n].

    `method`, `tol` and `options` are SciPy's, but bounds and constraints are not supported: x must be a point where the
    gradient, which is computed here, is 0, and the Hessian regular. Raises ValueError if x0 is not a vector.

    >>> import minidiff as md
    >>> f = lambda x, a: ((x - a) ** 2).sum() + (x**2).sum()
    >>> md.grad(lambda a: minimize(f, numpy.zeros(2), (a,)).x.sum())(numpy.array([1.0, 2.0]))
    array([0.5, 0.5])
    """
    return _solve(scipy.optimize.minimize, grad, fun, grad, x0, args, method=method, tol=tol, **kwds)
