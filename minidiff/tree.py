"""Trees of values: nested containers with arrays at the leaves.

Trees are tuples, lists, dicts, `OrderedDict`, `defaultdict`, `SimpleNamespace`, named tuples, dataclasses, attrs
classes, `None` (a tree without leaves), and classes given to `register`. An object of any other class is a leaf. This
includes subclasses of dict and list, whose constructors may differ.

The children of a dataclass or attrs object are its fields. It is rebuilt as by `dataclasses.replace` or `attrs.evolve`:
`__init__` gets the fields, and computes those with `init=False`. A field declared with `metadata={'static': True}` is a
setting, such as a name or a function: it is part of the structure, not a leaf, and must be hashable if structures are
compared.

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
import importlib
import itertools
import operator
import re
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from minidiff.diagnostics.tracebacks import hide_frames_of
from minidiff.inputs.settings import types_in

__all__ = [
    *("DictKey", "GetAttrKey", "SequenceKey", "Structure", "all", "all_leaves", "broadcast", "flatten"),
    *("flatten_with_path", "keystr", "leaves", "leaves_with_path", "map", "map_with_path", "ravel_pytree", "reduce"),
    *("register", "register_with_keys", "structure", "transpose", "unflatten"),
]
__dir__ = functools.partial(sorted, __all__)

if TYPE_CHECKING:
    from minidiff.flatten_util import ravel_pytree as ravel_pytree
else:

    def __getattr__(name: str) -> Any:
        if name != "ravel_pytree":  # it computes with arrays, in a module that needs this one
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module("minidiff.flatten_util").ravel_pytree


IsLeaf = Callable[[Any], bool]

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
    """A step to the child number `idx`, of a tuple, a list, or an object given to `register`.

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
    """A step to the field `name`, of a named tuple, a dataclass, an attrs object or a namespace.

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

    parts: Callable[[Any], tuple[tuple, Sequence, tuple]]
    maker: Callable[[tuple, tuple], Callable[[list], Any]]
    key: type[Key]
    brackets: tuple[str, str]


def _sequence_parts(x: Sequence) -> tuple[tuple, Sequence, tuple]:
    return tuple(range(len(x))), x, ()


def _dict_parts(x: dict) -> tuple[tuple, Sequence, tuple]:
    keys, values = _ordered(*x)
    return keys, values(x), ()


@functools.lru_cache(maxsize=MANY, typed=True)
def _ordered(*keys: Any) -> tuple[tuple, Callable[[dict], Sequence]]:
    """A dict's keys in order, and a function that reads its values in that order."""
    found = tuple(_sorted(keys))
    if len(found) > 1:
        return found, operator.itemgetter(*found)
    return found, lambda x: [*x.values()]


def _sorted(keys: Iterable) -> list:
    """Sort keys, by type first if they do not compare; else keep their order."""
    try:
        return sorted(keys)
    except TypeError:
        pass
    try:
        return sorted(keys, key=lambda k: (type(k).__module__, type(k).__qualname__, k))
    except TypeError:
        return list(keys)


