"""The two ends of a language model: the look-up of tokens, and the cross entropy of integer labels.

With `axis`, the vocabulary is split along that axis of the mesh: rank r has rows r*V/p to (r+1)*V/p of the embedding,
and the logits of these tokens. A rank looks up the tokens that it has, and gets zeros for the others. Neither rows nor
logits are gathered. With p ranks, N tokens, F features and a vocabulary of V, forward:

===================  ==========  =====  ==============  ==================================
function             collective  count  elements        instead of a gather of
===================  ==========  =====  ==============  ==================================
embed                psum        1      N*F             V/p*F (the table)
label_cross_entropy  pmax, psum  1, 2   N each          N*V/p (the logits)
===================  ==========  =====  ==============  ==================================

The backward pass communicates nothing: the transpose of a `psum` is a `pbroadcast`, and the maximum is a constant.

Source: Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism",
section 3.
"""

from __future__ import annotations

from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import axis_index, axis_size, pmax, psum
from minidiff.errors import TracerError, VarianceError
from minidiff.nn import logsumexp


def embed(table: Any, tokens: Any, axis: str | None = None) -> Any:
    """The tokens' rows of the table: [vocabulary / ranks, features], [...] -> [..., features].

    Tokens are the same on all ranks along `axis`. Raises IndexError if one is not in the vocabulary.

    >>> embed(np.arange(6.0).reshape(3, 2), np.array([2, 0]))
    array([[4., 5.],
           [0., 1.]])
    """
    _check("token", tokens, len(table), axis)
    if axis is None:
        return table[tokens]
    row, here = _local(tokens, len(table), axis)
    return psum(np.where(here[..., None], table[row], 0.0), axis)


def label_cross_entropy(logits: Any, labels: Any, axis: str | None = None) -> Any:
    """-log of the label's probability: [..., vocabulary / ranks], [...] -> [...].

    Labels are the same on all ranks along `axis`. Raises IndexError if one is not in the vocabulary, ValueError if
    there is not one for each row of logits.

    >>> label_cross_entropy(np.zeros((2, 4)), np.array([3, 1])) / np.log(2)
    array([2., 2.])
    """
    _check("label", labels, logits.shape[-1], axis)
    if logits.shape[:-1] != np.shape(labels):
        raise ValueError(
            f"label_cross_entropy: labels are {logits.shape[:-1]} for logits {logits.shape}, got {np.shape(labels)}"
        )
    if axis is None:
        return logsumexp(logits, axis=-1) - _chosen(logits, labels)
    # Subtract the largest logit, so that no exponential overflows: neither result nor derivative depends on it.
    logits = logits - pmax(np.max(md.stop_gradient(logits), axis=-1, keepdims=True), axis)
    label, here = _local(labels, logits.shape[-1], axis)
    total = psum(np.sum(np.exp(logits), axis=-1), axis)
    return np.log(total) - psum(np.where(here, _chosen(logits, label), 0.0), axis)


def _chosen(logits: Any, labels: Any) -> Any:
    return np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]


def _local(numbers: Any, rows: int, axis: str) -> tuple[Any, Any]:
    """The numbers from this rank's first on, and whether this rank has them; 0 where it does not."""
    local = numbers - axis_index(axis) * rows
    here = (local >= 0) & (local < rows)
    return np.where(here, local, 0), here


def _check(what: str, numbers: Any, rows: int, axis: str | None) -> None:
    """Raise IndexError for a number out of range, TypeError if they are not integers.

    On a tape, and where ranks have different numbers, there is no one value to check.
    """
    vocabulary = rows if axis is None else rows * axis_size(axis)
    if md.typeof(numbers).dtype.kind not in "iu":
        raise TypeError(f"{what}s are integers from 0 to {vocabulary - 1}, got {md.typeof(numbers)}")
    try:
        extremes = int(np.min(numbers)), int(np.max(numbers))
    except (TracerError, VarianceError):
        return
    for number in extremes:
        if not 0 <= number < vocabulary:
            raise IndexError(f"{what} {number} is not in the vocabulary of {vocabulary}: from 0 to {vocabulary - 1}")
