"""`scipy.optimize`, differentiable: roots and minima, with derivatives by the implicit function theorem.

A root x of F(x, args) moves by dx with `F_x dx = -F_args dargs`. A minimum is a root of the gradient; under bounds and
constraints, of the equations of Karush, Kuhn and Tucker, with the active set of the solution. So derivatives do not
depend on how x was found. They cost one linear system, with an equation for each number, bound and constraint, and are
as accurate as x. The solver runs as one operation that calls SciPy: it works under `jit`, `vmap` and in the body
of a `shard_map`, where each rank solves its own problem; the function must not communicate. It may close over traced
values, as may bounds and constraints. The first guess has no derivative.

Sources: S. G. Krantz, H. R. Parks, "The implicit function theorem", 2002; A. V. Fiacco, "Introduction to sensitivity
and stability analysis in nonlinear programming", 1983.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import scipy.optimize

from minidiff import tree
from minidiff.api.derivatives import grad, jvp
from minidiff.api.jacobians import jacfwd
from minidiff.api.recording import eval_shape
from minidiff.control_flow.custom_rules import custom_jvp
from minidiff.core.interpreter import EVALUATE, running
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors.location import Location, current_location, warn_at
from minidiff.ops.arrays import as_array
from minidiff.ops.base import convert
from minidiff.ops.callback import pure_callback
from minidiff.ops.decomposition import as_floating, solve
from minidiff.ops.elementwise import stop_gradient
from minidiff.scipy.closures import close, record, refuse_options
from minidiff.values.dtypes import float0

__all__ = ["Result", "minimize", "root"]


SINGULAR = (
    "the solution of root or minimize has no derivative, which is NaN: the Jacobian of its equations is singular there "
    "(for minimize the Hessian, in the directions that active constraints leave). Solutions that are not isolated, and "
    "constraints that depend on each other, are usual causes"
)
#: Relative to x, a bound or constraint that is so near may be active.
NEAR = 1e-3


class Result(NamedTuple):
    """The result of `root` and `minimize`: the solution x, the function there, and SciPy's flag of success.

    >>> result = root(lambda x: x - 1.0, numpy.zeros(1))
    >>> result.x, result.fun, bool(result.success)
    (array([1.]), array([0.]), True)
    """

    x: Any
    fun: Any
    success: Value


# ---------------------------------------------------------------- solutions of equations


class Problem(NamedTuple):
    """Equations, and how SciPy solves them.

    `find(x0, values)` returns z = (x, multipliers of the rows), a root of `equations(z, sides, *values)`; the sides of
    the rows, where they are at a limit; and whether SciPy succeeded.
    """

    find: Callable
    equations: Callable
    rows: int
    source: Location | None

    def run(self, x0: numpy.ndarray, values: list) -> tuple:
        """Call SciPy with plain arrays, whatever traces the program."""
        with running(EVALUATE):
            z, sides, success = self.find(x0, values)
        return numpy.asarray(z, x0.dtype), numpy.asarray(sides, int), numpy.asarray(bool(success))

    def is_regular(self, matrix: numpy.ndarray) -> numpy.ndarray:
        """Return whether the equations' Jacobian has an inverse; warn if not."""
        regular = bool(numpy.isfinite(matrix).all()) and numpy.linalg.matrix_rank(matrix) == len(matrix)
        if not regular:
            warn_at(self.source, SINGULAR, RuntimeWarning)
        return numpy.asarray(regular)


@functools.partial(custom_jvp, nondiff_argnums=(0,))
def _solution(problem: Problem, x0: Value, values: list) -> tuple[Value, Value, Value]:
    types = (x0.shape[0] + problem.rows, x0.dtype), (problem.rows, numpy.dtype(int))
    types = *[ShapedArray((n,), dtype) for n, dtype in types], ShapedArray((), numpy.dtype(bool))
    return pure_callback(problem.run, types, x0, values)


