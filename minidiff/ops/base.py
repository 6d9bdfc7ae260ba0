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
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy

from minidiff import tree
from minidiff.core.interpreter import EVALUATE, current_interpreter, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.reverse import Linearize
from minidiff.core.tape import Equation, Stage, Tape
from minidiff.core.tracer import Function, Tracer, Value, WeakTracer, unwrap_weak
from minidiff.core.types import ShapedArray, typeof, zeros_like
from minidiff.inputs.arguments import WEAK_TYPES, as_value, python_type
from minidiff.ops import dimensions
from minidiff.ops.dimensions import Dimensions, Types
from minidiff.values.dtypes import (
    ARRAYS,
    NARROW,
    accumulator_dtype,
    check_dtype,
    convert_array,
    is_differentiable,
    is_scalar_constant,
    rounded_dtype,
    wide_dtype,
)

#: How parameters change by a batch axis in front, of the given size.
_WITH_BATCH: dict[str, Callable] = {
    "axis": lambda axis, size: axis + 1,
    "axes": lambda axes, size: tuple([a + 1 for a in axes]),
    "shape": lambda shape, size: (size, *shape),
    "index": lambda index, size: (slice(None), *index),
}


def batch_leading(primitive: Primitive, args: Sequence[Value], batched: Sequence[bool], **params) -> Value:
    """Apply a primitive along the leading axis of all operands.

    It comes first, so that axes are counted from it, and shapes and indices begin with it.
    """
    size = next(x.shape[0] for x, b in zip(args, batched) if b)
    args = [x if b else numpy.broadcast_to(x, (size, *numpy.shape(x))) for x, b in zip(args, batched)]
    return primitive.bind(*args, **{k: _WITH_BATCH[k](v, size) if k in _WITH_BATCH else v for k, v in params.items()})


def align(args: Sequence[Value], batched: Sequence[bool]) -> list[Value]:
    """Reshape batched operands so that broadcasting still aligns the other axes."""
    ndims = [0 if is_scalar_constant(x) else numpy.ndim(x) - b for x, b in zip(args, batched)]
    ndim = max(ndims)
    return [
        x.reshape((x.shape[0],) + (1,) * (ndim - r) + tuple(x.shape[1:])) if b and r < ndim else x
        for x, b, r in zip(args, batched, ndims)
    ]


def bind_aligned(primitive: Primitive, args: Sequence[Value], batched: Sequence[bool], **params) -> Value:
    """Apply a primitive that broadcasts like an elementwise one along the leading axis of its operands."""
    return primitive.bind(*align(args, batched), **params)


def axes_fit(*types: ShapedArray, **params) -> bool:
    """Return whether operands have the axes that parameters name, and otherwise equal sizes: see `Primitive.fits`."""
    x, axes = types[0], params.get("axes", (params["axis"],) if "axis" in params else ())
    if not axes:
        return True
    sizes = {tuple([n if d not in axes else -1 for d, n in enumerate(t.shape)]) for t in types}
    return len({*axes}) == len(axes) and all(0 <= a < x.ndim for a in axes) and len(sizes) == 1


class Specialized(Primitive):
    """A primitive whose implementation is specialized once for the types of its operands and its parameters.

    `specialize(operands, params)` returns the function that runs it on operands of these types. A compiled program
    calls it at the first run of the operation. Where it `writes` into its first operand, and that operand is not used
    again, `params` has `in_place=True`: then the result is that operand, with other values.
    """

    def __init__(self, name: str, **rules: Any):
        super().__init__(name, lambda *operands, **params: self.specialize(operands, params)(*operands), **rules)

    def specialize(self, operands: Sequence[Any], params: dict) -> Callable[..., Any]:
        raise NotImplementedError

    def writes(self, eqn: Equation) -> bool:
        """Return whether the operation can write its result into its first operand."""
        return False


class Batched(Primitive):
    """A primitive with a batching rule, `batch_rule(primitive, args, batched, **params)`.

    The rule applies the primitive along a leading axis; without one, the primitive does it itself, with parameters for
    one more axis.
    """

    fits = staticmethod(axes_fit)
    batch_rule: Callable = staticmethod(batch_leading)

    def __init__(self, name, impl, shape_rule, batch_rule: Callable | None = None, **rules):
        super().__init__(name, impl, shape_rule, **rules)
        if batch_rule is not None:
            self.batch_rule = batch_rule

    def batch(self, args, batched, params):
        return self.batch_rule(self, args, batched, **params)


