"""Source that reads and builds trees of one structure: straight-line code is several times as fast as a walk.

>>> from minidiff import tree
>>> structure = tree.structure(([1.0, 2.0], {'w': 3.0}))
>>> print(source_of_reader(structure, {}, lambda leaf: f"type({leaf}) is not float"))
def read(t):
    if type(t) is not tuple or len(t) != 2: return None
    [t_0, t_1] = t
    if type(t_0) is not list or len(t_0) != 2: return None
    [t_0_0, t_0_1] = t_0
    if type(t_0_0) is not float: return None
    if type(t_0_1) is not float: return None
    if type(t_1) is not dict or t_1.keys() != keys_t_1: return None
    [t_1_0] = [t_1['w']]
    if type(t_1_0) is not float: return None
    return [t_0_0, t_0_1, t_1_0]
>>> source_of_builder(structure, iter(['x', 'y', 'z']), lambda name, value: name)
"([x, y], {'w': z})"
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from minidiff import tree
from minidiff.tree.nodes import NODES

MAX_DEPTH = 50  # of an expression: Python compiles no more than 200 brackets in each other


def source_of_reader(structure: tree.Structure, scope: dict[str, Any], differs: Callable[[str], str]) -> str:
    """Return the source of a function of a tree: its leaves, or None if its structure, or a leaf, is another one.

    `differs` returns the condition that the next leaf, which has this name, is another one. The values that the source
    refers to are put into `scope`.
    """
    leaves: list[str] = []

    def lines(s: tree.Structure, t: str) -> Iterator[str]:
        kind, children = s.node, s.children
        if s is tree.LEAF:
            leaves.append(t)
            yield f"    if {differs(t)}: return None"
            return
        values = t
        if kind is dict and {*map(type, s.keys)} == {str}:
            scope[f"keys_{t}"] = {*s.keys}
            yield f"    if type({t}) is not dict or {t}.keys() != keys_{t}: return None"
            values = f"[{', '.join([f'{t}[{key!r}]' for key in s.keys])}]"
        elif kind in (tuple, list):
            yield f"    if type({t}) is not {kind.__name__} or len({t}) != {len(children)}: return None"
        else:
            scope.update({"flatten": tree.flatten, f"structure_{t}": s})
            yield f"    {t}, structure = flatten({t})"
            yield f"    if structure != structure_{t}: return None"
            children = [tree.LEAF] * s.num_leaves
        parts = [f"{t}_{k}" for k in range(len(children))]
        yield f"    [{', '.join(parts)}] = {values}"
        for child, part in zip(children, parts):
            yield from lines(child, part)

    text = "\n".join(["def read(t):", *lines(structure, "t")])
    return f"{text}\n    return [{', '.join(leaves)}]"


def source_of_builder(
    structure: tree.Structure, leaves: Iterator[str], bind: Callable[[str, Any], Any], depth: int = 0
) -> str:
    """Return an expression that builds a tree from the names of its leaves.

    `bind(name, value)` returns the name of a function in the expression.
    """
    if structure is tree.LEAF:
        return next(leaves)
    if depth == MAX_DEPTH:
        return f"{bind('build', structure.build)}([{', '.join(itertools.islice(leaves, structure.num_leaves))}])"
    parts = [source_of_builder(child, leaves, bind, depth + 1) for child in structure.children]
    kind = structure.node
    if kind is dict and {*map(type, structure.keys)} <= {str}:
        return f"{{{', '.join([f'{key!r}: {part}' for key, part in zip(structure.keys, parts)])}}}"
    text = ", ".join(parts)
    if kind is tuple:
        return f"({text}{',' * (len(parts) == 1)})"
    make = functools.partial(NODES[kind].unflatten, structure.keys, structure.settings)
    return f"[{text}]" if kind is list else f"{bind(f'new_{kind.__name__}', make)}([{text}])"
