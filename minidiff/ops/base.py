"""The kinds of primitives, and the rules that each kind supplies.

=========== ============================ ============================ ================================
kind        the author writes            forward mode                 reverse mode
=========== ============================ ============================ ================================
linear      a transpose                  the operation on tangents    the transpose
multilinear a transpose for each operand the sum over operands, one   the transpose in the operand
                                         replaced by its tangent      that carries the tangent
elementwise a derivative per operand     derivative x tangent         derivative x cotangent
general     a tangent, in operations     as written                   the transpose of what it recorded
=========== ============================ ============================ ================================
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from minidiff import ops  # the package: its families import this module, so rules look them up when they run
from minidiff.core import (
    EVALUATE,
    WEAK_TYPES,
    Primitive,
    Recording,
    ShapedArray,
    Value,
    WeakTracer,
    is_scalar_constant,
    python_type,
    running,
    strong,
    typeof,
)
from minidiff.ops import dimensions

if TYPE_CHECKING:
    from minidiff.tape import Tape


def active_key(active: Sequence[bool]) -> int:
    """Encode which operands are active as a key of `Primitive.recorded`."""
    key = 1
    for yes in reversed(active):
        key = 2 * key + yes
    return key


class Linear(Primitive):
    """A primitive that is linear in its operands together.

    With `linear_operands` it is linear in the first that many only; the rest are indices and the like.

    `transpose_rule(ct, operands, **params)` returns a list with a cotangent for each linear operand.
    `batch_rule(primitive, args, batched, **params)` applies the primitive along a leading axis.
    """

    def __init__(self, name, impl, shape_rule, transpose_rule, batch_rule, linear_operands: int | None = None, **rules):
        super().__init__(name, impl, shape_rule, **rules)
        self.transpose_rule = transpose_rule
        self.batch_rule = batch_rule
        self.linear_operands = linear_operands
        if type(self).linearized is Linear.linearized and linear_operands in (None, 1) and not self.multiple_results:
            self.recorded = {0b11: Recording(self, operator.itemgetter(slice(3, 4)))}

    def tangent(self, out, primals, tangents, params):
        n = len(primals) if self.linear_operands is None else self.linear_operands
        if all(t is None for t in tangents[:n]):
            return None
        moved = [zeros_like(p) if t is None else t for p, t in zip(primals[:n], tangents)]
        return self.bind(*moved, *primals[n:], **params)

    def linearized(self, out, type, primals, active, names, params):
        n = len(primals) if self.linear_operands is None else self.linear_operands
        return (self, (*names, *primals[n:]), params) if len(active) == n and active[-1] == n - 1 else None

    def transpose(self, ct, operands, params):
        if self.linear_operands is None:
            return self.transpose_rule(ct, operands, **params)
        others = operands[self.linear_operands :]
        if any(isinstance(x, ShapedArray) for x in others):  # for example an index that depends on a linear input
            return super().transpose(ct, others, params)
        return self.transpose_rule(ct, operands, **params) + [None] * len(others)

    def batch(self, args, batched, params):
        return self.batch_rule(self, args, batched, **params)


class Differentiable(Primitive):
    """A primitive whose tangent sums derivative times tangent over its operands.

    `term(i, t, out, primals, params)` applies the derivative in operand i to a tangent of that operand;
    `cotangent(i, ct, out, primals, type, params)` applies its transpose to a cotangent of the result; `type` is the
    type of the operand. Both return None where the derivative is zero everywhere.
    """

    broadcasts = False  # True if the primitive and its derivative are elementwise

    def reads(self, i: int, count: int) -> set[int] | None:
        """The positions in `(out, *operands)` that the derivative in operand i reads.

        There are `count` operands. None if the derivative is zero.
        """
        raise NotImplementedError

    def tangent(self, out, primals, tangents, params):
        terms = [self.term(i, t, out, primals, params) for i, t in enumerate(tangents) if t is not None]
        return add_all([term for term in terms if term is not None])

    def pull(self, i: int, count: int, tangents: int) -> Callable | None:
        """Compile the cotangent of operand i, before `match`; None if not possible.

        The function takes `(ct, out, *operands, *tangents)`.
        """
        return _compiled_cotangent(self, i, count, tangents) if self.broadcasts else None

    def linearized(self, out, type, primals, active, names, params):
        differential = self._differential(active, len(primals))
        if differential is None:
            return None
        self.recorded[active_key([i in active for i in range(len(primals))])] = Recording(
            differential, differential.keep
        )
        return differential, differential.keep((type, out, *primals, *names)), params

    def _differential(self, active: tuple[int, ...], count: int) -> Differential | None:
        reads = {i: self.reads(i, count) for i in active}
        moving = tuple(i for i in active if reads[i] is not None)
        return Differential(self, active, moving, count, set().union(*[reads[i] for i in moving])) if moving else None


class Differential(Primitive):
    """The derivative of a primitive at given values, in its `active` operands.

    The operands are the primitive's result and operands (the result's type in place of those that the derivative does
    not read), then the tangents. It appears only on linear tapes: when it is applied or transposed, it expands into the
    primitives of the derivative rule.
    """

    operands_agree = False
    takes_types = True

    def __init__(
        self, of: Differentiable, given: tuple[int, ...], active: tuple[int, ...], count: int, reads: set[int]
    ):
        super().__init__(f"d_{of.name}")
        self.of = of
        self.active = active
        self.count = 1 + count  # the number of operands before the tangents
        #: Selects the operands from (the result's type, the result, the operands…, the given tangents…).
        self.keep = operator.itemgetter(
            *[1 + j if j in reads else 0 for j in range(1 + count)], *[2 + count + given.index(i) for i in active]
        )
        pulls = [of.pull(i, count, len(active)) for i in active]
        self.pulls = None if None in pulls else pulls

    def bind(self, *operands: Value, **params) -> Value:
        result, *primals = operands[: self.count]
        tangents = operands[self.count :]
        terms = [self.of.term(i, t, result, primals, params) for i, t in zip(self.active, tangents)]
        return add_all([term for term in terms if term is not None])

    def transpose(self, ct, operands, params):
        result, *primals = operands[: self.count]
        types, cotangent = operands[self.count :], self.of.cotangent
        cts = [cotangent(i, ct, result, primals, t, params) for i, t in zip(self.active, types)]
        return [None] * self.count + cts

    def typecheck(self, types, params):
        return [types[0]]


class Multilinear(Differentiable):
    """A primitive that is linear in each operand separately.

    `transpose_rules[i](ct, operands, **params)` is the transpose in operand i.
    """

    def __init__(self, name, impl, shape_rule, transpose_rules: Sequence[Callable | None], batch_rule, **rules):
        super().__init__(name, impl, shape_rule, **rules)
        self.transpose_rules = transpose_rules
        self.batch_rule = batch_rule

    def reads(self, i, count):
        return {j + 1 for j in range(count) if j != i}

    def term(self, i, t, out, primals, params):
        return self.bind(*primals[:i], t, *primals[i + 1 :], **params)

    def cotangent(self, i, ct, out, primals, type, params):
        return self.transpose_rules[i](ct, [*primals[:i], type, *primals[i + 1 :]], **params)

    def transpose(self, ct, operands, params):
        linear = [i for i, x in enumerate(operands) if isinstance(x, ShapedArray)]
        if len(linear) != 1 or self.transpose_rules[linear[0]] is None:
            return super().transpose(ct, operands, params)
        (i,) = linear
        return [self.transpose_rules[i](ct, operands, **params) if j == i else None for j in range(len(operands))]

    def batch(self, args, batched, params):
        return self.batch_rule(self, args, batched, **params)


class Elementwise(Differentiable):
    """An elementwise primitive, with NumPy's broadcasting.

    `derivatives[i](out, *operands)` is the derivative with respect to operand i, or None where it is
    zero everywhere (comparisons, `sign`, …).
    """

    def __init__(self, name: str, impl: Callable, derivatives: Sequence[Callable | None]):
        super().__init__(name, impl, functools.partial(elementwise_shape, impl), sharding=dimensions.elementwise)
        self.derivatives = derivatives

    broadcasts = True

    def reads(self, i, count):
        return _arguments_read(self.derivatives[i], 1 + count) if self.derivatives[i] else None

    def term(self, i, t, out, primals, params):
        derivative = self.derivatives[i]
        return derivative and broadcast_tangent(ops.elementwise.multiply(derivative(out, *primals), t), out)

    def cotangent(self, i, ct, out, primals, type, params):
        derivative = self.derivatives[i]
        return derivative and match(ops.elementwise.multiply(ct, derivative(out, *primals)), type)

    def batch(self, args, batched, params):
        return bind_aligned(self, args, batched)


class General(Primitive):
    """A primitive with any other derivative.

    `tangent_rule(out, primals, tangents, params)` returns the tangent of the result, written in operations, or None
    where it is zero; `batch_rule` is as for :class:`Linear`.
    """

    def __init__(self, name, impl, shape_rule, tangent_rule: Callable, batch_rule: Callable, **rules):
        super().__init__(name, impl, shape_rule, **rules)
        self.tangent = tangent_rule
        self.batch_rule = batch_rule

    def batch(self, args, batched, params):
        return self.batch_rule(self, args, batched, **params)


# ---------------------------------------------------------------- properties of rules, found by tracing them


def _scalar_tapes(rule: Callable, count: int) -> list[Tape]:
    """Stage a rule on real scalars, and on complex scalars if the rule accepts them."""
    from minidiff.compiler.simplify import optimize  # imported here: these modules import the primitives
    from minidiff.staging import make_tape

    tapes = []
    for dtype in (float, complex):
        with contextlib.suppress(TypeError), running(EVALUATE):
            tapes.append(optimize(make_tape(rule)(*[ShapedArray((), dtype)] * count)))
    return tapes


def _arguments_read(rule: Callable, count: int) -> set[int]:
    """Positions of the arguments that a derivative rule uses, read from its tape."""
    used: set[int] = set()
    for tape in _scalar_tapes(lambda *xs: rule(*xs), count):
        atoms = {id(a) for atoms in (*(e.inputs for e in tape.equations), tape.outputs) for a in atoms}
        used |= {i for i, v in enumerate(tape.inputs) if id(v) in atoms}
    return used


def _compiled_cotangent(primitive: Differentiable, i: int, count: int, tangents: int) -> Callable | None:
    """Compile an elementwise primitive's cotangent in operand i to one function.

    Return None where the rule has cases (real or complex, a literal or a value) or parameters.
    """
    numbers = {2 + j: 1.0 + 0.123 * (j + 1) for j in range(count) if j != i}

    def rule(*args):
        ct, out, *operands = args
        return primitive.cotangent(i, ct, out, operands, typeof(operands[i]), {})

    def rule_of_numbers(*args):
        return rule(*[numbers.get(k, x) for k, x in enumerate(args)])

    functions: dict[str, Any] = {}
    names = {repr(number): f"x{k}" for k, number in numbers.items()}
    tapes = _scalar_tapes(rule, 2 + count)
    sources = {_expression(tape, functions, {}) for tape in tapes}
    sources |= {_expression(tape, functions, names) for tape in _scalar_tapes(rule_of_numbers, 2 + count)[:1]}
    if len(sources) != 1 or None in sources:
        return None
    source, arguments = sources.pop(), [f"x{k}" for k in range(2 + count)]
    frugal = _expression(tapes[0], functions, {}, whole=3 if count == 1 else 2)
    source = f"{frugal} if x0.shape else {source}" if ":=" in frugal else source
    arguments += [f"t{k}" for k in range(tangents)]
    place = f"{__file__}: a cotangent of {primitive.name}"  # tracebacks and warnings then name a file of the library
    return eval(compile(f"lambda {', '.join(arguments)}: {source}", place, "eval"), functions)


_SIGNS = {numpy.add: " + ", numpy.subtract: " - ", numpy.multiply: " * ", numpy.divide: " / "}


def _expression(tape: Tape, functions: dict[str, Any], names: dict[str, str], whole: int = 0) -> str | None:
    """The result of a tape as one Python expression of x0, x1, …

    The functions that it calls are added to `functions`.

    A constant whose text is in `names` is replaced by that name. The first `whole` arguments have the shape of the
    result, and so do values computed from them: their buffers are reused once they have been read.
    """
    texts = {v: f"x{k}" for k, v in enumerate(tape.inputs)}
    wide, made = set(tape.inputs[:whole]), set()
    for k, eqn in enumerate(tape.equations):
        uses = sum(a is v for e in tape.equations for a in e.inputs for v in eqn.outputs)
        if eqn.params or eqn.primitive.impl is None or uses > 1:
            return None
        functions[eqn.primitive.name] = impl = eqn.primitive.impl
        sign = _SIGNS.get(impl)
        arguments = [texts[a] if a in texts else names.get(repr(a), repr(a)) for a in eqn.inputs]
        if "d" * len(arguments) + "->d" in getattr(impl, "types", ()):
            free = [i for i, a in enumerate(eqn.inputs) if a in made and a.type == eqn.outputs[0].type]
            if free:
                arguments[free[0]] = f"(y{k} := {arguments[free[0]]})"
                arguments.append(f"y{k}")
                sign = None
        if not wide.isdisjoint(eqn.inputs):
            wide.update(eqn.outputs)
            made.update(eqn.outputs)
        texts[eqn.outputs[0]] = (
            f"{eqn.primitive.name}({', '.join(arguments)})" if sign is None else f"({sign.join(arguments)})"
        )
    (result,) = tape.outputs
    return texts.get(result)


# ---------------------------------------------------------------- elementwise shapes


def elementwise_shape(impl: Callable, *types: Any) -> tuple[tuple[int, ...], numpy.dtype]:
    """The broadcast shape and NumPy's promoted dtype (Python numbers are weak)."""
    shapes = {t.shape for t in types if type(t) is ShapedArray}
    try:
        shape = shapes.pop() if len(shapes) == 1 else numpy.broadcast_shapes(*shapes)
    except ValueError:
        name = getattr(impl, "__name__", str(impl)).strip("_").removesuffix("_impl")
        raise ValueError(f"{name}: shapes {' and '.join(map(str, shapes))} cannot be broadcast together") from None
    return shape, _result_dtype(impl, *[t.dtype if type(t) is ShapedArray else type(t) for t in types])


