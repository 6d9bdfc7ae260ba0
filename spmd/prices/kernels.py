"""The equations that run as one kernel: fused loops, and attention.

Views cost nothing in a fused loop, which only computes an address for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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


def products_side_by_side(tape: Tape) -> dict[Equation, float]:
    """Return by which factor products have fewer rows than those that run side by side have in all.

    They multiply several blocks by one matrix, and none waits for another, as where blocks arrive one by one: a device
    runs them on several streams, and reaches the share of the peak of one product of all rows.
    """
    depths: dict[Var, int] = {}  # how many products a value waits for
    rows: dict[tuple, dict[Equation, int]] = defaultdict(dict)
    for eqn in tape.equations:
        depth = max((depths.get(a, 0) for a in eqn.inputs if isinstance(a, Var)), default=0)
        if eqn.primitive.name == "matmul" and (product := work_of_equation(eqn).product) and product.rows:
            rows[id(eqn.inputs[1]), depth][eqn] = product.rows
            depth += 1
        depths.update(dict.fromkeys(eqn.outputs, depth))
    return {eqn: sum(group.values()) / n for group in rows.values() if len(group) > 1 for eqn, n in group.items()}


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
