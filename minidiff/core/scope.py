"""The body of a running `shard_map`, as the core sees it: its named axes, and whether types are tracked."""

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
