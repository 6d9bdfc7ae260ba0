"""`cond` and `switch`: run one of several branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.control_flow.carries import (
    all_vary_everywhere,
    as_type,
    cast_and_reshard,
    check_functions,
    fits_weakly,
    ignore_tracing_errors,
    is_weak,
    known_number,
)
from minidiff.control_flow.divergent import (
    DivergentBody,
    DivergentOperation,
    divergent_type,
    vary_as,
)
from minidiff.control_flow.partial_eval import (
    CONST,
    Operand,
    TracedBody,
    broadcast_in_front,
    concrete_value,
    interpreters,
    lift_value,
    merge,
    zeros,
)
from minidiff.core.forward import JVPTracer
from minidiff.core.interpreter import Interpreter, current_interpreter, current_scope, running
from minidiff.core.tape import Stage, Tape, tapes_of
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.core.vmap import Batch, BatchTracer
from minidiff.errors import TracerError, VarianceError, name_of
from minidiff.inputs.arguments import are_weak, as_values, joint_states, restore_weak
from minidiff.inputs.key_reuse import use_operands, used_inputs
from minidiff.inputs.keywords import explain_keywords
from minidiff.ops import dimensions
from minidiff.ops.base import General, no_tangent
from minidiff.ops.elementwise import equal, logical_not, maximum, minimum, not_equal, stop_gradient, where
from minidiff.ops.indexing import take
from minidiff.ops.reduction import any as any_of
from minidiff.ops.reduction import argmax
from minidiff.values.settings import checking

# ---------------------------------------------------------------- the operation


class Cond(DivergentOperation):
    """`cond` and `switch`: a selector picks one of the branches' tapes.

    Parameters are the branches' tapes; operands are the selector and the branches' operands.
    `choose(selector)` is the number of the branch; `matches(selector, i)` is the traceable test whether it is i.

    Along the mesh axes along which the selector varies, ranks take different branches: see `DivergentOperation`.
    """

    effect = "take different branches"
    way_out = (
        "Move the {0} out of the branch; make the ranks agree first (psum, pmax or pmin of {selector} over {axes}); or "
        "compute all branches, and choose with np.where"
    )

    def __init__(self, name: str, selector: str, choose: Callable[[Any], int], matches: Callable[[Value, int], Value]):
        super().__init__(name)
        self.selector = f"the {selector} of {name}"
        self.choose = choose
        self.matches = matches

    def select(self, selector: Value, results: Sequence[Sequence[Value]]) -> list[Value]:
        """Select among the branches' results element by element."""
        *earlier, outs = results
        for i, candidates in reversed(list(enumerate(earlier))):
            is_taken = self.matches(selector, i)
            outs = [x if x is y else where(is_taken, x, y) for x, y in zip(candidates, outs)]
        return list(outs)

    def evaluate(self, args, params):
        selector = concrete_value(args[0], self.selector)
        return tapes_of(params)[self.choose(selector)](*args[1:])

    def check_fits(self, types, params, scope):
        if types[0].shape:
            raise ValueError(f"{self.selector} must be one number, got {types[0]}")
        if len(tapes_of(params)) < (2 if self is cond_p else 1):
            raise ValueError("a branch is missing")

    def typecheck(self, types, params):
        branches = tapes_of(params)
        for tape in branches:
            self._check_operands(types[1:], tape.in_types)
            if tape.out_types != branches[0].out_types:
                raise TypeError(f"{self.name}: branches return {branches[0].out_types} and {tape.out_types}")
        if typeof(types[0]).dtype.kind == "c":
            raise TypeError(f"{self.name}: the condition is a real number, got {types[0]}")
        self.check_divergence(typeof(types[0]), params)
        return branches[0].out_types

    def count_leading(self, params):
        return 1

    def chosen_along(self, leading, params):
        return typeof(leading[0]).variance

    def branches(self, params):
        return tapes_of(params)

    def groups(self, params):
        branch = tapes_of(params)[0]
        return [CONST] * len(branch.inputs), [CONST] * len(branch.outputs)

    def with_bodies(self, params, tapes, operands):
        return dict(zip(params, tapes))

    def operands_by_body(self, count, params):
        return {name: list(range(1, count)) for name in params}

    def choose_from(self, selector: Value, branches: dict[str, tuple], operands: Sequence[Value]) -> list[Value]:
        """Run one of the branches, which are closed tapes by name."""
        closed = list(branches.values())
        results = [CONST] * len(closed[0][0].outputs)
        return self.rebind([selector], closed, [Operand(x, CONST) for x in operands], results, branches)

    def batch_body(self, outside, args, params):
        if not outside.owns(args[0]):
            return super().batch_body(outside, args, params)
        if (outs := self.map_elements(outside, args, params)) is not None:
            return outs
        self.check_communication(typeof(args[0]), params)
        with running(outside):
            return self.run_by_element(args[0], args[1:], tapes_of(params))

    def run_by_element(self, selector: BatchTracer, operands: Sequence[Value], branches: Sequence[Tape]) -> list[Value]:
        """Run the branches that the elements of a batch take, and select among the results element by element.

        An element that does not take a branch gets the operands of one that does. With its own, which the branch
        never gets outside of a batch, the branch might raise, or give an infinity, which times a zero cotangent is NaN.
        """
        if not selector.interpreter.size_of_batch:
            return branches[0](*operands)
        results = {}
        for i, branch in enumerate(branches):
            taken = self.matches(selector, i)
            by_any = any_of(taken.value)
            known = _known_predicate(by_any)
            if known is None:
                results[i] = run_if(by_any, branch, operands_of_branch(taken, operands, branch))
            elif known:
                results[i] = branch(*operands_of_branch(taken, operands, branch))
        some = next(iter(results.values()))  # for the branches that no element takes
        outs = self.select(selector, [results.get(i, some) for i in range(len(branches))])
        for i, same in enumerate(_uniform_results(branches, operands)):
            if same is not None:
                outs[i] = same
            elif not is_batched_along(outs[i], selector.interpreter):  # one branch ran, but the elements chose which
                outs[i] = where(taken, outs[i], outs[i])
        return outs


