"""The classes whose objects are nodes of trees, and the keys of paths to their children."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy

__all__ = ["DictKey", "GetAttrKey", "SequenceKey", "register", "register_with_keys"]

MANY = 1024  # the size of the cache of key orders, and of that of structures


class Key:
    """A step of a key path, from a node to one of its children; `str` writes it as in Python.

    Keys are equal if they have the same class and the same value. The `repr` of a key evaluates to it.
    """

    __slots__: tuple[str, ...] = ()
    in_path: str  # formats of the key, and of the key next to its child in a printed structure
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


class CustomKey(Key):
    """A step that a class registered by `register_with_keys` names: any object with a `str`."""

    in_path, in_structure = "{0}", "{0}: {1}"

    def __new__(cls, key: Any) -> Any:
        return key


Parts = tuple[Sequence, Sequence, tuple]


class NodeType(NamedTuple):
    """A class of nodes.

    `flatten(x)` returns the names of the children, the children, and a tuple of settings; `unflatten(names, settings,
    children)` is the inverse, for a list of children, which it may keep. `key(name)` is the step of a path to a child.
    `brackets` enclose the children in a printed structure.
    """

    flatten: Callable[[Any], Parts]
    unflatten: Callable[[Any, Any, list], Any]
    key: type[Key]
    brackets: tuple[str, str]


def _flatten_sequence(x: Sequence) -> Parts:
    return range(len(x)), x, ()


def _flatten_dict(x: dict) -> Parts:
    keys, values = _keys_and_reader(*x)
    return keys, values(x), ()


@functools.lru_cache(maxsize=MANY, typed=True)
def _keys_and_reader(*keys: Any) -> tuple[tuple, Callable[[dict], Sequence]]:
    """Return a dict's keys in order, and a function that reads its values in that order.

    Keys that do not compare are sorted by type first. If they do not compare then, they keep their order.
    """
    for order in (None, lambda k: (type(k).__module__, type(k).__qualname__, k)):
        with contextlib.suppress(TypeError):
            keys = tuple(sorted(keys, key=order))
            break
    return keys, operator.itemgetter(*keys) if len(keys) > 1 else lambda x: [*x.values()]


#: The classes whose objects are nodes. A class of a family is added at its first use.
NODES: dict[type, NodeType] = {
    tuple: NodeType(_flatten_sequence, lambda names, settings, children: tuple(children), SequenceKey, ("(", ")")),
    list: NodeType(_flatten_sequence, lambda names, settings, children: list(children), SequenceKey, ("[", "]")),
    dict: NodeType(_flatten_dict, lambda names, settings, children: dict(zip(names, children)), DictKey, ("{", "}")),
    OrderedDict: NodeType(
        lambda x: (tuple(x), list(x.values()), ()),
        lambda names, settings, children: OrderedDict(zip(names, children)),
        DictKey,
        ("OrderedDict({", "})"),
    ),
    defaultdict: NodeType(
        lambda x: (*_flatten_dict(x)[:2], (x.default_factory,)),
        lambda names, settings, children: defaultdict(settings[0], zip(names, children)),
        DictKey,
        ("defaultdict({", "})"),
    ),
    types.SimpleNamespace: NodeType(
        lambda x: _flatten_dict(vars(x)),
        lambda names, settings, children: types.SimpleNamespace(**dict(zip(names, children))),
        GetAttrKey,
        ("namespace(", ")"),
    ),
    types.NoneType: NodeType(lambda x: ((), (), ()), lambda names, settings, children: None, SequenceKey, ("None", "")),
}

#: The types whose objects are leaves. Further ones are added at their first use.
LEAVES = {float, int, complex, bool, str, numpy.ndarray, numpy.float64, numpy.float32, numpy.int64}

_REGISTERED = {*NODES, *LEAVES}  # classes that `register` rejects


class Setting:
    """A string or a function among leaves, as a node without children: it is a part of the structure."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


NODES[Setting] = NodeType(lambda x: ((), (), (x.value,)), lambda names, settings, x: settings[0], SequenceKey, ("", ""))


def _named_tuple(kind: Any) -> NodeType:
    names, brackets = tuple(kind._fields), (f"{kind.__name__}(", ")")
    return NodeType(lambda x: (names, x, ()), lambda names, settings, x: kind._make(x), GetAttrKey, brackets)


def _dataclass(kind: type) -> NodeType:
    import dataclasses  # slow to import

    return _record(kind, [(f, f.name) for f in dataclasses.fields(kind) if f.init])


def _attrs_class(kind: Any) -> NodeType:
    return _record(kind, [(a, getattr(a, "alias", None) or a.name.lstrip("_")) for a in kind.__attrs_attrs__ if a.init])


def _record(kind: type, fields: Sequence[tuple[Any, str]]) -> NodeType:
    """Return the node type of a class with these fields, each with the `__init__` argument that sets it."""
    names, settings = (
        tuple([f.name for f, _ in fields if bool(f.metadata.get("static")) is static]) for static in (False, True)
    )
    argument_of = {f.name: argument for f, argument in fields}
    arguments = [argument_of[name] for name in (*names, *settings)]

    def flatten(x: Any) -> Parts:
        return names, [getattr(x, name) for name in names], tuple([getattr(x, name) for name in settings])

    def unflatten(names: tuple, settings: tuple, children: list) -> Any:
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

    return NodeType(flatten, unflatten, GetAttrKey, (f"{kind.__name__}(", ")"))


