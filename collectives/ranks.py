"""What the collectives do for `minidiff`: see `minidiff.core.Ranks`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from collectives.casts import agree, cast
from collectives.passes import PASSES
from collectives.passes.gradient_bucket import backward_pass_in_body
from minidiff import core
from minidiff.core import Value


class Ranks(core.Ranks):
    """Axes whose ranks communicate."""

    folders = (os.path.dirname(__file__),)
    passes = (PASSES,)

    agree = staticmethod(agree)
    cast = staticmethod(cast)

    def backward_pass(self, backward_pass: Callable, *args: Any) -> list[Value | None]:
        return backward_pass_in_body(*args)
