"""Types, operations, tracers, and the interpreter that is current: what all else stands on.

A program is a sequence of *operations* (:class:`Primitive`) on values. What an operation does when
it is applied is decided by the *current interpreter*: evaluate it with NumPy, push a tangent through
it, write it on a tape, run it on every rank. A function transformation installs an interpreter, runs
the user's function on that interpreter's :class:`Tracer`\\ s, and puts the previous one back.

Interpreters are stacked: each one's rules are written in operations, and run under the interpreter
beneath it. A tracer belongs to one interpreter, and to any other it is a constant. That is why
derivatives of derivatives come out right without anyone thinking about them.
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

#: The dtype of tangents and cotangents of integers and booleans: it has no values.
float0 = numpy.dtype([("float0", numpy.void, 0)])


# ---------------------------------------------------------------- errors


class TracerError(TypeError):
    """A traced value was used where only a concrete one can serve."""


class LeakedTracerError(TracerError):
    """A traced value was used after the transformation that made it had ended."""


class VarianceError(TypeError):
    """A value varies along mesh axes where it must not, or the reverse."""


class UnboundAxisError(NameError):
    """A collective named an axis that no `shard_map` or `vmap` around it binds."""


# ---------------------------------------------------------------- types


class ShapedArray:
    """The type of a value: `ShapedArray(shape, dtype, variance)`, printed as `f64[3,4]{i}`.

    `variance` is the set of mesh axes along which the value may differ from rank to rank. It is empty
    outside a `shard_map`, and is not printed then. There `layout` says, to `spmd` alone, how a value that is
    split over the ranks of a mesh lies on them; None for all others. It is no part of what types are compared by.

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
        """The same type with some of `shape`, `dtype`, `variance` changed."""
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
        from minidiff.show.colours import types_as_html  # which notebooks alone need

        return f"<code>{types_as_html(str(self))}</code>"


def dtype_name(dtype: numpy.dtype) -> str:
    """`f64`, `i32`, `c128`, `bool`: a dtype as types print it."""
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
    """The type of plain arrays of a shape and dtype: always the same object, as long as it is in use."""
    check_dtype(dtype)
    return ShapedArray(shape, dtype)


def is_differentiable(dtype: numpy.dtype) -> bool:
    """Whether values of this dtype carry derivatives: floating point and complex ones do."""
    return numpy.dtype(dtype).kind in "fc"


def is_scalar_constant(x: Value) -> bool:
    """Whether `x` is a Python or NumPy number: tapes print it in place, and it agrees with any variance."""
    return isinstance(x, (bool, int, float, complex, numpy.generic))


# ---------------------------------------------------------------- which values are arrays

#: The dtypes of numbers, in this machine's byte order.
NATIVE = frozenset(map(numpy.dtype, "?bhilqBHILQefdgFDG"))

#: Types of values that need no look: plain arrays and numbers. `plain` looks at all others.
PLAIN = frozenset({numpy.ndarray, bool, int, float, complex, *(dtype.type for dtype in NATIVE)})

#: What to write instead of arrays of these kinds of dtype.
_INSTEAD_OF_DTYPES = {
    "O": "convert it to one of numbers (of rows that have one length), as in x.astype(float)",
    "M": "count from a moment, as in (x - x[0]) / numpy.timedelta64(1, 's')",
    "m": "divide it by a unit, as in x / numpy.timedelta64(1, 's')",
    **dict.fromkeys("SUT", "convert it to numbers, as in x.astype(float)"),
}

