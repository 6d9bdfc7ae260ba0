"""Control flow: `cond`, `switch`, `while_loop`, `fori_loop`, `scan`, with the names and the meaning of `jax.lax`.

Where values are concrete, each is the Python statement that it is called after: `cond` runs one branch, `scan` is a
`for`. Derivatives and everything else follow from the operations that are run. Where values are only names (under
`make_tape`), each is an operation whose parameters are tapes:

========== =================================================================================================
evaluate   run the tapes
jvp        the tapes' jvp; which carries move is a fixpoint
linearise  what is known runs now, and keeps (`scan`: stacks) what the linear part needs; that part is recorded
transpose  the linear tapes transposed; a `scan` runs the other way, adding up the cotangents of what it shares
batch      the tapes vectorised; a batched predicate is a choice, element by element, among all branches
========== =================================================================================================

Tapes are closed: values that a function closes over are operands, put first.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.batching import BatchTracer
from minidiff.core import (
    ShapedArray,
    Tracer,
    TracerError,
    Value,
    VarianceError,
    checking,
    current_interpreter,
    current_scope,
    enter,
    is_scalar_constant,
    joint_variance,
    lift_to,
    name_of,
    running,
    typeof,
)
from minidiff.drafts import (
    BodyOperation,
    Draft,
    LinearPart,
    Parts,
    batched_type,
    by_id,
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
    merge,
    names_used,
    placed,
    positions,
    present,
    prune_tape,
    run_batched,
    zeros,
)
from minidiff.forward import JVP, as_value, push_forward
from minidiff.ops.elementwise import add, equal, greater, less, maximum, minimum, not_equal, where
from minidiff.ops.kinds import Linear
from minidiff.ops.reduction import sum as sum_of
from minidiff.ops.shape import moveaxis, stack_p, unstack_p
from minidiff.reverse import backward_pass
from minidiff.staging import Stage
from minidiff.tape import Equation, Tape, Var, tapes_of

# ---------------------------------------------------------------- all elements at once, and back


def _without_axis(t: ShapedArray, axis: int = 0) -> ShapedArray:
    return t.update(shape=t.shape[:axis] + t.shape[axis + 1 :])


def _elements(x: Value) -> list[Value]:
    return unstack_p.bind(x, axis=0) if isinstance(x, Tracer) else list(numpy.asarray(x))


def _stacked(elements: Sequence[Value]) -> Value:
    return stack_p.bind(*elements, axis=0) if any(isinstance(x, Tracer) for x in elements) else numpy.stack(elements)


# ---------------------------------------------------------------- cond, switch


class Cond(BodyOperation):
    """`cond` and `switch`: parameters are the branches' tapes, operands a selector and what the branches take.

    `choose(selector)` is the number of the branch; `matches(selector, i)` says whether it is i, as an operation.
    """

    def __init__(self, name: str, choose: Callable[[Any], int], matches: Callable[[Value, int], Value]):
        super().__init__(name)
        self.choose = choose
        self.matches = matches

    def branch(self, selector: Value, branches: Sequence) -> Any:
        """The branch that a concrete selector selects."""
        return branches[self.choose(concrete_value(selector, SELECTORS[self.name]))]

    def select(self, selector: Value, results: Sequence[Sequence[Value]]) -> list[Value]:
        """Of several branches' results those selected, element by element."""
        *others, outs = results
        for i, candidates in reversed(list(enumerate(others))):
            here = self.matches(selector, i)
            outs = [x if x is y else where(here, x, y) for x, y in zip(candidates, outs)]
        return list(outs)

    def evaluate(self, args, params):
        return self.branch(args[0], tapes_of(params))(*args[1:])

    def typecheck(self, types, params):
        branches = tapes_of(params)
        _check_invariant(SELECTORS[self.name], typeof(types[0]))
        for tape in branches:
            self._check_operands(types[1:], tape.in_types)
            if tape.out_types != branches[0].out_types:
                raise TypeError(f"{self.name}: branches give {branches[0].out_types} and {tape.out_types}")
        return branches[0].out_types

    def operand_types(self, part: LinearPart) -> list[ShapedArray]:
        return [typeof(part.operands[0][1]), *tapes_of(part.params)[0].in_types]

    def bodies(self, count, params):
        return {name: list(range(1, count)) for name in params}

    def narrowed(self, eqn, used):
        tapes = [prune_tape(Tape(t.inputs, t.equations, chosen(t.outputs, used))) for t in tapes_of(eqn.params)]
        names = [names_used(tape) for tape in tapes]
        keep = [any(v in found for v, found in zip(vs, names)) for vs in zip(*[tape.inputs for tape in tapes])]
        tapes = [Tape(chosen(t.inputs, keep), t.equations, t.outputs) for t in tapes]
        inputs = [eqn.inputs[0], *chosen(eqn.inputs[1:], keep)]
        return Equation(self, inputs, dict(zip(eqn.params, tapes)), chosen(eqn.outputs, used), eqn.source)

    def bind_branches(self, selector: Value, closed: Sequence, operands: Sequence[Value], params: dict) -> list[Value]:
        """The same choice among other tapes, each with the values that it is closed over."""
        tapes, constants = merge([by_id(pair) for pair in closed])
        if not tapes[0].outputs:
            return []
        args = fit([*constants, *operands], tapes[0].in_types)
        names = [names_used(tape) for tape in tapes]
        used = [any(v in found for v, found in zip(vs, names)) for vs in zip(*[tape.inputs for tape in tapes])]
        tapes = [Tape(chosen(t.inputs, used), t.equations, t.outputs) for t in tapes]
        return self.bind(selector, *chosen(args, used), **dict(zip(params, tapes)))

    def jvp(self, primals, tangents, params):
        selector, *operands = primals
        moving = [t is not None for t in tangents[1:]]
        types = tapes_of(params)[0].in_types

        def derived(branch):
            def f(*values):
                unmoved, rest = cut(values, len(types))
                return push_forward(branch, unmoved, placed(rest, moving), JVP(current_interpreter()))

            return Draft(f, [*types, *chosen(types, moving)])

        drafts = [derived(branch) for branch in tapes_of(params)]
        out_moving = [any(t is not None for t in ts) for ts in zip(*[d.result[1] for d in drafts])]
        out_types = tapes_of(params)[0].out_types
        closed = [
            d.close(lambda r: [*r[0], *instantiated(chosen(r[1], out_moving), chosen(out_types, out_moving))])
            for d in drafts
        ]
        results = self.bind_branches(selector, closed, [*operands, *chosen(tangents[1:], moving)], params)
        outs, out_tangents = cut(results, len(out_types))
        return outs, placed(out_tangents, out_moving)

    def split(self, args, linear, params):
        selector, *operands = args
        linear = linear[1:]
        parts = [Parts(branch, linear) for branch in tapes_of(params)]
        is_linear = [any(flags) for flags in zip(*[p.is_linear for p in parts])]
        known = [not yes for yes in is_linear]
        slots: list[ShapedArray] = []  # the types of what the known branches keep; a branch fills some of them
        found = []
        for p in parts:
            tape, residuals = p.linear_tape(is_linear)
            there, kept = [], {}  # residuals that need not be kept: (name, key, value); those that are, by their slot
            for var, x in zip(tape.inputs, residuals):
                i = p.input_number(x)
                if i is not None:
                    there.append((var, i, operands[i]))
                elif p.stage.owns(x):
                    kept[_free_slot(slots, kept, x.type)] = (var, x)
                else:
                    there.append((var, ("outside", id(x)), x))
            found.append((p, tape, there, kept))

        keeping = [
            p.known_tape([*chosen(p.outs, known), *[kept[k][1] if k in kept else t for k, t in enumerate(slots)]])
            for p, _, _, kept in found
        ]
        results = self.bind_branches(selector, keeping, chosen(operands, [not yes for yes in linear]), params)
        outs, residuals = cut(results, sum(known))

        def linear_branch(tape: Tape, there: list, kept: dict) -> tuple[Tape, list]:
            names = [var for var, _, _ in there]
            names += [kept[k][0] if k in kept else Var(t) for k, t in enumerate(slots)]
            inputs = [*names, *tape.inputs[len(there) + len(kept) :]]
            return Tape(inputs, tape.equations, tape.outputs), [(key, x) for _, key, x in there]

        linear_tapes, values = merge([linear_branch(tape, there, kept) for _, tape, there, kept in found])
        part = LinearPart(
            [
                *[(None, x) for x in [selector, *values, *residuals]],
                *[(i + 1, x) for i, x in enumerate(operands) if linear[i]],
            ],
            dict(zip(params, linear_tapes)),
            positions(is_linear),
        )
        return dict(zip(positions(known), outs)), part

    def transpose(self, cts, operands, params):
        selector, *operands = operands
        linear = [isinstance(x, ShapedArray) for x in operands]
        if isinstance(selector, ShapedArray):
            return super().transpose(cts, [selector], params)
        fixed, given = [not yes for yes in linear], [ct is not None for ct in cts]
        branches = tapes_of(params)
        types = branches[0].in_types

        def transposed(branch):
            def f(*values):
                known, rest = cut(values, sum(fixed))
                return backward_pass(branch, linear, placed(known, fixed), placed(rest, given))

            return Draft(f, [*chosen(types, fixed), *chosen(branch.out_types, given)])

        drafts = [transposed(branch) for branch in branches]
        wanted = [any(ct is not None for ct in found) for found in zip(*[d.result for d in drafts])]
        wanted_types = chosen(chosen(types, linear), wanted)
        closed = [d.close(lambda r: instantiated(chosen(r, wanted), wanted_types), prune=True) for d in drafts]
        results = self.bind_branches(selector, closed, [*chosen(operands, fixed), *chosen(cts, given)], params)
        return [None, *placed(placed(results, wanted), linear)]

    def batch_operands(self, outside, args, batched, params):
        branches, size = tapes_of(params), outside.size_of_batch
        if batched[0]:
            with running(outside):
                return self.select(args[0], [branch(*args[1:]) for branch in branches])
        selector, *operands = args
        batched = batched[1:]
        types = [batched_type(t, size, b) for t, b in zip(branches[0].in_types, batched)]
        drafts = [Draft(lambda *xs, b=branch: run_batched(outside, b, xs, batched), types) for branch in branches]
        out_batched = [any(flags) for flags in zip(*[d.result[1] for d in drafts])]
        closed = [d.close(lambda r: filled(*r, out_batched, size)) for d in drafts]
        operands = [in_front(x, size, outside) if b else x for x, b in zip(operands, batched)]
        results = self.bind_branches(selector, closed, operands, params)
        return [BatchTracer(outside, x, 0) if b else x for x, b in zip(results, out_batched)]