def is_elementwise(primitive: Primitive) -> bool:
    """Whether slices of the operands give the same slice of the result."""
    return getattr(primitive.shape_rule, "func", None) is elementwise_shape


@functools.cache
def _result_dtype(impl: Callable, *dtypes: Any) -> numpy.dtype:
    operands = [numpy.ones(1, d) if isinstance(d, numpy.dtype) else d(1) for d in dtypes]
    with numpy.errstate(all="ignore"):
        return numpy.asarray(impl(*operands)).dtype


def promoted(primitive: Primitive, args: Sequence[Value]) -> list[Value]:
    """Convert traced Python numbers among operands to NumPy's promoted dtype."""
    values = list(map(strong, args))
    if not is_elementwise(primitive) or all(type(x) in WEAK_TYPES for x in args):
        return values
    given = [python_type(x) if type(x) in WEAK_TYPES else x.dtype for x in args]
    dtypes = _converted_to(primitive.impl, *given)
    # A ufunc raises for an integer that its dtype cannot hold; np.where wraps it around.
    is_ufunc = isinstance(primitive.impl, numpy.ufunc)
    converted = ops.elementwise.convert_number if is_ufunc else ops.elementwise.convert
    return [converted(x, t) if type(y) is WeakTracer and t is not None else x for x, y, t in zip(values, args, dtypes)]


