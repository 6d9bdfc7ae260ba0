"""What `raising.py` imports of the pass that moves psums: to be deleted with its search."""

from __future__ import annotations

from typing import Any

from collectives.delay_psums import SHORT_MESSAGE as CHEAP_BYTES
from collectives.delay_psums import delay_psums as sink_psums

__all__ = ["CHEAP_BYTES", "sink_psums", "worth_moving"]


def worth_moving(*args: Any) -> bool:
    """Whether moving psums may save one: that is not known before."""
    return True
