"""Check derivatives against finite differences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.api.derivatives import jvp, vjp
from minidiff.api.recording import stage_flat
from minidiff.checks.numerical import (
    central_difference,
    gather_if_sharded,
    restrict_to_differentiable,
    use_whole_arrays,
)
from minidiff.core.tape import evaluate_equation, read
from minidiff.core.tracer import Tracer
from minidiff.core.types import typeof
from minidiff.errors import TracerError
from minidiff.errors.other_libraries import finish_module
from minidiff.show.trace_table import Local
from minidiff.values.dtypes import finfo, is_differentiable

__all__ = ["check_grads"]


class Tolerance(NamedTuple):
    """The step of the differences; `atol + rtol * abs(difference)` is allowed."""

    eps: float
    rtol: float
    atol: float


def check_grads(
    f: Callable,
    args: Sequence[Any],
    order: int = 2,
    modes: Sequence[str] = ("fwd", "rev"),
    eps: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compare derivatives of `f` at `args` up to `order` with central differences.

    Floating-point and complex numbers are varied, complex ones in the real and the imaginary direction; integers and
    booleans are held constant. Forward mode compares tangents; reverse mode compares the pairing `Re(sum(cotangent *
    tangent))`. Each order checks the derivative functions of the previous order. Directions are random but the same in
    each run. Arguments and results may be sharded arrays; under MPI every rank calls it.

    Args:
        f: a function of trees of arrays.
        args: a sequence with one tree for each argument.
        order: the highest order of derivatives.
        modes: the modes to check: "fwd" for forward mode, "rev" for reverse mode.
        eps: the step of the differences.
        rtol: the relative tolerance; `atol + rtol * abs(difference)` is allowed.
        atol: the absolute tolerance. The defaults of these three depend on the precision of `args`.

    Raises:
        AssertionError: if they differ: it names the mode, the order, and the result with both numbers; the argument
            that causes it; and the first operation whose own derivative is wrong, if there is one.
        TypeError: if no argument or no result is differentiable.
        TracerError: for a traced argument, as in the body of a `shard_map`.

    >>> import numpy as np
    >>> check_grads(lambda x: np.sin(x).sum(), (np.ones(3),))
    """
    for mode in modes:
        if mode not in ("fwd", "rev"):
            raise ValueError(f"check_grads: a mode must be 'fwd' or 'rev', got {mode!r}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"check_grads: args must be a tuple of the arguments of f, as in check_grads(f, (x,)); got "
            f"{type(args).__name__}"
        )
    for path, x in tree.flatten_with_paths(tuple(args), "args")[0]:
        if isinstance(x, Tracer) and typeof(x).sharding is None:
            raise TracerError(
                f"check_grads compares numbers, but {path} is a traced value ({x.type}): call it outside of jit, vmap "
                "and the body of a shard_map; it checks a shard_map as a whole, on sharded arrays too"
            )
    of_tuple, args = use_whole_arrays(lambda xs: f(*xs), tuple(args))
    paths = _differentiable_leaves(args, "args")
    outs = _differentiable_leaves(of_tuple(args), "")
    restricted, values, _ = restrict_to_differentiable(of_tuple, args)
    single = any(finfo(typeof(x).dtype).eps > 1e-10 for _, x in paths + outs)
    tolerance = Tolerance(
        (1e-2 if single else 1e-5) if eps is None else eps,
        (2e-2 if single else 1e-5) if rtol is None else rtol,
        (2e-2 if single else 1e-6) if atol is None else atol,
    )
    subject = _Subject(lambda *xs: restricted(list(xs)), values, [p for p, _ in paths], [p for p, _ in outs])
    _check(subject, order, tuple(modes), numpy.random.default_rng(0), tolerance, ())


class _Subject(NamedTuple):
    """A function from arrays to a list of arrays, its arguments, and names of both."""

    f: Callable
    values: Sequence[Any]
    arguments: Sequence[str]
    results: Sequence[str]


def _differentiable_leaves(of: Any, root: str) -> list[tuple[str, Any]]:
    """Return the differentiable leaves with their paths; TypeError if there are none."""
    paths = tree.flatten_with_paths(of, root)[0]
    differentiable = [(path, x) for path, x in paths if is_differentiable(typeof(x).dtype)]
    if paths and not differentiable:
        raise TypeError(f"check_grads: arguments and results must be floating-point, got {typeof(paths[0][1])}")
    return differentiable


def _check(subject: _Subject, order: int, modes: tuple, rng, tolerance: Tolerance, history: tuple) -> None:
    tangents = [_random_like(x, rng) for x in subject.values]
    cts = [_random_like(x, rng) for x in subject.f(*subject.values)]
    for mode in modes:
        actual, expected = _both_ways(subject, tangents, cts, mode, tolerance)
        name = " of ".join([*reversed((*history, mode))])
        quantity = "the tangent" if mode == "fwd" else "<cotangent, tangent>"
        for path, a, e in zip(subject.results if mode == "fwd" else [""], actual, expected):
            title = f"{name}: {quantity}{path} by the rules (actual), by differences"
            if message := _mismatch(a, e, tolerance, title):
                rng = numpy.random.default_rng(0)
                cause = _find_wrong_argument(subject, cts, mode, tolerance, rng)
                operation = _find_wrong_operation(subject, mode, tolerance, rng)
                raise AssertionError("\n ".join(filter(None, [message, cause, operation])))
    if order > 1:
        for mode in modes:
            derivative = _derivative(subject, tangents, cts, mode)
            _check(derivative, order - 1, modes, rng, tolerance, (*history, mode))


