"""Function transformations as decorators, and advice for unknown keywords.

A transformation is called as `grad(f, argnums=1)`, or used as a decorator, with or without options:

>>> @make_decorator
... def times(f, factor=2):
...     return lambda x: factor * f(x)
>>> @times(factor=10)
... def square(x):
...     "The square of x."
...     return x * x
>>> square(3), square.__name__, square.__doc__
(90, 'square', 'The square of x.')
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from minidiff.errors import did_you_mean
from minidiff.errors.other_libraries import suggestions
from minidiff.errors.tracebacks import hide_own_frames, hide_own_frames_of_lambda

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


def check_keywords(caller: str, keywords: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError if a call of `caller` has unknown keywords."""
    known = tuple(known)
    unknown = [name for name in keywords if name not in known]
    if unknown:
        advice = suggestions("keywords").get(caller, {})
        problems = [
            f"{caller} takes no {name}=: {advice[name]}"
            if name in advice
            else f"{caller} takes no {name}=, but {', '.join(f'{k}=' for k in known)}{did_you_mean(name, known)}"
            for name in unknown
        ]
        raise TypeError("; ".join(problems))


def _check_call(function: Callable, keywords: Iterable[str]) -> None:
    code = function.__code__
    if not code.co_flags & 0x08:  # a function with **settings checks them itself
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        check_keywords(function.__name__, keywords, names)


def explain_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that the error for an unknown keyword has advice."""

    @hide_own_frames
    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if options:
            _check_call(function, options)
        return function(*args, **options)

    return call


def copy_metadata(f: Callable, transformed: Any) -> Any:
    """Give `transformed` the name, the docstring and the signature of `f`."""
    try:  # half the time of functools.update_wrapper: a program may call `grad(f)(x)` in each step
        transformed.__name__, transformed.__qualname__ = f.__name__, f.__qualname__
        transformed.__doc__, transformed.__module__ = f.__doc__, f.__module__
        transformed.__wrapped__ = f
    except AttributeError:  # a callable that is not a function
        functools.update_wrapper(transformed, f, updated=())
    return transformed


class Transformation(Protocol[P, R_co]):
    """The type of a transformation, called with a function or with options only."""

    @property
    def __wrapped__(self) -> Callable[..., R_co]: ...

    @overload
    def __call__(self, f: Callable, /, *args: P.args, **options: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, /, **options: Any) -> Callable[[Callable], R_co]: ...


def make_decorator(function: Callable[Concatenate[Callable, P], R]) -> Transformation[P, R]:
    """Make `function(f, **options)` a decorator, with or without options.

    Its result has the name, the docstring and the signature of `f`, and hides the library's frames of an error. The
    error for an unknown keyword says what to write instead.
    """

    @hide_own_frames
    @functools.wraps(function)
    def transform(*args: Any, **options: Any) -> Any:
        if options:
            _check_call(function, options)
        if not args and "f" not in options:
            return functools.partial(transform, **options)
        result: Any = function(*args, **options)
        result = hide_own_frames_of_lambda(result) if type(result) is FunctionType else result
        return copy_metadata(args[0] if args else options["f"], result)

    return transform
