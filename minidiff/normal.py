"""Normal forms: what transposition brings its results to, and what two tapes are compared in.

Rules are linear and their transposes undo each other, but not word for word: an operand that was broadcast by the
operation itself comes back broadcast beforehand, a sum that kept its axes comes back as a sum and a reshape. Two sets
of rules say what is the same. Those in `SHORTER` are applied to the result of every transposition, so that tapes do not
grow; those in `EXPLICIT` are applied besides when tapes are compared, and write out what operations do by themselves.
All of them leave alone what is used in several places: there, a transpose adds up.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy

from minidiff.control import scan_p
from minidiff.core import Primitive, ShapedArray, Tracer, is_differentiable, typeof
from minidiff.drafts import prune_tape
from minidiff.ops import elementwise, indexing, linalg, reduction, shape
from minidiff.ops.kinds import Linear
from minidiff.optimize import Program, Rule
from minidiff.tape import Atom, Equation, Tape, Var, atom_type, bodies_of

add_p, subtract_p = elementwise.add.primitive, elementwise.subtract.primitive
multiply_p, divide_p = elementwise.multiply.primitive, elementwise.divide.primitive
negative_p, sum_p, mean_p = elementwise.negative.primitive, reduction.sum_p, reduction.mean_p
reshape_p, broadcast_to_p, transpose_p = shape.reshape_p, shape.broadcast_to_p, shape.transpose_p
concatenate_p, split_p, where_p = shape.concatenate_p, shape.split_p, elementwise.where_p
slice_p, unslice_p, matmul_p = indexing.slice_p, indexing.unslice_p, linalg.matmul_p
real_p, imag_p, convert_p = elementwise.real.primitive, elementwise.imag.primitive, elementwise.convert_p

# ---------------------------------------------------------------- rules


def used_once(program: Program, a: Atom, primitive: Primitive) -> Equation | None:
    """The equation that defines `a`, if it is of this operation and `a` is used nowhere else."""
    eqn = program.made_by(a, primitive)
    return eqn if eqn is not None and program.uses[a] <= 1 else None


def _reshaped(program: Program, eqn: Equation) -> Any:
    (x,), to = eqn.inputs, eqn.params["shape"]
    before = used_once(program, x, reshape_p)
    if before is not None:
        return Equation(reshape_p, before.inputs, eqn.params, eqn.outputs)
    return x if atom_type(x).shape == tuple(to) else None


def _transposed(program: Program, eqn: Equation) -> Any:
    (x,), axes = eqn.inputs, eqn.params["axes"]
    before = used_once(program, x, transpose_p)
    if before is not None:
        axes = tuple(before.params["axes"][a] for a in axes)
        return Equation(transpose_p, before.inputs, {"axes": axes}, eqn.outputs)
    return x if axes == tuple(range(len(axes))) else None


def _negated(program: Program, eqn: Equation) -> Any:
    before = used_once(program, eqn.inputs[0], negative_p)
    return before and before.inputs[0]


def _itself(program: Program, eqn: Equation) -> Any:
    return eqn.inputs[0]


def _repeated_once(program: Program, eqn: Equation) -> Any:
    (x,), out = eqn.inputs, eqn.outputs[0].type
    return Equation(reshape_p, [x], {"shape": out.shape}, eqn.outputs) if atom_type(x).size == out.size else None


def _least(shape_: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.dropwhile(lambda n: n == 1, shape_))


def _broadcast_of_reshape(program: Program, eqn: Equation) -> Any:
    """Broadcasting puts axes in front by itself: they need not be put there, nor taken away, before."""
    (x,), to = eqn.inputs, eqn.params["shape"]
    before = used_once(program, x, reshape_p)
    if before is None:
        return None
    of = atom_type(before.inputs[0]).shape
    if _least(of) != _least(atom_type(x).shape) or len(of) > len(to):
        return None
    return Equation(broadcast_to_p, before.inputs, eqn.params, eqn.outputs)


def _sum_over_one(program: Program, eqn: Equation) -> Any:
    """Axes of size 1 are not summed over, but taken away."""
    (x,), t = eqn.inputs, atom_type(eqn.inputs[0])
    axes = tuple(a for a in eqn.params["axes"] if t.shape[a] != 1)
    if axes == eqn.params["axes"] != () or t.dtype != eqn.outputs[0].type.dtype:
        return None
    if axes:
        x = program.add(sum_p, [x], {"axes": axes})
    return Equation(reshape_p, [x], {"shape": eqn.outputs[0].type.shape}, eqn.outputs)


def _unscaled(program: Program, eqn: Equation) -> Any:
    """Arrays of constants that undo each other: a half spectrum's weights, and their reciprocals."""
    for a, b in (eqn.inputs, eqn.inputs[::-1]):
        before = used_once(program, b, multiply_p) if type(a) is numpy.ndarray else None
        for c, x in (before.inputs, before.inputs[::-1]) if before is not None else ():
            if type(c) is numpy.ndarray and isinstance(x, Var) and x.type == eqn.outputs[0].type and (a * c == 1).all():
                return x
    return None


