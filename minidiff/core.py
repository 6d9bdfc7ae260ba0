"""Types, primitives, tracers and the current interpreter.

A program is a sequence of *operations* (:class:`Primitive`) on values. The *current interpreter*
decides what applying an operation does: evaluate it with NumPy, push a tangent through it, record it
on a tape, or run it on every rank. A function transformation installs an interpreter, runs the
user's function on that interpreter's :class:`Tracer`\\ s, and restores the previous one.

Interpreters form a stack. The rules of each one are written in terms of operations, which run under
the interpreter below it. A tracer belongs to one interpreter, and every other interpreter treats it
as a constant. This is why higher-order derivatives need no special treatment.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import numpy

Value = Any  # an array, a scalar, or a Tracer that stands for one

INVARIANT: frozenset = frozenset()

_KINDS = {"f": "f", "i": "i", "u": "u", "c": "c"}

#: The dtype of tangents and cotangents of integers and booleans. It holds no data.
float0 = numpy.dtype([("float0", numpy.void, 0)])


# ---------------------------------------------------------------- errors


class TracerError(TypeError):
    """A traced value was used where a concrete one is required."""


class LeakedTracerError(TracerError):
    """A traced value was used after the transformation that created it ended."""


class VarianceError(TypeError):
    """A value varies along mesh axes along which it must not, or vice versa."""


class UnboundAxisError(NameError):
    """A collective named an axis that no enclosing `shard_map` or `vmap` binds."""


# ---------------------------------------------------------------- types


class ShapedArray:
    """The type of a value: its shape, dtype and variance, as in `f64[3,4]{i}`.

    `variance` is the set of mesh axes along which the value may differ from rank to rank. Outside a
    `shard_map` it is empty and is not printed. `sharding` is the sharding of an array that `spmd` distributes
    over a mesh, and None for every other value. Comparing types ignores it.

    >>> ShapedArray((3, 4), 'float32', {'i'})
    f32[3,4]{i}
    """

    __slots__ = ("shape", "dtype", "variance", "sharding")

    def __init__(self, shape: Sequence[int], dtype: Any, variance: Iterable[str] = INVARIANT):
        self.shape = tuple(shape)
        self.dtype = dtype if isinstance(dtype, numpy.dtype) else numpy.dtype(dtype)
        self.variance = frozenset(variance)
        self.sharding: Any = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def update(self, **changes: Any) -> ShapedArray:
        """Return a copy with some of `shape`, `dtype` and `variance` changed."""
        fields = {"shape": self.shape, "dtype": self.dtype, "variance": self.variance, **changes}
        return ShapedArray(**fields)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShapedArray)
            and self.shape == other.shape
            and self.dtype == other.dtype
            and self.variance == other.variance
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, self.variance))

    def __repr__(self) -> str:
        shape = ",".join(map(str, self.shape))
        axes = ",".join(sorted(map(str, self.variance)))
        return f"{dtype_name(self.dtype)}[{shape}]" + (f"{{{axes}}}" if axes else "")

    def _repr_html_(self) -> str:
        from minidiff.show.colours import types_as_html  # only notebooks need it

        return f"<code>{types_as_html(str(self))}</code>"


def dtype_name(dtype: numpy.dtype) -> str:
    """The short name of a dtype, as in printed types: `f64`, `i32`, `c128`, `bool`."""
    kind = _KINDS.get(dtype.kind)
    return f"{kind}{dtype.itemsize * 8}" if kind else str(dtype)


def typeof(x: Value) -> ShapedArray:
    """The type of an array, a scalar or a tracer.

    >>> typeof(numpy.zeros((3, 4)))
    f64[3,4]
    """
    if type(x) is numpy.ndarray:
        return array_type(x.shape, x.dtype)
    if isinstance(x, Tracer):
        return x.type
    if isinstance(x, ShapedArray):
        return x
    if not isinstance(x, numpy.generic):
        x = numpy.asarray(plain(x))
    return array_type(x.shape, x.dtype)


@functools.lru_cache(maxsize=4096)
def array_type(shape: tuple[int, ...], dtype: numpy.dtype) -> ShapedArray:
    """The type of plain arrays of a shape and dtype: a cached, shared object."""
    check_dtype(dtype)
    return ShapedArray(shape, dtype)


def is_differentiable(dtype: numpy.dtype) -> bool:
    """Whether values of this dtype carry derivatives: float and complex ones do."""
    return numpy.dtype(dtype).kind in "fc"


def is_scalar_constant(x: Value) -> bool:
    """Whether `x` is a Python or NumPy number, which agrees with any variance."""
    return isinstance(x, (bool, int, float, complex, numpy.generic))


# ---------------------------------------------------------------- which values are arrays

#: The numeric dtypes in native byte order.
NATIVE = frozenset(map(numpy.dtype, "?bhilqBHILQefdgFDG"))

#: Types that need no validation: plain arrays and numbers. `plain` validates all others.
PLAIN = frozenset({numpy.ndarray, bool, int, float, complex, *(dtype.type for dtype in NATIVE)})

#: The advice for arrays of these dtype kinds.
_INSTEAD_OF_DTYPES = {
    "O": "convert it to one of numbers (with rows of equal length), as in x.astype(float)",
    "M": "subtract a reference time and divide by a unit, as in (x - x[0]) / numpy.timedelta64(1, 's')",
    "m": "divide it by a unit, as in x / numpy.timedelta64(1, 's')",
    **dict.fromkeys("SUT", "convert it to numbers, as in x.astype(float)"),
}

#: The advice for values that have an attribute of this name. The first match wins.
_INSTEAD_OF_OBJECTS = {
    "filled": "its mask would be lost; write x.filled(value), or compute with x.data and x.mask",
    "to_numpy": "write x.to_numpy()",
    "toarray": "write x.toarray()",
    "compute": "write x.compute()",
    "numpy": "write x.numpy()",
    "__array__": "write numpy.asarray(x)",
    "__float__": "write float(x)",
}


def plain(x: Any, is_leaf: bool = False) -> Value:
    """Return a plain array or a number unchanged, and a memory map as a plain array.

    Raise TypeError for any other value. NumPy would convert many of them, but lose a mask, an index or a unit, so the
    error says what to write instead. With `is_leaf` it also lists the containers that trees are made of.
    """
    if isinstance(x, (numpy.ndarray, numpy.generic)):
        check_dtype(x.dtype)
    if type(x) is numpy.memmap:
        return x.view(numpy.ndarray)
    if isinstance(x, int) and not -(2**63) <= x < 2**64:
        raise TypeError(
            f"expected an array or a number, got an integer of more than 64 bits, which has no dtype: write float({x})"
        )
    if type(x) is numpy.ndarray or isinstance(x, (bool, int, float, complex, numpy.generic)):
        return x
    known = [advice for attribute, advice in _INSTEAD_OF_OBJECTS.items() if hasattr(x, attribute)]
    advice = known[0] if known else f"{x!r:.60}"
    if is_leaf and not known:
        from minidiff.tree import class_names  # only errors need it

        advice += f" (trees are made of {', '.join(class_names())})"
    raise TypeError(f"expected an array or a number, got {type(x).__name__}: {advice}")


def plain_operand(x: Any) -> Any:
    """Apply `plain` to an operand, which may also be a tracer, a type, or a list."""
    if isinstance(x, (list, tuple)):
        for item in x:
            plain_operand(item)
        return x
    return x if isinstance(x, (Tracer, ShapedArray, range)) or x is None else plain(x)


def check_dtype(dtype: numpy.dtype) -> None:
    """Raise TypeError for a non-numeric dtype, with advice on how to convert it."""
    if dtype in NATIVE or dtype == float0 or (dtype.isbuiltin != 2 and dtype.kind in "biufc"):
        return
    if dtype.names is not None:
        advice = f"take its fields one by one, as in x[{dtype.names[0]!r}]" if dtype.names else "it has no fields"
    else:
        advice = _INSTEAD_OF_DTYPES.get(dtype.kind, "convert it, as in x.astype(numpy.float32)")
    raise TypeError(f"expected an array of numbers, got one of dtype {dtype}: {advice}")


# ---------------------------------------------------------------- interpreters


class Scope:
    """The body of a running `shard_map`: the axes it binds, and whether it is typed.

    `axes` maps each axis name to its size. An untyped scope (`check_rep=False`) does not track
    variances: every type's variance is empty and no pbroadcast is inserted. An explicit scope
    (`auto_pbroadcast=False`) inserts none into the user's operations, but checks that their operands agree.
    """

    __slots__ = ("axes", "typed", "explicit", "checks", "bottom", "views", "function", "transposed")

    def __init__(self, axes: dict, typed: bool = True, explicit: bool = False):
        self.axes = dict(axes)
        self.typed = typed
        self.explicit = explicit
        self.checks = False  # in an explicit scope, whether the current operation is the user's: see `checking`
        self.bottom: Interpreter | None = None
        self.function = ""  # the name of the function that is the body
        self.views: dict = {}  # id of value -> (values, primitive, operand, params): see `remember`
        self.transposed = 0  # the number of transpositions in this body: see `transposes`

    def transposes(self) -> None:
        """Count a transposition in this body and in the enclosing ones.

        Its result depends on types: the cotangent of a value that is the same on all ranks is a sum over the ranks.
        """
        self.transposed += 1
        outer = self.bottom.outer if self.bottom is not None else None
        if outer is not None and outer.scope is not None:
            outer.scope.transposes()

    def remember(self, outs: Sequence[Value], primitive: Primitive, operand: Value, params: dict) -> None:
        """Record how views of a value that does not vary along all axes were made.

        A pbroadcast of a view then becomes a view of a pbroadcast, so that a weight and its transpose share one.
        And the backward pass can recompute a view instead of keeping it.
        """
        if self.typed and len(variance_of(operand)) < len(self.axes):
            self.views.update((id(out), (outs, primitive, operand, params)) for out in outs)

    def view_of(self, x: Value) -> tuple[Sequence[Value], Primitive, Value, dict] | None:
        """The results, operation, operand and parameters of a remembered view `x`."""
        return self.views.get(id(x))


class Interpreter:
    """The meaning of operations while it is current. Subclasses implement `interpret`.

    `below` is the interpreter that its rules run under, and `scope` is the `shard_map` body that it works
    in. A transformation *around* a `shard_map` continues in the body with a second interpreter, whose
    `outer` is the one outside. `adopt` converts values from outside.
    """

    name = "interpreter"
    origin: tuple[str, str] | None = None  # the transformation and the function that errors name
    ended = False  # whether the transformation is over, so that its tracers are invalid
    keeps_sources = False  # whether operations recorded above it keep their source line
    watch: Callable | None = None  # applies derivative rules while `debug_nans` is on: see `debug.py`

    def __init__(self, below: Interpreter | None, outer: Interpreter | None = None):
        self.below = below
        self.outer = outer
        self.scope: Scope | None = below.scope if below is not None else None
        self.broadcasts: dict = {}  # (id of value, axes) -> (value, its pbroadcast along the axes)
        self._adopted: dict = {}  # id of outer tracer -> (outer tracer, its counterpart here)

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        """Apply an operation to any values: a traced Python number gets the dtype to which NumPy promotes it."""
        if WeakTracer in map(type, args):
            args = primitive.strong(args)
        return self.interpret(primitive, args, params)

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        """Apply an operation. Rules run under the interpreter `below`."""
        raise NotImplementedError

    def lower(self, tape: Any, values: Sequence[Value]) -> Sequence[Value] | None:
        """Run a compiled tape as a whole; None if it must be applied op by op."""
        return None

    def adopt(self, x: Value) -> Value:
        """Convert a value that a body closes over to a value inside the body.

        In a `shard_map` it becomes an implicit, unmapped argument. It is adopted only once, so that two uses
        of it are uses of the same value.
        """
        if not isinstance(x, Tracer) or x.interpreter is self or self.knows(x):
            return x
        known = self._adopted.get(id(x))
        if known is None:
            known = self._adopted[id(x)] = (x, self._adopt(x))
        return known[1]

    def knows(self, x: Tracer) -> bool:
        """Whether `x` is a value of the body that this interpreter works in."""
        return x.interpreter.scope is self.scope

    def _adopt(self, x: Tracer) -> Value:
        if self.outer is not None:
            x = self.outer.adopt(x)
            if isinstance(x, Tracer) and x.interpreter is self.outer:
                return self.adopt_own(x)
        if self.below is None:
            raise LeakedTracerError(leak_message(x))
        return self.below.adopt(x)

    def adopted(self) -> dict[int, Tracer]:
        """The values adopted so far: id of the value inside -> the value outside."""
        return {id(here): outside for outside, here in self._adopted.values()}

    def end(self) -> None:
        """End the transformation, and break its reference cycles with tracers."""
        self.ended = True
        self.broadcasts.clear()
        self._adopted.clear()
        if self.scope is not None and self.scope.bottom is self:
            self.scope.bottom = None
            self.scope.views.clear()

    def adopt_own(self, x: Tracer) -> Value:
        """Convert `x`, a tracer of `self.outer`, to a value of this interpreter."""
        raise NotImplementedError


class Evaluate(Interpreter):
    """The interpreter at the bottom of every stack: apply operations to NumPy arrays."""

    name = "evaluate"

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        if primitive.is_higher_order:
            return primitive.evaluate(args, params)
        for x in args:
            if type(x) not in PLAIN:
                args = list(map(plain_operand, args))
                if any(isinstance(x, Tracer) for x in args):
                    return dispatch_to_shards(self, primitive, args, params)
                break
        try:
            return primitive.impl(*args, **params)
        except (AttributeError, TypeError, ValueError) as error:
            if is_misfit(primitive, args, error):
                raise MisfitError(primitive, args, str(error).strip()) from None
            raise


def name_of(f: Callable) -> str:
    """The name of a function in error messages."""
    return getattr(f, "__name__", "f")


def leak_message(x: Tracer) -> str:
    return (
        f"a traced value of type {x.type} was used outside the transformation it belongs to ({_origin(x)}). "
        "It was stored somewhere (a global, a list, an attribute) while that transformation ran; "
        "return it from the function instead."
    )


def _origin(x: Tracer) -> str:
    """The origin of a value: `grad of loss`, `grad of loss, in shard_map of body`."""
    interpreter: Interpreter | None = x.interpreter
    scope = x.interpreter.scope
    while interpreter is not None and interpreter.origin is None:
        interpreter = interpreter.outer
    known = [" of ".join(interpreter.origin)] if interpreter is not None else []
    if scope is not None and scope.function:
        known.append(f"shard_map of {scope.function}")
    return ", in ".join(known) or x.interpreter.name


class MisfitError(ValueError):
    """NumPy rejected the operands of an operation: its error, with their types."""

    def __init__(self, primitive: Primitive, args: Sequence[Value], reason: str = "they do not fit"):
        super().__init__(f"{primitive.name} of {' and '.join(map(shown, args))}: {reason}")


def shown(x: Any) -> str:
    """An operand in error messages: its type, or else its class and value."""
    return str(typeof(x)) if hasattr(x, "dtype") or is_scalar_constant(x) else f"{type(x).__name__} {x!r:.40}"


def is_misfit(primitive: Primitive, args: Sequence[Value], error: Exception) -> bool:
    """Whether NumPy's error names neither the operation nor the operands' types.

    An error that the user raises in the body of an operation is left unchanged, with its cause and context. Raise
    TypeError where a non-array operand is the reason.
    """
    if primitive.is_higher_order:
        return False
    if not isinstance(error, ValueError):
        for x in args:
            plain_operand(x)
    return type(error) is ValueError and not str(error).startswith(primitive.name)


EVALUATE = Evaluate(None)


def _bottom() -> Evaluate:
    """The bottom interpreter: `EVALUATE`, or the one that the environment selects."""
    if os.environ.get("MINIDIFF_DEBUG_NANS", "0") in ("", "0"):
        return EVALUATE
    from minidiff.debug import CheckFinite

    numpy.seterr(divide="raise", over="raise", invalid="raise")
    return CheckFinite()


#: Each thread and each asynchronous task has its own.
_current: ContextVar[Interpreter] = ContextVar("interpreter", default=_bottom())  # noqa: B039 (sharing one is intended)

#: `current_interpreter()` returns the interpreter that is current.
current_interpreter: Callable[[], Interpreter] = _current.get

#: `become(interpreter)` makes it current. The caller must restore the previous one, as `running` does.
become: Callable[[Interpreter], Any] = _current.set


class running:
    """`with running(interpreter):` makes it current, then restores the previous one."""

    __slots__ = ("interpreter", "previous")

    def __init__(self, interpreter: Interpreter):
        self.interpreter = interpreter

    def __enter__(self) -> Interpreter:
        self.previous = current_interpreter()
        become(self.interpreter)
        return self.interpreter

    def __exit__(self, *exc) -> None:
        become(self.previous)


def restores_interpreter(function: Callable) -> Callable:
    """Decorate a function to restore the current interpreter even after Ctrl-C.

    Ctrl-C raises KeyboardInterrupt at the start of a Python function or after a call. In `running` that may be after
    `__enter__` has called `become`, or before `__exit__` does; it cannot be before the first call of a `finally`
    clause. Decorating the outermost function is enough, so rules need not be decorated.
    """

    @functools.wraps(function)
    def call_and_restore(*args: Any, **kwargs: Any) -> Any:
        previous = current_interpreter()
        try:
            return function(*args, **kwargs)
        finally:
            become(previous)

    return call_and_restore


class transforming(running):
    """`with transforming(interpreter):` as `running`, then invalidate its tracers."""

    __slots__ = ()

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        self.interpreter.end()


class checking:
    """`with checking(scope, yes):` turn an explicit scope's checks on or off.

    They are on for the user's operations, and off for those that implement one (in derivative rules, say). The latter
    get pbroadcasts inserted as in any scope, since the user could not write them.
    """

    __slots__ = ("scope", "checks", "previous")

    def __init__(self, scope: Scope | None, yes: bool):
        self.scope = scope or Scope({})
        self.checks = yes and self.scope.explicit

    def __enter__(self) -> None:
        self.previous = self.scope.checks
        self.scope.checks = self.checks

    def __exit__(self, *exc) -> None:
        self.scope.checks = self.previous


def current_scope() -> Scope | None:
    """The innermost running `shard_map` body, or None outside one."""
    return current_interpreter().scope


def enter(x: Value) -> Value:
    """Make a tracer that the `shard_map` body closes over an unmapped input."""
    return current_interpreter().adopt(strong(x)) if isinstance(x, Tracer) else x


# ---------------------------------------------------------------- variance


def _no_pbroadcast(x: Value, axes: frozenset) -> Value:
    raise VarianceError(f"cannot insert a pbroadcast of {typeof(x)} along {sorted(axes)}: import collectives first")


#: Make a value vary along further axes, by a `pbroadcast`. A hook, which `collectives` sets: this layer does not
#: import the ones above it.
insert_pbroadcast: Callable[[Value, frozenset], Value] = _no_pbroadcast


def _no_dispatch(interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
    for x in args if isinstance(interpreter, Evaluate) else ():
        if isinstance(x, Tracer):
            raise LeakedTracerError(leak_message(x))


#: Apply an operation to sharded arrays outside any `shard_map` body: as a `shard_map` of it, under the given
#: interpreter. None if no operand is sharded. A hook, which `spmd` sets.
dispatch_to_shards: Callable[[Interpreter, Any, Sequence[Value], dict], Value] = _no_dispatch


def variance_of(x: Value) -> frozenset:
    """The axes along which `x` may differ from rank to rank."""
    return x.type.variance if isinstance(x, Tracer) else INVARIANT


def pbroadcast_to(x: Value, variance: frozenset) -> Value:
    """Insert a pbroadcast where `x` does not yet vary along all axes of `variance`."""
    missing = variance - variance_of(x)
    return insert_pbroadcast(x, missing) if missing else x


def agree(args: Sequence[Value]) -> Sequence[Value]:
    """Insert pbroadcasts to the union of the variances (JEP, "typing rules")."""
    variances = [None if is_scalar_constant(x) else variance_of(x) for x in args]
    distinct = {v for v in variances if v is not None}
    if len(distinct) <= 1:
        return args
    union = INVARIANT.union(*distinct)
    return [x if v is None or v == union else insert_pbroadcast(x, union - v) for x, v in zip(args, variances)]


def agree_as_written(operation: Primitive, args: Sequence[Value]) -> Sequence[Value]:
    """As `agree`, in an explicit scope: insert pbroadcasts for constants only.

    Raise VarianceError where traced values disagree.
    """
    check_operands(operation.name, [typeof(x) if isinstance(x, Tracer) else None for x in args])
    return agree(args)


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def check_operands(name: str, types: Sequence[ShapedArray | None]) -> None:
    """Raise VarianceError if the operands of operation `name` disagree in variance.

    A type of None stands for a constant, which agrees with anything.
    """
    if len({t.variance for t in types if t is not None}) > 1:
        numbers = [f"the {_ORDINALS[i]}" if i < len(_ORDINALS) else f"number {i + 1}" for i in range(len(types))]
        labelled = {label: t for label, t in zip(numbers, types) if t is not None}
        raise disagreement(f"{name}: operands {_listed([*labelled.values()])}", [*labelled], [*labelled.values()])


def disagreement(what: str, labels: Sequence[str], types: Sequence[ShapedArray]) -> VarianceError:
    """The error that values of these `labels` and `types` disagree in variance."""
    union = INVARIANT.union(*[t.variance for t in types])
    fewer: dict[str, list[str]] = {}
    for label, t in zip(labels, types):
        if t.variance != union:
            fewer.setdefault(show_axes(union - t.variance), []).append(label)
    advice = " and ".join(f"pbroadcast(x, {axes}) for {_listed(names)}" for axes, names in fewer.items())
    return VarianceError(f"{what} disagree in variance: write {advice}")


def _listed(items: Sequence[object]) -> str:
    """A list in a sentence: `a`, `a and b`, `a, b and c`."""
    *rest, last = map(str, items)
    return f"{', '.join(rest)} and {last}" if rest else last


def show_axes(axes: Sequence[str]) -> str:
    """Mesh axes, written as the argument of a collective: `'i'`, or `('i', 'j')`."""
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else tuple(sorted(axes))
    return repr(axes[0] if len(axes) == 1 else axes)


def joint_variance(what: str, labels: Sequence[str], values: Sequence[Value]) -> frozenset:
    """The union of the variances of values or types.

    Raise VarianceError in an explicit scope where they disagree, since the user must write the pbroadcasts there.
    Numbers agree with any variance. `what` and `labels` are as in `disagreement`.
    """
    scope = current_scope()
    if scope is not None and scope.checks:
        arrays = [(label, typeof(x)) for label, x in zip(labels, values) if not is_scalar_constant(x)]
        if len({t.variance for _, t in arrays}) > 1:
            raise disagreement(what, *zip(*arrays))
    return INVARIANT.union(*[typeof(x).variance for x in values])


# ---------------------------------------------------------------- operations


class Recording:
    """How the derivative of an operation is recorded on a linear tape.

    It is recorded as `operation`. `keep` picks its operands out of
    `(type of the result, result, *operands, *names of tangents)`.
    """

    __slots__ = ("operation", "keep", "types")

    def __init__(self, operation: Primitive, keep: Callable):
        self.operation = operation
        self.keep = keep
        #: A cache: the last operand types and result type. Without parameters nothing else determines the result type.
        self.types: tuple = (None, None, None)

    def type_of(self, out: Value, x: ShapedArray, y: ShapedArray | None) -> ShapedArray:
        """The type of a plain result of operands of types x and y, which is cached."""
        type = array_type(out.shape, out.dtype)
        self.types = x, y, type
        return type


class Primitive:
    """An operation and its rules; `minidiff/ops/base.py` has the subclasses.

    `impl(*arrays, **params)`
        runs it with NumPy.
    `shape_rule(*types, **params)`
        returns `(shape, dtype)` of the result. The result's variance is the union of the operands' variances.
    `fits(*types, **params)`
        says whether the operands and parameters are compatible, if `shape_rule` assumes it because the public
        functions have checked it. Only `Tape.check` calls it.
    `tangent(out, primals, tangents, params)`
        returns the tangent of the result, in terms of operations. A zero tangent is None. Subclasses define it.
    `jvp(primals, tangents, params)`
        returns the result and its tangent, for operations that compute them together.
    `transpose(ct, operands, params)`
        returns a cotangent for each operand. A linear operand has no value: `operands` holds its type, a
        :class:`ShapedArray`, in its place.
    `batch(args, batched, params)`
        applies the operation along a new leading axis of the operands whose `batched` is true.

    With `multiple_results`, the rules take and return lists in place of one result.
    """

    is_view = False  # it computes nothing: its result is its operand rearranged or retyped
    shares_memory = False  # its result may share memory with an operand
    is_higher_order = False  # it runs a body, a function or a tape: shard_map, scan, checkpoint
    is_inlined = False  # its body is the user's function, and part of the surrounding program
    multiple_results = False
    commutes = False  # its operands, with their `per_operand` parameters, may be reordered
    per_operand: Sequence[str] = ()  # the parameters with one entry per operand
    operands_agree = True  # pbroadcasts are inserted where operands' variances disagree
    takes_types = False  # an operand may be a type, if its value is not read
    communicates = False  # it may communicate between ranks: see `sends`
    on_ranks = False  # it is only defined on ranks
    has_effect = False  # it has a side effect: see `minidiff.tape.has_effects`
    each: Primitive | None = None  # for a variadic operation, the one that it applies to each operand
    fits: Callable[..., bool] | None = None

    def __init__(self, name: str, impl: Callable | None = None, shape_rule: Callable | None = None):
        self.name = name
        self.impl = impl
        self.run = impl  # the same, or a variant that is faster on numbers
        self.shape_rule = shape_rule
        # Whether the tangent is computed from the result, so that the two can be computed separately.
        self.by_parts = type(self).jvp is Primitive.jvp and not self.is_higher_order
        #: Which operands are active -> how the derivative in these is recorded; filled on demand. The key in binary is
        #: a 1, then for each operand, last one first, a 1 if it is active and a 0 if not.
        self.recorded: dict[int, Recording] = {}
        #: `transpose` for plain arrays: for each linear operand (they follow `count` others) a function
        #: `(ct, *operands, **params)`. Its result, summed over the broadcast axes and converted, is the operand's
        #: cotangent. It gets the linear operands as names with a type. None means that the result is `ct` itself.
        self.pulls: Sequence[Callable | None] | None = None
        self.count = 0

    def bind(self, *args: Value, **params) -> Value:
        """Apply the operation under the current interpreter."""
        interpreter = current_interpreter()
        if interpreter.scope is None:
            return interpreter.process(self, args, params)
        if WeakTracer in map(type, args):
            args = self.strong(args)
        args = [interpreter.adopt(x) if isinstance(x, Tracer) else x for x in args]
        if interpreter.scope.checks:
            return self.apply_checked(interpreter, args, params)
        if self.operands_agree and len(args) > 1:
            args = agree(args)
        return self.apply(interpreter, args, params)

    def strong(self, args: Sequence[Value]) -> list[Value]:
        """Unwrap each `WeakTracer`, with the dtype to which NumPy promotes the number."""
        from minidiff.ops.base import promoted  # only Python numbers need it

        return promoted(self, args)

    def apply_checked(self, interpreter: Interpreter, args: Sequence[Value], params: dict) -> Value:
        """Apply the user's operation, or raise VarianceError if it lacks a pbroadcast."""
        if self.is_inlined:
            return self.apply(interpreter, args, params)
        if self.operands_agree and args and not self.is_higher_order and not any(isinstance(x, Tracer) for x in args):
            with running(EVALUATE):  # the result of constants is a constant
                return self.bind(*args, **params)
        if self.operands_agree and len(args) > 1:
            args = agree_as_written(self, args)
        if not self.is_higher_order:
            arrays = [x for x in args if not (self.operands_agree and is_scalar_constant(x))]
            self.check_variance([typeof(x) for x in arrays], params)
        with checking(interpreter.scope, False):
            return self.apply(interpreter, args, params)

    def apply(self, interpreter: Interpreter, args: Sequence[Value], params: dict) -> Value:
        """Apply the operation under an interpreter, to operands that it has adopted."""
        out = interpreter.process(self, args, params)
        if self.is_view and interpreter.scope is not None:
            interpreter.scope.remember(out if self.multiple_results else [out], self, args[0], params)
        return out

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        """Infer the result types from operand types, or from Python numbers."""
        results = self.shape_rule(*types, **params)
        variance = INVARIANT
        for t in types:
            if isinstance(t, ShapedArray) and t.variance:
                variance |= t.variance
        return [
            ShapedArray(shape, dtype, variance) for shape, dtype in (results if self.multiple_results else [results])
        ]

    def check_fits(self, types: Sequence[ShapedArray], params: dict, scope: Scope | None) -> None:
        """Raise an error if operand types and parameters are incompatible: see `fits`.

        `scope` is the `shard_map` body that contains the operation, if it is known.
        """
        if self.impl is not None:
            check_call(self.impl, len(types), params)
        if self.fits is not None and not self.fits(*types, **params):
            raise ValueError(f"they do not fit {self.show_params(params) or 'each other'}")

    def sends(self, params: dict) -> bool:
        """Whether it communicates between ranks, given these parameters."""
        return self.communicates

    def sums(self, params: dict) -> dict[int, dict]:
        """Map the body results that are partial sums to the parameters of their `psum`."""
        return {}

    def without_unused_results(self, eqn: Any, used: Sequence[bool]) -> Any:
        """Eliminate dead code: unused results, and what only they need in a body."""
        return eqn

    def check_variance(self, types: Sequence[ShapedArray], params: dict) -> None:
        """Raise VarianceError if the operand types violate the typing rules."""
        if self.operands_agree:
            check_operands(self.name, types)

    def jvp(self, primals, tangents, params):
        out = self.bind(*primals, **params)
        return out, self.tangent(out, primals, tangents, params)

    def tangent(self, out, primals, tangents, params):
        raise TypeError(f"{self.name} cannot be differentiated: it has no derivative rule")

    def linearized(self, out, type, primals, active, names, params) -> Any:
        """The tangent as one linear equation: operation, operands and parameters.

        `type` is the type of `out`, `active` are the positions of the operands that have a tangent, and `names` are
        the tangents' names on the tape. Return one of the names if the tangent equals it, and None if the tangent
        takes more than one equation.
        """
        return None

    def transpose(self, ct, operands, params):
        from minidiff.location import here  # only errors need it

        x, source = next(x for x in operands if isinstance(x, ShapedArray)), here()
        raise TypeError(
            f"{self.name} cannot be transposed: it is not linear in the operand of type {x}"
            + (f" ({source})" if source is not None else "")
            + ". Only a linear function has a transpose; else transpose the derivative, md.linearize(f, *args)[1]"
        )

    def batch(self, args, batched, params):
        raise TypeError(f"{self.name} cannot be vectorised: it has no batching rule")

    def show_params(self, params: dict) -> str:
        """The parameters as tapes print them, after the operands."""
        shown = {k: dtype_name(v) if isinstance(v, numpy.dtype) else repr(v) for k, v in params.items()}
        return ", ".join(f"{k}={v}" for k, v in shown.items())

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def check_call(function: Callable, count: int, names: Iterable[str]) -> None:
    """Raise ValueError unless a function takes these operands and parameters."""
    if not _takes(function, count, frozenset(names)):
        operands = "1 operand" if count == 1 else f"{count} operands"
        raise ValueError(f"it does not take {operands} and the parameters ({', '.join(sorted(names))})")


