"""shard_map: a function of blocks, run on every rank of a mesh.

It is an operation with the same rules as any other, whose parameter is a body:

========== =====================================================================================
evaluate   split the inputs by `in_specs`, run the body on the ranks, assemble by `out_specs`
jvp        the body's jvp; the tangents have the specs of their primals
linearise  the body linearised; what the linear part needs (residuals) stays on its ranks
transpose  the body's linear tape transposed, specs exchanged
batch      the body vectorised, with one more dimension in every spec
stage      the body on a tape of its own
========== =====================================================================================

Because types say exactly where values may differ from rank to rank, the boundary needs no correction:
what is unmapped on the way in is invariant, and so is its cotangent on the way out. Without types
(`check_rep=False`) that is not known, and transposition divides and sums at the boundary instead: the
recipe of the JEP's problem statement, kept to compare with.

A body is a function of blocks that returns its results *and their specs*: how many residuals there will
be is known only when it has run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from collectives.ops import untyped_psum_p
from minidiff import tree
from minidiff.batching import Batch, BatchTracer
from minidiff.core import (
    LeakedTracerError,
    Primitive,
    Scope,
    ShapedArray,
    Tracer,
    Value,
    current_interpreter,
    current_scope,
    is_scalar_constant,
    leak_message,
    name_of,
    transforming,
    typeof,
)
from minidiff.drafts import names_used
from minidiff.forward import JVP, as_value
from minidiff.ops.elementwise import divide
from minidiff.ops.shape import moveaxis
from minidiff.optimize import narrows, without_unused
from minidiff.reverse import Linearize, backward_pass
from minidiff.staging import Stage
from minidiff.tape import Equation, Tape, Var
from spmd.interpreter import SPMD, RankTracer
from spmd.mesh import Mesh
from spmd.partition import (
    P,
    PartitionSpec,
    block_type,
    check_divides,
    check_rank,
    check_spec,
    global_type,
    is_spec,
    laid_out,
)
from spmd.redistribution import settled
from spmd.sharded_array import ShardedArray
from spmd.variance import settle_result

Specs = tuple[PartitionSpec, ...]
Body = Callable[..., tuple[list, Specs]]  # blocks -> (results, their specs)


class StageBody(Stage):
    """Writes the tape of a body: whatever the body closes over is an input."""

    def _adopt(self, x: Tracer) -> Value:
        x = self.outer.adopt(x)
        if x.interpreter.ended:
            raise LeakedTracerError(leak_message(x))
        return self.adopt_own(x)


class ShardMap(Primitive):
    """The operation. Parameters: `body`, a Body or a Tape; `mesh`; `in_specs`; `out_specs` (of a Tape); `check_rep`."""

    has_body = True
    multiple_results = True
    lifts_operands = False

    # ------------------------------------------------ running

    def evaluate(self, args: Sequence[Value], params: dict) -> list[Value]:
        _check_outermost()
        mesh, in_specs = params["mesh"], params["in_specs"]
        interpreter = SPMD(mesh, params["check_rep"])
        blocks = [_place(interpreter, x, spec) for x, spec in zip(args, in_specs)]
        with transforming(interpreter):
            outs, out_specs = run_body(params, blocks)
        return [_take(interpreter, x, spec) for x, spec in zip(outs, out_specs)]

    # ------------------------------------------------ forward mode

    def jvp_body(self, outside: JVP, args: Sequence[Value], params: dict) -> list[Value]:
        primals, tangents = outside.split(args)
        moving = [i for i, t in enumerate(tangents) if t is not None]
        out_moving: list[int] = []

        def body(*blocks):
            inside = type(outside)(current_interpreter(), outer=outside)
            block_tangents = dict(zip(moving, blocks[len(primals) :]))
            with transforming(inside):
                outs, specs = run_body(
                    params, [inside.join(p, block_tangents.get(i)) for i, p in enumerate(blocks[: len(primals)])]
                )
            out_primals, out_tangents = inside.split(outs)
            out_moving.extend(i for i, t in enumerate(out_tangents) if t is not None)
            return (
                [*out_primals, *[out_tangents[i] for i in out_moving]],
                (*specs, *[specs[i] for i in out_moving]),
            )

        results = self._bind_body(
            [*primals, *[tangents[i] for i in moving]],
            params,
            body,
            (*params["in_specs"], *[params["in_specs"][i] for i in moving]),
        )
        count = len(results) - len(out_moving)
        out_tangents = dict(zip(out_moving, results[count:]))
        return [outside.join(p, out_tangents.get(i)) for i, p in enumerate(results[:count])]

    # ------------------------------------------------ reverse mode

    def linearize_body(self, outside: Linearize, args: Sequence[Value], params: dict) -> list[Value]:
        """Run now what depends on values alone; record what depends on `outside`'s names as one linear equation."""
        mesh, in_specs, typed = params["mesh"], params["in_specs"], params["check_rep"]
        known = [i for i, x in enumerate(args) if not outside.owns(x)]
        linear = [i for i, x in enumerate(args) if outside.owns(x)]
        ran: LinearBody

        def body(*blocks):
            nonlocal ran
            inside = Linearize(current_interpreter(), outer=outside)
            values = dict(zip(known, blocks))
            for i in linear:
                values[i] = inside.new_input(block_type(args[i].type, in_specs[i], mesh.shape, typed))
            with transforming(inside):
                outs, specs = run_body(params, [values[i] for i in range(len(args))])
                ran = LinearBody(inside, outs, specs, dict(zip(map(id, blocks), known)), mesh, typed)
            return ran.results, ran.result_specs

        results = self._bind_body([args[i] for i in known], params, body, tuple(in_specs[i] for i in known))
        outs = dict(zip(ran.known_outs, results))
        if ran.linear_outs:
            residuals, residual_specs = ran.residuals(args, in_specs, results[len(ran.known_outs) :])
            recorded = outside.record(
                self,
                [*residuals, *[args[i] for i in linear], *ran.captured],
                {
                    "mesh": mesh,
                    "in_specs": (*residual_specs, *[in_specs[i] for i in linear], *[P()] * len(ran.captured)),
                    "out_specs": tuple(ran.specs[i] for i in ran.linear_outs),
                    "check_rep": typed,
                    "body": ran.tape,
                },
            )
            outs.update(zip(ran.linear_outs, recorded))
        return [outs[i] for i in range(len(outs))]

    def transpose(self, cts: Sequence[Value | None], operands: Sequence[Any], params: dict) -> list[Value | None]:
        mesh, in_specs, typed = params["mesh"], params["in_specs"], params["check_rep"]
        tape, out_specs = params["body"], params["out_specs"]
        linear = [isinstance(x, ShapedArray) for x in operands]
        fixed = [i for i, yes in enumerate(linear) if not yes]
        wanted = [i for i, yes in enumerate(linear) if yes]
        given = [i for i, ct in enumerate(cts) if ct is not None]
        found: list[int] = []

        def body(*blocks):
            values = dict(zip(fixed, blocks))
            block_cts = dict(zip(given, blocks[len(fixed) :]))
            if not typed:
                block_cts = {i: _unscale(ct, out_specs[i], mesh) for i, ct in block_cts.items()}
            in_cts = backward_pass(
                tape, linear, [values.get(i) for i in range(len(operands))], [block_cts.get(i) for i in range(len(cts))]
            )
            by_input = {i: ct for i, ct in zip(wanted, in_cts) if ct is not None}
            if not typed:
                by_input = {i: _sum_unmapped(ct, in_specs[i], mesh) for i, ct in by_input.items()}
            found.extend(by_input)
            return list(by_input.values()), tuple(in_specs[i] for i in by_input)

        results = self._bind_body(
            [*[operands[i] for i in fixed], *[cts[i] for i in given]],
            params,
            body,
            (*[in_specs[i] for i in fixed], *[out_specs[i] for i in given]),
        )
        by_input = dict(zip(found, results))
        return [by_input.get(i) for i in range(len(operands))]

    # ------------------------------------------------ vmap

    def batch_body(self, outside: Batch, args: Sequence[Value], params: dict) -> list[Value]:
        in_specs = params["in_specs"]
        batched = [outside.owns(x) for x in args]
        values = [_batch_in_front(x, spec) if b else x for x, spec, b in zip(args, in_specs, batched)]
        out_axes: list[int | None] = []

        def body(*blocks):
            inside = Batch(current_interpreter(), outside.size_of_batch, outer=outside)
            with transforming(inside):
                outs, specs = run_body(params, [BatchTracer(inside, x, 0) if b else x for x, b in zip(blocks, batched)])
            out_axes.extend(len(s.lead) if inside.owns(x) else None for x, s in zip(outs, specs))
            return (
                [moveaxis(x.value, x.axis, 0) if inside.owns(x) else x for x in outs],
                tuple(s.batched() if inside.owns(x) else s for x, s in zip(outs, specs)),
            )

        specs = tuple(s.batched() if b else s for s, b in zip(in_specs, batched))
        results = self._bind_body(values, params, body, specs)
        return [x if axis is None else BatchTracer(outside, x, axis) for x, axis in zip(results, out_axes)]

    # ------------------------------------------------ tapes

    def stage_body(self, outside: Stage, args: Sequence[Value], params: dict) -> list[Value]:
        mesh, in_specs, typed = params["mesh"], params["in_specs"], params["check_rep"]
        inside = StageBody(None, outer=outside)
        inside.scope = Scope(mesh.shape, typed)
        inside.scope.bottom = inside
        blocks = [inside.new_input(block_type(typeof(x), spec, mesh.shape, typed)) for x, spec in zip(args, in_specs)]
        with transforming(inside):
            outs, out_specs = run_body(params, blocks)
        if not outs:
            return []
        tape, constants = inside.tape(outs).close()
        return outside.record(
            self,
            [*constants, *args, *inside.captured],
            {
                "mesh": mesh,
                "in_specs": (*[P()] * len(constants), *in_specs, *[P()] * len(inside.captured)),
                "out_specs": tuple(out_specs),
                "check_rep": typed,
                "body": tape,
            },
        )

    def typecheck(self, types: Sequence[ShapedArray], params: dict) -> list[ShapedArray]:
        mesh, typed, tape = params["mesh"], params["check_rep"], params["body"]
        blocks = [block_type(t, spec, mesh.shape, typed) for t, spec in zip(types, params["in_specs"])]
        if blocks != tape.in_types:
            raise TypeError(f"shard_map: its body takes {tape.in_types}, but the blocks have the types {blocks}")
        return [
            laid_out(global_type(t, spec, mesh.shape), mesh, spec)
            for t, spec in zip(tape.out_types, params["out_specs"])
        ]

    def check_variance(self, types: Sequence[ShapedArray], params: dict) -> None:
        params["body"].check(params["check_rep"])

    def show_params(self, params: dict) -> str:
        mesh = ", ".join(f"{a}: {n}" for a, n in params["mesh"].shape.items())
        shown = f"mesh=({mesh}), in_specs={_show(params['in_specs'])}, out_specs={_show(params['out_specs'])}"
        return shown if params["check_rep"] else shown + ", check_rep=False"

    def _bind_body(self, args: Sequence[Value], params: dict, body: Body, in_specs: Specs) -> list[Value]:
        """The same operation with another body."""
        return self.bind(*args, body=body, mesh=params["mesh"], in_specs=in_specs, check_rep=params["check_rep"])

    def body_scope(self, params: dict) -> Scope:
        """What a tape of the body is rewritten in."""
        return Scope(params["mesh"].shape, params["check_rep"])


