"""The rows of the table, and helpers to write them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

import minidiff as md

random = np.random.default_rng(0)

#: Some rows are of newer NumPys, or of older ones: what they ask for came later, was wrong, or is gone.
NUMPY = tuple(int(number) for number in np.__version__.split(".")[:2])


def real(*shape: int) -> np.ndarray:
    return random.standard_normal(shape)


def positive(*shape: int) -> np.ndarray:
    return random.uniform(0.5, 2.0, shape)


def distinct(*shape: int) -> np.ndarray:
    """Numbers so far apart that a central difference sees no tie."""
    return 0.3 * (random.permutation(int(np.prod(shape))).reshape(shape) + 0.5)


def complex_(*shape: int) -> np.ndarray:
    """Complex numbers, away from zero and from the negative real axis, where many functions have their cut."""
    return random.uniform(0.5, 1.5, shape) + 1j * random.uniform(0.3, 1.0, shape)


class Row(NamedTuple):
    function: Any  # the NumPy function that the row is about, or the name of a group of indexing forms or operators
    f: Callable  # takes `args` and nothing else
    args: tuple  # arrays and numbers; derivatives are taken in those that are floating-point or complex
    note: str

    @property
    def name(self) -> str:
        return self.function if isinstance(self.function, str) else self.function.__name__

    @property
    def key(self) -> str:
        return f"{self.name}({self.note})"

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(i for i, x in enumerate(self.args) if np.asarray(x).dtype.kind in "fc")

    def closed(self) -> tuple[Callable, list]:
        """The row as a function of its differentiable arguments alone, and those."""

        def f(*active):
            full = list(self.args)
            for i, x in zip(self.active, active):
                full[i] = x
            return self.f(*full)

        return f, [self.args[i] for i in self.active]


def row(function: Any, *args: Any, f: Callable | None = None, **options: Any) -> Row:
    """`function(*args, **options)`, or `f` in its place where the call has another form."""
    note = ", ".join([*(str(md.typeof(x)) for x in args), *(f"{k}={v!r}" for k, v in options.items())])
    return Row(function, functools.partial(f or function, **options), args, note)


def over(**values: Any) -> list[dict]:
    """Options with all combinations of these values."""
    return [dict(zip(values, combination)) for combination in itertools.product(*values.values())]


def product(
    functions: Iterable, arguments: Iterable, options: Iterable[dict] = ({},), f: Callable | None = None
) -> list[Row]:
    """Rows of all functions with all arguments, which are arrays or tuples of several, and all options."""
    return [
        row(function, *(args if isinstance(args, tuple) else (args,)), f=f, **o)
        for function, args, o in itertools.product(functions, arguments, options)
    ]


def form(group: str, note: str, f: Callable, *args: Any) -> Row:
    """A form of writing that no single NumPy function stands for."""
    return Row(group, f, args, note)


def sequence(function: Callable, *args: Any, **options: Any) -> Row:
    """A function that takes its arrays as one sequence."""
    return row(function, *args, f=lambda *xs, **kw: function(xs, **kw), **options)
