"""`scan`: a loop over the first axis of arrays."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.api.recording import jit_is_disabled
from minidiff.control_flow.bodies import (
    BodyOperation,
    type_of_batch,
    type_of_element,
)
from minidiff.control_flow.carries import (
    Carry,
    cast_and_reshard,
    check_functions,
    convert_python_number,
    copy_overwritten,
    is_staging,
    is_weak,
)
from minidiff.control_flow.partial_eval import (
    CARRY,
    CONST,
    SCANNED,
    Operand,
    concrete_value,
    lift_value,
    zeros,
)
from minidiff.control_flow.schedules import CheckpointSchedule, check_schedule
from minidiff.core.interpreter import lift
from minidiff.core.ranks import ranks
from minidiff.core.tape import Equation, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors.location import warn_here
from minidiff.inputs.arguments import promotion_argument, restore_weak, result_values
from minidiff.inputs.key_reuse import repeats, use_operands, used_inputs
from minidiff.inputs.keywords import explain_keywords
from minidiff.ops.shape import concatenate, stack_p, unstack_p
from minidiff.values.dtypes import result_type
from minidiff.values.lists import scatter, select, split_list

#: A loop that runs operation by operation on few numbers suggests `jit` after so many steps, if they took so many
#: seconds: some 10 operations in each step. In machine code, steps of 10 to 200 operations take 0.1 to 1 µs.
MANY_STEPS, FEW_NUMBERS, SLOW_SECONDS, COMPILED_SECONDS = 1000, 64, 0.1, 1e-6


def suggest_jit(caller: str, began: float, carry: Sequence[Value]) -> None:
    seconds = time.perf_counter() - began
    if seconds > SLOW_SECONDS and sum(typeof(x).size for x in carry) <= FEW_NUMBERS and not jit_is_disabled.get():
        factor = 10 ** int(math.log10(seconds / MANY_STEPS / COMPILED_SECONDS))
        warn_here(
            f"{MANY_STEPS:,} steps of this {caller} took {seconds:.1f} s, since each operation of each step is a call "
            "in Python. Compile the function around it, or its gradient: md.jit(f), md.jit(md.grad(f)). With llvmlite, "
            f"steps on so few numbers then typically take 1 µs, less than here by a factor of more than {factor:,}"
        )


# ---------------------------------------------------------------- unstacking and stacking elements


def _gather_first_axis(x: Value) -> Value:
    """Gather a sharded array along its first axis; the other axes stay sharded."""
    t = typeof(x)
    return x if t.sharding is None else t.sharding.whole_along_first(t.ndim).reshard(x)


def _unstack(x: Value) -> list[Value]:
    return unstack_p.bind(x, axis=0) if isinstance(x, Tracer) else list(numpy.asarray(x))


def _stack_elements(elements: Sequence[Value]) -> Value:
    """Stack elements, of which Python numbers take the dtype of the others."""
    if any(map(is_weak, elements)):
        dtype = result_type(*map(promotion_argument, elements))
        elements = [convert_python_number(x, typeof(x).update(dtype=dtype)) for x in elements]
    return stack_p.bind(*elements, axis=0) if any(isinstance(x, Tracer) for x in elements) else numpy.stack(elements)


# ---------------------------------------------------------------- scan


class Scan(BodyOperation):
    """A loop over the first axis of arrays.

    The operands are `consts` values shared by all steps, `carry` initial carries, and arrays. The body takes the shared
    values, the carries, and one element of each array. It returns the carries, and one element of each stacked result.
    """

    repeats = True

    def bind(self, *args, **params):
        """Gather the arrays along their first axis, which a vmap of the loop may have split."""
        first = params["consts"] + params["carry"]
        args = (*args[:first], *map(_gather_first_axis, args[first:]))
        outs = ranks.loop_over_blocks(self, args, params)
        return super().bind(*args, **params) if outs is None else outs

    def evaluate(self, args, params):
        body, length = params["body"], params["length"]
        consts, carry, xs = split_list(args, params["consts"], params["carry"])
        if not length:
            return [*carry, *[zeros(t.update(shape=(0, *t.shape))) for t in body.out_types[len(carry) :]]]
        carry = copy_overwritten(body, carry, len(consts))
        if len(body.out_types) == len(carry) and not xs:  # a loop that the steps of a long, small program notice
            for _ in range(length):
                carry = body(*consts, *carry)
            return carry
        step = lambda carry, row: split_list(body(*consts, *carry, *row), len(carry))  # noqa: E731
        carry, ys = _run_steps(step, carry, xs, length, params["reverse"], body.out_types[len(carry) :])
        return [*carry, *ys]

    def check_fits(self, types, params, scope):
        if not (isinstance(params["length"], int) and isinstance(params["reverse"], bool)):
            raise ValueError("length must be an int and reverse a bool")

    def typecheck(self, types, params):
        n, m, body, length = params["consts"], params["carry"], params["body"], params["length"]
        types = [typeof(t) for t in types]
        for t in types[n + m :]:
            if t.shape[:1] != (length,):
                raise TypeError(f"scan: {length} steps over an array of type {t}")
        self._check_operands([*types[: n + m], *map(type_of_element, types[n + m :])], body.in_types)
        carry, ys = split_list(body.out_types, m)
        if carry != body.in_types[n : n + m]:
            raise TypeError(f"scan: its body takes the carries {body.in_types[n : n + m]}, and gives {carry}")
        return [*carry, *[type_of_batch(t, length) for t in ys]]

    def show_params(self, params):
        shown = ", ".join(f"{k}={params[k]}" for k in ("length", "consts", "carry"))
        return shown + (", reverse=True" if params["reverse"] else "")

    def groups(self, params):
        n, m, body = params["consts"], params["carry"], params["body"]
        carried = [CARRY] * m
        operands = [*[CONST] * n, *carried, *[SCANNED] * (len(body.inputs) - n - m)]
        return operands, [*carried, *[SCANNED] * (len(body.outputs) - m)]

    def operands_by_body(self, count, params):
        return None if SCANNED in [*itertools.chain(*self.groups(params))] else {"body": [*range(count)]}

    def with_bodies(self, params, tapes, operands):
        groups = [x.group for x in operands]
        return {**params, "body": tapes[0], "consts": groups.count(CONST), "carry": groups.count(CARRY)}

    def reversed_params(self, params):
        return {**params, "reverse": not params["reverse"]}


@repeats
def _run_steps(
    step: Callable,
    carry: Sequence[Value],
    xs: Sequence[Value],
    length: int,
    reverse: bool,
    types: Sequence[ShapedArray] = (),
) -> tuple[Sequence[Value], list[Value]]:
    """Run a step for each element of arrays; return the last carries, and the stacked results.

    Elements that are plain arrays of known `types` are written where they belong at once, so that each is there once.
    """
    columns, stacks = [_unstack(x) for x in xs], list[Any]()
    for i in range(length)[:: -1 if reverse else 1]:
        carry, row = step(carry, [column[i] for column in columns])
        stacks = stacks or [_empty_stack(y, t, length) for y, t in itertools.zip_longest(row, types)]
        for k in reversed(range(len(stacks))):
            if isinstance(row[k], Tracer) and isinstance(stacks[k], numpy.ndarray):
                stacks[k] = [*stacks[k]]  # earlier steps gave constants
            stacks[k][i] = row.pop()  # of which nothing is left while the next step runs
    return carry, [x if isinstance(x, numpy.ndarray) else _stack_elements(x) for x in stacks]


def _empty_stack(y: Value, t: ShapedArray | None, length: int) -> Any:
    """Return a buffer for stacked outputs like y: an array for plain arrays of type t, else a list."""
    return [None] * length if t is None or isinstance(y, Tracer) else numpy.empty((length, *t.shape), t.dtype)


scan_p = Scan("scan")


def run_count(eqn: Equation) -> int:
    """Return the number of times an equation's body runs: once per step for a scan, else once."""
    return eqn.params["length"] if isinstance(eqn.primitive, Scan) else 1


