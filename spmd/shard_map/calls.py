"""The points at which sharded arrays, speed and checks are installed beside `shard_map`.

Without them it takes and returns whole arrays, runs each operation as it comes, and checks types alone.
`spmd/ranks.py` installs sharded arrays (`sharding/sharded_array.py`), checks that ranks agree (`checks/agreement.py`),
plans of compiled calls (`compiled.py`), auto axes (`auto_axes.py`), and, in `interpreters` of `interpreter.py`, the
interpreters of bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray


class CallHooks:
    """Functions that a `shard_map` calls when it runs: these do nothing, and may be replaced by attributes.

    A user's call has a description, which is a parameter of the operation, `call`; None is a call of the library.
    """

    auto_axes: Any = None  # the module of that name, if arguments may stay sharded along axes that are not mapped over

    def reshard_argument(self, x: Value, mesh: Any, spec: Any) -> Value:
        """Return an argument split by its spec, if it is a sharded array."""
        return x

    def result_type(self, t: ShapedArray, mesh: Any, spec: Any) -> ShapedArray:
        """Return the type of a whole result, which says how it is sharded."""
        return t

    def check_fits(self, types: Sequence[Any], params: dict) -> None:
        """Raise ValueError unless the operation can have these parameters, on operands of these types."""

    def check_variance(self, params: dict) -> None:
        """Raise VarianceError if a result may differ where its spec says it does not."""

    def linear_part(self, call: Any) -> Any:
        """Return the description of the linear part of a call's derivative."""
        return call

    def compare_call(self, mesh: Any, call: Any) -> None:
        """Raise an error if ranks make different calls."""

    def compare_arguments(self, args: Sequence[Value], params: dict) -> Callable[[Any], None] | None:
        """Raise an error if ranks have different arguments; return a function that compares a closed-over array."""
        return None

    def compare_results(self, interpreter: Any, outs: Sequence[Value], specs: Sequence[Any]) -> None:
        """Raise an error if ranks have different results that are the same by their specs."""

    def transpose(self, run: Callable, cts: Sequence[Any], operands: Sequence[Any], params: dict) -> Sequence[Any]:
        """Return `run(cts, operands, params)`, the cotangents of operands; a linear operand is its type."""
        return run(cts, operands, params)

    def plan(self, operands: Sequence[Value], params: dict, evaluate: Callable) -> Callable[..., list[Value]]:
        """Return a function that runs a compiled `shard_map`, `evaluate(args, params)`, on operands like these."""
        return lambda *args, body: evaluate(args, params)


hooks: Any = CallHooks()