def _free_slot(slots: list[ShapedArray], taken: dict, t: ShapedArray) -> int:
    """The number of a slot of type `t` that is not taken; a new one, if there is none."""
    for k, slot in enumerate(slots):
        if slot == t and k not in taken:
            return k
    slots.append(t)
    return len(slots) - 1


SELECTORS = {"cond": "the predicate of cond", "switch": "the index of switch"}
cond_p = Cond("cond", lambda pred: 0 if pred else 1, lambda pred, i: pred)
switch_p = Cond("switch", int, equal)

# ---------------------------------------------------------------- scan


class Scan(BodyOperation):
    """A loop over the first axis of arrays.

    Its body takes and its operands are: `consts` values that all steps share; `carry` values that a step hands to the
    next; elements (as operands: arrays of them). The body returns the carries, and elements of results.
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

    def typecheck(self, types, params):
        n, m, body, length = params["consts"], params["carry"], params["body"], params["length"]
        types = [typeof(t) for t in types]
        for t in types[n + m :]:
            if t.shape[:1] != (length,):
                raise TypeError(f"scan: {length} steps over an array of type {t}")
        self._check_operands([*types[: n + m], *map(_without_axis, types[n + m :])], body.in_types)
        carry, ys = cut(body.out_types, m)
        if carry != body.in_types[n : n + m]:
            raise TypeError(f"scan: its body takes the carries {body.in_types[n : n + m]}, and gives {carry}")
        return [*carry, *[t.update(shape=(length, *t.shape)) for t in ys]]

    def show_params(self, params):
        shown = ", ".join(f"{k}={params[k]}" for k in ("length", "consts", "carry"))
        return shown + (", reverse=True" if params["reverse"] else "")

    def operand_types(self, part):
        return part.params["body"].in_types

    def bind_loop(self, closed: tuple[Tape, list], groups: Sequence[Sequence], params: dict, **changes) -> list[Value]:
        """The same loop with another body, closed over further values; `groups` are shared values, carries, arrays."""
        tape, constants = closed
        if not tape.outputs:
            return []
        consts, carry, xs = groups
        n, m = len(constants) + len(consts), len(carry)
        args = fit([*constants, *consts, *carry, *xs], tape.in_types)
        used = names_used(tape)
        keep = [n <= i < n + m or v in used for i, v in enumerate(tape.inputs)]
        new = {"body": Tape(chosen(tape.inputs, keep), tape.equations, tape.outputs)}
        return self.bind(*chosen(args, keep), **{**params, **new, "consts": sum(keep[:n]), "carry": m, **changes})

    def narrowed(self, eqn, used):
        """Without the carries, too, that neither its results nor other carries need."""
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

    def jvp(self, primals, tangents, params):
        body, (n, m) = params["body"], (params["consts"], params["carry"])
        types = cut(body.in_types, n, m)
        consts, init, xs = cut(primals, n, m)
        t_consts, t_init, t_xs = cut(tangents, n, m)
        draft, (_, moving, _) = _moved_body(body, types, (t_consts, t_init, t_xs))
        moved_types = chosen(types[1], moving)
        y_moving = [t is not None for t in draft.result[1][m:]]
        y_types = chosen(body.out_types[m:], y_moving)

        def outputs(result):
            (carry, ys), (t_carry, t_ys) = (cut(values, m) for values in result)
            t_carry = instantiated(chosen(t_carry, moving), moved_types)
            return [*carry, *t_carry, *ys, *fit(chosen(t_ys, y_moving), y_types)]

        t_init = instantiated(chosen(t_init, moving), moved_types)
        groups = [[*consts, *present(t_consts)], [*init, *t_init], [*xs, *present(t_xs)]]
        results = self.bind_loop(draft.close(outputs), groups, params)
        carry, t_carry, ys, t_ys = cut(results, m, len(t_init), len(y_moving))
        return [*carry, *ys], [*placed(t_carry, moving), *placed(t_ys, y_moving)]

    def split(self, args, linear, params):
        body, (n, m) = params["body"], (params["consts"], params["carry"])

        def attempt(carry_linear):
            mask = [*linear[:n], *carry_linear, *linear[n + m :]]
            parts = Parts(body, mask)
            return (parts, mask), parts.is_linear[:m]

        (parts, mask), carry_linear = fixpoint(attempt, linear[n : n + m])
        is_linear = [*carry_linear, *parts.is_linear[m:]]
        known = [not yes for yes in is_linear]
        tape, residuals = parts.linear_tape(is_linear)

        # A residual that is the same in all steps is not stacked: it is there already, or computed once.
        invariant = parts.invariant(n)
        shared, once, elements, kept = [], [], [], []
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
                kept.append((var, x))

        closed = parts.known_tape([*chosen(parts.outs, known), *[x for _, x in kept]])
        groups = cut(args, n, m)
        fixed = cut([not yes for yes in mask], n, m)
        results = self.bind_loop(closed, [chosen(g, yes) for g, yes in zip(groups, fixed)], params)
        outs, stacked = cut(results, sum(known))
        shared += [(None, var, x) for (var, _), x in zip(once, parts.before(n, args, [x.variable for _, x in once]))]
        elements += [(None, var, x) for (var, _), x in zip(kept, stacked)]

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

        draft = Draft(f, [*fixed_types[0], *sum_types, *types[1], *fixed_types[1], *chosen(out_types[m:], given[m:])])
        wanted = [ct is not None for ct in draft.result[2]]
        results = self.bind_loop(
            draft.close(lambda r: [*r[0], *r[1], *chosen(r[2], wanted)], prune=True),
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
        """Some carries do not depend on what is linear: they are computed first, and what is needed of them kept."""
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
            draft = Draft(lambda *xs: run_batched(outside, body, xs, mask), types)
            return draft, draft.result[1][:m]

        draft, carry_batched = fixpoint(attempt, batched[n : n + m])
        out_batched = [*carry_batched, *draft.result[1][m:]]
        consts, init, xs = cut([in_front(x, size, outside) if b else x for x, b in zip(args, batched)], n, m)
        groups = [
            consts,
            filled(init, batched[n : n + m], carry_batched, size),
            [moveaxis(x, 0, 1) if b else x for x, b in zip(xs, batched[n + m :])],  # steps first, then the batch
        ]
        results = self.bind_loop(draft.close(lambda r: filled(*r, out_batched, size)), groups, params)
        return [BatchTracer(outside, x, int(i >= m)) if out_batched[i] else x for i, x in enumerate(results)]


def _order(length: int, reverse: bool) -> range:
    return range(length)[::-1] if reverse else range(length)


scan_p = Scan("scan")


def rounds(eqn: Equation) -> int:
    """How often an equation's body is run when it is: a scan's for each of its steps, others once."""
    return eqn.params["length"] if isinstance(eqn.primitive, Scan) else 1


# ---------------------------------------------------------------- while_loop

_NO_REVERSE = (
    "while_loop cannot be differentiated in reverse: how many steps it takes, and so how much must be kept for the "
    "backward sweep, is not known beforehand. Use scan, or fori_loop with bounds that are plain numbers (which is a "
    "scan); or forward mode, md.jvp"
)


class ForwardOnly(Linear):
    """The identity, on what a loop of unknown length returns: its derivative is not transposed."""

    shares_memory = True

    def __init__(self):
        batch = lambda primitive, args, batched: primitive.bind(*args)  # noqa: E731
        super().__init__("while_loop", lambda x: x, lambda x: (x.shape, x.dtype), None, batch)

    def transpose(self, ct, operands, params):
        raise TypeError(_NO_REVERSE)


class While(BodyOperation):
    """A loop while a condition holds: operands are `cond_consts` values, `body_consts` values, and the carries."""

    def evaluate(self, args, params):
        cond_consts, body_consts, carry = cut(args, params["cond_consts"], params["body_consts"])
        while concrete_value(params["cond"](*cond_consts, *carry)[0], CONDITION):
            carry = params["body"](*body_consts, *carry)
        return carry

    def typecheck(self, types, params):
        cond, body = params["cond"], params["body"]
        cond_consts, body_consts, carry = cut(types, params["cond_consts"], params["body_consts"])
        self._check_operands([*cond_consts, *carry], cond.in_types)
        self._check_operands([*body_consts, *carry], body.in_types)
        self._check_operands(body.out_types, body.in_types[len(body_consts) :])
        return body.out_types

    def check_variance(self, types, params):
        super().check_variance(types, params)
        _check_invariant(CONDITION, params["cond"].out_types[0])

    def operand_types(self, part):
        return [*part.params["cond"].in_types[: part.params["cond_consts"]], *part.params["body"].in_types]

    def bodies(self, count, params):
        cond_consts, others = cut(range(count), params["cond_consts"])
        return {"cond": [*cond_consts, *others[params["body_consts"] :]], "body": others}

    def bind_loop(self, cond: tuple[Tape, list], body: tuple[Tape, list], carry: Sequence[Value]) -> list[Value]:
        """A loop of two tapes, each given with the values of its first inputs."""
        (cond_tape, cond_consts), (body_tape, body_consts) = cond, body
        if not body_tape.outputs:
            return []
        args = [*fit(cond_consts, cond_tape.in_types), *fit([*body_consts, *carry], body_tape.in_types)]
        counts = {"cond_consts": len(cond_consts), "body_consts": len(body_consts)}
        return self.bind(*args, cond=cond_tape, body=body_tape, **counts)

    def jvp(self, primals, tangents, params):
        cond, body, (k, n) = params["cond"], params["body"], (params["cond_consts"], params["body_consts"])
        cond_consts, consts, init = cut(primals, k, n)
        _, t_consts, t_init = cut(tangents, k, n)
        types = cut(body.in_types, n)
        draft, (_, moving) = _moved_body(body, types, (t_consts, t_init))
        moved_types = chosen(types[1], moving)
        tape, constants = draft.close(lambda r: [*r[0], *instantiated(chosen(r[1], moving), moved_types)])
        cond = Tape([*cond.inputs, *map(Var, moved_types)], cond.equations, cond.outputs)
        t_init = instantiated(chosen(t_init, moving), moved_types)
        body_consts = [*constants, *consts, *present(t_consts)]
        outs, out_tangents = cut(self.bind_loop((cond, cond_consts), (tape, body_consts), [*init, *t_init]), len(init))
        return outs, placed(out_tangents, moving)

    def split(self, args, linear, params):
        """The known carries are computed now; the linear part is the whole loop again, for nothing can be kept."""
        cond, body, (k, n) = params["cond"], params["body"], (params["cond_consts"], params["body_consts"])

        def attempt(carry_linear):
            parts = Parts(body, [*linear[k : k + n], *carry_linear])
            return parts, parts.is_linear

        parts, carry_linear = fixpoint(attempt, linear[k + n :])
        if any(depends(cond, [*linear[:k], *carry_linear])):
            raise TypeError("while_loop: its condition depends on what must be linear")
        known = [not yes for yes in carry_linear]
        cond_consts, consts, carry = cut(args, k, n)
        test = prune_tape(Tape([*cond.inputs[:k], *chosen(cond.inputs[k:], known)], cond.equations, cond.outputs))
        tape, constants = parts.known_tape(chosen(parts.outs, known))
        body_consts = [*constants, *chosen(consts, [not yes for yes in linear[k : k + n]])]
        outs = self.bind_loop((test, cond_consts), (tape, body_consts), chosen(carry, known))
        part = LinearPart(list(enumerate(args)), params, list(range(len(carry))))
        return dict(zip(positions(known), outs)), part

    def transpose(self, cts, operands, params):
        raise TypeError(_NO_REVERSE)

    def batch_operands(self, outside, args, batched, params):
        cond, body, (k, n) = params["cond"], params["body"], (params["cond_consts"], params["body_consts"])
        size = outside.size_of_batch

        def attempt(carry_batched):
            masks = [*batched[:k], *carry_batched], [*batched[k : k + n], *carry_batched]
            test, step = (
                Draft(
                    lambda *xs, tape=tape, mask=mask: run_batched(outside, tape, xs, mask),
                    [batched_type(t, size, b) for t, b in zip(tape.in_types, mask)],
                )
                for tape, mask in zip((cond, body), masks)
            )
            # Where elements are done at different times, they wait for each other: all carries are batched.
            apart = test.result[1][0]
            return (test, step, masks, apart), ([True] * len(carry_batched) if apart else step.result[1])

        (test, step, masks, apart), carry_batched = fixpoint(attempt, batched[k + n :])
        front = [in_front(x, size, outside) if b else x for x, b in zip(args, batched)]
        cond_consts, consts, init = cut(front, k, n)
        init = filled(init, batched[k + n :], carry_batched, size)
        if apart:

            def masked(*values):
                own, shared, carry = cut(values, k, n)
                (going,), _ = run_batched(outside, cond, [*own, *carry], masks[0])
                new = filled(*run_batched(outside, body, [*shared, *carry], masks[1]), carry_batched, size)
                return [where(_padded(going, x), x, old) for x, old in zip(new, carry)]

            types = [batched_type(t, size, b) for t, b in zip(cond.in_types, batched[:k])]
            types += [batched_type(t, size, b) for t, b in zip(body.in_types, masks[1])]
            step, consts = Draft(masked, types), [*cond_consts, *consts]
            tape, constants = step.close(lambda r: r)
        else:
            tape, constants = step.close(lambda r: filled(*r, carry_batched, size))
        test_tape, test_constants = test.close(lambda r: [_any(r[0][0])] if apart else r[0])
        cond, body = (test_tape, [*test_constants, *cond_consts]), (tape, [*constants, *consts])
        results = self.bind_loop(cond, body, init)
        return [BatchTracer(outside, x, 0) if b else x for x, b in zip(results, carry_batched)]


def _moved_body(body: Tape, types: Sequence[Sequence[ShapedArray]], tangents: Sequence[Sequence[Value | None]]):
    """A loop's body in forward mode: a Draft of its results and their tangents, and which inputs move.

    Inputs and tangents are given in groups, the carries in the second; in the draft's inputs each group is followed by
    its tangents.
    """
    moving = [[t is not None for t in group] for group in tangents]

    def attempt(carry_moving):
        masks = [moving[0], carry_moving, *moving[2:]]

        def f(*values):
            values = iter(values)
            groups = [([next(values) for _ in ts], placed(values, mask)) for ts, mask in zip(types, masks)]
            primals, moved = [x for xs, _ in groups for x in xs], [t for _, ts in groups for t in ts]
            return push_forward(body, primals, moved, JVP(current_interpreter()))

        draft = Draft(f, [t for ts, mask in zip(types, masks) for t in [*ts, *chosen(ts, mask)]])
        return draft, [t is not None for t in draft.result[1][: len(carry_moving)]]

    draft, carry_moving = fixpoint(attempt, moving[1])
    return draft, [moving[0], carry_moving, *moving[2:]]


def _any(x: Value) -> Value:
    """Whether one element is true (of none, none is)."""
    return greater(sum_of(x), 0)


def _padded(mask: Value, x: Value) -> Value:
    return mask.reshape(tuple(mask.shape) + (1,) * (len(x.shape) - 1))


CONDITION = "the condition of while_loop"
forward_only_p = ForwardOnly()
while_p = While("while_loop")

# ---------------------------------------------------------------- what the functions of users return


def _staging() -> bool:
    """Whether what runs now is being recorded as a program for values not yet known."""
    interpreter = current_interpreter()
    while interpreter is not None and not isinstance(interpreter, Stage):
        interpreter = interpreter.below
    return interpreter is not None


def _known(x: Value, use: str) -> Any:
    """The number that `x` is, or None if it is only a name, or many at once. VarianceError where ranks may differ."""
    try:
        return concrete_value(x, use)
    except TracerError:
        return None


def _check_invariant(what: str, t: ShapedArray, because: str = "") -> None:
    if t.variance:
        axes = ", ".join(map(repr, sorted(t.variance)))
        raise VarianceError(
            f"{what} must be the same on all ranks, but {t} varies along {axes}{because}: the ranks would go different "
            f"ways, and wait for each other for ever. Make them agree first (psum, pmax or pmin over {axes}), or "
            "choose element by element with np.where"
        )


def _check_condition(carry: _Carry, condition: Draft, types: Sequence[ShapedArray]) -> tuple[Tape, list[Value]]:
    """The closed tape of a loop's condition; VarianceError, naming the carries that are to blame, if it varies."""
    tape, constants = condition.close(lambda r: r)
    t = tape.out_types[0]
    causes = []
    for i, (path, start, now) in enumerate(zip(carry.paths, carry.init, types), len(constants)):
        if now.variance & t.variance and any(depends(tape, [i == k for k in range(len(tape.inputs))])):
            causes.append(f"{path} does, which starts as {typeof(start)} and which a step makes {now}")
    _check_invariant(CONDITION, t, ", because " + (" and ".join(causes) or "cond_fun closes over what does"))
    return tape, constants


