"""Trees of values: nested containers with arrays at the leaves.

Trees are tuples, lists, dicts, `OrderedDict`, `defaultdict`, `SimpleNamespace`, named tuples, dataclasses, attrs
classes, `None` (a tree without leaves), and classes given to `register`. An object of any other class is a leaf, even
if the class is a subclass of dict or list, since its constructor may differ.

The children of a dataclass or attrs object are its fields. Objects are rebuilt as `dataclasses.replace` or
`attrs.evolve` do it: `__init__` gets the fields, and computes those with `init=False`. A field declared with
`metadata={'static': True}` is a setting, such as a name or a function: it is part of the structure, not a leaf, and
must be hashable if structures are compared.

>>> leaves({'w': 1.0, 'b': [2.0, 3.0]})
[2.0, 3.0, 1.0]
>>> map(lambda x: 2 * x, (1.0, [2.0]))
(2.0, [4.0])
>>> from dataclasses import dataclass, field
>>> @dataclass
... class Layer:
...     w: float
...     b: float
...     activation: str = field(default='tanh', metadata={'static': True})
>>> map(lambda x: 2 * x, Layer(1.0, 3.0))
Layer(w=2.0, b=6.0, activation='tanh')
"""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy

from minidiff.core.types import ShapedArray, typeof
from minidiff.errors.tracebacks import hide_frames_of
from minidiff.tree.nodes import *  # noqa: F403
from minidiff.tree.nodes import LEAVES, MANY, NODES, Key, Setting, class_names, node_type_of  # noqa: F401
from minidiff.values.dtypes import convert_array
from minidiff.values.settings import types_in

__all__ = [
    *("DictKey", "GetAttrKey", "SequenceKey", "Structure", "all", "all_leaves", "broadcast", "flatten"),
    *("flatten_with_path", "keystr", "leaves", "leaves_with_path", "map", "map_with_path", "ravel_pytree", "reduce"),
    *("register", "register_with_keys", "structure", "transpose", "unflatten"),
]
__dir__ = functools.partial(sorted, __all__)


IsLeaf = Callable[[Any], bool]
#: A structure as tuples: None for a leaf, else its class, the names of its children, settings, a tuple for each child.
Nested = tuple | None

# ---------------------------------------------------------------- structures


class Structure:
    """The structure of a tree: its class, the names and structures of its children.

    `settings` are those of the node. `node`, the class, is None for a leaf. `children` are the structures of the
    children. Structures are compared by `==` and hashable.

    >>> s = structure({'w': 1.0, 'b': [2.0, 3.0]})
    >>> s
    {'b': [*, *], 'w': *}
    >>> s.num_leaves, s.num_nodes
    (3, 5)
    >>> s.unflatten([4.0, 5.0, 6.0])
    {'b': [4.0, 5.0], 'w': 6.0}
    """

    __slots__ = ("_hash", "_of_derivatives", "build", "num_leaves", "nested")

    def __init__(self, nested: Nested):
        self.nested = nested
        #: The number of leaves; and the function that builds a tree from a list of them.
        self.build, self.num_leaves = _make_builder(nested, 0, True)
        self._hash: int | None = None
        self._of_derivatives: Structure | None = None

    @property
    def of_derivatives(self) -> Structure:
        """The structure of derivatives: None in place of each string and function."""
        if self._of_derivatives is None:
            nested = _without_settings(self.nested)
            self._of_derivatives = self if nested is self.nested else _structure(nested)
        return self._of_derivatives

    @property
    def node(self) -> Any:
        return self.nested and self.nested[0]

    @property
    def keys(self) -> Sequence:
        return self.nested[1] if self.nested else ()

    @property
    def settings(self) -> tuple:
        return self.nested[2].values if self.nested and self.nested[2] else ()

    @property
    def children(self) -> list[Structure]:
        return [_structure(child) for child in self.nested[3]] if self.nested else []

    @property
    def size(self) -> int:
        """The number of leaves."""
        return self.num_leaves

    @property
    def num_nodes(self) -> int:
        """The number of nodes, leaves included."""
        return 1 + builtins.sum([child.num_nodes for child in self.children])

    def unflatten(self, leaves: Iterable) -> Any:
        """Build the tree of this structure from its leaves: see `unflatten`."""
        return unflatten(self, leaves)

    def flatten_up_to(self, tree: Any) -> list:
        """Return the subtrees of `tree` at the leaves of this structure.

        Args:
            tree: a tree of this structure, which may have a whole tree in place of a leaf.

        Returns:
            The list of subtrees.

        Raises:
            ValueError: if this structure is not a prefix of that of `tree`; it names the path.

        >>> structure([0, {'a': 0}]).flatten_up_to([(1.0, 2.0), {'a': [3.0]}])
        [(1.0, 2.0), [3.0]]
        """
        return _find_subtrees(self.nested, tree, "flatten_up_to: tree", "the structure")

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Structure) and self.nested == other.nested)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.nested)
        return self._hash

    def __repr__(self) -> str:
        return _show(self.nested)


