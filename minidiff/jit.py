"""jit: a function staged to a tape, made cheaper (`optimize`), written out as NumPy source, and compiled (`source`).

This is differentiation's other implementation, source transformation, for the course to look at: `jit(grad(f))` is a
Python program that computes the gradient, and `jit(grad(f)).source(*args)` shows it.

>>> import numpy as np
>>> from minidiff import grad
>>> g = jit(grad(lambda x, y: np.log(x) + x * y - np.sin(y), argnums=(0, 1)))
>>> print(g.source(2.0, 5.0))
def gradient(a, b):  # f64[], f64[]
    c = cos(b)  # f64[]
    d = a - c  # f64[]
    e = 1 / a  # f64[]
    f = b + e  # f64[]
    return f, d
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from minidiff import tree
from minidiff.core import EVALUATE, Tracer, Value, are_weak, current_interpreter, current_scope, typeof
from minidiff.forward import as_value
from minidiff.staging import stage_flat
from minidiff.text import Text

if TYPE_CHECKING:
    from minidiff.source import Program

# ---------------------------------------------------------------- what users call

#: Python's numbers as NumPy's, where a program that was compiled for these is called with those.
_SCALARS = {float: numpy.float64, int: numpy.int64, bool: numpy.bool_, complex: numpy.complex128}
_SCALARS |= {t: t for t in (numpy.float64, numpy.float32, numpy.int64, numpy.bool_, numpy.complex128)}
_IS_LEAF = {*_SCALARS, numpy.ndarray}


#: What a recorded function depends on besides its arguments and where it is called. Layers above add to it.
DEPENDS_ON: list[Callable[[], Any]] = []


def _compiled(f: Callable, args: Any, name: str, options: dict) -> Program:
    from minidiff.source import Program  # what compiles is imported when there is something to compile

    return Program(f, args, name, options)


class Inlined:
    """A function recorded for arguments of one type, to be applied under a transformation, operation by operation."""

    def __init__(self, f: Callable, args: Any, name: str):
        scope = current_scope()
        before = scope and scope.transposed
        self.tape, _, self.out_structure = stage_flat(f, args, f"jit of {name}")
        self.transposes = scope is not None and scope.transposed != before

    def __call__(self, values: list[Value]) -> Any:
        if self.transposes:
            current_scope().transposes()
        return tree.unflatten(self.out_structure, self.tape(*values))

    @property
    def is_closed(self) -> bool:
        """Whether it holds no traced values, and can be used again."""
        return not any(isinstance(c, Tracer) for c in self.tape.constants)


def key_of(x: Any) -> Any:
    """What of a leaf a program depends on: its type, and how it is distributed."""
    if type(x) is numpy.ndarray:
        return x.shape, x.dtype
    t = typeof(x)
    return t, t.layout


class jit:
    """`f`, compiled when it is called with arguments of new types: the same function, at NumPy's speed.

    The function is run once for each structure and types of arguments, on names in the place of arrays, and what it
    does is recorded, simplified and written out as Python source (`.source(*args)`). Python's own side effects happen
    then only. Arrays that it closes over are constants. Python numbers promote as in NumPy: there is one program for
    `2.0`, and another for `np.float64(2.0)`. Arguments named by `static_argnums` are not arrays but settings: they are
    hashable, the program is compiled for their values, and Python may branch on them. A Python branch on any other
    value raises TracerError. On a method, `self` is the first argument.

    Rewrites named in `without` (those of `minidiff.optimize.REWRITES`) are not made; `settings` are what rewrites can
    be told (`minidiff.optimize.SETTINGS`), such as `bucket_bytes` for those of all-reduces. An unknown name is an error
    when the program is compiled.

    It works on derivatives (`jit(grad(f))`), and can be differentiated, mapped and staged itself.

    >>> import numpy as np
    >>> power = jit(lambda x, n: x ** n, static_argnums=1)
    >>> power(np.array([1.0, 2.0]), 3)
    array([1., 8.])
    """

    def __init__(
        self, f: Callable, static_argnums: int | Sequence[int] = (), *, without: Sequence[str] = (), **settings: Any
    ):
        functools.update_wrapper(self, f)
        self.f = f
        self.name = getattr(f, "__name__", type(f).__name__)
        self.static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        self.options = {"without": without, **settings}
        self.programs: dict[Any, Program] = {}
        self.inlined: dict[Any, Inlined] = {}
        #: Programs of plain numbers by their types, and of arrays too by shapes and dtypes: the short way.
        self.numbers: dict[Any, Callable] = {}
        self.arrays: dict[Any, Callable] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and current_interpreter() is EVALUATE:
            run = self.numbers.get((*map(type, args),))
            if run is None and self.arrays:
                key = [(x.shape, x.dtype) if type(x) is numpy.ndarray else type(x) for x in args]
                run = self.arrays.get((*key,))
            if run is not None:
                try:
                    return run(*args)
                except OverflowError:  # a Python integer that needs another type than those before
                    pass
        return self._call(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _call(self, args: tuple, kwargs: dict) -> Any:
        f, dynamic, settings = self._split(args, kwargs)
        leaves, structure = tree.flatten(dynamic)
        values = [self._value(x) for x in leaves]
        key = structure, settings, (*map(key_of, values),), (*are_weak(leaves),)
        if current_interpreter() is not EVALUATE or any(
            isinstance(x, Tracer) and x.interpreter is not EVALUATE for x in values
        ):
            return self._inline(f, dynamic, key)(values)
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = _compiled(f, dynamic, self.name, self.options)
        if not kwargs and not self.static and all(type(x) in _IS_LEAF for x in args):
            self._remember(args, values, program.function)
        return program.function(*values)

    def _value(self, x: Any) -> Value:
        try:
            return as_value(x)
        except TypeError as error:
            raise TypeError(
                f"jit: {self.name} was called with what is no array: {error}; an argument that is a setting of the "
                "program is named by static_argnums"
            ) from None

    def _inline(self, f: Callable, example: Any, key: Any) -> Inlined:
        """Within another transformation: the same program, its operations applied one by one."""
        scope = current_scope()
        settings = tuple(setting() for setting in DEPENDS_ON)
        key = key, scope and (tuple(scope.axes.items()), scope.typed, scope.checks), settings
        found = self.inlined.get(key)
        if found is None:
            found = Inlined(f, example, self.name)
            if found.is_closed:
                self.inlined[key] = found
        return found

    def _remember(self, args: tuple, values: list[Value], run: Callable) -> None:
        """The next call with arguments like these finds its program at once."""
        arrays = [type(x) is numpy.ndarray for x in args]
        converters = [None if type(x) in (numpy.ndarray, type(v)) else _SCALARS[type(x)] for x, v in zip(args, values)]
        if any(c is not None and c is not type(v) for c, v in zip(converters, values)):
            return  # an integer that is too large for the type of others
        if any(yes and not x.dtype.isnative for yes, x in zip(arrays, args)):
            return
        if any(arrays):
            key = tuple([(x.shape, x.dtype) if yes else type(x) for yes, x in zip(arrays, args)])
            self.arrays[key] = _converting(run, converters)
        elif len(self.numbers) < 64:
            self.numbers[tuple(map(type, args))] = _converting(run, converters)

    def _split(self, args: tuple, kwargs: dict) -> tuple[Callable, Any, Any]:
        """The function of what is no setting, those arguments, and the settings."""
        if not self.static:
            return lambda args, kwargs: self.f(*args, **kwargs), (args, kwargs), ()
        for n in self.static:
            if not -len(args) <= n < len(args):
                raise TypeError(
                    f"jit: static_argnums names argument {n} of {self.name}, which was called with {len(args)} "
                    "positional ones; settings are given by position"
                )
        static = {n % len(args) for n in self.static}
        settings = tuple((n, type(args[n]), args[n]) for n in sorted(static))
        fixed = {n: x for n, _, x in settings}
        try:
            hash(settings)
        except TypeError:
            raise TypeError(
                f"jit: {self.name} was called with a static argument that is not hashable: {fixed}; static arguments "
                "are settings (numbers, strings, tuples, functions); leave arrays out of static_argnums"
            ) from None

        def f(dynamic: tuple, kwargs: dict) -> Any:
            rest = iter(dynamic)
            return self.f(*[fixed[n] if n in fixed else next(rest) for n in range(len(args))], **kwargs)

        return f, (tuple(x for n, x in enumerate(args) if n not in static), kwargs), settings

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The Python source that runs for arguments of these types: a string, shown line by line."""
        return Text(self.program(*args, **kwargs).source.text)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """What was compiled for arguments of these types: its `tape`, and its `source`."""
        f, dynamic, settings = self._split(args, kwargs)
        leaves, structure = tree.flatten(dynamic)
        values = [self._value(x) for x in leaves]
        key = structure, settings, (*map(key_of, values),), (*are_weak(leaves),)
        found = self.programs.get(key)
        return found or _compiled(f, dynamic, self.name, self.options)


def _converting(run: Callable, converters: Sequence[Callable | None]) -> Callable:
    """A program, called with Python's numbers."""
    if not any(converters):
        return run
    if len(converters) == 1:
        (convert,) = converters
        return lambda x: run(convert(x))
    if len(converters) == 2 and all(converters):
        first, second = converters
        return lambda x, y: run(first(x), second(y))
    return lambda *xs: run(*[c(x) if c else x for c, x in zip(converters, xs)])