@_solution.defjvp
def _move_solution(problem: Problem, primals: tuple, tangents: tuple) -> tuple:
    (x0, values), (_, d_values) = primals, tangents
    z, sides, success = _solution(problem, x0, values)
    f = lambda *values: problem.equations(z, sides, *values)  # noqa: E731
    moved = jvp(f, tuple(values), tuple(d_values))[1] if values else 0 * z
    matrix = jacfwd(problem.equations)(z, sides, *values)
    regular = pure_callback(problem.is_regular, ShapedArray((), numpy.dtype(bool)), stop_gradient(matrix))
    dz = solve(numpy.where(regular, matrix, numpy.eye(len(matrix), dtype=matrix.dtype)), moved)
    zeros = [numpy.zeros(x.shape, float0) for x in (sides, success)]
    return (z, sides, success), (dz * numpy.where(regular, -1, numpy.nan).astype(dz.dtype), *zeros)


def _ravel(name: str, x0: Any, tol: Any, options: dict) -> tuple[Value, Callable]:
    """Return x0 as a vector, and a function that makes a value like x0 of it, after a check of the options."""
    refuse_options(name, options)
    refuse_options(name, {"tol": tol, **(options.get("options") or {})})
    unravel: Callable = as_array
    if not any(leaf is x0 for leaf in tree.leaves(x0)) and (type(x0) not in (list, tuple) or any(map(numpy.ndim, x0))):
        x0, unravel = tree.ravel_pytree(x0)
    x0 = as_floating("x0", as_array(x0))
    if typeof(x0).ndim != 1:
        raise ValueError(f"x0 must be a vector, as for SciPy, got {typeof(x0)}: write x0.ravel(), and reshape x in fun")
    return x0, unravel


def root(
    fun: Callable, x0: Value, args: tuple = (), method: str = "hybr", tol: float | None = None, **kwds: Any
) -> Result:
    """`scipy.optimize.root`: find x with fun(x, *args) = 0.

    It is differentiable in the values that `fun` depends on, but not in x0. Where `success` is False, x is the last
    guess, and derivatives have no meaning; where the Jacobian is singular, they are NaN, with a warning.

    Args:
        fun: a function of x, which returns as many numbers.
        x0: the first guess: a vector, or a tree of arrays.
        args: further arguments of fun.
        method: a method of SciPy.
        tol: SciPy's tolerance.
        kwds: SciPy's other arguments, such as `options`; the Jacobian is computed here.

    Returns:
        A `Result`: the root x, which is like x0, fun there, and whether SciPy succeeded.

    Raises:
        ValueError: if x0 is an array, and not a vector.
        TypeError: for `jac`, and other arguments that are not supported.

    >>> import minidiff as md
    >>> round(float(md.grad(lambda a: root(lambda x: x * x - a, numpy.ones(1)).x[0])(4.0)), 6)  # 1 / (2 sqrt(a))
    0.25
    """
    x0, unravel = _ravel("root", x0, tol, kwds)
    as_result: Callable = as_array if unravel is as_array else lambda out: out
    result_of, (x0,), values = close("root", lambda x: as_result(fun(unravel(x), *args)), x0)
    f = lambda *operands: tree.ravel_pytree(result_of(*operands))[0]  # noqa: E731

    def find(x0: numpy.ndarray, values: list) -> tuple:
        at = lambda g: lambda x: g(x.astype(x0.dtype, copy=False), *values)  # noqa: E731
        result = scipy.optimize.root(at(f), x0, jac=at(jacfwd(f)), method=method, tol=tol, **kwds)
        return result.x.reshape(x0.shape), [], result.success

    problem = Problem(find, lambda z, sides, *values: f(z, *values), 0, current_location())
    x, _, success = _solution(problem, x0, values)
    return Result(unravel(x), result_of(x, *values), success)


# ---------------------------------------------------------------- minima