#: What makes tapes shorter: of operations that follow one another, and undo one another.
SHORTER: dict[Primitive, list[Rule]] = {
    reshape_p: [_reshaped],
    transpose_p: [_transposed],
    negative_p: [_negated],
    broadcast_to_p: [_repeated_once, _broadcast_of_reshape],
    sum_p: [_sum_over_one],
    multiply_p: [_unscaled],
}


def _broadcast_before(program: Program, eqn: Equation) -> Any:
    """What an operation would broadcast, or convert, is broadcast or converted before it. (Numbers stay.)"""
    return _changed(eqn, [_as_type(program, a, eqn.outputs[0].type) for a in eqn.inputs])


def _as_type(program: Program, a: Atom, to: ShapedArray) -> Atom:
    if isinstance(a, Var) and a.type.dtype != to.dtype:
        a = program.add(convert_p, [a], {"dtype": to.dtype})
    if isinstance(a, Var) and a.type.shape != to.shape:
        a = program.add(broadcast_to_p, [a], {"shape": to.shape})
    return a


def _changed(eqn: Equation, inputs: list[Atom]) -> Equation | None:
    """The equation with other operands, if they are others."""
    if all(a is b for a, b in zip(inputs, eqn.inputs)):
        return None
    return Equation(eqn.primitive, inputs, eqn.params, eqn.outputs)


def _difference(program: Program, eqn: Equation) -> Any:
    x, y = eqn.inputs
    if not isinstance(y, Var):
        return None
    return Equation(add_p, [x, program.add(negative_p, [y], {})], eqn.params, eqn.outputs)


def _without_leading_ones(program: Program, eqn: Equation) -> Any:
    """Axes of size 1 in front of those that broadcasting puts there are taken away before."""
    (x,), least = eqn.inputs, _least(atom_type(eqn.inputs[0]).shape)
    if atom_type(x).shape == least:
        return None
    return Equation(broadcast_to_p, [program.add(reshape_p, [x], {"shape": least})], eqn.params, eqn.outputs)


def _sum_then_reshape(program: Program, eqn: Equation) -> Any:
    if not eqn.params.get("keepdims"):
        return None
    x = program.add(sum_p, eqn.inputs, {"axes": eqn.params["axes"]})
    return Equation(reshape_p, [x], {"shape": eqn.outputs[0].type.shape}, eqn.outputs)


def _mean(program: Program, eqn: Equation) -> Any:
    total, whole = program.add(sum_p, eqn.inputs, eqn.params), atom_type(eqn.inputs[0])
    count = math.prod([whole.shape[a] for a in eqn.params["axes"]])
    return Equation(divide_p, [total, count], {}, eqn.outputs)


def _parts(t: ShapedArray, sizes: Sequence[int], axis: int) -> list[tuple]:
    """The indices of consecutive parts of an array of type `t`."""
    ends = itertools.pairwise([0, *itertools.accumulate(sizes)])
    return [tuple(slice(*part) if d == axis else slice(None) for d in range(t.ndim)) for part in ends]


def _sum_of_parts(program: Program, eqn: Equation) -> Any:
    """Arrays are joined as they are added up, each with zeros where the others are."""
    (out,), axis = eqn.outputs, eqn.params["axis"]
    types = [atom_type(a) for a in eqn.inputs]
    if any(t.dtype != out.type.dtype for t in types):
        return None
    indices = _parts(out.type, [t.shape[axis] for t in types], axis)
    parts = [program.add(unslice_p, [a], {"index": i, "shape": out.type.shape}) for a, i in zip(eqn.inputs, indices)]
    return functools.reduce(lambda x, y: program.add(add_p, [x, y], {}), parts)


def _slices(program: Program, eqn: Equation) -> Any:
    (x,), (sizes, axis) = eqn.inputs, (eqn.params["sizes"], eqn.params["axis"])
    return [program.add(slice_p, [x], {"index": i}) for i in _parts(atom_type(x), sizes, axis)]