class Linear(Batched):
    """A primitive that is linear in its operands together.

    With `linear_operands` it is linear in the first that many only; the rest are indices and the like.

    `transpose_rule(ct, operands, **params)` returns a list with a cotangent for each linear operand.
    """

    linear_operands: int | None = None

    def __init__(self, name, impl, shape_rule, transpose_rule, batch_rule=None, **rules):
        super().__init__(name, impl, shape_rule, batch_rule, **rules)
        self.transpose_rule = transpose_rule

    def tangent(self, out, primals, tangents, params):
        n = len(primals) if self.linear_operands is None else self.linear_operands
        if all(t is None for t in tangents[:n]):
            return None
        moved = [zeros_like(p) if t is None else t for p, t in zip(primals[:n], tangents)]
        return self.bind(*moved, *primals[n:], **params)

    def is_linear_in(self, positions, count):
        return positions == set(range(count if self.linear_operands is None else self.linear_operands))

    def transpose(self, ct, operands, params):
        if self.linear_operands is None:
            return self.transpose_rule(ct, operands, **params)
        constants = operands[self.linear_operands :]
        if any(isinstance(x, ShapedArray) for x in constants):  # for example an index that depends on a linear input
            return super().transpose(ct, constants, params)
        return self.transpose_rule(ct, operands, **params) + [None] * len(constants)


class Differentiable(Batched):
    """A primitive whose tangent sums derivative times tangent over its operands.

    `term(i, t, out, primals, params)` applies the derivative in operand i to a tangent of that operand;
    `cotangent(i, ct, out, primals, type, params)` applies its transpose to a cotangent of the result; `type` is the
    type of the operand. Both return None where the derivative is zero everywhere.
    """

    def residuals(self, i: int, count: int) -> set[int] | None:
        """Return the positions in `(out, *operands)` of the residuals of the derivative in operand i: what it reads.

        There are `count` operands. None if the derivative is zero.
        """
        raise NotImplementedError

    def tangent(self, out, primals, tangents, params):
        interpreter = current_interpreter()
        if isinstance(interpreter, Linearize) and any(map(interpreter.owns, tangents)):
            active = tuple([i for i, t in enumerate(tangents) if t is not None])
            derivative = differential_of(self, active, len(primals))
            return derivative and derivative.record(interpreter, out, primals, tangents, params)
        terms = [self.term(i, t, out, primals, params) for i, t in enumerate(tangents) if t is not None]
        return add_all([term for term in terms if term is not None])


class Differential(Primitive):
    """The derivative of an operation at given values, in its `active` operands, as one linear operation.

    The operands are the operation's result and operands (the result's type in place of those that are no residuals),
    then the tangents. So a linear tape holds only residuals, and the factors are computed when the equation is
    transposed, or applied: it then expands into the operations of the derivative rule.
    """

    operands_agree = False

    def __init__(self, of: Differentiable, active: tuple[int, ...], count: int, residuals: set[int]):
        super().__init__(f"d_{of.name}")
        self.of = of
        self.active = active
        self.count = 1 + count  # the number of operands before the tangents
        self.residuals = residuals

    def record(self, recorder: Linearize, out: Value, primals: Sequence, tangents: Sequence, params: dict) -> Value:
        """Record the derivative at these values, of these tangents."""
        values = [x if j in self.residuals else typeof(out) for j, x in enumerate((out, *primals))]
        return recorder.record(self, [*values, *[tangents[i] for i in self.active]], params)

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


@functools.cache
def differential_of(primitive: Differentiable, active: tuple[int, ...], count: int) -> Differential | None:
    """Return the derivative in the active ones of `count` operands; None if it is zero everywhere."""
    used = {i: residuals for i in active if (residuals := primitive.residuals(i, count)) is not None}
    return Differential(primitive, tuple(used), count, set().union(*used.values())) if used else None


class Multilinear(Differentiable):
    """A primitive that is linear in each operand separately.

    `transpose_rules[i](ct, operands, **params)` is the transpose in operand i.
    """

    def __init__(self, name, impl, shape_rule, transpose_rules: Sequence[Callable | None], *rules, **traits):
        super().__init__(name, impl, shape_rule, *rules, **traits)
        self.transpose_rules = transpose_rules

    def is_linear_in(self, positions, count):
        return len(positions) == 1 and all(self.transpose_rules[i] is not None for i in positions)

    def residuals(self, i, count):
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


