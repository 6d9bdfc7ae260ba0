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

The language: assignments, also to tuples and augmented; `if`, `for`, `while`, with `break`, `continue`, `return` and
`else` (`minidiff.syntax.jumps` makes flags of them); operators, `@` of vectors and matrices, `x if c else y`; functions
of NumPy in `RULES`; calls of other functions of this language, and of the function itself; lists of values, by their
entries: `xs = [x, y]`, comprehensions, `xs[k]`, `xs[k] = x`, `for x in xs`, `append`, `pop`, `len`, and parameters
`xs: list`.
It returns a value or a tuple of values. Values are numbers or arrays; operands of `+`, `*` etc. have one shape. That is
all that an adjoint has, so it can be transformed again, to any order: `adjoint(adjoint(f))`. Only lists that are
parameters prevent that, since their cotangents are lists.

The adjoint of a call runs the called function once more, so a recursion of depth n takes about n² / 2 calls.

Source: A. Griewank, A. Walther, "Evaluating derivatives", 2008, chapters 4 and 6; L. Hascoët, V. Pascual, "The Tapenade
automatic differentiation tool", 2013 (values are saved before they are overwritten).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy

from spmd.examples.three_ways.parser import (
    RULES,
    Assignment,
    Branch,
    Parsed,
    Parser,
    Stack,
    Statement,
    flat,
    text_of,
)

#: The ranks of products of vectors and matrices, and the products.
RANKS = dict.fromkeys(("@", "np.dot"), ("np.ndim({a}) + np.ndim({b}) - 2", "{a} @ {b}"))
RANKS["np.multiply.outer"] = "np.ndim({a}) + np.ndim({b})", "np.multiply.outer({a}, {b})"


def _assignments(statements: list[Statement], looped: bool = False) -> Iterator[tuple[Assignment, bool]]:
    """Yield all operations, and whether each is in a loop. A loop's head assigns to its variable, too."""
    for s in statements:
        if isinstance(s, Assignment):
            yield s, looped
        elif isinstance(s, Branch):
            yield from _assignments([*s.body, *s.other], looped)
        elif isinstance(s, Stack):
            if s.action == "pop":
                yield Assignment(s.name, "pop", []), looped
        else:
            if s.variable:
                yield Assignment(s.variable, "copy", []), True
            yield from _assignments(s.body, True)


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines or ["pass"]]