def _show(nested: Nested) -> str:
    if nested is None:
        return "*"
    kind, keys, settings, children = nested
    if kind is Setting:
        return repr(settings.values[0])
    entry, (before, after) = NODES[kind].key.in_structure, NODES[kind].brackets
    text = ", ".join([entry.format(k, _show(child)) for k, child in zip(keys, children)])
    text += "," * (kind is tuple and len(keys) == 1)
    text += f"; {', '.join(builtins.map(repr, settings.values))}" if settings else ""
    return f"{before}{text}{after}"


def _make_builder(nested: Nested, start: int, are_all: bool = False) -> tuple[Callable[[list], Any], int]:
    """Return a function that builds a tree from its leaves, which begin at `start` in a list; and their end there.

    `are_all` says that the list has no others.
    """
    if nested is None:
        return operator.itemgetter(start), start + 1
    kind, keys, settings, children = nested
    # The constructors of the most common trees are called directly.
    constructors: dict[type, Callable[[list], Any]] = {tuple: tuple, list: list}
    make = constructors.get(kind) or functools.partial(NODES[kind].unflatten, keys, settings and settings.values)
    if not any(children):
        end = start + len(children)
        return make if are_all else lambda leaves: make(leaves[start:end]), end
    builders = []
    for child in children:
        build, start = _make_builder(child, start)
        builders.append(build)
    return lambda leaves: make([build(leaves) for build in builders]), start


LEAF = Structure(None)
# Methods of imported names are slow to find.
_are_leaves, _known_node_type = LEAVES.issuperset, NODES.get


@functools.lru_cache(maxsize=MANY)
def _cached_structure(nested: Nested) -> Structure:
    """Return a structure from a cache; ValueError for keys that may equal keys of another type, as 1 and True do."""
    waiting = [nested]
    for node in waiting:
        if node and not (type(node[1]) is range or {*builtins.map(type, node[1])} <= {str}):
            raise ValueError
        waiting += node[3] if node else ()
    return Structure(nested)


@functools.lru_cache(maxsize=MANY)
def _sequence_structure(kind: type, count: int) -> Structure:
    """Return the structure of a tuple or list of `count` leaves, the most common trees."""
    return _cached_structure((kind, range(count), (), (None,) * count))


def _structure(nested: Nested) -> Structure:
    if nested is None:
        return LEAF
    try:
        return _cached_structure(nested)
    except (TypeError, ValueError):  # the former for settings that have no hash
        return Structure(nested)


class _Settings:
    """The settings of a node, which are equal if their types are equal, too."""

    __slots__ = ("node", "values")

    def __init__(self, node: type, values: tuple):
        self.node = node
        self.values = values

    def key(self) -> tuple:
        """Return the key for comparison and hashing; TypeError for an unhashable setting."""
        try:
            hash(self.values)
        except TypeError as error:
            raise TypeError(
                f"a setting of a {self.node.__name__} in a tree cannot be compared ({error}): {self.values!r:.100}; "
                "settings are a part of the tree's structure: numbers, strings, tuples, functions. Arrays are "
                "children, not settings"
            ) from None
        return self.values, types_in(self.values)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Settings) and self.key() == other.key())

    def __hash__(self) -> int:
        return hash(self.key())


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list, Structure]:
    """Return the leaves of a tree, and its structure.

    `None` is a node without leaves. Dicts are read in sorted key order; keys that do not compare are sorted by type
    first. An `OrderedDict` keeps its own order, which is part of the structure.

    Args:
        tree: a tree with leaves of any type.
        is_leaf: a function of a subtree, which is a leaf too if the function returns true.

    Returns:
        The list of leaves, and the `Structure`.

    >>> flatten({'w': 1.0, 'b': (2.0, None)})
    ([2.0, 1.0], {'b': (*, None), 'w': *})
    >>> flatten({'w': 1.0, 'b': (2.0, None)}, is_leaf=lambda x: isinstance(x, tuple))
    ([(2.0, None), 1.0], {'b': *, 'w': *})
    """
    kind: Any = type(tree)
    if is_leaf is None:
        if kind in LEAVES:
            return [tree], LEAF
        if (kind is tuple or kind is list) and _are_leaves(builtins.map(type, tree)):
            return list(tree), _sequence_structure(kind, len(tree))
    leaves: list = []
    return leaves, _structure(_flatten(tree, is_leaf, leaves))


