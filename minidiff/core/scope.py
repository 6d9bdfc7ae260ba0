"""The body of a running `shard_map`, as the core sees it: named axes, and whether types are tracked along them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minidiff.core.tracer import Tracer, Value, states_of

if TYPE_CHECKING:
    from minidiff.core.operation import Primitive


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
        self.views: dict = {}  # id of value -> (values, primitive, operand, params): see `remember`
        #: The number of transpositions in this body, whose results depend on types: the cotangent of a value that is
        #: the same on all ranks is a sum over the ranks.
        self.transposed = 0

    def remember(self, outs: Sequence[Value], primitive: Primitive, operand: Value, params: dict) -> None:
        """Record how views were made, of a value that does not vary along all axes.

        A pbroadcast of a view is then a view of a pbroadcast, so that a weight and its transpose share one. And the
        backward pass can recompute a view instead of keeping it. The operand must belong to the interpreter that has
        the view, because an interpreter above may end earlier.
        """
        if not self.typed or len(states_of(operand).varying) == len(self.axes):
            return
        if len({x.interpreter for x in (*outs, operand) if isinstance(x, Tracer)}) == 1:
            self.views.update((id(out), (outs, primitive, operand, params)) for out in outs)


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