@functools.cache
def _converted_to(impl: Callable, *given: Any) -> list[numpy.dtype | None]:
    """The dtypes that NumPy converts operands to; None where there is no change.

    The operands are given by their dtypes, or by their types if they are Python numbers.
    """
    none = [None] * len(given)
    strong_ = [numpy.dtype(d) for d in given]
    weak = [s if d is bool else d for d, s in zip(given, strong_)]  # a bool promotes the same way, weak or not
    if not isinstance(impl, numpy.ufunc):
        dtype = _result_dtype(impl, *weak)
        return none if dtype == _result_dtype(impl, *strong_) else [None if d is bool else dtype for d in given]
    try:
        loop, other = (impl.resolve_dtypes((*ds, *[None] * impl.nout)) for ds in (weak, strong_))
    except TypeError:  # NumPy explains this error when the function runs
        return none
    if loop == other or (loop[-1].kind == "b" and all(d.kind in "iu" for d in loop[: impl.nin])):
        return none  # NumPy compares integers exactly, whatever their dtypes
    return [None if d is bool else t for d, t in zip(given, loop)]


def align(args: Sequence[Value], batched: Sequence[bool]) -> list[Value]:
    """Reshape batched operands so that broadcasting still aligns the other axes."""
    ranks = [0 if is_scalar_constant(x) else numpy.ndim(x) - b for x, b in zip(args, batched)]
    rank = max(ranks)
    return [
        x.reshape((x.shape[0],) + (1,) * (rank - r) + tuple(x.shape[1:])) if b and r < rank else x
        for x, b, r in zip(args, batched, ranks)
    ]


