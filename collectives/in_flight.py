"""Messages in flight: a `ppermute` in two steps, between which a rank computes.

============== ================== ============== =======================
operation      type               communicates   transpose
============== ================== ============== =======================
ppermute_start varying -> varying point to point ppermute_wait, reversed
ppermute_wait  varying -> varying no             ppermute_start, reversed
============== ================== ============== =======================

The examples and drawings are of the same two ranks as those of `ops.py`, which explains them.

Source: MPI standard, "Nonblocking communication".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from collectives.axes import AxisName, CollectiveAxes, single_axes
from collectives.checks import checks
from collectives.collective import Collective
from collectives.operands import array_of, bind_over, each_leaf, make_varying
from collectives.ops import Tree, reverse_permutation
from minidiff import tree
from minidiff.core.interpreter import current_interpreter
from minidiff.core.states import VARYING
from minidiff.core.types import typeof
from minidiff.errors import show_axes

# ---------------------------------------------------------------- the table

# Between them a value is in flight: it is written while it is there, so an `InFlight` hides it. In the backward pass,
# where its cotangent is in flight, the message starts where the forward pass waits.
ppermute_start_p = Collective(
    "ppermute_start",
    {VARYING: lambda: ppermute_wait_p},
    VARYING,
    transpose_params=reverse_permutation,
    cost="point_to_point",
    shares_memory=True,
)
ppermute_wait_p = Collective(
    "ppermute_wait",
    {VARYING: lambda: ppermute_start_p},
    VARYING,
    transpose_params=reverse_permutation,
    shares_memory=True,
)

#: The collectives of this table.
IN_FLIGHT = (ppermute_start_p, ppermute_wait_p)

# ---------------------------------------------------------------- public functions


class InFlight(Generic[Tree]):
    """A tree of arrays that `ppermute_start` has sent and that is still in flight: only `wait()` reads it.

    Type checkers know it as `InFlight[T]` of a tree T. It is no array: functions of arrays raise TypeError for it.

    >>> def body(x):
    ...     arriving = ppermute_start(x, 'i', [(0, 1), (1, 0)])
    ...     print(arriving)
    ...     return arriving.wait() - x
    >>> spmd.shard_map(body, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    a value in flight over 'i': i64[2]{i}
    ShardedArray([ 1,  0, -1,  0], P('i'))
    """

    def __init__(self, sent: Tree, group: CollectiveAxes, perm: Sequence[tuple[int, int]]):
        self._sent, self._axis_group, self._perm = sent, group, perm
        self._interpreter, self._arrived = current_interpreter(), False

    def wait(self) -> Tree:
        """Return the tree, once it has arrived. Another call returns it again.

        Raises RuntimeError in another function than the one that started it, such as the body of a loop.
        """
        if current_interpreter() is not self._interpreter:
            raise RuntimeError(
                f"wait: {self} was started outside of this transformation, loop or branch: wait for it there, and use "
                "the result here"
            )
        if not self._arrived:
            bind = lambda leaf: bind_over(ppermute_wait_p, leaf, self._axis_group, perm=self._perm)  # noqa: E731
            self._sent, self._arrived = each_leaf(bind, self._sent), True
        return self._sent

    def __array__(self, *args: Any, **options: Any) -> None:  # to type checkers, it converts to no array
        raise TypeError(f"{self} cannot be read before it arrives: call .wait() to get its value")

    def __repr__(self) -> str:
        types = ", ".join(str(typeof(leaf)) for leaf in tree.leaves(self._sent))
        return f"a value in flight over {show_axes(self._axis_group.axes)}: {types}"


def ppermute_start(x: Tree, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> InFlight[Tree]:
    """Start a `ppermute`, and return a handle whose `wait()` returns the result.

        x:                                        [a]  [b]  {i}
        ppermute_start(x, 'i', [(0, 1)]).wait():  [0]  [a]  {i}
        backward:                                 [u]  [v]  {i}  ->  [v]  [0]  {i}

    What a rank computes before it waits, it computes while the messages are on their way (MPI_Isend and MPI_Irecv; many
    MPI libraries move long messages only while the program calls them). In the backward pass the reversed messages
    begin where the forward pass waits, and are waited for where it begins them. `jit` does this for a `ppermute` by
    itself; write it where a program runs without `jit`, or to say when. Raises what `ppermute` does.

    >>> def body(x):
    ...     arriving = ppermute_start(x, 'i', [(0, 1), (1, 0)])
    ...     square = x * x  # meanwhile
    ...     return square + arriving.wait()
    >>> spmd.shard_map(body, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(np.array([3, 1, 4, 1]))
    ShardedArray([13,  2, 19,  2], P('i'))

    Source: MPI standard, "Nonblocking communication".
    """
    group = single_axes("ppermute_start", axis_name)
    ranks = checks.permutation("ppermute_start", axis_name, group, perm)
    start = lambda leaf: bind_over(ppermute_start_p, make_varying(array_of(leaf), group), group, perm=ranks)  # noqa: E731
    return InFlight(each_leaf(start, x), group, ranks)
