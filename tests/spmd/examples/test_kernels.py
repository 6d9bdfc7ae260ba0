"""`fused_convolution`: one loop for a layer, with the values of loops over windows; `kernels.md` has other kernels."""

from functools import partial

import numpy as np
import pytest

import minidiff as md
from minidiff import nn
from minidiff.compiler import native
from spmd.examples import fused_convolution as fused

needs_loops = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite")


def convolved(x, kernel):
    """Return a convolution with 3 x 3 taps as a loop over taps."""
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = x.shape[1] - 2, x.shape[2] - 2
    return sum(x[:, i : i + rows, j : j + columns] @ kernel[i, j] for i in range(3) for j in range(3))


OTHERS = {
    *("avg_pool", "batch_norm", "conv", "conv_transpose", "group_norm", "layer_norm", "max_pool", "rms_norm"),
    *("standardize", "dot_product_attention", "dropout", "erf", "erfc", "initializers", "logsumexp", "one_hot"),
    *("hard_swish", "swish"),  # second names
}


def layer_example(dtype):
    rng = np.random.default_rng(0)
    params = rng.normal(size=(3, 3, 5, 64)) / 7, *rng.normal(size=(3, 64)), (rng.normal(size=64), rng.random(64) + 0.5)
    return md.tree.map(lambda p: p.astype(dtype), params), rng.normal(size=(2, 20, 17, 5)).astype(dtype)


@pytest.mark.parametrize("name", ["relu", "gelu", "glu", "softmax"])
def test_layers_are_one_loop_with_the_values_of_loops_over_windows(name):
    """Folding saves the operations of the norm, but no pass."""
    f, (params, x) = getattr(nn, name), layer_example(np.float32)
    kernel, bias, scale, offset, (mean, variance) = md.tree.map(np.float64, params)
    y = convolved(x.astype(float), kernel) + bias
    rows = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    expected = [f(z * scale + offset) for z in ((y - mean) / np.sqrt(variance + 1e-5), rows)]
    cases = [(fused.layer, params), (fused.folded_layer, fused.fold(params)), (fused.row_layer, params)]
    counts = []
    for (apply, weights), wanted in zip(cases, [expected[0], *expected]):
        program = md.jit(partial(apply, activation=f))
        np.testing.assert_allclose(program(weights, x), wanted, rtol=1e-3, atol=3e-5)
        counts.append(fused.count(program, weights, x))
    if native.is_available():
        half = 0.5 * (name == "glu")
        assert [c[2:] for c in counts] == [(1, 2 - half)] * 2 + [(2, 3.5) if half else (1, 2)]
        assert counts[0][0] - counts[1][0] == (6 if half else 3)  # of glu, those of both halves


@needs_loops
def test_all_activations_are_one_loop():
    assert {*fused.ACTIVATIONS} == {*nn.__all__} - OTHERS
    params, x = layer_example(np.float32)
    for name in fused.ACTIVATIONS:
        operations, alone, *loops = fused.count(md.jit(partial(fused.layer, activation=getattr(nn, name))), params, x)
        assert loops == [1, 1.5 if name == "glu" else 2] and operations >= 2 and alone >= 3.5, name
