"""Text for readers: multi-line strings that show as printed, and names that are similar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class PrintedText(str):
    """A multi-line string whose `repr` is the text itself, for notebook output.

    >>> PrintedText('def f(x):\\n    return x')
    def f(x):
        return x
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def name_of(f: Any) -> str:
    """The name of a function in error messages."""
    return getattr(f, "__name__", "f")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Suggest a similar known name in an error message, if there is one.

    >>> did_you_mean('batches', ('batch', 'model'))
    ". Did you mean 'batch'?"
    """
    import difflib  # only errors need it

    known = tuple(known)
    found = difflib.get_close_matches(str(name).lower(), {name.lower(): name for name in known}, 1)
    return "".join(f". Did you mean {name!r}?" for name in known if name.lower() in found)
