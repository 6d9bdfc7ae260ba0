"""The hooks of `minidiff` that `collectives` installs: see `minidiff.core.ranks.Ranks`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from collectives.argument_checks import ArgumentChecks
from collectives.casts import TypedRanks
from collectives.checks import checks
from collectives.exported import exported_collective
from collectives.ops import psum
from collectives.passes import PASSES
from collectives.passes.gradient_bucket import backward_pass_in_body

checks.__class__ = ArgumentChecks


class CommunicatingRanks(TypedRanks):
    """Axes whose ranks communicate, with passes of the compiler, and with gradients in buckets."""

    folders = (os.path.dirname(__file__),)
    passes: Sequence[Any] = (PASSES,)

    exported = staticmethod(exported_collective)
    psum = staticmethod(psum)
    backward_pass = staticmethod(backward_pass_in_body)
