"""The errors of traced programs: each names the values and their types, and says what to write instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from minidiff.core.states import ALL_INVARIANT, agreed, unreduced_operands
from minidiff.core.types import ShapedArray, plain_operand, typeof
from minidiff.inputs.dtypes import is_scalar_constant


class TracerError(TypeError):
    """A traced value was used where a concrete one is required."""


class LeakedTracerError(TracerError):
    """A traced value was used after the transformation that created it ended."""


class VarianceError(TypeError):
    """The state of a value along a mesh axis is not one that it may have there."""


class VarianceWarning(UserWarning):
    """The types along a mesh axis agree, but what they say is probably not what was meant."""


class UnboundAxisError(NameError):
    """A collective named an axis that no enclosing `shard_map` or `vmap` has."""


# ---------------------------------------------------------------- tracers out of their transformation


def leak_message(x: Any) -> str:
    return (
        f"a traced value of type {x.type} was used outside the transformation it belongs to ({_origin(x)}). "
        "It was stored somewhere (a global, a list, an attribute) while that transformation ran; "
        "return it from the function instead."
    )


def _origin(x: Any) -> str:
    """The origin of a value: `grad of loss`, `grad of loss, in shard_map of body`."""
    interpreter = x.interpreter
    scope = x.interpreter.scope
    while interpreter is not None and interpreter.origin is None:
        interpreter = interpreter.outer
    known = [" of ".join(interpreter.origin)] if interpreter is not None else []
    if scope is not None and scope.function:
        known.append(f"shard_map of {scope.function}")
    return ", in ".join(known) or x.interpreter.name


# ---------------------------------------------------------------- operands that do not fit


class MisfitError(ValueError):
    """NumPy rejected the operands of an operation: its error, with their types."""

    def __init__(self, primitive: Any, args: Sequence[Any], reason: str = "they do not fit"):
        super().__init__(f"{primitive.name} of {' and '.join(map(shown, args))}: {reason}")


def shown(x: Any) -> str:
    """An operand in error messages: its type, or else its class and value."""
    return str(typeof(x)) if hasattr(x, "dtype") or is_scalar_constant(x) else f"{type(x).__name__} {x!r:.40}"


def is_misfit(primitive: Any, args: Sequence[Any], error: Exception) -> bool:
    """Whether NumPy's error names neither the operation nor the operands' types.

    An error that the user raises in the body of an operation, or in a callback, is left unchanged, with its cause and
    context; these have no shape rule. Raise TypeError where a non-array operand is the reason.
    """
    if primitive.shape_rule is None:
        return False
    if not isinstance(error, ValueError):
        for x in args:
            plain_operand(x)
    return type(error) is ValueError and not str(error).startswith(primitive.name)


# ---------------------------------------------------------------- operands that disagree in variance

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def check_operands(name: str, types: Sequence[ShapedArray | None]) -> None:
    """Raise VarianceError if the operands of operation `name` disagree along a mesh axis.

    A type of None is that of a constant, which agrees with anything.
    """
    given = tuple(t.states for t in types if t is not None)
    if len(set(given)) > 1 and agreed(given) != [*given]:
        numbers = [f"the {_ORDINALS[i]}" if i < len(_ORDINALS) else f"number {i + 1}" for i in range(len(types))]
        labelled = {label: t for label, t in zip(numbers, types) if t is not None}
        raise disagreement(f"{name}: operands {_listed([*labelled.values()])}", [*labelled], [*labelled.values()])


def diverges(what: str, t: ShapedArray, axes: Sequence[str], because: str = "") -> VarianceError:
    """The error that ranks would branch differently on a value of type `t`, which varies along `axes`."""
    shown = ", ".join(map(repr, axes))
    return VarianceError(
        f"{what}, but {t} varies along {shown}{because}: the ranks would go different ways, and wait for each other "
        f"for ever. Make them agree first (psum, pmax or pmin over {shown}), or choose element by element with np.where"
    )


def disagreement(what: str, labels: Sequence[str], types: Sequence[ShapedArray]) -> VarianceError:
    """The error that values of these `labels` and `types` disagree along a mesh axis."""
    missing: dict[str, list[str]] = {}
    for label, t, states in zip(labels, types, agreed(tuple(t.states for t in types))):
        casts = {"pbroadcast": states.varying - t.variance, "reduced": states.reduced - t.reduced}
        for name, axes in casts.items():
            if axes:
                missing.setdefault(f"{name}(x, {show_axes(axes)})", []).append(label)
    advice = " and ".join(f"{cast} for {_listed(names)}" for cast, names in missing.items())
    return VarianceError(f"{what} disagree in variance: write {advice}")


def check_unreduced(primitive: Any, types: Sequence[Any]) -> None:
    """Raise VarianceError if an operation takes parts of a sum that it does not map to parts of its result.

    Operands are given by their types, or as Python numbers; zeros are parts of a sum that is zero.
    """
    zeros = {i for i, t in enumerate(types) if not isinstance(t, ShapedArray) and t == 0}
    states = [t.states if isinstance(t, ShapedArray) else ALL_INVARIANT for t in types]
    for axis, parts in unreduced_operands(states).items():
        linear = any(primitive.is_linear_in(positions, len(types)) for positions in (parts, parts | zeros))
        varies = any(axis in other.varying for other in states)
        if linear and not varies:
            continue
        outside = any(isinstance(t, ShapedArray) and t.sharding is not None for t in types)
        advice = "write spmd.reshard(x, P()) first" if outside else f"write psum(x, {axis!r}) first, or psum_scatter"
        if not outside and parts != {*range(len(types))} and primitive.is_linear_in({*range(len(types))}, len(types)):
            part = "x" if varies else "np.zeros(...)"
            advice += f"; or let all operands be parts of sums, with unreduced({part}, {axis!r})"
        raise VarianceError(
            f"{primitive.name} of {_listed(types)}: the ranks along {axis!r} hold parts of a sum; {advice}"
        )


def _listed(items: Sequence[object]) -> str:
    """A list in a sentence: `a`, `a and b`, `a, b and c`."""
    *rest, last = map(str, items)
    return f"{', '.join(rest)} and {last}" if rest else last


def show_axes(axes: Collection[str]) -> str:
    """Mesh axes, written as the argument of a collective: `'i'`, or `('i', 'j')`."""
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else tuple(sorted(axes))
    return repr(axes[0] if len(axes) == 1 else axes)
