"""The body of a running `shard_map`, as the core sees it, and hooks that `collectives` and `spmd` fill in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minidiff.core.states import VARYING, AxisStates
from minidiff.core.tracer import Value, states_of
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import VarianceError, location


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
        self.views: dict = {}  # id of value -> how it was made: as `ranks` records it
        #: The number of transpositions in this body, whose results depend on types: the cotangent of a value that is
        #: the same on all ranks is a sum over the ranks.
        self.transposed = 0


class Ranks:
    """The questions that `minidiff` asks of the layers above it, answered for programs without ranks.

    `collectives` installs a subclass when it is imported, and `spmd` one of that. Nothing else in `minidiff` depends on
    a layer above.
    """

    folders: Sequence[str] = ()  # further folders of library code, which source locations skip
    passes: Sequence[Any] = ()  # further rewrites of the compiler, in order: see `minidiff.compiler.simplify`
    exported: Callable[..., Any] = staticmethod(lambda eqn: None)  # how a file runs it: `minidiff.compiler.export`
    record_whole: Callable[..., Any] = staticmethod(lambda eqn: None)  # its tape on whole arrays: `minidiff.sparse`
    push_body: Callable[..., Any] = staticmethod(lambda *args: None)  # of series: `minidiff.taylor`
    share_sums: Callable[..., Any] = staticmethod(lambda tape: tape)  # a linear tape over sharded arrays: `spmd.arrays`
    #: Run a function of a sharded batch, or a loop over sharded arrays, by ranks on their parts; None if it cannot.
    map_elements: Callable[..., Any] = staticmethod(lambda batch, args, run: None)
    loop_over_blocks: Callable[..., Any] = staticmethod(lambda loop, args, params: None)
    psum: Callable[..., Any] = staticmethod(lambda x, axes: x)  # the sum over ranks: `collectives.psum`

    def bind(self, interpreter: Any, primitive: Any, args: Sequence[Value], params: dict) -> Any:
        """Apply an operation in the body of a `shard_map`: cast operands that disagree along mesh axes."""
        raise NotImplementedError

    def record_view(self, scope: Any, outs: Sequence[Value], primitive: Any, x: Value, params: dict) -> None:
        """Record in the scope of a body how an operation made views, so that a cast may pass through it."""

    def cast(self, x: Value, states: AxisStates) -> Value:
        """Change the states of `x` along mesh axes by free casts, such as a `pbroadcast`."""
        raise VarianceError(f"cannot cast {typeof(x)} to {states}: import spmd first")

    def cast_cotangent(self, ct: Value, type: ShapedArray) -> Value:
        """Cast a cotangent along mesh axes to its primal's cotangent type, or raise VarianceError."""
        return ct

    def check_operands(self, name: str, types: Sequence[ShapedArray | None]) -> None:
        """Raise VarianceError if operands disagree along a mesh axis. A None is a constant, which agrees with all."""

    def check_unreduced(self, primitive: Any, types: Sequence[Any]) -> None:
        """Raise VarianceError if the operation is not linear in its unreduced operands."""

    def dispatch(self, interpreter: Any, primitive: Any, args: Sequence[Value], params: dict) -> Any:
        """Apply an operation to sharded arrays, outside any `shard_map` body, under an interpreter.

        Return None if no operand is sharded.
        """
        return None

    def backward_pass(
        self, run: Callable, tape: Any, cts: Sequence[Value | None], is_whole: bool
    ) -> list[Value | None]:
        """Run the backward pass of a linear tape, `run(tape, cts)`, in the body of a `shard_map`.

        `is_whole` says that it is the whole backward pass of a transformation.
        """
        raise NotImplementedError

    def warn(self, message: str, category: type[Warning]) -> None:
        """Warn at the user's line about something that all ranks do: only one of them warns."""
        location.warn_at(location.current_location(), message, category)

    def settings(self) -> Any:
        """Settings and surroundings that a recorded function depends on, as part of a cache key."""
        return None


#: The ranks that programs run on.
ranks = Ranks()


def install(layer: type[Ranks]) -> None:
    """Make `ranks` an object of this class."""
    ranks.__class__ = layer
    location.add_library(*layer.folders)


def cast_to(x: Value, states: AxisStates) -> Value:
    """Insert the free casts, if any, from the states of `x` to `states`."""
    return x if states_of(x) == states else ranks.cast(x, states)


def cast_like(x: Value, t: ShapedArray) -> Value:
    """Cast `x` to the states of type `t`: by free casts, or outside of bodies to its sharding."""
    sharded = t.sharding is not None and states_of(x) != t.states
    return t.sharding.reshard(x) if sharded else cast_to(x, t.states)


def vary_along(x: Value, axes: Iterable[str]) -> Value:
    """Insert the casts, if any, by which `x` varies along `axes`."""
    return cast_to(x, states_of(x).with_state(axes, VARYING))
