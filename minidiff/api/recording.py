"""Record functions of trees on tapes, by the types of their arguments alone: `make_tape`, `eval_shape`."""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from minidiff import tree
from minidiff.core.interpreter import current_interpreter, transforming
from minidiff.core.tape import Atom, Equation, Stage, Tape
from minidiff.core.tracer import Function, Tracer, Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.errors import name_of
from minidiff.errors.location import begins, current_place
from minidiff.inputs.arguments import are_weak, as_value, as_values, check_function, restore_weak, result_values
from minidiff.inputs.global_random import random_state, warn_if_random
from minidiff.inputs.keywords import copy_metadata, make_decorator
from minidiff.values.aliasing import current_lifetimes
from minidiff.values.dtypes import is_differentiable
from minidiff.values.lists import select
from minidiff.values.settings import override, restores_settings, setting

#: Why a recorded function should not draw random numbers.
CONSTANTS = "it is recorded once, and what it drew is a constant of the program"

#: Whether `jit` calls the user's function itself, op by op: see `minidiff.debug.disable_jit`.
jit_is_disabled: ContextVar[bool] = setting("jit_is_disabled", False)


def collecting_later(function: Function) -> Function:
    """Let Python's garbage collector wait while this function records or compiles a program.

    It would repeatedly scan all objects that were made so far, and none of them is garbage.
    """

    @functools.wraps(function)
    def call_and_collect(*args: Any, **kwargs: Any) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return cast(Function, call_and_collect)


@restores_settings
@begins
@collecting_later
def stage_flat(f: Callable, examples: tuple, name: str = "make_tape") -> tuple[Tape, tree.Structure, tree.Structure]:
    """Record `f`: return its tape, and the structures of arguments and result."""
    leaves, structure = tree.flatten(tree.with_settings(examples))
    stage = Stage(current_interpreter(), name=name)
    stage.origin, stage.program = (name, name_of(f)), stage
    stage.monitor.eager = name == "make_tape" and current_lifetimes.get() is not None
    inputs = [stage.new_input(x if isinstance(x, ShapedArray) else typeof(as_value(x))) for x in leaves]
    before = random_state()
    with transforming(stage):
        arguments = tree.unflatten(structure, restore_weak(are_weak(leaves), inputs))
        outs, out_structure = tree.flatten(*tree.with_settings((f(*arguments),)))
        origin = name if " of " in name else f"{name} of {name_of(f)}"
        warn_if_random(before, origin, CONSTANTS)
        tape = stage.tape(result_values([origin], outs, out_structure))
    return tape, structure, out_structure


def close_tape(tape: Tape) -> tuple[Tape, list[Value]]:
    """Turn the constants of a tape into leading inputs; return the tape and the constants."""
    constants = tape.constants
    names = {id(c): Var(typeof(c)) for c in constants}

    def named(atoms: Sequence[Atom]) -> list[Atom]:
        return [names.get(id(a), a) for a in atoms]

    equations = [Equation(e.primitive, named(e.inputs), e.params, e.outputs, e.source) for e in tape.equations]
    return Tape([*names.values(), *tape.inputs], equations, named(tape.outputs)), constants


@make_decorator
def make_tape(f: Callable) -> Callable[..., Tape]:
    """Return a function that records `f`: `make_tape(f)(*args, **kwargs) -> Tape`.

    Python numbers promote as in NumPy: where one is converted to an array's dtype, the tape has a `convert`. Arrays
    that `f` closes over are constants, with the values that they have when `f` uses them: the tape has one read-only
    copy of each. Printing the tape shows the typed program, with the bodies of `shard_map` indented below their
    equation.

    Args:
        f: a function of trees of arrays.

    Returns:
        A function that takes trees of arrays, whose values are ignored, or of `ShapedArray`s, and returns the `Tape`.
        Its inputs are the leaves of the arguments; those of keywords come last and in order.

    Raises:
        TypeError: if `f` is not a function.
        TracerError: by that function, where `f` needs a concrete value.

    >>> from minidiff import grad
    >>> print(make_tape(grad(lambda x: x * x))(3.0))
    lambda a:f64[]:
      b:f64[] = multiply(a, a)
      c:f64[] = multiply(1.0, a)
      d:f64[] = multiply(a, 1.0)
      e:f64[] = add(c, d)
      return e
    """
    check_function("make_tape", f)

    def tape_of(*args: Any, **kwargs: Any) -> Tape:
        if not kwargs:
            return stage_flat(f, args)[0]
        return stage_flat(copy_metadata(f, lambda args, kwargs: f(*args, **kwargs)), (args, kwargs))[0]

    return tape_of