#: What to write instead of values that have an attribute of this name. The first one counts.
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
    """Return a plain array or a number as it is, and a memory map as a plain array.

    Raises TypeError for any other value. NumPy would convert many of them, but lose a mask, an index or a unit, so the
    error says what the user should write instead; of the leaf of a tree, also what a tree is made of.
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
        from minidiff.tree import class_names  # which errors alone need

        advice += f" (trees are made of {', '.join(class_names())})"
    raise TypeError(f"expected an array or a number, got {type(x).__name__}: {advice}")


def plain_operand(x: Any) -> Any:
    """Apply `plain` to an operand, which may also be a traced value, a type, or a list."""
    if isinstance(x, (list, tuple)):
        for item in x:
            plain_operand(item)
        return x
    return x if isinstance(x, (Tracer, ShapedArray, range)) or x is None else plain(x)


def check_dtype(dtype: numpy.dtype) -> None:
    """Raise TypeError for a dtype that is not numeric, and say what to convert the array to."""
    if dtype in NATIVE or dtype == float0 or (dtype.isbuiltin != 2 and dtype.kind in "biufc"):
        return
    if dtype.names is not None:
        advice = f"take its fields one by one, as in x[{dtype.names[0]!r}]" if dtype.names else "it has no fields"
    else:
        advice = _INSTEAD_OF_DTYPES.get(dtype.kind, "convert it, as in x.astype(numpy.float32)")
    raise TypeError(f"expected an array of numbers, got one of dtype {dtype}: {advice}")


# ---------------------------------------------------------------- interpreters


class Scope:
    """The body of a `shard_map` while it runs: the axes it binds, and whether it is typed.

    `axes` maps the name of each axis to its size. In an untyped scope (`check_rep=False`) variances
    are not tracked: every type's variance is empty and nothing is lifted. In an explicit one
    (`auto_pbroadcast=False`) the user's operations are not lifted, but checked, where they must agree.
    """

    __slots__ = ("axes", "typed", "explicit", "checks", "bottom", "views", "function", "transposed")

    def __init__(self, axes: dict, typed: bool = True, explicit: bool = False):
        self.axes = dict(axes)
        self.typed = typed
        self.explicit = explicit
        self.checks = False  # whether what is applied now is the user's, in an explicit scope: see `checking`
        self.bottom: Interpreter | None = None
        self.function = ""  # the name of the function whose body it is
        self.views: dict = {}  # id of value -> (values, primitive, operand, params): see `remember`
        self.transposed = 0  # how often, in this body, something was: see `transposes`

    def transposes(self) -> None:
        """Keep in mind, also in the bodies around this one, that something is transposed.

        What comes of that depends on types: the cotangent of what is the same on all ranks is their sum.
        """
        self.transposed += 1
        outer = self.bottom.outer if self.bottom is not None else None
        if outer is not None and outer.scope is not None:
            outer.scope.transposes()

    def remember(self, outs: Sequence[Value], primitive: Primitive, operand: Value, params: dict) -> None:
        """Keep in mind how views were made of a value that does not vary along all axes.

        Lifting the view is then lifting what it is a view of: a weight and its transpose are one value, not two.
        And a view need not be kept for the backward pass: it can be made again.
        """
        if self.typed and len(variance_of(operand)) < len(self.axes):
            self.views.update((id(out), (outs, primitive, operand, params)) for out in outs)

    def view_of(self, x: Value) -> tuple[Sequence[Value], Primitive, Value, dict] | None:
        """The results, operation, operand and parameters that made `x`, if it was remembered as a view."""
        return self.views.get(id(x))


class Interpreter:
    """What operations mean while it is current. Subclasses implement `process`.

    `below` is the interpreter its rules run under; `scope` the `shard_map` body it works in. `outer`
    is its counterpart outside that body, if there is one: a transformation *around* a `shard_map`
    continues inside with an interpreter of its own, and `adopt` brings values across.
    """

    name = "interpreter"
    origin: tuple[str, str] | None = None  # the transformation and the function that errors speak of
    ended = False  # whether the transformation is over: its tracers have no meaning any more
    keeps_sources = False  # whether operations recorded above it are to know their line of the program
    watch: Callable | None = None  # what derivative rules are applied by while `debug_nans` is on: see `debug.py`

    def __init__(self, below: Interpreter | None, outer: Interpreter | None = None):
        self.below = below
        self.outer = outer
        self.scope: Scope | None = below.scope if below is not None else None
        self.lifted: dict = {}  # (id of value, axes) -> (value, the value lifted along the axes)
        self._adopted: dict = {}  # id of outer tracer -> (outer tracer, its counterpart here)

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        """The result of an operation. What rules it needs, it runs under the interpreter `below`."""
        raise NotImplementedError

    def lower(self, tape: Any, values: Sequence[Value]) -> Sequence[Value] | None:
        """The results of a compiled tape on values of this interpreter; None if it has no way but to apply it."""
        return None

    def adopt(self, x: Value) -> Value:
        """A value that a `shard_map` body closes over, as a value of this interpreter's body.

        The user did not write it down as an argument, but an argument it is: an unmapped one. It is
        adopted once, so that using it twice is using one value twice.
        """
        if not isinstance(x, Tracer) or x.interpreter.scope is self.scope:
            return x
        known = self._adopted.get(id(x))
        if known is None:
            known = self._adopted[id(x)] = (x, self._adopt(x))
        return known[1]

    def _adopt(self, x: Tracer) -> Value:
        if self.outer is not None:
            x = self.outer.adopt(x)
            if isinstance(x, Tracer) and x.interpreter is self.outer:
                return self.adopt_own(x)
        if self.below is None:
            raise LeakedTracerError(leak_message(x))
        return self.below.adopt(x)

    def adopted(self) -> dict[int, Tracer]:
        """The values that were adopted so far: id of the value here -> the one outside that it stands for."""
        return {id(here): outside for outside, here in self._adopted.values()}

    def end(self) -> None:
        """The transformation is over. What it kept in mind goes at once: tracers and interpreters hold each other."""
        self.ended = True
        self.lifted.clear()
        self._adopted.clear()
        if self.scope is not None and self.scope.bottom is self:
            self.scope.bottom = None
            self.scope.views.clear()

    def adopt_own(self, x: Tracer) -> Value:
        """The counterpart here of `x`, a tracer of `self.outer`."""
        raise NotImplementedError


class Evaluate(Interpreter):
    """The interpreter at the bottom of every stack: operations are applied to NumPy arrays."""

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
    """What errors call a function."""
    return getattr(f, "__name__", "f")


def leak_message(x: Tracer) -> str:
    return (
        f"a traced value of type {x.type} was used outside the transformation it belongs to ({_origin(x)}). "
        "It was stored somewhere (a global, a list, an attribute) while that transformation ran; "
        "return it from the function instead."
    )


def _origin(x: Tracer) -> str:
    """Where a value comes from: `grad of loss`, `grad of loss, in shard_map of body`."""
    interpreter: Interpreter | None = x.interpreter
    scope = x.interpreter.scope
    while interpreter is not None and interpreter.origin is None:
        interpreter = interpreter.outer
    known = [" of ".join(interpreter.origin)] if interpreter is not None else []
    if scope is not None and scope.function:
        known.append(f"shard_map of {scope.function}")
    return ", in ".join(known) or x.interpreter.name


class MisfitError(ValueError):
    """NumPy refused the operands of an operation: the error, with their types."""

    def __init__(self, primitive: Primitive, args: Sequence[Value], reason: str = "they do not fit"):
        super().__init__(f"{primitive.name} of {' and '.join(map(shown, args))}: {reason}")


def shown(x: Any) -> str:
    """An operand as errors show it: its type, or what it is."""
    return str(typeof(x)) if hasattr(x, "dtype") or is_scalar_constant(x) else f"{type(x).__name__} {x!r:.40}"


def is_misfit(primitive: Primitive, args: Sequence[Value], error: Exception) -> bool:
    """Whether NumPy refused an operation by an error that names neither it nor its operands' types.

    An error of the user's, in the body of an operation, stands as it is, with its cause and its context. Raises
    TypeError where an operand is the reason.
    """
    if primitive.is_higher_order:
        return False
    if not isinstance(error, ValueError):
        for x in args:
            plain_operand(x)
    return type(error) is ValueError and not str(error).startswith(primitive.name)


EVALUATE = Evaluate(None)


def _bottom() -> Evaluate:
    """What every stack begins with: `EVALUATE`, or the interpreter that the environment asks for."""
    if os.environ.get("MINIDIFF_DEBUG_NANS", "0") in ("", "0"):
        return EVALUATE
    from minidiff.debug import CheckFinite

    numpy.seterr(divide="raise", over="raise", invalid="raise")
    return CheckFinite()


#: Each thread has its own, and so has each asynchronous task.
_current: ContextVar[Interpreter] = ContextVar("interpreter", default=_bottom())  # noqa: B039 (one for all is meant)

#: `current_interpreter()` is the interpreter that gives operations their meaning right now.
current_interpreter: Callable[[], Interpreter] = _current.get

#: `become(interpreter)` makes it the current one: who calls it puts the previous one back, as `running` does.
become: Callable[[Interpreter], Any] = _current.set


class running:
    """`with running(interpreter):` makes it the current one, then puts the previous one back."""

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
    """Decorate a function that installs interpreters, so that no interrupt can leave one of them current.

    Ctrl-C raises KeyboardInterrupt at the start of a Python function or after a call. In `running` that may be after
    `__enter__` has called `become`, or before `__exit__` does; it cannot be before the first call of a `finally`
    clause. The outermost function puts right what blocks within it left behind, so rules need not be decorated.
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
    """`with transforming(interpreter):` for the whole of a transformation: afterwards its tracers are dead."""

    __slots__ = ()

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        self.interpreter.end()