#: Families of classes that are trees: the name, a test for membership, and the function that makes a `NodeType`.
_FAMILIES: tuple[tuple[str, Callable[[type], bool], Callable[[type], NodeType]], ...] = (
    ("named tuples", lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"), _named_tuple),
    ("dataclasses", lambda kind: hasattr(kind, "__dataclass_fields__"), _dataclass),
    ("attrs classes", lambda kind: hasattr(kind, "__attrs_attrs__"), _attrs_class),
)


def node_type_of(kind: type) -> NodeType | None:
    """Classify a class at its first use: return its node type, or None if it is a leaf."""
    for _, holds, make in _FAMILIES:
        if holds(kind):
            return NODES.setdefault(kind, make(kind))
    LEAVES.add(kind)
    return None


def class_names() -> list[str]:
    """Return the names of the classes and families that are trees, for error messages.

    >>> class_names()[:4], class_names()[-3:]
    (['tuple', 'list', 'dict', 'OrderedDict'], ['named tuples', 'dataclasses', 'attrs classes'])
    """
    classes = [kind for kind in NODES if kind in _REGISTERED and kind is not types.NoneType]
    return [*[kind.__name__ for kind in classes], "None", *[name for name, _, _ in _FAMILIES]]


def register(cls: type, flatten: Callable[[Any], tuple[Iterable, Any]], unflatten: Callable[[Any, tuple], Any]) -> None:
    """Register a class whose objects are trees.

    Register subclasses separately. For a dataclass or attrs class this overrides the default.

    Args:
        cls: the class.
        flatten: `flatten(x)` returns a pair: the children of `x`, which are arrays or trees; and its settings, a
            hashable object, compared by `==`, with everything else that is needed to rebuild `x`.
        unflatten: `unflatten(settings, children)` is the inverse. It must accept children of any kind: traced values,
            gradients, partition specs.

    Raises:
        TypeError: if `cls` is not a class.
        ValueError: if `cls` is already registered, or is a built-in tree or leaf class.

    >>> from minidiff import tree
    >>> class Interval:
    ...     def __init__(self, low, high):
    ...         self.low, self.high = low, high
    >>> register(Interval, lambda x: ((x.low, x.high), None), lambda _, children: Interval(*children))
    >>> tree.leaves([Interval(1.0, 2.0), 3.0])
    [1.0, 2.0, 3.0]
    """
    _register("register", cls, flatten, unflatten, SequenceKey)


def register_with_keys(
    cls: type, flatten_with_keys: Callable[[Any], tuple[Iterable, Any]], unflatten: Callable[[Any, tuple], Any]
) -> None:
    """Register a class whose objects are trees, and the names of their children in paths.

    Args:
        cls: the class.
        flatten_with_keys: `flatten_with_keys(x)` returns a pair like `flatten` of `register`, with pairs (key, child)
            in place of children. Keys are hashable, and paths show `str(key)`. Common keys are `GetAttrKey(name)`,
            `DictKey(key)` and `SequenceKey(index)`.
        unflatten: `unflatten(settings, children)`, as in `register`.

    Raises:
        TypeError: if `cls` is not a class.
        ValueError: if `cls` is already registered, or is a built-in tree or leaf class.

    >>> from minidiff import tree
    >>> class Interval:
    ...     def __init__(self, low, high):
    ...         self.low, self.high = low, high
    >>> def flatten_with_keys(x):
    ...     return ((GetAttrKey('low'), x.low), (GetAttrKey('high'), x.high)), None
    >>> register_with_keys(Interval, flatten_with_keys, lambda _, children: Interval(*children))
    >>> [(tree.keystr(path), x) for path, x in tree.leaves_with_path([Interval(1.0, 2.0)])]
    [('[0].low', 1.0), ('[0].high', 2.0)]
    """
    _register("register_with_keys", cls, flatten_with_keys, unflatten, CustomKey)


def _register(caller: str, cls: type, flatten: Callable, unflatten: Callable, key: type[Key]) -> None:
    if not isinstance(cls, type):
        raise TypeError(
            f"tree.{caller} takes a class and two functions: {caller}(cls, flatten, unflatten); got {cls!r}"
        )
    if cls in _REGISTERED:
        raise ValueError(f"tree.{caller}: {cls.__name__} is registered already, or is a built-in tree or leaf")
    with_keys = key is CustomKey

    def flatten_checked(x: Any) -> Parts:
        pair = flatten(x)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(
                f"tree.{caller}: flatten of {cls.__name__} returns a pair "
                f"({'pairs of a key and a child' if with_keys else 'children'}, settings), got "
                f"{type(pair).__name__}: {pair!r:.60}"
            )
        children, settings = list(pair[0]), (pair[1],)
        if with_keys:
            return tuple([key for key, _ in children]), [child for _, child in children], settings
        return range(len(children)), children, settings

    build = lambda names, settings, children: unflatten(settings[0], tuple(children))  # noqa: E731
    _REGISTERED.add(cls)
    NODES[cls] = NodeType(flatten_checked, build, key, (f"{cls.__name__}(", ")"))
    LEAVES.discard(cls)