def _is_weak(x: Any) -> bool:
    """Whether it is a Python number, whose dtype gives way to an array's."""
    return type(x) in (int, float, complex)


def _numeric(x: Any, t: ShapedArray) -> Value:
    """`x`, with the dtype of `t` if it is a Python number."""
    return numpy.asarray(x, t.dtype)[()] if _is_weak(x) else as_value(x)


def _as(x: Any, t: ShapedArray) -> Value:
    """`x` as a value of type `t`, which differs from its own at most as a Python number's may, and in variance."""
    return lift_to(enter(_numeric(x, t)), t.variance)


def _carried(what: str, path: str, old: Any, new: Any, number: bool = False) -> ShapedArray:
    """The type of a carry that starts as `old` (a value or a type), of which one step made `new`.

    A `number` takes whatever variance a step gives it, as numbers do everywhere.
    """
    a, b = typeof(old), typeof(new)
    variance = a.variance | b.variance
    if not number:
        labels = f"what {path} starts as", "what a step makes of it"
        variance = joint_variance(f"{what}: {path} has type {a}, a step makes it {b}; these", labels, (old, new))
    if a.shape == b.shape:
        if a.dtype == b.dtype or (_is_weak(new) and numpy.result_type(a.dtype, new) == a.dtype):
            return a.update(variance=variance)
        if _is_weak(old) and numpy.result_type(b.dtype, old) == b.dtype:
            return b.update(variance=variance)
    raise TypeError(
        f"{what} must keep the type of what it carries: {path} has type {a}, but a step makes it {b}; convert one of "
        "them (with .astype, say, or np.broadcast_to)"
    )


