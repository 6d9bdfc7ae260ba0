"""Automatic differentiation by a library of elements: functions that a program calls in place of operators.

Each element computes a value and notes its operands with the partial derivatives. The user breaks a formula up into
elements by hand: `x * y + sin(x)` is written `ad_add(ad_mul(x, y), ad_sin(x))`.

>>> x, y = Element(2.0), Element(3.0)
>>> z = ad_add(ad_mul(x, y), ad_sin(x))
>>> gradient(z, [x, y]) == [3.0 + math.cos(2.0), 2.0]
True

Source: L. B. Rall, "Automatic differentiation: techniques and applications", 1981.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Element(NamedTuple):
    """A value, and for each operand the derivative in it."""

    value: float
    operands: tuple[tuple[Element, float], ...] = ()


def _element(function: Callable[..., float], *partials: Callable[..., float]) -> Callable[..., Element]:
    """Return an element by its function, and by its derivative in each operand."""

    def element(*operands: Element | float) -> Element:
        nodes = [x if isinstance(x, Element) else Element(x) for x in operands]
        values = [node.value for node in nodes]
        return Element(function(*values), tuple((node, d(*values)) for node, d in zip(nodes, partials)))

    return element


ad_add = _element(lambda x, y: x + y, lambda x, y: 1.0, lambda x, y: 1.0)
ad_sub = _element(lambda x, y: x - y, lambda x, y: 1.0, lambda x, y: -1.0)
ad_mul = _element(lambda x, y: x * y, lambda x, y: y, lambda x, y: x)
ad_div = _element(lambda x, y: x / y, lambda x, y: 1 / y, lambda x, y: -x / y**2)
ad_neg = _element(lambda x: -x, lambda x: -1.0)
ad_sin = _element(math.sin, math.cos)
ad_cos = _element(math.cos, lambda x: -math.sin(x))
ad_exp = _element(math.exp, math.exp)
ad_log = _element(math.log, lambda x: 1 / x)
ad_sqrt = _element(math.sqrt, lambda x: 0.5 / math.sqrt(x))
ad_tanh = _element(math.tanh, lambda x: 1 - math.tanh(x) ** 2)


def gradient(result: Element, inputs: Sequence[Element]) -> list[float]:
    """Return the derivatives of a result in some inputs: each element passes its cotangent on, once complete."""
    order: dict[int, Element] = {}

    def visit(node: Element) -> None:
        if id(node) not in order:
            for operand, _ in node.operands:
                visit(operand)
            order[id(node)] = node

    visit(result)
    cotangents = dict.fromkeys(order, 0.0) | {id(result): 1.0}
    for node in reversed(order.values()):
        for operand, partial in node.operands:
            cotangents[id(operand)] += cotangents[id(node)] * partial
    return [cotangents.get(id(x), 0.0) for x in inputs]
