"""Errors for operands that disagree in variance, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from minidiff.types import INVARIANT, ShapedArray, VarianceError

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def check_operands(name: str, types: Sequence[ShapedArray | None]) -> None:
    """Raise VarianceError if the operands of operation `name` disagree in variance.

    A type of None stands for a constant, which agrees with anything.
    """
    if len({t.variance for t in types if t is not None}) > 1:
        numbers = [f"the {_ORDINALS[i]}" if i < len(_ORDINALS) else f"number {i + 1}" for i in range(len(types))]
        labelled = {label: t for label, t in zip(numbers, types) if t is not None}
        raise disagreement(f"{name}: operands {_listed([*labelled.values()])}", [*labelled], [*labelled.values()])


def disagreement(what: str, labels: Sequence[str], types: Sequence[ShapedArray]) -> VarianceError:
    """The error that values of these `labels` and `types` disagree in variance."""
    union = INVARIANT.union(*[t.variance for t in types])
    fewer: dict[str, list[str]] = {}
    for label, t in zip(labels, types):
        if t.variance != union:
            fewer.setdefault(show_axes(union - t.variance), []).append(label)
    advice = " and ".join(f"pbroadcast(x, {axes}) for {_listed(names)}" for axes, names in fewer.items())
    return VarianceError(f"{what} disagree in variance: write {advice}")


def _listed(items: Sequence[object]) -> str:
    """A list in a sentence: `a`, `a and b`, `a, b and c`."""
    *rest, last = map(str, items)
    return f"{', '.join(rest)} and {last}" if rest else last


def show_axes(axes: Sequence[str]) -> str:
    """Mesh axes, written as the argument of a collective: `'i'`, or `('i', 'j')`."""
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else tuple(sorted(axes))
    return repr(axes[0] if len(axes) == 1 else axes)
