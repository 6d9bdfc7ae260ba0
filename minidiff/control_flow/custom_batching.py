"""Custom rules for vmap: `custom_vmap`.

A function with a rule is an operation with a body. `vmap` applies the rule; all else uses the body. Forward mode
differentiates the body and the rule alike, so the operation that computes the tangents has a rule, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.api.vmap import stack_along
from minidiff.control_flow.custom_rules import CustomPrimitive, FunctionWithRules, RuleCall
from minidiff.control_flow.partial_eval import (
    ClosureGuard,
    NestedBatch,
    batched_body,
    broadcast_unbatched,
    guard_closure,
    jvp_of_body,
)
from minidiff.core.forward import JVP, instantiate
from minidiff.core.interpreter import current_interpreter, transforming
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.core.vmap import Batch, BatchTracer
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.inputs.arguments import are_weak, as_value, restore_weak
from minidiff.values.dtypes import is_differentiable
from minidiff.values.lists import drop_none, positions, scatter, select, split_list


class CustomBatching(CustomPrimitive):
    """A call of a function with a rule for vmap, or its derivative.

    Further parameters: `rule`, which maps the batch size, which leaves are batched, and the leaves to the results and
    which of these are batched; `arguments`, how many leaves the function itself takes.
    """

    def batch_body(self, outside: Batch, args: Sequence[Value], params: dict) -> list[Value]:
        batched = [outside.owns(x) for x in args]
        consts, arguments, _ = split_list(batched, params["consts"], params["arguments"])
        if not any(arguments):  # nothing, or tangents at one point
            return super().batch_body(outside, args, params)
        if any(consts):
            raise _closure_error(params, "vmap maps over")
        values = [outside.in_front(x) for x in args[len(consts) :]]
        outs, out_batched = params["rule"](outside.size_of_batch, batched[len(consts) :], values)
        return [BatchTracer(outside, x, 0) if is_batched else x for x, is_batched in zip(outs, out_batched)]

    def batched_params(self, params: dict, outside: Batch, batched: Sequence[bool], results: list[bool]) -> dict:
        """The operation on batches of tangents, which another vmap may map over. All its results are batched."""

        def rule(size: int, of_other: Sequence[bool], values: Sequence[Value]) -> tuple[list[Value], Sequence[bool]]:
            inside = NestedBatch(current_interpreter(), outside.size_of_batch, outer=outside)
            with transforming(inside):
                pairs = zip(values, batched[params["consts"] :], of_other)
                tracers = [BatchTracer(inside, x, int(axis)) if is_batched else x for x, is_batched, axis in pairs]
                outs, flags = params["rule"](size, of_other, tracers)
                outs = list(map(inside.lift, outs))
            return [stack_along(inside, x, int(flag)) for x, flag in zip(outs, flags)], flags

        return {**params, "body": batched_body(params["body"], outside, batched), "rule": rule}

    def jvp_body(self, outside: JVP, args: Sequence[Value], params: dict) -> list[Value]:
        """Compute the results, then their tangents: an operation that is linear, and has a rule."""
        primals, tangents = outside.split(args)
        name, body, rule, consts = (params[key] for key in ("name", "body", "rule", "consts"))
        outs = self.bind(*primals, **{**params, "body": guard_closure(body, outside, name)})
        if not drop_none(tangents):
            return outs
        active_operands = [t is not None for t in tangents]
        if any(active_operands[:consts]):
            raise _closure_error(params, "is differentiated")
        inside = functools.partial(ClosureGuard, outer=outside, function=name)
        differentiable = [is_differentiable(typeof(x).dtype) for x in outs]

        def with_zeros(outs: Sequence[Value], out_tangents: Sequence[Value | None]) -> list[Value]:
            return [instantiate(t, x) for x, t in select(zip(outs, out_tangents), differentiable)]

        def jvp(*values: Value) -> list[Value]:
            return with_zeros(*jvp_of_body(body, inside, active_operands)(*values))

        def jvp_of_rule(size: int, batched: Sequence[bool], values: Sequence[Value]) -> tuple[list, list[bool]]:
            """A primal and its tangent are batched alike."""
            active = active_operands[consts:]
            (of_primals, of_tangents), (primals, tangents) = (split_list(x, len(active)) for x in (batched, values))
            both = [bool(p or t) for p, t in zip(of_primals, scatter(of_tangents, active))]
            primals = broadcast_unbatched(primals, of_primals, both, size)
            tangents = broadcast_unbatched(tangents, of_tangents, select(both, active), size)
            out_batched: list[bool] = []

            def run(*leaves: Value) -> list[Value]:
                outs, out_batched[:] = rule(size, both, leaves)
                return outs

            out_tangents = with_zeros(*jvp_of_body(run, inside, active)(*primals, *tangents))
            return out_tangents, select(out_batched, differentiable)

        out_tangents = self.bind(*primals, *drop_none(tangents), **{**params, "body": jvp, "rule": jvp_of_rule})
        return [outside.join(x, t) for x, t in zip(outs, scatter(out_tangents, differentiable))]

    def linearize_body(self, outside: Any, args: Sequence[Value], params: dict) -> list[Value]:
        if not any(outside.owns(x) for x in args):
            return self.bind(*args, **params)
        return self.stage_body(outside, args, params)

    def transpose(self, cts: Sequence[Value | None], operands: Sequence[Any], params: dict) -> list[Value | None]:
        name = params["name"]
        raise TypeError(
            f"{name} is a custom_vmap, which has derivatives only in forward mode (jvp, jacfwd); for reverse mode "
            f"(grad, vjp) declare its derivative: make {name} a custom_vjp of the custom_vmap"
        )


def _closure_error(params: dict, how: str) -> TypeError:
    return TypeError(
        f"{params['name']} closes over a value that {how}, but its vmap rule gets only the arguments: pass the value "
        "as an argument"
    )


custom_vmap_p = CustomBatching("custom_vmap")


class custom_vmap(FunctionWithRules):
    """A function with a rule for `vmap`.

    Declare the rule with `def_vmap`. Everything but `vmap` uses the function itself. Derivatives in forward mode are
    those of the function, and under `vmap` those of the rule. The reverse mode of the function raises TypeError: for
    it, make the function a `custom_vjp` too, with `@custom_vjp` above `@custom_vmap`. (`grad` of a function that calls
    `vmap` differentiates the rule.)

    Args:
        fun: a function of trees of arrays.

    Raises:
        AttributeError: by a call, if no rule was declared.

    >>> import numpy as np
    >>> from minidiff import vmap
    >>> @custom_vmap
    ... def solve(a, b):
    ...     return np.linalg.solve(a, b)
    >>> @solve.def_vmap
    ... def solve_rule(axis_size, in_batched, a, b):
    ...     a_batched, b_batched = in_batched
    ...     if b_batched and not a_batched:  # one factorisation for all
    ...         return np.linalg.solve(a, b.T).T, True
    ...     return vmap(np.linalg.solve, in_axes=[0 if is_batched else None for is_batched in in_batched])(a, b), True
    >>> vmap(solve, in_axes=(None, 0))(2 * np.eye(2), np.arange(6.0).reshape(3, 2))
    array([[0. , 0.5],
           [1. , 1.5],
           [2. , 2.5]])
    """

    rule: Callable | None = None

    def def_vmap(self, vmap_rule: Callable) -> Callable:
        """Declare the rule.

        Args:
            vmap_rule: `vmap_rule(axis_size, in_batched, *args)` returns a pair `(out, out_batched)`. `in_batched` is a
                list of trees of booleans like the arguments. Batched leaves have a further axis of `axis_size` in
                front, others have none. `out_batched` says the same of the result: a tree of booleans like it, or a
                prefix.

        Returns:
            The rule, so that this is a decorator.

        Raises:
            TypeError: where the rule is used, if it does not return a pair or its result has another structure than the
                function's.
            ValueError: where the rule is used, if `out_batched` does not match the result.
        """
        self.rule = vmap_rule
        return vmap_rule

    @hide_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rule is None:
            raise AttributeError(f"{self.name} is a custom_vmap without a rule: declare one with {self.name}.def_vmap")
        args = self._positional(args, kwargs)
        leaves, structure = tree.flatten(args)
        call = BatchingCall(self, structure, are_weak(leaves))
        values = [as_value(x) for x in leaves]
        params = {"name": self.name, "body": call.body, "rule": call.rule, "consts": 0, "arguments": len(values)}
        outs = custom_vmap_p.bind(*values, **params)
        return tree.unflatten(call.out_structure, outs)


class BatchingCall(RuleCall):
    """One call of a function with a rule for vmap."""

    def body(self, *leaves: Value) -> list[Value]:
        args = tree.unflatten(self.structure, restore_weak(self.weak, leaves))
        return self.results(self.function.fun(*args), self.function.name)

    def rule(self, size: int, batched: Sequence[bool], leaves: Sequence[Value]) -> tuple[list[Value], list[bool]]:
        """The rule, on leaves: the results, and which are batched."""
        weak = [is_number and not is_batched for is_number, is_batched in zip(self.weak, batched)]
        args = tree.unflatten(self.structure, restore_weak(weak, leaves))
        in_batched = list(tree.unflatten(self.structure, batched))
        title, outs, out_batched = self.apply_rule(
            "vmap", self.function.rule, _WHEN_BATCHED, "out, out_batched", size, in_batched, *args
        )
        is_flag = lambda x: isinstance(x, (bool, numpy.bool_))  # noqa: E731
        out, message = tree.unflatten(self.out_structure, outs), f"{title} returns a wrong out_batched: it"
        flags = tree.broadcast_prefix(out_batched, out, is_flag, message)
        for n in positions(flags):
            t = typeof(outs[n])
            if t.shape[:1] != (size,):
                path = tree.paths(self.out_structure, "out")[n]
                raise ValueError(
                    f"{title} says that {path} is batched, but its type is {t}, without an axis of {size} in front"
                )
        return outs, flags


_WHEN_BATCHED = (
    "closes over a value that is mapped or differentiated: {error} pass the value to the function, and the rule gets "
    "it too"
)
