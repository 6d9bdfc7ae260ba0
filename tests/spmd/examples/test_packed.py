"""Packed texts: their losses and gradients are those of each text alone."""

from functools import partial

import numpy as np

import minidiff as md
from spmd.examples import packed
from spmd.parallel.transformer import init_transformer, next_token_loss

LENGTHS = [3, 1, 6]


def texts_and_params():
    rng = np.random.default_rng(4)
    params = init_transformer(rng, packed.CONFIG)
    return [rng.integers(packed.CONFIG.vocabulary, size=n + 1) for n in LENGTHS], params


def test_a_row_of_texts():
    tokens, labels, positions, segments = packed.pack([[5, 6, 7, 8], [9, 1], [2, 3, 4]], ranks=4)
    assert tokens.tolist() == [5, 6, 7, 9, 2, 3, 0, 0]
    assert labels.tolist() == [6, 7, 8, 1, 3, 4, 0, 0]
    assert positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert segments.tolist() == [0, 0, 0, 1, 2, 2, -1, -1]


def test_the_loss_and_the_gradient_are_those_of_each_text_alone():
    texts, params = texts_and_params()
    f = partial(packed.packed_loss, attend=partial(packed.attend_text_by_text, LENGTHS))
    value, gradient = md.value_and_grad(f)(params, *packed.pack(texts))

    def alone(params):
        losses = [next_token_loss(packed.CONFIG, params, text[None, :-1], text[None, 1:]) for text in texts]
        return sum(n * x for n, x in zip(LENGTHS, losses))

    expected, of_texts = md.value_and_grad(alone)(params)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for a, b in zip(md.tree.leaves(gradient), md.tree.leaves(of_texts)):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
