"""Functions that SciPy's solvers call, and calls of SciPy's functions for stacks of arrays.

Solvers call functions of plain arrays: traced values that these close over are arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy

from minidiff import tree
from minidiff.api.recording import stage_flat
from minidiff.control_flow.dead_code import prune_tape
from minidiff.core.ranks import cast_to
from minidiff.core.states import common_states
from minidiff.core.tape import Equation, Tape
from minidiff.core.tracer import Tracer, Value, states_of
from minidiff.core.types import Var, typeof
from minidiff.errors import name_of
from minidiff.errors.other_libraries import suggestions
from minidiff.ops.base import convert
from minidiff.values.dtypes import is_differentiable


def _without_casts(tape: Tape, name: str) -> Tape:
    """Return the tape without casts between ranks, to run outside of the body; TypeError if it communicates."""
    same: dict[Var, Any] = {}
    renamed = lambda atoms: [same.get(a, a) if isinstance(a, Var) else a for a in atoms]  # noqa: E731
    equations = []
    for eqn in tape.equations:
        if not eqn.primitive.on_ranks:
            equations.append(Equation(eqn.primitive, renamed(eqn.inputs), eqn.params, eqn.outputs, eqn.source))
        elif eqn.primitive.sends(eqn.params) or not eqn.inputs:
            raise TypeError(f"{name} must not communicate, but it calls {eqn.primitive}: ranks solve separately")
        else:
            same[eqn.outputs[0]] = renamed(eqn.inputs)[0]
    return Tape(tape.inputs, equations, renamed(tape.outputs))


def record(caller: str, f: Callable, *args: Value) -> tuple[Callable, list[Value]]:
    """Record `f` for arrays like these: return a function of (*args, *values), and the values that `f` closes over."""
    tape, _, out_structure = stage_flat(f, args, f"{caller} of {name_of(f)}")
    closed, constants = prune_tape(tape).close()
    closed = _without_casts(closed, f"{name_of(f)}, the function that {caller} calls,")
    traced = [i for i, x in enumerate(constants) if isinstance(x, Tracer)]

    def function(*operands: Value) -> Any:
        fixed = list(constants)
        for i, x in zip(traced, operands[len(args) :]):
            fixed[i] = convert(x, constants[i].dtype)
        return tree.unflatten(out_structure, closed(*fixed, *operands[: len(args)]))

    # Integers have no cotangents: as numbers they have zeros.
    values = [constants[i] for i in traced]
    return function, [x if is_differentiable(typeof(x).dtype) else convert(x, float) for x in values]


def close(caller: str, f: Callable, *args: Value) -> tuple[Callable, list[Value], list[Value]]:
    """Turn what `f` closes over into arguments: a function of (*args, *values), the args, and the values.

    All of these vary over the same ranks, since SciPy chooses its steps from all of them together.
    """
    function, values = record(caller, f, *args)
    values = [*args, *values]
    values = [cast_to(x, states) for x, states in zip(values, common_states(tuple(map(states_of, values))))]
    return function, values[: len(args)], values[len(args) :]


def refuse_options(caller: str, options: dict[str, Any]) -> None:
    """Raise TypeError for a SciPy option that is traced or not supported; remove the latter if None or False."""
    for option, value in options.items():
        if traced := [x for x in tree.leaves(value) if isinstance(x, Tracer)]:
            raise TypeError(
                f"{caller}: {option}= must be plain, since SciPy reads it, and the result does not depend on it; got a "
                f"traced value of type {typeof(traced[0])}: close over a plain one, or use jit's static_argnames"
            )
    advice = suggestions("options of scipy")[caller]
    for option in advice.keys() & options.keys():
        if (value := options.pop(option)) is not None and value is not False:
            raise TypeError(f"{caller}: {option}= is not supported: {advice[option]}")


def over_stacks(f: Callable, signature: str, ndim: int = 2) -> Callable:
    """Apply a function of SciPy to stacks of matrices, or of arrays of `ndim` dimensions; stacks broadcast."""

    def impl(*arrays: numpy.ndarray, **params: Any) -> numpy.ndarray:
        each, dtype = functools.partial(f, **params), numpy.result_type(*arrays)
        if all(x.ndim == ndim for x in arrays):
            return numpy.asarray(each(*arrays)).astype(dtype, copy=False)
        return numpy.vectorize(each, otypes=[dtype], signature=signature)(*arrays)

    return impl