class checking:
    """`with checking(scope, yes):` says whether the operations in it are the user's, which an explicit scope checks.

    Those that carry out one of the user's (derivative rules, say) are not: they are lifted as in any scope, since the
    user could not write it.
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
    """The innermost `shard_map` body that is running, or None outside one."""
    return current_interpreter().scope


def enter(x: Value) -> Value:
    """`x` as the running `shard_map` body sees it: closed-over tracers become unmapped inputs."""
    return current_interpreter().adopt(strong(x)) if isinstance(x, Tracer) else x


# ---------------------------------------------------------------- variance


def _no_pbroadcast(x: Value, axes: frozenset) -> Value:
    raise VarianceError(f"nothing is loaded that can lift {typeof(x)} along {sorted(axes)}")


#: One of the two threads that run upward through the layers: `collectives` puts here the function that types
#: a value as varying along further axes, by a `pbroadcast`.
insert_pbroadcast: Callable[[Value, frozenset], Value] = _no_pbroadcast


def _no_dispatch(interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
    for x in args if isinstance(interpreter, Evaluate) else ():
        if isinstance(x, Tracer):
            raise LeakedTracerError(leak_message(x))


#: The other one: `spmd` puts here what an operation is on values that lie on the ranks of a mesh, outside of any body:
#: a `shard_map` of it, under the given interpreter. None where no operand is such a value.
dispatch_to_shards: Callable[[Interpreter, Any, Sequence[Value], dict], Value] = _no_dispatch


def variance_of(x: Value) -> frozenset:
    """The axes along which `x` may differ from rank to rank."""
    return x.type.variance if isinstance(x, Tracer) else INVARIANT


def pbroadcast_to(x: Value, variance: frozenset) -> Value:
    """`x`, lifted so that its type's variance is `variance`."""
    missing = variance - variance_of(x)
    return insert_pbroadcast(x, missing) if missing else x