cond_p = Cond("cond", "predicate", lambda pred: 0 if pred else 1, lambda pred, i: logical_not(pred) if i else pred)
switch_p = Cond("switch", "index", int, equal)

# ---------------------------------------------------------------- branches that only some elements of a batch take


class MaskedBranch(Stage):
    """Trace a branch that only some elements of a batch take.

    Values that all elements share are computed at once, so Python sees them.
    """

    def __init__(self, below: Interpreter, origin: tuple[str, str], batch: Batch):
        super().__init__(below, name=" of ".join(origin))
        self.origin = origin
        self.batch = batch

    def interpret(self, primitive, args, params):
        by_element = any(self.owns(x) or is_batched_along(x, self.batch) for x in args)
        if by_element or primitive.is_higher_order or primitive.has_effect:
            return super().interpret(primitive, args, params)
        return self.below.process(primitive, args, params)


class Fill(General):
    """Fill an operand of all elements of a batch with that of the first one that takes a branch: `fill(taken, x)`.

    The results of the branch for these operands are not used, so the derivative is zero.
    """

    def batch(self, args, batched, params):
        (taken, x), (by_element, differs) = args, batched
        if not by_element:
            return self.bind(taken, x)
        if differs:
            x = stop_gradient(take(x, argmax(taken), 0))
        return broadcast_in_front(x, len(taken))


fill_p = Fill(
    "fill",
    lambda taken, x: x,
    lambda taken, x: (x.shape, x.dtype),
    no_tangent,
    lambda ct, operands: [None],
    sharding=dimensions.gather,
    shares_memory=True,
)


def is_batched_along(x: Value, batch: Batch) -> bool:
    """Whether `x` may differ between the elements of a batch."""
    while isinstance(x, Tracer):
        if x.interpreter is batch:
            return True
        if not isinstance(x, (JVPTracer, BatchTracer)):  # one that is recorded below the batch is a constant of it
            return x.interpreter not in interpreters(batch.below)
        x = x.primal if isinstance(x, JVPTracer) else x.value
    return False


