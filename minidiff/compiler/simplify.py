"""Rewrite tapes, equation by equation: inline calls, fold constants, merge common subexpressions, apply rules.

`RULES`, at the end of this file, lists the rewrites of this layer, and the layers above have their own `Passes`
(`program.py`). A rewrite has the name of its function: `optimize(tape, without=("merge reshapes",))` leaves it out.

Rules preserve values to the bit, signed zeros, infinities and overflow included, and each states its conditions. (Those
of `collectives` change only the order in which ranks' terms are summed.) `Program.results` checks that a rule preserves
the type: it discards a result of another shape, dtype or variance.

`apply_rules` applies only the rules of this file. Transposition ends with it, and `==` of tapes begins with it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.control_flow.bodies import Call
from minidiff.control_flow.checkpoint import recompute_p
from minidiff.control_flow.dead_code import prune_tape
from minidiff.core.interpreter import EVALUATE, running, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import Scope
from minidiff.core.tape import Atom, Equation, Stage, Tape, with_equations
from minidiff.core.types import ShapedArray, Var, operand_type, typeof
from minidiff.errors.location import Location
from minidiff.errors.other_libraries import module_getattr
from minidiff.ops import elementwise, rearranging, reduction, shape
from minidiff.ops.base import Differential, sum_p
from minidiff.values.dtypes import is_differentiable, is_real_float, is_scalar_constant

#: A rule takes the program so far and an equation, and returns an Atom that replaces its result, an Equation that
#: replaces it (see `Program.results`), or None if it does not apply.
Rule = Callable[["Program", Equation], Any]

#: A pass takes a whole tape, the scope of its `shard_map` (None outside of one), and the settings.
Pass = Callable[[Tape, Scope | None, Mapping[str, Any]], Tape]

COMPARED_BYTES = 1 << 10  # constants of at most this size are one if they are equal
FOLDED_BYTES = 1 << 20  # fold constants into results of at most this size


class Passes(NamedTuple):
    """The rewrites of a layer, in the order in which they run.

    The passes `first` run before the rules, the passes `last` after them. `rules` are the rules for each operation.
    `settings` are the options of passes, such as `bucket_bytes`, with defaults.
    """

    rules: Mapping[Primitive, Sequence[Rule]] = {}
    first: Sequence[Pass] = ()
    last: Sequence[Pass] = ()
    settings: Mapping[str, Any] = {}


def apply_rules(tape: Tape) -> Tape:
    """Apply the `RULES`, and nothing else, to a tape and its bodies.

    Common subexpressions are not merged, and communication stays unchanged.

    >>> from minidiff import make_tape
    >>> print(apply_rules(make_tape(lambda x: -(-x) + x.reshape(6).reshape(2, 3))(numpy.ones((2, 3)))))
    lambda a:f64[2,3]:
      b:f64[2,3] = add(a, a)
      return b
    """
    tape = rewrite_bodies(tape, lambda _, body: apply_rules(body))
    return prune_tape(Program(tape, RULES, merges=False).simplify())


def rewrite_bodies(tape: Tape, rewritten: Callable[[Equation, Tape], Tape]) -> Tape:
    """Rewrite each body of each equation."""

    def changed(eqn: Equation) -> Equation:
        params = {k: rewritten(eqn, v) if isinstance(v, Tape) else v for k, v in eqn.params.items()}
        return Equation(eqn.primitive, eqn.inputs, params, eqn.outputs, eqn.source)

    return with_equations(tape, [changed(eqn) if eqn.bodies else eqn for eqn in tape.equations])


# ---------------------------------------------------------------- inlining calls and derivatives


class Inline(Stage):
    """Record a tape again with calls inlined and derivatives expanded."""

    mapped: tuple[str, ...] = ()  # of a body's axes: all

    def interpret(self, primitive, args, params):
        if isinstance(primitive, Call) and params["body"] is not None:
            return params["body"].apply(*args)
        if primitive.is_higher_order:
            return self.record(primitive, args, params)
        return super().interpret(primitive, args, params)


def inline_calls(tape: Tape, scope: Scope | None = None) -> Tape:
    """Inline the calls on a tape, and expand its derivatives into operations."""
    if not any(isinstance(e.primitive, (Differential, Call)) for e in tape.equations):
        return tape
    stage = Inline(None, name="optimize")
    if scope is not None:
        stage.scope = scope
        scope.bottom = stage
    inputs = [stage.new_input(v.type) for v in tape.inputs]
    with transforming(stage):
        return stage.tape(tape.apply(*inputs))


# ---------------------------------------------------------------- applying rules


class Program:
    """A tape being rewritten, equation by equation."""

    def __init__(self, tape: Tape, rules: Mapping[Primitive, Sequence[Rule]], merges: bool = True):
        self.tape = tape
        self.rules = rules
        self.merges = merges  # whether to fold constants and merge common subexpressions, too
        self.atoms: dict[Var, Atom] = {}  # name on the old tape -> its replacement
        self.producer: dict[Var, Equation] = {}  # name on the new tape -> the equation that defines it
        self.known: dict[Any, Sequence[Atom]] = {}  # operation, operands and parameters -> results
        self.equations: list[Equation] = []
        self.source: Location | None = None  # the source of the equation being rewritten

    def simplify(self) -> Tape:
        for eqn in self.tape.equations:
            self.source = eqn.source
            if self.atoms and not all(map(operator.is_, inputs := self.read(eqn.inputs), eqn.inputs)):
                eqn = Equation(eqn.primitive, inputs, eqn.params, eqn.outputs, eqn.source)
            results = self.results(eqn)
            if results is not eqn.outputs:
                self.atoms.update(zip(eqn.outputs, results))
        return Tape(self.tape.inputs, self.equations, self.read(self.tape.outputs))

    def read(self, atoms: Sequence[Atom]) -> list[Atom]:
        return [self.atoms.get(a, a) if isinstance(a, Var) else a for a in atoms]

    def results(self, eqn: Equation) -> Sequence[Atom]:
        """Return the rewritten results of an equation: names, constants, or new outputs.

        A replacement must have exactly the same types; the result of a rule that changes them is discarded.
        """
        folded = _fold_constants(eqn) if self.merges else None
        if folded is not None and _have_types(folded, eqn.outputs):
            return folded
        for rule in self.rules.get(eqn.primitive, ()):
            replacement = rule(self, eqn)
            if isinstance(replacement, Equation):
                if _have_types(_types_of(replacement.primitive, replacement.inputs, replacement.params), eqn.outputs):
                    return self.results(replacement)
            elif replacement is not None and _have_types([replacement], eqn.outputs):
                return [replacement]
        return self._written(eqn)

    def _written(self, eqn: Equation) -> Sequence[Atom]:
        """Add an equation unless an equal one exists; return the results of either."""
        key = _key(eqn) if self.merges else None
        if key is not None and key in self.known:
            return self.known[key]
        if eqn.source is None:
            eqn.source = self.source
        self.equations.append(eqn)
        for v in eqn.outputs:
            self.producer[v] = eqn
        if key is not None:
            self.known[key] = eqn.outputs
        return eqn.outputs

    def producer_of(self, atom: Atom, primitive: Primitive) -> Equation | None:
        """Return the equation that defines `atom`, if it applies `primitive`; else None."""
        eqn = self.producer.get(atom) if isinstance(atom, Var) else None
        return eqn if eqn is not None and eqn.primitive is primitive else None

    def add(self, primitive: Primitive, inputs: Sequence[Atom], params: dict) -> Atom:
        """Add a simplified equation and return its result."""
        (type,) = _types_of(primitive, inputs, params)
        (out,) = self.results(Equation(primitive, inputs, params, (Var(type),)))
        return out


def _types_of(primitive: Primitive, inputs: Sequence[Atom], params: dict) -> list[ShapedArray]:
    return primitive.typecheck([operand_type(a) for a in inputs], params)


def _have_types(atoms: Sequence[Atom], outputs: Sequence[Var]) -> bool:
    """Return True if atoms, or types, are exactly those of these results."""
    return [*map(typeof, atoms)] == [v.type for v in outputs]


def _fold_constants(eqn: Equation) -> list[Atom] | None:
    """Fold constants: the results of an operation on constants, or None."""
    p = eqn.primitive
    if (
        not eqn.inputs
        or Var in map(type, eqn.inputs)
        or p.shape_rule is None  # it runs a body, or the user's code
        or p.on_ranks
        or p.has_effect
        or any(v.type.variance or v.type.nbytes > FOLDED_BYTES for v in eqn.outputs)
        or not all(is_scalar_constant(a) or type(a) is numpy.ndarray for a in eqn.inputs)
    ):
        return None
    with running(EVALUATE), numpy.errstate(all="ignore"):
        out = p.bind(*eqn.inputs, **eqn.params)
    return list(out) if p.multiple_results else [out]


def _key(eqn: Equation) -> Any:
    """Return the key of a common subexpression; None if it must not be merged."""
    if eqn.primitive.is_higher_order or eqn.primitive.has_effect or eqn.primitive is recompute_p:
        return None
    atoms = tuple([id(a) if type(a) is Var else _constant_key(a) for a in eqn.inputs])
    return eqn.primitive, atoms, key_part(eqn.params) if eqn.params else ()


def _constant_key(a: Any) -> Any:
    """Return a key of a constant: equal short arrays, such as the indices of each step of a loop, are one."""
    if type(a) is numpy.ndarray and a.nbytes <= COMPARED_BYTES and a.dtype.kind != "O":
        return a.dtype, a.shape, a.tobytes()
    return key_part(a) if is_scalar_constant(a) else id(a)


def key_part(value: Any) -> Any:
    """Return a number or parameter as part of a key, with type and sign.

    1 == True == 1.0, and 0.0 == -0.0, but they are different constants.
    """
    if type(value) in (int, str, bool):  # most are, or the entries of a tuple
        return type(value), value
    if type(value) is tuple and {int}.issuperset(map(type, value)):  # as axes and shapes are
        return tuple, value
    if isinstance(value, numpy.generic):
        return type(value), value.tobytes()
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(key_part, value))
    if isinstance(value, dict):
        return tuple([(k, key_part(value[k])) for k in sorted(value)])
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    try:
        hash(value)
    except TypeError:
        return id(value)  # whoever keeps the key keeps the value
    return type(value), value


# ---------------------------------------------------------------- identities

add_p, subtract_p = elementwise.add.primitive, elementwise.subtract.primitive
multiply_p, divide_p = elementwise.multiply.primitive, elementwise.divide.primitive
negative_p = elementwise.negative.primitive


def _number(a: Atom) -> Any:
    """Return the number that all elements of a constant equal to the bit, or None."""
    if isinstance(a, Var):
        return None
    if is_scalar_constant(a):
        return a
    if type(a) is not numpy.ndarray or not 0 < a.nbytes <= FOLDED_BYTES:
        return None
    return a.flat[0] if a.tobytes() == a.flat[0].tobytes() * a.size else None


def drop_broadcasts(program, eqn):
    """Use an operand without its broadcast, and a number for a constant, if the other has the result's shape."""
    for i, j in ((0, 1), (1, 0)):
        a, other = eqn.inputs[i], eqn.inputs[j]
        smaller = _operand_of_broadcast(program, a) if isinstance(a, Var) else _number(a)
        if smaller is None or smaller is a or is_scalar_constant(other):
            continue
        if typeof(other).shape == eqn.outputs[0].type.shape:
            inputs = [smaller, other] if i == 0 else [other, smaller]
            return Equation(eqn.primitive, inputs, eqn.params, eqn.outputs)
    return None


