"""`autograph`: a function whose `if`, `while` and `for` take traced conditions."""

from __future__ import annotations
import __future__

import ast
import inspect
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from minidiff.errors import PrintedText
from minidiff.syntax.operators import Operators
from minidiff.syntax.statements import Rewriter


def autograph(f: Callable | None = None, *, max_steps: int | None = None) -> Callable:
    """Return `f` with its `if`, `while` and `for` as operations where a condition is traced, so that `jit` takes them.

    A condition that is known runs Python's statement: outside of `jit` and `vmap`, of a flag, of `x is None`. A traced
    one becomes `cond`, `while_loop`, `fori_loop` or `scan`, and so do `and`, `or`, `not`, `a < b < c`, `x if c else y`,
    `break`, `continue`, early `return`, and lists that a loop over an array's rows appends to. Functions that are
    nested in `f` are rewritten, those that it calls are not: decorate these, too. The attribute `source` of the result
    is the rewritten text.

    Args:
        f: a function that `def` defines in a file or a notebook. Without it, the result is a decorator.
        max_steps: the largest number of steps of `while`, and of `for` over a range of unknown length, as for
            `while_loop`. Reverse mode of compiled loops needs it.

    Returns:
        A function of the same arguments, also if f is a method.

    Raises:
        TypeError: for a generator, a coroutine, or a function without source; when the result is traced, for a variable
            with two types, or a statement that cannot be an operation, such as `raise`. It names the line.
        UnboundLocalError: for a variable that only one branch assigns.

    >>> from minidiff import autograph, grad, jit
    >>> @jit
    ... @autograph(max_steps=100)
    ... def root(a):
    ...     x = a
    ...     while abs(x * x - a) > 1e-9:
    ...         x = (x + a / x) / 2
    ...     return x
    >>> print(root(4.0).round(9), grad(root)(4.0).round(9))
    2.0 0.25

    Source: D. Moldovan et al., "AutoGraph: Imperative-style coding with graph-based performance", 2019.
    """
    if f is None:
        return lambda f: autograph(f, max_steps=max_steps)
    if isinstance(f, MethodType):
        return MethodType(autograph(f.__func__, max_steps=max_steps), f.__self__)
    if isinstance(getattr(f, "source", None), PrintedText):  # it is rewritten already
        f = f.__wrapped__  # type: ignore[attr-defined]
    definition = _definition_of(f)
    names = {getattr(x, "id", getattr(x, "arg", "")) for x in ast.walk(definition)}
    ag = next(name for k in range(99) if (name := f"ag{k or ''}") not in names)
    owner = f.__qualname__.rpartition(".")[0].rpartition(".")[2]
    Rewriter(definition, ag, "" if owner == "<locals>" else owner)
    source = ast.unparse(definition)
    outer: Any = ast.parse(f"def outer({', '.join([ag, *f.__code__.co_freevars])}): pass")
    outer.body[0].body = [definition]
    flags = f.__code__.co_flags & __future__.annotations.compiler_flag
    code = compile(ast.fix_missing_locations(outer), f.__code__.co_filename, "exec", flags, dont_inherit=True)
    for _ in range(2):
        code = next(x for x in code.co_consts if isinstance(x, CodeType))
    cells = {ag: CellType(Operators(max_steps, lambda name: name.startswith(f"{ag}_")))}
    cells.update(zip(f.__code__.co_freevars, f.__closure__ or ()))
    g: Any = FunctionType(code, f.__globals__, f.__name__, f.__defaults__, tuple(cells[x] for x in code.co_freevars))
    g.__kwdefaults__, g.__dict__ = f.__kwdefaults__, {**f.__dict__, "__wrapped__": f}
    for name in ("__doc__", "__qualname__", "__module__", "__annotations__"):
        setattr(g, name, getattr(f, name))
    g.source = PrintedText(source)
    return g


def _definition_of(f: Any) -> ast.FunctionDef:
    """Parse the source of a function, with the numbers of its lines and columns in its file."""
    if type(f) is not FunctionType or f.__name__ == "<lambda>" or hasattr(f, "__wrapped__"):
        raise TypeError(
            f"autograph takes a function that `def` defines, got {f!r:.80}; put it next to the function: "
            "md.jit(md.autograph(f)), or @md.jit above @md.autograph"
        )
    try:
        lines, first = inspect.getsourcelines(f)
    except OSError as error:
        raise TypeError(
            f"autograph reads the source of {f.__name__}, and finds none: functions that a console or exec defines "
            "have no file; write it to a module"
        ) from error
    indented = lines[0][0].isspace()
    tree = ast.parse("if 1:\n" + "".join(lines) if indented else "".join(lines))
    ast.increment_lineno(tree, first - 1 - indented)
    definition: Any = tree.body[0].body[0] if indented else tree.body[0]  # type: ignore[attr-defined]
    suspends = isinstance(definition, ast.AsyncFunctionDef) or inspect.isgeneratorfunction(f)
    if suspends or not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"autograph takes no generator and no coroutine: {f.__name__}, line {first}")
    definition.decorator_list, definition.returns = [], None
    return definition