def _batch_of(selector: Value) -> Batch | None:
    """Return the batch whose elements choose the branch, unless the choice is being recorded."""
    batch: Any = getattr(selector, "interpreter", None)
    stack = interpreters(current_interpreter())
    first: Any = next((x for x in stack if x is batch or isinstance(x, Stage)), None)
    return batch if isinstance(batch, Batch) and first is batch else None


def _uniform_results(branches: Sequence[Tape], operands: Sequence[Value]) -> Iterator[Value | None]:
    """Yield each result that is the same operand or number in all branches, and None for any other."""
    values = [dict(zip(branch.inputs, operands)) for branch in branches]
    for outs in zip(*[branch.outputs for branch in branches]):
        first, *others = [known.get(a) if isinstance(a, Var) else a for known, a in zip(values, outs)]
        number = first.tobytes() if isinstance(first, numpy.generic) else None
        same = [x is first or (isinstance(x, numpy.generic) and x.tobytes() == number) for x in others]
        yield first if all(same) else None


def operands_of_branch(taken: BatchTracer, operands: Sequence[Value], branch: Tape) -> list[Value]:
    """Return the operands with which all elements run a branch; those that it does not use stay unchanged."""
    used = {a for eqn in branch.equations for a in eqn.inputs if isinstance(a, Var)}
    by_element = [v in used and is_batched_along(x, taken.interpreter) for v, x in zip(branch.inputs, operands)]
    return [where(taken, x, fill_p.bind(taken, x)) if differs else x for x, differs in zip(operands, by_element)]


def _known_predicate(x: Value) -> Any:
    """Return the boolean `x`, or None if it is abstract, batched, or differs between ranks.

    In an untyped `shard_map` nothing says whether ranks may take different branches: then it is true.
    """
    scope = current_scope()
    try:
        return concrete_value(x, "the predicate of cond")
    except (TracerError, VarianceError):
        return None if scope is None or scope.typed else True


def run_if(pred: Value, branch: Tape, operands: Sequence[Value]) -> list[Value]:
    """Run a branch if `pred`; otherwise the results are zeros."""
    nothing, constants = TracedBody(lambda *_: list(map(zeros, branch.out_types)), branch.in_types).close(list)
    (true_fun, false_fun), _ = merge([(branch, []), (nothing, [Operand(x, CONST) for x in constants])])
    return cond_p.bind(pred, *constants, *operands, true_fun=true_fun, false_fun=false_fun)


# ---------------------------------------------------------------- what the branches return


def _common_types(caller: str, names: Sequence[str], results: Sequence[tuple]) -> list[ShapedArray]:
    """Return the types to which the branches' results are cast: Python numbers and variance may differ."""
    structure = results[0][1]
    for name, (_, other) in zip(names, results):
        if other != structure:
            raise TypeError(
                f"{caller}: all branches must return trees of one structure, but {names[0]} returns {structure} and "
                f"{name} returns {other}"
            )
    types = []
    for entries in zip(*[leaves for leaves, _ in results]):
        entry_types, path = [typeof(x) for _, x in entries], entries[0][0]
        at = f" at [...]{path}" if path else ""
        strong = [t.dtype for t, (_, x) in zip(entry_types, entries) if not is_weak(x)]
        dtype = strong[0] if strong else numpy.result_type(*[t.dtype for t in entry_types])
        for name, t, (_, x) in zip(names, entry_types, entries):
            fits = fits_weakly(x, dtype) if is_weak(x) else t.dtype == dtype
            if t.shape != entry_types[0].shape or not fits:
                raise TypeError(
                    f"{caller}: all branches must return the same types, but{at} {names[0]} returns "
                    f"{entry_types[0]} and {name} returns {t}; convert one of them (with .astype, say, or "
                    "np.broadcast_to)"
                )
        shown = ", ".join(f"{t} of {name}" for name, t in zip(names, entry_types))
        labels = [f"that of {name}" for name in names]
        states = joint_states(f"{caller}: the results{at} {shown}", labels, [x for _, x in entries])
        sharding = next((t.sharding for t in entry_types if t.sharding is not None), None)
        types.append(ShapedArray(entry_types[0].shape, dtype, states, sharding))
    return types


