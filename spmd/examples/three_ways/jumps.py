"""Programs without jumps: early returns, breaks and continues become flags and branches.

The adjoint goes back through a program, so each block must have one end. The statements after a jump move into the
other branch, or into a branch on a flag; a loop ends by `if flag: break`, which is its last statement.

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

Names = str | tuple  # a name, or a tuple of names and tuples
JUMPS = (ast.Return, ast.Break, ast.Continue)
LOOPS = (ast.For, ast.While)


def without_jumps(body: Sequence[ast.stmt], result: Names, new_name: Callable[[str], str]) -> list[ast.stmt]:
    """Return statements that assign the returned values to `result`, and jump only at the ends of loops."""
    rewriter = _Rewriter(result, new_name)
    lowered = rewriter.block(body)
    if rewriter.returned in rewriter.read:
        lowered = [*_assign(rewriter.returned, "False"), *lowered]
    return rewriter.without_unread_flags(lowered)


def returns(body: Sequence[ast.stmt]) -> bool:
    """Return whether each way through some statements ends with `return`."""
    for s in body:
        endless = isinstance(s, ast.While) and isinstance(s.test, ast.Constant) and s.test.value
        if isinstance(s, ast.While) and endless and not any(isinstance(x, ast.Break) for x in jumps(s.body)):
            return True
        if isinstance(s, ast.Return):
            return True
        if isinstance(s, ast.If) and returns(s.body) and returns(s.orelse):
            return True
    return False


def jumps(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the jumps out of some statements: of loops among them, only returns."""
    for s in body:
        if isinstance(s, JUMPS):
            yield s
        elif isinstance(s, ast.If):
            yield from jumps([*s.body, *s.orelse])
        elif isinstance(s, LOOPS):
            yield from (x for x in jumps(s.body) if isinstance(x, ast.Return))


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Return whether each way through some statements ends with a jump."""
    return any(isinstance(s, JUMPS) or (isinstance(s, ast.If) and _ends(s.body) and _ends(s.orelse)) for s in body)


def is_end_of_loop(s: ast.stmt) -> bool:
    """Return whether a statement is `if condition: break`."""
    return isinstance(s, ast.If) and len(s.body) == 1 and isinstance(s.body[0], ast.Break) and not s.orelse


def _assign(name: str, value: str) -> list[ast.stmt]:
    return ast.parse(f"{name} = {value}").body


def text_of(names: Names, write: Callable[[str], str] = str) -> str:
    """Return the text of a tuple of names, each as `write` writes it."""
    if isinstance(names, str):
        return write(names)
    inside = ", ".join([text_of(x, write) for x in names])
    return f"({inside},)" if len(names) == 1 else f"({inside})"


class _Rewriter:
    def __init__(self, result: Names, new_name: Callable[[str], str]):
        self.result, self.new_name = result, new_name
        self.returned, self.left, self.skipped = new_name("returned"), "", ""
        self.flags = {self.returned}
        self.read: set[str] = set()

    def without_unread_flags(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return statements without those that set a flag that nothing reads."""
        result: list[ast.stmt] = []
        for s in body:
            if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) in self.flags - self.read:
                continue
            for part in ("body", "orelse"):
                if isinstance(s, (ast.If, *LOOPS)) and getattr(s, part):
                    setattr(s, part, self.without_unread_flags(getattr(s, part)) or [ast.Pass()])
            result.append(s)
        return result

    def flags_of(self, body: Sequence[ast.stmt]) -> list[str]:
        flags = {ast.Return: self.returned, ast.Break: self.left, ast.Continue: self.skipped}
        return [*dict.fromkeys(flags[type(s)] for s in jumps(body))]

    def block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of a block without jumps."""
        lowered: list[ast.stmt] = []
        for k, s in enumerate(body):
            rest = body[k + 1 :]
            if isinstance(s, JUMPS):
                return [*lowered, *self.jump(s)]
            if isinstance(s, ast.If) and any(jumps([s])):
                ends = _ends(s.body), _ends(s.orelse)
                after = rest if any(ends) else []  # what comes after it moves into the branch that goes on
                branches = [[*b, *([] if end else after)] for b, end in zip((s.body, s.orelse), ends)]
                flags = [] if any(ends) else self.flags_of([s])
                then, other = map(self.block, branches)
                lowered.append(ast.If(s.test, then or [ast.Pass()], other))
                return lowered if any(ends) else [*lowered, *self.unless(flags, rest)]
            if isinstance(s, LOOPS) and any(isinstance(x, JUMPS) for x in ast.walk(s)):
                lowered += self.loop(s)
                if any(jumps([s])):
                    return [*lowered, *self.unless(self.flags_of([s]), rest)]
            else:
                lowered.append(s)
        return lowered

    def unless(self, flags: list[str], rest: Sequence[ast.stmt]) -> list[ast.stmt]:
        if not rest:
            return []
        self.read.update(flags)
        condition = ast.parse(" and ".join(f"not {flag}" for flag in flags), mode="eval").body
        return [ast.If(condition, self.block(rest), [])]

    def jump(self, s: ast.stmt) -> list[ast.stmt]:
        if isinstance(s, (ast.Break, ast.Continue)):
            return _assign(self.left if isinstance(s, ast.Break) else self.skipped, "True")
        assert isinstance(s, ast.Return) and s.value
        target = ast.parse(f"{text_of(self.result)} = 0").body[0].targets[0]  # type: ignore[attr-defined]
        return [ast.copy_location(ast.Assign([target], s.value), s), *_assign(self.returned, "True")]

    def loop(self, s: ast.For | ast.While) -> list[ast.stmt]:
        """Return a loop whose only jump is at its end, after what sets its flag to False."""
        if is_end_of_loop(s.body[-1]) and not any(isinstance(x, JUMPS) for y in s.body[:-1] for x in ast.walk(y)):
            return [s]
        outer, (self.left, self.skipped) = (self.left, self.skipped), map(self.new_name, ("left", "skipped"))
        self.flags |= {self.left, self.skipped}
        stops = [flag for flag in self.flags_of(s.body) if flag != self.skipped]
        self.read.update(stops)
        body = [*_assign(self.skipped, "False"), *self.block(s.body)]
        body += ast.parse(f"if {' or '.join(stops)}: break").body if stops else []
        before = _assign(self.left, "False") if self.left in stops else []
        self.left, self.skipped = outer
        loop = copy.copy(s)
        loop.body = body
        return [*before, loop]
