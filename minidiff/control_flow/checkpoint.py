"""Checkpointing: recompute intermediate values instead of saving them.

In reverse mode a checkpointed function runs under three interpreters of its own. `RecomputeTrace` evaluates the primal
operations, and records them on a tape that does not hold the values. `NestedLinearize`, above it, records the linear
operations. On top, the surrounding forward mode is continued. The two tapes become one linear equation. Its operands
are the function's inputs, including the values that it closes over, and the results that a policy saves. Transposing it
reruns the known part, then transposes the linear part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from minidiff import tree
from minidiff.control_flow.bodies import Call, label_operation
from minidiff.control_flow.dead_code import needed_equations, with_used_results
from minidiff.control_flow.partial_eval import Nested, jvp_of_body, nested_class
from minidiff.core.forward import JVP, JVPTracer
from minidiff.core.interpreter import Interpreter, running, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.reverse import Linearize
from minidiff.core.tape import Atom, Equation, Stage, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.errors import name_of
from minidiff.errors.location import recomputes
from minidiff.inputs.arguments import Flat, are_weak, as_value, check_function, close_over
from minidiff.inputs.keywords import make_decorator
from minidiff.ops.einsum import einsum_p
from minidiff.ops.linalg import matmul_p
from minidiff.values.lists import drop_none, scatter, select, split_list
from minidiff.values.settings import override, restores_settings, setting

Policy = Callable[..., bool]

# ---------------------------------------------------------------- evaluating and recording at once


class RecomputeTracer(JVPTracer):
    """A value (the primal), and its name on a tape that does not hold the value."""

    __slots__ = ()
    variable: Any = vars(JVPTracer)["tangent"]

    def number(self, use: str) -> Any:
        """The number, unless it is being differentiated outside of the checkpoint."""
        return self.primal.number(use) if isinstance(self.primal, Tracer) else self.concrete(use)


class RecomputeTrace(Stage):
    """Run operations below and record them; keep results that the policy saves."""

    name = "checkpoint"
    keeps_sources = False

    def __init__(self, below: Interpreter, policy: Policy | None):
        super().__init__(below)
        self.policy = policy
        self.values: dict[Var, Value] = {}  # the values of inputs and of saved results

    def enter(self: Any, value: Value) -> RecomputeTracer:
        """Make a value an input of the tape."""
        var = self.new_input(typeof(value)).variable
        self.values[var] = value
        return RecomputeTracer(self, value, var)

    def owns(self, x: Value) -> bool:
        return type(x) is RecomputeTracer and x.interpreter is self

    def value_of(self, x: Value) -> Value:
        return x.primal if self.owns(x) else x

    def is_in_body(self, x: Tracer) -> bool:
        return x.interpreter is self

    def _lift(self, x: Tracer) -> Value:
        """Make a value that the function closes over an input."""
        return self.enter(self.below.lift(x))

    def record(self, primitive, args, params):
        args = [self.lift(x) for x in args]
        with running(self.below):
            out = primitive.apply(self.below, list(map(self.value_of, args)), params)
        outs = out if primitive.multiple_results else [out]
        outputs = [Var(typeof(x)) for x in outs]
        self.equations.append(
            Equation(primitive, [x.variable if self.owns(x) else x for x in args], params, outputs, self.source())
        )
        if self.policy is not None and self.policy(primitive, *map(typeof, args), **params):
            self.values.update(zip(outputs, outs))
            if primitive is name_p:  # operand and result are one value: save it under both names
                self.values.update((x.variable, out) for x in args if self.owns(x))
        tracers = [RecomputeTracer(self, x, v) for v, x in zip(outputs, outs)]
        return tracers if primitive.multiple_results else tracers[0]


class NestedLinearize(Nested, Linearize):
    """Record the linear part of a checkpointed function; known values appear by name."""

    def atom(self, x: Value) -> Atom:
        if not isinstance(x, Tracer):
            return x
        return x.variable if self.owns(x) else self.below.lift(x).variable


# ---------------------------------------------------------------- the operation


class Checkpoint(Call):
    """Parameters: `body`, a function of leaves or a Tape, and `policy`."""

    def jvp_body(self, outside: JVP, args: Sequence[Value], params: dict) -> list[Value]:
        primals, tangents = outside.split(args)
        active = [t is not None for t in tangents]
        out_active: list[bool] = []

        def inside(below):
            interpreter = nested_class(type(outside))(below, outer=outside)
            interpreter.origin = "checkpoint", name_of(params["body"])
            return interpreter

        def body(*values):
            outs, out_tangents = jvp_of_body(params["body"], inside, active)(*values)
            out_active[:] = [t is not None for t in out_tangents]
            return [*outs, *drop_none(out_tangents)]

        body.__name__ = name_of(params["body"])
        results = self.bind(*primals, *drop_none(tangents), **{**params, "body": body})
        outs, out_tangents = split_list(results, len(out_active))
        return [outside.join(x, t) for x, t in zip(outs, scatter(out_tangents, out_active))]

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        """Run the function; record its derivative as one equation, which recomputes."""
        body, linear_args = params["body"], [x for x in args if outside.owns(x)]
        if isinstance(body, Tape) and not linear_args:
            return self.bind(*args, **params)
        known = RecomputeTrace(outside.below, params["policy"])
        linear = NestedLinearize(known, outer=outside)
        known.origin = linear.origin = "checkpoint", name_of(body)
        inputs = [linear.new_input(typeof(x)) if outside.owns(x) else known.enter(x) for x in args]
        with transforming(known), transforming(linear):
            outs = [linear.lift(x) for x in body(*inputs)]
            captured = [*linear_args, *linear.captured]
        is_linear = list(map(linear.owns, outs))
        outputs = [x.variable for x in select(outs, is_linear)]
        equations, needed = needed_equations([*known.equations, *linear.equations], outputs, known.values)
        values = {**known.values, **dict(zip(linear.inputs, captured))}
        operands = {v: x for v, x in values.items() if v in needed}
        results: Iterable[Value] = ()
        if outputs:
            tape = Tape(list(operands), equations, outputs)
            results = outside.record(self, list(operands.values()), {"body": tape, "policy": None})
        linear_outs = scatter(results, is_linear)
        return [t if linear_out else known.value_of(x) for x, t, linear_out in zip(outs, linear_outs, is_linear)]

    @recomputes
    def transpose(self, cts, operands, params):
        operands = [recompute_p.bind(x) if isinstance(x, Tracer) else x for x in operands]
        return super().transpose(cts, operands, params)

    def without_unused_results(self, eqn: Equation, used: Sequence[bool]) -> Equation:
        """Drop unused results, and everything that would be recomputed for them alone."""
        return with_used_results(eqn, used)

    def show_params(self, params):
        policy = params["policy"]
        return "" if policy is None else f"policy={getattr(policy, '__name__', policy)}"


checkpoint_p = Checkpoint("checkpoint")


# ---------------------------------------------------------------- public functions


@make_decorator
def checkpoint(f: Callable, policy: Policy | None = None, static_argnums: int | Sequence[int] = ()) -> Callable:
    """Make `f` save only its arguments in reverse mode, and recompute everything else.

    Arrays that `f` closes over count as arguments.

    Args:
        f: a function of trees of arrays.
        policy: `policy(primitive, *types, **params)` says whether the results of an operation are saved as well;
            `str(primitive)` is the operation's name. `checkpoint_policies` holds common policies.
        static_argnums: the positions of arguments that may be anything, and are passed unchanged.

    Returns:
        A function like `f`.

    Raises:
        TypeError: for a policy that is not a function, and for a static argument that a call does not have.

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

    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)

    @restores_settings
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        for n in static:
            if not -len(args) <= n < len(args):
                raise TypeError(
                    f"checkpoint: static_argnums names argument {n}, but {name_of(f)} was called with {len(args)}"
                )
        of_others, args = close_over(f, args, {n % len(args): args[n] for n in static}) if static else (f, args)
        leaves, structure = tree.flatten((tree.with_settings(args), tree.with_settings(kwargs)))
        flat: Any = Flat(lambda args, kwargs: of_others(*args, **kwargs), structure, weak=are_weak(leaves))
        flat.__name__ = name_of(f)
        with override(_running, (*_running.get(), policy)):
            outs = checkpoint_p.bind(*[as_value(x) for x in leaves], body=flat, policy=policy)
        return tree.unflatten(flat.out_structure, outs)

    return checkpointed


