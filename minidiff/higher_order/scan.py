"""`scan`: loop over the first axis of arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.core import ShapedArray, Tracer, Value, enter, typeof
from minidiff.forward import result_values
from minidiff.higher_order.carries import Carry, as_carried, jvp_of_body
from minidiff.higher_order.partial_eval import (
    BodyOperation,
    LinearPart,
    PartialEval,
    TracedBody,
    batched_type,
    chosen,
    concrete_value,
    cut,
    depends,
    entered,
    filled,
    fit,
    fixpoint,
    in_front,
    instantiated,
    names_used,
    placed,
    positions,
    present,
    prune_tape,
    run_batched,
    zeros,
)
from minidiff.higher_order.values import check_functions, staging
from minidiff.keywords import explains_keywords
from minidiff.ops.elementwise import add
from minidiff.ops.shape import moveaxis, stack_p, unstack_p
from minidiff.reverse import backward_pass
from minidiff.tape import Equation, Tape, has_effects
from minidiff.vmap import BatchTracer

# ---------------------------------------------------------------- unstacking and stacking elements


def _of_element(t: ShapedArray) -> ShapedArray:
    """The type of an array's elements along its first axis."""
    element = t.update(shape=t.shape[1:])
    element.sharding = t.sharding and t.sharding.of_part(t.ndim)
    return element


def _of_stack(t: ShapedArray, length: int) -> ShapedArray:
    """The type of `length` arrays of type `t`, stacked."""
    stack = t.update(shape=(length, *t.shape))
    stack.sharding = t.sharding and t.sharding.of_stack()
    return stack


def _sharded_as(t: ShapedArray, other: ShapedArray) -> ShapedArray:
    """The type `t` with the sharding of `other`."""
    t = t.update()
    t.sharding = other.sharding
    return t


def _whole_along_first(x: Value) -> Value:
    """Gather a sharded array along its first axis; the other axes stay sharded."""
    t = typeof(x)
    return x if t.sharding is None else t.sharding.whole_along_first(t.ndim).resharded(x)


def _elements(x: Value) -> list[Value]:
    return unstack_p.bind(x, axis=0) if isinstance(x, Tracer) else list(numpy.asarray(x))


def _stacked(elements: Sequence[Value]) -> Value:
    return stack_p.bind(*elements, axis=0) if any(isinstance(x, Tracer) for x in elements) else numpy.stack(elements)


# ---------------------------------------------------------------- the operation