# ---------------------------------------------------------------- choosing


def choose(
    primitive: Cond,
    selector: Value,
    names: Sequence[str],
    branches: Sequence[Callable],
    operands: tuple,
    join: Callable[[list], list] = list,
) -> Any:
    """Run a branch, or record all. `join` changes the results of traced branches: leaves with paths, and structures."""
    leaves, structure = tree.flatten(operands)
    as_values(primitive.name, leaves, lambda: tree.paths(structure, "operands"))  # raises if one is not an array
    scope = current_scope()
    by_rank = scope is not None and bool(typeof(selector).variance)
    batch = None if by_rank else _batch_of(selector)
    known = None if batch or by_rank else known_number(selector, primitive.selector)
    number = None if known is None else primitive.choose(known)
    if number is not None and (scope is None or not scope.typed or not isinstance(selector, Tracer)):
        return branches[number](*operands)
    leaves, weak = list(map(lift_value, leaves)), are_weak(leaves)
    if by_rank:
        labeled = zip(leaves, tree.paths(structure, "operands"))
        leaves = [vary_as(primitive, selector, x, label) for x, label in labeled]

    def flat(f: Callable, values: Sequence[Value]) -> tuple:
        """Apply a branch to leaves: the result's leaves with their paths, its structure."""
        return tree.flatten_with_paths(f(*tree.unflatten(structure, restore_weak(weak, values))))

    def traced(name: str, f: Callable) -> TracedBody:
        origin, below = (primitive.name, name_of(f)), current_interpreter()
        if batch:  # it closes over the operands: those that all elements share keep their values
            return TracedBody(lambda: flat(f, leaves), (), stage=MaskedBranch(below, origin, batch))
        stage = DivergentBody(below, primitive, name, selector) if by_rank else None
        return TracedBody(lambda *values: flat(f, values), map(typeof, leaves), origin, stage)

    if number is not None:
        return _cast_choice(primitive, number, names, flat(branches[number], leaves), branches, traced)
    bodies = list(map(traced, names, branches))
    use_operands(primitive.name, leaves, map(any, zip(*[used_inputs(body.stage.inputs) for body in bodies])))
    results = join([body.result for body in bodies])
    types = _common_types(primitive.name, names, results)
    if by_rank:
        types = [divergent_type(t, typeof(selector)) for t in types]
    outs = _bind_branches(primitive, selector, names, bodies, (results, types), None if batch else leaves)
    return _unflatten_results(results, outs)


def _bind_branches(
    primitive: Cond, selector: Value, names: Sequence[str], bodies: list[TracedBody], results: tuple, leaves: Any
) -> list[Value]:
    """Choose between traced branches, given their results with common types, and operands; None for a batch."""
    casts = [lambda _, r=r: [cast_and_reshard(x, t) for (_, x), t in zip(r[0], results[1])] for r in results[0]]
    closed = [body.close(cast) for body, cast in zip(bodies, casts)]
    if leaves is None and typeof(selector).sharding is None:
        tapes, shared = merge([(tape, [Operand(x, CONST) for x in values]) for tape, values in closed])
        with checking(current_scope(), False):
            return primitive.run_by_element(selector, [x.value for x in shared], tapes)
    parameters = [name.replace("[", "_").rstrip("]") for name in names]  # identifiers, for the generated source
    return primitive.choose_from(selector, dict(zip(parameters, closed)), leaves or [])


def _cast_choice(
    primitive: Cond, number: int, names: Sequence[str], result: tuple, branches: Sequence[Callable], traced: Callable
) -> Any:
    """Give the `result` of the branch that ran the variance that it has in a recorded `cond`.

    So a program that typechecks for these values typechecks for any others.
    """
    outs, structure = result
    if all_vary_everywhere(x for _, x in outs):
        return tree.unflatten(structure, [x for _, x in outs])
    results = [result] * len(branches)
    for k, f in enumerate(branches):
        if k != number:
            with ignore_tracing_errors():
                results[k] = traced(names[k], f).result
    types = _common_types(primitive.name, names, results)
    return _unflatten_results(results, [as_type(x, t) for (_, x), t in zip(outs, types)])


