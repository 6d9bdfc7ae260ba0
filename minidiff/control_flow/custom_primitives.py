"""The operations that call functions with custom rules: `custom_jvp`, `custom_vjp`, `linear_call`.

A function with a rule is an operation with a body: evaluation, vectorization and staging use the body, differentiation
uses the rule. A jvp rule is linear in the tangents, and reverse mode transposes it. With a backward rule, the
derivative is a linear operation, `linear_call`, whose transpose is that rule; forward mode evaluates it with the jvp
rule, if there is one. `custom_rules.py` has the functions with rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minidiff.control_flow.bodies import Body, Call
from minidiff.control_flow.partial_eval import NestedJVP, batched_body
from minidiff.core.forward import JVP, instantiate
from minidiff.core.interpreter import Interpreter, current_interpreter, running, transforming
from minidiff.core.reverse import Linearize
from minidiff.core.staging import Stage
from minidiff.core.tape import Tape
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.ops import reduction
from minidiff.values.aliasing import copy_shared
from minidiff.values.dtypes import is_differentiable
from minidiff.values.lists import drop_none, place, split_list
from minidiff.values.settings import checking


class ClosureGuard(NestedJVP):
    """Forward mode, continued inside a rule; it raises if that closes over a differentiated value."""

    def __init__(self, below: Interpreter, outer: Any, function: str = ""):
        super().__init__(below, outer)
        self.function = function or outer.function  # in a shard_map's body, of the guard around it

    def lift_outer(self, x):
        raise closure_error(self.function, x)


def guard_closure(f: Callable, outside: JVP, name: str) -> Callable:
    """Make a body or a rule of `name` raise if it closes over a value that `outside` differentiates."""

    def run(*values):
        guard = ClosureGuard(current_interpreter(), outside, name)
        with transforming(guard):
            return list(map(guard.lift, f(*values)))

    return run


def closure_error(name: str, x: Value) -> TypeError:
    """Return the error that a rule of `name` closes over the differentiated value `x`."""
    return TypeError(
        f"{name} closes over a value of type {typeof(x)} that is being differentiated; its rule gives derivatives in "
        "its arguments alone (except nondiff_argnums): pass the value as an argument, or apply stop_gradient if it is "
        "a constant"
    )


class CustomPrimitive(Call):
    """An operation that calls a function with a rule.

    Parameters: its `name`; `body`; `consts`. On tapes the body takes the `consts` values that it closes over
    before the arguments; the rule does not take them.
    """

    def staged_params(self, params, tape, constants):
        return {**params, "body": tape, "consts": params["consts"] + constants}

    def show_params(self, params):
        return params["name"]


class CustomDerivative(CustomPrimitive):
    """An operation that calls a function with a derivative rule.

    The parameter `jvp` is the rule. It maps leaves and tangents to the results, then their tangents (None for zero).
    """

    def jvp_body(self, outside, args, params):
        primals, tangents = outside.split(args)
        name, consts = params["name"], params["consts"]
        body, rule = (guard_closure(params[key], outside, name) for key in ("body", "jvp"))
        if all(t is None for t in tangents):
            return self.bind(*primals, **{**params, "body": body, "jvp": rule})
        for x, t in zip(args, tangents[:consts]):
            if t is not None:
                raise closure_error(name, x)
        with checking(outside.scope, False):
            results = rule(*primals[consts:], *tangents[consts:])
        outs, out_tangents = split_list(results, len(results) // 2)
        return [outside.join(x, t) for x, t in zip(outs, out_tangents)]

    def batched_params(self, params, outside, batched, results):
        arguments = batched[params["consts"] :]
        rule = batched_body(params["jvp"], outside, [*arguments, *arguments], results, groups=2)
        return {**super().batched_params(params, outside, batched, results), "jvp": rule}


class LinearCall(CustomDerivative):
    """The derivative of a function with a backward rule; its transpose is `bwd`.

    The operands are, in order: `consts` values that the body closes over; `residuals` many residuals; the primals, if
    there is a body; the tangents of the `active` arguments. The body takes all of them and applies the jvp rule.
    Without a jvp rule the body is None: the operation can be recorded, batched and transposed, but not evaluated.
    """

    def forward_rule(self, params: dict) -> Body:
        """Return the body, or raise TypeError if there is none."""
        if params["body"] is None:
            name = params["name"]
            raise TypeError(
                f"{name} has a backward rule only (custom_vjp), and no derivative in forward mode (jvp, jacfwd, a "
                f"function that linearize returned); take reverse mode, or declare a forward rule with {name}.defjvp, "
                "or make it a custom_jvp, whose rule serves both"
            )
        return params["body"]

    def evaluate(self, args, params):
        return self.forward_rule(params)(*args)

    def jvp_body(self, outside, args, params):
        if not drop_none(outside.split(args)[1]):
            return self.bind(*args, **params)
        with running(outside):
            return self.forward_rule(params)(*args)

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        if not any(map(outside.owns, args)):
            return self.bind(*args, **params)
        return outside.record(self, args, params)

    def stage_body(self, outside: Stage, args: Sequence[Value], params: dict) -> list[Value]:
        # Do not raise here: reverse mode of a recorded body runs forward mode first, then transposes.
        if params["body"] is None:
            return outside.record(self, args, params)
        return super().stage_body(outside, args, params)

    def transpose(self, cts, operands, params):
        active, types, consts = params["active"], params["out_types"], params["consts"]
        known = operands[: len(operands) - len(active)]
        for x in known:
            if isinstance(x, ShapedArray):
                raise TypeError(
                    f"the derivative of {params['name']} is linear in its tangents, not in the value of type {x} at "
                    "which it is evaluated"
                )
        cts = place(cts, [is_differentiable(t.dtype) for t in types])
        if not params["symbolic_zeros"]:
            cts = [instantiate(ct, t.cotangent) for ct, t in zip(cts, types)]
        residuals = known[consts : consts + params["residuals"]]
        in_cts = copy_shared(params["bwd"](residuals, cts), residuals)
        return [None] * len(known) + [in_cts[i] for i in active]

    def batched_params(self, params, outside, batched, results):
        known, tangents = split_list(batched, len(batched) - len(params["active"]))
        _, residuals, _ = split_list(known, params["consts"], params["residuals"])
        unbatched = {i for i, is_batched in zip(params["active"], tangents) if not is_batched}
        body = params["body"] and batched_body(params["body"], outside, batched)

        def bwd(values, cts):
            """Apply the rule to batches of cotangents; sum the cotangents of arguments that are not batched."""
            flat = lambda *xs: params["bwd"](xs[: len(values)], xs[len(values) :])  # noqa: E731
            in_cts = batched_body(flat, outside, [*residuals, *[True] * len(cts)])(*values, *cts)
            return [reduction.sum(ct, 0) if ct is not None and i in unbatched else ct for i, ct in enumerate(in_cts)]

        out_types = tuple(t.update(shape=(outside.size_of_batch, *t.shape)) for t in params["out_types"])
        return {**params, "body": body, "bwd": bwd, "out_types": out_types}

    def typecheck(self, types, params):
        if isinstance(params["body"], Tape):
            super().typecheck(types, params)
        return [t for t in params["out_types"] if is_differentiable(t.dtype)]


custom_jvp_p = CustomDerivative("custom_jvp")
custom_vjp_p = CustomDerivative("custom_vjp")
linear_call_p = LinearCall("linear_call")