class Scan(BodyOperation):
    """A loop over the first axis of arrays.

    The operands are `consts` values shared by all steps, `carry` initial carries, and arrays; the body takes constants,
    carries, and one element of each array. It returns the carries, and one element of each stacked result.
    """

    def evaluate(self, args, params):
        body, length = params["body"], params["length"]
        consts, carry, xs = cut(args, params["consts"], params["carry"])
        columns, rows = [_elements(x) for x in xs], []
        for i in _order(length, params["reverse"]):
            carry, row = cut(body(*consts, *carry, *[column[i] for column in columns]), len(carry))
            rows.append(row)
        if not length:
            none = [t.update(shape=(0, *t.shape)) for t in body.out_types[len(carry) :]]
            return [*carry, *map(zeros, none)]
        return [*carry, *map(_stacked, zip(*(rows[::-1] if params["reverse"] else rows)))]

    def check_fits(self, types, params, scope):
        if not (isinstance(params["length"], int) and isinstance(params["reverse"], bool)):
            raise ValueError("length must be an int and reverse a bool")

    def typecheck(self, types, params):
        n, m, body, length = params["consts"], params["carry"], params["body"], params["length"]
        types = [typeof(t) for t in types]
        for t in types[n + m :]:
            if t.shape[:1] != (length,):
                raise TypeError(f"scan: {length} steps over an array of type {t}")
        self._check_operands([*types[: n + m], *map(_of_element, types[n + m :])], body.in_types)
        carry, ys = cut(body.out_types, m)
        if carry != body.in_types[n : n + m]:
            raise TypeError(f"scan: its body takes the carries {body.in_types[n : n + m]}, and gives {carry}")
        return [*carry, *[_of_stack(t, length) for t in ys]]

    def show_params(self, params):
        shown = ", ".join(f"{k}={params[k]}" for k in ("length", "consts", "carry"))
        return shown + (", reverse=True" if params["reverse"] else "")

    def operand_types(self, part):
        return part.params["body"].in_types

    def bind_loop(self, closed: tuple[Tape, list], groups: Sequence[Sequence], params: dict, **changes) -> list[Value]:
        """Bind this loop with another body, which closes over further values.

        `groups` are constants, carries and arrays.
        """
        tape, constants = closed
        if not (tape.outputs or any(map(has_effects, tape.equations))):
            return []
        consts, carry, xs = groups
        n, m = len(constants) + len(consts), len(carry)
        args = fit([*constants, *consts, *carry, *xs], tape.in_types)
        used = names_used(tape)
        keep = [n <= i < n + m or v in used for i, v in enumerate(tape.inputs)]
        new = {"body": Tape(chosen(tape.inputs, keep), tape.equations, tape.outputs)}
        return self.bind(*chosen(args, keep), **{**params, **new, "consts": sum(keep[:n]), "carry": m, **changes})

    def without_unused_results(self, eqn, used):
        """Also drop carries that neither the used results nor other carries need."""
        body, (n, m) = eqn.params["body"], (eqn.params["consts"], eqn.params["carry"])

        def attempt(wanted):
            tape = prune_tape(Tape(body.inputs, body.equations, chosen(body.outputs, wanted)))
            names = names_used(tape)
            keep = [v in names for v in body.inputs]
            return (tape, keep), [*keep[n : n + m], *wanted[m:]]

        (tape, keep), wanted = fixpoint(attempt, used)
        keep[n : n + m] = wanted[:m]
        new = {"body": Tape(chosen(tape.inputs, keep), tape.equations, tape.outputs)}
        new |= {"consts": sum(keep[:n]), "carry": sum(wanted[:m])}
        inputs, outputs = chosen(eqn.inputs, keep), chosen(eqn.outputs, wanted)
        return Equation(self, inputs, {**eqn.params, **new}, outputs, eqn.source)

    def jvp_operands(self, outside, primals, tangents, params):
        body, (n, m) = params["body"], (params["consts"], params["carry"])
        types = cut(body.in_types, n, m)
        consts, init, xs = cut(primals, n, m)
        t_consts, t_init, t_xs = cut(tangents, n, m)
        traced_body, (_, moving, _) = jvp_of_body(outside, body, types, (t_consts, t_init, t_xs))
        moved_types = chosen(types[1], moving)
        y_moving = [t is not None for t in traced_body.result[1][m:]]
        y_types = chosen(body.out_types[m:], y_moving)

        def outputs(result):
            (carry, ys), (t_carry, t_ys) = (cut(values, m) for values in result)
            t_carry = instantiated(chosen(t_carry, moving), moved_types)
            return [*carry, *t_carry, *ys, *fit(chosen(t_ys, y_moving), y_types)]

        t_init = instantiated(chosen(t_init, moving), moved_types)
        groups = [[*consts, *present(t_consts)], [*init, *t_init], [*xs, *present(t_xs)]]
        results = self.bind_loop(traced_body.close(outputs), groups, params)
        carry, t_carry, ys, t_ys = cut(results, m, len(t_init), len(y_moving))
        return [*carry, *ys], [*placed(t_carry, moving), *placed(t_ys, y_moving)]

    def split(self, args, linear, params):
        body, (n, m) = params["body"], (params["consts"], params["carry"])

        def attempt(carry_linear):
            mask = [*linear[:n], *carry_linear, *linear[n + m :]]
            parts = PartialEval(body, mask)
            return (parts, mask), parts.is_linear[:m]

        (parts, mask), carry_linear = fixpoint(attempt, linear[n : n + m])
        is_linear = [*carry_linear, *parts.is_linear[m:]]
        known = [not yes for yes in is_linear]
        tape, residuals = parts.linear_tape(is_linear)

        # A residual that is the same in all steps is not stacked: it is an operand, or computed once.
        invariant = parts.invariant(n)
        shared, once, elements, saved = [], [], [], []
        for var, x in zip(tape.inputs, residuals):
            i = parts.input_number(x)
            if not parts.stage.owns(x):
                shared.append((None, var, x))
            elif i is not None and i < n:
                shared.append((None, var, args[i]))
            elif x.variable in invariant:
                once.append((var, x))
            elif i is not None and i >= n + m:
                elements.append((None, var, args[i]))
            else:
                saved.append((var, x))

        closed = parts.known_tape([*chosen(parts.outs, known), *[x for _, x in saved]])
        groups = cut(args, n, m)
        fixed = cut([not yes for yes in mask], n, m)
        results = self.bind_loop(closed, [chosen(g, yes) for g, yes in zip(groups, fixed)], params)
        outs, stacked = cut(results, sum(known))
        shared += [(None, var, x) for (var, _), x in zip(once, parts.before(n, args, [x.variable for _, x in once]))]
        elements += [(None, var, x) for (var, _), x in zip(saved, stacked)]

        own = [(i, var, args[i]) for i, var in zip(positions(mask), tape.inputs[len(residuals) :])]
        consts = [*shared, *[entry for entry in own if entry[0] < n]]
        carry = [entry for entry in own if n <= entry[0] < n + m]
        xs = [*[entry for entry in own if entry[0] >= n + m], *elements]
        inputs = [*consts, *carry, *xs]
        new = {"body": Tape([var for _, var, _ in inputs], tape.equations, tape.outputs)}
        part = LinearPart(
            [(i, x) for i, _, x in inputs],
            {**params, **new, "consts": len(consts), "carry": len(carry)},
            positions(is_linear),
        )
        return dict(zip(positions(known), outs)), part

    def transpose(self, cts, operands, params):
        body, (n, m) = params["body"], (params["consts"], params["carry"])
        linear = [isinstance(x, ShapedArray) for x in operands]

        def attempt(carry_linear):
            mask = [*linear[:n], *carry_linear, *linear[n + m :]]
            return mask, depends(body, mask)[:m]

        mask, carry_linear = fixpoint(attempt, linear[n : n + m])
        if not all(carry_linear):
            return self._transpose_after_split(cts, operands, linear, params)
        fixed = [not yes for yes in mask]
        types, out_types = cut(body.in_types, n, m), body.out_types
        fixed_types = chosen(types[0], fixed[:n]), chosen(types[2], fixed[n + m :])
        sum_types = chosen(types[0], linear[:n])
        given = [True] * m + [ct is not None for ct in cts[m:]]

        def f(*values):
            consts, totals, moved, xs, ys = cut(values, len(fixed_types[0]), len(sum_types), m, len(fixed_types[1]))
            found = backward_pass(body, mask, placed([*consts, *xs], fixed), placed([*moved, *ys], given))
            more, ct_carry, ct_xs = cut(found, len(sum_types), m)
            totals = [total if ct is None else add(total, ct) for total, ct in zip(totals, more)]
            return totals, instantiated(ct_carry, types[1]), ct_xs

        def trace_body() -> TracedBody:
            others = [*types[1], *fixed_types[1], *chosen(out_types[m:], given[m:])]
            return TracedBody(f, [*fixed_types[0], *sum_types, *others])

        traced_body = trace_body()
        if any(
            typeof(x).sharding != t.sharding for x, t in zip(traced_body.result[0], sum_types)
        ):  # sums are sharded like their terms
            sum_types = [_sharded_as(t, typeof(x)) for t, x in zip(sum_types, traced_body.result[0])]
            traced_body = trace_body()
        wanted = [ct is not None for ct in traced_body.result[2]]
        results = self.bind_loop(
            traced_body.close(lambda r: [*instantiated(r[0], sum_types), *r[1], *chosen(r[2], wanted)], prune=True),
            [
                chosen(operands[:n], fixed[:n]),
                [*map(zeros, sum_types), *instantiated(cts[:m], types[1])],
                [*chosen(operands[n + m :], fixed[n + m :]), *present(cts[m:])],
            ],
            params,
            reverse=not params["reverse"],
        )
        totals, ct_carry, ct_xs = cut(results, len(sum_types), m)
        ct_carry = [ct if yes else None for ct, yes in zip(ct_carry, linear[n : n + m])]
        return [*placed(totals, linear[:n]), *ct_carry, *placed(placed(ct_xs, wanted), linear[n + m :])]

    def _transpose_after_split(self, cts, operands, linear, params):
        """Compute the carries that no linear operand affects, then transpose the rest."""
        _, part = self.split(operands, linear, params)
        out: list[Value | None] = [None] * len(operands)
        if part.results:
            found = self.transpose([cts[i] for i in part.results], [x for _, x in part.operands], part.params)
            for (i, _), ct in zip(part.operands, found):
                if i is not None:
                    out[i] = ct
        return out

    def batch_operands(self, outside, args, batched, params):
        body, (n, m), size = params["body"], (params["consts"], params["carry"]), outside.size_of_batch

        def attempt(carry_batched):
            mask = [*batched[:n], *carry_batched, *batched[n + m :]]
            types = [batched_type(t, size, b) for t, b in zip(body.in_types, mask)]
            traced_body = TracedBody(lambda *xs: run_batched(outside, body, xs, mask), types)
            return traced_body, traced_body.result[1][:m]

        traced_body, carry_batched = fixpoint(attempt, batched[n : n + m])
        out_batched = [*carry_batched, *traced_body.result[1][m:]]
        consts, init, xs = cut([in_front(x, size, outside) if b else x for x, b in zip(args, batched)], n, m)
        groups = [
            consts,
            filled(init, batched[n : n + m], carry_batched, size),
            [moveaxis(x, 0, 1) if b else x for x, b in zip(xs, batched[n + m :])],  # steps first, then the batch
        ]
        results = self.bind_loop(traced_body.close(lambda r: filled(*r, out_batched, size)), groups, params)
        return [BatchTracer(outside, x, int(i >= m)) if out_batched[i] else x for i, x in enumerate(results)]


