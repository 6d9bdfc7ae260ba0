"""Operations that run bodies: the rules that all branches and loops share, and inlined calls.

The bodies of branches and loops are tapes (`BodyOperation`). Each rule changes the bodies, then applies the same
operation to them. The operations differ in how a body takes an operand: `CONST`, `CARRY` or `SCANNED`. An operand
that a rule adds is passed accordingly: a tangent like its primal, and a residual as one `SCANNED` for each step of a
loop. A carry is an operand and a result. If the operand has a tangent (is linear, is batched), so has the result, and
the reverse: a fixpoint.

The body of a checkpoint or of a function with a custom rule is a function, and runs inline (`Call`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from minidiff.control_flow.dead_code import depends_on_marked, has_effects, prune_tape, used_names
from minidiff.control_flow.partial_eval import (
    CARRY,
    CONST,
    SCANNED,
    NestedJVP,
    Operand,
    TracedBody,
    batched_body,
    broadcast_in_front,
    broadcast_unbatched,
    cast_to_types,
    jvp_of_body,
    merge,
    partial_eval,
    reshard_like,
    trace_batched,
)
from minidiff.core.forward import JVP, instantiate
from minidiff.core.interpreter import running
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import Scope, ranks
from minidiff.core.reverse import Linearize, transpose_values
from minidiff.core.states import NONE, AxisStates, combine_states
from minidiff.core.tape import Equation, Stage, Tape, tapes_of
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.core.vmap import Batch, BatchTracer
from minidiff.inputs.key_reuse import use_operands, used_inputs
from minidiff.ops.base import Linear
from minidiff.ops.dimensions import elementwise
from minidiff.ops.elementwise import add
from minidiff.ops.shape import moveaxis
from minidiff.values.lists import fixpoint, positions, scatter, select, split_list


class LinearPart(NamedTuple):
    """The linear equation that remains once the known part has run."""

    operands: list[Operand]
    params: dict
    results: list[int]  # the index of each result among the original results


def instantiate_all(values: Sequence[Value | None], types: Sequence[ShapedArray]) -> list[Value]:
    """Convert values to these types: zeros for None, pbroadcasts, shardings."""
    values = [x if isinstance(x, ShapedArray) else instantiate(x, t) for x, t in zip(values, types)]
    return list(map(reshard_like, cast_to_types(values, types), types))


#: The types of an operand of a body: if it is not batched, and if it is.
TypePair = tuple[ShapedArray, ShapedArray]


class Vectorized(NamedTuple):
    """The bodies of an operation, traced on batches, and the arguments to bind the operation to them."""

    leading: list[Value]  # the operands that the operation reads itself
    extra: list[Operand]  # further ones, which the bodies take first
    traced: list[TracedBody]
    batched: list[bool]  # of the operands, with the carries that become so
    out_batched: list[bool]
    params: dict

    def result_types(self, body: TracedBody, size: int) -> list[ShapedArray]:
        types = zip(map(typeof, body.result[0]), body.result[1], self.out_batched)
        return [type_of_batch(t, size) if wanted and not b else t for t, b, wanted in types]


class HigherOrder(Primitive):
    """An operation that runs bodies, whose types its operands match exactly."""

    is_higher_order = True
    multiple_results = True
    can_diverge = True  # whether, recorded for one element of a batch, it can run on each rank for its own elements
    operands_agree = False

    def _check_operands(self, types: Sequence[Any], expected: Sequence[ShapedArray]) -> None:
        types = [typeof(t) for t in types]
        if types != list(expected):
            raise TypeError(f"{self.name}: its body takes {list(expected)}, but the operands have the types {types}")


# ---------------------------------------------------------------- bodies that are tapes


class BodyOperation(HigherOrder):
    """An operation with tapes as parameters: branches, or the step of a loop.

    It reads its first `count_leading(params)` operands itself. The others are those of its `alternatives(params)`:
    tapes, of which each run executes one. `groups(params)` says how these take their operands, and give their results.
    `with_bodies(params, tapes, operands)` returns the parameters with other tapes, for these operands.
    """

    repeats = False  # whether a body runs several times

    # ------------------------------------------------ what differs

    def count_leading(self, params: dict) -> int:
        return 0

    def chosen_along(self, leading: Sequence[Value], params: dict) -> frozenset:
        """Return the mesh axes along which ranks may run different alternatives."""
        return NONE

    def branches(self, params: dict) -> list[Tape]:
        return [params["body"]]

    def groups(self, params: dict) -> tuple[list[int], list[int]]:
        raise NotImplementedError

    def with_bodies(self, params: dict, tapes: list[Tape], operands: Sequence[Operand]) -> dict:
        raise NotImplementedError

    def reversed_params(self, params: dict) -> dict:
        """Return the parameters of the backward pass."""
        return params

    def operands_by_body(self, count: int, params: dict) -> dict[str, list[int]] | None:
        """Return the operands, by index, that each body takes; None if one takes elements.

        The last body gives the results.
        """
        return None

    # ------------------------------------------------ changing the bodies

    def operands_of(self, values: Sequence[Any], params: dict) -> list[Operand]:
        """Return the operands of the alternatives."""
        return [Operand(x, group, i) for i, (x, group) in enumerate(zip(values, self.groups(params)[0]))]

    def change_branches(
        self, params: dict, mask: Sequence[bool], change: Callable[[Tape, list[bool]], tuple[Any, Sequence[bool]]]
    ) -> tuple[list, list[bool], list[bool]]:
        """Change each alternative, until every carry is marked as its result is.

        `change` takes a tape and which operands are marked. It returns anything, and which results are then marked.
        Returns what `change` returned for each alternative, and which operands and results are marked in the end.
        """
        carried = positions(group == CARRY for group in self.groups(params)[0])

        def attempt(mask):
            changed, marks = zip(*[change(tape, mask) for tape in self.branches(params)])
            out_mask = [any(flags) for flags in zip(*marks)]
            marked = dict(zip(carried, out_mask))
            return (list(changed), out_mask), [marked.get(i, False) for i in range(len(mask))]

        (changed, out_mask), mask = fixpoint(attempt, mask)
        return changed, mask, [*[mask[i] for i in carried], *out_mask[len(carried) :]]

    def sort_by_group(
        self, tapes: Sequence[Tape], operands: Sequence[Operand], results: Sequence[int], params: dict
    ) -> tuple[list[Operand], dict, list[int]]:
        """Sort operands and results by group, and drop operands that no tape uses.

        Returns the operands, the parameters, and which result of the tapes each result is.
        """
        names = set().union(*map(used_names, tapes))
        used = [
            i
            for i in sorted(range(len(operands)), key=lambda i: operands[i].group)
            if operands[i].group == CARRY or any(tape.inputs[i] in names for tape in tapes)
        ]
        order = sorted(range(len(results)), key=results.__getitem__)
        tapes = [Tape([t.inputs[i] for i in used], t.equations, [t.outputs[i] for i in order]) for t in tapes]
        operands = [operands[i] for i in used]
        return operands, self.with_bodies(params, tapes, operands), order

    def rebind(
        self,
        leading: Sequence[Value],
        closed: Sequence[tuple[Tape, list[Value]]],
        operands: Sequence[Operand],
        results: Sequence[int],
        params: dict,
    ) -> list[Value]:
        """Bind this operation to other tapes, given with the values of their first inputs.

        `results` are the groups of the tapes' results.
        """
        tapes, constants = merge([(tape, [Operand(x, CONST) for x in values]) for tape, values in closed])
        operands, params, order = self.sort_by_group(tapes, [*constants, *operands], results, params)
        if not (order or any(has_effects(eqn) for tape in tapes_of(params) for eqn in tape.equations)):
            return []
        types = [  # an array of elements keeps its sharding
            t if x.group != SCANNED else t.update(states=t.states, sharding=typeof(x.value).sharding)
            for x, t in zip(operands, self.branches(params)[0].in_types)
        ]
        args = instantiate_all([x.value for x in operands], types)
        outs = dict(zip(order, self.bind(*leading, *args, **params)))
        return [outs[i] for i in range(len(results))]

    # ------------------------------------------------ the rules

    def stage_body(self, outside: Stage, args: Sequence[Value], params: dict) -> list[Value]:
        return outside.record(self, args, params)

    def jvp_body(self, outside: JVP, args: Sequence[Value], params: dict) -> list[Value]:
        primals, tangents = outside.split(args)
        if all(t is None for t in tangents):
            return self.bind(*primals, **params)
        tangents = [t if t is None else reshard_like(t, typeof(x)) for t, x in zip(tangents, primals)]
        (leading, primals), (_, tangents) = (
            split_list(values, self.count_leading(params)) for values in (primals, tangents)
        )
        groups, results = self.groups(params)

        def change(body, active):
            f = jvp_of_body(body, lambda below: NestedJVP(below, outer=outside), active)
            traced_body = TracedBody(f, [*body.in_types, *select(body.in_types, active)])
            return traced_body, [t is not None for t in traced_body.result[1]]

        traced, active, out_active = self.change_branches(params, [t is not None for t in tangents], change)
        types, tangent_groups = select(self.branches(params)[0].out_types, out_active), select(results, out_active)
        closed = [b.close(lambda r: [*r[0], *instantiate_all(select(r[1], out_active), types)]) for b in traced]
        operands = self.operands_of(primals, params)
        operands += [Operand(t, group) for t, group in select(zip(tangents, groups), active)]
        outs, out_tangents = split_list(
            self.rebind(leading, closed, operands, [*results, *tangent_groups], params), len(results)
        )
        return [outside.join(x, t) for x, t in zip(outs, scatter(out_tangents, out_active))]

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        linear = [outside.owns(x) for x in args]
        if not any(linear):
            return self.bind(*args, **params)
        outs, part = self.split(args, linear, params)
        if part.results:
            leading, operands = split_list([x.value for x in part.operands], self.count_leading(params))
            operands = cast_to_types(operands, self.branches(part.params)[0].in_types)
            recorded = outside.record(self, [*leading, *operands], part.params)
            outs = {**dict(zip(part.results, recorded)), **outs}
        return [outs[i] for i in range(len(outs))]

    def split(self, args: Sequence[Any], linear: Sequence[bool], params: dict) -> tuple[dict[int, Value], LinearPart]:
        """Run the part that does not depend on `linear` operands; return its results by index, and the linear part.

        Linear operands may be types, or names on a linear tape. The linear part takes residuals. Those known outside
        the body are passed on unchanged, and the others are further results of the known part.
        """
        leading, args = split_list(args, self.count_leading(params))
        results = self.groups(params)[1]
        parts, linear, is_linear = self.change_branches(params, linear[len(leading) :], partial_eval)
        known = [not linear_out for linear_out in is_linear]
        operands = self.operands_of(args, params)
        axes = self.chosen_along(leading, params)
        tapes, passed = merge([p.linear_tape(is_linear, operands, self.repeats, axes) for p in parts])
        saved = [x for x in passed if any(p.stage.owns(x.value) for p in parts)]
        known_tapes = [
            # Another branch saves something else: zeros, which are not used.
            p.known_tape([*select(p.outs, known), *[x.value if p.stage.owns(x.value) else x.value.type for x in saved]])
            for p in parts
        ]
        fixed = select(operands, [not linear_in for linear_in in linear])
        known_outs = self.rebind(
            leading, known_tapes, fixed, [*select(results, known), *[x.group for x in saved]], params
        )
        outs, residuals = split_list(known_outs, sum(known))
        values = dict(zip([id(x.value) for x in saved], residuals))
        passed = [x._replace(value=values.get(id(x.value), x.value)) for x in passed]
        operands = [*passed, *select(operands, linear)]
        operands, params, _ = self.sort_by_group(tapes, operands, select(results, is_linear), params)
        part = LinearPart([*[Operand(x, CONST) for x in leading], *operands], params, positions(is_linear))
        return dict(zip(positions(known), outs)), part

    def transpose(self, cts: Sequence[Value | None], operands: Sequence[Any], params: dict) -> Sequence[Value | None]:
        leading, operands = split_list(operands, self.count_leading(params))
        if any(isinstance(x, ShapedArray) for x in leading):
            return super().transpose(cts, leading, params)
        is_type = [isinstance(x, ShapedArray) for x in operands]
        _, linear, _ = self.change_branches(params, is_type, lambda body, mask: (None, depends_on_marked(body, mask)))
        groups, results = self.groups(params)
        if not all(is_linear for is_linear, group in zip(linear, groups) if group == CARRY):
            return self._transpose_after_split(cts, operands, is_type, params)
        fixed = [not is_linear for is_linear in linear]
        cts_given = [group == CARRY or ct is not None for ct, group in zip(cts, results)]
        # A cotangent of a shared operand is a sum over the steps, which is a carry.
        summed = [self.repeats and group == CONST for group in select(groups, linear)]
        in_groups = [CARRY if is_summed else group for is_summed, group in zip(summed, select(groups, linear))]
        traced, types = self._transpose_bodies(linear, summed, cts_given, params)
        wanted = [group == CARRY or any(b.result[i] is not None for b in traced) for i, group in enumerate(in_groups)]
        types, in_groups = select(types, wanted), select(in_groups, wanted)
        closed = [b.close(lambda r: instantiate_all(select(r, wanted), types), prune=True) for b in traced]
        values = [
            *[Operand(None, CARRY)] * sum(summed),
            *select(self.operands_of(operands, params), fixed),
            *[Operand(ct, group) for ct, group in select(zip(cts, results), cts_given)],
        ]
        in_cts = scatter(
            scatter(self.rebind(leading, closed, values, in_groups, self.reversed_params(params)), wanted), linear
        )
        return [*[None] * len(leading), *[ct if x else None for ct, x in zip(in_cts, is_type)]]

    def _transpose_bodies(
        self, linear: Sequence[bool], summed: Sequence[bool], cts_given: Sequence[bool], params: dict
    ) -> tuple[list[TracedBody], list[ShapedArray]]:
        """Trace the backward passes of sums so far, known operands and cotangents; also return the results' types.

        Sums are sharded like their terms.
        """
        fixed = [not is_linear for is_linear in linear]
        types = [t.cotangent for t in select(self.branches(params)[0].in_types, linear)]

        def transposed(body):
            def f(*values):
                so_far, known, cts = split_list(values, sum(summed), sum(fixed))
                in_cts = transpose_values(body, linear, scatter(known, fixed), scatter(cts, cts_given))
                terms = zip(scatter(so_far, summed), in_cts)
                return [ct if sum is None else sum if ct is None else add(sum, ct) for sum, ct in terms]

            ct_types = [t.cotangent for t in select(body.out_types, cts_given)]
            return TracedBody(f, [*select(types, summed), *select(body.in_types, fixed), *ct_types])

        while True:
            traced, before = [transposed(body) for body in self.branches(params)], types
            sums = zip(types, traced[0].result, summed)
            types = [t.update(sharding=typeof(x).sharding) if is_summed else t for t, x, is_summed in sums]
            if [t.sharding for t in types] == [t.sharding for t in before]:
                return traced, types

    def _transpose_after_split(
        self, cts: Sequence[Value | None], operands: Sequence[Any], linear: Sequence[bool], params: dict
    ) -> list[Value | None]:
        """Compute the carries that no linear operand affects, then transpose the rest."""
        _, part = self.split(operands, linear, params)
        out: list[Value | None] = [None] * len(operands)
        if part.results:
            in_cts = self.transpose([cts[i] for i in part.results], [x.value for x in part.operands], part.params)
            for x, ct in zip(part.operands, in_cts):
                if x.origin is not None:
                    out[x.origin] = ct
        return out

    def batch_body(self, outside: Batch, args: Sequence[Value], params: dict) -> list[Value]:
        batched = list(map(outside.owns, args))
        (leading, inputs), (_, owned) = (split_list(values, self.count_leading(params)) for values in (args, batched))
        size, results = outside.size_of_batch, self.groups(params)[1]

        def in_front(x):
            """The batch axis is the first; in an array of elements, it is the second."""
            value = outside.in_front(x.value)
            return x._replace(value=moveaxis(value, 0, 1) if x.group == SCANNED else value)

        operands = [in_front(x) if is_batched else x for x, is_batched in zip(self.operands_of(inputs, params), owned)]
        varies = outside.is_block and any(typeof(x).variance for x in args)  # the bodies were recorded as if none did
        if not (varies or any(batched) or _runs_along(outside, params)):
            return self.bind(*args, **params)
        if (outs := self.map_elements(outside, args, params)) is not None:
            return outs
        alone = self._types_on_ranks(leading, operands, params) if varies else self.branches(params)[0].in_types
        types = [
            (t, _with_states(_type_of_run(x), t.states) if is_batched else type_of_batch(t, size))
            for t, x, is_batched in zip(alone, operands, owned)
        ]
        new, out_types = self._vectorize_until_stable(outside, leading, batched, types, params)
        operands = [
            x._replace(value=broadcast_in_front(x.value, size)) if b and not was_batched else x
            for x, b, was_batched in zip(operands, new.batched, owned)
        ]
        closed = [
            b.close(lambda r: instantiate_all(broadcast_unbatched(r[0], r[1], new.out_batched, size), out_types))
            for b in new.traced
        ]
        outs = self.rebind(new.leading, closed, [*new.extra, *operands], results, new.params)
        axes = [int(group == SCANNED) for group in results]
        return [BatchTracer(outside, x, axis) if b else x for x, axis, b in zip(outs, axes, new.out_batched)]

    def map_elements(self, outside: Batch, args: Sequence[Value], params: dict) -> list[Value] | None:
        """Run the operation by ranks, each for its elements of a sharded batch; None if ranks cannot do that alone."""
        if not self.can_diverge or _runs_along(outside, params) or not all(map(_can_diverge, equations_within(params))):
            return None
        return ranks.map_elements(outside, args, lambda *values: self.bind(*values, **params))

    def _types_on_ranks(self, leading: Sequence[Value], operands: Sequence[Operand], params: dict) -> list[ShapedArray]:
        """Return the types in which a body takes operands: the recorded ones, varying as operands and the choice do."""
        axes, types = AxisStates.of(self.chosen_along(leading, params)), self.branches(params)[0].in_types
        states = [combine_states(t.states, typeof(x.value).states, axes) for x, t in zip(operands, types)]
        return list(map(_with_states, types, states))

    def _vectorize_until_stable(
        self, outside: Batch, leading: list[Value], batched: Sequence[bool], types: list[TypePair], params: dict
    ) -> tuple[Vectorized, list[ShapedArray]]:
        """Vectorize the bodies, and return the types to which the results of each are cast and resharded.

        As in a loop that is recorded, a carry varies along the mesh axes along which a step's result does, and a
        sharded carry takes the sharding of the first step's result.
        """
        carried, resharded = positions(group == CARRY for group in self.groups(params)[0]), False
        while True:
            new = self.vectorize(outside, leading, batched, types, params)
            axes = AxisStates.of(self.chosen_along(new.leading, new.params))
            columns = [*zip(*[new.result_types(body, outside.size_of_batch) for body in new.traced])]
            out_types = [next((t for t in column if t.sharding is not None), column[0]) for column in columns]
            states = [combine_states(axes, *[t.states for t in column]) for column in columns]
            out_types = list(map(_with_states, out_types, states))
            is_stable = True
            for i, out in zip(carried, out_types):
                b, pair = new.batched[i], list(types[i])
                sharding = out.sharding if b and not resharded else pair[b].sharding
                t = pair[b].update(states=combine_states(pair[b].states, out.states), sharding=sharding)
                is_stable &= t == pair[b] and t.sharding == pair[b].sharding
                pair[b] = t
                types[i] = pair[0], pair[1]
            if is_stable:
                return new, [*[types[i][new.batched[i]] for i in carried], *out_types[len(carried) :]]
            resharded = True

    def vectorize(
        self, outside: Batch, leading: list[Value], batched: Sequence[bool], types: Sequence[TypePair], params: dict
    ) -> Vectorized:
        """Vectorize the bodies: trace them on batches."""
        change = lambda body, mask: trace_batched(body, types, outside, mask)  # noqa: E731
        return Vectorized(leading, [], *self.change_branches(params, batched[len(leading) :], change), params)

    def without_unused_results(self, eqn: Equation, used: Sequence[bool]) -> Equation:
        """Drop unused results, carries that no used one needs, and unused operands."""
        leading, atoms = split_list(eqn.inputs, self.count_leading(eqn.params))
        groups, results = self.groups(eqn.params)
        carried = positions(group == CARRY for group in groups)

        def attempt(wanted):
            tapes = [Tape(t.inputs, t.equations, select(t.outputs, wanted)) for t in self.branches(eqn.params)]
            tapes = [prune_tape(t) for t in tapes]
            names = set().union(*map(used_names, tapes))
            needed = [any(t.inputs[i] in names for t in tapes) for i in carried]
            return tapes, [*needed, *wanted[len(carried) :]]

        tapes, wanted = fixpoint(attempt, used)
        dropped = {i for i, is_wanted in zip(carried, wanted) if not is_wanted}
        remaining = [i not in dropped for i in range(len(groups))]
        operands = select([Operand(a, group, i) for i, (a, group) in enumerate(zip(atoms, groups))], remaining)
        tapes = [Tape(select(t.inputs, remaining), t.equations, t.outputs) for t in tapes]
        operands, params, _ = self.sort_by_group(tapes, operands, select(results, wanted), eqn.params)
        return Equation(self, [*leading, *[x.value for x in operands]], params, select(eqn.outputs, wanted), eqn.source)


def type_of_batch(t: ShapedArray, size: int) -> ShapedArray:
    """Return the type of an array of `size` elements of type t, along a new first axis."""
    return t.update(shape=(size, *t.shape), sharding=t.sharding and t.sharding.of_stack())


def type_of_element(t: ShapedArray) -> ShapedArray:
    """Return the type of an array's elements along its first axis, which is whole."""
    return t.update(shape=t.shape[1:], sharding=t.sharding and t.sharding.of_part(t.ndim))