@contextmanager
def place(rank: int) -> Iterator[None]:
    """`with place(rank):` label the operations that a tape records in the block with a rank.

    The label is a part of an equation's source, `equation.source.place`, and the operations of its derivatives have it,
    too. It changes no result: `spmd.examples.placement.partition_tape` runs each operation on the rank of its label.

    Args:
        rank: an integer from 0 on. The innermost block counts.

    Raises:
        TypeError: if the rank is not an integer.
        ValueError: if it is negative.

    Source: M. Abadi et al., "TensorFlow: Large-scale machine learning on heterogeneous distributed systems", 2015,
    section 4.3.

    >>> import numpy as np
    >>> def f(x):
    ...     with place(0):
    ...         y = np.sin(x)
    ...     with place(1):
    ...         return y * np.cos(x)
    >>> [(eqn.primitive.name, eqn.source.place) for eqn in make_tape(f)(1.0).equations]
    [('sin', 0), ('cos', 1), ('multiply', 1)]
    """
    if operator.index(rank) < 0:
        raise ValueError(f"place: the rank must be an integer from 0 on, got {rank}")
    with override(current_place, operator.index(rank)):
        yield


def eval_shape(f: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return the types of the results of `f(*args, **kwargs)`, and compute nothing.

    Args:
        f: a function of trees of arrays.
        args: trees of arrays, whose values are ignored, or of `ShapedArray`s; `kwargs` likewise.

    Returns:
        A tree of `ShapedArray`s with the structure of the result.

    Raises:
        TracerError: where `f` needs a value; and whatever `f` raises for arguments of these types.

    >>> from minidiff import ShapedArray
    >>> eval_shape(lambda x, w: {'y': x @ w}, ShapedArray((8, 3), 'float32'), ShapedArray((3, 2), 'float32'))
    {'y': f32[8,2]}
    """
    check_function("eval_shape", f)
    name = f"eval_shape of {name_of(f)}"
    tape, _, structure = stage_flat(lambda args, kwargs: f(*args, **kwargs), (args, kwargs), name)
    return tree.unflatten(structure, tape.out_types)


def closure_convert(fun: Callable, *example_args: Any) -> tuple[Callable, list[Value]]:
    """Turn values that `fun` closes over into arguments: return a pair of a function and these values.

    A rule gives derivatives only in the arguments of its function. If one of these is a function, it may close over a
    value that is differentiated.

    Args:
        fun: a function of trees of arrays.
        example_args: trees of arrays; `fun` is traced for arguments like these.

    Returns:
        A function that takes arguments like `example_args`, then the values; and the list of the values: the traced
        ones of floating-point dtype that `fun` uses.

    Raises:
        TypeError: by that function, for arguments of another structure or other types.

    >>> from minidiff import grad
    >>> def tripled(w):
    ...     f, values = closure_convert(lambda x: w * x, 1.0)
    ...     return f(3.0, *values)
    >>> print(grad(tripled)(2.0))
    3.0
    """
    name = name_of(fun)
    tape, structure, out_structure = stage_flat(fun, example_args, f"closure_convert of {name}")
    closed, constants = tape.close()
    hoisted = [isinstance(x, Tracer) and is_differentiable(typeof(x).dtype) for x in constants]
    types = closed.in_types[len(constants) :]

    def converted(*args: Any) -> Any:
        args, values = args[: len(args) - sum(hoisted)], args[len(args) - sum(hoisted) :]
        leaves, other = tree.flatten(args)
        if other != structure:
            raise TypeError(f"closure_convert of {name}: it was traced for arguments {structure}, got {other}")
        leaves = as_values(f"closure_convert of {name}", leaves, lambda: tree.paths(structure, "args"))
        for n, (x, t) in enumerate(zip(map(typeof, leaves), types)):
            if (x.shape, x.dtype) != (t.shape, t.dtype):
                path = tree.paths(structure, "args")[n]
                raise TypeError(f"closure_convert of {name}: {path} has type {x}, but it was traced for {t}")
        arrays = iter(map(as_value, values))
        fixed = [next(arrays) if is_hoisted else x for x, is_hoisted in zip(constants, hoisted)]
        return tree.unflatten(out_structure, closed(*fixed, *leaves))

    return converted, select(constants, hoisted)