def agree(args: Sequence[Value]) -> Sequence[Value]:
    """The operands of an ordinary operation, lifted to the union of their variances (JEP, "typing rules")."""
    variances = [None if is_scalar_constant(x) else variance_of(x) for x in args]
    distinct = {v for v in variances if v is not None}
    if len(distinct) <= 1:
        return args
    union = INVARIANT.union(*distinct)
    return [x if v is None or v == union else insert_pbroadcast(x, union - v) for x, v in zip(args, variances)]


def agree_as_written(operation: Primitive, args: Sequence[Value]) -> Sequence[Value]:
    """Operands in an explicit scope: constants agree with anything, and are lifted.

    Raises VarianceError where traced values disagree.
    """
    check_operands(operation.name, [typeof(x) if isinstance(x, Tracer) else None for x in args])
    return agree(args)


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def check_operands(name: str, types: Sequence[ShapedArray | None]) -> None:
    """Raise VarianceError where operands of these types, of the operation of this name, disagree in variance.

    None stands for a constant, which agrees with anything.
    """
    if len({t.variance for t in types if t is not None}) > 1:
        numbers = [f"the {_ORDINALS[i]}" if i < len(_ORDINALS) else f"number {i + 1}" for i in range(len(types))]
        labelled = {label: t for label, t in zip(numbers, types) if t is not None}
        raise disagreement(f"{name}: operands {_listed([*labelled.values()])}", [*labelled], [*labelled.values()])


