"""The rewriting of `if`, `while`, `for`, `and`, `or`, `not` and `x if c else y` as calls of `operators`.

The blocks of a statement become functions. A block's function first sets the variables that it changes, which are
those of the function around it, so that nested functions see them; it returns those that are read later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from minidiff.syntax.jumps import always_jumps, blocks_of, has_jumps, is_end_of_loop, without_jumps
from minidiff.syntax.names import (
    FUNCTIONS,
    bound_names,
    changed_names,
    changed_object,
    live_at_head,
    live_names,
    parse_at,
    read_names,
    root_of,
    walk_scope,
)

_BINDS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_SUSPENDS = (ast.Yield, ast.YieldFrom, ast.Await)


def tuple_text(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names).strip()})"


class Rewriter(ast.NodeTransformer):
    """The rewriting of a function, and of those nested in it; `ag` is the name of the operators."""

    def __init__(self, definition: ast.FunctionDef, ag: str, class_name: str):
        self.ag, self.class_name, self.numbers = ag, class_name, dict[str, int]()
        self.used = {getattr(x, "id", getattr(x, "arg", "")) for x in ast.walk(definition)}
        self.local: set[str] = set()  # the variables of the function around a statement
        self.shared: set[str] = set()  # of these, those that nested functions read or assign
        self.assigned: set[str] = set()  # of these, those that nested functions assign
        self.maybe: set[str] = set()  # variables that may have no value
        self.bound: set[str] = set()  # variables that have one for certain
        self.declared: list[ast.stmt] = []  # statements `global` and `nonlocal`
        self.first = ""  # the first argument
        self.function(definition)

    def new_name(self, name: str) -> str:
        """Return a name that the function does not use yet."""
        if name in self.used:
            self.numbers[name] = self.numbers.get(name, 1) + 1
            return self.new_name(f"{name}_{self.numbers[name]}")
        self.used.add(name)
        return name

    def new_flag(self, name: str) -> str:
        return self.new_name(f"{self.ag}_{name}")

    # ------------------------------------------------ functions

    def function(self, f: ast.FunctionDef) -> None:
        """Rewrite the body of a function, if it runs at once."""
        if any(isinstance(x, _SUSPENDS) for x in walk_scope(*f.body)):
            return
        outside, end = dict(vars(self)), f.body[-1]
        arguments = [x.arg for x in ast.walk(f.args) if isinstance(x, ast.arg)]
        inner = [x for s in f.body for x in ast.walk(s) if isinstance(x, FUNCTIONS)]
        self.declared = [x for x in walk_scope(*f.body) if isinstance(x, (ast.Global, ast.Nonlocal))]
        self.first = next((x.arg for x in [*f.args.posonlyargs, *f.args.args]), "")
        body = [_TestInBody().visit(s) for s in f.body]
        if any(has_jumps(s) for s in body if not isinstance(s, ast.Return)):
            result = self.new_flag("result")
            falls = [] if always_jumps(body) else parse_at("return", end)
            body = without_jumps([*body, *falls], result, self.new_flag)
            body += parse_at(f"return {result}", end)
        self.local = {*arguments, *bound_names(*body)} - {x for s in self.declared for x in s.names}  # type: ignore
        nodes = [x for f in inner for x in ast.walk(f)]
        changes = {root_of(changed_object(x)) for x in nodes}
        changes.update(name for x in nodes if isinstance(x, ast.Nonlocal) for name in x.names)
        self.assigned, self.shared = self.local & changes, self.local & (changes | read_names(*inner))
        self.bound = {*self.bound - self.local, *arguments}
        f.body = [*self.declared, *self.unbound(body, self.local), *self.block(body, set())]
        vars(self).update(outside)

    def visit_FunctionDef(self, f: ast.FunctionDef) -> ast.FunctionDef:
        f.args, f.decorator_list = self.visit(f.args), list(map(self.visit, f.decorator_list))
        self.function(f)
        return f

    def visit_ClassDef(self, s: ast.ClassDef) -> ast.ClassDef:
        return s  # its methods are not functions of this scope

    visit_AsyncFunctionDef = visit_ClassDef  # type: ignore[assignment]

    def unbound(self, body: Sequence[ast.stmt], names: set[str]) -> list[ast.stmt]:
        """Return statements that say of these variables, if branches or loops assign them, that they have no value."""
        bound, needed = {*self.bound}, dict[str, ast.stmt]()
        for s in body:
            bound |= bound_names(s) if isinstance(s, _BINDS) else set()
            if [*blocks_of(s)]:
                needed.update((x, s) for x in sorted((self.changes_of(s) & names) - bound - {*needed}))
        self.maybe = self.maybe - names | {*needed}
        return [x for name, s in needed.items() for x in parse_at(f"{name} = {self.ag}.Undefined({name!r})", s)]

    def block(self, body: Sequence[ast.stmt], after: set[str]) -> list[ast.stmt]:
        """Rewrite statements, after which the names `after` are live."""
        live = [after]
        for s in reversed(body[1:]):
            live.append(live_names([s], live[-1]))
        return [x for s, names in zip(body, reversed(live)) for x in self.statement(s, names | self.shared)]

    def statement(self, s: Any, after: set[str]) -> list[ast.stmt]:
        if isinstance(s, ast.If):
            return self.branches(s, after)
        if isinstance(s, (ast.While, ast.For)):
            return self.loop(s, after)
        if isinstance(s, ast.Delete) and all(isinstance(x, ast.Name) for x in s.targets):
            names = bound_names(s)
            self.bound, self.maybe = self.bound - names, self.maybe | names
            return [x for name in names for x in parse_at(f"{name} = {self.ag}.Undefined({name!r})", s)]
        blocks = [(owner, part, getattr(owner, part)) for owner, part in blocks_of(s)]
        inside, bound = after | read_names(s), self.bound
        for owner, part, _ in blocks:
            setattr(owner, part, [])
        s = self.visit(s)
        for owner, part, statements in blocks:  # each may be the last one that runs, if there is an exception
            self.bound = bound
            setattr(owner, part, self.block(statements, inside))
        is_bound = isinstance(s, _BINDS) and getattr(s, "value", True) is not None  # x: float binds nothing
        self.bound = bound | (bound_names(s) if is_bound else set())
        return [s]

    # ------------------------------------------------ branches and loops

    def changes_of(self, *body: ast.AST) -> set[str]:
        """Return the variables that statements may change."""
        return (changed_names(*body) & self.local) | self.assigned

    def refusal(self, s: ast.AST) -> str:
        """Return what a statement does that a traced program cannot do, and where; an empty string if there is none."""
        for x in walk_scope(s):
            changed, line = changed_object(x), f"line {getattr(x, 'lineno', 0)}"
            if isinstance(x, ast.Raise):
                return f"{line} raises an exception"
            if isinstance(x, ast.Try) and x.handlers:
                return f"{line} handles exceptions"
            if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load) and x.id not in self.local:
                return f"{line} assigns {x.id}, which is not a local variable"
            is_attribute = any(isinstance(y, ast.Attribute) for y in ast.walk(changed)) if changed else False
            if changed and (is_attribute or root_of(changed) not in self.local):
                return f"{line} changes {ast.unparse(changed)}, which is not a local variable"
        return ""

    def branches(self, s: ast.If, after: set[str]) -> list[ast.stmt]:
        changed, refusal, s.test = self.changes_of(s), self.refusal(s), self.visit(s.test)
        inputs = sorted(changed & (live_names(s.body, after) | live_names(s.orelse, after)))
        outputs, bound = sorted(changed & after), self.bound
        then = self.block_function("then", s, inputs, s.body, outputs, after)
        bound, self.bound = self.bound, bound
        other = self.block_function("orelse", s, inputs, s.orelse, outputs, after)
        self.bound = self.bound & bound
        return [then, other, self.call("if_", s.test, s, [then, other], inputs, outputs, refusal)]

    def loop(self, s: Any, after: set[str]) -> list[ast.stmt]:
        refusal, bound, before, stops, stop = self.refusal(s), self.bound, [], [], ""
        if is_end_of_loop(s.body[-1]):
            stop = self.new_flag("stop")
            stops, before = [stop], parse_at(f"{stop} = False", s)
            s.body[-1:] = parse_at(f"{stop} = {self.ag}.truth(__part__)", s.body[-1], s.body[-1].test)
            self.local.add(stop)
        carried = sorted(self.changes_of(s) & live_at_head(s, after | {*stops}))
        live, test, item = after | {*carried}, [], f"{self.ag}_item"
        if isinstance(s, ast.For):
            first, operator = s.iter, "for_"
            s.body = [*parse_at(f"__part__ = {item}", s, s.target), *s.body]
            if isinstance(first, ast.Call) and getattr(first.func, "id", "") == "range" and not first.keywords:
                first = self.apply("range", first, [first.func, *first.args])
            first = self.visit(first)
        else:
            item, operator = "", "while_"
            answer = parse_at(f"return {f'not {stop} and ' if stop else ''}__part__", s, s.test)
            test = [self.block_function("test", s, carried, answer, None, live)]
            first = parse_at(test[0].name, s)[0].value
        self.bound = bound
        body = self.block_function("body", s, carried, s.body, carried, live, item)
        self.bound = bound
        numbers = tuple(carried.index(x) for x in stops) if item else ()
        return [*before, *test, body, self.call(operator, first, s, [body], carried, carried, refusal, numbers)]

    def block_function(
        self, kind: str, s: Any, inputs: list, body: Sequence, outputs: list | None, after: set, item: str = ""
    ) -> Any:
        """Return the function of a block, which maps the values of its inputs to those of its outputs."""
        values = f"{self.ag}_values"
        head = f"nonlocal {', '.join(inputs)}\n{tuple_text(inputs)} = {values}" if inputs else ""
        (f,) = parse_at(f"def {self.new_name(f'{kind}_{s.lineno}')}({values}, {item}): pass", s)
        maybe, local = self.maybe, bound_names(*body) - {*inputs}
        self.bound = self.bound - local
        unbound = self.unbound(body, local)
        end = [] if outputs is None else parse_at(f"return {tuple_text(outputs)}", s)
        f.body = [*self.declared, *parse_at(head, s), *unbound, *self.block(body, after), *end]
        self.maybe = maybe
        return f

    def call(self, operator: str, first: Any, s: Any, functions: list, inputs: list, outputs: list, *more: Any) -> Any:
        """Return the statement that applies an operator to the functions of blocks."""
        arguments = [*(f.name for f in functions), tuple_text(inputs), repr(tuple(outputs))]
        while more and not more[-1]:
            more = more[:-1]
        target = f"{tuple_text(outputs)} = " if outputs else ""
        text = f"{target}{self.ag}.{operator}(__part__, {', '.join([*arguments, *map(repr, more)])})"
        return parse_at(text, s, first)[0]

    # ------------------------------------------------ expressions

    def visit_Name(self, x: ast.Name) -> ast.expr:
        return self.apply("load", x, [x]) if isinstance(x.ctx, ast.Load) and x.id in self.maybe - self.bound else x

    def visit_Attribute(self, x: ast.Attribute) -> ast.expr:
        if self.class_name and x.attr.startswith("__") and not x.attr.endswith("__"):
            x.attr = f"_{self.class_name.lstrip('_')}{x.attr}"
        return self.generic_visit(x)  # type: ignore[return-value]

    def visit_Call(self, x: ast.Call) -> ast.expr:
        if isinstance(x.func, ast.Name) and x.func.id == "super" and not x.args:
            x.args = [ast.copy_location(ast.Name(name, ast.Load()), x) for name in ("__class__", self.first)]
        return self.generic_visit(x)  # type: ignore[return-value]

    def visit_UnaryOp(self, x: ast.UnaryOp) -> ast.expr:
        self.generic_visit(x)
        return self.apply("not_", x, [x.operand]) if isinstance(x.op, ast.Not) else x

    def visit_BoolOp(self, x: ast.BoolOp) -> ast.expr:
        if _assigns(x):
            return self.generic_visit(x)  # type: ignore[return-value]
        cheap = all(map(_is_cheap, x.values[1:]))
        names = ("both", "either") if cheap else ("and_", "or_")
        first, *others = map(self.visit, x.values)
        return self.apply(names[isinstance(x.op, ast.Or)], x, [first, *map(_delayed, others)])

    def visit_IfExp(self, x: ast.IfExp) -> ast.expr:
        self.generic_visit(x)
        return x if _assigns(x) else self.apply("if_expression", x, [x.test, _delayed(x.body), _delayed(x.orelse)])

    def visit_Compare(self, x: ast.Compare) -> ast.expr:
        self.generic_visit(x)
        if len(x.ops) == 1 or _assigns(x):
            return x
        links: list[ast.expr] = []
        for op, right in zip(x.ops, x.comparators):
            (link,) = parse_at("lambda x, y: x < y", x)
            link.value.body.ops = [op]
            links += [link.value, _delayed(right)]
        return self.apply("compare", x, [x.left, *links])

    def apply(self, operator: str, x: ast.AST, arguments: list[ast.expr]) -> ast.expr:
        (statement,) = parse_at(f"{self.ag}.{operator}()", x)
        statement.value.args = arguments
        return statement.value


def _assigns(x: ast.AST) -> bool:
    """Return whether an expression assigns a variable, which a function in its place would not."""
    return any(isinstance(y, ast.NamedExpr) for y in ast.walk(x))


def _is_cheap(x: ast.expr) -> bool:
    """Return whether `and` computes an expression anyway: it has no index, which may be out of range, and no call."""
    calls = [y for y in ast.walk(x) if isinstance(y, (ast.Subscript, ast.Call))]
    return all(isinstance(y, ast.Call) and getattr(y.func, "id", "abs") in ("abs", "len") for y in calls)


def _delayed(x: ast.expr) -> ast.expr:
    """Return a function without arguments that evaluates an expression."""
    return parse_at("lambda: __part__", x, x)[0].value


class _TestInBody(ast.NodeTransformer):
    """Loops whose test assigns a variable test it in their body."""

    def visit_While(self, s: ast.While) -> ast.While:
        self.generic_visit(s)
        if _assigns(s.test):
            (first,) = parse_at("if not __part__: break", s, s.test)
            first.body = [*s.orelse, *first.body]
            s.test, s.orelse, s.body = ast.copy_location(ast.Constant(True), s), [], [first, *s.body]
        return s
