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
import itertools
import operator
import re
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff.settings import types_in

# ---------------------------------------------------------------- classes

MANY = 1024  # the size of the caches of key orders and of structures

#: Formats of a child in a path and in a printed structure: by index, by key, or as a field.
INDEX, KEY, FIELD = ("[{0}]", "{1}"), ("[{0!r}]", "{0!r}: {1}"), (".{0}", "{0}={1}")


class Class(NamedTuple):
    """How to flatten, unflatten and print trees of one class.

    `parts(x)` returns the names of the children, the children, and a tuple of settings. `maker(names, settings)`
    returns a function that builds a tree from a list of children, which it may keep. `brackets` enclose the children
    in a printed structure.
    """

    parts: Callable[[Any], tuple[tuple, Sequence, tuple]]
    maker: Callable[[tuple, tuple], Callable[[list], Any]]
    names: tuple[str, str]
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
    tuple: Class(_sequence_parts, lambda names, settings: tuple, INDEX, ("(", ")")),
    list: Class(_sequence_parts, lambda names, settings: lambda children: children, INDEX, ("[", "]")),
    dict: Class(_dict_parts, lambda keys, settings: lambda children: dict(zip(keys, children)), KEY, ("{", "}")),
    OrderedDict: Class(
        lambda x: (tuple(x), list(x.values()), ()),
        lambda keys, settings: lambda children: OrderedDict(zip(keys, children)),
        KEY,
        ("OrderedDict({", "})"),
    ),
    defaultdict: Class(
        lambda x: (*_dict_parts(x)[:2], (x.default_factory,)),
        lambda keys, settings: lambda children: defaultdict(*settings, zip(keys, children)),
        KEY,
        ("defaultdict({", "})"),
    ),
    types.SimpleNamespace: Class(
        lambda x: _dict_parts(vars(x)),
        lambda names, settings: lambda children: types.SimpleNamespace(**dict(zip(names, children))),
        FIELD,
        ("namespace(", ")"),
    ),
    types.NoneType: Class(lambda x: ((), (), ()), lambda names, settings: lambda children: None, INDEX, ("None", "")),
}

#: The types whose objects are leaves. Further ones are added at their first use.
_LEAVES = {float, int, complex, bool, str, numpy.ndarray, numpy.float64, numpy.float32, numpy.int64}

_GIVEN = {*_CLASSES, *_LEAVES}  # classes that `register` rejects


def _named_tuple(kind: type) -> Class:
    names = tuple(kind._fields)
    brackets = f"{kind.__name__}(", ")"
    return Class(lambda x: (names, x, ()), lambda names, settings: lambda xs: kind(*xs), FIELD, brackets)


def _dataclass(kind: type) -> Class:
    import dataclasses  # slow to import

    return _record(kind, [(f, f.name) for f in dataclasses.fields(kind) if f.init])


def _attrs_class(kind: type) -> Class:
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

    return Class(parts, maker, FIELD, (f"{kind.__name__}(", ")"))


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
    if not isinstance(cls, type):
        raise TypeError(
            f"tree.register takes a class, and two functions: register(cls, flatten, unflatten); got {cls!r}"
        )
    if cls in _GIVEN:
        raise ValueError(f"tree.register: {cls.__name__} is registered already, or is a built-in tree or leaf")

    def parts(x: Any) -> tuple[tuple, Sequence, tuple]:
        found = flatten(x)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(
                f"tree.register: flatten of {cls.__name__} returns a pair (children, settings), got "
                f"{type(found).__name__}: {found!r:.60}"
            )
        children = list(found[0])
        return tuple(range(len(children))), children, (found[1],)

    def maker(names: tuple, settings: tuple) -> Callable[[list], Any]:
        return lambda children: unflatten(settings[0], tuple(children))

    _GIVEN.add(cls)
    _CLASSES[cls] = Class(parts, maker, INDEX, (f"{cls.__name__}(", ")"))
    _LEAVES.discard(cls)
    _KNOWN.clear()


# ---------------------------------------------------------------- structures


