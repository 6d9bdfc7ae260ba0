"""Plans of eager programs on ranks: what types decide is done once, and cached by the mesh.

An eager body may branch on values, so it runs operation by operation. The function of its data that an operation comes
to, with the casts by which its operands agree, is planned the second time that it has operands of these types. The
linear part of a body is a tape, and so is an operation on sharded arrays: the same equations on operands of the same
types are the same program. After some runs it is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from collectives.backends.base import Backend
from collectives.casts import bind_in_body, insert_casts
from collectives.collective import Collective
from collectives.exact import exact
from collectives.ops import pbroadcast_p
from collectives.passes.variadic import variadic
from minidiff.api.recording import jit_is_disabled
from minidiff.compiler.simplify import key_part
from minidiff.core.forward import JVP
from minidiff.core.interpreter import EVALUATE, current_interpreter, set_interpreter, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import Scope
from minidiff.core.reverse import engine
from minidiff.core.tape import Equation, RecordedTracer, Stage, Tape
from minidiff.core.tracer import Value
from minidiff.core.types import PYTHON_NUMBERS, ShapedArray, Var, typeof
from minidiff.inputs.arguments import key_of
from minidiff.ops.base import Differential
from minidiff.values.dtypes import has_narrow
from minidiff.values.lists import drop_none, scatter, split_list
from spmd.checks.agreement import checks_values
from spmd.mesh.mesh import Mesh
from spmd.shard_map.compiled import CompiledBodies
from spmd.shard_map.interpreter import RankTracer, axes_and_size

# ---------------------------------------------------------------- operations in bodies

SEEN, UNPLANNED = "seen", "unplanned"  # in place of plans


class PlannedBodies(CompiledBodies):
    """Run an operation by its plan, if one on operands of the same types has run twice."""

    def process(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        out, key = self.run_planned(primitive, args, params)
        if out is None:
            out = super().process(primitive, args, params)
            plans = self.mesh.ranks.plans
            if key is not None and plans.get(key) is not UNPLANNED:
                plan = plan_operation(self.mesh.ranks, primitive, args, params, out) if key in plans else SEEN
                self.mesh.ranks.cache(key, plan)
        return out

    def run_planned(self, primitive: Primitive, args: Sequence[Value], params: dict) -> tuple[Value | None, Any]:
        """Return the result of an operation, or None if it has no plan; and its key, or None if it can have none."""
        key, operands = self.key_of(primitive, args, params)
        plan = self.mesh.ranks.plans.get(key)
        if type(plan) is not tuple:
            return None, key
        previous, (execute, varying, marked, _) = current_interpreter(), plan
        set_interpreter(EVALUATE)  # as `running` does, which takes longer
        try:
            return RankTracer(self, execute(*operands), varying, marked), key
        finally:
            set_interpreter(previous)

    def key_of(self, primitive: Primitive, args: Sequence[Value], params: dict) -> tuple[Any, list]:
        """Return the key of an operation's plan, or None if it can have none; and its operands' data."""
        key: Any = [primitive, self.scope.typed]
        operands: list = []
        if primitive.is_higher_order:  # its body is another function in each call
            return None, operands
        for x in args:
            if type(x) is RankTracer and x.interpreter is self:
                data = x.data
                key += data.shape, data.dtype, x.varying, x.marked
            elif type(x) in PYTHON_NUMBERS:
                data = x
                key.append(type(x))
            else:
                return None, operands
            operands.append(data)
        if params:  # those of collectives are axes, sizes and flags
            key += params.values() if primitive.batch_along is not None else (key_part(params),)
        return tuple(key), operands


def bind_planned(interpreter: Any, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
    """Apply an operation in the body of a `shard_map`: `bind_in_body`, unless it has a plan."""
    key = None
    if primitive.batch_along is not None and adds_exactly(interpreter.scope):
        primitive = exact_form(primitive)
    if type(interpreter) is PlannedBodies and not (interpreter.scope.checks or primitive.is_view):
        out, key = interpreter.run_planned(primitive, args, params)
        if out is not None:
            return out
    out = bind_in_body(interpreter, primitive, args, params)
    if key is not None and key not in interpreter.mesh.ranks.plans and primitive.operands_agree:
        plan_with_casts(interpreter, key, primitive, args, params)
    return out


def adds_exactly(scope: Scope) -> bool:
    """Return whether sums over ranks in a body are exact, as the mesh says."""
    mesh = getattr(scope.bottom, "mesh", None)  # without one, a body is recorded again
    return mesh is not None and mesh.ranks.exact_sums


@functools.cache
def exact_form(primitive: Any) -> Any:
    """Return the exact form of a collective that adds, and any other operation unchanged."""
    if primitive.per_operand is not None:
        return variadic(exact_form(primitive.per_operand))
    return exact(primitive) if type(primitive) is Collective and primitive.sums else primitive


def plan_with_casts(interpreter: Any, key: tuple, primitive: Primitive, args: Sequence[Value], params: dict) -> None:
    """Plan an operation whose operands disagree, once there is a plan for those that agree: `pbroadcast` them first."""
    agreeing, ranks = insert_casts(primitive, args), interpreter.mesh.ranks
    plan = ranks.plans.get(interpreter.key_of(primitive, agreeing, params)[0])
    if plan is UNPLANNED or any(x.marked for x in agreeing if type(x) is RankTracer):
        ranks.cache(key, UNPLANNED)
    elif type(plan) is tuple:
        execute, varying, marked, _ = plan
        casts: list[Any] = []
        for x, y in zip(args, agreeing):
            axes = axes_and_size(ranks, {*y.varying} - {*x.varying}) if y is not x else None
            casts.append(axes and ranks.plan(pbroadcast_p, [(x.data, x.varying)], axes).execute)

        def execute_cast(*operands: Any) -> Any:
            return execute(*[x if cast is None else cast(x) for cast, x in zip(casts, operands)])

        ranks.cache(key, (execute_cast, varying, marked, params))


def plan_operation(ranks: Backend, primitive: Any, args: Sequence[Value], params: dict, out: Value) -> Any:
    """Return a function of data, where the result `out` varies, and the parameters, which the key may have by `id`.

    It is UNPLANNED if the operation has several results, or comes to several operations on data, some with numbers.
    """
    operands = [(x.data, x.varying) if type(x) is RankTracer else (x, ()) for x in args]
    if type(out) is not RankTracer or primitive.shape_rule is None or has_narrow([x for x, _ in operands]):
        return UNPLANNED
    if primitive.on_ranks:
        return ranks.plan(primitive, operands, params).execute, out.varying, out.marked, params
    stage = Stage(None)
    stage.keeps_sources = False  # to look for a line would let frames keep what they have freed
    try:
        with transforming(stage):
            traced = [x if type(x) in PYTHON_NUMBERS else stage.new_input(typeof(x)) for x, _ in operands]
            data, _ = ranks.apply(primitive, [(x, varying) for x, (_, varying) in zip(traced, operands)], params)
            tape = stage.tape([data])
    except Exception:  # a rule that needs values
        return UNPLANNED
    atoms = [getattr(x, "variable", x) for x in traced]
    if [[*map(id, eqn.inputs)] for eqn in tape.equations] == [[*map(id, atoms)]]:
        (eqn,) = tape.equations
        return functools.partial(eqn.primitive.impl, **eqn.params), out.varying, out.marked, params
    if not all(isinstance(a, Var) for a in atoms):
        return UNPLANNED
    return (lambda *operands: tape.apply(*operands)[0]), out.varying, out.marked, params


# ---------------------------------------------------------------- programs that repeat

COMPILED_AFTER = 20  # runs, which take about as long as compiling

#: A function of arrays, and of types, numbers and None, which decide what it does. It returns results, and what else is
#: known from types alone; that keeps what a key has by `id`.
Part = Callable[..., tuple[Sequence[Value], Any]]
DECIDING = frozenset({ShapedArray, type(None), *PYTHON_NUMBERS})


def run_repeated(mesh: Mesh, key: Hashable, part: Part, args: Sequence[Any]) -> tuple[Sequence[Value], Any]:
    """Return `part(*args)`, by a compiled program if it has run often with this key and arguments of these types.

    The `key` is None if the part is not a program that types decide.
    """
    if key is None or mesh.backend != "simulated" or current_interpreter() is not EVALUATE:
        return part(*args)
    types = [key_part(x) if type(x) in DECIDING else (type(x), *key_of(x)) for x in args]
    plans, key = mesh.ranks.plans, (mesh, key, *types)
    runs, program, about = plans.get(key) or (0, None, None)
    if program is not None and not (checks_values() or jit_is_disabled.get()):
        return program(*[x for x in args if type(x) not in DECIDING]), about
    results = part(*args)
    if runs <= COMPILED_AFTER:
        mesh.ranks.cache(key, _compiled(part, args) if runs == COMPILED_AFTER else (runs + 1, None, None))
    return results


def _compiled(part: Part, args: Sequence[Any]) -> tuple[int, Callable | None, Any]:
    """Compile a part to a program that computes the same bits. One that needs values runs as it did."""
    from minidiff.compiler.program import CompiledProgram, rewrites  # loads when something is compiled

    about: Any = None

    def results(arrays: Sequence[Value]) -> Sequence[Value]:
        nonlocal about
        following = iter(arrays)
        outs, about = part(*[x if type(x) in DECIDING else next(following) for x in args])
        return outs

    arrays, options = [x for x in args if type(x) not in DECIDING], {"without": [*rewrites()], "kernels": False}
    try:
        program = CompiledProgram(results, (arrays,), "part", options)
    except Exception:  # the user's errors were raised by the runs before
        return COMPILED_AFTER + 1, None, None
    return COMPILED_AFTER + 1, program.source.results, about


def key_of_tape(tape: Tape) -> Hashable | None:
    """Return a key that is equal for tapes with the same equations; None if one of these may run the user's code."""
    names: dict[Any, int] = {}
    key: list[Hashable] = []
    for v in tape.inputs:
        key += v.type.shape, v.type.dtype, v.type.states
        names[v] = len(names)
    for eqn in tape.equations:
        is_plain = eqn.primitive.shape_rule is not None or type(eqn.primitive) is Differential
        if not is_plain or eqn.primitive.has_effect:
            return None
        key.append(eqn.primitive)
        for a in eqn.inputs:
            key.append(names[a] if isinstance(a, Var) else a if type(a) is ShapedArray else key_part(a))
        if eqn.params:
            key.append(key_part(eqn.params))
        for v in eqn.outputs:
            names[v] = len(names)
    return (*key, *[names.get(a) if isinstance(a, Var) else key_part(a) for a in tape.outputs])


