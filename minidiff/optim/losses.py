"""Losses, with the names of optax."""

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
    """Compute `(predictions - targets)**2` of each number.

    Args:
        predictions: an array.
        targets: an array that broadcasts with the predictions; None for 0.

    Returns:
        An array of the shape of the predictions.

    >>> squared_error(numpy.array([1.0, 4.0]), numpy.array([0.0, 1.0]))
    array([1., 9.])
    """
    error = predictions if targets is None else predictions - targets
    return error * error


def l2_loss(predictions: Value, targets: Value | None = None) -> Value:
    """Compute half the squared error of each number.

    Args:
        predictions: an array.
        targets: an array that broadcasts with the predictions; None for 0.

    Returns:
        An array of the shape of the predictions.

    >>> l2_loss(numpy.array([1.0, 4.0]))
    array([0.5, 8. ])
    """
    return 0.5 * squared_error(predictions, targets)


def huber_loss(predictions: Value, targets: Value | None = None, delta: float = 1.0) -> Value:
    """Compute half the squared error of each number up to `delta`, and a line beyond (Huber, 1964).

    Args:
        predictions: an array.
        targets: an array that broadcasts with the predictions; None for 0.
        delta: the error at which the line begins.

    Returns:
        An array of the shape of the predictions.

    >>> huber_loss(numpy.array([0.5, -3.0]))
    array([0.125, 2.5  ])
    """
    errors = abs(predictions if targets is None else predictions - targets)
    near = numpy.minimum(errors, delta)
    return 0.5 * near * near + delta * (errors - near)


def sigmoid_binary_cross_entropy(logits: Value, labels: Value) -> Value:
    """Compute `-log(p)` of each label, where `sigmoid(logits)` is the probability of 1.

    Args:
        logits: an array.
        labels: an array like the logits, of numbers from 0 to 1.

    Returns:
        An array of the shape of the logits.

    >>> numpy.round(sigmoid_binary_cross_entropy(numpy.array([0.0, -1000.0]), numpy.array([1.0, 0.0])), 6)
    array([0.693147, 0.      ])
    """
    return softplus(logits) - labels * logits


@in_float32
def softmax_cross_entropy(logits: Value, labels: Value, axis: int = -1) -> Value:
    """Compute `-sum(labels * log_softmax(logits))` along an axis.

    Args:
        logits: an array.
        labels: probabilities, an array like the logits; a label of 0 adds 0, even where the softmax is 0.
        axis: the axis of the classes.

    Returns:
        An array of the shape of the logits without the axis.

    >>> round(float(softmax_cross_entropy(numpy.zeros(4), numpy.array([0.0, 0.0, 1.0, 0.0]))), 6)
    1.386294
    """
    return -numpy.sum(labels * where(labels == 0, 0.0, log_softmax(logits, axis)), axis=axis)


def softmax_cross_entropy_with_integer_labels(logits: Value, labels: Value) -> Value:
    """Compute `-log_softmax(logits)` at integer labels.

    Args:
        logits: an array [..., classes].
        labels: integers [...].

    Returns:
        An array [...].

    >>> numpy.round(softmax_cross_entropy_with_integer_labels(numpy.zeros((2, 4)), numpy.array([3, 0])), 6)
    array([1.386294, 1.386294])
    """

    def loss(logits: Value) -> Value:
        chosen = numpy.take_along_axis(logits, numpy.expand_dims(labels, -1), axis=-1)
        return logsumexp(logits, axis=-1) - numpy.squeeze(chosen, -1)

    return run_in_float32(loss, logits)