class Structure:
    """The structure of a tree: its class, the names and structures of its children.

    `settings` are those of the node. `node`, the class, is None for a leaf. Trees may be nested deeper than Python's
    recursion limit: everything except `repr` is iterative.
    """

    __slots__ = ("node", "keys", "children", "flat", "settings", "size", "_below", "_key", "_hash", "_steps")

    def __init__(
        self,
        node: type | None,
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
    (_, entry), (before, after) = _CLASSES[s.node].names, _CLASSES[s.node].brackets
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


def flatten(tree: Any) -> tuple[list, Structure]:
    """The leaves of a tree, and its structure.

    `None` is a node without leaves. Dicts are read in sorted key order; keys that do not compare are sorted by type
    first. An `OrderedDict` keeps its own order, which is part of the structure.
    """
    kind = type(tree)
    if kind in _LEAVES:
        return [tree], LEAF
    if (kind is tuple or kind is list) and _LEAVES.issuperset(builtins.map(type, tree)):
        return list(tree), _sequence(kind, len(tree))
    found: list = []
    nodes: list = []
    waiting, has_settings = [tree], False
    while waiting:
        x = waiting.pop()
        kind = type(x)
        if kind in _LEAVES or (how := _CLASSES.get(kind) or _class_of(kind)) is None:
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
    """The paths of the leaves of a tree of this structure: `root[0]['w']`."""
    found, waiting = [], [(structure, root)]
    while waiting:
        s, path = waiting.pop()
        if s.node is None:
            found.append(path)
            continue
        name = _CLASSES[s.node].names[0].format
        children = [(child, path + name(k)) for k, child in zip(s.keys, s.children)]
        waiting.extend(children[::-1])
    return found


def advice_on(path: str) -> str:
    """Advice for an error about a leaf that is a field, and may be a setting.

    >>> advice_on("argument 0.name of loss"), advice_on("args[0]")
    ("; a field that is a setting is declared with metadata={'static': True}", '')
    """
    is_field = re.search(r"\.\w+ of |^\S*\.\w+$", path)
    return "; a field that is a setting is declared with metadata={'static': True}" if is_field else ""


def flatten_with_paths(tree: Any, root: str = "") -> tuple[list[tuple[str, Any]], Structure]:
    """As `flatten`, but pair each leaf with its path: `root[0]['w']`."""
    found, structure = flatten(tree)
    return list(zip(paths(structure, root), found)), structure


def unflatten(structure: Structure, leaves: Iterable) -> Any:
    """Build the tree of a structure from its leaves; ValueError if too few."""
    if structure.node is None:
        return next(iter(leaves))
    found = list(itertools.islice(leaves, structure.size))
    if len(found) < structure.size:
        raise ValueError(f"tree.unflatten: {len(found)} leaves for a tree of {structure.size}: {structure}")
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


def leaves(tree: Any) -> list:
    """The leaves of a tree, in order."""
    return flatten(tree)[0]


def structure(tree: Any) -> Structure:
    """The structure of a tree."""
    return flatten(tree)[1]


def map(function: Callable, tree: Any, *rest: Any) -> Any:
    """Map `function(leaf, *leaves of rest)` over trees of the same structure."""
    found, shape = flatten(tree)
    return unflatten(shape, builtins.map(function, found, *_leaves_of_like("map", shape, rest)))


def map_with_path(function: Callable, tree: Any, *rest: Any) -> Any:
    """As `map`, of `function(path, leaf, *leaves of rest)`. A path is a string.

    >>> map_with_path(lambda path, x: f"{path} = {x}", {'w': 1.0, 'b': [2.0]})
    {'b': ["['b'][0] = 2.0"], 'w': "['w'] = 1.0"}
    """
    found, shape = flatten(tree)
    return unflatten(shape, builtins.map(function, paths(shape), found, *_leaves_of_like("map_with_path", shape, rest)))


def _leaves_of_like(what: str, shape: Structure, trees: Sequence) -> list[list]:
    found = []
    for other in trees:
        more, other_shape = flatten(other)
        if other_shape != shape:
            raise ValueError(f"tree.{what}: the trees differ in structure: {shape} and {other_shape}")
        found.append(more)
    return found


_NO_VALUE: Any = object()


def reduce(function: Callable, tree: Any, initializer: Any = _NO_VALUE) -> Any:
    """Fold the leaves by `function(accumulated, leaf)`, from `initializer` if given.

    >>> reduce(lambda total, x: total + x ** 2, {'w': 3.0, 'b': 4.0}, 0.0)
    25.0
    """
    return functools.reduce(function, leaves(tree), *[initializer] * (initializer is not _NO_VALUE))


def all(tree: Any) -> bool:
    """Whether all leaves are true; True for a tree without leaves.

    >>> all({'w': True, 'b': [True, False]})
    False
    """
    return builtins.all(leaves(tree))


def broadcast_prefix(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], what: str) -> list:
    """Broadcast a prefix to one entry per leaf of `tree`.

    A leaf of the prefix applies to the whole subtree below it. Raise ValueError, in which the prefix is called `what`,
    if the two do not match.
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
    """Pair each child of a prefix with its subtree of `tree` and its path."""
    kind, other = [_CLASSES.get(type(x)) or _class_of(type(x)) for x in (prefix, tree)]
    if prefix is None and tree is not None:
        what = "a single array" if other is None else _a(tree)
        raise ValueError(f"{path} is None, which stands for no arrays, but stands against {what}: write an entry")
    if kind is None:
        raise ValueError(f"{path} is {prefix!r}, which is neither an entry for arrays nor a tree of entries")
    keys, entries, settings = kind.parts(prefix)
    if other is None:
        raise ValueError(f"{path} is {_a(prefix)} of {len(entries)}, but stands against a single array")
    if type(prefix) is not type(tree) and not {type(prefix), type(tree)} <= {tuple, list}:
        raise ValueError(f"{path} is {_a(prefix)}, but stands against {_a(tree)}")
    other_keys, values, other_settings = other.parts(tree)
    if keys != other_keys:
        if isinstance(prefix, (dict, types.SimpleNamespace)):
            raise ValueError(f"{path} has the keys {list(keys)}, but stands against {list(other_keys)}")
        count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
        raise ValueError(
            f"{path} has {count}, but stands against {len(values)}: write one for each, or a single one for all"
        )
    if settings != other_settings:
        raise ValueError(f"{path} has the settings {settings}, but stands against {other_settings}: give it the same")
    return [(p, t, path + kind.names[0].format(key)) for key, p, t in zip(keys, entries, values)]


def _a(x: Any) -> str:
    """The class of a node, with an article: `a dict`."""
    name = type(x).__name__
    return f"a{'n' * (name[0] in 'AEIOUaeio')} {name}"