class _Writer:
    """Writes a program's adjoint.

    `active` names depend on parameters. `overwritten` ones are assigned to several times; they are `saved` before, if
    the rule of an operation reads them.
    """

    def __init__(self, program: Parsed):
        self.program = program
        assignments = [*_assignments(program.statements)]
        self.active = {*program.parameters} - {*program.lists}
        self.active |= {t for o, _ in assignments if o.name in ("pop", "[]") for t in flat(o.target)}
        while new := {t for o, _ in assignments if o.reads & self.active for t in flat(o.target)} - self.active:
            self.active |= new
        times = Counter([*program.parameters, *(t for o, _ in assignments for t in flat(o.target))])
        times.update(t for o, looped in assignments if looped for t in flat(o.target))
        self.overwritten = {name for name, n in times.items() if n > 1}
        reads = {name for o, _ in assignments for name in self.read_by_rules(o)} | {*_indices(program.statements)}
        self.saved = self.overwritten & reads
        self.targets = dict.fromkeys(t for o, _ in assignments for t in flat(o.target))
        # Names of this adjoint that the program does not have: if it is an adjoint itself, it has d_x and a stack.
        numbers = itertools.chain([""], map(str, itertools.count(2)))
        taken = lambda k: any(re.fullmatch(rf"d{k}(_.*|[0-9]*)|stack{k}", name) for name in program.names)  # noqa: E731
        number = next(k for k in numbers if not taken(k))
        self.d, self.stack = f"d{number}", f"stack{number}"

    def read_by_rules(self, o: Assignment) -> set[str]:
        """Return the operands whose values the derivatives of an operation need."""
        if o.name not in RULES:
            return o.reads
        if o.name == "[]":
            return {o.operands[1]}
        if o.name in RANKS:
            return o.reads
        rules = "".join(rule for rule, a in zip(RULES[o.name], o.operands) if a in self.active)
        return {a for letter, a in zip("ab", o.operands) if f"{{{letter}}}" in rules}

    def forward(self, statements: list[Statement]) -> list[str]:
        lines: list[str] = []
        for s in statements:
            if isinstance(s, (Assignment, Stack)):
                targets = flat(s.target) if isinstance(s, Assignment) else [s.name] * (s.action == "pop")
                lines += [f"{self.stack}.append({name})" for name in targets if name in self.saved] + [s.text]
            elif isinstance(s, Branch):
                ends = [[f"{self.stack}.append(True)"], [f"{self.stack}.append(False)"]]
                body, other = (self.forward(x) + end for x, end in zip((s.body, s.other), ends))
                lines += [f"if {s.condition}:", *_indented(body), "else:", *_indented(other)]
            else:
                noted = [f"{self.stack}.append({s.variable})"] * (s.variable in self.saved)
                stop = [f"if {s.stop}:", "    break"] if s.stop else []
                body = [f"{s.counter} += 1", *self.forward(s.body), *noted, *stop]
                lines += noted
                lines += [f"{s.counter} = 0", f"{s.head}:", *_indented(body), f"{self.stack}.append({s.counter})"]
        return lines

    def backward(self, statements: list[Statement]) -> list[str]:
        lines: list[str] = []
        for s in reversed(statements):
            if isinstance(s, Assignment):
                lines += self.operation(s)
            elif isinstance(s, Stack):
                lines += self.stacked(s)
            elif isinstance(s, Branch):
                body, other = self.backward(s.body), self.backward(s.other)
                lines += [f"if {self.stack}.pop():", *_indented(body), *(["else:", *_indented(other)] if other else [])]
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
        """Give values that were put on a stack the cotangents of those that were taken from it, by a stack of these."""
        stack = f"{self.d}_{s.stack}"
        if s.action == "append":
            return [f"{self.d}_{s.name} += {stack}.pop()" if s.name in self.active else f"{stack}.pop()"]
        if s.action == "set":
            index = f"{stack}[{s.index}]"
            return [f"{self.d}_{s.name} += {index}"] * (s.name in self.active) + [f"{index} = 0.0"]
        lines, d = self.cotangent(s.name, self.d)
        return [*self.restore(s.name), *lines, f"{stack}.append({d})"] if s.action == "pop" else []

    def restore(self, name: str) -> list[str]:
        return [f"{name} = {self.stack}.pop()"] * (name in self.saved)

    def cotangent(self, name: str, of_old: str) -> tuple[list[str], str]:
        """Return the cotangent of a name that an operation assigns to, after a line if it had another value."""
        if name not in self.active:
            return [], "0.0"
        d = f"{self.d}_{name}"
        return ([f"{of_old}, {d} = {d}, 0.0"], of_old) if name in self.overwritten else ([], d)

    def operation(self, o: Assignment) -> list[str]:
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
        if o.name == "[]":
            return [*lines, f"{self.d}_{o.operands[0]}[{o.operands[1]}] += {d}"]
        if o.name in RANKS:  # a zero that has no shape yet
            rank, value = (text.format(**dict(zip("ab", o.operands))) for text in RANKS[o.name])
            lines.append(f"{d} = {d} if np.ndim({d}) == {rank} else np.multiply.outer({d}, np.ones_like({value}))")
        if o.name not in RULES:
            numbers = itertools.count()
            parts = text_of(tuple(o.operands), lambda name: f"{self.d}{next(numbers)}")
            result = text_of(o.target, lambda name: "_")
            lines.append(f"{result}, {parts} = {o.name}_adjoint({', '.join(map(text_of, o.operands))}, {d})")
        for k, a in enumerate(flat(tuple(o.operands))):
            if a in self.active and (o.name not in RULES or k < len(RULES[o.name])):
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
        zeros = [n for n in zeros if n not in {*flat(p.results), *p.lists}]
        start = [f"{' = '.join(f'{self.d}_{name}' for name in zeros)} = 0.0"]
        start += [f"{self.d}_{s} = [0.0] * len({s})" for s in p.lists]
        inputs = f"{self.d}_{p.results}=1.0" if isinstance(p.results, str) else f"{self.d}_result"
        inputs += "s" * (inputs in {f"{self.d}_{name}" for name in p.names})
        if isinstance(p.results, tuple):
            start.append(f"{text_of(p.results, lambda name: f'{self.d}_{name}')} = {inputs}")
        of_parameters = ", ".join(f"{self.d}_{name}" for name in p.parameters) + "," * (len(p.parameters) == 1)
        last = [f"return {text_of(p.results)}, ({of_parameters})"]
        head = f"def {p.name}_adjoint({', '.join([*p.parameters, inputs])}):"
        return "\n".join([head, *_indented([*first, *forward, *start, *backward, *last])])


def _indices(statements: list[Statement]) -> Iterator[str]:
    """Yield the indices of entries that are assigned to."""
    for s in statements:
        if isinstance(s, Stack):
            yield s.index
        elif not isinstance(s, Assignment):
            yield from _indices([*s.body, *getattr(s, "other", [])])


def adjoint_text(f: Callable) -> str:
    """Return the source of the adjoint of a function, and above it those of the functions that it calls."""
    texts: dict[str, str] = {}

    def write(f: Callable) -> None:
        program = Parser(f).program
        texts[program.name] = ""  # so that a function that calls itself is written once
        for called in program.called.values():
            if called.__name__ not in texts:
                write(called)
        texts[program.name] = texts.pop(program.name) or _Writer(program).text()

    write(f)
    return "\n\n\n".join(texts.values())


def adjoint(f: Callable) -> Callable:
    """Return the adjoint: `adjoint(f)(*args, d_result) -> result, cotangents of the args`; its `.text` is the source.

    Raises SyntaxError, with the line, for what is not in the language.

    >>> adjoint(_polynomial)(2.0)
    (15.0, (14.0,))
    """
    text = adjoint_text(f)
    scope = {**f.__globals__, **inspect.getclosurevars(f).nonlocals, "np": numpy}
    exec(compile(text, f"<adjoint of {f.__name__}>", "exec"), scope)
    for definition in ast.parse(text).body:
        assert isinstance(definition, ast.FunctionDef)
        scope[definition.name].text = ast.get_source_segment(text, definition)
    adjoint = scope[f"{f.__name__}_adjoint"]
    adjoint.text = text
    return adjoint


def _polynomial(x):
    y = x
    for k in range(2, 4):
        y = y * x + k
    return y
