"""Fuse successive shard_maps into one, whose collectives can then be fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from collectives.ops import all_gather_invariant_p
from collectives.passes.order import group_equations
from minidiff.compiler.simplify import Passes, apply_rules
from minidiff.control_flow.dead_code import dependents, has_effects
from minidiff.core.ranks import Scope
from minidiff.core.tape import Atom, Equation, Tape, with_equations
from minidiff.core.types import Var, typeof
from spmd.checks.agreement import fused_call
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import WHOLE
from spmd.shard_map.exchange_halos import exchange_halos
from spmd.shard_map.operation import shard_map_p, typed_params


def fuse_shard_maps(tape: Tape, scope: Scope | None, *_: Any) -> Tape:
    """Fuse shard_maps over one mesh into one, if no operation is needed between them.

    A result that one returns with the spec with which the next takes it stays on its ranks. A loss and its gradient
    then are one program, whose collectives can be fused. Operations on whole arrays, of which some were gathered, run
    on each rank, in the same program.
    """
    mapped = [eqn for eqn in tape.equations if eqn.primitive is shard_map_p]
    gathering = [e for e in mapped if any(x.primitive is all_gather_invariant_p for x in e.params["body"].equations)]
    if len(mapped) < 2 and not gathering:
        return tape
    tape = apply_rules(tape) if gathering else tape
    derived = dependents(tape.equations, [v for eqn in gathering if scope is None for v in eqn.outputs])
    plain = {e for e in tape.equations if not derived.isdisjoint(e.outputs) and _is_plain(e)}
    new = [_on_ranks(e, gathering[0].params["mesh"]) if e in plain else e for e in tape.equations]
    groups, old = group_equations(with_equations(tape, new), _alike, inside=_stays), dict(zip(new, tape.equations))
    return with_equations(tape, [_fuse(group) if len(group) > 1 else old[group[0]] for group in groups])


def _is_plain(eqn: Equation) -> bool:
    """Whether an operation takes and returns whole arrays, and can as well run on each rank."""
    atoms = [*eqn.inputs, *eqn.outputs]
    return not (eqn.primitive.is_higher_order or has_effects(eqn) or any(typeof(a).sharding for a in atoms))


def _on_ranks(eqn: Equation, mesh: Mesh) -> Equation:
    """Return an operation on whole arrays as a shard_map, to be fused."""
    inputs = list(dict.fromkeys(a for a in eqn.inputs if isinstance(a, Var)))
    specs = {"in_specs": (WHOLE,) * len(inputs), "out_specs": (WHOLE,) * len(eqn.outputs)}
    params = {**typed_params(mesh), **specs, "body": Tape(inputs, [eqn], eqn.outputs)}
    return Equation(shard_map_p, inputs, params, eqn.outputs, eqn.source)


def _alike(eqn: Equation) -> Any:
    """The key that shard_maps must share to be fused; None for other equations."""
    if eqn.primitive is not shard_map_p:
        return None
    params = eqn.params
    options = tuple(params[name] for name in ("mesh", "check_rep", "auto_pbroadcast"))
    loops = any(e.bodies for e in params["body"].equations)  # such a body cannot be compiled as a whole
    return (*options, loops)


def _stays(producer: Equation, a: Atom, user: Equation) -> bool:
    """Whether `user` uses `a` with the spec and block type with which `producer` returns it."""
    returned = zip(producer.outputs, producer.params["out_specs"], producer.params["body"].out_types)
    (returned_as,) = [(spec, t) for v, spec, t in returned if v is a]
    blocks = zip(user.inputs, user.params["in_specs"], user.params["body"].in_types)
    return all((spec, t) == returned_as for x, spec, t in blocks if x is a)


def _fuse(eqns: Sequence[Equation]) -> Equation:
    """Fuse several shard_maps into one, which takes once an operand that several take with one spec."""
    blocks: dict[Any, Var] = {}  # (an operand or its id, its spec, the type) -> its block
    results: dict[Var, Atom] = {}  # a result -> its block
    inputs, in_specs = [], []
    equations: list[Equation] = []
    for eqn in eqns:
        body, names = eqn.params["body"], {}
        for a, spec, v in zip(eqn.inputs, eqn.params["in_specs"], body.inputs):
            if isinstance(a, Var) and a in results:
                names[v] = results[a]
                continue
            key = a if isinstance(a, Var) else id(a), spec, v.type
            if key not in blocks:
                blocks[key] = Var(v.type)
                inputs.append(a)
                in_specs.append(spec)
            names[v] = blocks[key]
        equations += _rename(body, names)
        results.update(zip(eqn.outputs, [names.get(a, a) if isinstance(a, Var) else a for a in body.outputs]))
    params = {
        **eqns[0].params,
        "in_specs": tuple(in_specs),
        "out_specs": tuple(spec for eqn in eqns for spec in eqn.params["out_specs"]),
        "body": Tape([*blocks.values()], equations, [*results.values()]),
        "call": fused_call([eqn.params for eqn in eqns]),
    }
    return Equation(shard_map_p, inputs, params, [*results], eqns[0].source)


def _rename(body: Tape, names: dict[Var, Atom]) -> Iterator[Equation]:
    """Yield a body's equations, with inputs renamed by `names`, and new outputs, which are added to `names`."""
    for eqn in body.equations:
        outputs = [Var(v.type) for v in eqn.outputs]
        inputs = [names.get(a, a) if isinstance(a, Var) else a for a in eqn.inputs]
        yield Equation(eqn.primitive, inputs, eqn.params, outputs, eqn.source)
        names.update(zip(eqn.outputs, outputs))


#: The passes over shard_maps, in the order in which they run.
PASSES = Passes(first=(fuse_shard_maps, exchange_halos))