class _Carry:
    """What a loop carries: the leaves it starts with, where they stand, and how a step's results are checked."""

    def __init__(self, what: str, f: Callable, name: str, init: Any):
        self.what = what
        self.origin = what, name_of(f)
        leaves, self.structure = tree.flatten_with_paths(init, name)
        self.name = name
        self.paths = [path for path, _ in leaves]
        self.init = [x if _is_weak(x) else entered(x) for _, x in leaves]
        self.seen: list[ShapedArray] = []  # the types that the carries have had, while they are known
        self.last: list[ShapedArray] = []  # those that they had last
        self.fixed = False  # whether a step that took what was `seen` made nothing else of it, as no further one will

    def tree(self, leaves: Iterable[Value]) -> Any:
        return tree.unflatten(self.structure, leaves)

    def leaves(self, new: Any) -> list:
        """The leaves of what a step returns to be carried on."""
        leaves, structure = tree.flatten(new)
        if structure != self.structure:
            raise TypeError(
                f"{self.what} must keep the structure of what it carries: {self.name} is {self.structure}, but a step "
                f"makes it {structure}"
            )
        return leaves

    def types(self, old: Sequence[Any], new: Sequence[Any]) -> list[ShapedArray]:
        numbers = map(is_scalar_constant, self.init)
        return [_carried(self.what, *entry) for entry in zip(self.paths, old, new, numbers)]

    def eagerly(self, step: Callable, *args: Any) -> tuple[list[Value], list[ShapedArray], Any]:
        """The first step: the carries it starts with, their types, and what it returns.

        A Python number shows only now of what dtype it must be; if that is another than its own, the step is repeated.
        """
        start = self.init
        try:
            new, rest = step(start, *args)
        except (AttributeError, TypeError):  # a step may want of a number what only arrays have
            if not any(map(_is_weak, start)):
                raise
            start = list(map(as_value, start))
            new, rest = step(start, *args)
        types = self.types(start, new)
        init = [_numeric(x, t) for x, t in zip(start, types)]
        if any(typeof(x).dtype != t.dtype for x, t in zip(start, types)):
            new, rest = step(init, *args)
        self.seen, self.last = types, list(map(typeof, init))
        return init, types, (self.settled(types, new), rest)

    def settled(self, types: Sequence[ShapedArray], new: Sequence[Any]) -> list[Value]:
        """A step's results, checked against the types of the carries."""
        out = []
        for path, x, t in zip(self.paths, new, types):
            if _is_weak(x) or getattr(x, "dtype", None) != t.dtype or x.shape != t.shape:
                x = _numeric(x, _carried(self.what, path, t, x))
            out.append(x)
        if current_scope() is not None:
            seen = [_carried(self.what, path, t, x) for path, t, x in zip(self.paths, self.seen, out)]
            self.fixed = self.last == self.seen == seen
            self.seen, self.last = seen, list(map(typeof, out))
        return out

    def results(
        self, step: Callable, values: Sequence[Value], others: Sequence[ShapedArray] = (), ys: Sequence[Value] = ()
    ) -> tuple[list[Value], list[Value]]:
        """What is carried out of a loop, and what its steps gave, with the variance after any number: as recorded."""
        scope = current_scope()
        if scope is None or not scope.typed:
            return list(values), list(ys)
        types, y_types = self.seen or list(map(typeof, values)), list(map(typeof, ys))
        if not (self.fixed or _vary_everywhere([*values, *ys])):
            with _for_types_alone():
                draft, types = self.recorded(step, others)
                y_types = [typeof(y) for y in draft.result[1] or ()]
        return [_as(x, t) for x, t in zip(values, types)], [lift_to(y, t.variance) for y, t in zip(ys, y_types)]

    def recorded(self, step: Callable, others: Sequence[ShapedArray] = ()) -> tuple[Draft, list[ShapedArray]]:
        """A Draft of a step, which takes the carries and `others`, and the types of the carries: a fixpoint."""
        current: list[Any] = [x if _is_weak(x) else typeof(x) for x in self.init]
        while True:

            def f(*values, current=current):
                values = iter(values)
                carry = [x if _is_weak(x) else next(values) for x in current]
                return step(carry, *values)

            try:
                draft = Draft(f, [t for t in [*current, *others] if not _is_weak(t)], self.origin)
            except (AttributeError, TypeError):  # a step may want of a number what only arrays have
                if not any(map(_is_weak, current)):
                    raise
                current = list(map(typeof, current))
                continue
            types = self.types(current, draft.result[0])
            if types == current:
                return draft, types
            current = types