def drop_copies(program, eqn):
    """Drop a copy: no equation writes into a named value, and results are copied at the end."""
    return eqn.inputs[0]


def _orders(eqn: Equation) -> tuple[Sequence[Atom], ...]:
    """Return the operands of an equation, in both orders if it commutes."""
    return (eqn.inputs, eqn.inputs[::-1]) if eqn.primitive.commutes is not None else (eqn.inputs,)


def drop_neutral(program, eqn):
    """x + -0.0, x - 0, x * 1 and x / 1 are x, unless x is complex.

    Complex products and quotients mix real and imaginary parts.
    """
    dtype = eqn.outputs[0].type.dtype
    neutral: float = 0 if eqn.primitive in (add_p, subtract_p) else 1
    if eqn.primitive is add_p and is_real_float(dtype):
        neutral = -0.0  # -0.0 + 0.0 is 0.0
    for x, y in _orders(eqn) if dtype.kind != "c" else ():
        number = _number(y)
        if number is not None and number == neutral and numpy.signbit(number) == numpy.signbit(neutral):
            return x
    return None


def fold_minus_one(program, eqn):
    """x * -1 is -x, where x has the dtype of the result, signed and not complex."""
    dtype = eqn.outputs[0].type.dtype
    for x, y in _orders(eqn) if dtype.kind in "fi" else ():
        number = _number(y)
        if number is not None and number == -1 and typeof(x).dtype == dtype:
            return Equation(negative_p, [x], eqn.params, eqn.outputs)
    return None