shard_map_p = ShardMap("shard_map")


@narrows(shard_map_p)
def _narrowed(eqn: Equation, used: list[bool]) -> Equation:
    """A shard_map of the results that are used, and of the arguments that these need: no rank computes others."""
    params, wanted = eqn.params, [i for i, yes in enumerate(used) if yes]
    body = params["body"]
    smaller = without_unused(Tape(body.inputs, body.equations, [body.outputs[i] for i in wanted]))
    needed = names_used(smaller)
    kept = [i for i, v in enumerate(body.inputs) if v in needed]
    specs = {k: tuple(params[k][i] for i in chosen) for k, chosen in (("in_specs", kept), ("out_specs", wanted))}
    smaller = Tape([body.inputs[i] for i in kept], smaller.equations, smaller.outputs)
    inputs, outputs = [eqn.inputs[i] for i in kept], [eqn.outputs[i] for i in wanted]
    return Equation(eqn.primitive, inputs, {**params, **specs, "body": smaller}, outputs)


def run_body(params: dict, blocks: Sequence[Value]) -> tuple[list, Specs]:
    """Apply a body to blocks: its results, and their specs."""
    body = params["body"]
    return (body(*blocks), params["out_specs"]) if isinstance(body, Tape) else body(*blocks)


def _show(specs: Specs) -> str:
    return f"({', '.join(map(repr, specs))}{',' if len(specs) == 1 else ''})"