def _flat_function(f: Callable, operands: Any) -> tuple[list[Value], Callable]:
    """The leaves of `operands`, and `f(*operands)` as a function of them that returns leaves with paths, structure."""
    leaves, structure = tree.flatten(operands)
    return [entered(x) for x in leaves], lambda *xs: tree.flatten_with_paths(f(*tree.unflatten(structure, xs)))


def _joined(what: str, names: Sequence[str], results: Sequence[tuple]) -> list[ShapedArray]:
    """The types of the results of several branches, which must be the same but for Python numbers and variance."""
    structure = results[0][1]
    for name, (_, other) in zip(names, results):
        if other != structure:
            raise TypeError(
                f"{what}: all branches must return trees of one structure, but {names[0]} returns {structure} and "
                f"{name} returns {other}"
            )
    types = []
    for entries in zip(*[leaves for leaves, _ in results]):
        found = [typeof(x) for _, x in entries]
        strong = [t.dtype for t, (_, x) in zip(found, entries) if not _is_weak(x)]
        dtype = strong[0] if strong else numpy.result_type(*[t.dtype for t in found])
        for name, t, (path, x) in zip(names, found, entries):
            fits = numpy.result_type(dtype, x) == dtype if _is_weak(x) else t.dtype == dtype
            if t.shape != found[0].shape or not fits:
                at = f" at [...]{path}" if path else ""
                raise TypeError(
                    f"{what}: all branches must return the same types, but{at} {names[0]} returns {found[0]} and "
                    f"{name} returns {t}; convert one of them (with .astype, say, or np.broadcast_to)"
                )
        shown = ", ".join(f"{t} of {name}" for name, t in zip(names, found))
        labels = [f"that of {name}" for name in names]
        variance = joint_variance(f"{what}: the results {shown}", labels, [x for _, x in entries])
        types.append(ShapedArray(found[0].shape, dtype, variance))
    return types


