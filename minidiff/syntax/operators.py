"""The operators that rewritten functions call: Python's statement, or `cond` and loops for values that are traced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from minidiff import tree
from minidiff.control_flow.carries import is_staging, known_number
from minidiff.control_flow.cond import choose, cond_p
from minidiff.control_flow.loops import scan_steps
from minidiff.control_flow.while_loop import run_while
from minidiff.core.tracer import Tracer
from minidiff.core.types import typeof
from minidiff.errors import SIZE, VarianceError
from minidiff.errors.location import current_location
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.ops.elementwise import logical_and, logical_not, logical_or, maximum, not_equal
from minidiff.ops.slices import dynamic_index_in_dim
from minidiff.syntax import variables
from minidiff.syntax.variables import Appended, Variables, copy_value, join_values, with_parts


class Steps:
    """The numbers of a `range` with traced bounds."""

    def __init__(self, start: Any, stop: Any = None, step: int = 1):
        first: tuple[Any, Any] = (0, start) if stop is None else (start, stop)
        (self.start, stop), self.step = first, step
        if isinstance(step, Tracer) or not step:
            raise TypeError(f"{current_location()}: the step of a range with traced bounds must be a number, not 0")
        self.count = maximum((stop - self.start + step - (1 if step > 0 else -1)) // step, 0)

    def __getitem__(self, k: Any) -> Any:
        return self.start + k * self.step


@hide_own_frames
class Operators:
    """The operators of a rewritten function, whose traced loops take at most `max_steps` steps in reverse mode.

    `is_internal(name)` says whether a variable is none of the function's, but a flag or a result.
    """

    Undefined = variables.Undefined

    def __init__(self, max_steps: int | None, is_internal: Callable[[str], bool]):
        self.max_steps, self.is_internal = max_steps, is_internal

    # ------------------------------------------------ expressions

    def load(self, x: Any) -> Any:
        """Return the value of a variable; UnboundLocalError if it has none."""
        if type(x) is variables.Undefined:
            raise UnboundLocalError(f"{current_location()}: {x.name} has no value here, since {x.reason}")
        return x

    def truth(self, x: Any) -> Any:
        """Return `bool(x)`; a traced boolean if `x` is traced, batched, or differs between ranks."""
        if not isinstance(x, Tracer):
            return bool(x)
        if typeof(x).size != 1:
            raise ValueError(
                f"{current_location()}: a condition must be one boolean, got {typeof(x)}; use np.any or np.all, or "
                "choose each element with np.where"
            )
        try:
            known = known_number(x, "a condition")
        except VarianceError:
            known = None
        if known is not None:
            return bool(known)
        x = x.reshape(())
        return x if x.dtype == bool else not_equal(x, 0)

    def not_(self, x: Any) -> Any:
        truth = self.truth(x)
        return logical_not(truth) if isinstance(truth, Tracer) else not truth

    def and_(self, x: Any, *others: Callable[[], Any]) -> Any:
        """Return `x and y`, where y is computed only if it is needed; for operands that are cheap there is `both`."""
        return self._combine(False, None, x, others)

    def or_(self, x: Any, *others: Callable[[], Any]) -> Any:
        return self._combine(True, None, x, others)

    def both(self, x: Any, *others: Callable[[], Any]) -> Any:
        return self._combine(False, logical_and, x, others)

    def either(self, x: Any, *others: Callable[[], Any]) -> Any:
        return self._combine(True, logical_or, x, others)

    def _combine(self, end: bool, combine: Callable | None, x: Any, others: Sequence[Callable[[], Any]]) -> Any:
        """Return the first operand whose truth is `end`, or the last one."""
        if not others:
            return x
        truth, rest = self.truth(x), lambda: self._combine(end, combine, others[0](), others[1:])
        if not isinstance(truth, Tracer):
            return x if truth is end else rest()
        if combine is not None and x.dtype == bool and typeof(y := rest()).dtype == bool:
            return combine(x, y)
        branches = (lambda: x, rest) if end else (rest, lambda: x)
        return self.if_expression(truth, *branches)

    def compare(self, left: Any, link: Callable, right: Callable[[], Any], *links: Callable) -> Any:
        """Return whether a chain of comparisons holds: each link has a comparison and its right side."""
        x = right()
        first = link(left, x)
        return self.both(first, lambda: self.compare(x, *links)) if links else first  # type: ignore[arg-type]

    def if_expression(self, test: Any, then: Callable[[], Any], orelse: Callable[[], Any]) -> Any:
        return self.if_(test, lambda _: (then(),), lambda _: (orelse(),), (), ("the value",))[0]

    def range(self, function: Callable, *args: Any) -> Any:
        is_traced = function is range and any(isinstance(x, Tracer) and known_number(x, SIZE) is None for x in args)
        return Steps(*args) if is_traced else function(*args)

    # ------------------------------------------------ statements: functions of the values of the variables `names`

    def if_(self, test: Any, then: Callable, orelse: Callable, values: tuple, names: tuple, refusal: str = "") -> tuple:
        """Run a branch."""
        truth = self.truth(test)
        if not isinstance(truth, Tracer):
            return (then if truth else orelse)(values)
        where, frames = self._check("the condition", refusal), list[tuple]()

        def join(results: Sequence[Any]) -> list:
            """Return leaves with paths, and their structure, for both branches."""
            outs = [tree.unflatten(structure, [x for _, x in leaves]) for leaves, structure in results]
            internal = list(map(self.is_internal, names))
            jumps = [any(x is True for x, flag in zip(out, internal) if flag) for out in outs]
            fills = [[flag or jump for jump in jumps] for flag in internal]
            rows = [join_values(where, *row) for row in zip(names, *outs, fills)]
            frames[:] = [row[:2] for row in rows]
            columns = [[(name, x) for name, row in zip(names, rows) for x in row[k]] for k in (2, 3)]
            return [(column, tree.structure(tuple(x for _, x in column))) for column in columns]

        branches = (lambda: then(copy_value(values)), lambda: orelse(copy_value(values)))
        leaves = iter(choose(cond_p, truth, ("true_fun", "false_fun"), branches, (), join))
        results = [x if frame is None else with_parts(leaves, frame) for frame, x in frames]
        pairs = itertools.zip_longest(results, values[: len(results)])
        return tuple(Appended(x) if type(old) is Appended else x for x, old in pairs)

    def while_(self, test: Callable, body: Callable, values: tuple, names: tuple, refusal: str = "") -> tuple:
        while True:
            goes_on = self.truth(test(values))
            if isinstance(goes_on, Tracer):
                where = self._check("the condition", refusal)
                test_now = lambda _, values: self.truth(test(values))  # noqa: E731
                return self._repeat(where, test_now, lambda _, values: body(values), values, names)
            if not goes_on:
                return values
            values = body(values)

    def for_(
        self, items: Any, body: Callable, values: tuple, names: tuple, refusal: str = "", stops: tuple = ()
    ) -> tuple:
        """Run a loop over items, until the variable number `stops[0]` is true."""
        is_array = isinstance(items, Tracer) and bool(len(items)) and is_staging(eager=False)
        if is_array and not stops:
            return self._scan(self._check("the array", refusal), items, body, values, names)
        if is_array or isinstance(items, Steps):
            return self._count(self._check("the array or the range", refusal), items, body, values, names, stops)
        for k, item in enumerate(items):
            stop = self.truth(values[stops[0]]) if stops else False
            if isinstance(stop, Tracer) and isinstance(items, range):
                return self._count(self._check("a break", refusal), items[k:], body, values, names, stops)
            if stop is True:
                break
            step = lambda values: body(values, item)  # noqa: B023, E731
            values = step(values) if stop is False else self.if_(stop, tuple, step, values, names, refusal)
        return values

    def _check(self, subject: str, refusal: str) -> str:
        """Return the line of a statement that is traced, if all that it does can be."""
        where = str(current_location()).rstrip(":")
        if refusal:
            raise TypeError(
                f"{where}: {subject} is traced, so the statement becomes an operation; but {refusal}, which a traced "
                "program cannot do. Move it out of the statement, return a flag, or decide outside of jit and vmap"
            )
        return where

    def _scan(self, where: str, rows: Any, body: Callable, values: tuple, names: tuple) -> tuple:
        state = Variables(where, names, values, lambda _, values: body(values, rows[0]), len(rows))

        def step(parts: Any, row: Any) -> tuple:
            outs = body(state.values(parts), row)
            return state.parts(outs), state.appended(outs)

        last, stacks = scan_steps(step, state.carry(state.parts(state.start)), rows, len(rows), False)
        for k, stack in stacks.items():
            values[k].extend(tree.map(lambda x: x[i], y) for i in range(len(rows)) for y in stack)  # noqa: B023
        return state.results(last, self.is_internal)

    def _count(self, where: str, items: Any, body: Callable, values: tuple, names: tuple, stops: tuple) -> tuple:
        """Run a loop over the rows of an array, or over numbers, with a number of steps that is not known."""
        most = items.count if isinstance(items, Steps) else len(items)
        if isinstance(items, range):
            items = Steps(items.start, items.stop, items.step)
        item = items.__getitem__ if isinstance(items, Steps) else lambda k: dynamic_index_in_dim(items, k, 0, False)

        def test(k: Any, values: tuple) -> Any:
            return logical_and(k < most, logical_not(values[stops[0]])) if stops else k < most

        step = lambda k, values: body(values, item(k))  # noqa: E731
        return self._repeat(where, test, step, values, names, most if isinstance(most, int) else None)

    def _repeat(
        self, where: str, test: Callable, step: Callable, values: tuple, names: tuple, most: int | None = None
    ) -> tuple:
        """Run `step(number, values)` while `test(number, values)`, at most `most` times if that is a number."""
        state = Variables(where, names, values, step, most)
        state.require_count()
        test_parts = lambda carry: test(carry[0], state.values(carry[1]))  # noqa: E731
        step_parts = lambda carry: (carry[0] + 1, state.parts(step(carry[0], state.values(carry[1]))))  # noqa: E731
        carry = state.carry((0, state.parts(state.start)))
        last = run_while(test_parts, step_parts, carry, self.max_steps if most is None else most)
        return state.results(last[1], self.is_internal)
