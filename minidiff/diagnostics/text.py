"""Multi-line text that notebooks and sessions show as printed."""

from __future__ import annotations


class PrintedText(str):
    """A multi-line string whose `repr` is the text itself, for notebook output.

    >>> PrintedText('def f(x):\\n    return x')
    def f(x):
        return x
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
