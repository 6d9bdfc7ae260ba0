"""Compare the parameters of `minidiff.optim` with optax's: `python -m tests.benchmarks.optax_signatures`.

Each line is a parameter: its default here, its default in the installed optax, and whether a call means the same in
both. Parameters that optax alone has are not listed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

from minidiff import optim

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Row(NamedTuple):
    """A parameter of a function: the defaults, and what differs."""

    function: str
    parameter: str
    ours: str
    optax: str
    difference: str

    def __str__(self) -> str:
        return f"{self.function:32}{self.parameter:28}{self.ours:>12}{self.optax:>12}  {self.difference}".rstrip()


def rows(optax: ModuleType) -> Iterator[Row]:
    """The parameters of all public functions, beside those of a module with optax's names."""
    for name in sorted(optim.__all__):
        theirs = getattr(optax, name, None)
        if theirs is None:
            yield Row(name, "", "", "", "optax has no such function")
        else:
            yield from _parameters(name, getattr(optim, name), theirs)


def _parameters(name: str, ours: Callable, theirs: Callable) -> Iterator[Row]:
    there = dict(inspect.signature(theirs).parameters)
    for place, (parameter, one) in enumerate(inspect.signature(ours).parameters.items()):
        if one.kind not in NAMED:
            continue
        two, difference = there.get(parameter), ""
        if two is None:
            difference = "optax has no such parameter"
        elif one.default != two.default and one.default is not one.empty:
            difference = "another default"
        elif one.kind is not one.KEYWORD_ONLY and [*there].index(parameter) != place:
            difference = "another position"
        yield Row(name, parameter, _default(one), "" if two is None else _default(two), difference)


def _default(parameter: inspect.Parameter) -> str:
    return "required" if parameter.default is parameter.empty else repr(parameter.default)


def main() -> None:
    try:
        import optax
    except ImportError:
        print("optax is not installed: pip install optax")
        return
    print(Row("function", "parameter", "minidiff", f"optax {optax.__version__}", ""))
    for row in rows(optax):
        print(row)


if __name__ == "__main__":
    main()