@explain_keywords
def scan(
    f: Callable,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    schedule: CheckpointSchedule | None = None,
) -> tuple[Any, Any]:
    """Loop over the first axis of `xs`: `carry, y = f(carry, x)`.

    A recorded loop (under `make_tape`, `jit`) is one operation. In a typed `shard_map` the first step runs again if it
    took derivatives, and made a carry vary that was invariant.

    Args:
        f: the step, a function of the carry and an element that returns a pair of the next carry and a result.
        init: the initial carry, a tree whose structure and types must not change. A Python number takes the dtype that
            it has in a Python loop.
        xs: a tree of arrays of one length; with None, `length` is the number of steps.
        length: the number of steps, needed without `xs`.
        reverse: go from the last element to the first.
        unroll: the number of steps in the body of a recorded loop; True records all steps, and no loop.
        schedule: `revolve`, `multistage` or `online`: reverse mode then stores few carries, and computes the others
            again. The step is recorded once, also outside of `jit`, and alone, whatever `unroll` is.

    Returns:
        A pair `(carry, ys)`: the last carry, and the tree of the steps' results, stacked.

    Raises:
        TypeError: for a carry that does not keep its type.
        ValueError: if lengths are missing or differ, or if `unroll` is not positive.

    >>> import numpy as np
    >>> total, sums = scan(lambda s, x: (s + x, s + x), 0.0, np.array([1.0, 2.0, 3.0]))
    >>> float(total), sums
    (6.0, array([1., 3., 6.]))
    """
    check_functions("scan", {"f": f})
    elements, length = elements_of("scan", xs, length)
    at_once, carry = steps_per_body("scan", unroll, length), Carry("scan", f, "init", init)
    check_schedule("scan", schedule)
    if schedule is None or length < 2:
        return scan_steps(f, carry, elements, length, reverse, at_once)
    return scan_steps(f, carry, elements, length, reverse, bind=schedule.bind)