def _order(length: int, reverse: bool) -> range:
    return range(length)[::-1] if reverse else range(length)


scan_p = Scan("scan")


def rounds(eqn: Equation) -> int:
    """How often an equation's body runs: once per step for a scan, else once."""
    return eqn.params["length"] if isinstance(eqn.primitive, Scan) else 1


# ---------------------------------------------------------------- public functions


@explains_keywords
def scan(
    f: Callable, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, unroll: int = 1
) -> tuple[Any, Any]:
    """Loop over the first axis of `xs`: `carry, y = f(carry, x)`.

    Returns `(carry, ys)`. `xs` and `ys` are trees of arrays, `ys` stacked from the steps' results; `carry` starts as
    `init`, a tree whose structure and types must not change (a Python number takes the dtype that a step gives it).
    With `xs=None`, `length` is the number of steps. `reverse` goes from the last element to the first. `unroll` is
    accepted and ignored: a loop runs step by step, and is recorded (under `make_tape`) as one operation, its body one
    step. (In a typed `shard_map` the first step runs again if it took derivatives and made a carry vary that was
    invariant before.)

    Raises TypeError for a carry that does not keep its type, ValueError if lengths are missing or differ.

    >>> import numpy as np
    >>> total, sums = scan(lambda s, x: (s + x, s + x), 0.0, np.array([1.0, 2.0, 3.0]))
    >>> float(total), sums
    (6.0, array([1., 3., 6.]))
    """
    check_functions("scan", {"f": f})
    elements, length = elements_of("scan", xs, length)
    return scan_steps(f, Carry("scan", f, "init", init), elements, length, reverse)