def _both_ways(subject: _Subject, tangents: list, cts: list, mode: str, tolerance: Tolerance) -> tuple[list, list]:
    """Return the results' tangents, or their pairing with cotangents: from the rules, and from differences."""
    f, values = subject.f, list(subject.values)
    differences = central_difference(lambda xs: f(*xs), values, tolerance.eps, tangents)
    if mode == "fwd":
        return jvp(f, values, tangents)[1], differences
    return [_inner_product(_pull_back(f, values, cts), tangents)], [_inner_product(cts, differences)]


def _derivative(subject: _Subject, tangents: list, cts: list, mode: str) -> _Subject:
    """Return the derivative in a fixed direction, as a function of the arguments."""
    f = subject.f
    if mode == "fwd":
        return subject._replace(f=lambda *xs: jvp(f, xs, tangents)[1])
    return subject._replace(f=lambda *xs: _pull_back(f, xs, cts), results=subject.arguments)


def _pull_back(f: Callable, xs: Sequence, cts: list) -> list:
    """Return the arguments' cotangents, gathered, since those of a shard_map may be sharded."""
    return list(map(gather_if_sharded, vjp(f, *xs)[1](cts)))


def _random_like(x: Any, rng: numpy.random.Generator) -> Any:
    t = typeof(x)
    numbers = rng.standard_normal(t.shape)
    if t.dtype.kind == "c":
        numbers = numbers + 1j * rng.standard_normal(t.shape)
    return numpy.asarray(numbers, t.dtype)[()]


def _inner_product(xs: Sequence, ys: Sequence) -> float:
    return sum(numpy.sum(numpy.asarray(x) * numpy.asarray(y)).real for x, y in zip(xs, ys, strict=True))


# ---------------------------------------------------------------- explaining a failure


def _mismatch(actual: Any, expected: Any, tolerance: Tolerance, title: str = "") -> str:
    """Return NumPy's message if two values differ, else an empty string."""
    try:
        numpy.testing.assert_allclose(actual, expected, tolerance.rtol, tolerance.atol, err_msg=title)
    except AssertionError as error:
        return str(error)
    return ""


def _find_wrong_argument(subject: _Subject, cts: list, mode: str, tolerance: Tolerance, rng) -> str:
    """Return the first argument whose derivative is wrong, with both numbers."""
    zeros = [numpy.zeros_like(x)[()] for x in subject.values]
    for i, (name, x) in enumerate(zip(subject.arguments, subject.values)):
        for part, t in _directions(_random_like(x, rng)):
            tangents = [*zeros[:i], t, *zeros[i + 1 :]]
            for a, e in zip(*_both_ways(subject, tangents, cts, mode, tolerance)):
                if _mismatch(a, e, tolerance):
                    a, e = numpy.broadcast_arrays(a, e)
                    worst = numpy.unravel_index(numpy.argmax(numpy.abs(a - e)), a.shape)
                    return f"in {name} ({typeof(x)}){part}: {a[worst]:.8g} by the rules, {e[worst]:.8g} by differences"
    return ""


def _directions(t: Any) -> list[tuple[str, Any]]:
    if numpy.iscomplexobj(t):
        return [(", real direction", t.real.astype(t.dtype)), (", imaginary direction", t - t.real)]
    return [("", t)]


def _find_wrong_operation(subject: _Subject, mode: str, tolerance: Tolerance, rng) -> str:
    """Return the first operation on the tape whose derivative differs from differences."""
    try:
        tape = stage_flat(subject.f, tuple(subject.values))[0]
    except TracerError:
        return "the wrong operation cannot be named: the function branches on its values, so it has no tape"
    env = dict(zip(tape.inputs, subject.values))
    for number, eqn in enumerate(tape.equations):
        evaluate_equation(eqn, env)
        local = Local(eqn)
        if local.active and local.results:
            others, values = ([read(env, a) for a in atoms] for atoms in (local.others, local.active))
            operands = [f"operand {next(i for i, a in enumerate(eqn.inputs) if a is v)}" for v in local.active]
            applied, values = use_whole_arrays(functools.partial(local.apply, others), values)
            f = functools.partial(lambda applied, *xs: applied(list(xs)), applied)
            itself = _Subject(f, values, operands, [""] * len(local.results))
            cts = [_random_like(env[v], rng) for v in local.results]
            wrong = _find_wrong_argument(itself, cts, mode, tolerance, rng)
            if wrong:
                return (
                    f"the operation {eqn.primitive}, number {number + 1} on the tape, is wrong in {mode} mode {wrong}"
                )
    return "each operation is right by itself: is the function smooth here, and is eps suitable?"


finish_module(globals())