def _with_states(t: ShapedArray, states: AxisStates) -> ShapedArray:
    """Return the type with other states along mesh axes, and its sharding."""
    return t if t.states == states else t.update(states=states, sharding=t.sharding)


def _type_of_run(x: Operand) -> ShapedArray:
    """Return the type of an operand in one run of a body."""
    return type_of_element(typeof(x.value)) if x.group == SCANNED else typeof(x.value)


def equations_within(params: dict) -> Iterator[Equation]:
    """Yield the equations of bodies, and those of bodies within them."""
    for tape in tapes_of(params):
        for eqn in tape.equations:
            yield eqn
            yield from equations_within(eqn.params)


def _can_diverge(eqn: Equation) -> bool:
    """Whether ranks can run an equation alone. All ranks run a `shard_map`, and effects."""
    primitive = eqn.primitive
    by_all = primitive.has_effect or primitive.body_scope(eqn.params) is not None
    return not by_all and getattr(primitive, "can_diverge", True)


def _runs_along(batch: Batch, params: dict) -> bool:
    """Whether the bodies have a collective over the axis of a batch: their results may differ between its elements."""
    named = batch.axis_name is not None
    return named and any(batch.runs_along(eqn.primitive, eqn.params) for eqn in equations_within(params))


# ---------------------------------------------------------------- bodies that run inline

