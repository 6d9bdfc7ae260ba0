"""The body of a running `shard_map`, as the core sees it: named axes, and whether types are tracked along them."""

from __future__ import annotations

from typing import Any


class Scope:
    """The body of a running `shard_map`: its axes, and whether it is typed.

    `axes` maps each axis name to its size. An untyped scope (`check_rep=False`) does not track states: every
    value is invariant and no cast is inserted. An explicit scope (`auto_pbroadcast=False`) inserts none into the user's
    operations, but checks that their operands agree.
    """

    __slots__ = ("axes", "typed", "explicit", "checks", "bottom", "views", "function", "transposed")

    def __init__(self, axes: dict, typed: bool = True, explicit: bool = False):
        self.axes = dict(axes)
        self.typed = typed
        self.explicit = explicit
        self.checks = False  # in an explicit scope, whether the current operation is the user's: see `checking`
        self.bottom: Any = None  # the interpreter of the ranks, which `spmd` has
        self.function = ""  # the name of the function that is the body
        self.views: dict = {}  # id of value -> (values, primitive, operand, params): as `ranks` records it
        #: The number of transpositions in this body, whose results depend on types: the cotangent of a value that is
        #: the same on all ranks is a sum over the ranks.
        self.transposed = 0


class checking:
    """`with checking(scope, yes):` turn an explicit scope's checks on or off.

    They are on for the user's operations, and off for those that implement one (in derivative rules, say). The latter
    get pbroadcasts inserted as in any scope, since the user could not write them.
    """

    __slots__ = ("scope", "checks", "previous")

    def __init__(self, scope: Scope | None, yes: bool):
        self.scope = scope or Scope({})
        self.checks = yes and self.scope.explicit

    def __enter__(self) -> None:
        self.previous = self.scope.checks
        self.scope.checks = self.checks

    def __exit__(self, *exc) -> None:
        self.scope.checks = self.previous
