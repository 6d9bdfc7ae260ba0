"""`scipy.sparse.linalg`, differentiable: systems A x = b of which only the products with A are known.

If A and b move, the solution moves by dx with `A dx = db - dA x`. So its derivative is one more solve, with A in
forward mode and with the transpose of A in reverse mode, whatever steps led to the solution. There are derivatives in b
and in what A closes over; the first guess and the preconditioner do not change the solution.

A is recorded on a tape, and the methods are loops of operations: they run under `vmap` and `jit`, on sharded arrays,
and in the body of a `shard_map`. There, ranks solve one system together if A communicates: along these axes, blocks of
b are parts of one vector, and inner products are summed. Along all others, each rank solves a system of its own.

Sources: M. R. Hestenes, E. Stiefel, "Methods of conjugate gradients for solving linear systems", 1952; Y. Saad,
M. H. Schultz, "GMRES", 1986; E. H. Ayachour, "A fast implementation for GMRES method", 2003 (the residual's norm).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.api.derivatives import jvp
from minidiff.api.recording import stage_flat
from minidiff.api.vmap import named_axes
from minidiff.compiler.linear_transpose import transpose
from minidiff.control_flow.custom_rules import custom_jvp, linear_call_p, stop_gradient
from minidiff.control_flow.dead_code import prune_tape
from minidiff.control_flow.divergent import communicating_equations
from minidiff.control_flow.while_loop import while_loop
from minidiff.core.interpreter import current_interpreter, current_scope
from minidiff.core.ranks import cast_like, ranks, vary_along
from minidiff.core.states import NONE
from minidiff.core.tape import Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import name_of
from minidiff.errors.location import warn_here
from minidiff.inputs.arguments import as_named_value
from minidiff.inputs.keywords import explain_keywords
from minidiff.ops.arrays import as_array
from minidiff.ops.base import convert
from minidiff.ops.callback import pure_callback
from minidiff.ops.sparse import Triplets, is_sparse
from minidiff.ops.updates import at
from minidiff.values.dtypes import float0, is_differentiable
from minidiff.values.lists import split_list
from minidiff.values.settings import checking

__all__ = ["cg", "gmres"]

Leaves = Sequence[Value]  # of a tree: a vector


# ---------------------------------------------------------------- systems


class System(NamedTuple):
    """A method for linear systems, and two operators: A and a preconditioner, as tapes.

    The tapes take the values that the operator closes over, then the leaves of a vector.
    """

    method: Callable
    tapes: Sequence[Tape]
    axes: Sequence[tuple[str, ...]]  # for each leaf, those along which its blocks are parts of one vector
    restart: int
    count: Callable  # the number of steps -> one more, after telling the user's function

    def transpose(self) -> System:
        """Return the system of the transposed operators: for `cg`, if they are real, they are the same."""
        types = self.tapes[0].out_types
        if self.method is _cg and types[0].dtype.kind != "c":
            return self
        return self._replace(tapes=[transpose(t, range(len(t.inputs))[-len(types) :]) for t in self.tapes])

    def inner(self, stacks: Leaves, y: Leaves) -> Value:
        """Return the inner products of stacked vectors with y, of which ranks sum all together."""
        totals: dict[tuple[str, ...], Value] = {}
        for axes, stack, leaf in zip(self.axes, stacks, y):
            stack = numpy.conj(stack) if numpy.iscomplexobj(stack) else stack
            if typeof(leaf).sharding is None:
                products = stack.reshape(len(stack), -1) @ leaf.reshape(-1)
            else:  # a reshape would gather what is split along a later dimension
                products = (stack * leaf).sum(tuple(range(1, stack.ndim)))
            totals[axes] = totals[axes] + products if axes in totals else products
        return functools.reduce(operator.add, [ranks.psum(x, axes) if axes else x for axes, x in totals.items()])

    def real_products(self, y: Leaves, *xs: Leaves) -> Value:
        """Return inner products of vectors that are real numbers."""
        return numpy.real(self.inner([numpy.stack(leaves) if xs[1:] else leaves[0][None] for leaves in zip(*xs)], y))

    def norm(self, x: Leaves) -> Value:
        return numpy.sqrt(self.real_products(x, x)[0])


def _count(steps: Value, *_: Value) -> Value:
    return steps + 1


def _add(x: Leaves, scale: Any, y: Leaves) -> Leaves:
    return [a + scale * b for a, b in zip(x, y)]


# ---------------------------------------------------------------- methods

# A method takes the system, its two operators as functions of vectors, a first guess and its residual, and limits: the
# largest norm of the residual, the largest number of steps, the norm of b. It returns the solution, the norm of its
# residual, and the number of steps.


def _cg(system: System, operators: Sequence[Callable], x: Leaves, r: Leaves, limits: Sequence[Value]) -> tuple:
    """Minimize the error in the norm of A along directions p that are conjugate to each other.

    Ranks sum twice in a step: p^H A p, then r^H r together with r^H M r.
    """
    (multiply, precondition), (limit, most, _) = operators, limits

    def next_products(r: Leaves) -> tuple[Leaves, Value, Value]:
        z = precondition(r)
        products = system.real_products(r, *([r] if all(map(operator.is_, r, z)) else [r, z]))
        return z, products[0], products[-1]

    def step(state: tuple) -> tuple:
        x, r, p, _, rho, steps = state
        q = multiply(p)
        length = rho / system.real_products(q, p)[0]
        x, r = _add(x, length, p), _add(r, -length, q)
        z, square, new = next_products(r)
        return x, r, _add(z, new / rho, p), square, new, system.count(steps, *x)

    state = x, r, *next_products(r), numpy.zeros((), int)
    x, _, _, square, _, steps = while_loop(lambda s: (s[3] > limit**2) & (s[5] < most), step, state)
    return x, numpy.sqrt(square), steps


def _gmres(system: System, operators: Sequence[Callable], x: Leaves, r: Leaves, limits: Sequence[Value]) -> tuple:
    """Minimize the residual among the sums of its products with A, up to `restart` of them; then begin again.

    Ranks sum three times in a step: v^H w twice, against rounding, and the norm of w. A cycle that does not reduce the
    residual is the last, since the next one would be the same.
    """
    (multiply, precondition), (limit, most, size) = operators, limits

    def cycle(state: tuple) -> tuple:
        x, r, norm, _, steps, cycles = state
        v, h, j = _arnoldi(system, lambda x: multiply(precondition(x)), r, norm, limit, size)
        y = norm * numpy.linalg.pinv(h)[:, 0]
        change = precondition([numpy.tensordot(y, x[:-1], 1) for x in v])
        r = _add(r, -1, multiply(change))
        return _add(x, 1, change), r, system.norm(r), norm, steps + j, cycles + 1

    def unfinished(state: tuple) -> Value:
        _, _, norm, before, _, cycles = state
        return (norm > limit) & (norm < before) & (cycles < most)

    norm, zero = system.norm(r), numpy.zeros((), int)
    x, _, norm, _, steps, _ = while_loop(unfinished, cycle, (x, r, norm, norm + numpy.inf, zero, zero))
    return x, norm, steps


def _arnoldi(system: System, multiply: Callable, r: Leaves, norm: Value, limit: Value, size: Value) -> tuple:
    """Return an orthonormal basis v of r and its products with A, H with A v = v H, and the number of products.

    A vector u with u^H H = 0 and u[0] = 1 gets a number in each step. With these products, the smallest norm of a
    residual is that of r divided by the norm of u.
    """
    n, precision = system.restart, numpy.finfo(norm.dtype)

    def step(state: tuple) -> tuple:
        v, h, u, j, _, _ = state
        w, column = multiply([x[j] for x in v]), numpy.zeros_like(u)
        for _ in range(2):
            products = system.inner(v, w)
            w, column = [y - numpy.tensordot(products, x, 1) for x, y in zip(v, w)], column + products
        least = precision.eps * numpy.linalg.norm(column) + precision.tiny
        length = numpy.maximum(system.norm(w), least)
        v = [at(x)[j + 1].set(numpy.where(length > least, y / length, 0)) for x, y in zip(v, w)]
        u = at(u)[j + 1].set(-(u * numpy.conj(column)).sum() / length)
        h = at(at(h)[:, j].set(column))[j + 1, j].set(length)
        residual = norm / numpy.linalg.norm(u)
        return v, h, u, system.count(j, residual / size), residual, length > least

    def unfinished(state: tuple) -> Value:
        *_, j, residual, proceeds = state
        return (j < n) & (residual > limit) & proceeds

    u = numpy.eye(n + 1, dtype=numpy.result_type(*r))[0]
    v = [numpy.tensordot(u, x / norm, 0) for x in r]
    state = v, numpy.zeros((n + 1, n), u.dtype), u, numpy.zeros((), int), norm, True
    v, h, _, j, *_ = while_loop(unfinished, step, state)
    return v, h, j


# ---------------------------------------------------------------- solutions and their derivatives


@functools.partial(custom_jvp, nondiff_argnums=(0,))
def _solution(system: System, values: Sequence[Leaves], others: tuple, b: Leaves) -> tuple[Leaves, Value]:
    """Return the solution, and 0 if its residual is small enough, or else the number of steps."""
    x0, rtol, atol, most = others
    multiply, precondition = (lambda x, t=t, v=v: t(*v, *x) for t, v in zip(system.tapes, values))
    size = system.norm(b)
    x, r = [numpy.zeros_like(y) for y in b], b
    if x0 is not None:
        x = [x * (size > 0) for x in x0]  # the solution for b = 0 is 0
        r = _add(b, -1, multiply(x))
    limit = convert(numpy.maximum(rtol * size, atol), size.dtype)
    x, norm, steps = system.method(system, (multiply, precondition), x, r, (limit, most, size))
    return x, numpy.where(norm <= limit, 0, numpy.maximum(steps, 1))


@_solution.defjvp
def _move_solution(system: System, primals: tuple, tangents: tuple) -> tuple:
    (values, others, b), ((moved, _), _, d_b) = primals, tangents
    x, info = _solution(system, *primals)
    if moved:
        d_b = _add(d_b, -1, jvp(lambda *of_a: system.tapes[0](*of_a, *x), tuple(values[0]), tuple(moved))[1])
    known, structure = tree.flatten((values, (None, *others[1:])))

    def solve(system: System, known: Leaves, b: Leaves) -> Leaves:
        x, info = _solution(system._replace(count=_count), *tree.unflatten(structure, known), list(b))
        if not isinstance(info, Tracer) and info:
            warn_here(f"a derivative has not converged in {info} steps; maxiter= allows more", RuntimeWarning)
        return x

    dx = _call_linear(
        (functools.partial(solve, system), lambda *operands: solve(system.transpose(), *operands)),
        known,
        [cast_like(t, typeof(x)) for t, x in zip(d_b, b)],
        [typeof(x) for x in b],
    )
    return (x, info), (dx, numpy.zeros(info.shape, float0))


def _call_linear(functions: Sequence[Callable], known: Leaves, xs: Leaves, types: Sequence[ShapedArray]) -> Leaves:
    """Apply a function of (known, xs) that is linear in xs; the second function is its transpose."""
    return linear_call_p.bind(
        *known,
        *xs,
        name=name_of(functions[0]),
        body=lambda *operands: functions[0](*split_list(operands, len(known))),
        bwd=functions[1],
        symbolic_zeros=False,
        consts=0,
        residuals=len(known),
        active=tuple(range(len(xs))),
        out_types=tuple(types),
    )


# ---------------------------------------------------------------- functions of SciPy


def _operator(name: str, x: Any) -> Callable:
    """Return the product with an operator: a function, a matrix, or a sparse matrix of SciPy; None is the identity."""
    if callable(x) or x is None:
        return x or (lambda v: v)
    matrix = x if is_sparse(x) else as_array(x)
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{name} must be a square matrix, or a function, got the shape {matrix.shape}")
    if name == "cg: A":
        _check_hermitian(matrix)
    is_scipys = is_sparse(x) and not isinstance(x, Triplets)
    return functools.partial(_multiply_sparse, x) if is_scipys else lambda v: matrix @ v


def _multiply_sparse(matrix: Any, x: Value) -> Value:
    """Return the product with a matrix of SciPy; its transpose is that with the transposed matrix."""
    x = convert(x, numpy.result_type(matrix.dtype, x.dtype))
    t = typeof(x).update(shape=(matrix.shape[0], *x.shape[1:]))
    run = lambda known, xs: [pure_callback(lambda x: matrix @ x, t, *xs)]  # noqa: E731
    return _call_linear((run, lambda known, cts: [_multiply_sparse(matrix.T, *cts)]), [], [x], [t])[0]


def _check_hermitian(matrix: Any) -> None:
    """Raise ValueError for a known matrix A that is not Hermitian: v^H A A v differs from |A v|^2."""
    v = numpy.cos(numpy.arange(matrix.shape[0]) ** 2.0)
    w = matrix @ v
    square, product = numpy.vdot(w, w), numpy.vdot(v, matrix @ w)
    if not isinstance(square, Tracer) and abs(square - product) > abs(square) * numpy.sqrt(numpy.finfo(w.dtype).eps):
        raise ValueError("cg: A must be Hermitian (symmetric, if it is real): use gmres, which takes any matrix")


def _record(name: str, f: Callable, structure: tree.Structure, leaves: Leaves) -> Tape:
    """Record an operator for vectors like this one."""

    def product(*leaves: Value) -> list[Value]:
        out, other = tree.flatten(f(tree.unflatten(structure, leaves)))
        if other != structure or list(map(numpy.shape, out)) != [x.shape for x in leaves]:
            trees = [tree.unflatten(s, map(typeof, xs)) for s, xs in ((structure, leaves), (other, out))]
            raise ValueError(f"{name} must return a tree like b, {trees[0]}, got {trees[1]}")
        return out

    return prune_tape(stage_flat(product, tuple(leaves), f"{name} of {name_of(f)}")[0])


def _record_system(
    functions: dict[str, Callable], structure: tree.Structure, b: Leaves
) -> tuple[list[Tape], Leaves, list[tuple[str, ...]]]:
    """Record the operators; return the tapes, b cast to the type that the solution has, and the axes of `System`."""
    while True:
        tapes = [_record(name, f, structure, b) for name, f in functions.items()]
        together = NONE.union(*[eqn.params["axes"] for tape in tapes for eqn in communicating_equations(tape)])
        types = [[typeof(x), *ts] for x, *ts in zip(b, *[tape.out_types for tape in tapes])]
        apart = NONE.union(*[t.variance for ts in types for t in ts]) - together
        dtype = numpy.result_type(*[t.dtype for ts in types for t in ts])
        cast = [vary_along(convert(x, dtype), apart.union(*[t.variance for t in ts])) for x, ts in zip(b, types)]
        if list(map(typeof, cast)) == list(map(typeof, b)):
            break
        b = cast
    scope = current_scope()  # along the axes of a vmap, and without types, all values count as varying
    untyped = {*named_axes(current_interpreter()), *(scope.axes if scope is not None and not scope.typed else ())}
    return tapes, b, [tuple(sorted(together & (typeof(x).variance | untyped))) for x in b]


def _solve(method: Callable, operators: dict[str, Any], b: Any, x0: Any, callback: Any, options: tuple) -> tuple:
    """Solve a system of trees; the options are rtol, atol, maxiter and restart."""
    caller, (rtol, atol, most, restart) = method.__name__.strip("_"), options
    leaves, structure = tree.flatten(b if callable(operators["A"]) else as_array(b))
    leaves = [as_named_value(x, f"{caller}: b must be a tree of arrays") for x in leaves]
    leaves = [x if is_differentiable(x.dtype) else convert(x, float) for x in leaves]
    functions = {(name := f"{caller}: {k}"): _operator(name, x) for k, x in operators.items()}
    tapes, leaves, axes = _record_system(functions, structure, leaves)
    if x0 is not None:
        x0, other = tree.flatten(x0)
        if other != structure or list(map(numpy.shape, x0)) != [x.shape for x in leaves]:
            raise ValueError(f"{caller}: x0 must be a tree like b, {tree.unflatten(structure, map(typeof, leaves))}")
        x0 = [cast_like(convert(stop_gradient(x), y.dtype), typeof(y)) for x, y in zip(x0, leaves)]
    size = sum(x.size * (ranks.psum(1, along) if along else 1) for x, along in zip(leaves, axes))

    def tell(*args: Value) -> int:
        callback(tree.unflatten(structure, args) if method is _cg else args[0])
        return 1

    count = _count if callback is None else lambda steps, *args: steps + pure_callback(tell, typeof(steps), *args)
    closed, values = zip(*[tape.close() for tape in tapes])
    system = System(method, closed, axes, min(restart, size), count)
    with checking(current_scope(), False):
        x, info = _solution(system, list(values), (x0, rtol, atol, 10 * size if most is None else most), leaves)
    return tree.unflatten(structure, x), info


@explain_keywords
def cg(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: Value = 1e-5,
    atol: Value = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable | None = None,
) -> tuple[Any, Value]:
    """`scipy.sparse.linalg.cg`: solve A x = b by conjugate gradients, for a Hermitian, positive definite A.

    A step takes one product with A. It has derivatives in b and in what A closes over.

    Args:
        A: a linear function of trees like b; for a vector b also a matrix [n, n], or a sparse one: of SciPy, or a
            `coo_array`, which has derivatives in its values.
        b: an array, or a tree of arrays.
        x0: the first guess, a tree like b; zeros by default.
        rtol: it stops if the norm of b - A x is at most rtol times that of b,
        atol: or at most atol.
        maxiter: the largest number of steps, 10 times the number of unknowns by default.
        M: a preconditioner, which approximates the inverse of A: Hermitian and positive definite, in a form of A.
        callback: a function of x, which is called after each step.

    Returns:
        The solution x, a tree like b, and `info`: 0 if it has converged, or else the number of steps.

    Raises:
        ValueError: for a matrix that is not Hermitian; if A does not return a tree like its argument.

    >>> import minidiff as md
    >>> stretched = lambda k: cg(lambda x: k * x, numpy.array([2.0, 3.0]))[0]  # x = b / k
    >>> stretched(2.0), md.jacrev(stretched)(2.0)
    (array([1. , 1.5]), array([-0.5 , -0.75]))
    """
    return _solve(_cg, {"A": A, "M": M}, b, x0, callback, (rtol, atol, maxiter, 1))


@explain_keywords
def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: Value = 1e-5,
    atol: Value = 0.0,
    restart: int | None = None,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable | None = None,
) -> tuple[Any, Value]:
    """`scipy.sparse.linalg.gmres`: solve A x = b by the generalized method of minimal residuals, for any A.

    A step takes one product with A, and keeps a vector. It has derivatives in b and in what A closes over; reverse mode
    solves with the transpose of A, which comes from the tape of A.

    Args:
        A: a linear function of trees like b; for a vector b also a matrix [n, n], or a sparse one: of SciPy, or a
            `coo_array`, which has derivatives in its values.
        b: an array, or a tree of arrays.
        x0: the first guess, a tree like b; zeros by default.
        rtol: it stops if the norm of b - A x is at most rtol times that of b,
        atol: or at most atol.
        restart: the number of steps, and of vectors, after which it begins again from x: 20 by default.
        maxiter: the largest number of such cycles, 10 times the number of unknowns by default.
        M: a preconditioner, which approximates the inverse of A, in a form of A.
        callback: a function of the norm of the residual, divided by that of b, which is called after each step.

    Returns:
        The solution x, a tree like b, and `info`: 0 if it has converged, or else the number of steps.

    Raises:
        ValueError: if A does not return a tree like its argument.

    >>> import minidiff as md
    >>> rotated = lambda t: gmres(lambda x: numpy.stack([x[0] - t * x[1], t * x[0] + x[1]]), numpy.ones(2))[0]
    >>> rotated(1.0).round(6), md.jacrev(rotated)(1.0).round(6)
    (array([1., 0.]), array([-0.5, -0.5]))
    """
    return _solve(_gmres, {"A": A, "M": M}, b, x0, callback, (rtol, atol, maxiter, restart or 20))
