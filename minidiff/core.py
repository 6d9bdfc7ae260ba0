"""Operations, tracers and the current interpreter.

A program is a sequence of *operations* (:class:`Primitive`) on values. The *current interpreter*
decides what applying an operation does: evaluate it with NumPy, push a tangent through it, record it
on a tape, or run it on every rank. A function transformation installs an interpreter, runs the
user's function on that interpreter's :class:`Tracer`\\ s, and restores the previous one.

Interpreters form a stack. The rules of each one are written in terms of operations, which run under
the interpreter below it. A tracer belongs to one interpreter, and every other interpreter treats it
as a constant. This is why higher-order derivatives need no special treatment.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy

from minidiff import half, location
from minidiff.axis_states import ALL_INVARIANT, VARYING, AxisStates, joined
from minidiff.dtypes import NARROW, PLAIN, dtype_name, is_scalar_constant
from minidiff.errors import (
    LeakedTracerError,
    MisfitError,
    TracerError,
    VarianceError,
    check_operands,
    check_unreduced,
    is_misfit,
    leak_message,
)
from minidiff.types import ShapedArray, Typed, plain_operand, typeof

Value = Any  # an array, a scalar, or a Tracer that stands for one

# ---------------------------------------------------------------- interpreters


class Scope:
    """The body of a running `shard_map`: its axes, and whether it is typed.

    `axes` maps each axis name to its size. An untyped scope (`check_rep=False`) does not track states: every
    value is invariant and no cast is inserted. An explicit scope (`auto_pbroadcast=False`) inserts none into the user's
    operations, but checks that their operands agree.
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
        #: The number of transpositions in this body, whose results depend on types: the cotangent of a value that is
        #: the same on all ranks is a sum over the ranks.
        self.transposed = 0

    def remember(self, outs: Sequence[Value], primitive: Primitive, operand: Value, params: dict) -> None:
        """Record how views of a value that does not vary along all axes were made.

        A pbroadcast of a view then becomes a view of a pbroadcast, so that a weight and its transpose share one.
        And the backward pass can recompute a view instead of keeping it. Both need an operand of the interpreter that
        has the view: one of an interpreter above, which gave away what it knew of the operand, may end before.
        """
        if not self.typed or len(states_of(operand).varying) == len(self.axes):
            return
        if len({x.interpreter for x in (*outs, operand) if isinstance(x, Tracer)}) == 1:
            self.views.update((id(out), (outs, primitive, operand, params)) for out in outs)


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

    def __init__(self, below: Interpreter | None, outer: Interpreter | None = None):
        self.below: Any = below  # None only at the bottom, where no rules run
        self.outer = outer
        self.scope: Scope | None = below.scope if below is not None else None
        self.casts: dict = {}  # (id of value, states) -> (value, its cast to these states)
        self._adopted: dict = {}  # id of outer tracer -> (outer tracer, its counterpart here)

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        """Apply an operation to any values: a traced Python number gets the dtype to which NumPy promotes it."""
        if WeakTracer in map(type, args):
            return self.process(primitive, primitive.strong(args), params)
        return self.interpret(primitive, args, params)

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        """Apply an operation. Rules run under the interpreter `below`."""
        raise NotImplementedError

    def apply_rule(self, rule: Callable, primitive: Primitive, *args: Any) -> Any:
        """Apply a derivative rule of an operation, `rule(*args)`. `debug_nans` checks what it returns."""
        return rule(*args)

    def watch_sweep(self, sweep: Any) -> None:
        """Prepare for the forward sweep of reverse mode. `debug_nans` checks what it records."""

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
        self.casts.clear()
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
                    return ranks.dispatch(self, primitive, args, params)
                break
        try:
            if NARROW and half.runs_wide(primitive, args):
                return half.evaluate(primitive, *args, **params)
            return primitive.impl(*args, **params)
        except (AttributeError, TypeError, ValueError) as error:
            if is_misfit(primitive, args, error):
                raise MisfitError(primitive, args, str(error).strip()) from None
            raise


def name_of(f: Callable) -> str:
    """The name of a function in error messages."""
    return getattr(f, "__name__", "f")


EVALUATE = Evaluate(None)

#: The bottom of every stack: `EVALUATE`, or one that `minidiff/debug.py` makes check every result.
BOTTOM = EVALUATE if os.environ.get("MINIDIFF_DEBUG_NANS", "0") in ("", "0") else Evaluate(None)


#: Each thread and each asynchronous task has its own.
_current: ContextVar[Interpreter] = ContextVar("interpreter", default=BOTTOM)

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


# ---------------------------------------------------------------- ranks