Body = Callable[..., list]  # leaves -> leaves


class Call(HigherOrder):
    """An operation that runs its parameter `body`, a function of leaves or a Tape, inline.

    To the current interpreter, the body is part of the program around it. Under evaluation it runs on concrete values,
    which Python's `if` sees. Traced values that it closes over are further inputs: the interpreters that continue the
    outer ones inside the body lift them. On a tape the body becomes a tape.
    """

    def is_checked_in(self, scope: Scope, params: dict) -> bool:
        return False  # each operation of the body is checked

    def evaluate(self, args: Sequence[Value], params: dict) -> list[Value]:
        return params["body"](*args)

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        """Run the body: its operations on tangents are linear, and recorded."""
        if not any(outside.owns(x) for x in args):
            return self.bind(*args, **params)
        with running(outside):
            return params["body"](*args)

    def transpose(self, cts: Sequence[Value | None], operands: Sequence[Any], params: dict) -> list[Value | None]:
        linear = [isinstance(x, ShapedArray) for x in operands]
        return scatter(transpose_values(params["body"], linear, operands, cts), linear)

    def batch_body(self, outside: Batch, args: Sequence[Value], params: dict) -> list[Value]:
        batched = [outside.owns(x) for x in args]
        values = [outside.in_front(x) for x in args]
        out_batched: list[bool] = []
        outs = self.bind(*values, **self.batched_params(params, outside, batched, out_batched))
        return [BatchTracer(outside, x, 0) if b else x for x, b in zip(outs, out_batched or [True] * len(outs))]

    def batched_params(self, params: dict, outside: Batch, batched: Sequence[bool], results: list[bool]) -> dict:
        """Return the parameters with the body vectorized; its first run fills `results` with which ones are batched."""
        return {**params, "body": batched_body(params["body"], outside, batched, results)}

    def stage_body(self, outside: Stage, args: Sequence[Value], params: dict) -> list[Value]:
        # As it runs: an eager program's values are known, and freed, inside of the call.
        if isinstance(outside, Stage) and outside.monitor.eager:
            with running(outside):
                return params["body"](*args)
        traced_body = TracedBody(params["body"], map(typeof, args))
        use_operands(self.name, args, used_inputs(traced_body.stage.inputs))
        tape, constants = traced_body.close(lambda outs: outs)
        return outside.record(self, [*constants, *args], self.staged_params(params, tape, len(constants)))

    def staged_params(self, params: dict, tape: Tape, constants: int) -> dict:
        """Return the parameters with the body as a tape that takes its constants first."""
        return {**params, "body": tape}

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        self._check_operands(types, params["body"].in_types)
        return params["body"].out_types


def label_operation(
    name: str, transpose: Callable = lambda ct, x, **mark: [ct], copy: Callable | None = None
) -> Linear:
    """Return an identity operation with a label, which marks values of a body; `copy` copies the value."""
    return Linear(
        name,
        copy or (lambda x, **mark: x),
        lambda x, **mark: (x.shape, x.dtype),
        transpose,
        lambda primitive, args, batched, **mark: primitive.bind(*args, **mark),
        sharding=elementwise,
        shares_memory=copy is None,
    )
