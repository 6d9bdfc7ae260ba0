"""Checks and carries of loops and branches: predicates, types, and the fixpoint of a loop's types.

The types of the carries are a fixpoint, both in a loop that runs and in one that is recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.control_flow.divergent import DivergentBody, DivergentOperation, divergent_type, vary_as
from minidiff.control_flow.partial_eval import TracedBody, concrete_value, interpreters, lift_value, reshard_like
from minidiff.core.interpreter import EVALUATE, current_interpreter, current_scope, lift
from minidiff.core.ranks import cast_to
from minidiff.core.states import NONE, combine_states
from minidiff.core.tape import Stage
from minidiff.core.tracer import Value, WeakTracer
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import TracerError, VarianceError, name_of
from minidiff.inputs.arguments import (
    WEAK_TYPES,
    as_named_value,
    as_value,
    joint_states,
    promotion_argument,
    python_type,
    restore_weak,
)
from minidiff.inputs.key_reuse import current_loop
from minidiff.ops.base import convert_number
from minidiff.values.dtypes import is_scalar_constant, result_type
from minidiff.values.settings import override

# ---------------------------------------------------------------- checks and casts


def is_staging(eager: bool = True) -> bool:
    """Whether the current operations are being recorded on a tape of abstract values.

    Without `eager`, a tape that has the operations of an eager run does not count.
    """
    return any(isinstance(x, Stage) and (eager or not x.monitor.eager) for x in interpreters(current_interpreter()))


def known_number(x: Value, use: str) -> Any:
    """Return the number `x`, or None if it is abstract or batched.

    Raises VarianceError if it may differ between ranks.
    """
    try:
        return concrete_value(x, use)
    except TracerError:
        return None


def copy_overwritten(body: Any, carry: Sequence[Value], first: int) -> Sequence[Value]:
    """Return the initial carries of a loop, and copies of those that a compiled body overwrites.

    The first carry is the body's input number `first`.
    """
    overwritten = getattr(body, "overwritten", None)
    if not overwritten or current_interpreter() is not EVALUATE:
        return carry
    return [numpy.array(x) if first + k in overwritten else x for k, x in enumerate(carry)]


def check_functions(caller: str, functions: dict[str, Any], otherwise: str = "") -> None:
    """Raise TypeError for a non-function; the message ends with `otherwise`."""
    for name, f in functions.items():
        if not callable(f):
            raise TypeError(f"{caller}: {name} must be a function, got {type(f).__name__}{otherwise}")


def is_weak(x: Any) -> bool:
    """Whether `x` is a Python number, traced or not, of weak dtype."""
    return type(x) in WEAK_TYPES and python_type(x) is not bool


def fits_weakly(x: Any, dtype: numpy.dtype) -> bool:
    """Whether `x` is a Python number that promotes to this dtype."""
    return is_weak(x) and result_type(dtype, promotion_argument(x)) == dtype


def convert_python_number(x: Any, t: ShapedArray) -> Value:
    """Convert `x` to the dtype of `t` if it is a Python number."""
    if type(x) is WeakTracer and is_weak(x):
        return convert_number(as_value(x), t.dtype)
    return numpy.asarray(x, t.dtype)[()] if is_weak(x) else as_value(x)


def as_type(x: Any, t: ShapedArray) -> Value:
    """Cast a Python number to the dtype of `t`, and along mesh axes to its states."""
    return cast_to(lift(convert_python_number(x, t)), t.states)


@contextlib.contextmanager
def ignore_tracing_errors() -> Iterator[None]:
    """Ignore exceptions, except VarianceErrors, in code that is traced for its types and may never run."""
    try:
        with override(current_loop, False):  # it uses no keys
            yield
    except VarianceError:
        raise
    except Exception:  # also RecursionError, if a branch calls itself until a concrete value stops it
        pass


def all_vary_everywhere(values: Iterable[Value]) -> bool:
    """Whether all values vary along all axes (False under explicit types)."""
    scope = current_scope()
    return not scope.explicit and all(len(typeof(x).variance) == len(scope.axes) for x in values)


# ---------------------------------------------------------------- carries


def _carry_type(caller: str, path: str, old: Any, new: Any, start: Any = None) -> ShapedArray:
    """Return the type of a carry: `old` (a value or type) before a step, `new` after it.

    One that starts as a number takes any states, as numbers do everywhere; a Python number also takes larger dtypes.
    """
    try:
        a, b = typeof(old), typeof(new)
    except TypeError:
        as_named_value(new, f"{caller}: the step's result for {path}")
        raise
    states = combine_states(a.states, b.states)
    if not is_scalar_constant(start):
        labels = f"the initial {path}", "the step's result"
        states = joint_states(f"{caller}: {path} has type {a}, a step returns {b}; these", labels, (old, new))
    if a.shape == b.shape:
        if a.dtype == b.dtype or fits_weakly(new, a.dtype):
            return a.update(states=states)
        if fits_weakly(old, b.dtype) or (fits_weakly(start, b.dtype) and result_type(a.dtype, b.dtype) == b.dtype):
            return b.update(states=states)
    raise TypeError(
        f"{caller} must keep the types of its carries: {path} has type {a}, but a step returns {b}; convert one of "
        "them (with .astype, say, or np.broadcast_to)"
    )


def cast_and_reshard(x: Any, t: ShapedArray) -> Value:
    """Cast `x` to the type `t`, then reshard it like `t`."""
    return reshard_like(as_type(x, t), t)


class Carry:
    """A loop's carries: initial leaves, paths, and checks of each step's results."""

    def __init__(self, caller: str, f: Callable, name: str, init: Any):
        self.caller = caller
        self.origin = caller, name_of(f)
        leaves, self.structure = tree.flatten_with_paths(init, name)
        self.name = name
        self.paths = [path for path, _ in leaves]
        self.init = [x if is_weak(x) else lift_value(x) for _, x in leaves]
        self.weak = list(map(is_weak, self.init))  # which carries are Python numbers; later, those that steps keep so
        self.seen: Any = None  # the joint types of all concrete carries so far, once the first step has run
        self.fixed = False  # whether a step maps the types `seen` to themselves, so that no later step changes them
        self.cast = False  # whether the carries are cast to their types before every step, the first included
        self.divergence: Any = None  # the loop's operation and its condition's type, if ranks take their own steps

    @property
    def axes(self) -> frozenset:
        """The mesh axes along which ranks take their own steps."""
        return NONE if self.divergence is None else self.divergence[1].variance

    def diverge(self, primitive: DivergentOperation, condition: ShapedArray) -> None:
        """Let the carries, and all that steps use, vary as a condition does that each rank has for itself."""
        entries = zip(self.init, self.paths)
        self.init = [x if is_weak(x) else vary_as(primitive, condition, x, path) for x, path in entries]
        self.divergence = primitive, condition

    def new_stage(self, name: str) -> Stage | None:
        """Return the recorder of a step, or of the condition; None for a new one of the current interpreter."""
        if self.divergence is None:
            return None
        primitive, condition = self.divergence
        return DivergentBody(current_interpreter(), primitive, name, condition)

    def joint_types(self, types: Iterable[ShapedArray]) -> list[ShapedArray]:
        """Return types of carries, varying as the condition does."""
        return [t if self.divergence is None else divergent_type(t, self.divergence[1]) for t in types]

    def tree(self, leaves: Iterable[Value]) -> Any:
        return tree.unflatten(self.structure, leaves)

    def weak_tree(self, carry: Any) -> Any:
        """Convert leaves of the last carry to Python numbers where steps keep them weak."""
        return self.tree(restore_weak(self.weak, tree.leaves(carry)))

    def leaves(self, new: Any) -> list:
        """Return the leaves of the carry that a step returns."""
        leaves, structure = tree.flatten(new)
        if structure != self.structure:
            raise TypeError(
                f"{self.caller} must keep the structure of its carries: {self.name} is {self.structure}, but a step "
                f"returns {structure}"
            )
        return leaves

    def types(self, old: Sequence[Any], new: Sequence[Any]) -> list[ShapedArray]:
        return [_carry_type(self.caller, *entry) for entry in zip(self.paths, old, new, self.init)]

    def advance(self, step: Callable, values: Sequence[Value], *args: Any) -> tuple[Sequence[Value], list[Value], Any]:
        """Run a step; return the carries that it got, those that it returns, and its other results."""
        if self.seen is None:
            values, new, extra = self.first_step(step, *args)
        else:
            new, extra = step(values, *args) if True not in self.weak else self.weak_step(step, values, *args)
        new = self.checked(new)
        if current_scope() is not None:
            seen = [_carry_type(self.caller, path, t, x) for path, t, x in zip(self.paths, self.seen, new)]
            self.fixed = list(map(typeof, values)) == self.seen == seen
            self.seen = seen
        return values, new, extra

    def first_step(self, step: Callable, *args: Any) -> tuple[list[Value], Sequence[Any], Any]:
        """Run the first step, and find the types of the carries.

        Only the result shows which dtype a Python number needs; if it differs, run the step again, until nothing
        changes. Also run it again if it takes derivatives, which depend on variance, and the carries turn out to vary
        along more axes.
        """
        init, scope = self.resharded(step, args), current_scope()
        before = scope and scope.transposed
        while True:
            start = init
            new, extra = self.run(step, start, *args)
            types = self.types(start, new)
            self.weak = [was_weak and is_weak(x) for was_weak, x in zip(self.weak, new)]
            init = [convert_python_number(x, t) for x, t in zip(self.init, types)]
            if all(typeof(x).dtype == t.dtype for x, t in zip(start, types)):
                break
            init = list(restore_weak(self.weak, init))
        if scope is not None and scope.typed and scope.transposed != before:
            while any(typeof(x).states != t.states for x, t in zip(init, types)):
                with ignore_tracing_errors():
                    stay = self.record_step(step, list(map(typeof, args)))[1]
                    types = [t.update(states=combine_states(t.states, s.states)) for t, s in zip(types, stay)]
                self.cast, init = True, [as_type(x, t) for x, t in zip(init, types)]
                new, extra = step(init, *args)
                types = self.types(init, new)
        self.seen = types
        return init, new, extra

    def resharded(self, step: Callable, args: Sequence[Value]) -> list[Any]:
        """Return the initial carries, sharded as a step returns them: so a recorded loop starts, too."""
        types = list(map(typeof, (*self.init, *args)))
        if current_scope() is None and any(t.sharding for t in types) and not all(t.sharding for t in types if t.shape):
            with ignore_tracing_errors():
                _, types = self.record_step(step, types[len(self.init) :])
                self.init = [x if t.sharding is None else reshard_like(x, t) for x, t in zip(self.init, types)]
        return self.init

    def weak_step(self, step: Callable, values: Sequence[Value], *args: Any) -> tuple[Sequence[Any], Any]:
        """Run a later step with carries that are Python numbers: arrays that change their dtypes may come only now."""
        carry = restore_weak(self.weak, values)
        new, extra = self.run(step, carry, *args)
        self.seen = self.types(carry, new)
        self.weak = [was_weak and is_weak(x) for was_weak, x in zip(self.weak, new)]
        return new, extra

    def run(self, step: Callable, carry: Sequence[Value], *args: Any) -> tuple[Sequence[Any], Any]:
        """Run a step. Where it fails on Python numbers, it takes NumPy's, which have attributes, infinities, sizes."""
        try:
            new, extra = step(carry, *args)
            for x in new:
                if type(x) is int:
                    numpy.int64(x)  # raises OverflowError
            return new, extra
        except (ArithmeticError, AttributeError, TypeError):
            if True not in self.weak:
                raise
        return step(list(map(as_value, carry)), *args)

    def checked(self, new: Sequence[Any]) -> list[Value]:
        """Check a step's results against the types of the carries; cast if needed."""
        out = []
        for path, x, t in zip(self.paths, new, self.seen):
            if is_weak(x) or getattr(x, "dtype", None) != t.dtype or x.shape != t.shape:
                x = convert_python_number(x, _carry_type(self.caller, path, t, x))
            out.append(as_type(x, t) if self.cast else x)
        return out

    def results(
        self, record: Callable, values: Sequence[Value], ys: Sequence[Value] = ()
    ) -> tuple[list[Value], list[Value]]:
        """Return the final carries and stacked results, with the variance of a recorded loop.

        `record()` returns the traced step, and the types of carries.
        """
        scope = current_scope()
        if scope is None or not scope.typed:
            return list(values), list(ys)
        types, y_types = self.seen or list(map(typeof, values)), list(map(typeof, ys))
        if not (self.fixed or all_vary_everywhere([*values, *ys])):
            with ignore_tracing_errors():
                traced_body, types, *_ = record()
                y_types = [typeof(y) for y in traced_body.result[1] or ()]
        return [as_type(x, t) for x, t in zip(values, types)], [cast_to(y, t.states) for y, t in zip(ys, y_types)]

    def record_step(self, step: Callable, others: Sequence[ShapedArray] = ()) -> tuple[TracedBody, list[ShapedArray]]:
        """Trace a step of carries and `others` until the carries' types are a fixpoint.

        A sharded carry takes the sharding of the first step's result; results of later steps are resharded like it.
        """
        current, count = self.joint_types(map(typeof, self.init)), len(self.init)
        weak, resharded, scope = list(map(is_weak, self.init)), False, current_scope()
        if True in weak and scope is not None and scope.explicit:  # there, only constants agree with what varies

            def first(*values):
                return step([x if is_weak(x) else v for x, v in zip(self.init, values)], *values[count:])

            traced_body = TracedBody(first, [*current, *others], self.origin, self.new_stage("a step"))
            current = self.joint_types(self.types(self.init, traced_body.result[0]))
        while True:
            carry: list[Value] = []

            def f(*values, weak=weak, carry=carry):
                carry[:] = restore_weak(weak, values[:count])
                return step(carry, *values[count:])

            traced_body = TracedBody(f, [*current, *others], self.origin, self.new_stage("a step"))
            new = traced_body.result[0]
            types, before = self.types(carry, new), [t.sharding for t in current]
            for t, x, sharding in zip(types, new, before):
                t.sharding = sharding if resharded else typeof(x).sharding
            still_weak = [was_weak and is_weak(x) for was_weak, x in zip(weak, new)]
            if types == current and weak == still_weak and before == [t.sharding for t in types]:
                self.weak = weak
                return traced_body, types
            current, weak, resharded = types, still_weak, types == current
