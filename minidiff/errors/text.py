"""Text for readers: multi-line strings that show as printed, and names that are similar."""

from __future__ import annotations

import keyword
import unicodedata
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
    """Return the name of a function in error messages."""
    return getattr(f, "__name__", "f")


def is_identifier(text: str) -> bool:
    """Return whether a program may assign a text as a name, and Python reads it as no other name.

    >>> [is_identifier(name) for name in ('loss', 'class', '__file__', 'a=1', 'ﬁt')]  # Python reads the last as 'fit'
    [True, False, False, False, False]
    """
    reserved = keyword.iskeyword(text) or (text.startswith("__") and text.endswith("__"))
    return text.isidentifier() and not reserved and unicodedata.normalize("NFKC", text) == text


def printable(text: str) -> str:
    """Escape what does not print, such as line breaks, so that a text fits into a comment.

    >>> printable('one\\ntwo')
    'one\\\\ntwo'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def did_you_mean(name: Any, known: Iterable[str], prefix: str = "") -> str:
    """Suggest a similar known name, after a prefix of all names, in an error message, if there is one.

    >>> did_you_mean('batches', ('batch', 'model'))
    ". Did you mean 'batch'?"
    """
    import difflib  # only errors need it

    known = tuple(known)
    matches = difflib.get_close_matches(str(name).lower(), {name.lower(): name for name in known}, 1)
    return "".join(f". Did you mean {prefix + name!r}?" for name in known if name.lower() in matches)