def fold_negations(program, eqn):
    """x + (-y) is x - y, and x - (-y) is x + y, if y has the result's dtype.

    A smaller dtype could wrap around.
    """
    other = subtract_p if eqn.primitive is add_p else add_p
    for x, y in _orders(eqn):
        negated = program.producer_of(y, negative_p)
        if negated is not None and negated.outputs[0].type.dtype == eqn.outputs[0].type.dtype:
            return Equation(other, [x, negated.inputs[0]], eqn.params, eqn.outputs)
    return None


def drop_double_negations(program, eqn):
    """-(-x) is x, also for integers, which wrap around."""
    negated = program.producer_of(eqn.inputs[0], negative_p)
    return negated and negated.inputs[0]


def drop_identity_reshapes(program, eqn):
    """Drop a reshape or broadcast to the shape that the operand has."""
    return eqn.inputs[0]


def merge_reshapes(program, eqn):
    """Merge two reshapes into one, to the last shape."""
    before = program.producer_of(eqn.inputs[0], eqn.primitive)
    return before and Equation(eqn.primitive, before.inputs, eqn.params, eqn.outputs)


def merge_transposes(program, eqn):
    """Drop an identity transpose; merge two transposes into one."""
    axes = eqn.params["axes"]
    if axes == tuple(range(len(axes))):
        return eqn.inputs[0]
    before = program.producer_of(eqn.inputs[0], shape.transpose_p)
    if before is None:
        return None
    return Equation(eqn.primitive, before.inputs, {"axes": tuple(before.params["axes"][a] for a in axes)}, eqn.outputs)


