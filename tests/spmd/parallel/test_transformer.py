"""The transformer on one device: derivatives, causality, rotary positions, integer labels."""

from dataclasses import replace

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from minidiff.nn import one_hot
from spmd import parallel
from spmd.parallel.transformer import normalize, rotary

SMALL = parallel.Config(vocabulary=7, features=8, heads=4, layers=2, hidden=6)
VARIANTS = {
    "rms norm, SwiGLU": SMALL,
    "layer norm, GELU": replace(SMALL, layer_norm=True, swiglu=False),
    "grouped queries, tied": replace(SMALL, kv_heads=2, tied=True),
    "one head of keys": replace(SMALL, kv_heads=1, layers=1),
}
TEXT = numpy.random.default_rng(0).integers(SMALL.vocabulary, size=(2, 6))


def params_of(config):
    return parallel.init_transformer(numpy.random.default_rng(1), config)


@pytest.mark.parametrize("name", VARIANTS)
def test_derivatives_are_those_of_finite_differences(name):
    config = VARIANTS[name]
    md.testing.check_grads(
        lambda params: parallel.next_token_loss(config, params, TEXT[:, :-1], TEXT[:, 1:]),
        (params_of(config),),
        order=1,
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_a_logit_depends_on_the_tokens_up_to_its_own(name):
    config, params = VARIANTS[name], params_of(VARIANTS[name])
    logits = parallel.transformer(config, params, TEXT)
    for changed in range(TEXT.shape[1]):
        tokens = TEXT.copy()
        tokens[:, changed] = (tokens[:, changed] + 1) % config.vocabulary
        same = numpy.all(
            numpy.isclose(parallel.transformer(config, params, tokens), logits, rtol=0, atol=1e-12), axis=(0, 2)
        )
        assert same.tolist() == [position < changed for position in range(TEXT.shape[1])]


def test_rotary_products_depend_on_the_difference_of_positions():
    rng = numpy.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 1, 8))

    def product(i, j):
        return np.sum(rotary(query, np.array([i])) * rotary(key, np.array([j])))

    numpy.testing.assert_allclose(product(0, 0), np.sum(query * key), rtol=1e-12)
    for shift in (1, 5, 100):
        numpy.testing.assert_allclose(product(3 + shift, 1 + shift), product(3, 1), rtol=1e-10)
        assert not numpy.isclose(product(3 + shift, 1), product(3, 1))


def test_norms():
    x = numpy.random.default_rng(0).normal(size=(3, 8)) + 5
    for config in (SMALL, replace(SMALL, layer_norm=True)):
        y = normalize(config, np.ones(8), x)
        numpy.testing.assert_allclose(np.mean(y**2, axis=-1), 1, rtol=1e-5)
        assert numpy.allclose(np.mean(y, axis=-1), 0) == config.layer_norm


@pytest.mark.parametrize("scale", [1.0, 1e4])  # of which no exponential overflows
def test_integer_labels_are_one_hot_targets(scale):
    logits, labels = scale * numpy.random.default_rng(0).normal(size=(2, 5, 7)), TEXT[:, :5]
    targets = one_hot(labels, 7)
    actual = md.value_and_grad(lambda logits: np.sum(parallel.label_cross_entropy(logits, labels)))(logits)
    expected = md.value_and_grad(lambda logits: np.sum(parallel.cross_entropy(logits, targets)))(logits)
    for x, y in zip(actual, expected):
        numpy.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_single_precision_stays_so():
    params = md.tree.map(lambda x: x.astype("float32"), params_of(SMALL))
    assert parallel.transformer(SMALL, params, TEXT).dtype == "float32"


@pytest.mark.parametrize("causal", [True, False])
def test_tokens_of_an_encoder_attend_to_later_ones(causal):
    config = parallel.Config(vocabulary=8, features=8, heads=2, layers=1, hidden=8, causal=causal)
    params = parallel.init_transformer(numpy.random.default_rng(0), config)
    one, other = (parallel.transformer(config, params, numpy.array([[1, 2, last]]))[0, :2] for last in (3, 4))
    assert numpy.allclose(one, other) == causal
