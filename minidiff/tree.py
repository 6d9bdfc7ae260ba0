"""Trees of values: tuples, lists, dicts and named tuples, nested, with arrays at the leaves.

>>> leaves({'w': 1.0, 'b': [2.0, 3.0]})
[2.0, 3.0, 1.0]
>>> map(lambda x: 2 * x, (1.0, [2.0]))
(2.0, [4.0])
"""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy


class Structure:
    """The shape of a tree: what kind of node it is, its keys, and its children's structures. A leaf has no node.

    Trees may be nested deeper than Python's functions: everything here works through a list, without recursion.
    """

    __slots__ = ("node", "keys", "children", "flat", "size", "_below", "_key")

    def __init__(
        self, node: type | None, keys: tuple = (), children: tuple[Structure, ...] = (), flat: bool | None = None
    ):
        self.node = node
        self.keys = keys
        self.children = children
        self.flat = all(child.node is None for child in children) if flat is None else flat  # leaves, all of them
        #: How many leaves a tree of this structure has.
        self.size: int = 1 if node is None else len(keys) if self.flat else sum([child.size for child in children])
        self._below: list[Structure] | None = None
        self._key: tuple | None = None

    def below(self) -> list[Structure]:
        """The structures in this one, each node before its children, from left to right; none in a flat one."""
        if self._below is None:
            self._below, waiting = [], [self]
            while waiting:
                s = waiting.pop()
                if s is not self:
                    self._below.append(s)
                if not s.flat:
                    waiting.extend(s.children[::-1])
        return self._below

    def key(self) -> tuple:
        """What structures are compared by."""
        if self._key is None:
            self._key = self.node, self.keys, self.flat, *[(s.node, s.keys, s.flat) for s in self.below()]
        return self._key

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or self.node is not other.node or self.keys != other.keys:
            return False
        return all(builtins.map(operator.is_, self.children, other.children)) or self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def __repr__(self) -> str:
        try:
            return repr(unflatten(self, [_STAR] * self.size))
        except RecursionError:  # in Python's own repr
            return f"<a tree of {self.size} leaves, nested too deep to be printed>"


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


@functools.lru_cache(maxsize=256)
def _sequence(kind: type, count: int) -> Structure:
    """The structure of a tuple or list of so many leaves: made once, since most trees are such."""
    return Structure(kind, tuple(range(count)), (LEAF,) * count, flat=True)


def flatten(tree: Any) -> tuple[list, Structure]:
    """The leaves of a tree, and its structure. `None` is a node without leaves; dicts are read in order of key."""
    kind = type(tree)
    if kind in _LEAVES:
        return [tree], LEAF
    if (kind is tuple or kind is list) and _LEAVES.issuperset(builtins.map(type, tree)):
        return list(tree), _sequence(kind, len(tree))
    found: list = []
    nodes: list = []  # what is there, each node before its children: a structure, or a kind and keys
    waiting = [tree]
    while waiting:
        x = waiting.pop()
        node = None if type(x) in _LEAVES else _children(x)
        if node is None:
            found.append(x)
            nodes.append(LEAF)
            continue
        keys, children = node
        if _LEAVES.issuperset(builtins.map(type, children)):
            found.extend(children)
            kind = type(x)
            known = kind is tuple or kind is list
            nodes.append(_sequence(kind, len(keys)) if known else Structure(kind, keys, (LEAF,) * len(keys), flat=True))
        else:
            nodes.append((type(x), keys))
            waiting.extend(children[::-1])
    if len(nodes) == 1:
        return found, nodes[0]
    built: list[Structure] = []  # from the right to the left: the first child of a node is the last one here
    for node in reversed(nodes):
        if type(node) is tuple:
            kind, keys = node
            node = Structure(kind, keys, tuple(built[: -len(keys) - 1 : -1]))
            del built[-len(keys) :]
        built.append(node)
    return found, built[0]


def paths(structure: Structure, root: str = "") -> list[str]:
    """Where the leaves of a tree of this structure stand: `root[0]['w']`."""
    found, waiting = [], [(structure, root)]
    while waiting:
        s, path = waiting.pop()
        if s.node is None:
            found.append(path)
            continue
        fields = hasattr(s.node, "_fields")
        children = [(child, f"{path}.{k}" if fields else f"{path}[{k!r}]") for k, child in zip(s.keys, s.children)]
        waiting.extend(children[::-1])
    return found


def flatten_with_paths(tree: Any, root: str = "") -> tuple[list[tuple[str, Any]], Structure]:
    """As `flatten`, but each leaf with where it stands: `root[0]['w']`."""
    found, structure = flatten(tree)
    return list(zip(paths(structure, root), found)), structure


def unflatten(structure: Structure, leaves: Any) -> Any:
    """The tree of this structure with these leaves."""
    if structure.node is None:
        return next(iter(leaves))
    found = list(itertools.islice(leaves, structure.size))
    if structure.flat:
        return _node(structure, found)
    built: list = []  # from the right to the left: the first child of a node is the last one here
    for s in reversed(structure.below()):
        if s.node is None:
            built.append(found.pop())
        elif s.flat:
            start = len(found) - s.size
            built.append(_node(s, found[start:]))
            del found[start:]
        else:
            start = len(built) - len(s.keys)
            children = built[start:]
            del built[start:]
            built.append(_node(s, children[::-1]))
    return _node(structure, built[::-1])


def _node(structure: Structure, children: list) -> Any:
    """A node with these children, a list that is its own."""
    node = structure.node
    if node is list:
        return children
    if node is dict:
        return dict(zip(structure.keys, children))
    if node is type(None):
        return None
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
    waiting = [(prefix, tree, what)]
    while waiting:
        p, t, path = waiting.pop()
        if is_leaf(p):
            out.extend([p] * structure(t).size)
        else:
            waiting.extend(_children_of_both(p, t, path)[::-1])
    return out


def _children_of_both(prefix: Any, tree: Any, path: str) -> list[tuple[Any, Any, str]]:
    """The children of a prefix, with what each stands against, and where it stands."""
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
    return [(p, t, f"{path}[{key!r}]") for key, p, t in zip(node[0], node[1], other[1])]


def node_classes() -> str:
    """The classes of values that are nodes of a tree, as errors name them."""
    return "tuples, lists, dicts, named tuples and None"