def _branch(primitive: Cond, selector: Value, names: Sequence[str], branches: Sequence[Callable], operands: tuple):
    use = SELECTORS[primitive.name]
    batched = isinstance(selector, BatchTracer)
    known = None if batched else _known(selector, use)
    if known is not None:
        number, scope = primitive.choose(known), current_scope()
        if scope is None or not scope.typed or not isinstance(selector, Tracer):
            return branches[number](*operands)
        return _typed_choice(primitive, number, names, branches, operands)
    if not batched:
        _check_invariant(use, typeof(selector))
    leaves, functions = [], []
    for f in branches:
        leaves, function = _flat_function(f, operands)
        functions.append(function)
    if batched:
        results = [function(*leaves) for function in functions]
        types = _joined(primitive.name, names, results)
        values = [[_numeric(x, t) for (_, x), t in zip(found, types)] for found, _ in results]
        with checking(current_scope(), False):
            return tree.unflatten(results[0][1], primitive.select(selector, values))
    drafts = [_drafted(primitive, f, leaves, function) for f, function in zip(branches, functions)]
    types = _joined(primitive.name, names, [d.result for d in drafts])
    closed = [d.close(lambda r: [_as(x, t) for (_, x), t in zip(r[0], types)]) for d in drafts]
    parameters = [name.replace("[", "_").rstrip("]") for name in names]  # compiled programs write them out
    outs = primitive.bind_branches(selector, closed, leaves, dict.fromkeys(parameters))
    return tree.unflatten(drafts[0].result[1], outs)


