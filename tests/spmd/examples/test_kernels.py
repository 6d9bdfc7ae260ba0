"""`fused_convolution`, `winograd` and `two_rings`: loops over windows, fractions, published links."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest

import minidiff as md
from minidiff import nn
from minidiff.compiler import native
from spmd.examples import fused_convolution as fused
from spmd.examples import two_rings
from spmd.examples.winograd import transforms, winograd

needs_loops = pytest.mark.skipif(not native.is_available(), reason="needs llvmlite")


def convolved(x, kernel, padding=((1, 1), (1, 1))):
    """Return a convolution with 3 x 3 taps as a loop over taps."""
    x = np.pad(x, ((0, 0), *padding, (0, 0)))
    rows, columns = x.shape[1] - 2, x.shape[2] - 2
    return sum(x[:, i : i + rows, j : j + columns] @ kernel[i, j] for i in range(3) for j in range(3))


# ---------------------------------------------------------------- convolutions with what follows

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


# ---------------------------------------------------------------- Winograd's convolutions


@pytest.mark.parametrize("m", [2, 4])
def test_transforms_are_exact(m):
    a, g, b = transforms(m)
    exact = lambda matrix: [[Fraction(x).limit_denominator(24) for x in row] for row in matrix]  # noqa: E731
    for taps in np.eye(3, dtype=int):
        for data in np.eye(m + 2, dtype=int):
            product = np.array(exact(g)) @ taps * (np.array(exact(b)) @ data)
            assert [*np.array(exact(a)) @ product] == [sum(taps * data[k : k + 3]) for k in range(m)]


@pytest.mark.parametrize(("m", "shape", "padding"), [(2, (1, 7, 13), 1), (4, (2, 8, 8), 1), (4, (3, 6, 5), 0)])
def test_winograd_and_its_gradients_are_those_of_loops_over_taps(m, shape, padding):
    rng, around = np.random.default_rng(0), ((padding, padding),) * 2
    x, kernel = rng.normal(size=(*shape, 3)), rng.normal(size=(3, 3, 3, 4))
    actual, pullback = md.vjp(lambda x, kernel: winograd(x, kernel, m, around), x, kernel)
    np.testing.assert_allclose(actual, convolved(x, kernel, around), rtol=0, atol=1e-12)
    weights = rng.normal(size=actual.shape)
    for k, gradient in enumerate(pullback(weights)):  # linear in each operand: an inner product, in any direction
        args = [x, kernel]
        args[k] = rng.normal(size=args[k].shape)
        np.testing.assert_allclose(np.sum(gradient * args[k]), np.sum(weights * convolved(*args, around)), atol=1e-10)


# ---------------------------------------------------------------- two rings

#: The number of links between GPUs of a DGX-1 with V100s, as `nvidia-smi topo -m` prints it.
DGX_1 = """
    0 1 1 2 2 0 0 0
    1 0 2 1 0 2 0 0
    1 2 0 2 0 0 1 0
    2 1 2 0 0 0 0 1
    2 0 0 0 0 1 1 2
    0 2 0 0 1 0 2 1
    0 0 1 0 1 2 0 2
    0 0 0 1 2 1 2 0
"""


@pytest.mark.parametrize(("ranks", "gpus", "unused"), [(4, (0, 1, 2, 3), 2), (8, (2, 1, 5, 6, 7, 4, 0, 3), 0)])
def test_lanes_use_links_of_the_machine_once_each_way(ranks, gpus, unused):
    machine = np.array(DGX_1.split(), int).reshape(8, 8)
    links = machine[np.ix_(gpus, gpus)]
    for lanes in two_rings.lanes_of(ranks).values():
        used = np.zeros_like(links)
        for ring in lanes:
            assert sorted(ring) == [*range(ranks)]
            np.add.at(used, (np.array(ring), np.roll(ring, -1)), 1)
        assert np.all(used <= links)
    assert (links - used).sum() == unused and links.sum() == two_rings.LINKS[ranks]
