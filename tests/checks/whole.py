"""Whole arrays, whether they are sharded or not."""

from typing import Any

import numpy


def whole(x: Any) -> numpy.ndarray:
    """An array or a sharded one, whole; under MPI every rank must call it."""
    return x.gather() if hasattr(x, "gather") else numpy.asarray(x)
