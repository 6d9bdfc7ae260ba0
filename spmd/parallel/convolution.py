"""Convolutions along dimensions that are split over ranks: spatial parallelism."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

from minidiff.core.interpreter import current_scope
from minidiff.core.ranks import vary_along
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof
from spmd.halo import as_spec, halo


def conv(x: Value, kernel: Value, axes: Any, mode: str | Sequence[str] = "zeros") -> Value:
    """Convolve images with a kernel, as the layers of networks do; a rank has a block of each image.

    x [..., *space, channels], kernel [*taps, channels, features] -> [..., *space, features]. There are as many
    dimensions of space as of taps. `axes` says what each is split over, and `mode` what is around the image, as for
    `spmd.halo`. The result has the size of x: a kernel of k taps needs a halo of (k - 1) // 2 before the block and
    k // 2 after it, which are two messages an axis; then each tap is a matrix product. (The kernel is not flipped.)
    Raises ValueError for shapes, axes or modes that do not fit.

    >>> import spmd, minidiff.numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> f = lambda x, kernel: conv(x, kernel, 'i')
    >>> f = spmd.shard_map(f, mesh=mesh, in_specs=(spmd.P('i'), spmd.P()), out_specs=spmd.P('i'))
    >>> f(np.array([[1.0], [2.0], [3.0], [4.0]]), np.ones((3, 1, 1))).gather().ravel()
    array([3., 6., 9., 7.])

    Source: N. Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism", 2019.
    """
    image, t = typeof(x), typeof(kernel)
    space = t.ndim - 2
    if space < 1 or image.ndim <= space or image.shape[-1] != t.shape[-2]:
        raise ValueError(
            f"conv: x is {image} and the kernel {t}; write them as [..., *space, channels] and [*taps, channels, "
            "features], with as many dimensions of space as of taps"
        )
    taps = t.shape[:space]
    others = (None,) * (image.ndim - space - 1)
    modes = (mode,) * space if isinstance(mode, str) else tuple(mode)
    widths = [(0, 0)] * len(others) + [((k - 1) // 2, k // 2) for k in taps] + [(0, 0)]
    p = halo(x, widths, (*others, *as_spec(axes).entries), (*["zeros"] * len(others), *modes, "zeros"))
    if isinstance(kernel, Tracer) and not (current_scope() and current_scope().checks):
        kernel = vary_along(kernel, typeof(p).variance)  # once, not at each tap: its gradient is one sum over the ranks

    def of_tap(tap: tuple[int, ...]) -> Value:
        window = [slice(k, k + n) for k, n in zip(tap, image.shape[len(others) :])]
        return p[(..., *window, slice(None))] @ kernel[tap]

    return functools.reduce(operator.add, map(of_tap, itertools.product(*map(range, taps))))
