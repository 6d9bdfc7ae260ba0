"""Programs without jumps: early returns, breaks and continues become flags and branches.

Each block then has one end. The statements after a jump move into the other branch, or into a branch on a flag; a loop
ends by `if flag: break`, which is its last statement.

>>> body = ast.parse("for k in x:\\n    if k > 1: continue\\n    if k > 0: return k\\n    y = k\\nreturn y").body
>>> print(*map(ast.unparse, without_jumps(body, "result", lambda name: name)), sep="\\n")
returned = False
for k in x:
    if k > 1:
        pass
    elif k > 0:
        result = k
        returned = True
    else:
        y = k
    if returned:
        break
if not returned:
    result = y
    returned = True

Source: C. Böhm, G. Jacopini, "Flow diagrams, Turing machines and languages with only two formation rules", 1966.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minidiff.syntax.names import LOOPS, parse_at, walk_scope

JUMPS = (ast.Return, ast.Break, ast.Continue)


def without_jumps(body: Sequence[ast.stmt], result: str, new_name: Callable[[str], str]) -> list[ast.stmt]:
    """Return statements that assign the returned values to `result`, and jump only at the ends of loops."""
    rewriter = _Rewriter(result, new_name)
    lowered = rewriter.block(body)
    if rewriter.returned in rewriter.read:
        lowered = [*parse_at(f"{rewriter.returned} = False", body[0]), *lowered]
    return rewriter.without_unread_flags(lowered)


def blocks_of(s: ast.AST) -> Iterator[tuple[Any, str]]:
    """Yield the owner and the field of each block of a statement, those of handlers and cases included."""
    if isinstance(s, (ast.stmt, ast.ExceptHandler, ast.match_case)) and not isinstance(
        s, (ast.FunctionDef, ast.ClassDef)
    ):
        yield from ((s, part) for part in ("body", "orelse", "finalbody") if getattr(s, part, None))
        for x in [*getattr(s, "handlers", []), *getattr(s, "cases", [])]:
            yield from blocks_of(x)


def jumps(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the jumps out of some statements: of loops among them, only returns."""
    for s in body:
        if isinstance(s, JUMPS):
            yield s
        for owner, part in blocks_of(s):
            in_loop = isinstance(s, LOOPS) and part == "body"
            yield from (x for x in jumps(getattr(owner, part)) if isinstance(x, ast.Return) or not in_loop)


def has_jumps(s: ast.AST) -> bool:
    """Return whether a statement has jumps in it, such as those to the `else` of a loop."""
    return any(isinstance(x, JUMPS) or (isinstance(x, LOOPS) and x.orelse) for x in walk_scope(s))


def always_jumps(body: Sequence[ast.stmt]) -> bool:
    """Return whether each way through some statements ends with a jump, or an exception, or never."""
    for s in body:
        if isinstance(s, ast.While) and isinstance(s.test, ast.Constant) and s.test.value:
            if not any(isinstance(x, ast.Break) for x in jumps(s.body)):
                return True
        elif isinstance(s, (*JUMPS, ast.Raise)) or (
            isinstance(s, ast.If) and all(map(always_jumps, (s.body, s.orelse)))
        ):
            return True
    return False


def is_end_of_loop(s: ast.stmt) -> bool:
    """Return whether a statement is `if condition: break`."""
    return isinstance(s, ast.If) and len(s.body) == 1 and isinstance(s.body[0], ast.Break) and not s.orelse


class _Rewriter:
    def __init__(self, result: str, new_name: Callable[[str], str]):
        self.result, self.new_name = result, new_name
        self.returned, self.left, self.skipped = new_name("returned"), "", ""
        self.flags = {self.returned}
        self.read: set[str] = set()

    def without_unread_flags(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return statements without those that set a flag that nothing reads."""
        for owner, part in (x for s in body for x in blocks_of(s)):
            setattr(owner, part, self.without_unread_flags(getattr(owner, part)))
            if part == "body" and not owner.body:
                owner.body = [ast.Pass()]
        unread = self.flags - self.read
        return [s for s in body if not (isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) in unread)]

    def flags_of(self, body: Sequence[ast.stmt]) -> list[str]:
        flags = {ast.Return: self.returned, ast.Break: self.left, ast.Continue: self.skipped}
        return [*dict.fromkeys(flags[type(s)] for s in jumps(body))]

    def block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of a block without jumps."""
        for k, s in enumerate(body):
            if isinstance(s, JUMPS):
                return [*body[:k], *self.jump(s)]
            if has_jumps(s):
                return [*body[:k], *self.lower(s, body[k + 1 :])]
        return [*body]

    def lower(self, s: Any, rest: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return a statement that has jumps, and those after it, without jumps."""
        if isinstance(s, LOOPS):
            return self.loop(s, rest)
        s, flags = copy.deepcopy(s), self.flags_of([s])
        if isinstance(s, ast.If) and (always_jumps(s.body) or always_jumps(s.orelse)):
            for part in ("body", "orelse"):  # what comes after it moves into the branch that goes on
                block = getattr(s, part)
                setattr(s, part, self.block(block if always_jumps(block) else [*block, *rest]))
            s.body = s.body or [ast.Pass()]
            return [s]
        for owner, part in [*blocks_of(s)]:
            block = getattr(owner, part)
            is_else_of_try = part == "orelse" and hasattr(s, "handlers")
            setattr(owner, part, self.unless(self.flags_of(s.body) if is_else_of_try else [], block))
        return [s, *self.unless(flags, rest)]

    def unless(self, flags: list[str], rest: Sequence[ast.stmt]) -> list[ast.stmt]:
        if not (flags and rest):
            return self.block(rest)
        self.read.update(flags)
        (branch,) = parse_at(f"if {' and '.join(f'not {flag}' for flag in flags)}: pass", rest[0])
        branch.body = self.block(rest)
        return [branch]

    def jump(self, s: Any) -> list[ast.stmt]:
        if isinstance(s, (ast.Break, ast.Continue)):
            return parse_at(f"{self.left if isinstance(s, ast.Break) else self.skipped} = True", s)
        value = s.value or ast.copy_location(ast.Constant(None), s)
        return parse_at(f"{self.result} = __part__\n{self.returned} = True", s, value)

    def loop(self, s: Any, rest: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return a loop whose only jump is at its end, after what sets its flag to False, and what comes after it."""
        returns = self.flags_of([ast.While(s, s.body, [])])
        if not s.orelse and is_end_of_loop(s.body[-1]) and not any(map(has_jumps, s.body[:-1])):
            return [s, *self.block(rest)]
        outer, (self.left, self.skipped) = (self.left, self.skipped), map(self.new_name, ("left", "skipped"))
        left, skipped = self.left, self.skipped
        self.flags |= {left, skipped}
        loop, stops = copy.copy(s), [flag for flag in self.flags_of(s.body) if flag != skipped]
        self.read.update(stops)
        loop.body, loop.orelse = [*parse_at(f"{skipped} = False", s), *self.block(s.body)], []
        loop.body += parse_at(f"if {' or '.join(stops)}: break", s) if stops else []
        self.left, self.skipped = outer
        otherwise = [*s.orelse]
        if s.orelse and left in stops:
            otherwise = parse_at(f"if not {left}: pass", s)
            otherwise[0].body = s.orelse
        before = parse_at(f"{left} = False", s) if left in stops else []
        return [*before, loop, *self.unless(returns, [*otherwise, *rest])]
