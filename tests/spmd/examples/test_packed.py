"""Packed texts: their losses and gradients are those of each text alone, and no text sees another."""

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


def test_no_text_sees_another():
    """The gradient of one text's errors is zero in the embeddings of tokens that are in other texts alone."""
    _, params = texts_and_params()
    texts = [np.array([0, 1, 2, 3]), np.array([4, 5]), np.array([6, 7, 8, 9, 10, 11, 12])]
    row = packed.pack(texts)
    of_the_first = np.where(row[3] == 0, 1.0, 0.0)

    def loss(params, attend):
        errors = []
        for k in range(len(of_the_first)):
            segments = np.where(np.arange(len(of_the_first)) == k, row[3], packed.PADDING)
            errors.append(packed.packed_loss(params, *row[:3], segments, lambda q, k, v, _: attend(q, k, v, row[3])))
        return sum(w * e for w, e in zip(of_the_first, errors) if w)

    slopes = md.grad(lambda p: loss(p, partial(packed.attend_text_by_text, LENGTHS)))(params)["embedding"]
    assert np.abs(slopes[:3]).min() > 0 and np.abs(slopes[4:]).max() == 0