def elements_of(what: str, xs: Any, length: int | None = None) -> tuple[Any, int]:
    """The tree `xs` with arrays for leaves, and their length along the first axis.

    Raises ValueError if a leaf has no axis, or lengths are missing or differ.
    """
    leaves, structure = tree.flatten_with_paths(xs, "xs")
    values = [entered(x) for _, x in leaves]
    for (path, _), x in zip(leaves, values):
        if not typeof(x).shape:
            raise ValueError(f"{what}: {path} has type {typeof(x)}, which has no axis to loop over")
    lengths = {typeof(x).shape[0] for x in values}
    if length is not None:
        length = operator.index(concrete_value(length, f"the length of {what}"))
        if length < 0:
            raise ValueError(f"{what}: length is the number of steps, got {length}")
        lengths.add(length)
    if not lengths:
        missing = "xs holds no array" if what != "scan" else "without xs, length must say how many steps there are"
        raise ValueError(f"{what}: {missing}")
    if len(lengths) > 1:
        shown = ", ".join(f"{path}: {typeof(x)}" for (path, _), x in zip(leaves, values))
        raise ValueError(f"{what}: lengths differ: {shown}" + ("" if length is None else f", length={length}"))
    return tree.unflatten(structure, values), lengths.pop()


def scan_steps(f: Callable, carry: Carry, xs: Any, length: int, reverse: bool) -> tuple[Any, Any]:
    arrays, xs_structure = tree.flatten(xs)
    arrays = [_whole_along_first(x) for x in arrays]
    element_types = [_of_element(typeof(x)) for x in arrays]
    ys_structure = None

    def step(leaves, *elements):
        nonlocal ys_structure
        out = f(carry.tree(leaves), tree.unflatten(xs_structure, elements))
        if not (isinstance(out, tuple) and len(out) == 2):
            got = f"{len(out)} results" if isinstance(out, tuple) else type(out).__name__
            raise TypeError(f"{carry.what}: a step returns a pair (carry, y), got {got}")
        ys, structure = tree.flatten(out[1])
        if ys_structure not in (None, structure):
            raise TypeError(f"{carry.what}: a step's y was {ys_structure}, and then {structure}")
        ys_structure = structure
        return carry.leaves(out[0]), ys

    def y_values(ys):
        return [enter(y) for y in result_values(carry.origin, ys, ys_structure, "a step's y")]

    if length and not staging():
        columns, rows = [_elements(x) for x in arrays], []
        values: list[Value] = []
        types: list[ShapedArray] | None = None
        for i in _order(length, reverse):
            elements = [column[i] for column in columns]
            if types is None:
                _, types, (values, row) = carry.eagerly(step, *elements)
            else:
                new, row = step(values, *elements)
                values = carry.resharded(types, new)
            try:
                rows.append([entered(y) for y in row])
            except TypeError:
                y_values(row)  # raises an error that names the leaf
                raise
        ys = [_stacked(column) for column in zip(*(rows[::-1] if reverse else rows))]
        values, ys = carry.results(step, values, element_types, ys)
        return carry.tree(values), tree.unflatten(ys_structure, ys)

    traced_body, types = carry.recorded(step, element_types)
    closed = traced_body.close(lambda r: [*map(as_carried, r[0], types), *y_values(r[1])])
    groups = [[], [*map(as_carried, carry.init, types)], arrays]
    outs = scan_p.bind_loop(closed, groups, {"length": length, "reverse": bool(reverse)})
    values, ys = cut(outs, len(types))
    return carry.tree(values), tree.unflatten(ys_structure, ys)