# ---------------------------------------------------------------- linearising


class LinearBody:
    """A body that has run under `inside`, taken apart: results that are known, and the tape of those that are linear.

    What the tape needs of the known part are its residuals. One that is an input of the body, or was closed over, is
    taken from outside again; a view of such a one is made again on the tape; only the others are further results.
    """

    def __init__(
        self, inside: Linearize, outs: list, specs: Specs, argument_of: dict[int, int], mesh: Mesh, typed: bool
    ):
        self.specs = specs
        self.captured = inside.captured
        self.known_outs = [i for i, x in enumerate(outs) if not inside.owns(x)]
        self.linear_outs = [i for i, x in enumerate(outs) if inside.owns(x)]
        self._argument_of = argument_of  # id of a block -> which argument of the shard_map it is a block of
        self._closed_over = inside.below.adopted()  # id of a value -> the value outside that it stands for
        self._scope = inside.scope
        self._sources: list[tuple[str, Any]] = []  # where each input of the tape that is no tangent comes from
        self._inputs: list[Var] = []
        self._views: list[Equation] = []
        self._kept: list[Value] = []
        tape, constants = inside.tape([outs[i] for i in self.linear_outs]).close()
        self._names = {id(c): var for var, c in zip(tape.inputs, constants)}
        self._defined: set[Var] = set()
        for c in constants:
            self._define(c)
        self.tape = Tape([*self._inputs, *tape.inputs[len(constants) :]], [*self._views, *tape.equations], tape.outputs)
        self.kept_specs = [
            PartitionSpec.stacked(*_in_order(mesh, typeof(x).variance if typed else mesh.axis_names))
            for x in self._kept
        ]
        self.results = [*[outs[i] for i in self.known_outs], *self._kept]
        self.result_specs = (*[specs[i] for i in self.known_outs], *self.kept_specs)

    def _define(self, x: Value) -> Var:
        """The name of a residual on the linear tape, once it is an input there, or the result of a view."""
        var = self._names.setdefault(id(x), Var(typeof(x)))
        if var in self._defined:
            return var
        self._defined.add(var)
        view = self._scope.view_of(x)
        if id(x) in self._argument_of:
            self._input(var, "argument", self._argument_of[id(x)])
        elif id(x) in self._closed_over:
            self._input(var, "closed over", self._closed_over[id(x)])
        elif not isinstance(x, Tracer):
            self._input(var, "closed over", x)
        elif view is not None:
            primitive, operand, params = view
            name = operand if is_scalar_constant(operand) else self._define(operand)
            self._views.append(Equation(primitive, [name], params, [var]))
        else:
            self._input(var, "kept", len(self._kept))
            self._kept.append(x)
        return var

    def _input(self, var: Var, source: str, what: Any) -> None:
        self._inputs.append(var)
        self._sources.append((source, what))

    def residuals(self, args: Sequence[Value], in_specs: Specs, kept: Sequence[Value]) -> tuple[list[Value], Specs]:
        """The operands, outside, for the residuals of the linear tape, and their specs."""
        find = {
            "argument": lambda i: (args[i], in_specs[i]),
            "closed over": lambda x: (x, P()),
            "kept": lambda i: (kept[i], self.kept_specs[i]),
        }
        pairs = [find[source](what) for source, what in self._sources]
        return [x for x, _ in pairs], tuple(spec for _, spec in pairs)