def bind_aligned(primitive: Primitive, args: Sequence[Value], batched: Sequence[bool], **params) -> Value:
    """The batching rule of primitives that broadcast like elementwise ones."""
    return primitive.bind(*align(args, batched), **params)


# ---------------------------------------------------------------- helpers of the rules


def zeros_like(x: Value) -> numpy.ndarray:
    """A constant zero with the shape and dtype of a value or type."""
    t = typeof(x)
    return numpy.zeros(t.shape, t.dtype)


def add_all(terms: Sequence[Value]) -> Value | None:
    """The sum of tangents or cotangents; None (zero) if there are none."""
    return functools.reduce(ops.elementwise.add, terms) if terms else None


def match(ct: Value, operand: ShapedArray) -> Value:
    """Sum and cast a cotangent to an operand's type: undo broadcast and promotion."""
    shape = operand.shape
    if ct.shape != shape:
        axes = _stretched(ct.shape, shape)
        ct = ops.reduction.sum_p.bind(ct, axes=axes) if axes else ct
        if ct.shape != shape:
            ct = ops.shape.reshape_p.bind(ct, shape=shape)
    return ct if ct.dtype is operand.dtype else ops.elementwise.convert(ct, operand.dtype)


def match_arrays(ct: numpy.ndarray, operand: ShapedArray) -> numpy.ndarray:
    """`match` for plain arrays."""
    shape, wide = operand.shape, ct.shape
    if wide != shape:
        axes = _stretched(wide, shape)
        if axes == (0,) and len(wide) == 2 and wide[0] <= 4096 and ct.dtype.char in "dfDF":
            ct = _ones(wide[0], ct.dtype).dot(ct)  # takes half the time and is as accurate: a column is summed in order
        elif axes:
            ct = numpy.add.reduce(ct, axis=axes)
        if ct.shape != shape:
            ct = ct.reshape(shape)
    return ct if ct.dtype is operand.dtype else ops.elementwise.convert(ct, operand.dtype)


@functools.lru_cache(maxsize=64)
def _ones(n: int, dtype: numpy.dtype) -> numpy.ndarray:
    return numpy.ones(n, dtype)


@functools.lru_cache(maxsize=4096)
def _stretched(wide: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of `wide` along which broadcasting repeats an array of `shape`."""
    sizes = (1,) * (len(wide) - len(shape)) + shape
    return tuple([i for i, (n, m) in enumerate(zip(sizes, wide)) if n != m])


def broadcast_tangent(tangent: Value, out: Value) -> Value:
    """Broadcast the tangent of one operand to the shape of the result `out`."""
    if tangent.shape != out.shape:
        tangent = ops.shape.broadcast_to_p.bind(tangent, shape=out.shape)
    return ops.elementwise.convert(tangent, out.dtype)
