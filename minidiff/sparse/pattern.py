"""Sparsity: which elements of the results of a program depend on which elements of its inputs.

One walk over a tape computes it. A value is either known, as constants and loop counters are, or has a `Pattern`. An
operation tells which elements of its operands each element of its result depends on (`Dependence`):

- An elementwise operation depends on the elements that NumPy's broadcasting aligns, where the derivative is not zero.
- An operation with the trait `moves` says it of element numbers: it runs on them.
- An operation that is linear in the operand, with all others known, says it by its matrix, if that is small.
- For all others it is the rule `sharding`, of dimensions: elements depend on those with the same index in the
  dimensions that correspond, and on all along the other ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy

from minidiff.control_flow.cond import Cond
from minidiff.control_flow.loops import Scan
from minidiff.control_flow.while_loop import While
from minidiff.core.interpreter import EVALUATE, running
from minidiff.core.ranks import ranks
from minidiff.core.tape import Atom, Equation, Tape, read
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.errors.location import warn_at
from minidiff.ops.base import Differentiable, Discrete, Linear, Promoting
from minidiff.ops.dimensions import Dimensions, axiswise, cumulative, gather
from minidiff.ops.elementwise import where_p
from minidiff.values.dtypes import is_differentiable
from minidiff.values.lists import split_list

#: The largest matrix of an operation, in elements, that is computed to see where it is zero.
LARGEST_MATRIX = 1 << 24


class Dependence(NamedTuple):
    """Pairs of elements, by number: the result's, and the operand's that it depends on."""

    out: numpy.ndarray
    operand: numpy.ndarray


class Pattern:
    """The inputs that each element of an array depends on: `columns[starts[i] : starts[i + 1]]`, in order."""

    def __init__(self, rows: numpy.ndarray, columns: numpy.ndarray, size: int, count: int):
        """Make the pattern of `size` elements from pairs of a row and a column, of which there are `count`."""
        keys = numpy.sort(rows * count + columns, kind="stable")  # they are almost in order
        keys = keys[numpy.diff(keys, prepend=-1) > 0]
        rows, self.columns = numpy.divmod(keys, max(count, 1))
        self.size, self.count = size, count
        self.starts = numpy.searchsorted(rows, numpy.arange(size + 1))

    @property
    def rows(self) -> numpy.ndarray:
        return numpy.repeat(numpy.arange(self.size), numpy.diff(self.starts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and all(
            numpy.array_equal(x, y) for x, y in ((self.starts, other.starts), (self.columns, other.columns))
        )

    __hash__ = None  # type: ignore[assignment]

    def through(self, dependence: Dependence) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return the pairs of a row and a column of an operation's result, if this is its operand's pattern."""
        counts = numpy.diff(self.starts)[dependence.operand]
        ends = numpy.cumsum(counts)
        steps = numpy.arange(ends[-1] if len(ends) else 0) - numpy.repeat(ends - counts, counts)
        return (
            numpy.repeat(dependence.out, counts),
            self.columns[numpy.repeat(self.starts[dependence.operand], counts) + steps],
        )

    def part(self, start: int, size: int) -> Pattern:
        """Return the pattern of `size` elements from `start` on."""
        return self.union([self.through(Dependence(numpy.arange(size), start + numpy.arange(size)))], size)

    def union(self, pairs: Sequence[tuple[numpy.ndarray, numpy.ndarray]], size: int) -> Pattern:
        """Return the pattern of these pairs, for the same inputs."""
        if not pairs:
            return Pattern(_NONE, _NONE, size, self.count)
        rows, columns = map(numpy.concatenate, zip(*pairs))
        return Pattern(rows, columns, size, self.count)


_NONE = numpy.zeros(0, int)

#: A known value, or the pattern of one that is not known.
Knowledge = Any


