"""Convolutions of several dimensions against SciPy's, and their derivatives against differences."""

import numpy as np
import pytest
import scipy.signal

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.scipy import signal
from tests.checks.samples import each

SHAPES = [((4,), (3,)), ((3,), (4,)), ((5, 4), (2, 3)), ((4, 3, 2), (2, 3, 1)), ((5, 1), (2, 3))]


@each("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_convolve_and_correlate(shapes, mode):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape) for shape in shapes)
    if mode == "valid" and shapes == SHAPES[-1]:
        with pytest.raises(ValueError):
            signal.convolve(x, y, mode)
        return
    for ours, theirs in ((signal.convolve, scipy.signal.convolve), (signal.correlate, scipy.signal.correlate)):
        for z in (y, y + 1j * x.sum()):
            np.testing.assert_allclose(ours(x, z, mode), theirs(x, z, mode), atol=1e-12)
    f = lambda x, y: signal.convolve(x, y, mode)  # noqa: E731
    check_grads(f, (x, y))
    check_grads(lambda x, y: signal.correlate(x, y, mode), (x, y + 0.5j), order=1)
    xs, ys = np.stack([x, 2 * x]), np.stack([y, -y])
    for axes in ((0, 0), (0, None), (None, 0)):
        args = (xs if axes[0] == 0 else x, ys if axes[1] == 0 else y)
        expected = [f(*[a if b is None else a[i] for a, b in zip(args, axes)]) for i in range(2)]
        np.testing.assert_allclose(md.jit(md.vmap(f, axes))(*args), expected, atol=1e-12)
        check_grads(md.vmap(f, axes), args, order=1)


def test_methods_agree():
    x, y = np.random.default_rng(0).normal(size=(2, 20, 20))
    direct, fast = (signal.convolve(x, y, method=method) for method in ("direct", "fft"))
    np.testing.assert_allclose(direct, fast, atol=1e-11)
