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
import contextlib
import functools
import itertools
import operator
import re
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.core.types import ShapedArray, typeof
from minidiff.diagnostics.tracebacks import hide_frames_of
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

# ---------------------------------------------------------------- classes

MANY = 1024  # the size of the caches of key orders and of structures


class Key:
    """A step of a key path, from a node to one of its children; `str` writes it as in Python.

    Keys are equal if they have the same class and the same value. The `repr` of a key evaluates to it.
    """

    __slots__: tuple[str, ...] = ()
    in_path: str  # formats of the key, and of the key beside its child in a printed structure
    in_structure: str

    @property
    def value(self) -> Any:
        return getattr(self, self.__slots__[0])

    def __str__(self) -> str:
        return self.in_path.format(self.value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__slots__[0]}={self.value!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.value == self.value

    def __hash__(self) -> int:
        return hash((type(self), self.value))


class SequenceKey(Key):
    """A step to child number `idx` of a tuple, a list, or an object given to `register`.

    >>> str(SequenceKey(0)), SequenceKey(idx=0).idx
    ('[0]', 0)
    """

    __slots__ = ("idx",)
    in_path, in_structure = "[{0}]", "{1}"

    def __init__(self, idx: int):
        self.idx = idx


class DictKey(Key):
    """A step to the child that a dict has under `key`.

    >>> str(DictKey('w')), DictKey(key='w').key
    ("['w']", 'w')
    """

    __slots__ = ("key",)
    in_path, in_structure = "[{0!r}]", "{0!r}: {1}"

    def __init__(self, key: Any):
        self.key = key


class GetAttrKey(Key):
    """A step to the field `name` of a named tuple, a dataclass, an attrs object or a namespace.

    >>> str(GetAttrKey('w')), GetAttrKey(name='w').name
    ('.w', 'w')
    """

    __slots__ = ("name",)
    in_path, in_structure = ".{0}", "{0}={1}"

    def __init__(self, name: str):
        self.name = name


class GivenKey(Key):
    """A step that `register_with_keys` was given: any object with a `str`."""

    in_path, in_structure = "{0}", "{0}: {1}"

    def __new__(cls, key: Any) -> Any:
        return key


class Class(NamedTuple):
    """How to flatten, unflatten and print trees of one class.

    `parts(x)` returns the names of the children, the children, and a tuple of settings. `maker(names, settings)`
    returns a function that builds a tree from a list of children, which it may keep. `key(name)` is the step of a path
    to a child. `brackets` enclose the children in a printed structure.
    """

    parts: Callable[[Any], tuple[Sequence, Sequence, tuple]]
    maker: Callable[[tuple, tuple], Callable[[list], Any]]
    key: type[Key]
    brackets: tuple[str, str]


def _sequence_parts(x: Sequence) -> tuple[Sequence, Sequence, tuple]:
    return range(len(x)), x, ()


def _dict_parts(x: dict) -> tuple[Sequence, Sequence, tuple]:
    keys, values = _keys_and_reader(*x)
    return keys, values(x), ()


@functools.lru_cache(maxsize=MANY, typed=True)
def _keys_and_reader(*keys: Any) -> tuple[tuple, Callable[[dict], Sequence]]:
    """A dict's keys in order, and a function that reads its values in that order.

    Keys that do not compare are sorted by type first. If they do not compare then, they keep their order.
    """
    for order in (None, lambda k: (type(k).__module__, type(k).__qualname__, k)):
        with contextlib.suppress(TypeError):
            keys = tuple(sorted(keys, key=order))
            break
    return keys, operator.itemgetter(*keys) if len(keys) > 1 else lambda x: [*x.values()]


#: The classes whose objects are trees. A class of a family is added at its first use.
_CLASSES: dict[type, Class] = {
    tuple: Class(_sequence_parts, lambda names, settings: tuple, SequenceKey, ("(", ")")),
    list: Class(_sequence_parts, lambda names, settings: list, SequenceKey, ("[", "]")),
    dict: Class(_dict_parts, lambda keys, settings: lambda children: dict(zip(keys, children)), DictKey, ("{", "}")),
    OrderedDict: Class(
        lambda x: (tuple(x), list(x.values()), ()),
        lambda keys, settings: lambda children: OrderedDict(zip(keys, children)),
        DictKey,
        ("OrderedDict({", "})"),
    ),
    defaultdict: Class(
        lambda x: (*_dict_parts(x)[:2], (x.default_factory,)),
        lambda keys, settings: lambda children: defaultdict(settings[0], zip(keys, children)),
        DictKey,
        ("defaultdict({", "})"),
    ),
    types.SimpleNamespace: Class(
        lambda x: _dict_parts(vars(x)),
        lambda names, settings: lambda children: types.SimpleNamespace(**dict(zip(names, children))),
        GetAttrKey,
        ("namespace(", ")"),
    ),
    types.NoneType: Class(
        lambda x: ((), (), ()), lambda names, settings: lambda children: None, SequenceKey, ("None", "")
    ),
}

#: The types whose objects are leaves. Further ones are added at their first use.
_LEAVES = {float, int, complex, bool, str, numpy.ndarray, numpy.float64, numpy.float32, numpy.int64}

_GIVEN = {*_CLASSES, *_LEAVES}  # classes that `register` rejects


def _named_tuple(kind: Any) -> Class:
    names, brackets = tuple(kind._fields), (f"{kind.__name__}(", ")")
    return Class(lambda x: (names, x, ()), lambda names, settings: kind._make, GetAttrKey, brackets)


def _dataclass(kind: type) -> Class:
    import dataclasses  # slow to import

    return _record(kind, [(f, f.name) for f in dataclasses.fields(kind) if f.init])


def _attrs_class(kind: Any) -> Class:
    return _record(kind, [(a, getattr(a, "alias", None) or a.name.lstrip("_")) for a in kind.__attrs_attrs__ if a.init])


def _record(kind: type, fields: Sequence[tuple[Any, str]]) -> Class:
    """A class with fields, each given with the `__init__` argument that sets it."""
    names, settings = (
        tuple([f.name for f, _ in fields if bool(f.metadata.get("static")) is static]) for static in (False, True)
    )
    argument_of = {f.name: argument for f, argument in fields}
    arguments = [argument_of[name] for name in (*names, *settings)]

    def parts(x: Any) -> tuple[Sequence, Sequence, tuple]:
        return names, [getattr(x, name) for name in names], tuple([getattr(x, name) for name in settings])

    def make(children: list, settings: tuple) -> Any:
        try:
            return kind(**dict(zip(arguments, [*children, *settings])))
        except Exception as error:
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(
                    f"This was raised while a {kind.__name__} was built from the leaves of a tree, which may be traced "
                    f"values or gradients. If its __init__ does not accept these, say how to build it: "
                    f"md.tree.register({kind.__name__}, flatten, unflatten)"
                )
            raise

    maker = lambda names, settings: lambda children: make(children, settings)  # noqa: E731
    return Class(parts, maker, GetAttrKey, (f"{kind.__name__}(", ")"))


#: Families of classes that are trees: the name, a test for membership, and the function that makes a `Class`.
_FAMILIES: tuple[tuple[str, Callable[[type], bool], Callable[[type], Class]], ...] = (
    ("named tuples", lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"), _named_tuple),
    ("dataclasses", lambda kind: hasattr(kind, "__dataclass_fields__"), _dataclass),
    ("attrs classes", lambda kind: hasattr(kind, "__attrs_attrs__"), _attrs_class),
)


def _class_of(kind: type) -> Class | None:
    """Classify a class at its first use: its `Class`, or None if it is a leaf."""
    for _, holds, make in _FAMILIES:
        if holds(kind):
            return _CLASSES.setdefault(kind, make(kind))
    _LEAVES.add(kind)
    return None


def class_names() -> list[str]:
    """The names of the classes and families that are trees, for error messages.

    >>> class_names()[:4], class_names()[-3:]
    (['tuple', 'list', 'dict', 'OrderedDict'], ['named tuples', 'dataclasses', 'attrs classes'])
    """
    met = [kind for kind in _CLASSES if kind in _GIVEN and kind is not types.NoneType]
    return [*[kind.__name__ for kind in met], "None", *[name for name, _, _ in _FAMILIES]]


def register(cls: type, flatten: Callable[[Any], tuple[Iterable, Any]], unflatten: Callable[[Any, tuple], Any]) -> None:
    """Register a class whose objects are trees.

    `flatten(x)` returns the children of `x`, which are arrays or trees, and its settings: a hashable object, compared
    by `==`, with everything else that is needed to rebuild `x`. `unflatten(settings, children)` is the inverse. It must
    accept children of any kind: traced values, gradients, partition specs. Register subclasses separately. For a
    dataclass or attrs class this overrides the default. Raise TypeError if `cls` is not a class, and ValueError if it
    is already registered, or is a built-in tree or leaf class.

    >>> class Interval:
    ...     def __init__(self, low, high):
    ...         self.low, self.high = low, high
    >>> register(Interval, lambda x: ((x.low, x.high), None), lambda _, children: Interval(*children))
    >>> leaves([Interval(1.0, 2.0), 3.0])
    [1.0, 2.0, 3.0]
    """

    def parts(x: Any) -> tuple[Sequence, Sequence, tuple]:
        children, settings = _flatten_by("register", "children", x, flatten)
        return range(len(children)), children, (settings,)

    _register("register", cls, parts, unflatten, SequenceKey)


def register_with_keys(
    cls: type, flatten_with_keys: Callable[[Any], tuple[Iterable, Any]], unflatten: Callable[[Any, tuple], Any]
) -> None:
    """Register a class whose objects are trees, and how paths name their children.

    Like `register`, but `flatten_with_keys(x)` returns pairs (key, child) in place of children. Keys are hashable, and
    paths show `str(key)`. Common keys are `GetAttrKey(name)`, `DictKey(key)` and `SequenceKey(index)`.

    >>> class Interval:
    ...     def __init__(self, low, high):
    ...         self.low, self.high = low, high
    >>> def flatten_with_keys(x):
    ...     return ((GetAttrKey('low'), x.low), (GetAttrKey('high'), x.high)), None
    >>> register_with_keys(Interval, flatten_with_keys, lambda _, children: Interval(*children))
    >>> [(keystr(path), x) for path, x in leaves_with_path([Interval(1.0, 2.0)])]
    [('[0].low', 1.0), ('[0].high', 2.0)]
    """

    def parts(x: Any) -> tuple[Sequence, Sequence, tuple]:
        pairs, settings = _flatten_by("register_with_keys", "pairs of a key and a child", x, flatten_with_keys)
        return tuple([key for key, _ in pairs]), [child for _, child in pairs], (settings,)

    _register("register_with_keys", cls, parts, unflatten, GivenKey)


def _flatten_by(what: str, children: str, x: Any, flatten: Callable[[Any], tuple[Iterable, Any]]) -> tuple[list, Any]:
    found = flatten(x)
    if not (isinstance(found, tuple) and len(found) == 2):
        raise TypeError(
            f"tree.{what}: flatten of {type(x).__name__} returns a pair ({children}, settings), got "
            f"{type(found).__name__}: {found!r:.60}"
        )
    return list(found[0]), found[1]


def _register(what: str, cls: type, parts: Callable, unflatten: Callable[[Any, tuple], Any], key: type[Key]) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"tree.{what} takes a class, and two functions: {what}(cls, flatten, unflatten); got {cls!r}")
    if cls in _GIVEN:
        raise ValueError(f"tree.{what}: {cls.__name__} is registered already, or is a built-in tree or leaf")

    maker = lambda names, settings: lambda children: unflatten(settings[0], tuple(children))  # noqa: E731
    _GIVEN.add(cls)
    _CLASSES[cls] = Class(parts, maker, key, (f"{cls.__name__}(", ")"))
    _LEAVES.discard(cls)


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

    __slots__ = ("_hash", "build", "num_leaves", "nested")

    def __init__(self, nested: Nested):
        self.nested = nested
        #: The number of leaves; and the function that builds a tree from a list of them.
        self.build, self.num_leaves = _builder(nested, 0, True)
        self._hash: int | None = None

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
        """The subtrees of `tree` at the leaves of this structure.

        This structure is a prefix of that of `tree`, which may have a whole tree in place of a leaf. Raise ValueError,
        with the path, if it is not.

        >>> structure([0, {'a': 0}]).flatten_up_to([(1.0, 2.0), {'a': [3.0]}])
        [(1.0, 2.0), [3.0]]
        """
        return _subtrees(self.nested, tree, "flatten_up_to: tree", "the structure")

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
    entry, (before, after) = _CLASSES[kind].key.in_structure, _CLASSES[kind].brackets
    text = ", ".join([entry.format(k, _show(child)) for k, child in zip(keys, children)])
    text += "," * (kind is tuple and len(keys) == 1)
    text += f"; {', '.join(builtins.map(repr, settings.values))}" if settings else ""
    return f"{before}{text}{after}"


def _builder(nested: Nested, start: int, whole: bool = False) -> tuple[Callable[[list], Any], int]:
    """The function that builds a tree from its leaves, which begin at `start` in a list; and where they end.

    They are the `whole` list, or not.
    """
    if nested is None:
        return operator.itemgetter(start), start + 1
    kind, keys, settings, children = nested
    make = _CLASSES[kind].maker(keys, settings and settings.values)
    if not any(children):
        end = start + len(children)
        return make if whole else lambda leaves: make(leaves[start:end]), end
    builders = []
    for child in children:
        build, start = _builder(child, start)
        builders.append(build)
    return lambda leaves: make([build(leaves) for build in builders]), start


LEAF = Structure(None)


@functools.lru_cache(maxsize=MANY)
def _cached_structure(nested: Nested) -> Structure:
    """A structure from a cache; ValueError for keys that may equal keys of another type, as 1 and True do."""
    waiting = [nested]
    for node in waiting:
        if node and not (type(node[1]) is range or {*builtins.map(type, node[1])} <= {str}):
            raise ValueError
        waiting += node[3] if node else ()
    return Structure(nested)


@functools.lru_cache(maxsize=MANY)
def _sequence(kind: type, count: int) -> Structure:
    """The structure of a tuple or list of `count` leaves, the most common trees."""
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
        """The key for comparison and hashing; TypeError for an unhashable setting."""
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
    """The leaves of a tree, and its structure.

    `None` is a node without leaves. Dicts are read in sorted key order; keys that do not compare are sorted by type
    first. An `OrderedDict` keeps its own order, which is part of the structure. A subtree for which `is_leaf` is true
    is a leaf too.

    >>> flatten({'w': 1.0, 'b': (2.0, None)})
    ([2.0, 1.0], {'b': (*, None), 'w': *})
    >>> flatten({'w': 1.0, 'b': (2.0, None)}, is_leaf=lambda x: isinstance(x, tuple))
    ([(2.0, None), 1.0], {'b': *, 'w': *})
    """
    kind: Any = type(tree)
    if is_leaf is None:
        if kind in _LEAVES:
            return [tree], LEAF
        if (kind is tuple or kind is list) and _LEAVES.issuperset(builtins.map(type, tree)):
            return list(tree), _sequence(kind, len(tree))
    found: list = []
    return found, _structure(_flatten(tree, is_leaf, found))


def _flatten(x: Any, is_leaf: IsLeaf | None, found: list) -> Nested:
    """The structure of a tree, whose leaves are appended to `found`."""
    kind = type(x)
    if (
        kind in _LEAVES
        or (is_leaf is not None and is_leaf(x))
        or (how := _CLASSES.get(kind) or _class_of(kind)) is None
    ):
        found.append(x)
        return None
    keys, children, settings = how[0](x)
    if _LEAVES.issuperset(builtins.map(type, children)):
        found += children
        below: tuple[Nested, ...] = (None,) * len(keys)
    else:
        below = tuple([_flatten(child, is_leaf, found) for child in children])
    return kind, keys, settings and _Settings(kind, settings), below


def children(tree: Any) -> list | None:
    """The children of a node, in the order of `structure.children`; None for a leaf."""
    how = _CLASSES.get(type(tree)) or _class_of(type(tree))
    return None if how is None else list(how.parts(tree)[1])


def paths(structure: Structure, root: str = "") -> list[str]:
    """The paths of the leaves of a tree of this structure, as strings: `root[0]['w']`."""
    return _walk(structure.nested, root, lambda key: key.in_path.format)


def _key_paths(structure: Structure) -> list[tuple]:
    """The paths of the leaves of a tree of this structure, as tuples of keys."""
    return _walk(structure.nested, (), lambda key: lambda name: (key(name),))


def _walk(nested: Nested, path: Any, steps: Callable[[Any], Callable[[Any], Any]]) -> list:
    """The paths of the leaves: sums of `path` and the steps to each, `steps(class of keys)(name of the child)`."""
    if nested is None:
        return [path]
    step = steps(_CLASSES[nested[0]].key)
    return [found for k, child in zip(nested[1], nested[3]) for found in _walk(child, path + step(k), steps)]


def keystr(path: Iterable, *, simple: bool = False, separator: str = "") -> str:
    """Write a key path as a string.

    With `simple`, a key is written as its bare index, key or name.

    >>> path = (DictKey('layers'), SequenceKey(0), GetAttrKey('w'))
    >>> keystr(path), keystr(path, simple=True, separator='/')
    ("['layers'][0].w", 'layers/0/w')
    """
    return separator.join([str(key.value if simple and isinstance(key, Key) else key) for key in path])


def advice_on(path: str) -> str:
    """Advice for an error about a leaf that is a field, and may be a setting.

    >>> advice_on("argument 0.name of loss"), advice_on("args[0]")
    ("; a field that is a setting is declared with metadata={'static': True}", '')
    """
    is_field = re.search(r"\.\w+ of |^\S*\.\w+$", path)
    return "; a field that is a setting is declared with metadata={'static': True}" if is_field else ""


def flatten_with_path(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[tuple[tuple, Any]], Structure]:
    """As `flatten`, but pair each leaf with its key path, a tuple of keys.

    >>> (pair,), _ = flatten_with_path([{'w': 1.0}])
    >>> pair
    ((SequenceKey(idx=0), DictKey(key='w')), 1.0)
    >>> keystr(pair[0])
    "[0]['w']"
    """
    found, structure = flatten(tree, is_leaf)
    return list(zip(_key_paths(structure), found)), structure


def flatten_with_paths(tree: Any, root: str = "") -> tuple[list[tuple[str, Any]], Structure]:
    """As `flatten`, but pair each leaf with its path as messages show it: `root[0]['w']`."""
    found, structure = flatten(tree)
    return list(zip(paths(structure, root), found)), structure


def unflatten(structure: Structure, leaves: Iterable) -> Any:
    """Build the tree of a structure from its leaves.

    It takes as many leaves from an iterator as it needs. Raise ValueError if there are too few, or if a list or tuple
    has more.

    >>> unflatten(structure((1, [2, 3])), [4.0, 5.0, 6.0])
    (4.0, [5.0, 6.0])
    """
    size = structure.num_leaves
    found = leaves if type(leaves) is list else [*(leaves if type(leaves) is tuple else itertools.islice(leaves, size))]
    if len(found) != size:
        raise ValueError(f"tree.unflatten: {len(found)} leaves for a tree of {size}: {structure}")
    return structure.build(found)


def leaves(tree: Any, is_leaf: IsLeaf | None = None) -> list:
    """The leaves of a tree, in order; `is_leaf` as in `flatten`.

    >>> leaves([1.0, None], is_leaf=lambda x: x is None)
    [1.0, None]
    """
    return flatten(tree, is_leaf)[0]


def leaves_with_path(tree: Any, is_leaf: IsLeaf | None = None) -> list[tuple[tuple, Any]]:
    """The leaves of a tree, each with its key path.

    >>> [(keystr(path), x) for path, x in leaves_with_path({'w': 1.0, 'b': [2.0]})]
    [("['b'][0]", 2.0), ("['w']", 1.0)]
    """
    return flatten_with_path(tree, is_leaf)[0]


def structure(tree: Any, is_leaf: IsLeaf | None = None) -> Structure:
    """The structure of a tree; `is_leaf` as in `flatten`.

    >>> structure((1.0, [2.0, None]))
    (*, [*, None])
    """
    return flatten(tree, is_leaf)[1]


def all_leaves(iterable: Iterable, is_leaf: IsLeaf | None = None) -> bool:
    """Whether all elements are leaves.

    >>> all_leaves([1.0, 'text']), all_leaves([1.0, (2.0,)]), all_leaves([None])
    (True, False, False)
    """
    return builtins.all(children(x) is None or (is_leaf is not None and is_leaf(x)) for x in iterable)


def map(f: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Map `f(leaf, *subtrees of rest)` over the leaves of a tree.

    The structure of `tree` is a prefix of that of each tree of `rest`, which has a leaf or a whole tree where `tree`
    has a leaf. `is_leaf` is as in `flatten`, for `tree`. Raise ValueError, with the path, if the structures differ.

    >>> map(lambda x, y: x * y, {'w': 2.0, 'b': 3.0}, {'w': 10.0, 'b': 100.0})
    {'b': 300.0, 'w': 20.0}
    >>> map(lambda rate, group: [rate * x for x in group], (0.1, 10.0), ([1.0], [2.0, 3.0]))
    ([0.1], [20.0, 30.0])
    """
    found, shape = flatten(tree, is_leaf)
    return unflatten(shape, builtins.map(f, found, *_match_subtrees("map", shape, rest)))


def map_with_path(f: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf | None = None) -> Any:
    """As `map`, of `f(path, leaf, *subtrees of rest)`. A path is a tuple of keys.

    >>> map_with_path(lambda path, x: f"{keystr(path)} = {x}", {'w': 1.0, 'b': [2.0]})
    {'b': ["['b'][0] = 2.0"], 'w': "['w'] = 1.0"}
    """
    found, shape = flatten(tree, is_leaf)
    return unflatten(shape, builtins.map(f, _key_paths(shape), found, *_match_subtrees("map_with_path", shape, rest)))


def _match_subtrees(what: str, shape: Structure, trees: Sequence) -> list[list]:
    """The subtrees of each tree at the leaves of a structure."""
    found = []
    for n, other in enumerate(trees):
        more, other_shape = flatten(other)
        if other_shape != shape:
            root = f"tree.{what}: the trees differ in structure: rest[{n}]"
            more = _subtrees(shape.nested, other, root, "the first tree")
        found.append(more)
    return found


def transpose(outer: Structure, inner: Structure | None, tree: Any) -> Any:
    """Turn a tree of trees inside out: a tree `outer` of trees `inner` becomes an `inner` of `outer`s.

    If `inner` is None, it is the structure of the first tree. Raise ValueError if the structures do not match.

    >>> transpose(structure([0, 0]), structure({'x': 0, 'y': 0}), [{'x': 1, 'y': 2}, {'x': 3, 'y': 4}])
    {'x': [1, 3], 'y': [2, 4]}
    """
    rows = outer.flatten_up_to(tree)
    if inner is None:
        if not rows:
            raise ValueError(f"tree.transpose: {outer} has no leaves, so the inner structure must be given")
        inner = structure(rows[0])
    rows = [inner.flatten_up_to(row) for row in rows]
    return unflatten(inner, [unflatten(outer, [row[n] for row in rows]) for n in range(inner.num_leaves)])


_NO_VALUE: Any = object()


def reduce(function: Callable, tree: Any, initializer: Any = _NO_VALUE, is_leaf: IsLeaf | None = None) -> Any:
    """Fold the leaves by `function(accumulated, leaf)`, from `initializer` if given.

    `is_leaf` is as in `flatten`. Raise TypeError if there are no leaves and no `initializer`.

    >>> reduce(lambda total, x: total + x ** 2, {'w': 3.0, 'b': 4.0}, 0.0)
    25.0
    """
    return functools.reduce(function, leaves(tree, is_leaf), *[initializer] * (initializer is not _NO_VALUE))


def ravel_pytree(pytree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Flatten a tree of arrays to one vector; return the vector and the inverse function.

    The vector has the dtype to which the leaves promote, and float64 if there are none. The inverse takes a vector of
    its length, [n], and returns a tree like `pytree`, with the shapes and dtypes of its leaves. If all leaves have one
    dtype, the inverse takes vectors of any dtype and keeps it; otherwise it raises TypeError for another dtype than the
    vector's. It raises ValueError for another shape. Raise TypeError, with the path, for a non-array leaf.

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
        given = _type_of(flat, "unravel: flat")
        if given.shape != (count,):
            raise ValueError(f"unravel takes the {count} numbers of {structure} as one vector, got {given}")
        if is_mixed and given.dtype != dtype:
            raise TypeError(f"unravel takes a vector of {dtype}, to which the leaves' dtypes promote, got {given}")
        pieces = []
        for t, stop in zip(types, stops):
            piece = flat[stop - t.size : stop].reshape(t.shape) if t.shape else flat[stop - 1]
            pieces.append(convert_array(piece, t.dtype if is_mixed else given.dtype))
        return unflatten(structure, pieces)

    rows = [numpy.ravel(x).astype(dtype) for _, x in leaves]
    return numpy.concatenate(rows) if rows else numpy.zeros(0), unravel


def _type_of(x: Any, what: str) -> ShapedArray:
    try:
        return typeof(x)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from None


def all(tree: Any, *, is_leaf: IsLeaf | None = None) -> bool:
    """Whether all leaves are true; True for a tree without leaves. `is_leaf` is as in `flatten`.

    >>> all({'w': True, 'b': [True, False]})
    False
    """
    return builtins.all(leaves(tree, is_leaf))


# ---------------------------------------------------------------- prefixes


def _subtrees(nested: Nested, tree: Any, path: str, owner: str | None = None) -> list:
    """The subtrees of `tree`, at `path`, at the leaves of a structure that is a prefix of its own.

    If it is not, raise ValueError. The structure is that of `owner`, or else of a prefix that users write, in which
    tuples and lists match each other.
    """
    if nested is None:
        return [tree]
    node, keys, settings, below = nested
    kind = type(tree)
    how = _CLASSES.get(kind) or _class_of(kind)
    if how is not None and (kind is node or (owner is None and {kind, node} <= _SEQUENCES)):
        names, children, others = how.parts(tree)
        if names == keys and (others and _Settings(kind, others)) == settings:
            if not any(below):
                return list(children)
            name = how.key.in_path.format
            parts = [_subtrees(s, x, path + name(k), owner) for k, s, x in zip(keys, below, children)]
            return [*itertools.chain.from_iterable(parts)]
    shape = _structure(nested)
    is_not = f"{path} is {structure(tree)}, where {owner} has {shape}"
    raise ValueError(_why_not_a_prefix(shape, tree, path) if owner is None else is_not)


def broadcast(prefix: Any, tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Broadcast a prefix to the structure of `tree`: repeat each leaf for all leaves of the subtree in its place.

    `is_leaf` is as in `flatten`, for the prefix. Raise ValueError, with the path, if it is not a prefix of `tree`.

    >>> broadcast({'w': 0, 'b': 1}, {'w': [1.0, 2.0], 'b': 3.0})
    {'b': 1, 'w': [0, 0]}
    """
    entries, shape = flatten(prefix, is_leaf)
    found = _subtrees(shape.nested, tree, "tree.broadcast: tree", "the prefix")
    return unflatten(structure(tree), _repeat_entries(entries, found))


def _repeat_entries(entries: Sequence, trees: Sequence) -> list:
    """Each entry as often as its tree has leaves."""
    return [x for x, t in zip(entries, trees) for _ in range(structure(t).num_leaves)]


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: IsLeaf, what: str) -> list:
    """As `broadcast`, but return a list, and accept only leaves for which `is_leaf` is true.

    Tuples and lists match each other. Raise ValueError, which calls the prefix `what`, if the two do not match.
    """
    if is_leaf(prefix):
        return [prefix] * structure(tree).num_leaves
    entries, shape = flatten(prefix, is_leaf)
    if not builtins.all(builtins.map(is_leaf, entries)):
        path, x = next((path, x) for path, x in zip(paths(shape, what), entries) if not is_leaf(x))
        raise ValueError(f"{path} is {x!r}, which is neither an entry for arrays nor a tree of entries")
    return _repeat_entries(entries, _subtrees(shape.nested, tree, what))


_SEQUENCES = frozenset({tuple, list})


def _why_not_a_prefix(s: Structure, tree: Any, path: str) -> str:
    """Why a prefix does not match `tree`; `s` is its structure there."""
    other = structure(tree)
    keys, other_keys = s.keys, other.keys
    if s.node is types.NoneType:
        what = "a single array" if other.node is None else _a(other.node)
        return f"{path} is None for {what}, but None means no arrays: write an entry"
    if other.node is None:
        return f"{path} is {_a(s.node)} of {len(keys)} for a single array: write one entry, not {_a(s.node)}"
    if s.node is not other.node and not {s.node, other.node} <= _SEQUENCES:
        return f"{path} is {_a(s.node)} for {_a(other.node)}"
    if keys != other_keys:
        if issubclass(s.node, (dict, types.SimpleNamespace)):
            return f"{path} has the keys {list(keys)} for values with the keys {list(other_keys)}: give it the same"
        count = "1 entry" if len(keys) == 1 else f"{len(keys)} entries"
        given = "1 value" if len(other_keys) == 1 else f"{len(other_keys)} values"
        return f"{path} has {count} for {given}: write one for each, or a single one for all"
    return f"{path} has the settings {s.settings} for values with {other.settings}: give it the same"


def _a(kind: type) -> str:
    """The class of a node, with an article: `a dict`."""
    return f"a{'n' * (kind.__name__[0] in 'AEIOUaeio')} {kind.__name__}"


#: What the library itself calls often
_OFTEN = {"flatten", "leaves", "structure", "unflatten"}

hide_frames_of(globals(), {*__all__} - _OFTEN)