def _where_or_zero(program: Program, eqn: Equation) -> Any:
    """One of two values, here this and there that one: the sum of each where it is, and zero elsewhere."""
    (condition, *two), (out,) = eqn.inputs, eqn.outputs
    if not is_differentiable(out.type.dtype):
        return None
    x, y = [_as_type(program, a, out.type) for a in two]
    if isinstance(x, Var) and isinstance(y, Var):
        parts = [program.add(where_p, [condition, *operands], {}) for operands in ((x, 0.0), (0.0, y))]
        return Equation(add_p, parts, {}, eqn.outputs)
    if isinstance(x, Var) or isinstance(y, Var):  # which has the type of the result: zeros need not
        x, y = [0.0 if type(a) is numpy.ndarray and not a.any() else a for a in (x, y)]
    return _changed(eqn, [condition, x, y])


def _real_part(program: Program, eqn: Equation) -> Any:
    (x,), (out,) = eqn.inputs, eqn.outputs
    if atom_type(x) == out.type:
        return x
    return Equation(convert_p, eqn.inputs, {"dtype": out.type.dtype}, eqn.outputs)


def _imaginary_part(program: Program, eqn: Equation) -> Any:
    if atom_type(eqn.inputs[0]).dtype.kind != "c":
        return None
    turned = program.add(multiply_p, [*eqn.inputs, -1j], {})
    return Equation(convert_p, [turned], {"dtype": eqn.outputs[0].type.dtype}, eqn.outputs)


def _product_with_vector(program: Program, eqn: Equation) -> Any:
    """A product with a vector is one number by number, and a sum."""
    (x, y), (out,) = eqn.inputs, eqn.outputs
    if not (is_differentiable(out.type.dtype) and 1 in (atom_type(x).ndim, atom_type(y).ndim)):
        return None
    if atom_type(y).ndim == 1:
        axis = atom_type(x).ndim - 1
    else:
        axis = atom_type(y).ndim - 2
        x = program.add(reshape_p, [x], {"shape": (atom_type(x).size, 1)})
    return Equation(sum_p, [program.add(multiply_p, [x, y], {})], {"axes": (axis,)}, eqn.outputs)


def _shared_by_all_steps(program: Program, eqn: Equation) -> Any:
    """A carry that each step of a loop hands on as it is: a value that all steps share."""
    params, body = eqn.params, eqn.params["body"]
    n, m = params["consts"], params["carry"]
    shared = {n + k for k in range(m) if body.outputs[k] is body.inputs[n + k] and isinstance(eqn.inputs[n + k], Var)}
    if not shared:
        return None
    order = sorted(range(len(eqn.inputs)), key=lambda i: n if i in shared else i + (i >= n))
    changing = [k for k in range(len(eqn.outputs)) if n + k not in shared]
    tape = Tape([body.inputs[i] for i in order], body.equations, [body.outputs[k] for k in changing])
    new = {**params, "body": tape, "consts": n + len(shared), "carry": m - len(shared)}
    if changing:
        inputs, outputs = [eqn.inputs[i] for i in order], [eqn.outputs[k] for k in changing]
        program.results(Equation(scan_p, inputs, new, outputs, eqn.source))
    return [eqn.inputs[n + k] if n + k in shared else v for k, v in enumerate(eqn.outputs)]


#: What writes out what operations do by themselves.
EXPLICIT: dict[Primitive, list[Rule]] = {
    **SHORTER,
    add_p: [_broadcast_before],
    subtract_p: [_broadcast_before, _difference],
    multiply_p: [*SHORTER[multiply_p], _broadcast_before],
    divide_p: [_broadcast_before],
    broadcast_to_p: [_repeated_once, _without_leading_ones],
    sum_p: [_sum_then_reshape, *SHORTER[sum_p]],
    mean_p: [_mean],
    concatenate_p: [_sum_of_parts],
    split_p: [_slices],
    where_p: [_where_or_zero],
    real_p: [_real_part],
    imag_p: [_imaginary_part],
    matmul_p: [_product_with_vector],
    scan_p: [_shared_by_all_steps],
    elementwise.copy.primitive: [_itself],
}


def shorter(primitive: Primitive) -> Callable[[Rule], Rule]:
    """Declare a rule that makes tapes shorter, of an operation that is declared elsewhere."""

    def register(rule: Rule) -> Rule:
        for rules in (SHORTER, EXPLICIT):
            rules.setdefault(primitive, []).append(rule)
        return rule

    return register


# ---------------------------------------------------------------- rewriting