@functools.cache
def _takes(function: Callable, count: int, names: frozenset[str]) -> bool:
    import inspect  # only `Tape.check` needs it

    if isinstance(function, numpy.ufunc):  # one more operand would be `out`
        return function.nin == count and not names
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        return True
    return True


# ---------------------------------------------------------------- tracers

#: NumPy function -> its implementation on tracers. `implements` fills it.
NUMPY_FUNCTIONS: dict[Callable, Callable] = {}

#: Ufunc -> its operation, if the implementation only binds that.
OPERATIONS: dict[numpy.ufunc, Primitive] = {}

NO_PARAMS: dict = {}


def implements(*numpy_functions: Callable) -> Callable[[Callable], Callable]:
    """Decorate the implementation of these NumPy functions on tracers."""

    def register(function):
        for f in numpy_functions:
            NUMPY_FUNCTIONS[f] = function
            if isinstance(f, numpy.ufunc) and hasattr(function, "primitive"):
                OPERATIONS[f] = function.primitive
        return function

    return register


#: Uses of a concrete integer, as errors list them.
SIZE = "a size, an index of a list or range()"


class Tracer:
    """A value traced by an interpreter. It behaves like the array it stands for.

    It has the operators, indexing and methods of `numpy.ndarray` (attached in
    `minidiff/ops/operators.py`), and NumPy functions accept it.
    """

    __slots__ = ("interpreter", "__weakref__")
    __array_priority__ = 1000
    __hash__ = object.__hash__

    if TYPE_CHECKING:  # declare the attached operators to type checkers

        def __getattr__(self, name: str) -> Any: ...
        def _operator(self, *operands: Any) -> Any: ...

        __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = __divmod__ = _operator
        __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _operator
        __rdivmod__ = __pow__ = __rpow__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = _operator
        __rand__ = __ror__ = __rxor__ = __rlshift__ = __rrshift__ = __lt__ = __le__ = __gt__ = __ge__ = _operator
        __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __getitem__ = __iter__ = __contains__ = _operator

    def __init__(self, interpreter: Interpreter):
        self.interpreter = interpreter

    @property
    def type(self) -> ShapedArray:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> numpy.dtype:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.type.size

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.type.nbytes

    def check_alive(self) -> None:
        """Raise LeakedTracerError if this value's transformation has ended."""
        if self.interpreter.ended:
            raise LeakedTracerError(leak_message(self))

    def check_own(self, interpreter: Interpreter) -> None:
        """Raise LeakedTracerError if this value's interpreter is not running."""
        raise LeakedTracerError(leak_message(self))

    def concrete(self, use: str) -> numpy.ndarray:
        """The concrete array for `use` (a Python `if`, say), or raise TracerError."""
        self.check_alive()
        raise TracerError(f"{use} needs a concrete value, but {self.type} is traced by {self.interpreter.name}")

    def __bool__(self) -> bool:
        return bool(self.concrete("a Python condition"))

    def __float__(self) -> float:
        return float(self.concrete("float()"))

    def __int__(self) -> int:
        return int(self.concrete("int()"))

    def __complex__(self) -> complex:
        return complex(self.concrete("complex()"))

    def __index__(self) -> int:
        return operator.index(self.concrete(SIZE))

    def item(self) -> Any:
        return numpy.asarray(self.concrete("item()")).item()

    def __format__(self, spec: str) -> str:
        return str(self)

    def __copy__(self) -> Tracer:
        return self  # it is immutable

    def __deepcopy__(self, memo: dict) -> Tracer:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TracerError(
            f"a traced value ({self.type}) cannot be pickled: it is only valid within its transformation. "
            "Return it from the function, and pickle the result; or, for its plain number, x.item()"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d value")
        return self.shape[0]

    def __setitem__(self, index, value):
        raise TypeError(
            f"a traced value ({self.type}) cannot be written into: x[i] = v would change a value that is "
            "already in use. Make a new value instead: x = x.at[i].set(v), and for x[i] += v, x = x.at[i].add(v); for "
            "a plain array x, minidiff.numpy.at(x)[i].set(v)."
        )

    def __array__(self, dtype=None, copy=None):
        self.check_alive()
        if dtype is not None:  # as in np.float32(x), and in np.asarray(x, dtype)
            return self._as_plain(numpy.dtype(dtype))
        raise TracerError(
            f"a traced value ({self.type}) cannot become a plain NumPy array: its derivative would be lost. "
            "Call functions on it directly; to build an array out of traced values, use minidiff.numpy.array or "
            "np.stack; to index a plain array with it, minidiff.numpy.take. Other kinds of arrays convert their right "
            "operand: write m.filled(value) for a masked one, table.to_numpy(), sparse.toarray()."
        )

    def _as_plain(self, dtype: numpy.dtype) -> numpy.ndarray:
        """Convert to an integer or boolean array; TracerError for other dtypes."""
        why = "its derivative would be lost"
        if dtype.kind in "biu":
            try:
                return numpy.asarray(self.concrete(f"a plain array of dtype {dtype}")).astype(dtype)
            except TracerError:
                why = f"in {self.interpreter.name} it has no value"
        raise TracerError(
            f"a traced value ({self.type}) cannot become a plain NumPy array of dtype {dtype}: {why}. To convert it, "
            f"write x.astype({dtype.name!r}); to build an array, use minidiff.numpy.array or np.stack."
        )

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        interpreter = current_interpreter()
        if interpreter is EVALUATE:
            self.check_own(interpreter)
        if method == "__call__" and not kwargs:  # the fast path, for nearly all calls
            primitive, function = OPERATIONS.get(ufunc), None
            try:
                if primitive is not None and interpreter.scope is None:
                    return interpreter.process(primitive, inputs, NO_PARAMS)
                function = NUMPY_FUNCTIONS.get(ufunc)
                if function is not None:
                    return function(*inputs)
            except (AttributeError, TypeError) as error:
                if any(map(defers_to, inputs)):
                    return NotImplemented
                inputs, _ = _in_another_form(error, ufunc, NUMPY_FUNCTIONS[ufunc], inputs, {})
                return self.__array_ufunc__(ufunc, method, *inputs)
        from minidiff.numpy import dispatch

        return dispatch.call_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, func, types, args, kwargs):
        function = NUMPY_FUNCTIONS.get(func)
        if function is None:
            from minidiff.numpy import dispatch

            return dispatch.call_otherwise(func, args, kwargs)
        try:
            return function(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            args, kwargs = _in_another_form(error, func, function, args, kwargs)
        return self.__array_function__(func, types, args, kwargs)


def defers_to(x: Any) -> bool:
    """Whether a tracer, like NumPy, defers an operation to this operand's class.

    It defers if the class overrides `__array_ufunc__` (or sets it to None), or else has a higher `__array_priority__`.
    Operations look for such an operand only after an error, so that the common case pays nothing.
    """
    if isinstance(x, Tracer):
        return False
    if hasattr(type(x), "__array_ufunc__"):
        return type(x).__array_ufunc__ is not numpy.ndarray.__array_ufunc__
    return getattr(x, "__array_priority__", 0) > Tracer.__array_priority__


# ---------------------------------------------------------------- Python numbers


class WeakTracer(Tracer):
    """A traced Python number, which wraps the tracer of its value.

    It promotes as Python numbers do in NumPy (NEP 50). Combined with an array it takes the array's precision (2.0 with
    float32 is float32); a Python operator on weak numbers gives a weak number (`minidiff/ops/operators.py`); anything
    else makes it float64, int64 or complex128. Only the user's function sees it: interpreters and tapes get its
    `value`, converted (`Primitive.strong`).
    """

    __slots__ = ("value", "is_bool")
    __hash__ = object.__hash__
    interpreter = property(lambda self: self.value.interpreter)

    def __init__(self, value: Tracer, is_bool: bool = False):
        self.value = value
        self.is_bool = is_bool

    @property
    def type(self) -> ShapedArray:
        return self.value.type

    def concrete(self, use: str) -> Any:
        return self.value.concrete(use)

    def __float__(self) -> float:
        return float(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return strong(super().__array_ufunc__(ufunc, method, *inputs, **kwargs))

    def __array_function__(self, func, types, args, kwargs):
        return strong(super().__array_function__(func, types, args, kwargs))


#: The types of values that promote weakly.
WEAK_TYPES = frozenset({bool, int, float, complex, WeakTracer})


_PYTHON_TYPES = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def python_type(x: Any) -> type:
    """The type of the Python number that a weakly promoting value stands for."""
    return _PYTHON_TYPES[x.dtype.kind] if type(x) is WeakTracer else type(x)


def promoting(x: Value) -> Any:
    """The argument for `numpy.result_type`: a dtype, or a Python number."""
    return python_type(x)(0) if type(x) in WEAK_TYPES else x.dtype


def are_weak(leaves: Iterable[Any]) -> list[bool]:
    """Which arguments are Python numbers, traced or not, as `weak_where` takes it."""
    return [type(x) in WEAK_TYPES for x in leaves]


def weak_where(weak: Sequence[bool], values: Sequence[Value]) -> Sequence[Value]:
    """Convert the values marked as `weak` back to Python numbers."""
    return [as_weak(x) if yes else x for x, yes in zip(values, weak)] if True in weak else values


def as_weak(x: Value) -> Value:
    """Convert a number to a Python number, or a tracer to one that promotes like it."""
    kind = x.dtype.kind
    return WeakTracer(x, kind == "b") if isinstance(x, Tracer) else x.item() if kind in _PYTHON_TYPES else x


def strong(x: Any) -> Any:
    """Unwrap a `WeakTracer`; return anything else unchanged."""
    return x.value if type(x) is WeakTracer else x


def _in_another_form(error: Exception, func: Callable, function: Callable, args: tuple, kwargs: dict):
    """Convert rejected arguments to an accepted form, or raise an error."""
    from minidiff.numpy import dispatch  # only needed after an error

    form = dispatch.in_another_form(func, function, args, kwargs)
    if form is None:
        raise error
    return form