def merge_rolls(program, eqn):
    """Merge two rolls into one, which a loop reads through: the corners of a stencil are rolled along two axes."""
    before = program.producer_of(eqn.inputs[0], rearranging.roll_p)
    if before is None:
        return None
    shifts = Counter()  # by axis
    for roll in (before, eqn):
        for shift, axis in zip(roll.params["shifts"], roll.params["axes"]):
            shifts[axis] += shift
    return Equation(eqn.primitive, before.inputs, {"shifts": (*shifts.values(),), "axes": (*shifts,)}, eqn.outputs)


def _operand_of_broadcast(program, a):
    """Return the operand of a broadcast, or of a reshape that broadcasting can do, or None."""
    eqn = program.producer.get(a) if isinstance(a, Var) else None
    if eqn is None or eqn.primitive not in (shape.broadcast_to_p, shape.reshape_p):
        return None
    (x,) = eqn.inputs
    if eqn.primitive is shape.broadcast_to_p:
        return x
    sizes = [tuple(itertools.dropwhile(lambda n: n == 1, typeof(y).shape)) for y in (x, a)]
    return x if sizes[0] == sizes[1] else None


def fold_reshape_into_sum(program, eqn):
    """Use a sum's `keepdims` instead of a reshape that adds or drops summed axes."""
    before = program.producer_of(eqn.inputs[0], sum_p)
    for params in ({}, {"keepdims": True}) if before is not None else ():
        params = {"axes": before.params["axes"], **params}
        if _types_of(sum_p, before.inputs, params) == [eqn.outputs[0].type]:
            return Equation(sum_p, before.inputs, params, eqn.outputs)
    return None


def recognize_means(program, eqn):
    """Replace a sum that is divided by its number of terms by a mean."""
    x, y = eqn.inputs
    before = program.producer_of(x, sum_p)
    if before is None or not is_differentiable(typeof(before.inputs[0]).dtype):
        return None
    sizes = typeof(before.inputs[0]).shape
    if _number(y) != math.prod([sizes[a] for a in before.params["axes"]]):
        return None
    return Equation(reduction.mean_p, before.inputs, before.params, eqn.outputs)


#: The rules for each operation, in the order in which they are tried.
RULES: dict[Primitive, tuple[Rule, ...]] = {
    add_p: (drop_broadcasts, drop_neutral, fold_negations),
    subtract_p: (drop_broadcasts, drop_neutral, fold_negations),
    multiply_p: (drop_broadcasts, drop_neutral, fold_minus_one),
    divide_p: (drop_broadcasts, drop_neutral, recognize_means),
    negative_p: (drop_double_negations,),
    elementwise.copy.primitive: (drop_copies,),
    shape.reshape_p: (drop_identity_reshapes, merge_reshapes, fold_reshape_into_sum),
    shape.broadcast_to_p: (drop_identity_reshapes,),
    shape.transpose_p: (merge_transposes,),
    rearranging.roll_p: (merge_rolls,),
}


#: Names of this module that moved.
__getattr__ = module_getattr(
    __name__, moved={name: f"minidiff.compiler.program.{name}" for name in ("optimize", "rewrites")}
)
