"""Warn of NumPy's global random generator where its use is probably a mistake.

A recorded function runs once, so the numbers that it draws become constants of the program. The body of a `shard_map`
runs on every rank, and each has its own global generator. To detect both, compare the generator's state before and
after.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from minidiff.errors.location import current_location, warn_at

_MT19937_BYTES = 625 * 4  # 624 words of state, and the position in them

_warnings = 0  # the number of warnings so far


@functools.lru_cache(maxsize=1)
def _memory_of(generator: Any) -> Any:
    """Return the memory of a bit generator's state."""
    return (ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address)


def random_state() -> tuple:
    """Return the number of warnings, and the state of NumPy's global random generator.

    It takes half a microsecond; `numpy.random.get_state` takes a hundred. The state is that of the bit generator.
    Normal variates are drawn in pairs, and drawing the second of a pair does not change it. It is None while nobody
    has loaded `numpy.random`, which takes longer than a small program.
    """
    of_numpy: Any = sys.modules.get("numpy.random")
    if of_numpy is None:
        return _warnings, None
    generator = of_numpy.get_bit_generator()
    if type(generator) is not of_numpy.MT19937:
        return _warnings, repr(generator.state)  # the user has replaced the generator
    return _warnings, _memory_of(generator).raw


def warn_if_random(before: tuple, function: str, why: str) -> None:
    """Warn at the user's line if the global generator was used since `before`.

    `why` explains the consequence. Do not warn again if there was a warning inside the function.
    """
    global _warnings
    count, state = random_state()
    if state == before[1] or count != before[0] or (before[1] is None and _is_fresh()):
        return
    _warnings, source = count + 1, current_location()
    text = (
        f"{function} draws from NumPy's global random generator (np.random): {why}. Draw outside, from a generator "
        "with a seed (rng = np.random.default_rng(0)), and pass the numbers as an argument"
    )
    warn_at(source, text)


def _is_fresh() -> bool:
    """Whether the global generator, loaded in the meantime, is at the position at which generators begin."""
    import numpy.random

    positions = [x.get_state(legacy=False)["state"].get("pos") for x in (numpy.random, numpy.random.RandomState())]
    return positions[0] == positions[1]
