"""Compare the parameters of `minidiff.optim` with optax's: `python -m tests.benchmarks.optax_signatures`.

Each line is a parameter: its default here, its default in the installed optax, and whether a call means the same in
both. Parameters that optax alone has are not listed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

from minidiff import optim

#: A function, its parameter, the defaults here and there, and what differs.
Row = tuple[str, str, str, str, str]
LINE = "{:32}{:28}{:>12}{:>12}  {}"


def rows(optax: ModuleType) -> Iterator[Row]:
    """The parameters of all public functions, beside those of a module with optax's names."""
    for name in sorted(optim.__all__):
        if not hasattr(optax, name):
            yield name, "", "", "", "optax has no such function"
            continue
        there = dict(inspect.signature(getattr(optax, name)).parameters)
        for place, one in enumerate(inspect.signature(getattr(optim, name)).parameters.values()):
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                two = there.get(one.name)
                yield name, one.name, _default(one), _default(two), _difference(one, two, [*there], place)


def _difference(one: inspect.Parameter, two: inspect.Parameter | None, there: list[str], place: int) -> str:
    if two is None:
        return "optax has no such parameter"
    if one.default != two.default and one.default is not one.empty:
        return "another default"
    moved = one.kind is not one.KEYWORD_ONLY and there.index(one.name) != place
    return "another position" if moved else ""


def _default(parameter: inspect.Parameter | None) -> str:
    if parameter is None:
        return ""
    return "required" if parameter.default is parameter.empty else repr(parameter.default)


def main() -> None:
    try:
        import optax
    except ImportError:
        print("optax is not installed: pip install optax")
        return
    print(LINE.format("function", "parameter", "minidiff", f"optax {optax.__version__}", ""))
    for row in rows(optax):
        print(LINE.format(*row).rstrip())


if __name__ == "__main__":
    main()
