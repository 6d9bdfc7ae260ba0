"""Memory of arrays: freed memory stays with the process, since mapping it again takes longer than writing it.

The C library takes a block back when its array is collected, and by default returns large ones to the operating system,
which clears each page before the next array can use it. So here the C library is told to keep more: it knows by itself
which memory nobody holds. That is possible with glibc, on Linux; elsewhere nothing changes.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

#: The options of `mallopt` in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

#: Larger blocks are mapped and returned one by one, as always; glibc allows no larger limit. So what a program keeps of
#: sizes that it never uses again is bounded.
LARGEST_BLOCK = 32 << 20

#: How much free memory stays by default.
KEPT_BYTES = 1 << 30

_decided: set[bool] = set()  # not empty once it is


@functools.cache
def _libc() -> Any:
    """The C library, if it is glibc; None otherwise."""
    import ctypes  # not needed before the first gradient

    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    except (OSError, TypeError):
        return None


def keep_memory(most: int = KEPT_BYTES) -> bool:
    """Keep up to `most` bytes of freed arrays' memory in the process.

    It holds for the whole process, and for arrays of up to 32 MiB. The first gradient or compiled program calls it with
    1 GiB, or the number of bytes in the environment variable MINIDIFF_KEEP_MEMORY. With 0, memory is returned as by
    default. No array, view or tape is concerned: only what is free stays.

    Args:
        most: the number of bytes, at least 0.

    Returns:
        Whether that is possible here.

    Raises:
        ValueError: for a negative number.

    >>> is_possible = keep_memory(1 << 28)
    """
    if most < 0:
        raise ValueError(f"keep_memory: the number of bytes must be 0 or positive, got {most}")
    _decided.add(True)
    libc = _libc()
    if libc is None:
        return False
    libc.mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK if most else 128 << 10)
    libc.mallopt(_TRIM_THRESHOLD, min(most, 2**31 - 1) if most else 128 << 10)
    return True


def release_memory() -> None:
    """Return free memory to the operating system now.

    >>> release_memory()
    """
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def keep_by_default() -> None:
    """Call `keep_memory` as the environment says, unless it has been called."""
    if _decided:
        return
    _decided.add(True)
    text = os.environ.get("MINIDIFF_KEEP_MEMORY") or str(KEPT_BYTES)
    if not text.isdecimal():
        warnings.warn(
            f"MINIDIFF_KEEP_MEMORY={text!r} is ignored: write a number of bytes, such as {KEPT_BYTES}", stacklevel=3
        )
        text = str(KEPT_BYTES)
    if int(text):
        keep_memory(int(text))
