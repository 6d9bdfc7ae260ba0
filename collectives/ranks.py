"""The hooks of collectives in `minidiff`: see `minidiff.core.ranks.Ranks`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from collectives.casts import bind_in_body, cast, record_view
from collectives.exported import exported_collective
from collectives.passes import PASSES
from collectives.passes.gradient_bucket import backward_pass_in_body
from collectives.typing_rules import cast_cotangent, check_operands, check_unreduced
from minidiff.core.ranks import Ranks


class CommunicatingRanks(Ranks):
    """Axes whose ranks communicate."""

    folders = (os.path.dirname(__file__),)
    passes: Sequence[Any] = (PASSES,)

    bind = staticmethod(bind_in_body)
    record_view = staticmethod(record_view)
    cast = staticmethod(cast)
    exported = staticmethod(exported_collective)
    cast_cotangent = staticmethod(cast_cotangent)
    check_operands = staticmethod(check_operands)
    check_unreduced = staticmethod(check_unreduced)

    backward_pass = staticmethod(backward_pass_in_body)
