"""Staging: run a function on types alone, and record it on a tape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from minidiff import tree
from minidiff.core.interpreter import EVALUATE, Interpreter, current_interpreter, name_of, running, transforming
from minidiff.core.ranks import ranks
from minidiff.core.tape import Recorder, Tape
from minidiff.core.types import ShapedArray, typeof
from minidiff.diagnostics.interrupts import restores_interpreter
from minidiff.diagnostics.location import LONG, begins, warn_of_loop
from minidiff.inputs.aliasing import frozen
from minidiff.inputs.arguments import as_value, check_function, result_values
from minidiff.inputs.global_random import random_state, warn_if_random
from minidiff.inputs.keywords import transformation
from minidiff.inputs.promotion import are_weak, weak_where

#: Whether tapes have the steps of a scan one by one, as they run where nothing is recorded: for reports of that.
unrolling: ContextVar[bool] = ContextVar("unrolling", default=False)


class Stage(Recorder):
    """Record every operation. Values are variables with a type and no data."""

    keeps_sources = True

    def __init__(self, below: Interpreter | None, outer: Interpreter | None = None, name: str = "make_tape"):
        super().__init__(below, outer)
        self.name = name
        self.next_look = LONG  # at this number of equations, check whether a Python loop creates them
        self.program = program_around(below or outer)

    def interpret(self, primitive, args, params):
        if primitive.is_higher_order:
            return primitive.stage_body(self, args, params)
        out = ranks.dispatch(self, primitive, args, params)
        return self.record(primitive, args, params) if out is None else out

    def end(self):
        super().end()
        self.program = None  # perhaps itself

    def atom(self, x):
        a = super().atom(x)
        return a if self.program is None else frozen(a)

    def record(self, primitive, args, params):
        out = super().record(primitive, args, params)
        if len(self.equations) == self.next_look:
            warned = not unrolling.get() and warn_of_loop([eqn.source for eqn in self.equations])
            self.next_look = 0 if warned else 2 * self.next_look
        return out


def program_around(interpreter: Interpreter | None) -> Stage | None:
    """The program, whose tape outlives the call, that an interpreter is recording or a part of."""
    while interpreter is not None and not isinstance(interpreter, Stage):
        interpreter = interpreter.below or interpreter.outer
    return interpreter and interpreter.program


#: Why a recorded function should not draw random numbers.
CONSTANTS = "it is recorded once, and what it drew is a constant of the program"


@restores_interpreter
@begins
def stage_flat(f: Callable, examples: tuple, name: str = "make_tape") -> tuple[Tape, tree.Structure, tree.Structure]:
    """Record `f`: return its tape, and the structures of arguments and result."""
    leaves, structure = tree.flatten(examples)
    stage = Stage(current_interpreter(), name=name)
    stage.origin, stage.program = (name, name_of(f)), stage
    inputs = [stage.new_input(x if isinstance(x, ShapedArray) else typeof(as_value(x))) for x in leaves]
    before = random_state()
    with transforming(stage):
        given = weak_where(are_weak(leaves), inputs)
        outs, out_structure = tree.flatten(f(*tree.unflatten(structure, given)))
        origin = name if " of " in name else f"{name} of {name_of(f)}"
        warn_if_random(before, origin, CONSTANTS)
        tape = stage.tape(result_values([origin], outs, out_structure))
    return tape, structure, out_structure


@transformation
def make_tape(f: Callable) -> Callable[..., Tape]:
    """Return a function that records `f`: `make_tape(f)(*args) -> Tape`.

    The arguments are trees of arrays, whose values are ignored, or of :class:`ShapedArray`\\ s. Python numbers promote
    as in NumPy: where one is converted to an array's dtype, the tape has a `convert`. Arrays that `f` closes over are
    constants, with the values that they have when `f` uses them: the tape has one read-only copy of each. Printing the
    tape shows the typed program, with the bodies of `shard_map` indented below their equation.

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

    def tape_of(*args: Any) -> Tape:
        return stage_flat(f, args)[0]

    return tape_of


def scalar_tapes(rule: Callable, count: int) -> list[Tape]:
    """Stage a rule on real scalars, and on complex scalars if the rule accepts them."""
    tapes = []
    for dtype in (float, complex):
        with contextlib.suppress(TypeError), running(EVALUATE):
            tapes.append(make_tape(rule)(*[ShapedArray((), dtype)] * count))
    return tapes


def eval_shape(f: Callable, *args: Any, **kwargs: Any) -> Any:
    """The types of the results of `f(*args, **kwargs)`: a tree of `ShapedArray`s.

    Nothing is computed. The arguments are trees of arrays, whose values are ignored, or of :class:`ShapedArray`\\ s.
    Raise what `f` raises for arguments of these types, and TracerError where it needs a value.

    >>> from minidiff import ShapedArray
    >>> eval_shape(lambda x, w: {'y': x @ w}, ShapedArray((8, 3), 'float32'), ShapedArray((3, 2), 'float32'))
    {'y': f32[8,2]}
    """
    check_function("eval_shape", f)
    name = f"eval_shape of {name_of(f)}"
    tape, _, structure = stage_flat(lambda args, kwargs: f(*args, **kwargs), (args, kwargs), name)
    return tree.unflatten(structure, tape.out_types)
