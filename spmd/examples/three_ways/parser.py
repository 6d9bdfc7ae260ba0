"""Python functions as statements on names: the parser of the source transformation."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NoReturn

#: The terms that the operands' cotangents get: a, b are the operands, d is the cotangent of the result.
RULES = {
    "+": ("{d}", "{d}"),
    "-": ("{d}", "-{d}"),
    "*": ("{d} * {b}", "{d} * {a}"),
    "/": ("{d} / {b}", "-{d} * {a} / {b} ** 2"),
    "**": ("{d} * {b} * {a} ** ({b} - 1)", "{d} * {a} ** {b} * np.log({a})"),
    "neg": ("-{d}",),
    "copy": ("{d}",),
    "np.sin": ("{d} * np.cos({a})",),
    "np.cos": ("-{d} * np.sin({a})",),
    "np.exp": ("{d} * np.exp({a})",),
    "np.log": ("{d} / {a}",),
    "np.sqrt": ("{d} * 0.5 / np.sqrt({a})",),
    "np.tanh": ("{d} * (1 - np.tanh({a}) ** 2)",),
    "np.sum": ("{d} * np.ones_like({a})",),
    "np.dot": ("{d} * {b}", "{d} * {a}"),
    "np.ones_like": ("0.0",),
    "pop": (),
}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}


Names = str | tuple  # a name, or a tuple of names and tuples


def flat(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else [name for each in names for name in flat(each)]


def text_of(names: Names, write: Callable[[str], str] = str) -> str:
    """Return the text of a tuple of names, each as `write` writes it."""
    if isinstance(names, str):
        return write(names)
    inside = ", ".join([text_of(x, write) for x in names])
    return f"({inside},)" if len(names) == 1 else f"({inside})"


@dataclass
class Assignment:
    """`target = name(*operands)`; an operand is a name, or the text of a constant. Of calls, both may be tuples."""

    target: Names
    name: str
    operands: list[Any]

    @property
    def reads(self) -> set[str]:
        return {name for a in self.operands for name in flat(a)}

    @property
    def text(self) -> str:
        a = [text_of(x) for x in self.operands]
        if isinstance(self.target, tuple):
            call = a[0] if self.name == "copy" else f"{self.name}({', '.join(a)})"
            return f"{text_of(self.target)} = {call}"
        if self.name in OPERATORS.values():
            return f"{self.target} = {a[0]} {self.name} {a[1]}"
        if self.name in ("copy", "neg"):
            return f"{self.target} = {'-' * (self.name == 'neg')}{a[0]}"
        return f"{self.target} = {self.name}({', '.join(a)})"


@dataclass
class Branch:
    """`if condition: body, else: other`; the condition is text."""

    condition: str
    body: list[Any]
    other: list[Any]


@dataclass
class Repeat:
    """`head: body`, where the head is `for variable in …` or `while …`; `counter` counts the steps."""

    head: str
    counter: str
    variable: str | None
    body: list[Any]


@dataclass
class Stack:
    """`stack = []`, `stack.append(name)` or `name = stack.pop()`."""

    action: str
    stack: str
    name: str = ""

    @property
    def text(self) -> str:
        if self.action == "new":
            return f"{self.stack} = []"
        return f"{self.name} = {self.stack}.pop()" if self.action == "pop" else f"{self.stack}.append({self.name})"


Statement = Assignment | Branch | Repeat | Stack


@dataclass
class Parsed:
    """The statements of a function, its parameters, its results, the functions that it calls, and all its names."""

    name: str
    parameters: list[str]
    statements: list[Statement] = field(default_factory=list)
    results: Names = ""
    called: dict[str, FunctionType] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


class Parser:
    """Writes the statements of a function as operations on names."""

    def __init__(self, f: Callable):
        tree = ast.parse(textwrap.dedent(getattr(f, "text", None) or inspect.getsource(f)))
        definition = tree.body[-1]  # in the text of an adjoint, below those of the functions that it calls
        if not isinstance(definition, ast.FunctionDef):
            raise TypeError(f"a function that is written with def can be transformed, not {f!r}")
        self.scope = {**f.__globals__, **inspect.getclosurevars(f).nonlocals}
        self.program = Parsed(definition.name, [a.arg for a in definition.args.args])
        self.names = self.program.names
        self.names.update(node.id for node in ast.walk(definition) if isinstance(node, ast.Name))
        self.names.update(self.program.parameters)
        *body, last = definition.body
        if not isinstance(last, ast.Return) or last.value is None:
            self.refuse(last, "the last statement must return a value")
        into = self.program.statements
        self.block(body, into)
        self.program.results = self.result(last.value, into)

    def result(self, node: ast.expr, into: list[Statement], inside: bool = False) -> Names:
        if isinstance(node, ast.Tuple):
            return tuple([self.result(x, into, True) for x in node.elts])
        name = self.new_name("result") if inside or "result" in self.names else "result"
        self.names.add(name)
        self.assign(name, node, into)
        return name

    def refuse(self, node: ast.AST, why: str) -> NoReturn:
        line = getattr(node, "lineno", 0)
        raise SyntaxError(f"{self.program.name}, line {line}: {ast.unparse(node)}: {why}")

    def new_name(self, letters: str = "t") -> str:
        name = next(name for k in itertools.count(1) if (name := f"{letters}{k}") not in self.names)
        self.names.add(name)
        return name

    def block(self, nodes: list[ast.stmt], into: list[Statement]) -> None:
        for node in nodes:
            self.statement(node, into)

    def statement(self, node: ast.stmt, into: list[Statement]) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self.assign_to(node.targets[0], node.value, into)
        elif isinstance(node, ast.Assign):
            value = ast.copy_location(ast.parse(self.atom(node.value, into), mode="eval").body, node)
            for target in node.targets:
                self.assign_to(target, value, into)
        elif isinstance(node, ast.Expr) and (stack := stack_of(node.value, "append")):
            assert isinstance(node.value, ast.Call)
            into.append(Stack("append", stack, self.atom(node.value.args[0], into)))
        elif isinstance(node, ast.Expr) and stack_of(node.value, "pop"):
            self.assign(self.new_name(), node.value, into)
        elif isinstance(node, ast.AugAssign):
            load = ast.Name(node.target.id) if isinstance(node.target, ast.Name) else node.target
            self.assign_to(node.target, ast.copy_location(ast.BinOp(load, node.op, node.value), node), into)
        elif isinstance(node, ast.If):
            branch = Branch(self.head(node.test, into), [], [])
            self.block(node.body, branch.body)
            self.block(node.orelse, branch.other)
            into.append(branch)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and not node.orelse:
            self.loop(f"for {node.target.id} in {self.head(node.iter, into)}", node.target.id, node.body, into)
        elif isinstance(node, ast.While) and not node.orelse:
            self.loop(f"while {ast.unparse(node.test)}", None, node.body, into)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
            self.refuse(node, "this statement cannot be transformed")

    def head(self, node: ast.expr, into: list[Statement]) -> str:
        """Return the text of a condition or of what a loop is over, after what it takes from stacks."""
        calls = [x for x in ast.walk(node) if isinstance(x, ast.Call) and stack_of(x, "pop")]
        popped = {ast.unparse(x): self.atom(x, into) for x in calls}
        return functools.reduce(lambda text, pair: text.replace(*pair), popped.items(), ast.unparse(node))

    def loop(self, head: str, variable: str | None, nodes: list[ast.stmt], into: list[Statement]) -> None:
        loop = Repeat(head, self.new_name("steps"), variable, [])
        self.block(nodes, loop.body)
        into.append(loop)

    def assign_to(self, target: ast.expr, value: ast.expr, into: list[Statement]) -> None:
        if isinstance(target, ast.Name) and isinstance(value, ast.List) and not value.elts:
            into.append(Stack("new", target.id))
        elif isinstance(target, ast.Name):
            self.assign(target.id, value, into)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            values = [self.atom(x, into, fresh=True) for x in value.elts]  # all are computed before any is assigned
            for each, x in zip(target.elts, values):
                self.assign_to(each, ast.copy_location(ast.Name(x), value), into)
        elif isinstance(target, ast.Tuple) and isinstance(value, (ast.Name, ast.Call)):
            self.assign(self.names_in(target), value, into)
        else:
            self.refuse(target, "a name is assigned to, or a tuple of names to a tuple of as many values")

    def names_in(self, target: ast.expr) -> Names:
        if isinstance(target, ast.Tuple):
            return tuple(map(self.names_in, target.elts))
        return target.id if isinstance(target, ast.Name) else self.refuse(target, "a name is assigned to")

    def assign(self, target: Names, node: ast.expr, into: list[Statement]) -> None:
        """Write `target = node` as operations on names."""
        name, operands = "copy", [node]
        if stack := stack_of(node, "pop"):
            assert isinstance(target, str)
            into.append(Stack("pop", stack, target))
            return
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            name, operands = OPERATORS[type(node.op)], [node.left, node.right]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            name, operands = "neg", [node.operand]
        elif isinstance(node, ast.Call) and not node.keywords:
            name, operands = ast.unparse(node.func), node.args
            if name not in RULES:
                called: Any = self.scope.get(name)
                if not isinstance(called, FunctionType):  # a name with a dot has no adjoint here, either
                    self.refuse(node, f"{name} is neither in RULES nor a function of this language")
                self.program.called[name] = called
        elif not isinstance(node, (ast.Name, ast.Constant)):
            self.refuse(node, "this expression cannot be transformed")
        into.append(Assignment(target, name, [self.argument(x, into) for x in operands]))

    def argument(self, node: ast.expr, into: list[Statement]) -> Names:
        if isinstance(node, ast.Tuple):
            return tuple([self.argument(x, into) for x in node.elts])
        return self.atom(node, into)

    def atom(self, node: ast.expr, into: list[Statement], fresh: bool = False) -> str:
        """Return the name or constant that an expression is, after operations that compute it."""
        if not fresh and isinstance(node, (ast.Name, ast.Constant)):
            return ast.unparse(node)
        if not any(isinstance(each, (ast.Name, ast.Call)) for each in ast.walk(node)):
            return f"({ast.unparse(node)})"  # arithmetic of constants
        name = self.new_name()
        self.assign(name, node, into)
        return name


def stack_of(node: ast.AST, method: str) -> str | None:
    """Return the name of the stack in `stack.append(x)` or `stack.pop()`; None for any other expression."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        matches = node.func.attr == method and len(node.args) == (method == "append")
        return node.func.value.id if matches else None
    return None