class Ranks:
    """All that `minidiff` asks of the layers above it. This one knows of no ranks.

    `collectives` installs a subclass when it is imported, and `spmd` one of that. Nothing else in `minidiff` depends on
    a layer above.
    """

    folders: Sequence[str] = ()  # further ones of library code, which source locations skip
    passes: Sequence[Any] = ()  # further rewrites of the compiler, in order: see `minidiff.compiler.simplify`

    def agree(self, primitive: Primitive, args: Sequence[Value], written: bool = False) -> Sequence[Value]:
        """Insert casts where operands disagree along mesh axes; if the user writes them, of constants only."""
        return args

    def cast(self, x: Value, states: AxisStates) -> Value:
        """Change the states of `x` along mesh axes by free casts, such as a `pbroadcast`."""
        raise VarianceError(f"cannot cast {typeof(x)} to {states}: import spmd first")

    def dispatch(self, interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
        """Apply an operation to sharded arrays, outside any `shard_map` body, under an interpreter.

        Return None if no operand is sharded.
        """
        for x in args if isinstance(interpreter, Evaluate) else ():
            if isinstance(x, Tracer):
                raise LeakedTracerError(leak_message(x))
        return None

    def backward_pass(self, backward_pass: Callable, *args: Any) -> list[Value | None]:
        """Run the backward pass of a tape that was recorded in a typed `shard_map` body."""
        return backward_pass(*args)

    def warn(self, message: str, category: type[Warning]) -> None:
        """Warn at the user's line of what all ranks do alike: one of them speaks."""
        location.warn_at(location.here(), message, category)

    def settings(self) -> Any:
        """Settings and surroundings that a recorded function depends on, as part of a cache key."""
        return None


#: The ranks that programs run on.
ranks = Ranks()


def install(installed: Ranks) -> None:
    """Let `minidiff` ask these ranks."""
    global ranks
    ranks = installed
    location.add_library(*installed.folders)


# ---------------------------------------------------------------- states along mesh axes


def states_of(x: Value) -> AxisStates:
    """The states of `x` along mesh axes."""
    return x.states if isinstance(x, Tracer) else ALL_INVARIANT


def cast_to(x: Value, states: AxisStates) -> Value:
    """Insert the free casts, if any, from the states of `x` to `states`."""
    return x if states_of(x) == states else ranks.cast(x, states)


def cast_like(x: Value, t: ShapedArray) -> Value:
    """Cast `x` to the states of type `t`: by free casts, or outside of bodies to its sharding."""
    sharded = t.sharding is not None and states_of(x) != t.states
    return t.sharding.resharded(x) if sharded else cast_to(x, t.states)


def vary_along(x: Value, axes: Iterable[str]) -> Value:
    """Insert the casts, if any, by which `x` varies along `axes`."""
    return cast_to(x, states_of(x).with_state(axes, VARYING))


# ---------------------------------------------------------------- operations


class Primitive:
    """An operation and its rules; `minidiff/ops/base.py` has the subclasses.

    `impl(*arrays, **params)`
        runs it with NumPy.
    `shape_rule(*types, **params)`
        returns `(shape, dtype)` of the result. The result's states are those of the operands, `axis_states.joined`.
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
    `sharding(types, outs, params)`
        says how the dimensions of operands and results correspond (`minidiff/ops/dimensions.py`); `gather`: the
        operands are needed whole.
    `decomposed(*operands, **params)`
        is the same, composed of operations for which the first operand's dimensions need not be whole.

    With `multiple_results`, the rules take and return lists in place of one result. An operation that runs a body
    (`is_higher_order`) has a rule for each interpreter instead, `(interpreter, args, params)`; see
    `minidiff/higher_order`.
    """

    batch_along: Any = None  # the rule of a collective over the named axis of a vmap, `(interpreter, args, params)`
    batch_ranks: Any = None  # `batch` over simulated ranks, if it differs
    evaluate: Callable[..., Any]
    jvp_body: Callable[..., Any]
    linearize_body: Callable[..., Any]
    batch_body: Callable[..., Any]
    stage_body: Callable[..., Any]

    accumulates = False  # it adds many numbers: 16-bit floats in float32
    is_view = False  # it computes nothing: its result is its operand rearranged or retyped
    shares_memory = False  # its result may share memory with an operand
    is_higher_order = False  # it runs a body, a function or a tape: shard_map, scan, checkpoint
    binds_axes = False  # its body runs on ranks, along mesh axes: shard_map
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
    sharding: Callable[..., Any] | None = None
    decomposed: Callable | None = None

    def __init__(self, name: str, impl: Any = None, shape_rule: Any = None, **rules: Callable | None):
        vars(self).update(rules)  # `fits`, `sharding`, `decomposed`
        self.name = name
        self.impl = impl
        self.run = impl  # the same, or a variant that is faster on numbers
        self.shape_rule = shape_rule
        # Whether the tangent is computed from the result, so that the two can be computed separately.
        self.by_parts = type(self).jvp is Primitive.jvp and not self.is_higher_order
        #: Which operands are active -> how the derivative in these is recorded; filled on demand. The key in binary is
        #: a 1, then for each operand, last one first, a 1 if it is active and a 0 if not.
        self.recorded: dict[int, Any] = {}
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
        values: Sequence[Value] = self.strong(args) if WeakTracer in map(type, args) else args
        values = [interpreter.adopt(x) if isinstance(x, Tracer) else x for x in values]
        if interpreter.scope.checks:
            return self.apply_checked(interpreter, values, params)
        if self.operands_agree and len(values) > 1:
            values = ranks.agree(self, values)
        return self.apply(interpreter, values, params)

    def strong(self, args: Sequence[Value]) -> list[Value]:
        """Unwrap each `WeakTracer`. Elementwise operations convert it to the dtype to which NumPy promotes it."""
        return list(map(strong, args))

    def apply_checked(self, interpreter: Interpreter, args: Sequence[Value], params: dict) -> Value:
        """Apply the user's operation, or raise VarianceError if it lacks a pbroadcast."""
        if self.is_inlined:
            return self.apply(interpreter, args, params)
        if self.operands_agree and args and not self.is_higher_order and not any(isinstance(x, Tracer) for x in args):
            with running(EVALUATE):  # the result of constants is a constant
                return self.bind(*args, **params)
        if self.operands_agree and len(args) > 1:
            args = ranks.agree(self, args, written=True)
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
        if NARROW and half.runs_wide(self, types):
            results = half.infer(self, types, params)
        else:
            results = self.shape_rule(*types, **params)
        states = self.result_states(types, params)
        return [
            ShapedArray(shape, dtype, states=states)
            for shape, dtype in (results if self.multiple_results else [results])
        ]

    def result_states(self, types: Sequence[Any], params: dict) -> AxisStates:
        """The states of the results along mesh axes. Raise VarianceError for unreduced operands it cannot take."""
        states = ALL_INVARIANT
        for t in types:
            if isinstance(t, ShapedArray) and t.states is not states:
                states = joined(states, t.states)
        if states.unreduced:
            check_unreduced(self, types)
        return states

    def is_linear_in(self, positions: set[int], count: int) -> bool:
        """Whether it is linear in these of its `count` operands together, so that it applies to parts of a sum."""
        return False

    def check_fits(self, types: Sequence[ShapedArray], params: dict, scope: Scope | None) -> None:
        """Raise an error if operand types and parameters are incompatible: see `fits`.

        `scope` is the `shard_map` body that contains the operation, if it is known.
        """
        if self.fits is not None and not self.fits(*types, **params):
            raise ValueError(f"they do not fit {self.show_params(params) or 'each other'}")

    def body_scope(self, params: dict) -> Scope | None:
        """The scope of its body, which runs on ranks; None for all operations but `shard_map`."""
        return None

    def sends(self, params: dict) -> bool:
        """Whether it communicates between ranks, given these parameters."""
        return self.communicates

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
        x, source = next(x for x in operands if isinstance(x, ShapedArray)), location.here()
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

    def __deepcopy__(self, memo: dict) -> Primitive:
        return self  # it never changes, and is known by its identity

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"the operation {self.name} cannot be pickled: pickle the function, and record its tape again")

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


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


