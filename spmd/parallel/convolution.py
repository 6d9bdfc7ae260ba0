"""Convolutions along dimensions that are split over ranks: spatial parallelism.

A rank has a block of each image, and needs its neighbors' edges: the halo. With p ranks along one dimension of space,
N images of C channels, k taps along this dimension with a stride of s, and w elements in a row of the image across it:

=========  ==========  =====  ===================  ======================================
direction  collective  count  elements             what
=========  ==========  =====  ===================  ======================================
forward    ppermute    2      N*(k-s)*w*C          rows of the halo (none if k is s)
backward   ppermute    2      N*(k-s)*w*C          their cotangents
backward   psum        1      those of the kernel  the sum of the kernel's gradients
=========  ==========  =====  ===================  ======================================

Source: N. Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidiff import nn
from minidiff.core.tracer import Value
from minidiff.nn.layers import Sizes, check_operands, pad_widths, places_of
from spmd.halo import as_spec, halo


def conv(
    x: Value,
    kernel: Value,
    axes: Any,
    mode: str | Sequence[str] = "zeros",
    stride: Sizes = 1,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Value:
    """Compute `md.nn.conv` with padding 'same', for images that are split over ranks.

    Args:
        x: this rank's block of the images, `[..., *space, channels]`.
        kernel: the whole kernel, `[*taps, channels / groups, features]`.
        axes: the axes of the mesh that each dimension of space is split over, as for `spmd.halo`.
        mode: the values around the image: "zeros", "periodic" or "edge"; one for all dimensions, or one for each.
        stride: the distance between results, as for `md.nn.conv`.
        dilation: the distance between the taps of the kernel.
        groups: the number of groups of channels.

    Returns:
        This rank's block of the result, `[..., *space / stride, features]`.

    Raises:
        ValueError: for shapes, axes or modes that do not match, and for blocks whose sizes are not multiples of the
            stride.

    >>> import spmd, minidiff.numpy as np
    >>> mesh = spmd.make_mesh((2,), ('i',), backend='simulated')
    >>> f = lambda x, kernel: conv(x, kernel, 'i')
    >>> f = spmd.shard_map(f, mesh=mesh, in_specs=(spmd.P('i'), spmd.P()), out_specs=spmd.P('i'))
    >>> f(np.array([[1.0], [2.0], [3.0], [4.0]]), np.ones((3, 1, 1))).gather().ravel()
    array([3., 6., 9., 7.])
    """
    image, t = check_operands("conv", x, kernel, groups)
    places = places_of("conv", image, t.shape[:-2], stride, dilation)
    first, space = places.axes[0], len(places.axes)
    block = image.shape[first:-1]
    if any(n % s for n, s in zip(block, places.steps)):
        raise ValueError(f"conv: a rank's block of space, {block} of {image}, is not a multiple of the stride {stride}")
    widths = [(0, 0)] * first + pad_widths("conv", image, places, "same") + [(0, 0)]
    modes = (mode,) * space if isinstance(mode, str) else tuple(mode)
    around = halo(x, widths, (*[None] * first, *as_spec(axes).entries), (*["zeros"] * first, *modes, "zeros"))
    return nn.conv(around, kernel, stride, "valid", dilation, groups)
