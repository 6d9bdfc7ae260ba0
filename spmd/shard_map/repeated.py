"""Parts of eager programs that types decide, compiled where they repeat.

An eager body may branch on values, so it runs operation by operation. But its linear part is a tape, and so is an
operation on sharded arrays: the same equations on operands of the same types are the same program. After some runs it
is compiled, and cached by its equations and types.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from minidiff.api.recording import jit_is_disabled
from minidiff.compiler.simplify import key_part
from minidiff.core.forward import JVP
from minidiff.core.interpreter import EVALUATE, current_interpreter
from minidiff.core.reverse import engine
from minidiff.core.tape import Equation, RecordedTracer, Tape
from minidiff.core.tracer import Value
from minidiff.core.types import PYTHON_NUMBERS, ShapedArray, Var
from minidiff.inputs.arguments import key_of
from minidiff.ops.base import Differential
from minidiff.values.lists import drop_none, scatter, split_list
from spmd.checks.agreement import checks_values
from spmd.mesh.mesh import Mesh

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
    except Exception:
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
        if eqn.primitive.shape_rule is None and type(eqn.primitive) is not Differential:
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
    program = key_of_tape(params["body"])
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
