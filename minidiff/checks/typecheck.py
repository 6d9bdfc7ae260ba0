"""Check a tape: infer every type again by the operations' rules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy

from minidiff.core.ranks import Scope
from minidiff.core.types import PYTHON_NUMBERS, ShapedArray, Var, operand_type, typeof
from minidiff.errors import VarianceError
from minidiff.ops.base import Differential
from minidiff.values.dtypes import is_scalar_constant


def check_tape(tape: Any, typed: bool, scope: Scope | None) -> None:
    """Implement `Tape.check`, in the `scope` of the enclosing body, if any."""
    known: set[Var] = set()
    for v in tape.inputs:
        if v in known:
            raise TypeError(f"the tape takes a value of type {v.type} twice: each input must be a different variable")
        known.add(v)
    for eqn in tape.equations:
        _check_equation(eqn, known, typed, scope)
        known.update(eqn.outputs)
    for a in tape.outputs:
        if isinstance(a, Var) and a not in known:
            raise TypeError(f"the tape returns a value of type {a.type} that it does not define")
        if a is not None and not isinstance(a, Var):  # None is a zero derivative
            _constant(a, "the tape returns")


def _check_equation(eqn: Any, known: set[Var], typed: bool, scope: Scope | None) -> None:
    """Check one equation; `known` are the variables defined before it."""
    p, params, inside = eqn.primitive, eqn.params, scope
    types, arrays = _operand_types(eqn, known)
    for v in eqn.outputs:
        if v in known:
            raise TypeError(f"{p}: its result of type {v.type} is defined twice")
    try:
        if p.impl is not None:
            check_call(p.impl, len(types), params)
        p.check_fits(types if len(arrays) == len(types) else [typeof(t) for t in types], params, scope)
        if (of_body := p.body_scope(params)) is not None:
            inside = of_body
            inside.typed = typed and inside.typed
    except Exception as error:
        raise _refusal(eqn, types, error) from None
    if p.is_higher_order:
        for body in eqn.bodies:
            check_tape(body, typed and (inside is None or inside.typed), inside)
    try:
        derived = p.typecheck(types, params)
    except Exception as error:
        raise _refusal(eqn, types, error) from None
    recorded = [v.type for v in eqn.outputs]
    if recorded != derived:
        raise TypeError(f"{p}: the tape says {_list_types(recorded)}, the rules say {_list_types(derived)}")
    for t, u in zip(recorded, derived):
        if u.sharding is not None and not (t.sharding is not None and t.sharding.is_like(u.sharding)):
            raise TypeError(f"{p}: the tape says that {t} has the sharding {t.sharding}, the rules say {u.sharding}")
    if typed:
        p.check_variance(arrays, params)


def _operand_types(eqn: Any, known: set[Var]) -> tuple[list[Any], list[ShapedArray]]:
    """Return the operands' types, as the rules take them (a Python number is its own type), and those of arrays."""
    types: list[Any] = []
    arrays: list[ShapedArray] = []
    for a in eqn.inputs:
        if isinstance(a, Var):
            if a not in known:
                raise TypeError(f"{eqn.primitive}: an operand of type {a.type} is used before it is defined")
        else:
            a = _constant(a, f"{eqn.primitive}: an operand is", isinstance(eqn.primitive, Differential))
        types.append(a.type if isinstance(a, Var) else operand_type(a))
        if isinstance(a, Var) or not (isinstance(a, ShapedArray) or is_scalar_constant(a)):
            arrays.append(types[-1])
    return types, arrays


def _constant(a: Any, subject: str, types_too: bool = False) -> Any:
    """Return a constant; TypeError unless it is a value or, if allowed, a type."""
    if isinstance(a, (list, tuple)):  # the tape of a derivative may hold array-likes
        return numpy.asarray(a)
    is_value = hasattr(a, "dtype") or type(a) in PYTHON_NUMBERS
    if not is_value or (isinstance(a, ShapedArray) and not types_too):
        raise TypeError(f"{subject} {a!r:.60}, which is neither an array nor a number")
    return a


def _refusal(eqn: Any, types: Sequence[Any], error: Exception) -> TypeError:
    """Return the error for operands or parameters that an operation's rules reject."""
    if isinstance(error, VarianceError) or (
        isinstance(error, TypeError) and str(error).startswith(f"{eqn.primitive}: ")
    ):
        return error
    operands = _list_types(types)
    if not isinstance(error, ValueError):  # a parameter may be of the wrong type
        operands += "".join(f", {k}={v!r}" for k, v in eqn.settings.items())
    return TypeError(f"{eqn.primitive}: the rules do not allow operands of types {operands}: {error}")


def _list_types(types: Sequence[Any]) -> str:
    return ", ".join(map(str, types))


def check_call(function: Callable, count: int, names: Iterable[str]) -> None:
    """Raise ValueError unless a function takes these operands and parameters."""
    if not _takes(function, count, frozenset(names)):
        operands = "1 operand" if count == 1 else f"{count} operands"
        raise ValueError(f"it does not take {operands} and the parameters ({', '.join(sorted(names))})")


@functools.cache
def _takes(function: Callable, count: int, names: frozenset[str]) -> bool:
    if isinstance(function, numpy.ufunc):  # one more operand would be `out`
        return function.nin == count and not names
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        return True
    return True
