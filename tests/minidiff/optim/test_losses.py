"""Losses are their formulas; `optimizers.md` has those of large numbers."""

import numpy as np

import minidiff as md
from minidiff import optim
from tests.checks.samples import each

LABELS, LOGITS = np.array([2, 0, 1]), np.random.default_rng(0).normal(size=(3, 4))


def log_sigmoid(x):
    return -np.log(1 + np.exp(-x))


def log_probabilities(x):
    return np.log(np.exp(x) / np.exp(x).sum(-1, keepdims=True))


def huber(x, y):
    return np.where(abs(x - y) < 1, (x - y) ** 2 / 2, abs(x - y) - 0.5)


#: Predictions, targets, and the formula.
LOSSES = {
    "squared_error": (LOGITS, LOGITS + 1, lambda x, y: (x - y) ** 2),
    "l2_loss": (LOGITS, LOGITS + 3, lambda x, y: (x - y) ** 2 / 2),
    "huber_loss": (3 * LOGITS, LOGITS, huber),
    "sigmoid_binary_cross_entropy": (
        *(LOGITS, LOGITS % 1),
        lambda x, y: -(y * log_sigmoid(x) + (1 - y) * log_sigmoid(-x)),
    ),
    "softmax_cross_entropy": (LOGITS, np.eye(4)[LABELS], lambda x, y: -(y * log_probabilities(x)).sum(-1)),
    "softmax_cross_entropy_with_integer_labels": (
        *(LOGITS, LABELS),
        lambda x, y: -log_probabilities(x)[np.arange(3), y],
    ),
}


@each("name", LOSSES)
def test_losses_are_their_formulas(name):
    x, y, formula = LOSSES[name]
    loss = getattr(optim, name)
    for f in (loss, md.jit(loss)):
        np.testing.assert_allclose(f(x, y), formula(x, y), rtol=1e-12)
    md.testing.check_grads(lambda x: loss(x, y), (x,), order=2)
