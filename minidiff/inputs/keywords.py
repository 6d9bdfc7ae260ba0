"""Function transformations as decorators, and advice for unknown keywords.

A transformation is called as `grad(f, argnums=1)`, or used as a decorator, with or without options:

>>> @make_decorator
... def times(f, factor=2):
...     return lambda x: factor * f(x)
>>> @times(factor=10)
... def square(x):
...     "The square of x."
...     return x * x
>>> square(3), square.__name__, square.__doc__
(90, 'square', 'The square of x.')
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from minidiff.diagnostics.text import did_you_mean
from minidiff.diagnostics.tracebacks import hide_own_frames_of_lambda, prepare_to_leave

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


def no_counterpart(why: str) -> str:
    """The advice for a keyword of another library that has no counterpart here."""
    return f"it has no counterpart here, so leave it out ({why})"


_CLOSE_OVER = "close over an argument that is not an array: "
_INTEGERS = no_counterpart(
    "name floating-point arguments in argnums; md.vjp accepts integers, and gives them cotangents of dtype float0"
)
_REDUCE_AXES = no_counterpart("the types of a shard_map's body say where its cotangents are summed over ranks")
_CPU = no_counterpart("programs run on NumPy, on the CPU; spmd.make_mesh chooses the ranks")
_SHARDINGS = no_counterpart(
    "arguments keep their shardings: shard them by spmd.distribute, results by spmd.reshard, or give both in the "
    "in_specs and out_specs of a spmd.shard_map"
)
_DERIVATIVES = {"allow_int": _INTEGERS, "argnum": "write argnums="}
_GRADIENTS = {
    **_DERIVATIVES,
    "holomorphic": "write md.jacrev(f, holomorphic=True), which is the derivative of a holomorphic function",
    "reduce_axes": _REDUCE_AXES,
}

#: Function -> keyword of the same function in other libraries -> what to write instead.
INSTEAD: dict[str, dict[str, str]] = {
    "jit": {
        "in_shardings": _SHARDINGS,
        "out_shardings": _SHARDINGS,
        "device": _CPU,
        "backend": _CPU,
        "keep_unused": no_counterpart("an argument that the program does not use is accepted, and ignored"),
        "inline": no_counterpart("a jit is always inlined in another transformation"),
        "abstracted_axes": no_counterpart("a program is compiled for each shape"),
        "compiler_options": "write without=, the names of the rewrites to skip",
    },
    "grad": _GRADIENTS,
    "value_and_grad": _GRADIENTS,
    "jacfwd": _DERIVATIVES,
    "jacrev": _DERIVATIVES,
    "hessian": _DERIVATIVES,
    "vmap": {
        "in_dims": "write in_axes=",
        "out_dims": "write out_axes=",
    },
    "checkpoint": {
        "prevent_cse": no_counterpart("what is computed again is never merged with what was computed before"),
        "concrete": no_counterpart("an `if` in the function sees concrete values, unless a jit surrounds it"),
    },
    "make_tape": {
        "static_argnums": _CLOSE_OVER + "make_tape(lambda x: f(x, n))(x)",
        "return_shape": "the tape has the types of its results: make_tape(f)(x).out_types",
        "axis_env": "name the axis in md.vmap(f, axis_name=...), or in a spmd.shard_map",
    },
    "scan": {"_split_transpose": no_counterpart("the transpose of a scan is one scan")},
    "cond": {
        "operand": "operands follow the functions: cond(pred, true_fun, false_fun, x)",
        "linear": no_counterpart("a branch's tape shows in which operands it is linear"),
    },
    "switch": {"operand": "operands follow the functions: switch(index, branches, x)"},
    "make_mesh": {
        "devices": no_counterpart(
            "the ranks are the launcher's, mpirun -n 8; comm=, an MPI communicator, chooses some"
        ),
        "axis_types": no_counterpart(
            "shard_map maps over the axes in its axis_names; arrays are sharded along the others"
        ),
    },
}


def check_keywords(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if a call of `what` has unknown keywords."""
    known, advice = tuple(known), INSTEAD.get(what, {})
    problems = [
        f"{what} takes no {name}=: {advice[name]}"
        if name in advice
        else f"{what} takes no {name}=, but {', '.join(f'{k}=' for k in known)}{did_you_mean(name, known)}"
        for name in given
        if name not in known
    ]
    if problems:
        raise TypeError("; ".join(problems))


def _check_call(function: Callable, given: Iterable[str]) -> None:
    code = function.__code__
    if not code.co_flags & 0x08:  # a function with **settings checks them itself
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        check_keywords(function.__name__, given, names)


def explain_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that the error for an unknown keyword has advice."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            if options:
                _check_call(function, options)
            return function(*args, **options)
        except BaseException as error:
            prepare_to_leave(error)
            raise

    return call


def copy_metadata(f: Callable, transformed: Any) -> Any:
    """Give `transformed` the name, the docstring and the signature of `f`."""
    try:  # half the time of functools.update_wrapper: a program may call `grad(f)(x)` in each step
        transformed.__name__, transformed.__qualname__ = f.__name__, f.__qualname__
        transformed.__doc__, transformed.__module__ = f.__doc__, f.__module__
        transformed.__wrapped__ = f
    except AttributeError:  # a callable that is not a function
        functools.update_wrapper(transformed, f, updated=())
    return transformed


class Transformation(Protocol[P, R_co]):
    """The type of a transformation, called with a function or with options only."""

    @property
    def __wrapped__(self) -> Callable[..., R_co]: ...

    @overload
    def __call__(self, f: Callable, /, *args: P.args, **options: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, /, **options: Any) -> Callable[[Callable], R_co]: ...


def make_decorator(function: Callable[Concatenate[Callable, P], R]) -> Transformation[P, R]:
    """Make `function(f, **options)` a decorator, with or without options.

    Its result has the name, the docstring and the signature of `f`, and hides the library's frames of an error. The
    error for an unknown keyword says what to write instead.
    """

    @functools.wraps(function)
    def transform(*args: Any, **options: Any) -> Any:
        try:
            if options:
                _check_call(function, options)
            if not args and "f" not in options:
                return functools.partial(transform, **options)
            result: Any = function(*args, **options)
        except BaseException as error:
            prepare_to_leave(error)
            raise
        result = hide_own_frames_of_lambda(result) if type(result) is FunctionType else result
        return copy_metadata(args[0] if args else options["f"], result)

    return transform
