"""Write the messages that are raised now into the pages of messages: `python -m tests.messages [PAGE ...]`."""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import pathlib
import re
import sys
import textwrap
import traceback

from tests.messages.names import names


def outcome(example: doctest.Example, page: dict) -> str:
    """Run an example of a page, and return what it prints or raises, as a doctest shows it."""
    out, name = io.StringIO(), f"<line {example.lineno}>"
    linecache.cache[name] = len(example.source), None, example.source.splitlines(True), name
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(example.source, name, "single"), page)
        except Exception as error:
            lines = traceback.format_exception_only(error)
            return f"Traceback (most recent call last):\n{''.join(lines)}"
    return out.getvalue()


def renewed(text: str) -> str:
    """Return a page's text with the results of its examples as they are now."""
    page, lines, end = names(), text.splitlines(keepends=True), 0
    written = []
    for example in doctest.DocTestParser().get_examples(text):
        result = outcome(example, page)
        if doctest.OutputChecker().check_output(example.want, result, doctest.ELLIPSIS):
            result = example.want  # it may have three dots
        else:  # which classes are trees depends on the modules that were imported
            result = re.sub(r"\(trees are made of [^)]*\)", "(trees are made of ...)", result)
        start = example.lineno + example.source.count("\n")
        written += [*lines[end:start], textwrap.indent(result, " " * example.indent)]
        end = start + example.want.count("\n")
    return "".join([*written, *lines[end:]])


def main(pages: list[str]) -> None:
    for path in map(pathlib.Path, pages) if pages else sorted(pathlib.Path(__file__).parent.glob("*.md")):
        path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
