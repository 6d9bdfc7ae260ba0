"""Operations that a program may let write into an operand: each with its function that does.

As NumPy's functions with `out=`, they take the memory of an operand that is not used again (`buffers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy

from minidiff.compiler import native, products
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.types import Var, typeof
from minidiff.higher_order.dead_code import count_uses
from minidiff.ops import elementwise, indexing, linalg, slices, updates
from minidiff.ops.dimensions import gather

# ---------------------------------------------------------------- x + zeros with v at an index


def _add_at(x: numpy.ndarray, v: numpy.ndarray, index: tuple, shape: tuple[int, ...]) -> numpy.ndarray:
    part = x[(*index, ...)]
    numpy.add(part, v, out=part)
    return x


def _add_along(x: numpy.ndarray, v: numpy.ndarray, start: numpy.ndarray, axis: int, length: int) -> numpy.ndarray:
    part = x[slices.slice_of(start, v.shape[axis], x, axis)]
    numpy.add(part, v, out=part)
    return x


def _add_at_indices(
    x: numpy.ndarray, v: numpy.ndarray, *indices: numpy.ndarray, shape: tuple[int, ...]
) -> numpy.ndarray:
    if indexing.are_unique(indices, shape):
        x[indices] += v
    else:  # summed first, as by the operation
        numpy.add(x, indexing.scatter_add_p.impl(v, *indices, shape=shape), out=x)
    return x


def _adding(name: str, write: Callable) -> Primitive:
    """An operation that adds within a copy of its first operand."""
    impl = lambda x, *args, **params: write(numpy.array(x), *args, **params)  # noqa: E731
    return Primitive(name, impl, lambda x, *types, **params: (x.shape, x.dtype))


#: Operation that puts an array into zeros, or multiplies matrices -> the operation that adds the result to an array.
ADDED: dict[Primitive, Primitive] = {
    indexing.unslice_p: _adding("add_at", _add_at),
    slices.dynamic_unslice_p: _adding("add_along", _add_along),
    indexing.scatter_add_p: _adding("add_at_indices", _add_at_indices),
    linalg.matmul_p: _adding("add_product", products.add_product),
}

#: Operation -> the function that writes into its first operand, and returns it.
IN_PLACE: dict[Primitive, Callable[..., Any]] = {
    updates.update_p: updates.write_at,
    updates.scatter_set_p: updates.write_at_indices,
    slices.dynamic_update_p: slices.write_along,
    ADDED[indexing.unslice_p]: _add_at,
    ADDED[slices.dynamic_unslice_p]: _add_along,
    ADDED[indexing.scatter_add_p]: _add_at_indices,
    ADDED[linalg.matmul_p]: products.add_product,
}


def add_within(tape: Tape, excluded: Container[Var] = (), kernels: bool = True) -> Tape:
    """Where zeros with an array in them are only added to another array, add the array there.

    (So an element of -0.0 elsewhere stays -0.0.) With `kernels`, add products of small matrices so, too, two of them at
    once. Values in `excluded` may not be plain arrays.
    """

    def fits(eqn: Equation) -> bool:
        if eqn.primitive is linalg.matmul_p:
            return kernels and products.fits(*map(typeof, eqn.inputs)) and native.is_available()
        return eqn.primitive in ADDED

    candidates = {e.outputs[0]: e for e in tape.equations if fits(e) and e.outputs[0] not in excluded}
    if not candidates:
        return tape
    uses = count_uses(tape)
    replaced: dict[Equation, Equation | None] = {}
    for eqn in tape.equations:
        if eqn.primitive is not elementwise.add.primitive or eqn.outputs[0] in excluded:
            continue
        (out,) = eqn.outputs
        for x, zeros in (eqn.inputs, eqn.inputs[::-1]):
            part = candidates.get(zeros) if isinstance(zeros, Var) else None
            if part is not None and uses[zeros] == 1 and isinstance(x, Var) and x.type == zeros.type == out.type:
                replaced[part] = None
                replaced[eqn] = Equation(ADDED[part.primitive], [x, *part.inputs], part.params, [out], eqn.source)
                break
    equations = [e for e in (replaced.get(e, e) for e in tape.equations) if e is not None]
    return with_equations(tape, _join_products(equations, uses, candidates))


#: The sum of products of pairs of matrices, in new memory.
sum_products_p = Primitive(
    "sum_products",
    products.sum_products,
    lambda a, b, *_: (a.shape[:1] + b.shape[1:], a.dtype),
    sharding=gather,
)


def _join_products(equations: list[Equation], uses: Mapping[Var, int], candidates: Container[Var]) -> list[Equation]:
    """Where two products are added one after the other, and nothing else needs the first sum, add both in one step."""
    add_product_p = ADDED[linalg.matmul_p]
    joined: dict[Equation, None] = {}  # an ordered set
    first: dict[Var, Equation] = {}  # products, and additions of a product
    for eqn in equations:
        adds = eqn.primitive is add_product_p and len(eqn.inputs) == 3
        before = first.get(eqn.inputs[0]) if adds and uses[eqn.inputs[0]] == 1 else None
        if before is not None and products.fit_together(before.inputs[-1], eqn.inputs[-1]):
            del joined[before]
            primitive = sum_products_p if before.primitive is linalg.matmul_p else add_product_p
            eqn = Equation(primitive, [*before.inputs, *eqn.inputs[1:]], {}, eqn.outputs, eqn.source)
        elif adds or (eqn.primitive is linalg.matmul_p and eqn.outputs[0] in candidates):
            first[eqn.outputs[0]] = eqn
        joined[eqn] = None
    return [*joined]
