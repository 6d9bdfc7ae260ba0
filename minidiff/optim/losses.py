"""Losses, with the names of optax."""

from __future__ import annotations

from typing import Any

import numpy

from minidiff.core.tracer import Value
from minidiff.nn import log_softmax, logsumexp, softplus
from minidiff.ops import elementwise, reduction
from minidiff.ops.base import in_float32, run_in_float32

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
def softmax_cross_entropy(logits: Value, labels: Value, axis: Any = -1, where: Any = None) -> Value:
    """Compute `-sum(labels * log_softmax(logits))` along axes.

    Args:
        logits: an array.
        labels: probabilities, an array like the logits; a label of 0 adds 0, even where the softmax is 0.
        axis: the axis of the classes, a tuple of axes, or None for all.
        where: a mask of examples, without the axes of the classes, or one that broadcasts with the logits, with as many
            dimensions; where it is False, a class is left out of the softmax, and its label counts as 0. The loss of an
            example that is left out, or whose classes are, is 0.

    Returns:
        An array of the shape of the logits without the axes.

    >>> round(float(softmax_cross_entropy(numpy.zeros(4), numpy.array([0.0, 0.0, 1.0, 0.0]))), 6)
    1.386294
    """
    where = _mask_of_classes(where, logits, axis)
    labels = labels if where is None else elementwise.where(where, labels, 0)
    logs = log_softmax(logits, axis, where)  # a label of 0 has a derivative, unless the logarithm is infinite
    return -numpy.sum(labels * elementwise.where((labels == 0) & (logs == -numpy.inf), 0.0, logs), axis=axis)


def softmax_cross_entropy_with_integer_labels(logits: Value, labels: Value, axis: int = -1, where: Any = None) -> Value:
    """Compute `-log_softmax(logits)` at integer labels.

    Args:
        logits: an array [..., classes].
        labels: integers [...].
        axis: the axis of the classes.
        where: a mask of examples, of the shape of the labels, or one that broadcasts with the logits, with as many
            dimensions; where it is False, a class is left out of the softmax. The loss of an example that is left out,
            or whose classes are, is 0; that of another label that is left out is inf.

    Returns:
        An array of the shape of the logits without the axis.

    >>> numpy.round(softmax_cross_entropy_with_integer_labels(numpy.zeros((2, 4)), numpy.array([3, 0])), 6)
    array([1.386294, 1.386294])
    """

    where = _mask_of_classes(where, logits, axis)

    def loss(logits: Value) -> Value:
        if where is not None:
            logits = reduction.apply_mask(logits, where, -numpy.inf)
        chosen = numpy.squeeze(numpy.take_along_axis(logits, numpy.expand_dims(labels, axis), axis=axis), axis)
        total = logsumexp(logits, axis=axis)
        return total - chosen if where is None else elementwise.difference(total, chosen)  # of infinities it is 0

    return run_in_float32(loss, logits)


def _mask_of_classes(mask: Value | None, logits: Value, axis: Any) -> Value | None:
    """Return a mask with the logits' dimensions."""
    return mask if mask is None or numpy.ndim(mask) >= numpy.ndim(logits) else numpy.expand_dims(mask, axis)
