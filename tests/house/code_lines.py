"""The lines of code of a file: no docstrings, comments or blank lines."""

import ast
import io
import tokenize


def code_lines(path):
    """Return the number of lines with code."""
    return len(lines_with_code(path))


def lines_with_code(path):
    """Return the numbers of the lines with code."""
    text = path.read_text()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in skipped]
    lines = {k for t in tokens for k in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return lines
