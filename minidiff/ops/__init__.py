"""The operations, one file per family; each is declared with all its rules."""

import importlib

from minidiff.ops import (  # noqa: F401 (importing a family declares its operations)
    composed,
    discrete,
    elementwise,
    indexing,
    linalg,
    operators,
    rearranging,
    reduction,
    shape,
    sorting,
    statistics,
    updates,
)

#: Families that few programs need. `declare_all` imports them.
_LATER = ("covariance", "creation", "decomposition", "determinants", "differences", "fft", "polynomial", "sets")


def declare_all() -> None:
    """Declare the operations of all families, when a function of NumPy is not among those declared so far."""
    for name in _LATER:
        importlib.import_module(f"{__name__}.{name}")