class Promoting(Batched):
    """A primitive whose operands broadcast and promote as those of NumPy's ufuncs.

    Elementwise primitives of all kinds inherit from it first, and from their kind second.
    """

    batch_rule = staticmethod(bind_aligned)

    def __init__(self, name: str, impl: Callable, *rules, **traits):
        shape_rule = functools.partial(elementwise_shape, impl)
        super().__init__(name, impl, shape_rule, *rules, sharding=dimensions.elementwise, **traits)

    def strong(self, args):
        return promote(self, args)


class Elementwise(Promoting, Differentiable):
    """An elementwise primitive, with NumPy's broadcasting.

    `derivatives[i](out, *operands)` is the derivative with respect to operand i, or None where it is
    zero everywhere (comparisons, `sign`, …).
    """

    def __init__(self, name: str, impl: Callable, derivatives: Sequence[Callable | None], **traits: Any):
        super().__init__(name, impl, **traits)
        self.derivatives = derivatives

    def residuals(self, i, count):
        return arguments_used(self.derivatives[i], 1 + count) if self.derivatives[i] else None

    def term(self, i, t, out, primals, params):
        derivative = self.derivatives[i]
        return derivative and broadcast_tangent(derivative(out, *primals) * t, out)

    def cotangent(self, i, ct, out, primals, type, params):
        derivative = self.derivatives[i]
        return derivative and unbroadcast(ct * derivative(out, *primals), type)


class General(Batched):
    """A primitive with any other derivative.

    `tangent_rule(out, primals, tangents, params)` returns the tangent of the result, written in operations, or None
    where it is zero. If the primitive is linear in the operands after the first, `transpose_rule(ct, operands,
    **params)` returns a list with a cotangent for each of them.
    """

    transpose_rule: Callable | None = None

    def __init__(self, name, impl, shape_rule, tangent_rule: Callable, *rules, **traits):
        super().__init__(name, impl, shape_rule, *rules, **traits)
        self.tangent = tangent_rule

    def is_linear_in(self, positions, count):
        return self.transpose_rule is not None and positions == set(range(1, count))

    def transpose(self, ct, operands, params):
        if self.transpose_rule is None or isinstance(operands[0], ShapedArray):
            return super().transpose(ct, operands, params)
        return [None, *self.transpose_rule(ct, operands, **params)]


def no_tangent(out, primals, tangents, params):
    return None


class Discrete(General):
    """A primitive without a derivative."""

    def __init__(self, name: str, impl: Callable, shape_rule: Callable, *rules, **traits):
        super().__init__(name, impl, shape_rule, no_tangent, *rules, **traits)


def scalar_tapes(rule: Callable, count: int, dtypes: Sequence[Any] = (float, complex)) -> list[Tape]:
    """Record a rule on scalars of each dtype that it accepts."""
    tapes = []
    for dtype in dtypes:
        stage = Stage(EVALUATE)
        stage.keeps_sources = False  # to look for a line would let frames keep what they have freed
        with contextlib.suppress(TypeError), transforming(stage):
            out = rule(*[stage.new_input(ShapedArray((), dtype)) for _ in range(count)])
            tapes.append(stage.tape([as_value(x) for x in tree.leaves(out)]))
    return tapes


def arguments_used(rule: Callable, count: int) -> set[int]:
    """Positions of the arguments that a derivative rule uses, read from its tape."""
    used: set[int] = set()
    for tape in scalar_tapes(rule, count):
        atoms = {id(a) for atoms in (*(e.inputs for e in tape.equations), tape.outputs) for a in atoms}
        used |= {i for i, v in enumerate(tape.inputs) if id(v) in atoms}
    return used


# ---------------------------------------------------------------- elementwise shapes


def elementwise_shape(impl: Callable, *types: Any) -> tuple[tuple[int, ...], numpy.dtype]:
    """Return the broadcast shape and NumPy's promoted dtype (Python numbers are weak)."""
    shapes = {t.shape for t in types if type(t) is ShapedArray}
    try:
        shape = shapes.pop() if len(shapes) == 1 else numpy.broadcast_shapes(*shapes)
    except ValueError:
        name = getattr(impl, "__name__", str(impl)).strip("_").removesuffix("_impl")
        raise ValueError(f"{name}: shapes {' and '.join(map(str, shapes))} cannot be broadcast together") from None
    return shape, _result_dtype(impl, *[t.dtype if type(t) is ShapedArray else type(t) for t in types])


@functools.cache
def _result_dtype(impl: Callable, *dtypes: Any) -> numpy.dtype:
    operands = [numpy.ones(1, d) if isinstance(d, numpy.dtype) else d(1) for d in dtypes]
    with numpy.errstate(all="ignore"):
        return numpy.asarray(impl(*operands)).dtype