def disagreement(what: str, labels: Sequence[str], types: Sequence[ShapedArray]) -> VarianceError:
    """The error for values that disagree in variance: `what` says so of them all, `labels` are names for each."""
    union = INVARIANT.union(*[t.variance for t in types])
    fewer: dict[str, list[str]] = {}
    for label, t in zip(labels, types):
        if t.variance != union:
            fewer.setdefault(show_axes(union - t.variance), []).append(label)
    lifts = " and ".join(f"pbroadcast(x, {axes}) for {_listed(those)}" for axes, those in fewer.items())
    return VarianceError(f"{what} disagree in variance: write {lifts}")


def _listed(items: Sequence[object]) -> str:
    """As in a sentence: `a`, `a and b`, `a, b and c`."""
    *rest, last = map(str, items)
    return f"{', '.join(rest)} and {last}" if rest else last


def show_axes(axes: Sequence[str]) -> str:
    """Mesh axes as a collective is called with them: `'i'`, or `('i', 'j')`."""
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else tuple(sorted(axes))
    return repr(axes[0] if len(axes) == 1 else axes)


def joint_variance(what: str, labels: Sequence[str], values: Sequence[Value]) -> frozenset:
    """The variance of values that will be lifted to their union; VarianceError where the user must write that.

    They are values or types; numbers agree with any variance. `what` and `labels` as in `disagreement`.
    """
    scope = current_scope()
    if scope is not None and scope.checks:
        arrays = [(label, typeof(x)) for label, x in zip(labels, values) if not is_scalar_constant(x)]
        if len({t.variance for _, t in arrays}) > 1:
            raise disagreement(what, *zip(*arrays))
    return INVARIANT.union(*[typeof(x).variance for x in values])


# ---------------------------------------------------------------- operations


class Recording:
    """How the derivative of an operation stands on a tape of linear parts: as what operation, and what that takes.

    `keep` picks its operands out of `(type of the result, result, *operands, *names of tangents)`.
    """

    __slots__ = ("operation", "keep", "types")

    def __init__(self, operation: Primitive, keep: Callable):
        self.operation = operation
        self.keep = keep
        #: The last types of both operands, and of their result. Without parameters it depends on nothing else.
        self.types: tuple = (None, None, None)

    def type_of(self, out: Value, x: ShapedArray, y: ShapedArray | None) -> ShapedArray:
        """The type of a result, a plain value, of operands of types x and y."""
        type = array_type(out.shape, out.dtype)
        self.types = x, y, type
        return type


