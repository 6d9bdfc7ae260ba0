"""Automatic differentiation by source transformation: Python text in, Python text of the adjoint out.

`adjoint(f)` parses the source of `f`, writes each statement as operations on names, and writes a function that runs
them, and then goes back through them in reverse order. What a statement overwrites goes on a stack, and so does the way
that was taken: which branch, and how many times a loop ran. `.text` is the result, to be read.

>>> def f(x, y):
...     z = x * y
...     return z * x
>>> print(adjoint_text(f))
def f_adjoint(x, y, d_result=1.0):
    z = x * y
    result = z * x
    d_x = d_y = d_z = 0.0
    d_z += d_result * x
    d_x += d_result * z
    d_x += d_z * y
    d_y += d_z * x
    return result, (d_x, d_y)

The language: assignments, also to tuples and augmented; `if`, `for`, `while`; operators; functions of NumPy in `RULES`;
calls of other functions of this language; one `return`, at the end. Values are numbers, or arrays of one shape.

Source: A. Griewank, A. Walther, "Evaluating derivatives", 2008, chapters 4 and 6; L. Hascoët, V. Pascual, "The Tapenade
automatic differentiation tool", 2013 (values are saved before they are overwritten).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy

#: What each operand's cotangent gets: a, b are the operands, out the result, d its cotangent.
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
}
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}


@dataclass
class Operation:
    """`target = name(*operands)`; an operand is a name, or the text of a constant."""

    target: str
    name: str
    operands: list[str]

    @property
    def text(self) -> str:
        a = self.operands
        if self.name in _OPERATORS.values():
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
class Loop:
    """`head: body`, where the head is `for variable in …` or `while …`; `counter` counts the steps."""

    head: str
    counter: str
    variable: str | None
    body: list[Any]


Statement = Operation | Branch | Loop

# ---------------------------------------------------------------- parsing


@dataclass
class Program:
    """The statements of a function, its parameters, the names of its results, and the functions that it calls."""

    name: str
    parameters: list[str]
    statements: list[Statement] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    is_tuple: bool = False
    called: dict[str, FunctionType] = field(default_factory=dict)


class _Parser:
    def __init__(self, f: Callable):
        tree = ast.parse(textwrap.dedent(inspect.getsource(f)))
        definition = tree.body[0]
        if not isinstance(definition, ast.FunctionDef):
            raise TypeError(f"a function that is written with def can be transformed, not {f!r}")
        self.scope = {**f.__globals__, **inspect.getclosurevars(f).nonlocals}
        self.program = Program(definition.name, [a.arg for a in definition.args.args])
        self.names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.names.update(self.program.parameters)
        *body, last = definition.body
        if not isinstance(last, ast.Return) or last.value is None:
            self.refuse(last, "the last statement must return a value")
        into = self.program.statements
        self.block(body, into)
        values = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        self.program.is_tuple = isinstance(last.value, ast.Tuple)
        for value in values:
            name = self.new_name("result") if self.program.is_tuple or "result" in self.names else "result"
            self.assign(name, value, into)
            self.program.results.append(name)

    def refuse(self, node: ast.AST, why: str) -> None:
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
        elif isinstance(node, ast.AugAssign):
            load = ast.Name(node.target.id) if isinstance(node.target, ast.Name) else node.target
            self.assign_to(node.target, ast.copy_location(ast.BinOp(load, node.op, node.value), node), into)
        elif isinstance(node, ast.If):
            branch = Branch(ast.unparse(node.test), [], [])
            self.block(node.body, branch.body)
            self.block(node.orelse, branch.other)
            into.append(branch)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and not node.orelse:
            self.loop(f"for {node.target.id} in {ast.unparse(node.iter)}", node.target.id, node.body, into)
        elif isinstance(node, ast.While) and not node.orelse:
            self.loop(f"while {ast.unparse(node.test)}", None, node.body, into)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
            self.refuse(node, "this statement cannot be transformed")

    def loop(self, head: str, variable: str | None, nodes: list[ast.stmt], into: list[Statement]) -> None:
        loop = Loop(head, self.new_name("steps"), variable, [])
        self.block(nodes, loop.body)
        into.append(loop)

    def assign_to(self, target: ast.expr, value: ast.expr, into: list[Statement]) -> None:
        if isinstance(target, ast.Name):
            self.assign(target.id, value, into)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            values = [self.atom(x, into, fresh=True) for x in value.elts]  # all are computed before any is assigned
            for each, x in zip(target.elts, values):
                self.assign_to(each, ast.copy_location(ast.Name(x), value), into)
        else:
            self.refuse(target, "a name is assigned to, or a tuple of names to a tuple of as many values")

    def assign(self, target: str, node: ast.expr, into: list[Statement]) -> None:
        """`target = node`, as operations on names."""
        name, operands = "copy", [node]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            name, operands = _OPERATORS[type(node.op)], [node.left, node.right]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            name, operands = "neg", [node.operand]
        elif isinstance(node, ast.Call) and not node.keywords:
            name, operands = ast.unparse(node.func), node.args
            if name not in RULES:
                called = self.scope.get(name)
                if not isinstance(called, FunctionType):  # a name with a dot has no adjoint here, either
                    self.refuse(node, f"{name} is neither in RULES nor a function of this language")
                self.program.called[name] = called
        elif not isinstance(node, (ast.Name, ast.Constant)):
            self.refuse(node, "this expression cannot be transformed")
        into.append(Operation(target, name, [self.atom(x, into) for x in operands]))

    def atom(self, node: ast.expr, into: list[Statement], fresh: bool = False) -> str:
        """The name or constant that an expression is, after operations that compute it."""
        if not fresh and isinstance(node, (ast.Name, ast.Constant)):
            return ast.unparse(node)
        if not any(isinstance(each, (ast.Name, ast.Call)) for each in ast.walk(node)):
            return f"({ast.unparse(node)})"  # arithmetic of constants
        name = self.new_name()
        self.assign(name, node, into)
        return name


# ---------------------------------------------------------------- writing


def _assignments(statements: list[Statement], looped: bool = False) -> Iterator[tuple[Operation, bool]]:
    """All operations, and whether each is in a loop. A loop's head assigns to its variable, too."""
    for s in statements:
        if isinstance(s, Operation):
            yield s, looped
        elif isinstance(s, Branch):
            yield from _assignments([*s.body, *s.other], looped)
        else:
            if s.variable:
                yield Operation(s.variable, "copy", []), True
            yield from _assignments(s.body, True)


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines or ["pass"]]


