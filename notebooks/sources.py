"""Source code as notebooks show it: without docstrings, which say again what the text of a lecture says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

from IPython.display import Code

from collectives import reference


def source_code(*definitions: Callable) -> Code:
    """Show the source of functions and classes, without docstrings."""
    sources = [re.sub(r'\n *""".*?"""\n+', "\n", inspect.getsource(x), flags=re.S) for x in definitions]
    return Code("\n\n".join(sources).rstrip(), language="python")


def meaning(name: str) -> Code:
    """Show what a collective computes from the list of all ranks' blocks: its function in `collectives.reference`."""
    return source_code(reference.REFERENCES[name])
