"""The equations that run as one kernel: fused loops, and attention.

Views cost nothing in a fused loop, which only computes an address for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from collectives.passes.order import group_equations
from minidiff.control_flow.dead_code import count_uses
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var, typeof
from minidiff.ops.base import Promoting
from spmd.prices.work import Work, work_of_equation


def attention_shapes(tape: Tape) -> frozenset[tuple[int, ...]]:
    """Return the shapes of operands and results of batched products: queries, keys, values, and their scores."""
    shapes: set[tuple[int, ...]] = set()
    for eqn, work in products_of(tape):
        if work.product is not None and work.product.batch > 1:
            shapes.update(typeof(a).shape for a in (*eqn.inputs, *eqn.outputs))
    return frozenset(shapes)


def products_of(tape: Tape) -> list[tuple[Equation, Work]]:
    """Return the products on a tape, with their work."""
    return [(eqn, work_of_equation(eqn)) for eqn in tape.equations if eqn.primitive.name in ("matmul", "einsum")]


def is_attention(tape: Tape) -> bool:
    """Return whether a tape computes attention alone: it has products, and all are batched."""
    products = [work.product for _, work in products_of(tape)]
    return bool(products) and all(product is not None and product.batch > 1 for product in products)


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