def _unflatten_results(results: Sequence[tuple], values: Sequence[Value]) -> Any:
    """Unflatten the chosen values; Python numbers if they are in every branch."""
    weak = [all(are_weak(x for _, x in entries)) for entries in zip(*[leaves for leaves, _ in results])]
    return tree.unflatten(results[0][1], restore_weak(weak, values))


# ---------------------------------------------------------------- public functions

_BETWEEN_VALUES = "; to choose between values use np.where"


@explain_keywords
def cond(pred: Any, true_fun: Callable, false_fun: Callable, *operands: Any) -> Any:
    """Return `true_fun(*operands)` if `pred` is true, else `false_fun(*operands)`.

    If `pred` is concrete, one branch runs. If it is abstract (under `make_tape`), both are recorded, and must return
    trees of the same structure and types; a result varies along the axes along which it varies in either branch. The
    same holds in a typed `shard_map` for a concrete `pred`: there the other branch is recorded for its types alone, and
    ignored if it raises. If `pred` is batched (under `vmap`), each branch runs if an element takes it, and results are
    selected element by element; elements that do not take a branch run it on the operands of one that does.

    In a typed `shard_map`, if `pred` varies along mesh axes, each rank runs its own branch. Both are recorded; neither
    may communicate along these axes; operands, values that the branches close over, and results all vary along them.

    Args:
        pred: one boolean, or a number, which is true if it is not 0.
        true_fun: a function of the operands.
        false_fun: another function of the operands.
        operands: trees of arrays.

    Returns:
        The result of the branch, a tree.

    Raises:
        TypeError: if the branches' types differ.
        VarianceError: if a branch communicates along an axis along which `pred` varies, or if `pred` differs between
            ranks without types.

    >>> import numpy as np
    >>> cond(True, lambda x: x + 1.0, lambda x: x - 1.0, 2.0)
    3.0
    """
    check_functions("cond", {"true_fun": true_fun, "false_fun": false_fun}, _BETWEEN_VALUES)
    pred = lift_value(pred)
    t = typeof(pred)
    if t.shape or t.dtype.kind not in "biufc":
        raise TypeError(f"cond: pred must be one boolean or number, got {t}; to choose for each element, use np.where")
    if t.dtype != bool:
        pred = not_equal(pred, 0) if isinstance(pred, Tracer) else bool(pred)
    return choose(cond_p, pred, ("true_fun", "false_fun"), (true_fun, false_fun), operands)


@explain_keywords
def switch(index: Any, branches: Sequence[Callable], *operands: Any) -> Any:
    """Return `branches[index](*operands)`: `cond` with any number of branches.

    In a `shard_map` an `index` computed from `axis_index` gives each rank work of its own: the first stage of a
    pipeline embeds, the last one computes the loss.

    Args:
        index: one integer; out of range, it is clamped.
        branches: a sequence of functions of the operands.
        operands: trees of arrays.

    Returns:
        The result of the branch, a tree.

    Raises:
        TypeError: for an index that is not one integer, and as in `cond`.
        ValueError: without branches.

    >>> [switch(i, [lambda x: x, lambda x: -x], 2.0) for i in (-1, 0, 1, 5)]
    [2.0, 2.0, -2.0, -2.0]
    """
    index, branches = lift_value(index), list(branches)
    t = typeof(index)
    if t.shape or t.dtype.kind not in "iu":
        raise TypeError(f"switch: index must be one integer, got {t}")
    if not branches:
        raise ValueError("switch: branches must contain at least one function")
    names = [f"branches[{i}]" for i in range(len(branches))]
    check_functions("switch", dict(zip(names, branches)), _BETWEEN_VALUES)
    last = len(branches) - 1
    index = minimum(maximum(index, 0), last) if isinstance(index, Tracer) else min(max(int(index), 0), last)
    return choose(switch_p, index, names, branches, operands)