class _Writer:
    """Writes a program's adjoint.

    `active` names depend on parameters. `overwritten` ones are assigned to several times; they are `saved` before, if
    the rule of an operation reads them.
    """

    def __init__(self, program: Program):
        self.program = program
        assignments = [*_assignments(program.statements)]
        self.active = {*program.parameters}
        while new := {o.target for o, _ in assignments if {*o.operands} & self.active} - self.active:
            self.active |= new
        times = Counter([*program.parameters, *(o.target for o, _ in assignments)])
        times.update(o.target for o, looped in assignments if looped)
        self.overwritten = {name for name, n in times.items() if n > 1}
        self.saved = self.overwritten & {name for o, _ in assignments for name in self.read_by_rules(o)}
        self.targets = dict.fromkeys(o.target for o, _ in assignments)

    def read_by_rules(self, o: Operation) -> set[str]:
        """The operands whose values the derivatives of an operation need."""
        if o.name not in RULES:
            return {*o.operands}
        rules = "".join(rule for rule, a in zip(RULES[o.name], o.operands) if a in self.active)
        return {a for letter, a in zip("ab", o.operands) if f"{{{letter}}}" in rules}

    def forward(self, statements: list[Statement]) -> list[str]:
        lines: list[str] = []
        for s in statements:
            if isinstance(s, Operation):
                lines += [f"stack.append({s.target})"] * (s.target in self.saved) + [s.text]
            elif isinstance(s, Branch):
                ends = [["stack.append(True)"], ["stack.append(False)"]]
                body, other = (self.forward(x) + end for x, end in zip((s.body, s.other), ends))
                lines += [f"if {s.condition}:", *_indented(body), "else:", *_indented(other)]
            else:
                noted = [f"stack.append({s.variable})"] * (s.variable in self.saved)
                body = [f"{s.counter} += 1", *self.forward(s.body), *noted]
                lines += noted
                lines += [f"{s.counter} = 0", f"{s.head}:", *_indented(body), f"stack.append({s.counter})"]
        return lines

    def backward(self, statements: list[Statement]) -> list[str]:
        lines: list[str] = []
        for s in reversed(statements):
            if isinstance(s, Operation):
                lines += self.operation(s)
            elif isinstance(s, Branch):
                body, other = self.backward(s.body), self.backward(s.other)
                lines += ["if stack.pop():", *_indented(body), "else:", *_indented(other)]
            else:
                noted = [f"{s.variable} = stack.pop()"] * (s.variable in self.saved)
                no_longer = [f"d_{s.variable} = 0.0"] * (s.variable in self.active)  # the head has assigned a number
                body = [*noted, *self.backward(s.body), *no_longer]
                lines += ["for _ in range(stack.pop()):", *_indented(body)]
                lines += noted
        return lines

    def operation(self, o: Operation) -> list[str]:
        """Restore what was overwritten, then add to the cotangents of the operands."""
        lines, d = [f"{o.target} = stack.pop()"] * (o.target in self.saved), f"d_{o.target}"
        if o.target not in self.active:
            return lines
        if o.target in self.overwritten:
            lines, d = [*lines, f"d, d_{o.target} = d_{o.target}, 0.0"], "d"
        if o.name not in RULES:
            parts = ", ".join(f"d{k}" for k in range(len(o.operands))) + ","
            lines.append(f"_, ({parts}) = {o.name}_adjoint({', '.join(o.operands)}, {d})")
        for k, a in enumerate(o.operands):
            if a in self.active:
                rule = RULES[o.name][k] if o.name in RULES else f"d{k}"
                lines.append(f"d_{a} += " + rule.format(d=d, **dict(zip("ab", o.operands))))
        return lines

    def text(self) -> str:
        p = self.program
        results = ", ".join(p.results)
        result = f"({results})" if p.is_tuple else results
        forward, backward = self.forward(p.statements), self.backward(p.statements)
        first = ["stack = []"] * any("stack" in line for line in forward)
        if early := [name for name in self.targets if name in self.saved and name not in p.parameters]:
            first.append(f"{' = '.join(early)} = 0.0")
        zeros = [*p.parameters, *(n for n in self.targets if n in self.active and n not in {*p.parameters, *p.results})]
        start = [f"{' = '.join(f'd_{name}' for name in zeros)} = 0.0"]
        start += [f"{', '.join(f'd_{name}' for name in p.results)} = d_result"] * p.is_tuple
        of_parameters = ", ".join(f"d_{name}" for name in p.parameters) + "," * (len(p.parameters) == 1)
        last = [f"return {result}, ({of_parameters})"]
        given = "d_result" if p.is_tuple else f"d_{results}=1.0"
        head = f"def {p.name}_adjoint({', '.join([*p.parameters, given])}):"
        return "\n".join([head, *_indented([*first, *forward, *start, *backward, *last])])


def adjoint_text(f: Callable) -> str:
    """The source of the adjoint of a function, and above it those of the functions that it calls."""
    texts: dict[str, str] = {}

    def write(f: Callable) -> None:
        program = _Parser(f).program
        texts[program.name] = ""  # so that a function that calls itself is written once
        for called in program.called.values():
            if called.__name__ not in texts:
                write(called)
        texts[program.name] = texts.pop(program.name) or _Writer(program).text()

    write(f)
    return "\n\n\n".join(texts.values())


def adjoint(f: Callable) -> Callable:
    """`adjoint(f)(*args, d_result) -> result, cotangents of the args`; its `.text` is the source.

    Raises SyntaxError, with the line, for what is not in the language.

    >>> adjoint(_polynomial)(2.0)
    (15.0, (14.0,))
    """
    text = adjoint_text(f)
    scope = {**f.__globals__, **inspect.getclosurevars(f).nonlocals, "np": numpy}
    exec(compile(text, f"<adjoint of {f.__name__}>", "exec"), scope)
    found = scope[f"{f.__name__}_adjoint"]
    found.text = text
    return found


def _polynomial(x):
    y = x
    for k in range(2, 4):
        y = y * x + k
    return y