#: The classes whose objects are trees. A class of a family is added at its first use.
_CLASSES: dict[type, Class] = {
    tuple: Class(_sequence_parts, lambda names, settings: tuple, SequenceKey, ("(", ")")),
    list: Class(_sequence_parts, lambda names, settings: lambda children: children, SequenceKey, ("[", "]")),
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
    names = tuple(kind._fields)
    brackets = f"{kind.__name__}(", ")"
    return Class(lambda x: (names, x, ()), lambda names, settings: kind._make, GetAttrKey, brackets)


def _dataclass(kind: type) -> Class:
    import dataclasses  # slow to import

    return _record(kind, [(f, f.name) for f in dataclasses.fields(kind) if f.init])


def _attrs_class(kind: Any) -> Class:
    return _record(kind, [(a, getattr(a, "alias", None) or a.name.lstrip("_")) for a in kind.__attrs_attrs__ if a.init])


def _record(kind: type, fields: Sequence[tuple[Any, str]]) -> Class:
    """A class with fields, each given with the `__init__` argument that sets it."""
    static = [(f.name, argument) for f, argument in fields if f.metadata.get("static")]
    dynamic = [(f.name, argument) for f, argument in fields if not f.metadata.get("static")]
    names, settings = (tuple([name for name, _ in some]) for some in (dynamic, static))
    arguments = [argument for _, argument in (*dynamic, *static)]

    def parts(x: Any) -> tuple[tuple, Sequence, tuple]:
        return names, [getattr(x, name) for name in names], tuple([getattr(x, name) for name in settings])

    def maker(names: tuple, settings: tuple) -> Callable[[list], Any]:
        return _explained(kind, lambda children: kind(**dict(zip(arguments, [*children, *settings]))))

    return Class(parts, maker, GetAttrKey, (f"{kind.__name__}(", ")"))


def _explained(kind: type, make: Callable[[list], Any]) -> Callable[[list], Any]:
    """Wrap `make` to add advice on `register` to its exceptions."""

    def explained(children: list) -> Any:
        try:
            return make(children)
        except Exception as error:
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(
                    f"This was raised while a {kind.__name__} was built from the leaves of a tree, which may be traced "
                    f"values or gradients. If its __init__ does not accept these, say how to build it: "
                    f"md.tree.register({kind.__name__}, flatten, unflatten)"
                )
            raise

    return explained


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

    `flatten(x)` returns the children of `x`, which are arrays or trees, and its settings: a hashable object with
    everything else that is needed to rebuild it, compared by `==`. `unflatten(settings, children)` is the inverse, for
    children of any kind: traced values, gradients, partition specs. Subclasses must be registered separately. For a
    dataclass or attrs class this overrides the default. Raise TypeError if `cls` is not a class, and ValueError if it
    is already registered, or is a built-in tree or leaf class.

    >>> class Interval:
    ...     def __init__(self, low, high):
    ...         self.low, self.high = low, high
    >>> register(Interval, lambda x: ((x.low, x.high), None), lambda _, children: Interval(*children))
    >>> leaves([Interval(1.0, 2.0), 3.0])
    [1.0, 2.0, 3.0]
    """

    def parts(x: Any) -> tuple[tuple, Sequence, tuple]:
        children, settings = _flattened("register", "children", x, flatten)
        return tuple(range(len(children))), children, (settings,)

    _register("register", cls, parts, unflatten, SequenceKey)


def register_with_keys(
    cls: type, flatten_with_keys: Callable[[Any], tuple[Iterable, Any]], unflatten: Callable[[Any, tuple], Any]
) -> None:
    """Register a class whose objects are trees, and how paths name their children.

    As `register`, but `flatten_with_keys(x)` returns pairs (key, child) in place of the children. Keys are hashable; a
    path shows `str(key)`. Usual keys are `GetAttrKey(name)`, `DictKey(key)` and `SequenceKey(index)`.

    >>> class Interval:
    ...     def __init__(self, low, high):
    ...         self.low, self.high = low, high
    >>> def flatten_with_keys(x):
    ...     return ((GetAttrKey('low'), x.low), (GetAttrKey('high'), x.high)), None
    >>> register_with_keys(Interval, flatten_with_keys, lambda _, children: Interval(*children))
    >>> [(keystr(path), x) for path, x in leaves_with_path([Interval(1.0, 2.0)])]
    [('[0].low', 1.0), ('[0].high', 2.0)]
    """

    def parts(x: Any) -> tuple[tuple, Sequence, tuple]:
        pairs, settings = _flattened("register_with_keys", "pairs of a key and a child", x, flatten_with_keys)
        return tuple([key for key, _ in pairs]), [child for _, child in pairs], (settings,)

    _register("register_with_keys", cls, parts, unflatten, GivenKey)


def _flattened(what: str, children: str, x: Any, flatten: Callable[[Any], tuple[Iterable, Any]]) -> tuple[list, Any]:
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

    def maker(names: tuple, settings: tuple) -> Callable[[list], Any]:
        return lambda children: unflatten(settings[0], tuple(children))

    _GIVEN.add(cls)
    _CLASSES[cls] = Class(parts, maker, key, (f"{cls.__name__}(", ")"))
    _LEAVES.discard(cls)
    _KNOWN.clear()


# ---------------------------------------------------------------- structures


class Structure:
    """The structure of a tree: its class, the names and structures of its children.

    `settings` are those of the node. `node`, the class, is None for a leaf. `children` are the structures of the
    children. Structures are compared by `==` and hashable. Trees may be nested deeper than Python's recursion limit:
    everything except `repr` is iterative.

    >>> s = structure({'w': 1.0, 'b': [2.0, 3.0]})
    >>> s
    {'b': [*, *], 'w': *}
    >>> s.num_leaves, s.num_nodes
    (3, 5)
    >>> s.unflatten([4.0, 5.0, 6.0])
    {'b': [4.0, 5.0], 'w': 6.0}
    """

    __slots__ = ("node", "keys", "children", "flat", "settings", "size", "_below", "_key", "_hash", "_steps")

    def __init__(
        self,
        node: Any,  # the class; None of a leaf
        keys: tuple = (),
        children: tuple[Structure, ...] = (),
        flat: bool | None = None,
        settings: tuple = (),
    ):
        self.node = node
        self.keys = keys
        self.children = children
        self.flat = builtins.all(child.node is None for child in children) if flat is None else flat  # only leaves
        self.settings = settings
        #: The number of leaves.
        self.size: int = 1 if node is None else len(keys) if self.flat else sum([child.size for child in children])
        self._below: list[Structure] | None = None
        self._key: tuple | None = None
        self._hash: int | None = None
        self._steps: list[tuple] | None = None

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        return self.size

    @property
    def num_nodes(self) -> int:
        """The number of nodes, leaves included."""
        return builtins.sum([1 + len(s.keys) * s.flat for s in (self, *self.below())])

    def unflatten(self, leaves: Iterable) -> Any:
        """Build the tree of this structure from its leaves: see `unflatten`."""
        return unflatten(self, leaves)

    def flatten_up_to(self, tree: Any) -> list:
        """The subtrees of `tree` at the leaves of this structure.

        `tree` begins with this structure: it may have whole trees where this has leaves. Raise ValueError, with the
        path, if it does not.

        >>> structure([0, {'a': 0}]).flatten_up_to([(1.0, 2.0), {'a': [3.0]}])
        [(1.0, 2.0), [3.0]]
        """
        return _subtrees(self, tree, "flatten_up_to: tree", functools.partial(_difference, "the structure"))

    def below(self) -> list[Structure]:
        """The structures below this one, in preorder; none for a flat one."""
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
        """The key for comparison and hashing; TypeError for an unhashable setting."""
        if self._key is None:
            self._key = tuple([(s.node, s.keys, s.flat, _settings_key(s)) for s in (self, *self.below())])
        return self._key

    def steps(self) -> list[tuple]:
        """The steps that build a tree, children first and from right to left.

        Each is a pair of the function that makes a node and its number of children. The function is None for a leaf.
        The number is negative if the children are trees built in previous steps, and not all leaves.
        """
        if self._steps is None:
            self._steps = []
            for s in reversed((self, *self.below())):
                make = None if s.node is None else _CLASSES[s.node].maker(s.keys, s.settings)
                self._steps.append((make, len(s.keys) if s.flat else -len(s.keys)))
        return self._steps

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or self.node is not other.node or self.keys != other.keys:
            return False
        return self.key() == other.key()

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.key())
        return self._hash

    def __repr__(self) -> str:
        try:
            return _shown(self)
        except RecursionError:
            return f"<a tree of {self.size} leaves, nested too deep to be printed>"


def _settings_key(s: Structure) -> tuple:
    try:
        hash(s.settings)
    except TypeError as error:
        raise TypeError(
            f"a setting of a {s.node.__name__} in a tree cannot be compared ({error}): {s.settings!r:.100}; settings "
            "are a part of the tree's structure: numbers, strings, tuples, functions. Arrays are children, not settings"
        ) from None
    return s.settings and (s.settings, types_in(s.settings))


def _shown(s: Structure) -> str:
    if s.node is None:
        return "*"
    entry, (before, after) = _CLASSES[s.node].key.in_structure, _CLASSES[s.node].brackets
    children = ["*"] * len(s.keys) if s.flat else builtins.map(_shown, s.children)
    text = ", ".join([entry.format(k, child) for k, child in zip(s.keys, children)])
    text += "," * (s.node is tuple and len(s.keys) == 1)
    settings = f"; {', '.join(builtins.map(repr, s.settings))}" if s.settings else ""
    return f"{before}{text}{settings}{after}"


LEAF = Structure(None)


@functools.lru_cache(maxsize=256)
def _sequence(kind: type, count: int) -> Structure:
    """The structure of a tuple or list of `count` leaves, the most common trees."""
    return Structure(kind, tuple(range(count)), (LEAF,) * count, flat=True)


#: A cache: nodes -> structure. It excludes trees with settings, and with keys that may equal keys of another type (1
#: and True), since the cached structure would have the keys of another tree.
_KNOWN: dict[tuple, Structure] = {}


def _structure_of(nodes: Sequence) -> Structure:
    """Build a structure from nodes (class, names, flat, settings) in preorder."""
    built: list[Structure] = []  # a stack, from right to left: the first child of a node is on top
    for node in reversed(nodes):
        if node is None:
            built.append(LEAF)
            continue
        kind, keys, flat, settings = node
        count = len(keys)
        if flat:
            children = (LEAF,) * count
        else:
            children = tuple(built[: -count - 1 : -1])
            del built[-count:]
        built.append(Structure(kind, keys, children, flat or None, settings))  # flat is False for a new leaf type, too
    return built[0]


def _has_plain_keys(node: tuple | None) -> bool:
    return node is None or node[0] in (tuple, list) or builtins.all(type(k) is str for k in node[1])


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
    if kind in _LEAVES:
        return [tree], LEAF
    if is_leaf is None and (kind is tuple or kind is list) and _LEAVES.issuperset(builtins.map(type, tree)):
        return list(tree), _sequence(kind, len(tree))
    found: list = []
    nodes: list = []
    waiting, has_settings = [tree], False
    while waiting:
        x = waiting.pop()
        kind = type(x)
        if (
            kind in _LEAVES
            or (is_leaf is not None and is_leaf(x))
            or (how := _CLASSES.get(kind) or _class_of(kind)) is None
        ):
            found.append(x)
            nodes.append(None)
            continue
        keys, children, settings = how[0](x)
        flat = _LEAVES.issuperset(builtins.map(type, children))
        nodes.append((kind, keys, flat, settings))
        if settings:
            has_settings = True
        if flat:
            found += children
        else:
            waiting += children[::-1]
    if has_settings:
        return found, _structure_of(nodes)
    key = tuple(nodes)
    structure = _KNOWN.get(key)
    if structure is None:
        structure = _structure_of(nodes)
        if builtins.all(builtins.map(_has_plain_keys, nodes)):
            if len(_KNOWN) >= MANY:
                _KNOWN.clear()
            _KNOWN[key] = structure
    return found, structure


def children(tree: Any) -> list | None:
    """The children of a node, in the order of `structure.children`; None for a leaf."""
    how = _CLASSES.get(type(tree)) or _class_of(type(tree))
    return None if how is None else list(how.parts(tree)[1])


def paths(structure: Structure, root: str = "") -> list[str]:
    """The paths of the leaves of a tree of this structure, as strings: `root[0]['w']`."""
    return _walk(structure, root, lambda key: key.in_path.format)


def _key_paths(structure: Structure) -> list[tuple]:
    """The paths of the leaves of a tree of this structure, as tuples of keys."""
    return _walk(structure, (), lambda key: lambda name: (key(name),))


def _walk(structure: Structure, root: Any, steps: Callable[[type[Key]], Callable[[Any], Any]]) -> list:
    """The paths of the leaves: sums of `root` and the steps to each, `steps(class of keys)(name of the child)`."""
    found, waiting = [], [(structure, root)]
    while waiting:
        s, path = waiting.pop()
        if s.node is None:
            found.append(path)
            continue
        step = steps(_CLASSES[s.node].key)
        children = [(child, path + step(k)) for k, child in zip(s.keys, s.children)]
        waiting.extend(children[::-1])
    return found


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

    Of an iterator it takes as many as there are. Raise ValueError if there are too few, or a list or tuple has more.

    >>> unflatten(structure((1, [2, 3])), [4.0, 5.0, 6.0])
    (4.0, [5.0, 6.0])
    """
    found = [*leaves] if type(leaves) in (list, tuple) else list(itertools.islice(leaves, structure.size))
    if len(found) != structure.size:
        raise ValueError(f"tree.unflatten: {len(found)} leaves for a tree of {structure.size}: {structure}")
    if structure.node is None:
        return found[0]
    steps = structure._steps or structure.steps()
    if structure.flat:
        return steps[0][0](found)
    built: list = []  # a stack, from right to left: the first child of a node is on top
    for make, count in steps:
        if make is None:
            built.append(found.pop())
        elif count < 0:
            made = built[: count - 1 : -1]
            del built[count:]
            built.append(make(made))
        else:
            start = len(found) - count
            built.append(make(found[start:]))
            del found[start:]
    return built[0]


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

    Each tree of `rest` begins with the structure of `tree`: it has a leaf or a whole tree where `tree` has a leaf.
    `is_leaf` is as in `flatten`, for `tree`. Raise ValueError, with the path, if the structures differ.

    >>> map(lambda x, y: x * y, {'w': 2.0, 'b': 3.0}, {'w': 10.0, 'b': 100.0})
    {'b': 300.0, 'w': 20.0}
    >>> map(lambda rate, group: [rate * x for x in group], (0.1, 10.0), ([1.0], [2.0, 3.0]))
    ([0.1], [20.0, 30.0])
    """
    found, shape = flatten(tree, is_leaf)
    return unflatten(shape, builtins.map(f, found, *_matched("map", shape, rest)))


def map_with_path(f: Callable, tree: Any, *rest: Any, is_leaf: IsLeaf | None = None) -> Any:
    """As `map`, of `f(path, leaf, *subtrees of rest)`. A path is a tuple of keys.

    >>> map_with_path(lambda path, x: f"{keystr(path)} = {x}", {'w': 1.0, 'b': [2.0]})
    {'b': ["['b'][0] = 2.0"], 'w': "['w'] = 1.0"}
    """
    found, shape = flatten(tree, is_leaf)
    return unflatten(shape, builtins.map(f, _key_paths(shape), found, *_matched("map_with_path", shape, rest)))


def _matched(what: str, shape: Structure, trees: Sequence) -> list[list]:
    """The subtrees of each tree at the leaves of a structure."""
    found = []
    for n, other in enumerate(trees):
        more, other_shape = flatten(other)
        if other_shape != shape:
            explain = functools.partial(_difference, "the first tree")
            more = _subtrees(shape, other, f"tree.{what}: the trees differ in structure: rest[{n}]", explain)
        found.append(more)
    return found


def transpose(outer: Structure, inner: Structure | None, tree: Any) -> Any:
    """Turn a tree of trees inside out: from structure `outer` of trees `inner` to `inner` of `outer`.

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
    return unflatten(inner, [unflatten(outer, [row[n] for row in rows]) for n in range(inner.size)])


_NO_VALUE: Any = object()


def reduce(function: Callable, tree: Any, initializer: Any = _NO_VALUE, is_leaf: IsLeaf | None = None) -> Any:
    """Fold the leaves by `function(accumulated, leaf)`, from `initializer` if given.

    `is_leaf` is as in `flatten`. Raise TypeError if there are no leaves and no `initializer`.

    >>> reduce(lambda total, x: total + x ** 2, {'w': 3.0, 'b': 4.0}, 0.0)
    25.0
    """
    return functools.reduce(function, leaves(tree, is_leaf), *[initializer] * (initializer is not _NO_VALUE))


def all(tree: Any, *, is_leaf: IsLeaf | None = None) -> bool:
    """Whether all leaves are true; True for a tree without leaves. `is_leaf` is as in `flatten`.

    >>> all({'w': True, 'b': [True, False]})
    False
    """
    return builtins.all(leaves(tree, is_leaf))


# ---------------------------------------------------------------- prefixes


def _subtrees(
    shape: Structure,
    tree: Any,
    root: str,
    explain: Callable[[Structure, Any, str], str],
    alike: frozenset[type] = frozenset(),
) -> list:
    """The subtrees of `tree` at the leaves of a structure with which it begins.

    Raise ValueError where it does not: `explain(structure, subtree, path)` is the message. Nodes of the `alike` classes
    match each other.
    """
    found: list = []
    waiting = [(shape, tree, root)]
    while waiting:
        s, t, path = waiting.pop()
        if s.node is None:
            found.append(t)
            continue
        kind = type(t)
        how = _CLASSES.get(kind) or _class_of(kind)
        if how is None or not (kind is s.node or {kind, s.node} <= alike):
            raise ValueError(explain(s, t, path))
        keys, children, settings = how.parts(t)
        if keys != s.keys or settings != s.settings or (settings and types_in(settings) != types_in(s.settings)):
            raise ValueError(explain(s, t, path))
        if s.flat:
            found += children
            continue
        name = how.key.in_path.format
        waiting.extend([(c, x, path + name(k)) for k, c, x in zip(keys, s.children, children)][::-1])
    return found


def _difference(owner: str, s: Structure, tree: Any, path: str) -> str:
    return f"{path} is {structure(tree)}, where {owner} has {s}"


def broadcast(prefix: Any, tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Broadcast a prefix to the structure of `tree`: each leaf takes the place of the leaves below it.

    `is_leaf` is as in `flatten`, for the prefix. Raise ValueError, with the path, if `tree` does not begin with the
    structure of the prefix.

    >>> broadcast({'w': 0, 'b': 1}, {'w': [1.0, 2.0], 'b': 3.0})
    {'b': 1, 'w': [0, 0]}
    """
    entries, shape = flatten(prefix, is_leaf)
    found = _subtrees(shape, tree, "tree.broadcast: tree", functools.partial(_difference, "the prefix"))
    return unflatten(structure(tree), _repeated(entries, found))


def _repeated(entries: Sequence, trees: Sequence) -> list:
    """Each entry as often as its tree has leaves."""
    found: list = []
    for x, t in zip(entries, trees):
        found += [x] * structure(t).size
    return found


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: IsLeaf, what: str) -> list:
    """As `broadcast`, of a prefix of entries for which `is_leaf` is true; one for each leaf of `tree`.

    Tuples and lists match each other. Raise ValueError, in which the prefix is called `what`, if the two do not match.
    """
    if is_leaf(prefix):
        return [prefix] * structure(tree).size
    entries, shape = flatten(prefix, is_leaf)
    if not builtins.all(builtins.map(is_leaf, entries)):
        path, x = next((path, x) for path, x in zip(paths(shape, what), entries) if not is_leaf(x))
        raise ValueError(f"{path} is {x!r}, which is neither an entry for arrays nor a tree of entries")
    return _repeated(entries, _subtrees(shape, tree, what, _why_not_a_prefix, _SEQUENCES))


_SEQUENCES = frozenset({tuple, list})


def _why_not_a_prefix(s: Structure, tree: Any, path: str) -> str:
    """Why a prefix does not match `tree`; `s` is its structure there."""
    other = structure(tree)
    keys, other_keys = s.keys, other.keys
    if s.node is types.NoneType:
        what = "a single array" if other.node is None else _a(other.node)
        return f"{path} is None for {what}, but None means no arrays: write an entry"
    if other.node is None:
        return f"{path} is {_a(s.node)} of {len(keys)} for a single array"
    if s.node is not other.node and not {s.node, other.node} <= _SEQUENCES:
        return f"{path} is {_a(s.node)} for {_a(other.node)}"
    if keys != other_keys:
        if issubclass(s.node, (dict, types.SimpleNamespace)):
            return f"{path} has the keys {list(keys)} for values with the keys {list(other_keys)}"
        count = "1 entry" if len(keys) == 1 else f"{len(keys)} entries"
        given = "1 value" if len(other_keys) == 1 else f"{len(other_keys)} values"
        return f"{path} has {count} for {given}: write one for each, or a single one for all"
    return f"{path} has the settings {s.settings} for values with {other.settings}: give it the same"


def _a(kind: type) -> str:
    """The class of a node, with an article: `a dict`."""
    name = kind.__name__
    return f"a{'n' * (name[0] in 'AEIOUaeio')} {name}"


#: What the library itself calls often
_OFTEN = {"flatten", "leaves", "structure", "unflatten"}

hide_frames_of(globals(), {*__all__} - _OFTEN)