@functools.cache
def _promotes_by_kind(impl: Callable, *operand_types: Any) -> bool:
    """Return whether NumPy scalars of the given dtypes promote differently from Python numbers."""
    types = [type(numpy.zeros((), d).item()) if isinstance(d, numpy.dtype) else d for d in operand_types]
    return _result_dtype(impl, *operand_types) != _result_dtype(impl, *types)


def promote(primitive: Primitive, args: Sequence[Value]) -> list[Value]:
    """Convert traced Python numbers among operands to NumPy's promoted dtype."""
    values = list(map(unwrap_weak, args))
    kinds = {*map(type, args)}
    if kinds <= WEAK_TYPES:
        # Traced ones have NumPy's dtypes for Python numbers. So must constants next to them, where it matters.
        dtypes_or_types = [x.dtype if type(x) is WeakTracer else type(x) for x in args]
        if len(kinds) > 1 and _promotes_by_kind(primitive.impl, *dtypes_or_types):
            values = [x if isinstance(x, Tracer) else numpy.asarray(x)[()] for x in values]
        return values
    operand_types = [python_type(x) if type(x) in WEAK_TYPES else x.dtype for x in args]
    strong = [numpy.dtype(type(x)) if type(x) in (bool, int, float, complex) else wide_dtype(x.dtype) for x in values]
    dtypes = _conversion_dtypes(primitive.impl, tuple(map(wide_dtype, operand_types)), tuple(strong))
    if NARROW:
        dtypes = [t and rounded_dtype(t, operand_types) for t in dtypes]
    # A ufunc raises for an integer that its dtype cannot hold; np.where wraps it around.
    is_ufunc = isinstance(primitive.impl, numpy.ufunc)
    converted = convert_number if is_ufunc else convert
    return [converted(x, t) if type(y) is WeakTracer and t is not None else x for x, y, t in zip(values, args, dtypes)]


@functools.cache
def _conversion_dtypes(
    impl: Callable, operand_types: tuple[Any, ...], strong_: tuple[numpy.dtype, ...]
) -> list[numpy.dtype | None]:
    """Return the dtypes that NumPy converts operands to; None where there is no change.

    The operands are given by their dtypes, or by their types if they are Python numbers. `strong_` are the dtypes of
    their values: of an integer beyond int64 it is uint64.
    """
    none = [None] * len(operand_types)
    weak = [s if d is bool else d for d, s in zip(operand_types, strong_)]  # a bool promotes the same way, weak or not
    if not isinstance(impl, numpy.ufunc):
        dtype = _result_dtype(impl, *weak)
        return none if dtype == _result_dtype(impl, *strong_) else [None if d is bool else dtype for d in operand_types]
    try:
        loop = impl.resolve_dtypes((*weak, *[None] * impl.nout))
    except TypeError:  # NumPy explains this error when the function runs
        return none
    try:
        other = impl.resolve_dtypes((*strong_, *[None] * impl.nout))
    except TypeError:  # uint64 and int64 have no common integers, but uint64 and a Python integer do
        other = ()
    if loop == other or (loop[-1].kind == "b" and all(d.kind in "iu" for d in loop[: impl.nin])):
        return none  # NumPy compares integers exactly, whatever their dtypes
    return [None if d is bool else t for d, t in zip(operand_types, loop)]


# ---------------------------------------------------------------- what undoes broadcasting and promotion


def _reshape_dimensions(types: Types, outs: Types, params: dict) -> Dimensions:
    """Label the first dimension of each group of dimensions, which may be split."""
    (x,), (out,) = types, outs
    before, after = [None] * x.ndim, [None] * out.ndim
    for d, e in _leading_pairs(x.shape, out.shape):
        before[d] = after[e] = d
    return Dimensions((tuple(before),), (tuple(after),))