def _in_order(mesh: Mesh, axes: Any) -> tuple[str, ...]:
    return tuple(a for a in mesh.axis_names if a in axes)


# ---------------------------------------------------------------- the old recipe's boundary


def _unmapped(spec: PartitionSpec, mesh: Mesh) -> tuple[str, ...]:
    return tuple(a for a in mesh.axis_names if a not in spec.axes)


def _unscale(ct: Value, spec: PartitionSpec, mesh: Mesh) -> Value:
    """A cotangent that each of several ranks has whole: each counts for its part."""
    copies = math.prod(mesh.shape[a] for a in _unmapped(spec, mesh))
    return divide(ct, copies) if copies != 1 else ct


def _sum_unmapped(ct: Value, spec: PartitionSpec, mesh: Mesh) -> Value:
    """The cotangent of an input that several ranks were given whole: the sum of theirs."""
    axes = _unmapped(spec, mesh)
    return untyped_psum_p.bind(ct, axes=axes, size=math.prod(mesh.shape[a] for a in axes)) if axes else ct


# ---------------------------------------------------------------- blocks in and out


def _place(interpreter: SPMD, x: Value, spec: PartitionSpec) -> RankTracer:
    """This array's blocks, as a value of the body."""
    ranks = interpreter.mesh.ranks
    if isinstance(x, ShardedArray):
        if x.mesh is interpreter.mesh and x.spec == spec:
            return RankTracer(interpreter, x.data, x.held)
        x = x.gather()
    if isinstance(x, Tracer):
        interpreter.operand(x)  # raises: a tracer at the bottom has leaked
    data, held = ranks.place(numpy.asarray(x), spec.dims(numpy.ndim(x)))
    if spec.lead:
        data = ranks.reshape(data, held, ranks.block_shape(data, held)[len(spec.lead) :])
    return RankTracer(interpreter, data, held)


