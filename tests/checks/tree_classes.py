"""Classes of trees, and how to make one of each of them of two children: what tests go over."""

import types
from collections import OrderedDict, defaultdict
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import minidiff as md

try:
    import attrs
except ImportError:  # an optional one
    attrs = None


class Point(NamedTuple):
    w: Any
    b: Any


@dataclass
class Plain:
    w: Any
    b: Any
    name: str = field(default="plain", metadata={"static": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    b: Any
    w: Any


@dataclass
class Derived:
    """A field that `__init__` computes of the others, and an argument of it that is no field."""

    w: Any
    b: Any
    scale: InitVar[float] = 1.0
    both: Any = field(init=False)

    def __post_init__(self, scale):
        self.both = self.w * scale


@dataclass
class Inherited(Plain):
    pass


class Given:
    def __init__(self, w, b):
        self.w, self.b = w, b


md.tree.register(Given, lambda x: ([x.w, x.b], "given"), lambda _, children: Given(*children))

#: How to make a tree of each class, and the class.
CLASSES = {
    "tuple": (lambda w, b: (w, b), tuple),
    "list": (lambda w, b: [w, b], list),
    "dict": (lambda w, b: {"w": w, "b": b}, dict),
    "OrderedDict": (lambda w, b: OrderedDict(w=w, b=b), OrderedDict),
    "defaultdict": (lambda w, b: defaultdict(list, w=w, b=b), defaultdict),
    "namespace": (lambda w, b: types.SimpleNamespace(w=w, b=b), types.SimpleNamespace),
    "named tuple": (Point, Point),
    "dataclass": (Plain, Plain),
    "frozen dataclass": (lambda w, b: Frozen(w=w, b=b), Frozen),
    "derived field": (Derived, Derived),
    "inherited": (Inherited, Inherited),
    "registered": (Given, Given),
}

if attrs is not None:

    @attrs.define
    class Defined:
        w: Any
        _b: Any
        name: str = attrs.field(default="attrs", metadata={"static": True})
        both: Any = attrs.field(init=False)

        def __attrs_post_init__(self):
            self.both = self.w

        @property
        def b(self):
            return self._b

    @attrs.frozen
    class AttrsFrozen:
        w: Any
        b: Any

    CLASSES |= {"attrs": (Defined, Defined), "frozen attrs": (AttrsFrozen, AttrsFrozen)}


def parts(x):
    """The two children of such a tree, by name."""
    if isinstance(x, dict):
        return x["w"], x["b"]
    return (x.w, x.b) if hasattr(x, "w") else (x[0], x[1])
