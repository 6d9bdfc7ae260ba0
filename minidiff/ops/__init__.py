"""The operations, one file per family; each is declared with all its rules."""

import importlib

from minidiff.ops import operators  # noqa: F401 (it imports the families that most programs need)

#: Families that few programs need. `declare_all` imports them.
_LATER = ("decomposition", "fft", "norms", "polynomial")


def declare_all() -> None:
    """Declare the operations of all families, when a function of NumPy is not among those declared so far."""
    for name in _LATER:
        importlib.import_module(f"{__name__}.{name}")
