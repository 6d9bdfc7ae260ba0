"""`while_loop`, and `fori_loop`, which is a `scan` if its bounds are known."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy

from minidiff import tree
from minidiff.control_flow import loops
from minidiff.control_flow.bodies import LinearPart, Vectorized, label_operation
from minidiff.control_flow.bounded_loop import BoundedLoop, hoist_casts, too_many_steps_message, with_constants
from minidiff.control_flow.carries import (
    Carry,
    as_type,
    cast_and_reshard,
    check_functions,
    convert_python_number,
    copy_overwritten,
    is_staging,
    is_weak,
    known_number,
)
from minidiff.control_flow.cond import operands_of_branch
from minidiff.control_flow.dead_code import depends_on_marked, prune_tape, without_effects
from minidiff.control_flow.divergent import DivergentOperation
from minidiff.control_flow.loops import scan_steps, steps_per_body, suggest_jit
from minidiff.control_flow.partial_eval import (
    CARRY,
    CONST,
    Operand,
    TracedBody,
    concrete_value,
    lift_value,
    partial_eval,
    trace_batched,
)
from minidiff.control_flow.schedules import CheckpointSchedule, check_schedule
from minidiff.core.interpreter import current_scope
from minidiff.core.tape import Equation, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.core.vmap import BatchTracer
from minidiff.errors import TracerError, VarianceError
from minidiff.inputs.arguments import as_value, restore_weak
from minidiff.inputs.key_reuse import repeats, use_operands, used_inputs
from minidiff.inputs.keywords import explain_keywords
from minidiff.ops.elementwise import add, greater, less, stop_gradient, where
from minidiff.ops.reduction import sum as sum_of
from minidiff.values.lists import positions, select, split_list

CONDITION = "the condition of while_loop"


def _refuse_reverse(*_: Any) -> NoReturn:
    raise TypeError(
        "while_loop cannot be differentiated in reverse mode: the number of its steps, and so the memory that the "
        "backward pass needs, is not known in advance. Pass max_steps=; or use scan, or fori_loop with bounds that are "
        "Python numbers (which is a scan); or forward mode, md.jvp"
    )


class While(DivergentOperation):
    """Loop while a condition holds.

    Operands are the condition's `cond_consts` values, the body's `body_consts` values, and the carries. If the
    condition varies along mesh axes, each rank takes its own number of steps: see `DivergentOperation`.
    """

    repeats = True
    selector = CONDITION
    effect = "take different numbers of steps"
    way_out = (
        "Let all ranks take the steps of the one that takes most: loop while pany(condition, {axes}) (to an upper "
        "bound of pmax(upper, {axes})), and for the ranks that are done keep the carries, with "
        "np.where(condition, new, old)"
    )
    names = MappingProxyType({"cond": "cond_fun", "body": "body_fun"})

    def evaluate(self, args, params):
        cond_consts, body_consts, carry = split_list(args, params["cond_consts"], params["body_consts"])
        carry = copy_overwritten(params["body"], carry, len(body_consts))
        while concrete_value(params["cond"](*cond_consts, *carry)[0], CONDITION):
            carry = params["body"](*body_consts, *carry)
        return carry

    def check_fits(self, types, params, scope):
        if [t.shape for t in params["cond"].out_types] != [()]:
            raise ValueError(f"{CONDITION} must be one number, got {params['cond'].out_types}")

    def typecheck(self, types, params):
        cond, body = params["cond"], params["body"]
        cond_consts, body_consts, carry = split_list(types, params["cond_consts"], params["body_consts"])
        self._check_operands([*cond_consts, *carry], cond.in_types)
        self._check_operands([*body_consts, *carry], body.in_types)
        self._check_operands(body.out_types, body.in_types[len(body_consts) :])
        self.check_divergence(cond.out_types[0], params)
        return body.out_types

    def count_leading(self, params):
        return params["cond_consts"]

    def chosen_along(self, leading, params):
        return params["cond"].out_types[0].variance

    def groups(self, params):
        body, n = params["body"], params["body_consts"]
        return [*[CONST] * n, *[CARRY] * (len(body.inputs) - n)], [CARRY] * len(body.outputs)

    def with_bodies(self, params, tapes, operands):
        """Let the condition take the carries that the body takes."""
        (body,), test, k, n = tapes, params["cond"], params["cond_consts"], params["body_consts"]
        carries = [(x, var) for x, var in zip(operands, body.inputs) if x.group == CARRY]
        inputs = [Var(var.type) if x.origin is None else test.inputs[k + x.origin - n] for x, var in carries]
        test = prune_tape(Tape([*test.inputs[:k], *inputs], test.equations, test.outputs))
        return {"cond": test, "body": body, "cond_consts": k, "body_consts": len(operands) - len(carries)}

    def operands_by_body(self, count, params):
        cond_consts, others = split_list(range(count), params["cond_consts"])
        return {"cond": [*cond_consts, *others[params["body_consts"] :]], "body": others}

    def split(self, args, linear, params):
        """Compute the known carries; the linear part reruns the loop, without residuals."""
        k, results = params["cond_consts"], self.groups(params)[1]
        (parts,), in_linear, is_linear = self.change_branches(params, linear[k:], partial_eval)
        if any(depends_on_marked(params["cond"], [*linear[:k], *is_linear])):
            raise TypeError("while_loop: its condition depends on values that must be linear")
        known = [not linear_out for linear_out in is_linear]
        operands = select(self.operands_of(args[k:], params), [not linear_in for linear_in in in_linear])
        tape = parts.known_tape(select(parts.outs, known))
        outs = self.rebind(args[:k], [tape], operands, select(results, known), params)
        again = without_effects(Equation(self, (), params, ())).params
        part = LinearPart([Operand(x, CONST) for x in args], again, list(range(len(results))))
        return dict(zip(positions(known), outs)), part

    transpose: Any = _refuse_reverse

    def vectorize(self, outside, leading, batched, types, params):
        """If elements may finish at different steps, keep the carries of those that have finished."""
        cond, body, k, n = params["cond"], params["body"], params["cond_consts"], params["body_consts"]
        leading, extra = [outside.in_front(x) for x in leading], list[Operand]()
        own_types = [(t, t) for t in map(typeof, leading)]

        def change(body, mask):
            test, (test_batched,) = trace_batched(cond, [*own_types, *types[n:]], outside, [*batched[:k], *mask[n:]])
            step, out_batched = trace_batched(body, types, outside, mask)
            return (test, step, test_batched), [True] * len(out_batched) if test_batched else out_batched

        def masked_step(*values):
            leading, shared, carry = split_list(values, k, n)
            (active,) = cond(*leading, *carry)
            return run_active(active, body, [*shared, *carry], operands_of_branch)

        ((test, step, test_batched),), mask, out_batched = self.change_branches(params, batched[k:], change)
        if test_batched:
            extra = [Operand(x, CONST) for x in leading]
            step, _ = trace_batched(masked_step, [*own_types, *types], outside, [*batched[:k], *mask])
        test, constants = test.close(lambda r: [greater(sum_of(r[0][0]), 0)] if test_batched else r[0])
        leading = [*constants, *leading]
        return Vectorized(
            leading, extra, [step], mask, out_batched, {**params, "cond": test, "cond_consts": len(leading)}
        )

    def without_unused_results(self, eqn, used):
        return eqn  # its condition may need them


def run_active(active: Value, body: Tape, operands: Sequence[Value], fill: Callable) -> list[Value]:
    """Run a step of the elements, or ranks, that are `active`; the others keep their carries.

    These get the operands of an active one, by `fill`, since a step that they never take might raise.
    """
    new = body(*fill(active, operands, body))
    return [where(active, x, old) for x, old in zip(new, operands[-len(new) :])]


#: The identity on results of a `while_loop` that ran step by step; it has no transpose either.
forward_only_p = label_operation("while_loop", _refuse_reverse)
while_p = While("while_loop")


@explain_keywords
def while_loop(
    cond_fun: Callable,
    body_fun: Callable,
    init_val: Any,
    max_steps: int | None = None,
    schedule: CheckpointSchedule | None = None,
) -> Any:
    """Start at `init_val` and repeat `val = body_fun(val)` while `cond_fun(val)`.

    Under `vmap`, the loop runs until all elements are done, and elements that are done keep their values. Forward mode
    differentiates it. With `max_steps` reverse mode does, too: a recorded loop then has memory for the carries of that
    many steps, and the backward pass runs each step again from its carries. A loop that runs step by step records the
    steps that it takes.

    In a `shard_map`, if the condition varies along mesh axes, each rank takes its own number of steps. Neither function
    may communicate along these axes; all carries, and values that the functions close over, vary along them.

    Args:
        cond_fun: a function of `val` that returns one boolean.
        body_fun: the step, a function of `val` that returns the next one.
        init_val: a tree whose structure and types must not change.
        max_steps: the largest number of steps.
        schedule: `revolve`, `multistage` or `online`, with `max_steps`: reverse mode then stores few carries, as many
            steps as the loop may take, and computes the others again. The step is recorded once, also outside of `jit`.

    Returns:
        The last `val`.

    Raises:
        TypeError: if the structure or the types of `val` change, and in reverse mode without `max_steps`.
        ValueError: for a schedule without `max_steps`.
        VarianceError: if a function communicates along an axis along which the condition varies.
        RuntimeError: if the condition still holds after `max_steps` steps.

    >>> int(while_loop(lambda n: n < 100, lambda n: 2 * n, 3))
    192
    >>> from minidiff import grad, jit
    >>> print(jit(grad(lambda x: while_loop(lambda y: y < 100, lambda y: x * y, x, max_steps=10)))(3.0))  # of x**5
    405.0
    """
    check_functions("while_loop", {"cond_fun": cond_fun, "body_fun": body_fun})
    check_schedule("while_loop", schedule)
    if schedule is not None and max_steps is None:
        raise ValueError("while_loop: a schedule needs max_steps=, the largest number of steps")
    return run_while(cond_fun, body_fun, Carry("while_loop", body_fun, "init_val", init_val), max_steps, schedule)


@repeats
def run_while(
    cond_fun: Callable,
    body_fun: Callable,
    carry: Carry,
    max_steps: int | None,
    schedule: CheckpointSchedule | None = None,
) -> Any:
    def step(leaves):
        return carry.leaves(body_fun(carry.tree(leaves))), None

    def test(leaves):
        condition = lift_value(cond_fun(carry.tree(leaves)))
        if typeof(condition).shape or typeof(condition).dtype != bool:
            raise TypeError(f"{carry.caller}: cond_fun must return one boolean, got {typeof(condition)}")
        return condition

    values: Sequence[Value] = [as_value(x) for x in carry.init]
    numbers, began, scope = itertools.count(), time.perf_counter(), current_scope()
    transposed = scope and scope.transposed
    while schedule is None and not is_staging(eager=False):
        number = next(numbers)
        if number == loops.MANY_STEPS:
            suggest_jit(carry.caller, began, values)
        condition = test(values)
        is_known = not is_staging() or known_number(condition, CONDITION) is not None
        # Elements or ranks take their own steps; or it is recorded for its lifetimes, and may take any number of steps.
        if isinstance(condition, BatchTracer) or _differs(condition) or not (is_known or max_steps):
            types = carry.seen or list(map(typeof, values))
            carry.init = list(restore_weak(carry.weak, list(map(as_type, values, types))))
            break  # from here on it is recorded
        if not (concrete_value(condition, CONDITION) if is_known else number < (max_steps or 0)):
            values, _ = carry.results(lambda: _record_loop(carry, step, test), values)
            if max_steps is None:
                values = [forward_only_p.bind(x) if isinstance(x, Tracer) else x for x in values]
            return carry.tree(values)
        if number == max_steps:
            raise RuntimeError(too_many_steps_message(carry.caller, max_steps))
        values = carry.advance(step, values)[1]
        if scope is not None and scope.transposed != transposed:
            transposed, _ = scope.transposed, _record_loop(carry, step, test)
            if carry.axes:
                break  # derivatives depend on types: with these, it begins again

    return carry.tree(_bind_loop(carry, _record_loop(carry, step, test), max_steps, schedule))


#: The traced step, the types of carries, the condition, and the values that it closes over.
Recorded = tuple[TracedBody, list[ShapedArray], Tape, list[Value]]


def _bind_loop(
    carry: Carry, recorded: Recorded, max_steps: int | None, schedule: CheckpointSchedule | None
) -> list[Value]:
    """Apply a recorded loop to the carries."""
    traced_body, types, condition, constants = recorded
    use_operands(carry.caller, carry.init, used_inputs(traced_body.stage.inputs))
    body = traced_body.close(lambda r: map(cast_and_reshard, r[0], types))
    bodies = {"cond_fun": condition, "body_fun": body[0]}
    while_p.check_communication(condition.out_types[0], bodies, f"the condition of {carry.caller}")
    init = [Operand(cast_and_reshard(x, t), CARRY, i) for i, (x, t) in enumerate(zip(carry.init, types))]
    if max_steps is not None:
        values, (body, shared) = [x.value for x in init], hoist_casts(*with_constants(*body))
        condition, constants = with_constants(condition, constants)
        first, carries = split_list(condition.inputs, len(constants))
        condition = Tape([*first, *body.inputs[: len(shared)], *carries], condition.equations, condition.outputs)
        body = Tape([*first, *body.inputs], body.equations, body.outputs)
        shared = [*map(stop_gradient, constants), *shared]
        loop = BoundedLoop(while_loop, carry.caller, condition, body, shared, max_steps)
        return loop.run(values, shared)[0] if schedule is None else schedule.bind_while(loop, values)
    params = {"cond": condition, "cond_consts": len(constants), "body_consts": 0}
    return while_p.rebind(constants, [body], init, [CARRY] * len(types), params)


def _differs(x: Value) -> bool:
    """Whether a value may differ between ranks."""
    try:
        concrete_value(x, CONDITION)
    except VarianceError:
        return True
    except TracerError:
        pass
    return False


def _record_loop(carry: Carry, step: Callable, test: Callable) -> Recorded:
    """Record a step, and the condition `test`.

    If the condition varies along mesh axes, so do the carries, and then it may vary along more.
    """
    traced_body, types = None, list(map(typeof, carry.init))
    while True:
        if traced_body is not None or current_scope() is not None:
            test_body = TracedBody(lambda *leaves: [test(leaves)], types, stage=carry.new_stage("cond_fun"))
            tape, constants = test_body.close(lambda r: r)
            axes = tape.out_types[0].variance - carry.axes
            if traced_body is not None and not axes:
                return traced_body, types, tape, constants
            if axes:
                carry.diverge(while_p, tape.out_types[0])
        traced_body, types = carry.record_step(step)


@explain_keywords
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable,
    init_val: Any,
    *,
    unroll: int | bool | None = None,
    max_steps: int | None = None,
) -> Any:
    """Repeat `val = body_fun(i, val)` for i from `lower` to `upper - 1`.

    With known bounds the loop is a `scan`; otherwise it is a `while_loop`, which has reverse mode if it has a largest
    number of steps. In a `shard_map` bounds may vary: then each rank takes its own number of steps.

    Args:
        lower: the first index, an integer.
        upper: the index after the last one, an integer.
        body_fun: the step, a function of the index and `val` that returns the next `val`.
        init_val: the initial `val`, a tree whose structure and types must not change.
        unroll: the number of steps in the body of a recorded `scan`, as there.
        max_steps: the largest number of steps, as for `while_loop`.

    Returns:
        The last `val`.

    Raises:
        TypeError: for bounds that are not integers, and if the structure or the types of `val` change.
        VarianceError: if `body_fun` communicates along an axis along which a bound varies.
        ValueError: for `unroll` with bounds that are not known.

    >>> float(fori_loop(0, 5, lambda i, x: x + i, 0.0))
    10.0
    """
    check_functions("fori_loop", {"body_fun": body_fun})
    bounds = [x if is_weak(x) else lift_value(x) for x in (lower, upper)]
    for t in map(typeof, bounds):
        if t.shape or t.dtype.kind not in "iu":
            raise TypeError(f"fori_loop: lower and upper must be integers, got {typeof(lower)} and {typeof(upper)}")
    known: list[Any] = [None if _differs(x) else known_number(x, "a bound of fori_loop") for x in bounds]
    if None not in known:
        steps = numpy.arange(*map(int, known))
        carry = Carry("fori_loop", body_fun, "init_val", init_val)
        at_once = steps_per_body("fori_loop", unroll, len(steps))
        return scan_steps(lambda val, i: (body_fun(i, val), None), carry, steps, len(steps), False, at_once)[0]
    if unroll not in (None, False, 1):
        raise ValueError(
            f"fori_loop: unroll={unroll!r} needs bounds that are Python numbers; leave it out for traced ones"
        )
    first, last = (convert_python_number(x, typeof(other)) for x, other in zip(bounds, bounds[::-1]))
    carry = Carry("fori_loop", body_fun, "(i, init_val)", (first, init_val))
    carry.paths[1:] = [path for path, _ in tree.flatten_with_paths(init_val, "init_val")[0]]
    return run_while(
        lambda state: less(state[0], last), lambda state: (add(state[0], 1), body_fun(*state)), carry, max_steps
    )[1]