class Primitive:
    """An operation, with all its rules. Kinds of operation are subclasses (`minidiff/ops/base.py`).

    `impl(*arrays, **params)`
        runs it with NumPy.
    `shape_rule(*types, **params)`
        gives `(shape, dtype)` of the result; the result's variance is that of the operands.
    `fits(*types, **params)`
        says whether the operands and parameters go together, where `shape_rule` takes that for granted, since the
        functions that users call made sure of it. Only `Tape.check` asks.
    `tangent(out, primals, tangents, params)`
        gives the tangent of the result, in operations; a tangent that is zero is None. Kinds supply it.
    `jvp(primals, tangents, params)`
        gives the result and its tangent, where one is not computed without the other.
    `transpose(ct, operands, params)`
        gives a cotangent for each operand. A linear operand is known by its type alone: in `operands`
        a :class:`ShapedArray` stands where the others have their values.
    `batch(args, batched, params)`
        applies it along a new leading axis of those operands whose `batched` is true.

    With `multiple_results` the rules take and give lists where others take and give one result.
    """

    is_view = False  # it computes nothing: its result is its operand, differently arranged or typed
    shares_memory = False  # its result may be (a part of) an operand's memory
    is_higher_order = False  # a body is a function, or a tape, that the operation runs: shard_map, scan, checkpoint
    is_inlined = False  # its body is a function of the user's, a part of the program around it
    multiple_results = False
    commutes = False  # the order of its operands, with the parameters `per_operand`, means nothing
    per_operand: Sequence[str] = ()  # the parameters that have an entry for each operand
    operands_agree = True  # operands that disagree in variance are lifted to their union
    takes_types = False  # for an operand whose value it does not read, a type may stand
    communicates = False  # it may: see `sends`
    on_ranks = False  # it means something on ranks only
    has_effect = False  # it does something besides giving results: see `minidiff.tape.has_effects`
    each: Primitive | None = None  # what it does with each of its operands, which are several in one call
    fits: Callable[..., bool] | None = None

    def __init__(self, name: str, impl: Callable | None = None, shape_rule: Callable | None = None):
        self.name = name
        self.impl = impl
        self.run = impl  # the same, by a shorter way if there is one for numbers
        self.shape_rule = shape_rule
        # Whether the tangent is computed from the result, which may then be computed elsewhere.
        self.by_parts = type(self).jvp is Primitive.jvp and not self.is_higher_order
        #: Which operands are active -> how the derivative in these is recorded; filled as it is needed. In binary the
        #: key is a 1, then a 1 for each active operand and a 0 for each other one, the last one first.
        self.recorded: dict[int, Recording] = {}
        #: What `transpose` does, for plain arrays: for each of the linear operands, which come after `count` others, a
        #: function `(ct, *operands, **params)` whose result, once it is summed over what was broadcast and converted,
        #: is that operand's cotangent. The linear operands are names, with a type. None where that is `ct` itself.
        self.pulls: Sequence[Callable | None] | None = None
        self.count = 0

    def bind(self, *args: Value, **params) -> Value:
        """Apply the operation: the current interpreter decides what that means."""
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
        """Operands of which none is a `WeakTracer`: each such number has the dtype that NumPy gives a Python number."""
        from minidiff.ops.base import promoted  # which Python numbers among the arguments alone need

        return promoted(self, args)

    def apply_checked(self, interpreter: Interpreter, args: Sequence[Value], params: dict) -> Value:
        """The operation on traced operands of which none is lifted: VarianceError where one had to be."""
        if self.is_inlined:
            return self.apply(interpreter, args, params)
        if self.operands_agree and args and not self.is_higher_order and not any(isinstance(x, Tracer) for x in args):
            with running(EVALUATE):  # what is computed from constants alone is a constant
                return self.bind(*args, **params)
        if self.operands_agree and len(args) > 1:
            args = agree_as_written(self, args)
        if not self.is_higher_order:
            arrays = [x for x in args if not (self.operands_agree and is_scalar_constant(x))]
            self.check_variance([typeof(x) for x in arrays], params)
        with checking(interpreter.scope, False):
            return self.apply(interpreter, args, params)

    def apply(self, interpreter: Interpreter, args: Sequence[Value], params: dict) -> Value:
        """The operation under a given interpreter, on operands that are its own and agree."""
        out = interpreter.process(self, args, params)
        if self.is_view and interpreter.scope is not None:
            interpreter.scope.remember(out if self.multiple_results else [out], self, args[0], params)
        return out

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        """The types of the results, from the types of the operands (a Python number stands for its own type)."""
        results = self.shape_rule(*types, **params)
        variance = INVARIANT
        for t in types:
            if isinstance(t, ShapedArray) and t.variance:
                variance |= t.variance
        return [
            ShapedArray(shape, dtype, variance) for shape, dtype in (results if self.multiple_results else [results])
        ]

    def check_fits(self, types: Sequence[ShapedArray], params: dict, scope: Scope | None) -> None:
        """Raise an error where operands of these types, and these parameters, do not go together: see `fits`.

        `scope` is the `shard_map` body that the operation stands in, where that is known.
        """
        if self.impl is not None:
            check_call(self.impl, len(types), params)
        if self.fits is not None and not self.fits(*types, **params):
            raise ValueError(f"they do not fit {self.show_params(params) or 'each other'}")

    def sends(self, params: dict) -> bool:
        """Whether anything goes from rank to rank, with these parameters (what does at all says `communicates`)."""
        return self.communicates

    def sums(self, params: dict) -> dict[int, dict]:
        """Which results of its body are partial sums, that ranks add up: the parameters of the `psum` of each."""
        return {}

    def without_unused_results(self, eqn: Any, used: Sequence[bool]) -> Any:
        """The equation with only those results that are used (perhaps more); a body loses what these do not need."""
        return eqn

    def check_variance(self, types: Sequence[ShapedArray], params: dict) -> None:
        """Raise VarianceError where operands of these types break the typing rules of a typed tape."""
        if self.operands_agree:
            check_operands(self.name, types)

    def jvp(self, primals, tangents, params):
        out = self.bind(*primals, **params)
        return out, self.tangent(out, primals, tangents, params)

    def tangent(self, out, primals, tangents, params):
        raise TypeError(f"{self.name} cannot be differentiated: it has no derivative rule")

    def linearized(self, out, type, primals, active, names, params) -> Any:
        """The tangent as one linear equation: an operation, its operands and its parameters.

        `type` is that of `out`; `active` are the positions of the operands that have a tangent, `names` the names of
        these on the tape. One of the names is returned where the tangent is just that, None where it takes more.
        """
        return None

    def transpose(self, ct, operands, params):
        from minidiff.location import here  # which errors alone need, here

        x, source = next(x for x in operands if isinstance(x, ShapedArray)), here()
        raise TypeError(
            f"{self.name} cannot be transposed: it is not linear in the operand of type {x}"
            + (f" ({source})" if source is not None else "")
            + ". Only what is linear has a transpose: of another function, its derivative md.linearize(f, *args)[1]"
        )

    def batch(self, args, batched, params):
        raise TypeError(f"{self.name} cannot be vectorised: it has no batching rule")

    def show_params(self, params: dict) -> str:
        """The parameters as tapes print them after the operands."""
        shown = {k: dtype_name(v) if isinstance(v, numpy.dtype) else repr(v) for k, v in params.items()}
        return ", ".join(f"{k}={v}" for k, v in shown.items())

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def check_call(function: Callable, count: int, names: Iterable[str]) -> None:
    """Raise ValueError where a function does not take so many operands, with parameters of these names."""
    if not _takes(function, count, frozenset(names)):
        operands = "1 operand" if count == 1 else f"{count} operands"
        raise ValueError(f"it does not take {operands} and {_listed(sorted(names)) if names else 'no'} as parameters")