def _flatten(x: Any, is_leaf: IsLeaf | None, leaves: list) -> Nested:
    """Return the structure of a tree, and append its leaves to `leaves`."""
    kind = type(x)
    if (
        kind in LEAVES
        or (is_leaf is not None and is_leaf(x))
        or (node := _known_node_type(kind) or node_type_of(kind)) is None
    ):
        leaves.append(x)
        return None
    keys, children, settings = node[0](x)
    if _are_leaves(builtins.map(type, children)):
        leaves += children
        below: tuple[Nested, ...] = (None,) * len(keys)
    else:
        below = tuple([_flatten(child, is_leaf, leaves) for child in children])
    return kind, keys, settings and _Settings(kind, settings), below


# ---------------------------------------------------------------- strings and functions among leaves

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, numpy.ufunc, functools.partial, type)


def _is_setting(x: Any) -> bool:
    return isinstance(x, (str, bytes, *_FUNCTIONS)) or (callable(x) and hasattr(x, "__wrapped__"))


@functools.cache
def _may_be_setting(kind: type) -> bool:
    return issubclass(kind, (str, bytes, *_FUNCTIONS)) or any("__call__" in vars(k) for k in kind.__mro__)


def with_settings(args: Any) -> Any:
    """Return arguments, a tuple or a dict, in whose trees strings and functions are no leaves, but settings.

    Other objects stay leaves, which transformations reject: their attributes may be parameters. So does an argument
    that is a string or a function itself.

    >>> flatten(with_settings(({'w': 1.0, 'name': 'relu'}, 'linear')))
    ([1.0, 'linear'], ({'name': 'relu', 'w': *}, *))
    """
    if type(args) is dict:
        return dict(zip(args, with_settings((*args.values(),))))
    values = leaves(args)
    if not any(builtins.map(_may_be_setting, {*builtins.map(type, values)})) or not any(
        builtins.map(_is_setting, values)
    ):
        return args
    return tuple([x if _is_setting(x) else map(lambda x: Setting(x) if _is_setting(x) else x, x) for x in args])


def _without_settings(nested: Nested) -> Nested:
    if nested is None or nested[0] is Setting:
        return nested and (types.NoneType, (), (), ())
    below = tuple(builtins.map(_without_settings, nested[3]))
    return nested if builtins.all(builtins.map(operator.is_, below, nested[3])) else (*nested[:3], below)


def settings_among_leaves(nested: Nested) -> list:
    """Return the strings and functions that `with_settings` made a part of a structure, by its `nested`."""
    if nested is None or nested[0] is Setting:
        return list(nested[2].values) if nested else []
    return [x for child in nested[3] for x in settings_among_leaves(child)]


def children(tree: Any) -> list | None:
    """Return the children of a node, in the order of `structure.children`; None for a leaf."""
    node = _known_node_type(type(tree)) or node_type_of(type(tree))
    return None if node is None else list(node.flatten(tree)[1])


def paths(structure: Structure, root: str = "") -> list[str]:
    """Return the paths of the leaves of a tree of this structure, as strings: `root[0]['w']`."""
    return _walk(structure.nested, root, lambda key: key.in_path.format)


def _key_paths(structure: Structure) -> list[tuple]:
    """Return the paths of the leaves of a tree of this structure, as tuples of keys."""
    return _walk(structure.nested, (), lambda key: lambda name: (key(name),))


def _walk(nested: Nested, path: Any, steps: Callable[[Any], Callable[[Any], Any]]) -> list:
    """Return the paths of the leaves: sums of `path` and the steps, `steps(class of keys)(name of the child)`."""
    if nested is None:
        return [path]
    step = steps(NODES[nested[0]].key)
    return [leaf for k, child in zip(nested[1], nested[3]) for leaf in _walk(child, path + step(k), steps)]