def _leading_pairs(one: tuple[int, ...], two: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Match groups of dimensions with equal products in two shapes.

    Yields the first dimension larger than 1 of each group.
    """
    if 0 in one:
        return
    dims, ends = [d for d, n in enumerate(one) if n > 1], [d for d, n in enumerate(two) if n > 1]
    i = j = 0
    while i < len(dims) and j < len(ends):
        yield dims[i], ends[j]
        m, n = one[dims[i]], two[ends[j]]
        i, j = i + 1, j + 1
        while m != n:
            if m < n:
                m, i = m * one[dims[i]], i + 1
            else:
                n, j = n * two[ends[j]], j + 1


reshape_p = Linear(
    "reshape",
    lambda x, shape: numpy.reshape(x, shape),
    lambda x, shape: (shape, x.dtype),
    lambda ct, operands, shape: [reshape_p.bind(ct, shape=operands[0].shape)],
    fits=lambda x, shape: x.size == math.prod(shape),
    sharding=_reshape_dimensions,
    is_view=True,
    shares_memory=True,
    moves="copies",
)


def _batch_broadcast_to(primitive, args, batched, shape):
    (x,) = args
    padded = (x.shape[0],) + (1,) * (len(shape) + 1 - len(x.shape)) + tuple(x.shape[1:])
    return primitive.bind(reshape_p.bind(x, shape=padded), shape=(x.shape[0], *shape))


def broadcast_array(x: numpy.ndarray, shape: tuple[int, ...]) -> numpy.ndarray:
    """`numpy.broadcast_to` of plain arrays, many times faster than NumPy's."""
    if type(x) is not numpy.ndarray:
        if type(x) in ARRAYS:  # a scalar is its own memory, which is read-only
            return numpy.ndarray(shape, x.dtype, x, 0, (0,) * len(shape))
        if isinstance(x, Tracer):
            return numpy.broadcast_to(x, shape)
        x = numpy.asarray(x)
    if not x.flags.c_contiguous or x.dtype.kind == "O":
        return numpy.broadcast_to(x, shape)
    extra = len(shape) - x.ndim
    steps = [0 if n == 1 else step for n, step in zip(x.shape, x.strides)]
    wide = numpy.ndarray(shape, x.dtype, x, 0, (*[0] * extra, *steps))
    wide.flags.writeable = False
    return wide


broadcast_to_p = Linear(
    "broadcast_to",
    lambda x, shape: broadcast_array(x, shape),
    lambda x, shape: (shape, x.dtype),
    lambda ct, operands, shape: [unbroadcast(ct, operands[0])],
    _batch_broadcast_to,
    fits=lambda x, shape: numpy.broadcast_shapes(x.shape, shape) == shape,
    sharding=dimensions.elementwise,
    is_view=True,
    shares_memory=True,
)


def reduced_shape(x: ShapedArray, axes: Sequence[int], keepdims: bool = False) -> tuple[int, ...]:
    """Return the shape of `x` without `axes`, or with size 1 in their places."""
    if keepdims:
        return tuple([1 if i in axes else n for i, n in enumerate(x.shape)])
    return tuple([n for i, n in enumerate(x.shape) if i not in axes])


def broadcast_back(y: Value, x: Value | ShapedArray, axes: tuple[int, ...], keepdims: bool = False) -> Value:
    """Broadcast a value back along the reduced axes of `x`, which may be a type."""
    if y.shape == x.shape:
        return y
    # Leading axes need no reshape, since broadcasting adds them back in front.
    if not keepdims and axes != tuple(range(len(axes))):
        y = reshape_p.bind(y, shape=reduced_shape(x, axes, True))
    return y if y.shape == x.shape else broadcast_to_p.bind(y, shape=x.shape)


sum_p = Linear(
    "sum",
    lambda x, axes, keepdims=False: numpy.add.reduce(x, axis=axes, keepdims=keepdims),
    lambda x, axes, keepdims=False: (reduced_shape(x, axes, keepdims), sum_dtype(x.dtype)),
    lambda ct, operands, axes, keepdims=False: [broadcast_back(ct, operands[0], axes, keepdims)],
    sharding=dimensions.reduction("sum"),
    accumulates=True,
)


@functools.cache
def sum_dtype(dtype: numpy.dtype) -> numpy.dtype:
    return numpy.sum(numpy.zeros(1, dtype)).dtype


#: A change of dtype: linear to dtypes that carry derivatives, discrete to others.
convert_p = Linear(
    "convert",
    convert_array,
    lambda x, dtype: (typeof(x).shape, dtype),
    lambda ct, operands, dtype: [convert(ct, operands[0].dtype)],
    bind_aligned,
    sharding=dimensions.elementwise,
)
discrete_convert_p = Discrete(
    "convert", convert_array, convert_p.shape_rule, bind_aligned, sharding=dimensions.elementwise
)


def convert(x: Value, dtype: Any) -> Value:
    """Convert `x` to a dtype (`astype`); from complex to real, take the real part."""
    # Test hasattr, not getattr(x, "dtype", None): NumPy reads None as float64.
    if hasattr(x, "dtype") and x.dtype == dtype:
        return x
    dtype = numpy.dtype(dtype)
    if dtype.itemsize == 2:
        check_dtype(dtype)  # plain arrays have no type, which would look for 16-bit floats
    return (convert_p if is_differentiable(dtype) else discrete_convert_p).bind(x, dtype=dtype)


def run_in_float32(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function of several operations, among them sums, with 16-bit floats as float32.

    Its results are rounded once, to the dtype that they have otherwise.
    """
    dtypes = [x.dtype for x in (*args, *kwargs.values()) if hasattr(x, "dtype") and not isinstance(x, type)]
    if 2 not in [t.itemsize for t in dtypes] or all(accumulator_dtype(t) == t for t in dtypes):
        return function(*args, **kwargs)
    if kwargs.get("dtype") is not None:
        dtypes.append(numpy.dtype(kwargs["dtype"]))
        kwargs["dtype"] = accumulator_dtype(dtypes[-1])

    def upcast(x: Any) -> Any:
        return convert(x, accumulator_dtype(x.dtype)) if hasattr(x, "dtype") and not isinstance(x, type) else x

    out = function(*map(upcast, args), **{k: upcast(x) for k, x in kwargs.items()})
    rounded = [convert(y, rounded_dtype(y.dtype, dtypes)) for y in (out if isinstance(out, tuple) else (out,))]
    return tuple(rounded) if isinstance(out, tuple) else rounded[0]


def in_float32(function: Function) -> Function:
    """Decorate a function that `run_in_float32` calls."""

    @functools.wraps(function)
    def upcast(*args: Any, **kwargs: Any) -> Any:
        return run_in_float32(function, *args, **kwargs)

    return cast(Function, upcast)


def _convert_checked(x: numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
    out = numpy.asarray(x).astype(dtype)
    if (out != x).any():
        raise OverflowError(f"Python integer {x} out of bounds for {dtype}")
    return out[()]


#: An integer conversion that raises OverflowError where the value does not fit, as NumPy does for a Python integer.
checked_convert_p = Discrete(
    "checked_convert", _convert_checked, convert_p.shape_rule, bind_aligned, sharding=dimensions.elementwise
)


def convert_number(x: Value, dtype: numpy.dtype) -> Value:
    """Convert a number to a dtype as NumPy converts a Python number."""
    checked = x.dtype != dtype and x.dtype.kind in "iu" and dtype.kind in "iu"
    return checked_convert_p.bind(x, dtype=dtype) if checked else convert(x, dtype)


# ---------------------------------------------------------------- helpers of the rules


def add_all(terms: Sequence[Value]) -> Value | None:
    """Return the sum of tangents or cotangents; None (zero) if there are none."""
    return functools.reduce(operator.add, terms) if terms else None


@functools.lru_cache(maxsize=4096)
def broadcast_axes(wide: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of `wide` along which broadcasting repeats an array of `shape`."""
    sizes = (1,) * (len(wide) - len(shape)) + shape
    return tuple([i for i, (n, m) in enumerate(zip(sizes, wide)) if n != m])


def unbroadcast(ct: Value, operand: ShapedArray) -> Value:
    """Sum and cast a cotangent to an operand's type: the transpose of broadcasting and promotion."""
    shape = operand.shape
    if ct.shape != shape:
        axes = broadcast_axes(ct.shape, shape)
        ct = sum_p.bind(ct, axes=axes) if axes else ct
        if ct.shape != shape:
            ct = reshape_p.bind(ct, shape=shape)
    return ct if ct.dtype is operand.dtype else convert(ct, operand.dtype)


def broadcast_tangent(tangent: Value, out: Value) -> Value:
    """Broadcast the tangent of one operand to the shape of the result `out`."""
    if tangent.shape != out.shape:
        tangent = broadcast_to_p.bind(tangent, shape=out.shape)
    return convert(tangent, out.dtype)


def defers_to(x: Any) -> bool:
    """Return whether a tracer, like NumPy, defers an operation to this operand's class.

    It defers if the class overrides `__array_ufunc__` (or sets it to None), or else has a higher `__array_priority__`.
    Operations look for such an operand only after an error, so that the common case pays nothing.
    """
    if isinstance(x, Tracer):
        return False
    if hasattr(type(x), "__array_ufunc__"):
        return type(x).__array_ufunc__ is not numpy.ndarray.__array_ufunc__
    return getattr(x, "__array_priority__", 0) > Tracer.__array_priority__