class Rewriting(Program):
    """A tape as it is rewritten by some rules. What occurs twice stays twice: its transposes are added up."""

    def __init__(self, tape: Tape, rules: dict[Primitive, list[Rule]]):
        super().__init__(tape)
        self.rules = rules

    def results(self, eqn: Equation) -> Sequence[Atom]:
        for rule in self.rules.get(eqn.primitive, ()):
            found = rule(self, eqn)
            if isinstance(found, Equation):
                return self.results(found)
            if found is not None:
                return found if eqn.primitive.multiple_results else [found]
        self.equations.append(eqn)
        self.producer.update((v, eqn) for v in eqn.outputs)
        return eqn.outputs


def rewritten(tape: Tape, rules: dict[Primitive, list[Rule]] = SHORTER) -> Tape:
    """The tape, its bodies too, without what nothing needs, and rewritten by the rules until none applies."""
    while True:
        before = tape.equations
        tape = prune_tape(tape)
        tape.equations = [_body_rewritten(e, rules) if bodies_of(e) else e for e in tape.equations]
        tape = prune_tape(Rewriting(tape, rules).simplified())
        if len(before) == len(tape.equations) and all(
            e.primitive is f.primitive and [*map(id, e.inputs)] == [*map(id, f.inputs)]
            for e, f in zip(before, tape.equations)
        ):
            return tape


def _body_rewritten(eqn: Equation, rules: dict[Primitive, list[Rule]]) -> Equation:
    params = {k: rewritten(v, rules) if isinstance(v, Tape) else v for k, v in eqn.params.items()}
    return Equation(eqn.primitive, eqn.inputs, params, eqn.outputs)


# ---------------------------------------------------------------- equality


def same(one: Tape, two: Tape) -> bool:
    """Whether two tapes are the same program: see `Tape.__eq__`."""
    numbers: dict[Hashable, int] = {}
    return _Numbered(numbers).tape(one) == _Numbered(numbers).tape(two)