def steps_per_body(caller: str, unroll: int | bool | None, length: int) -> int:
    """Return the number of steps in the body of a recorded loop."""
    if isinstance(unroll, bool) or unroll is None:
        return max(length, 2) if unroll else 1  # 1: a loop, even if it has few steps
    count = operator.index(unroll)
    if count < 1:
        raise ValueError(f"{caller}: unroll must be True or the number of steps in the loop's body, got {unroll!r}")
    return count


def elements_of(caller: str, xs: Any, length: int | None = None) -> tuple[Any, int]:
    """Return the tree `xs` with arrays for leaves, and their length along the first axis.

    Raises ValueError if a leaf has no axis, or lengths are missing or differ.
    """
    leaves, structure = tree.flatten_with_paths(xs, "xs")
    values = [lift_value(x) for _, x in leaves]
    for (path, _), x in zip(leaves, values):
        if not typeof(x).shape:
            raise ValueError(f"{caller}: {path} has type {typeof(x)}, which has no axis to loop over")
    lengths = {typeof(x).shape[0] for x in values}
    if length is not None:
        length = operator.index(concrete_value(length, f"the length of {caller}"))
        if length < 0:
            raise ValueError(f"{caller}: length must be a number of steps, at least 0, got {length}")
        lengths.add(length)
    if not lengths:
        missing = "xs holds no array" if caller != "scan" else "without xs, length must say how many steps there are"
        raise ValueError(f"{caller}: {missing}")
    if len(lengths) > 1:
        shown = ", ".join(f"{path}: {typeof(x)}" for (path, _), x in zip(leaves, values))
        raise ValueError(f"{caller}: lengths differ: {shown}" + ("" if length is None else f", length={length}"))
    return tree.unflatten(structure, values), lengths.pop()


class _Step:
    """A step on leaves, which stores the structure of its y."""

    def __init__(self, f: Callable, carry: Carry, xs_structure: tree.Structure):
        self.f = f
        self.carry = carry
        self.xs_structure = xs_structure
        self.ys_structure: Any = None  # a tree.Structure, once a step has run

    def __call__(self, leaves: Sequence[Value], *elements: Value) -> tuple[list, list]:
        caller = self.carry.caller
        out = self.f(self.carry.tree(leaves), tree.unflatten(self.xs_structure, elements))
        if not (isinstance(out, tuple) and len(out) == 2):
            got = f"{len(out)} results" if isinstance(out, tuple) else type(out).__name__
            raise TypeError(f"{caller}: a step must return a pair (carry, y), got {got}")
        ys, structure = tree.flatten(out[1])
        if self.ys_structure not in (None, structure):
            raise TypeError(f"{caller}: all y must have one structure, got {self.ys_structure}, then {structure}")
        self.ys_structure = structure
        return self.carry.leaves(out[0]), ys

    def ys(self, leaves: Sequence[Any]) -> list[Value]:
        """Return the leaves of a y as values."""
        return list(map(lift, result_values(self.carry.origin, leaves, self.ys_structure, "a step's y")))