def keystr(path: Iterable, *, simple: bool = False, separator: str = "") -> str:
    """Write a key path as a string.

    Args:
        path: a sequence of keys, as `flatten_with_path` returns.
        simple: write each key as its bare index, key or name.
        separator: a string to write between keys.

    Returns:
        The string.

    >>> path = (DictKey('layers'), SequenceKey(0), GetAttrKey('w'))
    >>> keystr(path), keystr(path, simple=True, separator='/')
    ("['layers'][0].w", 'layers/0/w')
    """
    return separator.join([str(key.value if simple and isinstance(key, Key) else key) for key in path])


def advice_on(path: str) -> str:
    """Return advice for an error about a leaf that is a field, and may be a setting.

    >>> advice_on("argument 0.name of loss"), advice_on("args[0]")
    ("; a field that is a setting is declared with metadata={'static': True}", '')
    """
    is_field = re.search(r"\.\w+ of |^\S*\.\w+$", path)
    return "; a field that is a setting is declared with metadata={'static': True}" if is_field else ""


def flatten_with_path(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[tuple[tuple, Any]], Structure]:
    """Flatten a tree, and pair each leaf with its key path.

    Args:
        tree: a tree with leaves of any type.
        is_leaf: a function of a subtree, which is a leaf too if the function returns true.

    Returns:
        The list of pairs `(path, leaf)`, where a path is a tuple of keys, and the `Structure`.

    >>> (pair,), _ = flatten_with_path([{'w': 1.0}])
    >>> pair
    ((SequenceKey(idx=0), DictKey(key='w')), 1.0)
    >>> keystr(pair[0])
    "[0]['w']"
    """
    leaves, structure = flatten(tree, is_leaf)
    return list(zip(_key_paths(structure), leaves)), structure


def flatten_with_paths(tree: Any, root: str = "") -> tuple[list[tuple[str, Any]], Structure]:
    """Flatten a tree, and pair each leaf with its path as messages show it: `root[0]['w']`."""
    leaves, structure = flatten(tree)
    return list(zip(paths(structure, root), leaves)), structure


def unflatten(structure: Structure, leaves: Iterable) -> Any:
    """Build the tree of a structure from its leaves.

    Args:
        structure: a `Structure`.
        leaves: an iterable of its leaves, in order. Of an iterator it takes as many as it needs.

    Returns:
        The tree.

    Raises:
        ValueError: for too few leaves, and for a list or tuple with too many.

    >>> unflatten(structure((1, [2, 3])), [4.0, 5.0, 6.0])
    (4.0, [5.0, 6.0])
    """
    size = structure.num_leaves
    if type(leaves) is not list:
        leaves = [*(leaves if type(leaves) is tuple else itertools.islice(leaves, size))]
    if len(leaves) != size:
        raise ValueError(f"tree.unflatten: {len(leaves)} leaves for a tree of {size}: {structure}")
    return structure.build(leaves)


def leaves(tree: Any, is_leaf: IsLeaf | None = None) -> list:
    """Return the leaves of a tree, in order.

    Args:
        tree: a tree with leaves of any type.
        is_leaf: a function of a subtree, which is a leaf too if the function returns true.

    Returns:
        The list of leaves.

    >>> leaves([1.0, None], is_leaf=lambda x: x is None)
    [1.0, None]
    """
    return flatten(tree, is_leaf)[0]


def leaves_with_path(tree: Any, is_leaf: IsLeaf | None = None) -> list[tuple[tuple, Any]]:
    """Return the leaves of a tree, each with its key path.

    Args:
        tree: a tree with leaves of any type.
        is_leaf: a function of a subtree, which is a leaf too if the function returns true.

    Returns:
        The list of pairs `(path, leaf)`, where a path is a tuple of keys.

    >>> [(keystr(path), x) for path, x in leaves_with_path({'w': 1.0, 'b': [2.0]})]
    [("['b'][0]", 2.0), ("['w']", 1.0)]
    """
    return flatten_with_path(tree, is_leaf)[0]