@functools.cache
def _takes(function: Callable, count: int, names: frozenset[str]) -> bool:
    import inspect  # which `Tape.check` alone needs, here

    if isinstance(function, numpy.ufunc):  # one operand more would be what it writes into
        return function.nin == count and not names
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    except ValueError:  # a function that does not say what it takes
        return True
    return True


# ---------------------------------------------------------------- tracers

#: What a NumPy function means on tracers: filled by `implements`.
NUMPY_FUNCTIONS: dict[Callable, Callable] = {}

#: The operation that a ufunc is, where its function does nothing but to apply it.
OPERATIONS: dict[numpy.ufunc, Primitive] = {}

NO_PARAMS: dict = {}


def implements(*numpy_functions: Callable) -> Callable[[Callable], Callable]:
    """Declare a function of this package to be what these NumPy functions mean on tracers."""

    def register(function):
        for f in numpy_functions:
            NUMPY_FUNCTIONS[f] = function
            if isinstance(f, numpy.ufunc) and hasattr(function, "primitive"):
                OPERATIONS[f] = function.primitive
        return function

    return register


#: What a concrete integer is needed for: shapes and sizes, indices of lists, `range`.
SIZE = "a size, an index of a list or range()"


class Tracer:
    """A value that an interpreter follows. It behaves as the array it stands for.

    Operators, indexing and methods are those of `numpy.ndarray` (they are attached in
    `minidiff/ops/operators.py`), and NumPy's own functions may be called on it.
    """

    __slots__ = ("interpreter", "__weakref__")
    __array_priority__ = 1000
    __hash__ = object.__hash__

    if TYPE_CHECKING:  # what type checkers are told of those

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
        """Raise LeakedTracerError if the transformation that this value belongs to is over."""
        if self.interpreter.ended:
            raise LeakedTracerError(leak_message(self))

    def check_own(self, interpreter: Interpreter) -> None:
        """Raise LeakedTracerError if this value has no meaning where only the interpreter at the bottom is left."""
        raise LeakedTracerError(leak_message(self))

    def concrete(self, use: str) -> numpy.ndarray:
        """The array behind this value, for `use` (a Python `if`, say), or an error where there is none."""
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
        return self  # it never changes

    def __deepcopy__(self, memo: dict) -> Tracer:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TracerError(
            f"a traced value ({self.type}) cannot be pickled: it means something within its transformation only. "
            "Return it from the function, and pickle the result; or, for its plain number, x.item()"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d value")
        return self.shape[0]

    def __setitem__(self, index, value):
        raise TypeError(
            f"a traced value ({self.type}) cannot be written into: x[i] = v would change the past of the "
            "computation. Make the new value instead: x = x.at[i].set(v), and for x[i] += v, x = x.at[i].add(v); of "
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
        """A plain array of whole numbers or booleans, which carry no derivative. Raises TracerError for others."""
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
        if method == "__call__" and not kwargs:  # the way that nearly all calls take
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
    """Whether NumPy leaves an operation to the class of this operand, as a traced value then does too.

    It does where the class has an `__array_ufunc__` of its own, or None for it, or else a higher `__array_priority__`.
    Operations find such an operand by the error that it leads to: so what takes arrays alone does not look for one.
    """
    if isinstance(x, Tracer):
        return False
    if hasattr(type(x), "__array_ufunc__"):
        return type(x).__array_ufunc__ is not numpy.ndarray.__array_ufunc__
    return getattr(x, "__array_priority__", 0) > Tracer.__array_priority__


# ---------------------------------------------------------------- Python numbers


class WeakTracer(Tracer):
    """A traced Python number, around the tracer of its value. It promotes as Python numbers do in NumPy (NEP 50).

    Beside an array it takes the array's precision (2.0 beside float32 is float32); a Python operator on such numbers
    alone gives another one (`minidiff/ops/operators.py`); anything else makes it float64, int64 or complex128. It is
    what the user's function sees, and no more: interpreters and tapes get its `value`, converted (`Primitive.strong`).
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
    """Of a value that promotes weakly, the type of the Python number that it is."""
    return _PYTHON_TYPES[x.dtype.kind] if type(x) is WeakTracer else type(x)


def promoting(x: Value) -> Any:
    """What `numpy.result_type` takes for a value: its dtype, or a Python number."""
    return python_type(x)(0) if type(x) in WEAK_TYPES else x.dtype


def are_weak(leaves: Iterable[Any]) -> list[bool]:
    """Which of a function's arguments are Python numbers, traced or not: what `weak_where` is told."""
    return [type(x) in WEAK_TYPES for x in leaves]


def weak_where(weak: Sequence[bool], values: Sequence[Value]) -> Sequence[Value]:
    """The values that a transformation passes to a function, those that are `weak` as Python numbers again."""
    return [as_weak(x) if yes else x for x, yes in zip(values, weak)] if True in weak else values


def as_weak(x: Value) -> Value:
    """A number as a Python number, or as a tracer that promotes like one."""
    kind = x.dtype.kind
    return WeakTracer(x, kind == "b") if isinstance(x, Tracer) else x.item() if kind in _PYTHON_TYPES else x


def strong(x: Any) -> Any:
    """What is in a `WeakTracer`; anything else as it is."""
    return x.value if type(x) is WeakTracer else x


def _in_another_form(error: Exception, func: Callable, function: Callable, args: tuple, kwargs: dict):
    """Arguments that `function` may take instead of those it refused; the error again, or a better one, if none."""
    from minidiff.numpy import dispatch  # needed where something is wrong, and only there

    form = dispatch.in_another_form(func, function, args, kwargs)
    if form is None:
        raise error
    return form