class Tracer(Typed):
    """A value traced by an interpreter. It behaves like the array it stands for.

    It has the operators, indexing and methods of `numpy.ndarray` (attached in `minidiff/ops/operators.py`), and NumPy
    functions accept it (by `__array_ufunc__` and `__array_function__`, attached in `minidiff/numpy/dispatch.py`).
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
        __setitem__ = __array__ = __array_ufunc__ = __array_function__ = __copy__ = __deepcopy__ = _operator
        __reduce_ex__ = _operator

    def __init__(self, interpreter: Interpreter):
        self.interpreter = interpreter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> numpy.dtype:
        return self.type.dtype

    @property
    def states(self) -> AxisStates:
        return self.type.states

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

    def number(self, use: str) -> Any:
        """The concrete value for `use` as a number that carries derivatives: `float()`, `complex()`."""
        return self.concrete(use)

    def __float__(self) -> float:
        return float(self.number("float()"))

    def __int__(self) -> int:
        return int(self.concrete("int()"))

    def __complex__(self) -> complex:
        return complex(self.number("complex()"))

    def __index__(self) -> int:
        return operator.index(self.concrete(SIZE))

    def item(self) -> Any:
        return numpy.asarray(self.concrete("item()")).item()

    def __format__(self, spec: str) -> str:
        return str(self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d value")
        return self.shape[0]


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

    def number(self, use: str) -> Any:
        return self.value.number(use)

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


def strong(x: Any) -> Any:
    """Unwrap a `WeakTracer`; return anything else unchanged."""
    return x.value if type(x) is WeakTracer else x