def _restrict(c: Any, x: Value, unravel: Callable) -> tuple[Value, Any, Any]:
    """Return the values that one of SciPy's bounds or constraints restricts at x, and the lower and upper bounds."""
    options = c if isinstance(c, dict) else vars(c)
    feasible = options.get("keep_feasible", False)  # SciPy broadcasts it with bounds, and traces it with them
    feasible = not isinstance(feasible, Tracer) and numpy.any(feasible)
    if callable(options.get("jac")) or callable(options.get("hess")) or feasible:
        raise TypeError("minimize: jac=, hess= and keep_feasible= of a constraint are not supported: leave them out")
    if isinstance(c, scipy.optimize.Bounds):
        return x, c.lb + 0.0, c.ub + 0.0  # copies: NumPy warns of reading views of broadcast arrays
    if isinstance(c, scipy.optimize.LinearConstraint):
        return as_array(c.A) @ x, c.lb, c.ub
    if isinstance(c, scipy.optimize.NonlinearConstraint):
        return c.fun(unravel(x)), c.lb, c.ub
    if c["type"] not in ("eq", "ineq"):
        raise ValueError(f"minimize: the type of a constraint must be 'eq' or 'ineq', got {c['type']!r}")
    return c["fun"](unravel(x), *c.get("args", ())), 0.0, numpy.inf if c["type"] == "ineq" else 0.0


def _as_bounds(bounds: Any) -> scipy.optimize.Bounds:
    if isinstance(bounds, scipy.optimize.Bounds):
        return bounds
    ends = zip((-numpy.inf, numpy.inf), zip(*bounds))
    return scipy.optimize.Bounds(*[numpy.stack([end if v is None else v for v in values]) for end, values in ends])


def _rows(x: Value, restrictions: Sequence, unravel: Callable) -> Value:
    """Return the values that bounds and constraints restrict, the lower and the upper bounds: an array [3, rows]."""
    rows = []
    for c in restrictions:
        columns = [convert(as_array(v), x.dtype) for v in _restrict(c, x, unravel)]
        rows.append(numpy.stack([numpy.broadcast_to(v, columns[0].shape or (1,)) for v in columns]))
    return numpy.concatenate(rows, 1)


