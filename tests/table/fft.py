"""Rows of `minidiff/ops/fft.py`."""

import numpy as np

from tests.table.rows import complex_, product, real, row

ONE: list[dict] = [{"n": 3}, {"n": 6, "norm": "ortho"}, {"axis": 0, "norm": "forward"}, {"n": 1, "axis": -2}]
MANY: list[dict] = [{}, {"axes": (0, 2)}, {"axes": (-1, 0), "s": (5, 1), "norm": "ortho"}, {"axes": (1,), "s": (-1,)}]
TWO: list[dict] = [{}, {"s": (4, 3), "axes": (2, 0), "norm": "forward"}]
SHIFTS: list[dict] = [{}, {"axes": 1}, {"axes": (0, -1)}]

WHOLE = [np.fft.fft, np.fft.ifft]
TO_HALF = [np.fft.rfft, np.fft.ihfft]
FROM_HALF = [np.fft.irfft, np.fft.hfft]

LINEAR = dict.fromkeys([getattr(np.fft, name) for name in np.fft.__all__ if "freq" not in name])

ROWS = [
    *(row(f, make(*shape)) for f in WHOLE for make in (real, complex_) for shape in ((1,), (4,), (2, 5))),
    *product(WHOLE, [complex_(4, 5)], ONE),
    *(row(f, complex_(0, 3)) for f in WHOLE),
    *(row(f, real(*shape)) for f in TO_HALF for shape in ((1,), (2,), (4,), (2, 5), (0, 3))),
    *(row(f, real(4, 5), **options) for f in TO_HALF for options in ONE),
    *(row(f, make(*shape)) for f in FROM_HALF for make in (real, complex_) for shape in ((2,), (4,), (2, 5))),
    *product(FROM_HALF, [complex_(4, 5)], [*ONE, {"n": 9}, {"n": 2}]),
    *(row(f, complex_(1), n=1) for f in FROM_HALF),
    *(row(f, complex_(2, 1, 3), **options) for f in (np.fft.fftn, np.fft.ifftn) for options in MANY),
    *(row(f, complex_(2, 3), axes=()) for f in (np.fft.fftn, np.fft.ifftn)),
    *(row(f, real(3), axes=(0, 0)) for f in (np.fft.fftn, np.fft.ifftn)),
    *(row(np.fft.rfftn, real(2, 1, 3), **options) for options in MANY),
    *(row(np.fft.irfftn, complex_(2, 2, 3), **options) for options in MANY[:3]),
    *product([np.fft.fft2, np.fft.ifft2], [real(3, 2, 4), complex_(3, 2, 4)], TWO),
    *(row(np.fft.rfft2, real(3, 2, 4), **options) for options in TWO),
    *(row(np.fft.irfft2, complex_(3, 2, 4), **options) for options in TWO),
    *(row(f, real(2, 3), **options) for f in (np.fft.fftshift, np.fft.ifftshift) for options in SHIFTS),
    *(row(f, complex_(5)) for f in (np.fft.fftshift, np.fft.ifftshift)),
]
