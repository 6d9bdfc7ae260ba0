"""Contractions of random subscripts, of windows, and of small dtypes."""

import numpy as np
import pytest

from minidiff.ops import einsum


@pytest.mark.parametrize(
    "subscripts",
    [
        "xyzuvc,uvcf->xyzf",  # a convolution
        "xyzuvc,uvcf->fzxy",
        "xyzuvc,xyzf->uvcf",  # the cotangent of its kernel
        "xyzuvc,xyzf->fcvu",
        "xyzuvc,uvcfg->xyzfg",
        "xyzuvc,yzuvc->x",
        "xyzuvc,xyzuvc->",
    ],
)
@pytest.mark.parametrize("tile", [1 << 8, 1 << 12, 1 << 30])
def test_products_of_windows_tile_by_tile(subscripts, tile, monkeypatch):
    """The windows may be the first operand or the second."""
    monkeypatch.setattr(einsum, "LARGE_BYTES", 1 << 10)
    monkeypatch.setattr(einsum, "TILE_BYTES", tile)
    rng = np.random.default_rng(0)
    x = np.lib.stride_tricks.sliding_window_view(rng.normal(size=(3, 8, 9, 2)), (3, 2), (1, 2))
    windows, (terms, out) = np.moveaxis(x, 3, -1), subscripts.split("->")
    a, b = terms.split(",")
    sizes = {**dict(zip("xyzuvc", windows.shape)), "f": 4, "g": 2}
    other = rng.normal(size=[sizes[i] for i in b])
    expected = np.einsum(subscripts, windows, other)
    for operands, names in (((windows, other), subscripts), ((other, windows), f"{b},{a}->{out}")):
        np.testing.assert_allclose(einsum.einsum_p.bind(*operands, subscripts=names), expected, atol=1e-10)
