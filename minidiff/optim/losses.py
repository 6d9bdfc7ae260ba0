"""Losses of predictions, by the names of optax."""

from __future__ import annotations

import numpy

from minidiff.core.tracer import Value
from minidiff.nn import log_softmax, logsumexp, softplus
from minidiff.ops.base import in_float32, run_in_float32
from minidiff.ops.elementwise import where

__all__ = [
    "huber_loss", "l2_loss", "sigmoid_binary_cross_entropy", "softmax_cross_entropy",
    "softmax_cross_entropy_with_integer_labels", "squared_error",
]  # fmt: skip


def squared_error(predictions: Value, targets: Value | None = None) -> Value:
    """`(predictions - targets)**2` of each number; without targets, of the predictions.

    >>> squared_error(numpy.array([1.0, 4.0]), numpy.array([0.0, 1.0]))
    array([1., 9.])
    """
    error = predictions if targets is None else predictions - targets
    return error * error


def l2_loss(predictions: Value, targets: Value | None = None) -> Value:
    """Half the squared error of each number.

    >>> l2_loss(numpy.array([1.0, 4.0]))
    array([0.5, 8. ])
    """
    return 0.5 * squared_error(predictions, targets)


def huber_loss(predictions: Value, targets: Value | None = None, delta: float = 1.0) -> Value:
    """Half the squared error of each number up to `delta`, and a line beyond (Huber, 1964).

    >>> huber_loss(numpy.array([0.5, -3.0]))
    array([0.125, 2.5  ])
    """
    errors = abs(predictions if targets is None else predictions - targets)
    near = numpy.minimum(errors, delta)
    return 0.5 * near * near + delta * (errors - near)


def sigmoid_binary_cross_entropy(logits: Value, labels: Value) -> Value:
    """`-log(p)` of each label, 0 or 1 or between, where `sigmoid(logits)` is the probability of 1.

    >>> numpy.round(sigmoid_binary_cross_entropy(numpy.array([0.0, -1000.0]), numpy.array([1.0, 0.0])), 6)
    array([0.693147, 0.      ])
    """
    return softplus(logits) - labels * logits


@in_float32
def softmax_cross_entropy(logits: Value, labels: Value, axis: int = -1) -> Value:
    """`-sum(labels * log_softmax(logits))` along an axis; a label of 0 has no part, even at a probability of 0.

    >>> round(float(softmax_cross_entropy(numpy.zeros(4), numpy.array([0.0, 0.0, 1.0, 0.0]))), 6)
    1.386294
    """
    return -numpy.sum(labels * where(labels == 0, 0.0, log_softmax(logits, axis)), axis=axis)


def softmax_cross_entropy_with_integer_labels(logits: Value, labels: Value) -> Value:
    """`-log_softmax(logits)` at integer labels: [..., classes], [...] -> [...].

    >>> numpy.round(softmax_cross_entropy_with_integer_labels(numpy.zeros((2, 4)), numpy.array([3, 0])), 6)
    array([1.386294, 1.386294])
    """

    def loss(logits: Value) -> Value:
        chosen = numpy.take_along_axis(logits, numpy.expand_dims(labels, -1), axis=-1)
        return logsumexp(logits, axis=-1) - numpy.squeeze(chosen, -1)

    return run_in_float32(loss, logits)
