"""NumPy's global random generator, in functions where it does not do what one expects of it.

A function that is recorded runs once: what it draws is a constant of the program. The body of a `shard_map` runs on
every rank, each with a global generator of its own. Both are found by comparing the generator's state before and after.
"""

from __future__ import annotations

import ctypes

from minidiff.location import here, warn_at

_MT19937_BYTES = 625 * 4  # 624 words of state, and how many of them are used

_warnings = 0  # how many were asked for


def random_state() -> tuple:
    """The state of NumPy's global random generator, in a microsecond: `numpy.random.get_state` takes a hundred.

    It is that of the generator of bits. Normal variates are made in pairs: drawing the second alone does not move it.
    """
    import numpy.random  # which NumPy, too, loads when it is first used

    generator = numpy.random.get_bit_generator()
    if type(generator) is numpy.random.MT19937:
        return _warnings, ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return _warnings, repr(generator.state)  # a user has put another one in its place


def warn_if_random(before: tuple, function: str, why: str) -> None:
    """Warn, in the user's line that called it, where the global generator has moved while a function ran.

    `why` says what comes of that. Where there was a warning of a function that this one called, that is enough.
    """
    global _warnings
    count, state = random_state()
    if state == before[1] or count != before[0]:
        return
    _warnings, source = count + 1, here()
    text = (
        f"{function} draws from NumPy's global random generator (np.random): {why}. Draw outside, from a generator "
        "with a seed (rng = np.random.default_rng(0)), and pass the numbers as an argument"
    )
    warn_at(source, text)