class PatternWalk:
    """A walk over a tape, for patterns of `count` columns."""

    def __init__(self, count: int):
        self.independent = Pattern(_NONE, _NONE, 0, count)

    def follow(self, tape: Tape, inputs: Sequence[Knowledge]) -> list[Knowledge]:
        """Return what is known of a tape's outputs."""
        env: dict[Var, Knowledge] = dict(zip(tape.inputs, inputs))
        for equation in tape.equations:
            operands = [read(env, a) for a in equation.inputs]
            env.update(zip(equation.outputs, self.apply(equation, operands)))
        return [read(env, a) for a in tape.outputs]

    def apply(self, equation: Equation, operands: Sequence[Knowledge]) -> Sequence[Knowledge]:
        primitive, params = equation.primitive, equation.params
        if not (any(isinstance(x, Pattern) for x in operands) or primitive.on_ranks or primitive.has_effect):
            with running(EVALUATE), numpy.errstate(all="ignore"):
                out = primitive.bind(*operands, **params)
            return out if primitive.multiple_results else [out]
        if isinstance(primitive, Cond):
            return self.follow_cond(primitive, equation, operands)
        if isinstance(primitive, Scan):
            return self.follow_scan(equation, operands)
        if isinstance(primitive, While):
            return self.follow_while(params, operands)
        if (tape := ranks.record_whole(equation)) is not None:
            return self.follow(tape, operands)
        if primitive.is_higher_order and len(equation.bodies) == 1 and _takes(equation.bodies[0], equation):
            return self.follow(equation.bodies[0], operands)
        return self.follow_operation(equation, operands)

    def inputs(self, start: int | None, type: ShapedArray) -> Pattern:
        """Return the pattern of an input whose columns begin with `start`; None for one that has no columns."""
        rows = numpy.arange(0 if start is None else type.size)
        return self.independent.union([(rows, rows + (start or 0))], type.size)

    # ------------------------------------------------ operations

    def follow_operation(self, equation: Equation, operands: Sequence[Knowledge]) -> list[Pattern]:
        pairs: list[list] = [[] for _ in equation.outputs]
        for i, x in enumerate(operands):
            if isinstance(x, Pattern) and len(x.columns):
                for n, dependence in enumerate(self.dependences(equation, i, operands)):
                    if dependence is not None:
                        pairs[n].append(x.through(dependence))
        return [self.independent.union(some, v.type.size) for some, v in zip(pairs, equation.outputs)]

    def dependences(self, equation: Equation, i: int, operands: Sequence[Knowledge]) -> Iterator[Dependence | None]:
        """Yield, for each result, how it depends on operand `i`; None if its derivative is zero."""
        primitive, operand, outs = equation.primitive, typeof(equation.inputs[i]), [v.type for v in equation.outputs]
        if not is_differentiable(operand.dtype) or isinstance(primitive, Discrete):
            yield from [None] * len(outs)
        elif isinstance(primitive, Promoting):
            yield _elementwise(equation, i, operands)
        elif is_moved(equation, i, operands):
            yield from dependences_of_moved(equation, i, operands)
        elif (matrices := _matrices(equation, i, operands)) is not None:
            yield from [Dependence(*numpy.nonzero(matrix)) for matrix in matrices]
        else:
            dimensions = _dimensions(equation)
            for t, labels in zip(outs, dimensions.results):
                pairs = dependence_by_labels(t, operand, labels, dimensions.operands[i])
                yield pairs if is_differentiable(t.dtype) else None

    # ------------------------------------------------ bodies

    def follow_cond(self, cond: Cond, equation: Equation, operands: Sequence[Knowledge]) -> Sequence[Knowledge]:
        selector, *others = operands
        if not isinstance(selector, Pattern):
            return self.follow(equation.bodies[cond.choose(selector)], others)
        first, *rest = [self.follow(branch, others) for branch in equation.bodies]
        for results in rest:
            first = self.merge(first, results, equation.outputs)
        return first

    def follow_scan(self, equation: Equation, operands: Sequence[Knowledge]) -> Sequence[Knowledge]:
        params = equation.params
        body, length = params["body"], params["length"]
        consts, carry, xs = split_list(operands, params["consts"], params["carry"])
        types = [v.type for v in body.inputs[len(consts) + len(carry) :]]
        rows: list[Sequence[Knowledge]] = []
        steps = range(length)
        for step in reversed(steps) if params["reverse"] else steps:
            elements = [x.part(step * t.size, t.size) if isinstance(x, Pattern) else x[step] for x, t in zip(xs, types)]
            carry, ys = split_list(self.follow(body, [*consts, *carry, *elements]), len(carry))
            rows.append(ys)
        rows = rows[::-1] if params["reverse"] else rows
        stacked = [self.stack_steps(column, v.type) for column, v in zip(zip(*rows), equation.outputs[len(carry) :])]
        return [*carry, *(stacked or [self.independent.union([], v.type.size) for v in equation.outputs[len(carry) :]])]

    def follow_while(self, params: dict, operands: Sequence[Knowledge]) -> Sequence[Knowledge]:
        cond, body = params["cond"], params["body"]
        cond_consts, body_consts, carry = split_list(operands, params["cond_consts"], params["body_consts"])
        while True:
            (goes_on,) = self.follow(cond, [*cond_consts, *carry])
            if not isinstance(goes_on, Pattern) and not goes_on:
                return carry
            after = self.follow(body, [*body_consts, *carry])
            if isinstance(goes_on, Pattern):  # it may end after any step: unite the patterns until none grows
                after = self.merge(carry, after, body.outputs)
                if all(map(_is_same, carry, after)):
                    return after
            carry = after

    def merge(self, some: Sequence[Knowledge], others: Sequence[Knowledge], atoms: Sequence[Atom]) -> list[Knowledge]:
        """Return what is known of values that are either these or the others."""
        types = map(typeof, atoms)
        return [x if _is_same(x, y) else self.either(x, y, t) for x, y, t in zip(some, others, types)]

    def either(self, x: Knowledge, y: Knowledge, type: ShapedArray) -> Pattern:
        patterns = [p for p in (x, y) if isinstance(p, Pattern)]
        return self.independent.union([(p.rows, p.columns) for p in patterns], type.size)

    def stack(self, values: Sequence[Knowledge], types: Sequence[ShapedArray]) -> Pattern:
        """Return the pattern of these values one after the other."""
        ends = [0, *itertools.accumulate(t.size for t in types)]
        pairs = [(x.rows + start, x.columns) for x, start in zip(values, ends) if isinstance(x, Pattern)]
        return self.independent.union(pairs, ends[-1])

    def stack_steps(self, column: Sequence[Knowledge], type: ShapedArray) -> Knowledge:
        """Return what is known of the stacked results of a loop's steps."""
        if not any(isinstance(x, Pattern) for x in column):
            return numpy.stack(column)
        return self.stack(column, [type.update(shape=type.shape[1:])] * len(column))


