"""The operations, one file per family; each is declared with all its rules."""

import importlib

from minidiff.ops import (  # noqa: F401 (importing a family declares its operations)
    composed,
    einsum,
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
_LATER = ("decomposition", "fft", "norms", "polynomial")


def declare_all() -> None:
    """Declare the operations of all families, when a function of NumPy is not among those declared so far."""
    for name in _LATER:
        importlib.import_module(f"{__name__}.{name}")