def _active_set(x: numpy.ndarray, f: Callable, rows: Callable) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the multipliers of all rows, and the sides of the active ones: -1 at the lower bound, 1 at the upper.

    A row is active if it is near its bound, and f would fall beyond it: further than the distance to the bound.
    """
    (row, lower, upper), slopes, gradient = rows(x), jacfwd(lambda x: rows(x)[0])(x), grad(f)(x)
    equal, side = lower == upper, numpy.where(row - lower <= upper - row, -1, 1)
    distance = numpy.minimum(abs(row - lower), abs(upper - row))
    active, curvature = equal | (distance <= NEAR * max(1.0, *abs(x))), None
    while True:
        multipliers = numpy.zeros(len(row))
        multipliers[active] = numpy.linalg.lstsq(slopes[active].T, -gradient)[0]
        force = multipliers @ slopes
        if curvature is None:
            curvature = force @ jvp(grad(f), (x,), (force,))[1] / max(force @ force, numpy.finfo(float).tiny)
        beyond = multipliers * side * (slopes**2).sum(1) > max(curvature, 0.0) * distance
        if (equal | beyond)[active].all():
            return multipliers, numpy.where(active, side, 0)
        active &= equal | beyond


def _find_minimum(
    f: Callable, rows: list[Callable], bounded: int, options: dict, x0: numpy.ndarray, values: list
) -> tuple[numpy.ndarray, Any, Any]:
    """Call SciPy; return the minimum and multipliers, the sides of active rows, and whether it succeeded.

    The first `bounded` rows are those of x itself.
    """
    at = lambda g: lambda x: g(x.astype(x0.dtype, copy=False), *values)  # noqa: E731
    options = dict(options)
    if rows:
        row, (_, lower, upper) = at(rows[0]), at(rows[0])(x0)
        parts = [numpy.flatnonzero(part) for part in (lower == upper, lower != upper)]
        parts = [part[part >= bounded] for part in parts]
        options["constraints"] = [_constraint(row, part, lower[part], upper[part]) for part in parts if len(part)]
        if bounded:
            options["bounds"] = scipy.optimize.Bounds(lower[:bounded], upper[:bounded])
    result = scipy.optimize.minimize(at(f), x0, jac=at(grad(f)), **options)
    if not rows:
        return result.x, [], result.success
    multipliers, sides = _active_set(result.x, at(f), row)
    return numpy.concatenate([result.x, multipliers]), sides, result.success


def _constraint(rows: Callable, part: numpy.ndarray, lower: numpy.ndarray, upper: numpy.ndarray) -> Any:
    jac = jacfwd(lambda x: rows(x)[0])
    return scipy.optimize.NonlinearConstraint(lambda x: rows(x)[0][part], lower, upper, lambda x: jac(x)[part])


def minimize(
    fun: Callable,
    x0: Value,
    args: tuple = (),
    method: str | None = None,
    tol: float | None = None,
    bounds: Any = None,
    constraints: Any = (),
    **kwds: Any,
) -> Result:
    """`scipy.optimize.minimize`: find a local minimum x of the number fun(x, *args).

    The derivative of x keeps x on the active bounds and constraints: those whose multiplier is not 0. (At a
    bound with multiplier 0, x has a derivative on each side; this is the inner one.) It is NaN, with a warning, where
    the Hessian is singular in the remaining directions, or where active constraints depend on each other.

    Args:
        fun: a function of x, which returns a number.
        x0: the first guess: a vector, or a tree of arrays.
        args: further arguments of fun.
        method: a method of SciPy.
        tol: SciPy's tolerance.
        bounds: SciPy's bounds, which may be traced; for a tree, in the order of `md.tree.ravel_pytree`.
        constraints: SciPy's constraints, whose functions may close over traced values; their derivatives are computed
            here.
        kwds: SciPy's other arguments, such as `options`; the gradient is computed here.

    Returns:
        A `Result`: the minimum x, which is like x0, fun there, and whether SciPy succeeded.

    Raises:
        ValueError: if x0 is an array, and not a vector.
        TypeError: for `jac`, also of a constraint, and other arguments that are not supported.

    >>> import minidiff as md
    >>> f = lambda x, a: ((x - a) ** 2).sum() + (x**2).sum()
    >>> md.grad(lambda a: minimize(f, numpy.zeros(2), (a,)).x.sum())(numpy.array([1.0, 2.0]))
    array([0.5, 0.5])
    >>> bounded = lambda a: minimize(f, numpy.zeros(2), (a,), bounds=[(0, 0.8)] * 2).x.sum()
    >>> abs(md.grad(bounded)(numpy.array([1.0, 2.0]))).round(6)
    array([0.5, 0. ])
    """
    x0, unravel = _ravel("minimize", x0, tol, kwds)
    single = isinstance(constraints, (dict, scipy.optimize.LinearConstraint, scipy.optimize.NonlinearConstraint))
    limits = [*([] if bounds is None else [_as_bounds(bounds)]), *([constraints] if single else constraints)]
    both = lambda x: [as_array(fun(unravel(x), *args)), *([_rows(x, limits, unravel)] if limits else [])]  # noqa: E731
    both, (x0,), values = close("minimize", both, x0)
    f, *rows = [record("minimize", lambda *args, k=k: both(*args)[k], x0, *values)[0] for k in range(1 + bool(limits))]
    n, gradient = x0.shape[0], grad(f)
    count = eval_shape(rows[0], x0, *values).shape[1] if limits else 0
    options = {"method": method, "tol": tol, **kwds}
    find = functools.partial(_find_minimum, f, rows, n if bounds is not None else 0, options)

    def equations(z: Value, sides: Value, *values: Value) -> Value:
        """Return the residuals of the equations of a minimum, by the conditions of Karush, Kuhn and Tucker."""
        if not limits:
            return gradient(z, *values)
        x, multipliers = z[:n], z[n:]
        row, lower, upper = rows[0](x, *values)
        forces = grad(lambda x: numpy.sum(multipliers * rows[0](x, *values)[0]))(x)
        at_limit = row - numpy.where(sides < 0, lower, upper)
        return numpy.concatenate([gradient(x, *values) + forces, numpy.where(sides == 0, multipliers, at_limit)])

    z, _, success = _solution(Problem(find, equations, count, current_location()), x0, values)
    return Result(unravel(z[:n]), f(z[:n], *values), success)
