"""The equations of a tape that run as one loop, and their types on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from collectives.passes.grouping import group_equations
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.higher_order.dead_code import count_uses
from minidiff.ops.base import Promoting
from spmd.mesh.specs import block_type
from spmd.prices.work import work_of


def local_type(a: Atom) -> ShapedArray:
    """Return the type of a value on one rank: of its block, if it is sharded."""
    t = typeof(a)
    return t if t.sharding is None else block_type(t, t.sharding.spec, t.sharding.mesh.shape)


def is_backward(eqn: Equation) -> bool:
    """Return whether an equation, or one in its bodies, is in the backward pass."""
    if eqn.source is not None and eqn.source.backward:
        return True
    return any(is_backward(inner) for body in eqn.bodies for inner in body.equations)


def attention_shapes(tape: Tape) -> set[tuple[int, ...]]:
    """Return the shapes of operands and results of batched products: queries, keys, values, and their scores."""
    shapes: set[tuple[int, ...]] = set()
    for eqn in tape.equations:
        if eqn.primitive.name in ("matmul", "einsum"):
            types = [typeof(a) for a in eqn.inputs]
            work = work_of(eqn.primitive, types, [v.type for v in eqn.outputs], eqn.params)
            if work.product is not None and work.product.batch > 1:
                shapes.update(t.shape for t in (*types, *(v.type for v in eqn.outputs)))
    return shapes


def is_view_of_operand(eqn: Equation) -> bool:
    """Return whether a fused loop only computes an address for it: a view, or a part at an index of one number."""
    name = eqn.primitive.name
    if name == "gather":
        return all(typeof(a).size == 1 for a in eqn.inputs[1:])
    return eqn.primitive.is_view or name in ("slice", "recompute", "name")


def groups_of(tape: Tape, fuses: Collection[str] | None) -> Iterator[tuple[Sequence[Equation], Collection[Var]]]:
    """Yield groups of equations that run as one loop: elementwise ones, views and those that `fuses` names.

    Each group comes with the results that equations outside of it read. Without `fuses`, each equation is a group.
    """
    if not fuses:
        yield from (([eqn], eqn.outputs) for eqn in tape.equations)
        return

    def key(eqn: Equation) -> Any:
        if eqn.bodies or (eqn.primitive.on_ranks and not eqn.primitive.is_view) or not eqn.outputs[0].type.shape:
            return None  # scalars may be known, and say which branch is run
        elementwise = isinstance(eqn.primitive, Promoting)
        backward = eqn.source is not None and eqn.source.backward
        return backward if elementwise or is_view_of_operand(eqn) or eqn.primitive.name in fuses else None

    uses = count_uses(tape)
    for group in group_equations(tape, key, inside=lambda *_: True):
        within = Counter(a for eqn in group for a in eqn.inputs if isinstance(a, Var))
        yield group, {v for eqn in group for v in eqn.outputs if uses.get(v, 0) > within[v]}