def _typed_choice(
    primitive: Cond, number: int, names: Sequence[str], branches: Sequence[Callable], operands: tuple
) -> Any:
    """The results of one branch, with the variance that they have whichever is chosen: as it is recorded.

    So a program whose types are right for these numbers is right for others.
    """
    leaves, function = _flat_function(branches[number], operands)
    found, structure = function(*leaves)
    if _vary_everywhere(x for _, x in found):
        return tree.unflatten(structure, [x for _, x in found])
    results = [(found, structure)] * len(branches)
    for k, f in enumerate(branches):
        if k != number:
            with _for_types_alone():
                results[k] = _drafted(primitive, f, *_flat_function(f, operands)).result
    types = _joined(primitive.name, names, results)
    return tree.unflatten(structure, [_as(x, t) for (_, x), t in zip(found, types)])


@contextlib.contextmanager
def _for_types_alone() -> Iterator[None]:
    """Around what is recorded though it may never be run: if it raises (it may ask for numbers) it has no say.

    That types disagree is an error, whatever is run.
    """
    try:
        yield
    except VarianceError:
        raise
    except Exception:  # also RecursionError, of a branch that calls itself as long as a value says so
        pass


def _vary_everywhere(values: Iterable[Value]) -> bool:
    """Whether no other value can make these vary more (where types must agree as they are written, one must look)."""
    scope = current_scope()
    return not scope.explicit and all(len(typeof(x).variance) == len(scope.axes) for x in values)


def _drafted(primitive: Cond, f: Callable, leaves: Sequence[Value], function: Callable) -> Draft:
    return Draft(function, map(typeof, leaves), (primitive.name, name_of(f)))


# ---------------------------------------------------------------- what users call


def cond(pred: Any, true_fun: Callable, false_fun: Callable, *operands: Any) -> Any:
    """`true_fun(*operands)` if `pred` holds, else `false_fun(*operands)`.

    `pred` is one boolean, or a number (which holds if it is not 0). Operands and results are trees. Where `pred` is
    known, one branch is run. Where it is only a name (under `make_tape`), both are recorded, and must return trees of
    the same structure and types; a result varies from rank to rank if it does in one of them. So it does in a
    `shard_map` that has types where `pred` is known, too: the other branch is recorded there for its types alone, and
    has no say if it raises. Where `pred` is many at once (under `vmap`), both are run, and results chosen element by
    element. Raises TypeError where branches differ, VarianceError where ranks may disagree about `pred`.

    >>> import numpy as np
    >>> cond(True, lambda x: x + 1.0, lambda x: x - 1.0, 2.0)
    3.0
    """
    pred = entered(pred)
    t = typeof(pred)
    if t.shape or t.dtype.kind not in "biufc":
        raise TypeError(
            f"cond: pred must be one boolean or number, got {t}; for a choice for each element use np.where"
        )
    if t.dtype != bool:
        pred = not_equal(pred, 0) if isinstance(pred, Tracer) else bool(pred)
    return _branch(cond_p, pred, ("true_fun", "false_fun"), (true_fun, false_fun), operands)


def switch(index: Any, branches: Sequence[Callable], *operands: Any) -> Any:
    """`branches[index](*operands)`; an index that is out of range stands for the nearest branch.

    As `cond`, with any number of branches.

    >>> [switch(i, [lambda x: x, lambda x: -x], 2.0) for i in (-1, 0, 1, 5)]
    [2.0, 2.0, -2.0, -2.0]
    """
    index, branches = entered(index), list(branches)
    t = typeof(index)
    if t.shape or t.dtype.kind not in "iu":
        raise TypeError(f"switch: index must be one integer, got {t}")
    if not branches:
        raise ValueError("switch: there must be a branch at least")
    names = [f"branches[{i}]" for i in range(len(branches))]
    if isinstance(index, Tracer):
        index = minimum(maximum(index, 0), len(branches) - 1)
    else:
        index = min(max(int(index), 0), len(branches) - 1)
    return _branch(switch_p, index, names, branches, operands)


def while_loop(cond_fun: Callable, body_fun: Callable, init_val: Any) -> Any:
    """The value that is reached from `init_val` by `val = body_fun(val)` while `cond_fun(val)`.

    `val` is a tree, whose structure and types stay. `cond_fun` returns one boolean. Under `vmap`, elements that are
    done wait for the others. Forward mode differentiates it, reverse mode does not (TypeError): use `scan`.

    >>> int(while_loop(lambda n: n < 100, lambda n: 2 * n, 3))
    192
    """
    return _while(cond_fun, body_fun, _Carry("while_loop", body_fun, "init_val", init_val))