def _is_same(x: Knowledge, y: Knowledge) -> bool:
    if isinstance(x, Pattern) or isinstance(y, Pattern):
        return isinstance(x, Pattern) and x == y
    return numpy.array_equal(x, y, equal_nan=numpy.asarray(x).dtype.kind in "fc")


def _takes(body: Tape, equation: Equation) -> bool:
    """Return whether a body takes an operation's operands, and returns its results."""
    types = [typeof(a) for a in equation.inputs], [v.type for v in equation.outputs]
    return (body.in_types, body.out_types) == types


# ---------------------------------------------------------------- dependences of one operation


def _elementwise(equation: Equation, i: int, operands: Sequence[Knowledge]) -> Dependence | None:
    out, operand = equation.outputs[0].type, typeof(equation.inputs[i])
    factor = _factor(equation, i, operands)
    if factor is None:
        return None
    numbers = numpy.broadcast_to(numpy.arange(operand.size).reshape(operand.shape), out.shape).ravel()
    (rows,) = numpy.nonzero(numpy.broadcast_to(factor, out.shape).ravel())
    return Dependence(rows, numbers[rows])


def _factor(equation: Equation, i: int, operands: Sequence[Knowledge]) -> Any:
    """Return the derivative of an elementwise operation in operand `i`: ones where it is not known, None if zero."""
    primitive, out = equation.primitive, equation.outputs[0].type
    if not is_differentiable(out.dtype):
        return None
    if isinstance(primitive, Differentiable):
        residuals = primitive.residuals(i, len(operands))
        if residuals is None:
            return None
        if any(j == 0 or isinstance(operands[j - 1], Pattern) for j in residuals):
            return numpy.ones(())
        known = [typeof(a) if isinstance(x, Pattern) else x for x, a in zip(operands, equation.inputs)]
        with running(EVALUATE), numpy.errstate(all="ignore"):
            return cast(Any, primitive).term(i, numpy.ones((), out.dtype), out, known, equation.params)
    if primitive is where_p:
        condition = operands[0]
        return numpy.ones(()) if isinstance(condition, Pattern) else numpy.equal(condition, i == 1)
    return numpy.ones(())


def _linear_count(equation: Equation) -> int:
    """Return in how many of its first operands an operation is linear together."""
    count = getattr(equation.primitive, "linear_operands", None)
    return len(equation.inputs) if count is None else count


