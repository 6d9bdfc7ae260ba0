"""The two ends of a language model: the look-up of tokens, and the cross entropy of integer labels.

With `axis`, the vocabulary is split along that axis of the mesh: rank r has rows r*V/p to (r+1)*V/p of the embedding,
and the logits of these tokens. A rank looks up its own tokens, and gets zeros for the others. Neither rows nor logits
are gathered. With p ranks, N tokens, F features and a vocabulary of V, forward:

===================  ==========  =====  ==============  ==================================
function             collective  count  elements        instead of a gather of
===================  ==========  =====  ==============  ==================================
embed                psum        1      N*F             V/p*F (the table)
label_cross_entropy  pmax, psum  1, 2   N each          N*V/p (the logits)
===================  ==========  =====  ==============  ==================================

The backward pass communicates nothing: the transpose of a `psum` is a `pbroadcast`, and the maximum is a constant.

A token or label out of range raises IndexError if all ranks know its value. On tapes, and where ranks along another
axis have different numbers, its row and its cross entropy are NaN.

Source: Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism",
section 3.
"""

from __future__ import annotations

from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import axis_index, axis_size, psum
from minidiff.diagnostics.errors import TracerError, VarianceError
from spmd.parallel.network import shifted_logits


def embed(table: Any, tokens: Any, axis: str | None = None) -> Any:
    """The tokens' rows of the table: [vocabulary / ranks, features], [...] -> [..., features].

    Tokens are the same on all ranks along `axis`. Raises IndexError for a token that is not in the vocabulary,
    TypeError if they are not integers.

    >>> embed(np.arange(6.0).reshape(3, 2), np.array([2, 0]))
    array([[4., 5.],
           [0., 1.]])
    """
    _check("token", tokens, len(table), axis)
    row, here, elsewhere = _local(tokens, len(table), table.dtype, axis)
    rows = np.where(here[..., None], table[row], elsewhere[..., None])
    return rows if axis is None else psum(rows, axis)


def label_cross_entropy(logits: Any, labels: Any, axis: str | None = None) -> Any:
    """-log of the label's probability: [..., vocabulary / ranks], [...] -> [...].

    Labels are the same on all ranks along `axis`. Raises IndexError for a label that is not in the vocabulary,
    TypeError if they are not integers, ValueError if there is not one for each row of logits.

    >>> label_cross_entropy(np.zeros((2, 4)), np.array([3, 1])) / np.log(2)
    array([2., 2.])
    """
    (*shape, columns) = logits.shape
    _check("label", labels, columns, axis)
    if np.shape(labels) != tuple(shape):
        raise ValueError(f"labels of logits {logits.shape} have the shape {tuple(shape)}, got {np.shape(labels)}")
    logits, log_total = shifted_logits(md.precision.widen(logits), axis)
    column, here, elsewhere = _local(labels, columns, logits.dtype, axis)
    chosen = np.where(here, np.take_along_axis(logits, column[..., None], axis=-1)[..., 0], elsewhere)
    return log_total - (chosen if axis is None else psum(chosen, axis))


def _vocabulary(rows: int, axis: str | None) -> int:
    return rows if axis is None else rows * axis_size(axis)


def _local(numbers: Any, rows: int, dtype: Any, axis: str | None) -> tuple[Any, Any, Any]:
    """The numbers counted from this rank's first; whether it has them; what to add if not: -0.0, NaN if no rank has."""
    local = numbers if axis is None else numbers - axis_index(axis) * rows
    here, known = (local >= 0) & (local < rows), (numbers >= 0) & (numbers < _vocabulary(rows, axis))
    return np.where(here, local, 0), here, np.where(known, -0.0, np.nan).astype(dtype)


def _check(what: str, numbers: Any, rows: int, axis: str | None) -> None:
    """Raise IndexError for a number out of range, if there is a value to check; TypeError if it is not an integer."""
    vocabulary = _vocabulary(rows, axis)
    if md.typeof(numbers).dtype.kind not in "iu":
        raise TypeError(f"{what}s are integers from 0 to {vocabulary - 1}, got {md.typeof(numbers)}")
    try:
        extremes = int(np.min(numbers)), int(np.max(numbers))
    except (TracerError, VarianceError):
        return
    for number in extremes:
        if not 0 <= number < vocabulary:
            raise IndexError(f"{what} {number} is not in the vocabulary of {vocabulary}: from 0 to {vocabulary - 1}")
