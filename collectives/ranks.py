"""What the collectives do for `minidiff`: see `minidiff.core.ranks.Ranks`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from collectives.casts import cast, insert_casts, record_view
from collectives.exported import exported_collective
from collectives.passes import PASSES
from collectives.passes.gradient_bucket import backward_pass_in_body
from minidiff.core.ranks import Ranks
from minidiff.core.tape import Tape
from minidiff.core.tracer import Value
from minidiff.inputs.agreement import cast_cotangent, check_operands, check_unreduced


class CommunicatingRanks(Ranks):
    """Axes whose ranks communicate."""

    folders = (os.path.dirname(__file__),)
    passes: Sequence[Any] = (PASSES,)

    agree = staticmethod(insert_casts)
    record_view = staticmethod(record_view)
    cast = staticmethod(cast)
    exported = staticmethod(exported_collective)
    cast_cotangent = staticmethod(cast_cotangent)
    check_operands = staticmethod(check_operands)
    check_unreduced = staticmethod(check_unreduced)

    def backward_pass(self, walk_back: Callable, tape: Tape, cts: Sequence[Value | None]) -> list[Value | None]:
        return backward_pass_in_body(tape, cts)