remat = checkpoint

#: The policies of the checkpointed functions that are running.
_running: ContextVar[tuple[Policy | None, ...]] = setting("policies", ())


def recomputed_selectively(f: Callable) -> Callable:
    """`f`, of trees of arrays; in a function with the policy `selective`, a checkpoint of it."""
    return lambda *args: (checkpoint(f) if checkpoint_policies.selective in _running.get() else f)(*args)


name_p = label_operation("name")
#: Marks operands of a recomputation, so that it is not merged with the original computation.
recompute_p = label_operation("recompute")


def checkpoint_name(x: Any, name: str) -> Any:
    """Name a value for `checkpoint_policies`: `checkpoint_policies.save_only_these_names(name)` saves it.

    Args:
        x: a tree of arrays.
        name: a string.

    Returns:
        A tree with the structure and the values of `x`.

    >>> import numpy as np
    >>> from minidiff import make_tape
    >>> print(make_tape(lambda x: np.sin(checkpoint_name(x, "input")))(1.0))
    lambda a:f64[]:
      b:f64[] = name(a, name='input')
      c:f64[] = sin(b)
      return c
    """
    return tree.map(lambda leaf: name_p.bind(as_value(leaf), name=name), x)


class checkpoint_policies:
    """Common policies, with JAX's names: which results `checkpoint` saves.

    Here the backward pass recomputes the sine, and not the matrix product.

    >>> import numpy as np
    >>> from minidiff import grad, make_tape
    >>> f = lambda x: np.sin(np.cos(x @ x))
    >>> for policy in (checkpoint_policies.nothing_saveable, checkpoint_policies.dots_saveable):
    ...     tape = make_tape(grad(checkpoint(f, policy=policy)))(np.ones(3))
    ...     print([str(eqn.primitive) for eqn in tape.equations].count("matmul"))
    2
    1
    """

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
        return primitive in (matmul_p, einsum_p)

    @staticmethod
    def dots_with_no_batch_dims_saveable(primitive: Primitive, *types: ShapedArray, **params: Any) -> bool:
        """Save the results of matrix products that are not batches of products, such as those with weights."""
        if primitive is einsum_p:
            operands, out = params["subscripts"].split("->")
            return not set(out).intersection(*operands.split(","))
        # A dimension of size 1, or of one operand alone, makes no batch of products.
        leading = [t.shape[-3::-1] for t in types]
        return primitive is matmul_p and not any(min(sizes) > 1 for sizes in zip(*leading))

    @staticmethod
    def selective(primitive: Primitive, *types: ShapedArray, **params: Any) -> bool:
        """Save everything but what is cheap to recompute: the core of attention, and the inside of norms.

        These are what `md.nn.dot_product_attention` computes of queries, keys and values, and a norm of
        `spmd.parallel`. Scores and weights are most of a layer's activations. Megatron's name; its source: Korthikanti
        et al., "Reducing activation recomputation in large transformer models".
        """
        return True

    #: Megatron's name for recomputing everything from a layer's input.
    full = nothing_saveable

    checkpoint_dots = dots_saveable
    checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable

    @staticmethod
    def save_only_these_names(*names: str) -> Policy:
        """Save the values that `checkpoint_name` gave one of these names.

        Args:
            names: strings.

        Returns:
            A policy for `checkpoint`.

        Raises:
            TypeError: for a name that is not a string.
        """
        return _by_name("save_only_these_names", names, among=True, others=False)

    @staticmethod
    def save_any_names_but_these(*names: str) -> Policy:
        """Save the values that `checkpoint_name` gave any other name, and no others.

        Args:
            names: strings.

        Returns:
            A policy for `checkpoint`.

        Raises:
            TypeError: for a name that is not a string.
        """
        return _by_name("save_any_names_but_these", names, among=False, others=False)

    @staticmethod
    def save_anything_except_these_names(*names: str) -> Policy:
        """Save everything, named or not, except the results of `checkpoint_name` with one of these names.

        Args:
            names: strings.

        Returns:
            A policy for `checkpoint`.

        Raises:
            TypeError: for a name that is not a string.
        """
        return _by_name("save_anything_except_these_names", names, among=False, others=True)

    @staticmethod
    def save_from_both_policies(policy_1: Policy, policy_2: Policy) -> Policy:
        """Save what one of two policies saves.

        Args:
            policy_1: a policy.
            policy_2: another policy.

        Returns:
            A policy for `checkpoint`.
        """

        def policy(primitive: Primitive, *types: ShapedArray, **params: Any) -> bool:
            return policy_1(primitive, *types, **params) or policy_2(primitive, *types, **params)

        return policy


def _by_name(caller: str, names: Sequence[str], among: bool, others: bool) -> Policy:
    """Return a policy that saves values with these names (with others if not `among`), and unnamed ones if `others`."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"checkpoint_policies.{caller}: names must be strings, as checkpoint_name takes, got {name!r}"
            )

    def policy(primitive: Primitive, *types: ShapedArray, **params: Any) -> bool:
        return (params["name"] in names) is among if primitive is name_p else others

    return policy
