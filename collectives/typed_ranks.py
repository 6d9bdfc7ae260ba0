"""The answers of the heart of ranks to `minidiff.core.ranks.Ranks`: types along mesh axes, and casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives.casts import bind_in_body, cast, record_view
from collectives.typing_rules import cast_cotangent, check_operands, check_unreduced
from minidiff.core.interpreter import current_scope
from minidiff.core.ranks import Ranks
from minidiff.core.tracer import Value
from minidiff.values.settings import checking


class TypedRanks(Ranks):
    """Axes along which values have states, and whose ranks communicate."""

    bind = staticmethod(bind_in_body)
    record_view = staticmethod(record_view)
    cast = staticmethod(cast)
    cast_cotangent = staticmethod(cast_cotangent)
    check_operands = staticmethod(check_operands)
    check_unreduced = staticmethod(check_unreduced)

    def backward_pass(
        self, run: Callable, tape: Any, cts: Sequence[Value | None], is_whole: bool
    ) -> list[Value | None]:
        with checking(current_scope(), False):  # its operations insert their casts, as in any derivative rule
            return run(tape, cts)
