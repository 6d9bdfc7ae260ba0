"""Checkpointing: recompute intermediate values instead of saving them.

In reverse mode a checkpointed function runs under three interpreters of its own. `Known` evaluates the primal
operations and records them on a tape that does not hold the values; `LinearInside` above it records the linear
operations; on top, `SweepInside` continues the surrounding forward sweep. The two tapes become one linear equation. Its
operands are the function's inputs, including the values it closes over, and the results that a policy saves.
Transposing it reruns the known part, then transposes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minidiff import tree
from minidiff.core import (
    Interpreter,
    Primitive,
    ShapedArray,
    Tracer,
    Value,
    current_interpreter,
    name_of,
    running,
    transforming,
    typeof,
)
from minidiff.forward import JVP, Flat, JVPTracer, as_value
from minidiff.higher_order.inlined import Call, Continued, JVPInside
from minidiff.higher_order.partial_eval import PartialEval, chosen, names_used, needed_equations, prune_tape
from minidiff.keywords import transformation
from minidiff.ops.dimensions import elementwise
from minidiff.promotion import are_weak
from minidiff.reverse import Linearize, Sweep, backward_pass
from minidiff.staging import Stage, check_function
from minidiff.tape import Atom, Equation, RecordedTracer, Tape, Var, atom_type, evaluate_equation, read

Policy = Callable[..., bool]

# ---------------------------------------------------------------- evaluating and recording at once


class KnownTracer(RecordedTracer):
    """A value and its name on a tape that does not hold the value."""

    __slots__ = ("value",)

    def __init__(self, interpreter: Known, var: Var, value: Value):
        super().__init__(interpreter, var)
        self.value = value

    def concrete(self, use: str) -> Any:
        self.check_alive()
        return self.value.concrete(use) if isinstance(self.value, Tracer) else self.value

    __float__, __complex__, _lose_derivative = JVPTracer.__float__, JVPTracer.__complex__, JVPTracer._lose_derivative

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


class Known(Stage):
    """Run operations below and record them; keep results that the policy saves."""

    name = "checkpoint"
    keeps_sources = False

    def __init__(self, below: Interpreter, policy: Policy | None):
        super().__init__(below)
        self.policy = policy
        self.values: dict[Var, Value] = {}  # the values of inputs and of saved results

    def enter(self, value: Value) -> KnownTracer:
        """Make a value an input of the tape."""
        var = self.new_input(typeof(value)).variable
        self.values[var] = value
        return KnownTracer(self, var, value)

    def owns(self, x: Value) -> bool:
        return type(x) is KnownTracer and x.interpreter is self

    def adopt(self, x: Value) -> Value:
        """Make a value that the function closes over an input."""
        if not isinstance(x, Tracer) or x.interpreter is self:
            return x
        known = self._adopted.get(id(x))
        if known is None:
            known = self._adopted[id(x)] = (x, self.enter(self.below.adopt(x)))
        return known[1]

    def interpret(self, primitive, args, params):
        return super().interpret(primitive, [self.adopt(x) for x in args], params)

    def record(self, primitive, args, params):
        args = [self.adopt(x) for x in args]
        with running(self.below):
            out = primitive.apply(self.below, [x.value if self.owns(x) else x for x in args], params)
        outs = out if primitive.multiple_results else [out]
        outputs = [Var(typeof(x)) for x in outs]
        self.equations.append(
            Equation(primitive, [x.variable if self.owns(x) else x for x in args], params, outputs, self.source())
        )
        if self.policy is not None and self.policy(primitive, *map(typeof, args), **params):
            self.values.update(zip(outputs, outs))
            if primitive is name_p:  # operand and result are one value: save it under both names
                self.values.update((x.variable, out) for x in args if self.owns(x))
        tracers = [KnownTracer(self, v, x) for v, x in zip(outputs, outs)]
        return tracers if primitive.multiple_results else tracers[0]


class LinearInside(Continued, Linearize):
    """Record the linear part of a checkpointed function; known values appear by name."""

    def atom(self, x: Value) -> Atom:
        if not isinstance(x, Tracer):
            return x
        return x.variable if self.owns(x) else self.below.adopt(x).variable


class SweepInside(Continued, Sweep):
    """The forward sweep of reverse mode, continued inside a checkpointed function."""

    def process(self, primitive, args, params):
        linear = self.below
        before = len(linear.equations)
        out = super().process(primitive, args, params)
        for eqn in linear.equations[before:]:  # the tape holds no values
            eqn.inputs = [x if isinstance(x, Var) else linear.atom(x) for x in eqn.inputs]
        return out


# ---------------------------------------------------------------- the operation


class Checkpoint(Call):
    """Parameters: `body`, a function of leaves or a Tape, and `policy`."""

    def jvp_body(self, outside: JVP, args: Sequence[Value], params: dict) -> list[Value]:
        if isinstance(outside, Sweep):
            return self._linearize(outside, args, params)
        primals, tangents = outside.split(args)
        moving = [i for i, t in enumerate(tangents) if t is not None]
        out_moving: list[int] = []

        def body(*values):
            inside = JVPInside(current_interpreter(), outer=outside)
            inside.origin = "checkpoint", name_of(params["body"])
            given = dict(zip(moving, values[len(primals) :]))
            with transforming(inside):
                outs = params["body"](*[inside.join(p, given.get(i)) for i, p in enumerate(values[: len(primals)])])
                outs, out_tangents = inside.split([inside.adopt(x) for x in outs])
            out_moving[:] = [i for i, t in enumerate(out_tangents) if t is not None]
            return [*outs, *[out_tangents[i] for i in out_moving]]

        results = self.bind(*primals, *[tangents[i] for i in moving], **{**params, "body": body})
        count = len(results) - len(out_moving)
        found = dict(zip(out_moving, results[count:]))
        return [outside.join(x, found.get(i)) for i, x in enumerate(results[:count])]

    def _linearize(self, outside: Sweep, args: Sequence[Value], params: dict) -> list[Value]:
        """Run the function and record its derivative as one equation."""
        recorder = outside.below
        known = Known(recorder.below, params["policy"])
        linear = LinearInside(known, outer=recorder)
        inside = SweepInside(linear, outer=outside)
        known.origin = linear.origin = inside.origin = "checkpoint", name_of(params["body"])
        primals, tangents = outside.split(args)
        given = [t for t in tangents if t is not None]
        inputs = [
            inside.join(known.enter(p), None if t is None else linear.new_input(typeof(p)))
            for p, t in zip(primals, tangents)
        ]
        with transforming(known), transforming(linear), transforming(inside):
            outs, out_tangents = inside.split([inside.adopt(x) for x in params["body"](*inputs)])
            moving = [i for i, t in enumerate(out_tangents) if t is not None]
            outputs = [linear.atom(out_tangents[i]) for i in moving]
            outs = [known.adopt(x) for x in outs]
            captured = [*given, *linear.captured]
        outs = [x.value if known.owns(x) else x for x in outs]
        equations, needed = needed_equations([*known.equations, *linear.equations], outputs, known.values)
        residuals = {v: x for v, x in known.values.items() if v in needed}
        moved = {v: t for v, t in zip(linear.inputs, captured) if v in needed}
        if moving:
            body = Tape([*residuals, *moved], equations, outputs)
            results = recorder.record(self, [*residuals.values(), *moved.values()], {"body": body, "policy": None})
            found = dict(zip(moving, results))
            return [outside.join(x, found.get(i)) for i, x in enumerate(outs)]
        return outs

    def linearize_body(self, outside, args, params):
        """Linearise a taped checkpoint (in a loop, say): one linear equation again."""
        linear = [outside.owns(x) for x in args]
        if not isinstance(params["body"], Tape) or not any(linear):
            return super().linearize_body(outside, args, params)
        parts, policy = PartialEval(params["body"], linear), params["policy"]
        known, moved = parts.stage, parts.recorder

        def named(x):
            return x.variable if known.owns(x) or moved.owns(x) else x

        given = dict(zip(known.inputs, [x for x, yes in zip(args, linear) if not yes]))
        env = dict(given)
        for eqn in known.equations:
            evaluate_equation(eqn, env)
            if policy is not None and policy(eqn.primitive, *map(atom_type, eqn.inputs), **eqn.params):
                given.update((v, env[v]) for v in eqn.outputs)
                if eqn.primitive is name_p:  # save it under both names
                    given.update((v, env[v]) for v in eqn.inputs)
        env.update(zip(moved.inputs, [x for x, yes in zip(args, linear) if yes]))
        outputs = [x.variable for x in parts.outs if moved.owns(x)]
        pushed = [
            Equation(e.primitive, [*map(named, e.inputs)], e.params, e.outputs, e.source) for e in moved.equations
        ]
        equations, needed = needed_equations([*known.equations, *pushed], outputs, given)
        operands = [v for v in (*given, *moved.inputs) if v in needed]
        if outputs:
            body, constants = Tape(operands, equations, outputs).close()  # constants such as the outer tape's zeros
            operands = [*constants, *[env[v] for v in operands]]
            results = outside.record(self, operands, {"body": body, "policy": None})
            env.update(zip(outputs, results))
        return [read(env, named(x)) for x in parts.outs]

    def transpose(self, cts, operands, params):
        tape = params["body"]
        env = dict(zip(tape.inputs, map(_for_recompute, operands)))
        linear_vars = {v for v, x in env.items() if isinstance(x, ShapedArray)}
        known, linear = [], []
        for eqn in tape.equations:
            if any(isinstance(a, Var) and a in linear_vars for a in eqn.inputs):
                linear_vars.update(eqn.outputs)
                linear.append(eqn)
            else:
                known.append(eqn)
        wanted = [v for v in tape.inputs if v in linear_vars]
        residuals = {a for e in linear for a in e.inputs if isinstance(a, Var) and a not in linear_vars}
        rest = Tape(wanted, with_values(linear, _run(known, env, residuals)), tape.outputs)
        rest.linear = True
        rest.may_be_sharded = any(isinstance(x, Tracer) for x in (*operands, *cts))
        found = dict(zip(wanted, backward_pass(rest, [True] * len(wanted), wanted, cts, consume=True)))
        return [found.get(v) for v in tape.inputs]

    def without_unused_results(self, eqn: Equation, used: Sequence[bool]) -> Equation:
        """Drop unused results, and everything that would be recomputed for them alone."""
        body = eqn.params["body"]
        if not isinstance(body, Tape):
            return eqn
        tape = prune_tape(Tape(body.inputs, body.equations, chosen(body.outputs, used)))
        names = names_used(tape)
        keep = [v in names for v in body.inputs]
        params = {**eqn.params, "body": Tape(chosen(body.inputs, keep), tape.equations, tape.outputs)}
        return Equation(self, chosen(eqn.inputs, keep), params, chosen(eqn.outputs, used), eqn.source)

    def show_params(self, params):
        policy = params["policy"]
        return "" if policy is None else f"policy={getattr(policy, '__name__', policy)}"


checkpoint_p = Checkpoint("checkpoint")


def _run(equations: Sequence[Equation], env: dict[Var, Value], wanted: set[Var]) -> dict[Var, Value]:
    """The values of `wanted`; others are freed after their last use."""
    last: dict[Var, int] = {}
    for i, eqn in enumerate(equations):
        last.update((a, i) for a in (*eqn.inputs, *eqn.outputs) if isinstance(a, Var))
    for i, eqn in enumerate(equations):
        evaluate_equation(eqn, env)
        for a in (*eqn.inputs, *eqn.outputs):
            if isinstance(a, Var) and last[a] == i and a not in wanted:
                env.pop(a, None)
    return {v: env[v] for v in wanted}


def with_values(equations: Sequence[Equation], values: dict[Var, Value]) -> list[Equation]:
    """Substitute values for names, so that each is freed with its last equation."""
    return [
        Equation(
            e.primitive,
            [values.get(a, a) if isinstance(a, Var) else a for a in e.inputs],
            e.params,
            e.outputs,
            e.source,
        )
        for e in equations
    ]


# ---------------------------------------------------------------- public functions


@transformation
def checkpoint(f: Callable, policy: Policy | None = None) -> Callable:
    """Make `f` save only its arguments in reverse mode, and recompute the rest.

    `policy(primitive, *types, **params)` says whether the results of an operation are saved as well; `str(primitive)`
    is the operation's name. `checkpoint_policies` holds common policies. Arguments and result are trees of arrays;
    arrays that `f` closes over count as arguments.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> f = checkpoint(lambda x: np.sin(np.sin(x)), policy=lambda op, *_, **__: str(op) == 'sin')
    >>> float(grad(f)(0.0))
    1.0

    Source: shard_map tutorial, "8-way fully sharded data parallelism".
    """
    check_function("checkpoint", f)
    if not (policy is None or callable(policy)):
        raise TypeError(
            f"checkpoint: policy must be a function of an operation and the types of its operands, got {policy!r}; "
            "md.checkpoint_policies has some"
        )

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree.flatten((args, kwargs))
        flat = Flat(lambda args, kwargs: f(*args, **kwargs), structure, weak=are_weak(leaves))
        flat.__name__ = name_of(f)
        outs = checkpoint_p.bind(*[as_value(x) for x in leaves], body=flat, policy=policy)
        return tree.unflatten(flat.out_structure, outs)

    return checkpointed


remat = checkpoint


class Name(Primitive):
    """The identity with a label, for policies and to keep recomputed values apart."""

    shares_memory = True

    def __init__(self, name: str):
        super().__init__(name, lambda x, **mark: x, lambda x, **mark: (x.shape, x.dtype), sharding=elementwise)

    def tangent(self, out, primals, tangents, params):
        return tangents[0]

    def transpose(self, ct, operands, params):
        return [ct]

    def batch(self, args, batched, params):
        return self.bind(*args, **params)


name_p = Name("name")

#: The identity that marks operands of a recomputation, so that it is not merged with the original computation.
recompute_p = Name("recompute")


def _for_recompute(x: Any) -> Any:
    """Mark an operand of a recomputation, distinct from the original value."""
    return recompute_p.bind(x) if isinstance(x, Tracer) else x


def checkpoint_name(x: Any, name: str) -> Any:
    """Name `x`, a tree of arrays, for `checkpoint_policies`.

    `checkpoint_policies.save_only_these_names(name)` saves it.
    """
    return tree.map(lambda leaf: name_p.bind(as_value(leaf), name=name), x)


class checkpoint_policies:
    """Common policies: which results `checkpoint` saves."""

    @staticmethod
    def everything_saveable(primitive: Primitive, *types: ShapedArray, **params: Any) -> bool:
        """Save everything, as if there were no checkpoint."""
        return True

    @staticmethod
    def nothing_saveable(primitive: Primitive, *types: ShapedArray, **params: Any) -> bool:
        """Save nothing: recompute everything."""
        return False

    @staticmethod
    def dots_saveable(primitive: Primitive, *types: ShapedArray, **params: Any) -> bool:
        """Save the results of matrix products, which are the most expensive to recompute."""
        return str(primitive) in ("matmul", "dot", "einsum", "tensordot", "inner", "outer")

    @staticmethod
    def save_only_these_names(*names: str) -> Policy:
        """Save the values that `checkpoint_name` gave one of these names."""

        def policy(primitive: Primitive, *types: ShapedArray, **params: Any) -> bool:
            return primitive is name_p and params["name"] in names

        return policy
