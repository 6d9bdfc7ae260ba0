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
calls of other functions of this language; stacks, `s = []`, `s.append(x)`, `s.pop()`; one `return`, at the end, of a
value or a tuple. Values are numbers, or arrays of one shape. That is all that an adjoint has, so it can be transformed
again, to any order: `adjoint(adjoint(f))`.

Source: A. Griewank, A. Walther, "Evaluating derivatives", 2008, chapters 4 and 6; L. Hascoët, V. Pascual, "The Tapenade
automatic differentiation tool", 2013 (values are saved before they are overwritten).
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
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
    "np.ones_like": ("0.0",),
    "pop": (),
}
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}


Names = str | tuple  # a name, or a tuple of names and tuples


def flat(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else [name for each in names for name in flat(each)]


def text_of(names: Names, write: Callable[[str], str] = str) -> str:
    """The text of a tuple of names, each as `write` writes it."""
    if isinstance(names, str):
        return write(names)
    inside = ", ".join([text_of(x, write) for x in names])
    return f"({inside},)" if len(names) == 1 else f"({inside})"


@dataclass
class Operation:
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


Statement = Operation | Branch | Loop | Stack

# ---------------------------------------------------------------- parsing


@dataclass
class Program:
    """The statements of a function, its parameters, its results, the functions that it calls, and all its names."""

    name: str
    parameters: list[str]
    statements: list[Statement] = field(default_factory=list)
    results: Names = ""
    called: dict[str, FunctionType] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


class _Parser:
    def __init__(self, f: Callable):
        tree = ast.parse(textwrap.dedent(getattr(f, "text", None) or inspect.getsource(f)))
        definition = tree.body[-1]  # in the text of an adjoint, below those of the functions that it calls
        if not isinstance(definition, ast.FunctionDef):
            raise TypeError(f"a function that is written with def can be transformed, not {f!r}")
        self.scope = {**f.__globals__, **inspect.getclosurevars(f).nonlocals}
        self.program = Program(definition.name, [a.arg for a in definition.args.args])
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
        elif isinstance(node, ast.Assign):
            value = ast.copy_location(ast.parse(self.atom(node.value, into), mode="eval").body, node)
            for target in node.targets:
                self.assign_to(target, value, into)
        elif isinstance(node, ast.Expr) and (stack := _stack_of(node.value, "append")):
            into.append(Stack("append", stack, self.atom(node.value.args[0], into)))
        elif isinstance(node, ast.Expr) and _stack_of(node.value, "pop"):
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
        """The text of a condition or of what a loop is over, after what it takes from stacks."""
        popped = {ast.unparse(x): self.atom(x, into) for x in ast.walk(node) if _stack_of(x, "pop")}
        return functools.reduce(lambda text, pair: text.replace(*pair), popped.items(), ast.unparse(node))

    def loop(self, head: str, variable: str | None, nodes: list[ast.stmt], into: list[Statement]) -> None:
        loop = Loop(head, self.new_name("steps"), variable, [])
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
        """`target = node`, as operations on names."""
        name, operands = "copy", [node]
        if stack := _stack_of(node, "pop"):
            assert isinstance(target, str)
            into.append(Stack("pop", stack, target))
            return
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
        into.append(Operation(target, name, [self.argument(x, into) for x in operands]))

    def argument(self, node: ast.expr, into: list[Statement]) -> Names:
        if isinstance(node, ast.Tuple):
            return tuple([self.argument(x, into) for x in node.elts])
        return self.atom(node, into)

    def atom(self, node: ast.expr, into: list[Statement], fresh: bool = False) -> str:
        """The name or constant that an expression is, after operations that compute it."""
        if not fresh and isinstance(node, (ast.Name, ast.Constant)):
            return ast.unparse(node)
        if not any(isinstance(each, (ast.Name, ast.Call)) for each in ast.walk(node)):
            return f"({ast.unparse(node)})"  # arithmetic of constants
        name = self.new_name()
        self.assign(name, node, into)
        return name


def _stack_of(node: ast.AST, method: str) -> str | None:
    """The name of the stack in `stack.append(x)` or `stack.pop()`; None for any other expression."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        matches = node.func.attr == method and len(node.args) == (method == "append")
        return node.func.value.id if matches else None
    return None


# ---------------------------------------------------------------- writing


def _assignments(statements: list[Statement], looped: bool = False) -> Iterator[tuple[Operation, bool]]:
    """All operations, and whether each is in a loop. A loop's head assigns to its variable, too."""
    for s in statements:
        if isinstance(s, Operation):
            yield s, looped
        elif isinstance(s, Branch):
            yield from _assignments([*s.body, *s.other], looped)
        elif isinstance(s, Stack):
            if s.action == "pop":
                yield Operation(s.name, "pop", []), looped
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
        self.active = {*program.parameters, *[o.target for o, _ in assignments if o.name == "pop"]}
        while new := {t for o, _ in assignments if o.reads & self.active for t in flat(o.target)} - self.active:
            self.active |= new
        times = Counter([*program.parameters, *(t for o, _ in assignments for t in flat(o.target))])
        times.update(t for o, looped in assignments if looped for t in flat(o.target))
        self.overwritten = {name for name, n in times.items() if n > 1}
        self.saved = self.overwritten & {name for o, _ in assignments for name in self.read_by_rules(o)}
        self.targets = dict.fromkeys(t for o, _ in assignments for t in flat(o.target))
        # Names of this adjoint that the program does not have: if it is an adjoint itself, it has d_x and a stack.
        numbers = itertools.chain([""], map(str, itertools.count(2)))
        taken = lambda k: any(re.fullmatch(rf"d{k}(_.*|[0-9]*)|stack{k}", name) for name in program.names)  # noqa: E731
        number = next(k for k in numbers if not taken(k))
        self.d, self.stack = f"d{number}", f"stack{number}"

    def read_by_rules(self, o: Operation) -> set[str]:
        """The operands whose values the derivatives of an operation need."""
        if o.name not in RULES:
            return o.reads
        rules = "".join(rule for rule, a in zip(RULES[o.name], o.operands) if a in self.active)
        return {a for letter, a in zip("ab", o.operands) if f"{{{letter}}}" in rules}

    def forward(self, statements: list[Statement]) -> list[str]:
        lines: list[str] = []
        for s in statements:
            if isinstance(s, (Operation, Stack)):
                targets = flat(s.target) if isinstance(s, Operation) else [s.name] * (s.action == "pop")
                lines += [f"{self.stack}.append({name})" for name in targets if name in self.saved] + [s.text]
            elif isinstance(s, Branch):
                ends = [[f"{self.stack}.append(True)"], [f"{self.stack}.append(False)"]]
                body, other = (self.forward(x) + end for x, end in zip((s.body, s.other), ends))
                lines += [f"if {s.condition}:", *_indented(body), "else:", *_indented(other)]
            else:
                noted = [f"{self.stack}.append({s.variable})"] * (s.variable in self.saved)
                body = [f"{s.counter} += 1", *self.forward(s.body), *noted]
                lines += noted
                lines += [f"{s.counter} = 0", f"{s.head}:", *_indented(body), f"{self.stack}.append({s.counter})"]
        return lines

    def backward(self, statements: list[Statement]) -> list[str]:
        lines: list[str] = []
        for s in reversed(statements):
            if isinstance(s, Operation):
                lines += self.operation(s)
            elif isinstance(s, Stack):
                lines += self.stacked(s)
            elif isinstance(s, Branch):
                body, other = self.backward(s.body), self.backward(s.other)
                lines += [f"if {self.stack}.pop():", *_indented(body), "else:", *_indented(other)]
            else:
                noted = [f"{s.variable} = {self.stack}.pop()"] * (s.variable in self.saved)
                no_longer = [f"{self.d}_{s.variable} = 0.0"] * (
                    s.variable in self.active
                )  # the head has assigned a number
                body = [*noted, *self.backward(s.body), *no_longer]
                lines += [f"for _ in range({self.stack}.pop()):", *_indented(body)]
                lines += noted
        return lines

    def stacked(self, s: Stack) -> list[str]:
        """Values that were put on a stack get the cotangents of those that were taken from it, by a stack of these."""
        stack = f"{self.d}_{s.stack}"
        if s.action == "append":
            return [f"{self.d}_{s.name} += {stack}.pop()" if s.name in self.active else f"{stack}.pop()"]
        lines, d = self.cotangent(s.name, self.d)
        return [*self.restore(s.name), *lines, f"{stack}.append({d})"] if s.action == "pop" else []

    def restore(self, name: str) -> list[str]:
        return [f"{name} = {self.stack}.pop()"] * (name in self.saved)

    def cotangent(self, name: str, of_old: str) -> tuple[list[str], str]:
        """The cotangent of a name that an operation assigns to, after a line if the name has had another value."""
        if name not in self.active:
            return [], "0.0"
        d = f"{self.d}_{name}"
        return ([f"{of_old}, {d} = {d}, 0.0"], of_old) if name in self.overwritten else ([], d)

    def operation(self, o: Operation) -> list[str]:
        """Restore what was overwritten, then add to the cotangents of the operands."""
        targets = flat(o.target)
        lines = [line for name in reversed(targets) for line in self.restore(name)]
        if self.active.isdisjoint(targets):
            return lines
        texts = {}
        for k, name in enumerate(dict.fromkeys(targets)):
            more, texts[name] = self.cotangent(name, self.d if o.target == name else f"{self.d}_{k}")
            lines += more
        d = text_of(o.target, texts.__getitem__)
        if isinstance(o.target, tuple) and o.name == "copy":  # a parameter that is a tuple
            return [*lines, f"{self.d}_{o.operands[0]} = {d}"]
        if o.name not in RULES:
            numbers = itertools.count()
            parts = text_of(tuple(o.operands), lambda name: f"{self.d}{next(numbers)}")
            result = text_of(o.target, lambda name: "_")
            lines.append(f"{result}, {parts} = {o.name}_adjoint({', '.join(map(text_of, o.operands))}, {d})")
        for k, a in enumerate(flat(tuple(o.operands))):
            if a in self.active:
                rule = RULES[o.name][k] if o.name in RULES else f"{self.d}{k}"
                lines.append(f"{self.d}_{a} += " + rule.format(d=d, **dict(zip("ab", o.operands))))
        return lines

    def text(self) -> str:
        p = self.program
        forward, backward = self.forward(p.statements), self.backward(p.statements)
        first = [f"{self.stack} = []"] * any(f"{self.stack}." in line for line in forward)
        if early := [name for name in self.targets if name in self.saved and name not in p.parameters]:
            first.append(f"{' = '.join(early)} = 0.0")
        zeros = [*p.parameters, *(n for n in self.targets if n in self.active and n not in p.parameters)]
        zeros = [n for n in zeros if n not in flat(p.results)]
        start = [f"{' = '.join(f'{self.d}_{name}' for name in zeros)} = 0.0"]
        start += [f"{self.d}_{s} = []" for s in dict.fromkeys(_stacks(p.statements))]
        inputs = f"{self.d}_{p.results}=1.0" if isinstance(p.results, str) else f"{self.d}_result"
        inputs += "s" * (inputs in {f"{self.d}_{name}" for name in p.names})
        if isinstance(p.results, tuple):
            start.append(f"{text_of(p.results, lambda name: f'{self.d}_{name}')} = {inputs}")
        of_parameters = ", ".join(f"{self.d}_{name}" for name in p.parameters) + "," * (len(p.parameters) == 1)
        last = [f"return {text_of(p.results)}, ({of_parameters})"]
        head = f"def {p.name}_adjoint({', '.join([*p.parameters, inputs])}):"
        return "\n".join([head, *_indented([*first, *forward, *start, *backward, *last])])


def _stacks(statements: list[Statement]) -> Iterator[str]:
    for s in statements:
        if isinstance(s, Stack):
            yield s.stack
        elif not isinstance(s, Operation):
            yield from _stacks([*s.body, *getattr(s, "other", [])])


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
    for definition in ast.parse(text).body:
        scope[definition.name].text = ast.get_source_segment(text, definition)
    adjoint = scope[f"{f.__name__}_adjoint"]
    adjoint.text = text
    return adjoint


def _polynomial(x):
    y = x
    for k in range(2, 4):
        y = y * x + k
    return y
