"""`numpy.choose`: for each place, one of several arrays."""

from __future__ import annotations

from typing import Any

import numpy

from minidiff.core import Tracer, Value, implements
from minidiff.ops.elementwise import equal, remainder, where


@implements(numpy.choose)
def choose(a: Value, choices: Any, mode: str = "raise") -> Value:
    """`numpy.choose`: at each place the element of `choices[a]`; all broadcast.

    Numbers out of range raise an error (of traced ones, the nearest choice is taken); with `mode` "wrap" they start
    over, with "clip" the nearest choice is taken.
    """
    choices = [c if isinstance(c, Tracer) else numpy.asarray(c) for c in choices]
    a = a if isinstance(a, Tracer) else numpy.asarray(a)
    if a.dtype.kind not in "iub":
        raise TypeError(f"choose: the choices are numbered, so a is of integers, got dtype {a.dtype}")
    if mode == "wrap":
        a = remainder(a, len(choices))
    elif mode == "raise" and not isinstance(a, Tracer) and a.size and not (a.min() >= 0 and a.max() < len(choices)):
        raise ValueError(f"choose: {a.tolist()} names other than the {len(choices)} choices; mode= says what is meant")
    dtype = numpy.result_type(*[c.dtype for c in choices])
    out = choices[-1] if len(choices) > 1 else where(equal(a, 0), choices[0], choices[0])
    for i in range(len(choices) - 2, -1, -1):
        out = where(equal(a, i) if i else numpy.less_equal(a, 0), choices[i], out)
    return out if out.dtype == dtype else out.astype(dtype)
