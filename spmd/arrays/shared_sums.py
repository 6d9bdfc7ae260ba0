"""Sums over ranks that are taken once: of the cotangents of a value that several operations on sharded arrays use.

The tangent of a whole array, such as a weight, enters each of these operations by a `pbroadcast`, whose transpose is a
`psum`. On a linear tape, a tangent that several operations broadcast is cast to `reduced` before the first of them. Its
cotangents then are partial sums, which are added up where they are, and the transpose of the cast sums them once. For a
part of a whole array, such as a row, the whole array is cast.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

from collectives.ops import pbroadcast_p, reduced_p
from collectives.passes.gradient_bucket import replace_equations
from minidiff.control_flow.checkpoint import Checkpoint
from minidiff.control_flow.dead_code import count_uses
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import ShapedArray, Var
from minidiff.errors.location import Location, fuse_locations
from minidiff.ops.base import Linear
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import WHOLE, PartitionSpec, block_type
from spmd.shard_map.interpreter import axes_and_size
from spmd.shard_map.operation import shard_map_p, typed_params
from spmd.sharding.sharded_array import with_sharding


class Cast(NamedTuple):
    """A cast of a variable, whose blocks are those of `spec`, to reduced along mesh axes."""

    variable: Var
    mesh: Mesh
    spec: PartitionSpec
    axes: frozenset[str]


def share_sums(tape: Tape) -> Tape:
    """Return a linear tape on which each variable that several equations broadcast is cast to reduced once."""
    casts_of = list(map(_casts, tape.equations)) if type(tape) is Tape else []  # others are of plain arrays
    if sum(map(len, casts_of)) < 2:
        return tape
    sharing = Sharing(tape)
    for eqn, casts in zip(tape.equations, casts_of):
        for cast in casts.values():
            sharing.uses[sharing.source_of(cast)].append(eqn.source)
    if all(len(uses) == 1 for uses in sharing.uses.values()):
        return tape
    for eqn, casts in zip(tape.equations, casts_of):
        shared = {k: cast for k, cast in casts.items() if len(sharing.uses[sharing.source_of(cast)]) > 1}
        new = {k: sharing.cast(cast) for k, cast in shared.items()}
        sharing.equations.append(_with_operands(eqn, new) if new else eqn)
        sharing.defined.update(eqn.outputs)
    return Tape(tape.inputs, replace_equations(tape, sharing.equations), tape.outputs)


class Sharing:
    """The casts of the variables of a tape, with their uses and results, and its new equations."""

    def __init__(self, tape: Tape):
        linear = [e for e in tape.equations if isinstance(e.primitive, Linear) and len(e.inputs) == 1]
        self.definitions = {v: e for e in linear if isinstance(e.inputs[0], Var) for v in e.outputs}
        self.defined = {*tape.inputs}
        self.uses: dict[Cast, list[Location | None]] = defaultdict(list)
        self.results: dict[Cast, Var] = {}
        self.equations: list[Equation] = []

    def source_of(self, cast: Cast) -> Cast:
        """Return the cast of the array that a variable is a part of."""
        definition = self.definitions.get(cast.variable)
        if definition is None or not cast.spec.is_trivial or definition.inputs[0].type.sharding:
            return cast
        return self.source_of(cast._replace(variable=definition.inputs[0]))

    def cast(self, cast: Cast) -> Var:
        """Return the variable of a cast. All that can be cast are, in one equation: one message sums them."""
        if cast not in self.results and self.source_of(cast) is not cast:
            definition = self.definitions[cast.variable]
            x = self.cast(cast._replace(variable=definition.inputs[0]))
            types = definition.primitive.typecheck([x.type], definition.params)
            casts = [cast._replace(variable=v) for v in definition.outputs]
            mesh, spec, _ = x.type.sharding
            spec = spec.with_dims(())  # a part may have fewer dimensions
            self._add(definition, [x], [with_sharding(t, mesh, spec) for t in types], casts)
        elif cast not in self.results:
            defined = [c for c, uses in self.uses.items() if len(uses) > 1 and c.variable in self.defined]
            casts = [c for c in defined if c.mesh is cast.mesh and c not in self.results]
            source = fuse_locations([x for c in casts for x in self.uses[c]])
            operands = tuple([(c.variable.type, c.spec, c.axes) for c in casts])
            params, types = cast.mesh.ranks.cached_plan(_cast_params, cast.mesh, operands, source)
            self._add(Equation(shard_map_p, (), params, (), source), [c.variable for c in casts], types, casts)
        return self.results[cast]

    def _add(self, like: Equation, inputs: list[Var], types: list[ShapedArray], casts: list[Cast]) -> None:
        outputs = list(map(Var, types))
        self.equations.append(Equation(like.primitive, inputs, like.params, outputs, like.source))
        self.results.update(zip(casts, outputs))


def _cast_params(ranks: Any, mesh: Mesh, operands: tuple, source: Location | None) -> tuple[dict, list[ShapedArray]]:
    """Return the parameters of the equation that casts operands to reduced, and the types of its results.

    Of each operand there are the type, the spec, and the axes.
    """
    inputs, equations = [Var(block_type(t, spec, mesh.shape)) for t, spec, _ in operands], list[Equation]()
    for v, (_, _, axes) in zip(inputs, operands):
        params = axes_and_size(ranks, axes)
        equations.append(Equation(reduced_p, [v], params, [Var(*reduced_p.typecheck([v.type], params))], source))
    in_specs = tuple([spec for _, spec, _ in operands])
    out_specs = tuple([spec.with_states(spec.unreduced, spec.reduced | axes) for _, spec, axes in operands])
    body = Tape(inputs, equations, [e.outputs[0] for e in equations])
    params = {**typed_params(mesh), "in_specs": in_specs, "out_specs": out_specs, "body": body}
    return params, shard_map_p.typecheck([t for t, _, _ in operands], params)


# ---------------------------------------------------------------- equations, whose bodies cache what is derived of them


def _casts(eqn: Equation) -> dict[int, Cast]:
    """Return the casts after which an equation can take its operands, by position: its body only broadcasts these."""
    params = eqn.params
    if not ((eqn.primitive is shard_map_p and params["call"] is None) or isinstance(eqn.primitive, Checkpoint)):
        return {}
    body = params["body"]
    if "casts" not in vars(body):
        positions, inside = {v: k for k, v in enumerate(body.inputs)}, list[Cast]()
        for e in body.equations:
            if eqn.primitive is not shard_map_p:
                inside += _casts(e).values()
            elif e.primitive is not pbroadcast_p or (k := positions.get(e.inputs[0])) is None:
                continue
            elif not e.inputs[0].type.reduced:  # whose cotangent is not summed
                inside.append(Cast(e.inputs[0], params["mesh"], params["in_specs"][k], frozenset(e.params["axes"])))
        uses = count_uses(body) if inside else Counter()
        counts = [(positions.get(x.variable), x) for x, n in Counter(inside).items() if n == uses[x.variable]]
        vars(body)["casts"] = {k: x for k, x in counts if k is not None}
    casts = {k: cast._replace(variable=eqn.inputs[k]) for k, cast in vars(body)["casts"].items()}
    return {k: x for k, x in casts.items() if isinstance(x.variable, Var) and x.spec == _spec_of(x.variable)}


def _spec_of(v: Var) -> PartitionSpec:
    return v.type.sharding.spec if v.type.sharding else WHOLE


def _with_operands(eqn: Equation, new: dict[int, Var]) -> Equation:
    """Return the equation with reduced variables for operands, by position."""
    types = tuple([(k, v.type, _spec_of(v)) for k, v in new.items()])
    rewritten: dict = vars(eqn.params["body"]).setdefault("rewritten", {})
    if types not in rewritten:
        rewritten[types] = _with_types(eqn, types)
    inputs = [new.get(k, a) for k, a in enumerate(eqn.inputs)]
    return Equation(eqn.primitive, inputs, {**eqn.params, **rewritten[types]}, eqn.outputs, eqn.source)


def _with_types(eqn: Equation, types: tuple[tuple[int, ShapedArray, PartitionSpec], ...]) -> dict:
    """Return the parameters that change if an equation's operands of these positions have these types and specs."""
    params, body, changed = eqn.params, eqn.params["body"], dict[str, Any]()
    names = {body.inputs[k]: Var(t) for k, t, _ in types}
    if eqn.primitive is shard_map_p:
        names = {body.inputs[k]: Var(block_type(t, spec, params["mesh"].shape)) for k, t, spec in types}
        specs = dict(enumerate(params["in_specs"])) | {k: spec for k, _, spec in types}
        changed["in_specs"] = tuple(specs.values())
    equations = []
    for e in body.equations:
        inside = {k: names[a] for k, a in enumerate(e.inputs) if isinstance(a, Var) and a in names}
        if e.primitive is pbroadcast_p and inside:
            e = Equation(e.primitive, [inside[0]], e.params, e.outputs, e.source)
        equations.append(_with_operands(e, inside) if inside and e.primitive is not pbroadcast_p else e)
    return {**changed, "body": Tape([names.get(v, v) for v in body.inputs], equations, body.outputs)}