def scan_steps(
    f: Callable, carry: Carry, xs: Any, length: int, reverse: bool, unroll: int = 1, bind: Callable | None = None
) -> tuple[Any, Any]:
    """Scan with the carries `carry`: run the steps, or record a loop over `unroll` of them if they are abstract.

    With `bind`, always record a step, and apply this function to it.
    """
    recorded = bind is not None or (is_staging(eager=False) and not jit_is_disabled.get())
    if recorded and 1 < unroll < length:

        def run_steps(init: Any, xs: Any, count: int) -> tuple[Any, Any]:
            inner = Carry(carry.caller, f, carry.name, init)
            last, ys = scan_steps(f, inner, xs, count, reverse, count + 1)
            return inner.weak_tree(last), ys

        return scan_blocks(run_steps, carry, xs, length, reverse, unroll)
    arrays, xs_structure = tree.flatten(xs)
    arrays = [_gather_first_axis(x) for x in arrays]
    element_types = [type_of_element(typeof(x)) for x in arrays]
    step = _Step(f, carry, xs_structure)

    if length and (1 < unroll >= length or not recorded):
        numbers, began = itertools.count(1), time.perf_counter()

        def run(values, elements):
            _, values, row = carry.advance(step, values, *elements)
            if next(numbers) == MANY_STEPS:
                suggest_jit(carry.caller, began, values)
            return values, restore_weak(list(map(is_weak, row)), step.ys(row))

        values, ys = _run_steps(run, [], arrays, length, reverse)
        values, ys = carry.results(lambda: carry.record_step(step, element_types), values, ys)
    else:
        traced_body, types = carry.record_step(step, element_types)
        use_operands(carry.caller, [*carry.init, *arrays], used_inputs(traced_body.stage.inputs))
        closed = traced_body.close(lambda r: [*map(cast_and_reshard, r[0], types), *step.ys(r[1])])
        init = [cast_and_reshard(x, t) for x, t in zip(carry.init, types)]
        params = {"length": length, "reverse": bool(reverse)}
        values, ys = (bind or _bind_scan)(closed, init, arrays, params)
    return carry.tree(values), tree.unflatten(step.ys_structure, ys)


def _bind_scan(
    closed: tuple[Tape, list[Value]], init: list[Value], xs: list[Value], params: dict
) -> tuple[list[Value], list[Value]]:
    """Bind a scan; return the last carries and the stacked results.

    A carry that a step passes on unchanged is a constant of the loop: its cotangent is summed over ranks once.
    """
    (tape, constants), count = closed, len(init)
    carried = zip(tape.outputs[:count], tape.inputs[len(constants) :])
    groups = [CONST if after is before else CARRY for after, before in carried]
    operands = [Operand(x, group) for x, group in zip(init, groups)] + [Operand(x, SCANNED) for x in xs]
    results = [*groups, *[SCANNED] * len(tape.outputs[count:])]
    changes = [group != CONST for group in results]
    tape = Tape(tape.inputs, tape.equations, select(tape.outputs, changes))
    outs = scan_p.rebind([], [(tape, constants)], operands, select(results, changes), params)
    all_outs = scatter(outs, changes)
    return [x if group == CONST else out for x, out, group in zip(init, all_outs, groups)], all_outs[count:]


def scan_blocks(f: Callable, carry: Carry, xs: Any, length: int, reverse: bool, size: int) -> tuple[Any, Any]:
    """Loop over blocks of `size` elements, then take the remaining ones; `f(carry, block, count)` is the step."""
    steps, remaining = divmod(length, size)
    cut = remaining if reverse else length - remaining
    blocks, tail = (slice(cut, None), slice(cut)) if reverse else (slice(cut), slice(cut, None))
    stacked = tree.map(lambda x: x[blocks].reshape((steps, size, *x.shape[1:])), xs)
    last, ys = scan_steps(lambda carry, block: f(carry, block, size), carry, stacked, steps, reverse)
    ys = tree.map(lambda y: y.reshape((steps * size, *y.shape[2:])), ys)
    if not remaining:
        return last, ys
    last, tail_ys = f(carry.weak_tree(last), tree.map(lambda x: x[tail], xs), remaining)
    return last, tree.map(lambda *parts: concatenate(parts[::-1] if reverse else parts), ys, tail_ys)