def structure(tree: Any, is_leaf: IsLeaf | None = None) -> Structure:
    """Return the structure of a tree.

    Args:
        tree: a tree with leaves of any type.
        is_leaf: a function of a subtree, which is a leaf too if the function returns true.

    Returns:
        The `Structure`, which compares by `==` and is hashable.

    >>> structure((1.0, [2.0, None]))
    (*, [*, None])
    """
    return flatten(tree, is_leaf)[1]


def all_leaves(iterable: Iterable, is_leaf: IsLeaf | None = None) -> bool:
    """Return whether all elements are leaves.

    Args:
        iterable: values of any type.
        is_leaf: a function of a value, which is a leaf too if the function returns true.

    Returns:
        A boolean.

    >>> all_leaves([1.0, 'text']), all_leaves([1.0, (2.0,)]), all_leaves([None])
    (True, False, False)
    """
    return builtins.all(children(x) is None or (is_leaf is not None and is_leaf(x)) for x in iterable)


def map(f: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Map `f(leaf, *subtrees of rest)` over the leaves of a tree.

    Args:
        f: a function of a leaf of `tree`, and of what each tree of `rest` has there.
        tree: a tree with leaves of any type.
        rest: trees that have a leaf or a whole tree where `tree` has a leaf.
        is_leaf: a function of a subtree of `tree`, which is a leaf too if the function returns true.

    Returns:
        A tree with the structure of `tree`.

    Raises:
        ValueError: if the structure of `tree` is not a prefix of that of another tree; it names the path.

    >>> map(lambda x, y: x * y, {'w': 2.0, 'b': 3.0}, {'w': 10.0, 'b': 100.0})
    {'b': 300.0, 'w': 20.0}
    >>> map(lambda rate, group: [rate * x for x in group], (0.1, 10.0), ([1.0], [2.0, 3.0]))
    ([0.1], [20.0, 30.0])
    """
    leaves, shape = flatten(tree, is_leaf)
    return unflatten(shape, builtins.map(f, leaves, *_match_subtrees("map", shape, rest)))


def map_with_path(f: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Map `f(path, leaf, *subtrees of rest)` over the leaves of a tree.

    Args:
        f: a function of the path, a tuple of keys, and of the arguments of the function of `map`.
        tree: a tree with leaves of any type.
        rest: trees that have a leaf or a whole tree where `tree` has a leaf.
        is_leaf: a function of a subtree of `tree`, which is a leaf too if the function returns true.

    Returns:
        A tree with the structure of `tree`.

    Raises:
        ValueError: if the structure of `tree` is not a prefix of that of another tree; it names the path.

    >>> map_with_path(lambda path, x: f"{keystr(path)} = {x}", {'w': 1.0, 'b': [2.0]})
    {'b': ["['b'][0] = 2.0"], 'w': "['w'] = 1.0"}
    """
    leaves, shape = flatten(tree, is_leaf)
    return unflatten(shape, builtins.map(f, _key_paths(shape), leaves, *_match_subtrees("map_with_path", shape, rest)))


def _match_subtrees(caller: str, shape: Structure, trees: Sequence) -> list[list]:
    """Return the subtrees of each tree at the leaves of a structure."""
    columns = []
    for n, other in enumerate(trees):
        subtrees, other_shape = flatten(other)
        if other_shape != shape:
            root = f"tree.{caller}: the trees differ in structure: rest[{n}]"
            subtrees = _find_subtrees(shape.nested, other, root, "the first tree")
        columns.append(subtrees)
    return columns


def transpose(outer: Structure, inner: Structure | None, tree: Any) -> Any:
    """Turn a tree of trees inside out: a tree `outer` of trees `inner` becomes an `inner` of `outer`s.

    Args:
        outer: the structure of the tree.
        inner: the structure of each tree in it; None for that of the first.
        tree: a tree with the structure `outer`, with a tree of the structure `inner` for each leaf.

    Returns:
        A tree with the structure `inner`, with a tree of the structure `outer` for each leaf.

    Raises:
        ValueError: if the structures do not match, or `inner` is None and there is no tree to take it from.

    >>> transpose(structure([0, 0]), structure({'x': 0, 'y': 0}), [{'x': 1, 'y': 2}, {'x': 3, 'y': 4}])
    {'x': [1, 3], 'y': [2, 4]}
    """
    rows = outer.flatten_up_to(tree)
    if inner is None:
        if not rows:
            raise ValueError(f"tree.transpose: {outer} has no leaves: pass the inner structure, too")
        inner = structure(rows[0])
    rows = [inner.flatten_up_to(row) for row in rows]
    return unflatten(inner, [unflatten(outer, [row[n] for row in rows]) for n in range(inner.num_leaves)])


_NO_VALUE: Any = object()


def reduce(function: Callable, tree: Any, initializer: Any = _NO_VALUE, is_leaf: IsLeaf | None = None) -> Any:
    """Fold the leaves of a tree by a function.

    Args:
        function: `function(accumulated, leaf)` returns the next accumulated value.
        tree: a tree with leaves of any type.
        initializer: the first accumulated value; by default the first leaf.
        is_leaf: a function of a subtree, which is a leaf too if the function returns true.

    Returns:
        The last accumulated value.

    Raises:
        TypeError: if there are no leaves and no `initializer`.

    >>> reduce(lambda total, x: total + x ** 2, {'w': 3.0, 'b': 4.0}, 0.0)
    25.0
    """
    return functools.reduce(function, leaves(tree, is_leaf), *[initializer] * (initializer is not _NO_VALUE))


def ravel_pytree(pytree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Flatten a tree of arrays to one vector; return the vector and the inverse function.

    Args:
        pytree: a tree of arrays.

    Returns:
        The vector, [n], with the dtype to which the leaves promote (float64 if there are none); and the function
        `unravel(vector)`, which returns a tree like `pytree`, with the shapes and dtypes of its leaves. If all leaves
        have one dtype, it takes vectors of any dtype, and keeps it.

    Raises:
        TypeError: for a leaf that is not an array, with its path; by `unravel`, for a vector of another dtype, if
            leaves differ in dtype.
        ValueError: by `unravel`, for another shape.

    >>> flat, unravel = ravel_pytree({'w': numpy.ones((2, 2)), 'b': 3.0})
    >>> flat
    array([3., 1., 1., 1., 1.])
    >>> map(numpy.shape, unravel(2 * flat))
    {'b': (), 'w': (2, 2)}
    """
    leaves, structure = flatten_with_paths(pytree, "pytree")
    types = [_type_of(x, f"tree.ravel_pytree: {path}") for path, x in leaves]
    dtype = numpy.result_type(*[t.dtype for t in types]) if types else numpy.dtype(float)
    stops = [*itertools.accumulate(t.size for t in types)]
    count = stops[-1] if stops else 0
    is_mixed = any(t.dtype != dtype for t in types)

    def unravel(flat: Any) -> Any:
        vector = _type_of(flat, "unravel: flat")
        if vector.shape != (count,):
            raise ValueError(f"unravel takes the {count} numbers of {structure} as one vector, got {vector}")
        if is_mixed and vector.dtype != dtype:
            raise TypeError(f"unravel takes a vector of {dtype}, to which the leaves' dtypes promote, got {vector}")
        pieces = []
        for t, stop in zip(types, stops):
            piece = flat[stop - t.size : stop].reshape(t.shape) if t.shape else flat[stop - 1]
            pieces.append(convert_array(piece, t.dtype if is_mixed else vector.dtype))
        return unflatten(structure, pieces)

    rows = [numpy.ravel(x).astype(dtype) for _, x in leaves]
    return numpy.concatenate(rows) if rows else numpy.zeros(0), unravel


def _type_of(x: Any, name: str) -> ShapedArray:
    try:
        return typeof(x)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def all(tree: Any, *, is_leaf: IsLeaf | None = None) -> bool:
    """Return whether all leaves are true.

    Args:
        tree: a tree with leaves of any type.
        is_leaf: a function of a subtree, which is a leaf too if the function returns true.

    Returns:
        A boolean: True for a tree without leaves.

    >>> all({'w': True, 'b': [True, False]})
    False
    """
    return builtins.all(leaves(tree, is_leaf))


# ---------------------------------------------------------------- prefixes


def _find_subtrees(nested: Nested, tree: Any, path: str, owner: str | None = None) -> list:
    """Return the subtrees of `tree`, at `path`, at the leaves of a structure that is a prefix of its own.

    If it is not, raise ValueError. The structure is that of `owner`, or else of a prefix that users write, in which
    tuples and lists match each other.
    """
    if nested is None:
        return [tree]
    prefix_kind, keys, settings, below = nested
    kind = type(tree)
    node = _known_node_type(kind) or node_type_of(kind)
    if node is not None and (kind is prefix_kind or (owner is None and {kind, prefix_kind} <= _SEQUENCES)):
        names, children, values = node.flatten(tree)
        if names == keys and (values and _Settings(kind, values)) == settings:
            if not any(below):
                return list(children)
            name = node.key.in_path.format
            parts = [_find_subtrees(s, x, path + name(k), owner) for k, s, x in zip(keys, below, children)]
            return [*itertools.chain.from_iterable(parts)]
    shape = _structure(nested)
    is_not = f"{path} is {structure(tree)}, where {owner} has {shape}"
    raise ValueError(_why_not_a_prefix(shape, tree, path) if owner is None else is_not)


def broadcast(prefix: Any, tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Broadcast a prefix to the structure of `tree`: repeat each leaf for all leaves of the subtree in its place.

    Args:
        prefix: a tree that has a leaf where `tree` has a leaf or a whole tree.
        tree: a tree with leaves of any type.
        is_leaf: a function of a subtree of `prefix`, which is a leaf too if the function returns true.

    Returns:
        A tree with the structure of `tree`, and the leaves of `prefix`.

    Raises:
        ValueError: if `prefix` is not a prefix of `tree`; it names the path.

    >>> broadcast({'w': 0, 'b': 1}, {'w': [1.0, 2.0], 'b': 3.0})
    {'b': 1, 'w': [0, 0]}
    """
    entries, shape = flatten(prefix, is_leaf)
    subtrees = _find_subtrees(shape.nested, tree, "tree.broadcast: tree", "the prefix")
    return unflatten(structure(tree), _repeat_entries(entries, subtrees))


def _repeat_entries(entries: Sequence, trees: Sequence) -> list:
    """Return each entry as often as its tree has leaves."""
    return [x for x, t in zip(entries, trees) for _ in range(structure(t).num_leaves)]


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: IsLeaf, name: str) -> list:
    """Return a list of the leaves of a prefix, each as often as the subtree in its place has leaves.

    Only leaves for which `is_leaf` is true are accepted; tuples and lists match each other. Raise ValueError, with the
    `name` of the prefix, if the two do not match.
    """
    if is_leaf(prefix):
        return [prefix] * structure(tree).num_leaves
    entries, shape = flatten(prefix, is_leaf)
    if not builtins.all(builtins.map(is_leaf, entries)):
        path, x = next((path, x) for path, x in zip(paths(shape, name), entries) if not is_leaf(x))
        raise ValueError(f"{path} is {x!r}, which is neither an entry for arrays nor a tree of entries")
    return _repeat_entries(entries, _find_subtrees(shape.nested, tree, name))


_SEQUENCES = frozenset({tuple, list})


def _why_not_a_prefix(s: Structure, tree: Any, path: str) -> str:
    """Explain why a prefix does not match `tree`; `s` is its structure there."""
    other = structure(tree)
    keys, other_keys = s.keys, other.keys
    if s.node is types.NoneType:
        values = "a single array" if other.node is None else _a(other.node)
        return f"{path} is None for {values}, but None means no arrays: write an entry"
    if other.node is None:
        return f"{path} is {_a(s.node)} of {len(keys)} for a single array: write one entry, not {_a(s.node)}"
    if s.node is not other.node and not {s.node, other.node} <= _SEQUENCES:
        return f"{path} is {_a(s.node)} for {_a(other.node)}"
    if keys != other_keys:
        if issubclass(s.node, (dict, types.SimpleNamespace)):
            return f"{path} has the keys {list(keys)} for values with the keys {list(other_keys)}: give it the same"
        count = "1 entry" if len(keys) == 1 else f"{len(keys)} entries"
        values = "1 value" if len(other_keys) == 1 else f"{len(other_keys)} values"
        return f"{path} has {count} for {values}: write one for each, or a single one for all"
    return f"{path} has the settings {s.settings} for values with {other.settings}: give it the same"


def _a(kind: type) -> str:
    """Return the name of a class with an article: `a dict`."""
    return f"a{'n' * (kind.__name__[0] in 'AEIOUaeio')} {kind.__name__}"


#: Functions that the library itself calls often.
_OFTEN = {"flatten", "leaves", "structure", "unflatten"}

hide_frames_of(globals(), {*__all__} - _OFTEN)
