"""The point at which checks of the arguments of collectives are installed.

Without them, users get the errors of Python and NumPy. `collectives/ranks.py` installs `argument_checks.py`, whose
errors say what to write instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from minidiff.core.ranks import Scope
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray
from minidiff.errors import VarianceError, show_axes
from minidiff.inputs.arguments import as_value


class Checks:
    """Checks of the arguments of a collective `name`: these do nothing, or convert the argument."""

    def axis_names(self, name: str, axis_name: Any, ordered: bool, scope: Scope | None, vmapped: dict) -> Sequence[str]:
        """Return the axes in order. They are those of a mesh or of a vmap; a set is accepted if not `ordered`."""
        return axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)

    def one_group(self, name: str, axis_name: Any, axis_groups: Sequence[Any]) -> None:
        """Raise ValueError unless one operation can run over the axes."""

    def groups(self, name: str, axis_name: Any, groups: Any, size: int, uniform: bool) -> None:
        """Raise ValueError unless each of `size` ranks is in one group; `uniform` requires equal sizes."""

    def split(self, name: str, x: Value, axis: int, size: int, tiled: bool) -> None:
        """Raise ValueError if a dimension cannot be split into one part per rank."""

    def splits(self, name: str, x: Value, axes: tuple, splits: Any, group: Any, capacity: Any) -> tuple[Any, int]:
        """Return the row counts `splits[source, destination]` as an array, and the rows of results, or ValueError."""
        splits = as_value(splits)
        return splits, int(splits.sum(0).max()) if capacity is None else capacity

    def rows(self, splits: Any, rows: int, capacity: int) -> None:
        """Raise ValueError if a rank sends more than `rows` rows, or receives more than `capacity`."""

    def permutation(self, name: str, axis_name: Any, group: Any, perm: Any) -> tuple[tuple[int, int], ...]:
        """Return the pairs of a permutation of ranks, or raise TypeError or ValueError."""
        return tuple(map(tuple, perm))

    def copies_summed(self, axes: tuple[str, ...], copies: int) -> None:
        """Warn that a psum adds up copies of a value."""

    def exact_psum(self, x: Any, axis_name: Any, groups: Any, is_exact: bool, axis: Any) -> Any:
        """Return the sum over ranks and over dimensions `axis` of blocks, rounded once: see `psum`."""

    def state_error(self, name: str, takes: Collection[str], x: ShapedArray, params: dict) -> VarianceError:
        """Return the error for an operand in states that the collective does not take."""
        return VarianceError(
            f"{name} over {show_axes(params['axes'])} takes a value that is {next(iter(takes))}, not {x}"
        )

    def parameters(self, of: Any, types: Sequence[ShapedArray], params: dict, scope: Scope | None) -> None:
        """Raise ValueError if a collective's parameters on a tape do not match its operands, or the body's ranks."""

    def axes_in(self, name: str, scope: Scope | None, axes: tuple[str, ...]) -> int | None:
        """Return the number of ranks along axes, None if unknown; ValueError for unbound or repeated axes."""


checks: Any = Checks()
