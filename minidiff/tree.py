"""Trees of values: tuples, lists, dicts and named tuples, nested, with arrays at the leaves.

>>> leaves({'w': 1.0, 'b': [2.0, 3.0]})
[2.0, 3.0, 1.0]
>>> map(lambda x: 2 * x, (1.0, [2.0]))
(2.0, [4.0])
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy


class Structure:
    """The shape of a tree: what kind of node it is, its keys, and its children's structures. A leaf has no node."""

    __slots__ = ("node", "keys", "children", "flat")

    def __init__(
        self, node: type | None, keys: tuple = (), children: tuple[Structure, ...] = (), flat: bool | None = None
    ):
        self.node = node
        self.keys = keys
        self.children = children
        self.flat = all(child.node is None for child in children) if flat is None else flat  # leaves, all of them

    @property
    def size(self) -> int:
        """How many leaves a tree of this structure has."""
        return 1 if self.node is None else sum(child.size for child in self.children)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and (self.node, self.keys, self.children) == (
            other.node,
            other.keys,
            other.children,
        )

    def __hash__(self) -> int:
        return hash((self.node, self.keys, self.children))

    def __repr__(self) -> str:
        return repr(unflatten(self, [_STAR] * self.size))


class _Star:
    def __repr__(self) -> str:
        return "*"


_STAR = _Star()

LEAF = Structure(None)


def _children(tree: Any) -> tuple[tuple, list] | None:
    """The keys and the children of a node; None for a leaf."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return tuple(range(len(tree))), tree
    if kind is dict:
        keys = tuple(_sorted(tree))
        return keys, [tree[k] for k in keys]
    if tree is None:
        return (), []
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return tuple(tree._fields), tree
    return None


def _sorted(keys: Any) -> list:
    try:
        return sorted(keys)
    except TypeError:
        return list(keys)


#: What most leaves are: they are known at sight.
_LEAVES = {float, int, complex, bool, numpy.ndarray, numpy.float64, numpy.float32, numpy.int64}


def _walk(tree: Any, found: list) -> Structure:
    node = None if type(tree) in _LEAVES else _children(tree)
    if node is None:
        found.append(tree)
        return LEAF
    keys, children = node
    if _LEAVES.issuperset(builtins.map(type, children)):
        found.extend(children)
        return Structure(type(tree), keys, (LEAF,) * len(keys), flat=True)
    return Structure(type(tree), keys, tuple([_walk(child, found) for child in children]))


def flatten(tree: Any) -> tuple[list, Structure]:
    """The leaves of a tree, and its structure. `None` is a node without leaves; dicts are read in order of key."""
    found: list = []
    return found, _walk(tree, found)


def paths(structure: Structure, root: str = "") -> list[str]:
    """Where the leaves of a tree of this structure stand: `root[0]['w']`."""
    if structure.node is None:
        return [root]
    fields = hasattr(structure.node, "_fields")
    children = zip(structure.keys, structure.children)
    return [p for key, child in children for p in paths(child, f"{root}.{key}" if fields else f"{root}[{key!r}]")]


def flatten_with_paths(tree: Any, root: str = "") -> tuple[list[tuple[str, Any]], Structure]:
    """As `flatten`, but each leaf with where it stands: `root[0]['w']`."""
    found, structure = flatten(tree)
    return list(zip(paths(structure, root), found)), structure


def unflatten(structure: Structure, leaves: Any) -> Any:
    """The tree of this structure with these leaves."""
    return _build(structure, iter(leaves))


def _build(structure: Structure, leaves: Iterator) -> Any:
    node = structure.node
    if node is None:
        return next(leaves)
    if node is type(None):
        return None
    if structure.flat:
        children = list(itertools.islice(leaves, len(structure.keys)))
    else:
        children = [_build(child, leaves) for child in structure.children]
    if node is list:
        return children
    if node is dict:
        return dict(zip(structure.keys, children))
    return node(*children) if hasattr(node, "_fields") else node(children)


def leaves(tree: Any) -> list:
    """The leaves of a tree, in order."""
    return flatten(tree)[0]


def structure(tree: Any) -> Structure:
    """The structure of a tree."""
    return flatten(tree)[1]


def map(function: Callable, tree: Any, *rest: Any) -> Any:
    """A tree of `function(leaf, *leaves of rest)`; all trees must have one structure."""
    found, shape = flatten(tree)
    others = []
    for other in rest:
        more, other_shape = flatten(other)
        if other_shape != shape:
            raise ValueError(f"tree.map: the trees differ in structure: {shape} and {other_shape}")
        others.append(more)
    return unflatten(shape, builtins.map(function, found, *others))


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], what: str) -> list:
    """One leaf of `prefix` for each leaf of `tree`: a leaf of the prefix counts for the whole subtree beneath it.

    Raises ValueError, calling the prefix `what`, where the two do not match.
    """
    out: list = []
    _broadcast(prefix, tree, is_leaf, what, what, out)
    return out


def _broadcast(prefix: Any, tree: Any, is_leaf: Callable, what: str, path: str, out: list) -> None:
    if is_leaf(prefix):
        out.extend([prefix] * structure(tree).size)
        return
    node, other = _children(prefix), _children(tree)
    if prefix is None and tree is not None:
        what = "a single array" if other is None else f"a {type(tree).__name__}"
        raise ValueError(f"{path} is None, which stands for no arrays, but stands against {what}: write an entry")
    if node is None:
        raise ValueError(f"{path} is {prefix!r}, which is neither an entry for arrays nor a tree of entries")
    if other is None:
        raise ValueError(f"{path} is a {type(prefix).__name__} of {len(node[1])}, but stands against a single array")
    if type(prefix) is not type(tree) and not {type(prefix), type(tree)} <= {tuple, list}:
        raise ValueError(f"{path} is a {type(prefix).__name__}, but stands against a {type(tree).__name__}")
    if node[0] != other[0]:
        if type(prefix) is dict:
            raise ValueError(f"{path} has the keys {list(node[0])}, but stands against {list(other[0])}")
        entries = "1 entry" if len(node[1]) == 1 else f"{len(node[1])} entries"
        raise ValueError(
            f"{path} has {entries}, but stands against {len(other[1])}: write one for each, or a single one for all"
        )
    for key, p, t in zip(node[0], node[1], other[1]):
        _broadcast(p, t, is_leaf, what, f"{path}[{key!r}]", out)
