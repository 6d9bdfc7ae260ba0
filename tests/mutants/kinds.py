"""The kinds of mutants, and the places of a module where each can be.

A place is named by its function, the code before and after, and which occurrence of that change it is in the function,
so that edits elsewhere in the file do not move it.
"""

import ast
import collections
from collections.abc import Iterator
from typing import NamedTuple

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
COMPARISONS = dict([*PAIRS, *(pair[::-1] for pair in PAIRS)])
REDUCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
TRANSPOSES = {"swapaxes", "transpose", "moveaxis", "matrix_transpose", "reversed"}
#: Operands of + and - that are no numbers, which a mutant of them would only crash on.
COLLECTIONS = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.Set, ast.SetComp, ast.Dict)
#: What shows a value is not tested to the letter, and types do nothing.
SHOWN = {"__repr__", "__str__", "_repr_html_", "_repr_mimebundle_", "_repr_svg_"}
SKIPPED_FIELDS = {"annotation", "returns", "msg", "decorator_list"}
LONGEST = 115


class Change(NamedTuple):
    """A change of the code: of the kind, in the function, `before → after`; the occurrence counts from 0."""

    function: str
    kind: str
    occurrence: str
    change: str


class Place(NamedTuple):
    """The piece of code that changes, as lines and columns, and the lines of what encloses it, innermost first."""

    start: tuple[int, int]
    end: tuple[int, int]
    enclosing: list[range]

    def replaced(self, source: str, text: str) -> str:
        """Return the module's code with another piece."""
        lines = [line.encode() for line in source.splitlines(keepends=True)]  # columns are those of bytes
        (first, column), (last, end_column) = self.start, self.end
        text = text if text.isidentifier() else f"({text})"
        middle = lines[first - 1][:column] + text.encode() + lines[last - 1][end_column:]
        return b"".join([*lines[: first - 1], middle, *lines[last:]]).decode()


def places(source: str) -> dict[Change, Place]:
    """Return the changes that a module's code can have."""
    seen: collections.Counter = collections.Counter()
    out = {}
    for node, function, enclosing in _walk(ast.parse(source), (), ()):
        for kind, after in _variants(node):
            piece = node.test if isinstance(node, ast.If) else node
            change = f"{ast.unparse(piece)} → {after}"
            if len(change) <= LONGEST and "\n" not in change:
                start, end = (piece.lineno, piece.col_offset), (piece.end_lineno, piece.end_col_offset)
                number = seen[function, kind, change]
                seen[function, kind, change] += 1
                lines = [range(n.lineno, n.end_lineno + 1) for n in (piece, *enclosing)]
                out[Change(function, kind, str(number), change)] = Place(start, end, lines)
    return out


def _walk(node, names, enclosing) -> Iterator[tuple]:
    """Yield nodes with the qualified name of their function, and the statements that enclose them, innermost first."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        names = (*names, node.name)
    elif isinstance(node, ast.Assign) and not names:
        names = (ast.unparse(node.targets[0]),)
    if isinstance(node, ast.stmt):
        enclosing = (node, *enclosing)
    yield node, ".".join(names) or "<module>", enclosing
    is_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    is_message = isinstance(node, (ast.Raise, ast.JoinedStr)) or (names and names[-1] in SHOWN)
    if not is_types and not is_message:
        fields = [value for field, value in ast.iter_fields(node) if field not in SKIPPED_FIELDS]
        for child in (c for value in fields for c in (value if isinstance(value, list) else [value])):
            if isinstance(child, ast.AST):
                yield from _walk(child, names, enclosing)


def _variants(node) -> Iterator[tuple[str, str]]:
    """Yield the mutants of a node, each a kind and the code that takes the node's place."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OPERATORS and not _is_collection(left, right):
            yield "arithmetic", ast.unparse(ast.BinOp(left, OPERATORS[type(op)](), right))
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield "sign", ast.unparse(operand)
        case ast.UnaryOp(ast.Not(), operand):
            yield "logic", ast.unparse(operand)
        case ast.Compare(left, [op], [right]):
            yield "comparison", ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))
        case ast.BoolOp(op, values):
            yield "logic", ast.unparse(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
        case ast.IfExp(test, body, orelse):
            yield "branch", ast.unparse(ast.IfExp(test, orelse, body))
        case ast.If(test, [first, *_]) if not isinstance(first, ast.Raise):
            yield "branch", f"not ({ast.unparse(test)})"
        case ast.Raise():
            yield "check", "pass"
        case ast.Expr(ast.Call(func)) if "super()" not in ast.unparse(func):
            yield "call", "pass"
        case ast.Attribute(value, "T"):
            yield "transpose", ast.unparse(value)
        case ast.Call():
            yield from _variants_of_call(node)
    yield from (("constant", text) for text in _other_constants(node))


def _variants_of_call(node):
    """Yield a call's mutants: without a cast or a transpose, and with another reduction."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    is_method = isinstance(node.func, ast.Attribute) and not ast.unparse(node.func.value).endswith(("np", "numpy"))
    operand = ast.unparse(node.func.value if is_method else next(iter(node.args), node.func))
    if name in TRANSPOSES and operand not in ("self", "hooks"):
        yield "transpose", operand
    if name == "astype":
        yield "cast", operand
    if name in ("asarray", "array") and (len(node.args) == 2 or any(k.arg == "dtype" for k in node.keywords)):
        others = [k for k in node.keywords if k.arg != "dtype"]
        yield "cast", ast.unparse(ast.Call(node.func, node.args[:1], others))
    if name in REDUCTIONS:
        yield "reduction", ast.unparse(node).replace(f"{name}(", f"{REDUCTIONS[name]}(", 1)


def _is_collection(*operands):
    return any(isinstance(x, COLLECTIONS) or isinstance(getattr(x, "value", 0), str) for x in operands)


def _other_constants(node):
    """Yield a node's code with one index, axis or argument off by one."""
    match node:
        case ast.Subscript(_, index):
            numbers = _numbers(index)
        case ast.Call(_, args, keywords):
            numbers = [n for arg in (*args, *(k.value for k in keywords)) for n in _numbers(arg)]
        case ast.BinOp(_, ast.Add() | ast.Sub(), right):
            numbers = _numbers(right)
        case _:
            numbers = []
    for number in numbers:
        value, number.value = number.value, number.value + (-1 if number.value in (1, 2) else 1)
        text = ast.unparse(node)
        number.value = value
        yield text


def _numbers(node):
    """Return the integers that are an index, an argument, or elements of one."""
    if isinstance(node, ast.Constant):
        return [node] if type(node.value) is int else []
    parts = ast.iter_child_nodes(node) if isinstance(node, (ast.UnaryOp, ast.Slice, ast.Tuple)) else ()
    return [n for part in parts for n in _numbers(part)]