def _take(interpreter: SPMD, x: Value, spec: PartitionSpec) -> Value:
    """A result of the body as an array: plain if it is mapped over no axis, else sharded."""
    ranks = interpreter.mesh.ranks
    data, held = interpreter.operand(x)
    wanted = ranks.ordered(spec.axes)
    data = ranks.settle(data, held, wanted)
    if not wanted:
        return data
    block = ShapedArray(ranks.block_shape(data, wanted), data.dtype)
    return ShardedArray(interpreter.mesh, spec, block, data)


def _batch_in_front(x: BatchTracer, spec: PartitionSpec) -> Value:
    """A batched argument's value, its batch axis right behind the dimensions that count ranks."""
    return x.value if x.axis == len(spec.lead) else moveaxis(x.value, x.axis, len(spec.lead))


# ---------------------------------------------------------------- what users call


def shard_map(f: Callable, *, mesh: Mesh, in_specs: Any, out_specs: Any, check_rep: bool = True) -> Callable:
    """`f` run on every rank of `mesh`, each on its blocks of the arguments.

    `in_specs` says for each argument how it is split: a tree of partition specs that is a prefix of the tuple of
    arguments. A mesh axis that a spec does not name is unmapped: all ranks along it get the same block. In `f`,
    collectives communicate over the mesh's axes. `out_specs` says likewise how the results' blocks make up the
    whole; along an axis that it does not name they must be the same, and their types prove it.

    Under MPI every rank calls it, with the same arguments: each takes its own blocks of them. Arguments and results
    are trees. Results that are mapped over an axis are `ShardedArray`s, others plain arrays.
    Arrays that `f` closes over are unmapped inputs; derivatives are taken in them too.

    `check_rep=False` leaves out the types, the check of `out_specs`, and the savings in transposition.

    Raises ValueError for specs that do not fit the mesh or the arrays, VarianceError for a result that may differ
    along an axis its spec does not name.

    >>> import numpy as np
    >>> from collectives import psum
    >>> from spmd import P, make_mesh
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> total = shard_map(lambda x: psum(x, 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> total(np.arange(8.0))
    array([12., 16.])

    Source: shard_map tutorial, "API specification"; JEP 17111 for the types.
    """
    for path, spec in tree.flatten_with_paths(in_specs, "in_specs")[0]:
        _check_leaf(path, spec, mesh)
    for path, spec in tree.flatten_with_paths(out_specs, "out_specs")[0]:
        _check_leaf(path, spec, mesh)

    def mapped(*args: Any) -> Any:
        _check_outermost()
        leaves, structure = tree.flatten_with_paths(args, "args")
        specs = tuple(tree.broadcast_prefix(in_specs, args, is_spec, "in_specs"))
        values = [as_value(x) for _, x in leaves]
        for (path, _), x, spec in zip(leaves, values, specs):
            shape = tuple(x.shape)
            check_rank(spec, shape, "in_specs", path)
            check_divides(spec, shape, mesh.shape, "in_specs", path)
        values = [x if typeof(x).layout is None else settled(x, mesh, spec) for x, spec in zip(values, specs)]
        out_structure = None

        def body(*blocks):
            nonlocal out_structure
            current_scope().function = name_of(f)
            out = f(*tree.unflatten(structure, blocks))
            outs, out_structure = tree.flatten_with_paths(out, "the result")
            result_specs = tuple(tree.broadcast_prefix(out_specs, out, is_spec, "out_specs"))
            results = [settle_result(as_value(x), spec, path, check_rep) for (path, x), spec in zip(outs, result_specs)]
            return results, result_specs

        results = shard_map_p.bind(*values, body=body, mesh=mesh, in_specs=specs, check_rep=check_rep)
        return tree.unflatten(out_structure, results)

    mapped.__name__ = getattr(f, "__name__", "shard_map")
    mapped.__doc__ = getattr(f, "__doc__", None)
    return mapped


def _check_outermost() -> None:
    if current_scope() is not None:
        raise TypeError("a shard_map inside the body of another shard_map is not supported")


def _check_leaf(path: str, spec: Any, mesh: Mesh) -> None:
    if not is_spec(spec):
        raise TypeError(f"{path} is {spec!r}, which is no partition spec; write P(...), or P() for an unmapped array")
    check_spec(spec, mesh.shape, path)
