"""Plans of operations in eager bodies: the function of its data that an operation comes to.

Types decide it, so that it is found once, the second time that an operation has operands of these types.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from collectives.backends.base import Backend
from collectives.casts import bind_in_body
from minidiff.compiler.simplify import key_part
from minidiff.core.interpreter import EVALUATE, Interpreter, current_interpreter, set_interpreter, transforming
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Stage
from minidiff.core.tracer import Value
from minidiff.core.types import PYTHON_NUMBERS, Var, typeof
from minidiff.values.dtypes import has_narrow
from spmd.shard_map.compiled import CompiledBodies
from spmd.shard_map.interpreter import RankTracer

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
        key: Any = [primitive, self.scope.typed]
        operands = []
        for x in args:
            if type(x) is RankTracer and x.interpreter is self:
                data = x.data
                key += data.shape, data.dtype, x.varying, x.marked
            elif type(x) in PYTHON_NUMBERS:
                data = x
                key.append(type(x))
            else:
                return None, None
            operands.append(data)
        if params:  # those of collectives are axes, sizes and flags
            key += params.values() if primitive.batch_along is not None else (key_part(params),)
        plan = self.mesh.ranks.plans.get(key := tuple(key))
        if type(plan) is not tuple:
            return None, key
        previous, (execute, varying, marked, _) = current_interpreter(), plan
        set_interpreter(EVALUATE)  # as `running` does, which takes longer
        try:
            return RankTracer(self, execute(*operands), varying, marked), key
        finally:
            set_interpreter(previous)


def bind_planned(interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
    """Apply an operation in the body of a `shard_map`: `bind_in_body`, unless operands that agree have a plan."""
    if type(interpreter) is PlannedBodies and not (interpreter.scope.checks or primitive.is_view):
        out, _ = interpreter.run_planned(primitive, args, params)
        if out is not None:
            return out
    return bind_in_body(interpreter, primitive, args, params)


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
