"""Python functions as statements on names: the parser of the source transformation."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NoReturn

from minidiff.syntax.jumps import always_jumps, is_end_of_loop, jumps, without_jumps

Names = str | tuple  # a name, or a tuple of names and tuples

#: Of matrices and vectors.
_PRODUCT = (
    "np.multiply.outer({d}, {b}) if np.ndim({b}) == 1 else {d} @ np.transpose({b})",
    "np.multiply.outer({a}, {d}) if np.ndim({a}) == 1 else np.transpose({a}) @ {d}",
)
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
    "np.sum": ("np.multiply.outer({d}, np.ones_like({a}))",),
    "@": _PRODUCT,
    "np.dot": _PRODUCT,
    "np.transpose": ("np.transpose({d})",),
    "np.multiply.outer": (
        "np.sum({d} * {b}) if np.ndim({a}) == 0 else {d} @ {b} if np.ndim({b}) == 1 else np.multiply.outer({d}, {b})",
        "{a} @ {d} if np.ndim({a}) == 1 else np.multiply.outer({a}, {d})",
    ),
    "np.ones_like": ("0.0",),
    "pop": (),
    "len": (),
    "[]": (),
}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.MatMult: "@"}


def text_of(names: Names, write: Callable[[str], str] = str) -> str:
    """Return the text of a tuple of names, each as `write` writes it."""
    if isinstance(names, str):
        return write(names)
    inside = ", ".join([text_of(x, write) for x in names])
    return f"({inside},)" if len(names) == 1 else f"({inside})"


def flat(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else [name for each in names for name in flat(each)]


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
        if self.name == "[]":
            return f"{self.target} = {a[0]}[{a[1]}]"
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
    """`head: body`, where the head is `for variable in …` or `while …`; `counter` counts the steps.

    If there is a condition `stop`, the body ends by `if stop: break`.
    """

    head: str
    counter: str
    variable: str | None
    body: list[Any]
    stop: str = ""


@dataclass
class Stack:
    """`stack = []`, `stack.append(name)`, `name = stack.pop()` or `stack[index] = name`."""

    action: str
    stack: str
    name: str = ""
    index: str = ""

    @property
    def text(self) -> str:
        texts = {
            "new": f"{self.stack} = []",
            "append": f"{self.stack}.append({self.name})",
            "pop": f"{self.name} = {self.stack}.pop()",
            "set": f"{self.stack}[{self.index}] = {self.name}",
        }
        return texts[self.action]


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
    lists: dict[str, None] = field(default_factory=dict)


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
        into = self.program.statements
        self.lists = self.program.lists
        self.lists.update(dict.fromkeys(lists_of(definition)))
        *body, last = definition.body
        empty = any(isinstance(x, ast.Return) and not x.value for x in ast.walk(definition))
        if empty or not always_jumps(definition.body):
            self.refuse(last, "the last statement must return a value")
        if isinstance(last, ast.Return) and not any(jumps(body)):
            body, result = without_jumps(body, "", self.new_name), last.value
        else:
            first = next(x for x in jumps(definition.body) if isinstance(x, ast.Return))
            self.program.results = self.result_names(first.value)
            body, result = without_jumps(definition.body, text_of(self.program.results), self.new_name), None
        self.once = {x.targets[0].id for x in body if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name)}
        self.once -= {name for name, n in lists_of(definition).items() if n > 1}
        parameters = {*self.program.parameters}
        into += [Stack("new", name) for name in self.lists if name not in self.once | parameters]
        self.block(body, into)
        if result is not None:
            self.program.results = self.result(result, into)

    def result_names(self, node: ast.expr | None) -> Names:
        """Return names for the values of several returns."""
        if isinstance(node, ast.Tuple):
            return tuple([self.new_name("result") for _ in node.elts])
        return self.new_name("result") if "result" in self.names else "result"

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
        if isinstance(node, ast.Pass):
            return
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
        elif (
            isinstance(node, ast.For)
            and isinstance(node.iter, ast.Name)
            and node.iter.id in self.lists
            and not node.orelse
        ):
            k, xs = self.new_name("k"), node.iter.id
            entry = ast.copy_location(ast.Assign([node.target], ast.parse(f"{xs}[{k}]", mode="eval").body), node)
            self.loop(f"for {k} in range(len({xs}))", k, [entry, *node.body], into)
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
        if is_end_of_loop(nodes[-1]):
            *nodes, end = nodes
            loop.stop = ast.unparse(end.test)  # type: ignore[attr-defined]
        self.block(nodes, loop.body)
        into.append(loop)

    def assign_to(self, target: ast.expr, value: ast.expr, into: list[Statement]) -> None:
        if isinstance(target, ast.Name) and target.id in self.lists:
            self.assign_list(target.id, value, into)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id in self.lists:
            entry = self.atom(value, into)
            into.append(Stack("set", target.value.id, entry, self.atom(target.slice, into)))
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

    def assign_list(self, target: str, value: ast.expr, into: list[Statement]) -> None:
        """Make a list by appending to an empty one: if it is not new, after taking out what it has."""
        if isinstance(value, ast.List):
            fresh = target not in self.once  # entries may be those of the old list
            lines = [f"{target}.append({x})" for x in [self.atom(x, into, fresh) for x in value.elts]]
        elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult) and isinstance(value.left, ast.List):
            entry = self.atom(value.left.elts[0], into)
            lines = [f"for {self.new_name('k')} in range({ast.unparse(value.right)}):", f"    {target}.append({entry})"]
        elif isinstance(value, ast.ListComp) and len(value.generators) == 1 and not value.generators[0].ifs:
            each = value.generators[0]
            lines = [f"for {ast.unparse(each.target)} in {ast.unparse(each.iter)}:"]
            lines += [f"    {target}.append({ast.unparse(value.elt)})"]
        else:
            self.refuse(value, "a list is written by its entries, or by a comprehension")
        if target in self.once:
            into.append(Stack("new", target))
        else:
            lines = [f"while len({target}) > 0:", f"    {target}.pop()", *lines]
        self.block(ast.parse("\n".join(lines)).body, into)

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
        if isinstance(node, ast.IfExp):
            branch = Branch(self.head(node.test, into), [], [])
            self.assign(target, node.body, branch.body)
            self.assign(target, node.orelse, branch.other)
            into.append(branch)
            return
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in self.lists:
            into.append(Assignment(target, "[]", [node.value.id, self.atom(node.slice, into)]))
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "len":
            into.append(Assignment(target, "len", [ast.unparse(node.args[0])]))
            return
        if isinstance(node, ast.Attribute) and node.attr == "T":
            node = ast.copy_location(ast.Call(ast.parse("np.transpose", mode="eval").body, [node.value], []), node)
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
        if isinstance(node, ast.Name) and node.id in self.lists:
            self.refuse(node, "a list is used by its entries: xs[k], for, append, pop, len")
        if not fresh and isinstance(node, (ast.Name, ast.Constant)):
            return ast.unparse(node)
        if isinstance(node, ast.Slice):
            self.refuse(node, "a list is used by its entries: xs[k], for, append, pop, len")
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


def lists_of(definition: ast.FunctionDef) -> dict[str, int]:
    """Return the names that hold lists, and how often each is assigned to.

    They are assigned a list, are appended to, or are parameters with the annotation `list`.
    """
    names = dict.fromkeys(
        (a.arg for a in definition.args.args if a.annotation and re.match("list", ast.unparse(a.annotation))), 1
    )
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value.left if isinstance(node.value, ast.BinOp) else node.value
            if isinstance(value, (ast.List, ast.ListComp)):
                names[node.targets[0].id] = names.get(node.targets[0].id, 0) + 1
        elif stack := stack_of(node, "append") or stack_of(node, "pop"):
            names.setdefault(stack, 0)
    return names