def transpose_repeated(run: Callable, cts: Sequence[Any], operands: Sequence[Any], params: dict) -> list[Value | None]:
    """Return `run(cts, operands, params)`, the cotangents of the operands of a linear `shard_map`."""

    def transposed(*args: Any) -> tuple[Sequence[Value], Any]:
        in_cts = run(args[: len(cts)], args[len(cts) :], params)
        return drop_none(in_cts), ([ct is not None for ct in in_cts], params["body"])

    specs = tuple([spec.key for spec in (*params["in_specs"], *params["out_specs"])])
    cached = vars(params["body"])  # a body that is planned is transposed again and again
    program = cached["key"] if "key" in cached else cached.setdefault("key", key_of_tape(params["body"]))
    key = program and (program, len(cts), specs, params["check_rep"], params["auto_pbroadcast"])
    results, (is_nonzero, _) = run_repeated(params["mesh"], key, transposed, [*cts, *operands])
    return scatter(results, is_nonzero)


def linearize_repeated(
    mesh: Mesh, key: Hashable, f: Callable[..., Sequence[Value]], forward: JVP, args: Sequence[Value]
) -> list[Value]:
    """Return `f(*args)`, and record its derivative, in the forward sweep of reverse mode."""
    recorder, (primals, tangents) = forward.below, forward.split(args)
    active = [t is not None for t in tangents]

    def linearized(*primals: Value) -> tuple[Sequence[Value], Any]:
        outs, tape = engine.linearize_flat(lambda *args: f(*args), primals, active, forward.origin)
        linear, residuals = Tape(tape.inputs, tape.equations, ()).close()
        operands = {id(x): k for k, x in enumerate(primals)}
        places = [operands.get(id(x)) for x in residuals]  # of residuals among the operands, or None
        return [*outs, *[x for x, k in zip(residuals, places) if k is None]], (linear, tape.outputs, places, f)

    results, (linear, out_tangents, places, _) = run_repeated(mesh, (key, *active), linearized, primals)
    outs, computed = split_list(results, len(out_tangents))
    following = iter(computed)
    atoms = [next(following) if k is None else primals[k] for k in places]
    names = dict(zip(linear.inputs, [*atoms, *[t.variable for t in tangents if t is not None]]))
    for eqn in linear.equations:
        names.update((v, Var(v.type)) for v in eqn.outputs)
        inputs, outputs = [names.get(a, a) for a in eqn.inputs], [names[v] for v in eqn.outputs]
        recorder.equations.append(Equation(eqn.primitive, inputs, eqn.params, outputs, recorder.source()))
    tangents = [None if v is None else RecordedTracer(recorder, names[v]) for v in out_tangents]
    return list(map(forward.join, outs, tangents))
