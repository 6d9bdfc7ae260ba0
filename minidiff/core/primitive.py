"""Operations: what a program is made of. Each is declared once, with its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.core.interpreter import Interpreter, current_interpreter
from minidiff.core.ranks import Scope, ranks
from minidiff.core.states import ALL_INVARIANT, AxisStates, combine_states
from minidiff.core.tracer import Value, unwrap_weak
from minidiff.core.types import ShapedArray, array_type
from minidiff.errors.location import not_linear_message
from minidiff.values.dtypes import NARROW, dtype_name, infer_wide, runs_wide


class Declared(type):
    """The class of classes whose objects are complete when they have been made, and never change afterwards."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        primitive = super().__call__(*args, **kwargs)
        vars(primitive)["is_complete"] = True
        return primitive


class Primitive(metaclass=Declared):
    """An operation and its rules, given when it is declared; `minidiff/ops/base.py` has the subclasses.

    `impl(*arrays, **params)`
        runs it with NumPy.
    `shape_rule(*types, **params)`
        returns `(shape, dtype)` of the result. The result's states are those of the operands, joined (`states.py`).
    `fits(*types, **params)`
        says whether the operands and parameters are compatible, if `shape_rule` assumes it because the public
        functions have checked it. Only `Tape.check` calls it.
    `tangent(out, primals, tangents, params)`
        returns the tangent of the result, in terms of operations. A zero tangent is None. Subclasses define it.
    `jvp(primals, tangents, params)`
        returns the result and its tangent, for operations that compute them together.
    `transpose(ct, operands, params)`
        returns a cotangent for each operand. A linear operand has no value: `operands` holds its type, a
        `ShapedArray`, in its place.
    `batch(args, batched, params)`
        applies the operation along a new leading axis of the operands whose `batched` is true.
    `sharding(types, outs, params)`
        says how the dimensions of operands and results correspond (`minidiff/ops/dimensions.py`); `gather`: the
        operands are needed whole.
    `decomposed(*operands, **params)`
        is the same, composed of operations for which the first operand's dimensions need not be whole, and which
        compiled loops compute.

    `exponential`
        is, for a logarithm, the operation that computes exp of its result; in compiled loops, they share parts.
    `per_operand`
        is, for a variadic operation, the one that it applies to each operand.

    In addition to its rules, an operation has eight traits. A subclass defines both, or keywords of the declaration do,
    such as `accumulates=True`. With `multiple_results`, the rules take and return lists in place of one result. An
    operation that runs a body (`is_higher_order`) has a rule for each interpreter instead, `(interpreter, args,
    params)`; see `minidiff/control_flow`. A collective also has a rule for the named axis of a vmap, `batch_along`.
    """

    multiple_results = False
    is_higher_order = False  # it runs a body, a function or a tape: shard_map, scan, checkpoint
    operands_agree = True  # pbroadcasts are inserted where operands' variances disagree
    commutes: Sequence[str] | None = None  # operands may be reordered, with these parameters that have one entry each
    accumulates = False  # it adds many numbers: 16-bit floats in float32
    is_view = False  # it computes nothing: its result is its operand rearranged or retyped
    shares_memory = False  # its result may share memory with an operand
    moves: str | None = None  # "copies": results' elements are operands' or zero; "adds": operands' add up to results'
    has_effect = False  # it has a side effect: see `minidiff/control_flow/dead_code.py`

    fits: Callable[..., bool] | None = None
    sharding: Any = None
    decomposed: Any = None
    exponential: Any = None
    per_operand: Any = None
    evaluate: Callable[..., Any]
    jvp_body: Callable[..., Any]
    linearize_body: Callable[..., Any]
    batch_body: Callable[..., Any]
    stage_body: Callable[..., Any]
    batch_along: Any = None
    batch_ranks: Any = None  # `batch` over simulated ranks, if it differs

    def __init__(self, name: str, impl: Any = None, shape_rule: Any = None, **declared: Any):
        for key in declared:
            if not hasattr(self, key):
                raise TypeError(f"the operation {name}: {key} is neither a rule nor a trait of an operation")
        vars(self).update(declared)
        self.name = name
        self.impl = impl
        self.shape_rule = shape_rule

    def bind(self, *args: Value, **params) -> Value:
        """Apply the operation under the current interpreter."""
        interpreter = current_interpreter()
        if interpreter.scope is None:
            return interpreter.process(self, args, params)
        return ranks.bind(interpreter, self, args, params)

    def strong(self, args: Sequence[Value]) -> list[Value]:
        """Unwrap each `WeakTracer`. Elementwise operations convert it to the dtype to which NumPy promotes it."""
        return list(map(unwrap_weak, args))

    def apply(self, interpreter: Interpreter, args: Sequence[Value], params: dict) -> Value:
        """Apply the operation under an interpreter, to operands that it has lifted."""
        out = interpreter.process(self, args, params)
        if self.is_view and interpreter.scope is not None:
            ranks.record_view(interpreter.scope, out if self.multiple_results else [out], self, args[0], params)
        return out

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        """Infer the result types from operand types, or from Python numbers."""
        if NARROW and runs_wide(self, types):
            results = infer_wide(self, types, params)
        else:
            results = self.shape_rule(*types, **params)
        states, results = self.result_states(types, params), results if self.multiple_results else [results]
        if states is ALL_INVARIANT:  # equal types are one object
            return [array_type(tuple(shape), numpy.dtype(dtype)) for shape, dtype in results]
        return [ShapedArray(shape, dtype, states) for shape, dtype in results]

    def result_states(self, types: Sequence[Any], params: dict) -> AxisStates:
        """Return the states of the results; raise VarianceError for unreduced operands that it cannot take."""
        states = ALL_INVARIANT
        for t in types:
            if isinstance(t, ShapedArray) and t.states is not states:
                states = combine_states(states, t.states)
        if states.unreduced:
            ranks.check_unreduced(self, types)
        return states

    def is_linear_in(self, positions: set[int], count: int) -> bool:
        """Whether it is linear in these of its `count` operands together, so that it applies to partial sums."""
        return False

    def check_fits(self, types: Sequence[ShapedArray], params: dict, scope: Scope | None) -> None:
        """Raise an error if operand types and parameters are incompatible: see `fits`.

        `scope` is the `shard_map` body that contains the operation, if it is known.
        """
        if self.fits is not None and not self.fits(*types, **params):
            raise ValueError(f"they do not fit {self.show_params(params) or 'each other'}")

    @property
    def on_ranks(self) -> bool:
        """Whether it is only defined along named axes."""
        return self.batch_along is not None

    def body_scope(self, params: dict) -> Scope | None:
        """Return the scope of its body, which runs on ranks; None for all operations but `shard_map`."""
        return None

    def sends(self, params: dict) -> bool:
        """Whether it communicates between ranks, given these parameters."""
        return False

    def without_unused_results(self, eqn: Any, used: Sequence[bool]) -> Any:
        """Eliminate dead code: unused results, and what only they need in a body."""
        return eqn

    def check_variance(self, types: Sequence[ShapedArray], params: dict) -> None:
        """Raise VarianceError if the operand types violate the typing rules."""
        if self.operands_agree:
            ranks.check_operands(self.name, types)

    def jvp(self, primals, tangents, params):
        out = self.bind(*primals, **params)
        return out, self.tangent(out, primals, tangents, params)

    def tangent(self, out, primals, tangents, params):
        raise TypeError(f"{self.name} cannot be differentiated: it has no derivative rule")

    def transpose(self, ct, operands, params):
        raise TypeError(not_linear_message(self, next(x for x in operands if isinstance(x, ShapedArray))))

    def batch(self, args, batched, params):
        raise TypeError(f"{self.name} cannot be vectorized: it has no batching rule")

    def is_checked_in(self, scope: Scope, params: dict) -> bool:
        """Whether the states of its operands are checked in a scope where the user writes the casts."""
        return True

    def show_params(self, params: dict) -> str:
        """Return the parameters as tapes print them, after the operands."""
        shown = {k: dtype_name(v) if isinstance(v, numpy.dtype) else repr(v) for k, v in params.items()}
        return ", ".join(f"{k}={v}" for k, v in shown.items())

    def __setattr__(self, attribute: str, value: Any) -> None:
        if vars(self).get("is_complete"):
            raise AttributeError(
                f"the operation {self.name} is complete, and {attribute} cannot be set: pass it to the declaration"
            )
        super().__setattr__(attribute, value)

    def __deepcopy__(self, memo: dict) -> Primitive:
        return self  # it never changes, and equality is identity

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"the operation {self.name} cannot be pickled: pickle the function, and record its tape again")

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
