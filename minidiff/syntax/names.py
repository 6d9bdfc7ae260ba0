"""Names of a function's source: those that statements bind, change and read, and those that are live between them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.ClassDef)
LOOPS = (ast.For, ast.While)

#: Methods that change a list or a dictionary: as statements, and where their result is used.
MUTATOR = re.compile("append|clear|extend|insert|pop|popitem|remove|reverse|setdefault|sort|update")
POP = re.compile("pop|popitem|setdefault")


class _Fill(ast.NodeTransformer):
    def __init__(self, part: ast.AST | None):
        self.part = part

    def visit_Name(self, x: ast.Name) -> Any:
        return self.part if x.id == "__part__" else x


def parse_at(text: str, node: ast.AST, part: ast.AST | None = None) -> list[Any]:
    """Parse statements, all of whose nodes are at the line of another node: tracebacks show that line.

    The name `__part__` in the text stands for `part`.
    """
    body, nodes = (tree := ast.parse(text)).body, list[Any](ast.walk(tree))
    for x in nodes:
        ast.copy_location(x, node)
        if hasattr(x, "lineno"):  # where a call of a method has several lines, Python 3.11 names the last one
            x.end_lineno, x.end_col_offset = x.lineno, x.col_offset
    return [_Fill(part).visit(s) for s in body]


def walk_scope(*trees: ast.AST) -> Iterator[ast.AST]:
    """Walk over nodes, those within nested functions, classes and comprehensions excepted."""
    for tree in trees:
        yield tree
        if not isinstance(tree, SCOPES):
            yield from walk_scope(*ast.iter_child_nodes(tree))


def bound_names(*trees: ast.AST) -> set[str]:
    """Return the names that statements assign, or bind in another way."""
    names: set[str] = set()
    for x in walk_scope(*trees):
        if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load):
            names.add(x.id)
        elif isinstance(x, ast.alias):
            names.add((x.asname or x.name).partition(".")[0])
        elif isinstance(x, (*FUNCTIONS[:2], ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and x.name:
            names.add(x.name)
    return names


def changed_object(x: Any) -> ast.expr | None:
    """Return the object that a node changes: `x[i] = y`, `x.a = y`, or a call of a method such as `x.append`."""
    if isinstance(x, (ast.Subscript, ast.Attribute)) and not isinstance(x.ctx, ast.Load):
        return x if isinstance(x, ast.Attribute) else x.value
    methods, call = (MUTATOR, x.value) if isinstance(x, ast.Expr) else (POP, x)
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and methods.fullmatch(call.func.attr):
        return call.func.value
    return None


def root_of(x: ast.AST | None) -> str:
    """Return the variable that an expression of attributes and items begins with, or an empty string."""
    while isinstance(x, (ast.Subscript, ast.Attribute)):
        x = x.value
    return x.id if isinstance(x, ast.Name) else ""


def changed_names(*trees: ast.AST) -> set[str]:
    """Return the names that statements bind, and those of objects that they change."""
    return bound_names(*trees) | {root_of(changed_object(x)) for x in walk_scope(*trees)} - {""}


def read_names(*trees: ast.AST) -> set[str]:
    """Return the names that are read, also in nested functions."""
    nodes = [x for tree in trees for x in ast.walk(tree)]
    augmented = {root_of(x.target) for x in nodes if isinstance(x, ast.AugAssign)}
    return augmented | {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}


def live_names(body: Sequence[ast.stmt], after: set[str]) -> set[str]:
    """Return the names whose values are read in some statements before they are bound there, or read `after` them."""
    for s in reversed(body):
        if isinstance(s, ast.If):
            after = read_names(s.test) | live_names(s.body, after) | live_names(s.orelse, after)
        elif isinstance(s, LOOPS):
            after = live_at_head(s, after)
        elif hasattr(s, "body") and not isinstance(s, (*FUNCTIONS, ast.ClassDef)):
            handlers = {x.name for x in ast.walk(s) if isinstance(x, ast.ExceptHandler)}
            after = after | read_names(s) - handlers  # any of its statements may be the last one that runs
        else:
            after = after - bound_names(s) | read_names(s)
    return after


def live_at_head(loop: ast.For | ast.While, after: set[str]) -> set[str]:
    """Return the names that are live before each step of a loop."""
    test, target = (loop.iter, bound_names(loop.target)) if isinstance(loop, ast.For) else (loop.test, set())
    live = after | read_names(test)
    for _ in range(2):
        live = live | (live_names(loop.body, live) - target)
    return live
