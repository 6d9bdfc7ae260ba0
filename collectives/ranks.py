"""The hooks of `minidiff` that `collectives` installs: see `minidiff.core.ranks.Ranks`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from collectives.exported import exported_collective
from collectives.passes import PASSES
from collectives.passes.gradient_bucket import backward_pass_in_body
from collectives.typed_ranks import TypedRanks


class CommunicatingRanks(TypedRanks):
    """Axes whose ranks communicate, with passes of the compiler, and with gradients in buckets."""

    folders = (os.path.dirname(__file__),)
    passes: Sequence[Any] = (PASSES,)

    exported = staticmethod(exported_collective)
    backward_pass = staticmethod(backward_pass_in_body)