def is_moved(equation: Equation, i: int, operands: Sequence[Knowledge]) -> bool:
    """Return whether an operation moves the elements of operand `i` to places that are known."""
    count = _linear_count(equation)
    return (
        equation.primitive.moves is not None and i < count and not any(isinstance(x, Pattern) for x in operands[count:])
    )


def dependences_of_moved(equation: Equation, i: int, operands: Sequence[Knowledge]) -> Iterator[Dependence]:
    """Run an operation that moves elements on their numbers, from 1 on."""
    primitive: Any = equation.primitive
    params = equation.params
    types, outs = [typeof(a) for a in equation.inputs], [v.type for v in equation.outputs]
    count = _linear_count(equation)
    number = lambda t: numpy.arange(1.0, t.size + 1).reshape(t.shape)  # noqa: E731
    with running(EVALUATE):
        if primitive.moves == "adds":  # the transpose tells to which element each one is added
            moved = primitive.transpose_rule(number(outs[0]), [*types[:count], *operands[count:]], **params)[i]
            rows = numpy.broadcast_to(moved, types[i].shape).astype(int).ravel() - 1
            (numbers,) = numpy.nonzero(rows >= 0)
            yield Dependence(rows[numbers], numbers)
            return
        zeros = [number(t) if j == i else numpy.zeros(t.shape) for j, t in enumerate(types[:count])]
        results = primitive.bind(*zeros, *operands[count:], **params)
    for moved in results if primitive.multiple_results else [results]:
        numbers = numpy.asarray(moved).astype(int).ravel()
        (rows,) = numpy.nonzero(numbers)
        yield Dependence(rows, numbers[rows] - 1)


def _matrices(equation: Equation, i: int, operands: Sequence[Knowledge]) -> list[numpy.ndarray] | None:
    """Return the matrices of an operation that is linear in operand `i`, whose other operands are known.

    None if it is not, or they would be large.
    """
    primitive, operand = equation.primitive, typeof(equation.inputs[i])
    sizes = [v.type.size * operand.size for v in equation.outputs]
    is_linear = primitive.is_linear_in({i}, len(operands)) or (isinstance(primitive, Linear) and len(operands) == 1)
    if (
        not is_linear
        or sum(sizes) > LARGEST_MATRIX
        or any(isinstance(x, Pattern) for x in [*operands[:i], *operands[i + 1 :]])
    ):
        return None
    count, units = operand.size, (1, 1j) if operand.dtype.kind == "c" else (1,)
    basis = numpy.concatenate([numpy.eye(count, dtype=operand.dtype) * unit for unit in units])
    basis = basis.reshape(-1, *operand.shape)
    batched = [j == i for j in range(len(operands))]
    with running(EVALUATE), numpy.errstate(all="ignore"):
        out = primitive.batch([basis if b else x for x, b in zip(operands, batched)], batched, equation.params)
    results = out if primitive.multiple_results else [out]
    return [numpy.any(numpy.reshape(x, (len(units), count, -1)), axis=0).T for x in results]


def _dimensions(equation: Equation) -> Dimensions:
    """Return the dimensions that correspond; warn if the operation has no rule for them."""
    rule = equation.primitive.sharding
    if rule is None or rule is gather:
        message = f"sparsity: {equation.primitive} has no rule, so all of its results depend on all of its operands"
        warn_at(equation.source, message, UserWarning)
    if rule is cumulative:
        rule = axiswise("axis")
    return (rule or gather)([typeof(a) for a in equation.inputs], [v.type for v in equation.outputs], equation.params)


def dependence_by_labels(out: ShapedArray, operand: ShapedArray, out_labels: Sequence, labels: Sequence) -> Dependence:
    """Pair the elements with equal indices in the dimensions with equal labels, and all along the others."""
    common = [None if label is None or label not in out_labels else out_labels.index(label) for label in labels]
    free = [d for d, j in enumerate(common) if j is None]
    space = (*out.shape, *[operand.shape[d] for d in free])
    strides = [math.prod(operand.shape[d + 1 :]) for d in range(operand.ndim)]
    numbers: Any = numpy.zeros((), int)
    for d, j in enumerate(common):
        axis = j if j is not None else out.ndim + free.index(d)
        index = numpy.arange(operand.shape[d]) * strides[d]
        numbers = numbers + index.reshape([-1 if a == axis else 1 for a in range(len(space))])
    rows = numpy.arange(out.size).reshape((*out.shape, *[1] * len(free)))
    return Dependence(numpy.broadcast_to(rows, space).ravel(), numpy.broadcast_to(numbers, space).ravel())