class _Numbered:
    """Values by number: the same number for the same operation on the same values.

    `numbers` are shared by tapes that are compared. `computed` counts how often each is computed.
    """

    def __init__(self, numbers: dict[Hashable, int]):
        self.numbers = numbers
        self.computed: Counter = Counter()
        self.lying: set[int] = set()  # inputs of a loop's body or a branch that lie on the ranks of a mesh

    def number(self, *key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def zero(self, t: ShapedArray) -> int:
        return self.number("zero", t)

    def tape(self, tape: Tape) -> Hashable:
        """What the tape computes, and how often it computes each value on the way."""
        inputs = [self.number("input", i, t) for i, t in enumerate(tape.in_types)]
        outputs = self.outputs(rewritten(tape, EXPLICIT), inputs)
        return tuple(tape.in_types), tuple(tape.out_types), tuple(outputs), frozenset(self.computed.items())

    def body(self, tape: Tape) -> Hashable:
        """The same of a tape in an operation's parameters, whose inputs lie as that operation has them."""
        self.lying = {self.number("input", i, v.type) for i, v in enumerate(tape.inputs) if v.type.layout is not None}
        return self.tape(tape)

    def outputs(self, tape: Tape, inputs: Sequence[int]) -> list[int]:
        """The numbers of a rewritten tape's outputs, from those of its inputs."""
        env = dict(zip(tape.inputs, inputs))
        uses = Counter(a for atoms in [tape.outputs, *[e.inputs for e in tape.equations]] for a in atoms
                       if isinstance(a, Var))  # fmt: skip
        terms: dict[Var, list[int]] = {}  # of sums that are only a part of one other sum
        parts = {
            a
            for e in tape.equations
            if e.primitive is add_p
            for a in e.inputs
            if isinstance(a, Var) and uses[a] == 1 and a.type == e.outputs[0].type
        }

        def read(a: Atom) -> int:
            return env[a] if isinstance(a, Var) else self.constant(a)

        for eqn in tape.equations:
            if eqn.primitive is add_p:
                (out,) = eqn.outputs
                summed = []
                alike = all(a.type == out.type for a in eqn.inputs if isinstance(a, Var))
                for a in eqn.inputs:
                    found = terms[a] if isinstance(a, Var) and a in terms else [read(a)]
                    summed += [n for n in found if not (alike and n == self.zero(atom_type(a)))]
                if out in parts:
                    terms[out] = summed
                else:
                    env[out] = self.sum(out.type, summed)
            else:
                env.update(zip(eqn.outputs, self.results(eqn, [read(a) for a in eqn.inputs])))
        return [read(a) for a in tape.outputs]

    def sum(self, t: ShapedArray, terms: list[int]) -> int:
        if len(terms) < 2:
            return terms[0] if terms else self.zero(t)
        number = self.number("sum", t, *sorted(terms))
        self.computed[number] += 1
        return number

    def results(self, eqn: Equation, operands: list[int]) -> list[int]:
        p, types = eqn.primitive, [v.type for v in eqn.outputs]
        if p.each is not None:
            alone = [Equation(p.each, [a], eqn.params, [v]) for a, v in zip(eqn.inputs, eqn.outputs)]
            return [n for e, operand in zip(alone, operands) for n in self.results(e, [operand])]
        boundary = p.boundary(eqn.params)
        if boundary is not None:
            return self.through(eqn, operands, *boundary)
        if isinstance(p, Linear) and p.linear_operands is None and self._all_zero(eqn, operands):
            return [self.zero(t) for t in types]
        params = eqn.params
        if p is multiply_p:
            operands = sorted(operands)
        if p is scan_p:
            params, operands = _in_order(params, operands)
        number = self.number(p, self.param(params), *operands, *types)
        self.computed[number] += 1
        return [self.number("result", number, k) for k in range(len(types))]

    def _all_zero(self, eqn: Equation, operands: list[int]) -> bool:
        return bool(operands) and all(n == self.zero(atom_type(a)) for n, a in zip(operands, eqn.inputs))

    def through(self, eqn: Equation, operands: list[int], ways_in: Sequence, ways_out: Sequence) -> list[int]:
        """Results of a body that is run once: neither the order of operands nor that of results means anything."""
        body = eqn.params["body"]
        others = {k: v for k, v in eqn.params.items() if not any(v is x for x in (body, ways_in, ways_out))}
        rest = eqn.primitive, self.param(others)
        blocks = [
            self.zero(v.type) if n == self.zero(atom_type(a)) else self.number("in", *rest, way, n)
            for v, a, n, way in zip(body.inputs, eqn.inputs, operands, ways_in)
        ]
        operand_of = {(v, way): n for v, n, way in zip(body.inputs, operands, ways_in)}
        results, found = [], []
        for v, a, n, way in zip(eqn.outputs, body.outputs, self.outputs(body, blocks), ways_out):
            same = operand_of.get((a, way)) if isinstance(a, Var) else None
            # What lies on ranks is taken in as it lies: it came out of another such body, or is handed on by a loop.
            if same in self.lying or ("lies", *rest, way, same) in self.numbers:
                results.append(same)
            elif n == self.zero(atom_type(a)):
                results.append(self.zero(v.type))
            else:
                results.append(self.number("out", *rest, way, n))
                found.append(results[-1])
                if v.type.layout is not None:
                    self.number("lies", *rest, way, results[-1])
        found.sort()
        if found:
            self.computed[self.number("body", *rest, *found)] += 1
        return results

    def constant(self, a: Any) -> int:
        if isinstance(a, ShapedArray):
            return self.number("no value", a)
        if isinstance(a, Tracer):
            return self.number("traced", id(a))
        x = numpy.asarray(a)
        data = x.tobytes()
        if x.dtype.kind in "iufc" and data.count(0) == len(data):  # -0.0 is another number
            return self.zero(typeof(a))
        return self.number("constant", typeof(a), data)

    def param(self, value: Any) -> Hashable:
        """A parameter as a part of a key; its type is a part of it too, since 1 == True == 1.0."""
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(self.param, value))
        if isinstance(value, dict):
            return tuple([(k, self.param(value[k])) for k in sorted(value)])
        if isinstance(value, slice):
            return slice, value.start, value.stop, value.step
        if isinstance(value, Tape):
            return _Numbered(self.numbers).body(value)
        if isinstance(value, numpy.ndarray):
            return self.constant(value)
        if hasattr(value, "same_as"):  # a function made anew for each call of one with a rule (`custom.py`)
            return self.param(value.same_as)
        try:
            hash(value)
        except TypeError:
            return id(value)
        return type(value), value


def _in_order(params: dict, operands: list[int]) -> tuple[dict, list[int]]:
    """A loop's parameters and operands, with those that all steps share in the order of their numbers."""
    n, body = params["consts"], params["body"]
    order = [*sorted(range(n), key=lambda i: operands[i]), *range(n, len(operands))]
    tape = Tape([body.inputs[i] for i in order], body.equations, body.outputs)
    return {**params, "body": tape}, [operands[i] for i in order]