def _while(cond_fun: Callable, body_fun: Callable, carry: _Carry) -> Any:
    def step(leaves):
        return carry.leaves(body_fun(carry.tree(leaves))), None

    def test(leaves):
        going = entered(cond_fun(carry.tree(leaves)))
        if typeof(going).shape or typeof(going).dtype != bool:
            raise TypeError(f"{carry.what}: cond_fun must return one boolean, got {typeof(going)}")
        return going

    if _staging():
        draft, types = carry.recorded(step)
        condition = Draft(lambda *leaves: [test(leaves)], types)
        closed = _check_condition(carry, condition, types)
        body = draft.close(lambda r: [_as(x, t) for x, t in zip(r[0], types)])
        init = [_as(x, t) for x, t in zip(carry.init, types)]
        return carry.tree(while_p.bind_loop(closed, body, init))

    values, types = [as_value(x) for x in carry.init], None
    while _holds(going := test(values), carry, test, values):
        if types is None:
            values, types, (new, _) = carry.eagerly(step)
        else:
            new = carry.settled(types, step(values)[0])
        if isinstance(going, BatchTracer):
            with checking(current_scope(), False):
                new = cond_p.select(going, [new, values])
        values = new
    values, _ = carry.results(step, values)
    return carry.tree([forward_only_p.bind(x) if isinstance(x, Tracer) else x for x in values])


def _holds(going: Value, carry: _Carry, test: Callable, values: Sequence[Value]) -> bool:
    """Whether a condition, the `test` of these values, holds, for one element at least."""
    if typeof(going).variance:
        types = [typeof(x) for x in values]
        _check_condition(carry, Draft(lambda *leaves: [test(leaves)], types), types)
    while isinstance(going, BatchTracer):
        going = going.value
    return bool(numpy.any(concrete_value(going, CONDITION)))


def fori_loop(lower: Any, upper: Any, body_fun: Callable, init_val: Any) -> Any:
    """The value that is reached from `init_val` by `val = body_fun(i, val)` for i from `lower` to `upper - 1`.

    `val` is a tree, whose structure and types stay. With bounds that are known it is a `scan`; else a `while_loop`,
    which reverse mode does not differentiate.

    >>> float(fori_loop(0, 5, lambda i, x: x + i, 0.0))
    10.0
    """
    bounds = [x if _is_weak(x) else entered(x) for x in (lower, upper)]
    for t in map(typeof, bounds):
        if t.shape or t.dtype.kind not in "iu":
            raise TypeError(f"fori_loop: lower and upper must be integers, got {typeof(lower)} and {typeof(upper)}")
        _check_invariant("a bound of fori_loop", t)
    known = [_known(x, "a bound of fori_loop") for x in bounds]
    if None not in known:
        steps = numpy.arange(*map(int, known))
        carry = _Carry("fori_loop", body_fun, "init_val", init_val)
        return _scan(lambda val, i: (body_fun(i, val), None), carry, steps, len(steps), False)[0]
    first, last = (_numeric(x, typeof(other)) for x, other in zip(bounds, bounds[::-1]))
    carry = _Carry("fori_loop", body_fun, "(i, init_val)", (first, init_val))
    carry.paths[1:] = [path for path, _ in tree.flatten_with_paths(init_val, "init_val")[0]]
    return _while(lambda state: less(state[0], last), lambda state: (add(state[0], 1), body_fun(*state)), carry)[1]


def scan(
    f: Callable, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, unroll: int = 1
) -> tuple[Any, Any]:
    """A loop over the first axis of `xs`: `carry, y = f(carry, x)` for each x; returns `(carry, ys)`.

    `xs` and `ys` are trees of arrays, `ys` stacked from what the steps return; `carry` starts as `init`, a tree whose
    structure and types stay (a Python number takes the dtype that a step gives it). With `xs=None`, `length` says how
    many steps there are. `reverse` goes from the last element to the first. `unroll` means nothing here: a loop is
    run step by step, and recorded (under `make_tape`) as one operation, of one step.

    Raises TypeError for a carry that does not keep its type, ValueError where lengths are missing or differ.

    >>> import numpy as np
    >>> total, sums = scan(lambda s, x: (s + x, s + x), 0.0, np.array([1.0, 2.0, 3.0]))
    >>> float(total), sums
    (6.0, array([1., 3., 6.]))
    """
    leaves = tree.flatten_with_paths(xs, "xs")[0]
    values = [entered(x) for _, x in leaves]
    for (path, _), x in zip(leaves, values):
        if not typeof(x).shape:
            raise ValueError(f"scan: {path} has type {typeof(x)}, which has no axis to go along")
    lengths = {typeof(x).shape[0] for x in values}
    if length is not None:
        lengths.add(operator.index(length))
    if not lengths:
        raise ValueError("scan: without xs, length must say how many steps there are")
    if len(lengths) > 1:
        shown = ", ".join(f"{path}: {typeof(x)}" for (path, _), x in zip(leaves, values))
        raise ValueError(f"scan: lengths differ: {shown}" + ("" if length is None else f", length={length}"))
    return _scan(f, _Carry("scan", f, "init", init), tree.unflatten(tree.structure(xs), values), lengths.pop(), reverse)


def _scan(f: Callable, carry: _Carry, xs: Any, length: int, reverse: bool) -> tuple[Any, Any]:
    arrays, xs_structure = tree.flatten(xs)
    element_types = [_without_axis(typeof(x)) for x in arrays]
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

    if length and not _staging():
        columns, rows = [_elements(x) for x in arrays], []
        values: list[Value] = []
        types: list[ShapedArray] | None = None
        for i in _order(length, reverse):
            elements = [column[i] for column in columns]
            if types is None:
                _, types, (values, row) = carry.eagerly(step, *elements)
            else:
                new, row = step(values, *elements)
                values = carry.settled(types, new)
            rows.append([entered(y) for y in row])
        ys = [_stacked(column) for column in zip(*(rows[::-1] if reverse else rows))]
        values, ys = carry.results(step, values, element_types, ys)
        return carry.tree(values), tree.unflatten(ys_structure, ys)

    draft, types = carry.recorded(step, element_types)
    closed = draft.close(lambda r: [*[_as(x, t) for x, t in zip(r[0], types)], *map(entered, r[1])])
    groups = [[], [_as(x, t) for x, t in zip(carry.init, types)], arrays]
    outs = scan_p.bind_loop(closed, groups, {"length": length, "reverse": bool(reverse)})
    values, ys = cut(outs, len(types))
    return carry.tree(values), tree.unflatten(ys_structure, ys)
