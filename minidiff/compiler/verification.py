"""Compare the text of exported programs with their tapes: names and strings of users must not become other code."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from minidiff.core.tape import Tape
from minidiff.core.types import Var

_STATEMENTS = (ast.Import, ast.Assign, ast.FunctionDef)


def compare_with_tape(text: str, name: str, tape: Tape, names: Mapping[Any, str]) -> None:
    """Raise ValueError unless a text is one function with a statement for each equation, of its operands and results.

    `names` are those of variables.
    """
    (function,) = ast.parse(text).body
    _check(isinstance(function, ast.FunctionDef) and function.name == name, f"{name} is a function")
    assert isinstance(function, ast.FunctionDef)
    _check([a.arg for a in function.args.args] == [names[v] for v in tape.inputs], f"the arguments of {name}")
    *statements, last = [node for node in function.body if not isinstance(node, ast.Delete)]
    _check(len(statements) == len(tape.equations), f"{name} has a statement for each equation")
    values = {names[v] for v in [*tape.inputs, *[v for eqn in tape.equations for v in eqn.outputs]]}
    for node, eqn in zip(statements, tape.equations):
        loaded, stored = _names_in(node, ast.Load), _names_in(node, ast.Store)
        _check(stored == [names[v] for v in eqn.outputs], f"{ast.unparse(node)} computes the results of {eqn}")
        operands = {names[a] for a in eqn.inputs if isinstance(a, Var)}
        _check(operands == values.intersection(loaded), f"{ast.unparse(node)} has the operands of {eqn}")
    results = [names[a] for a in tape.outputs if isinstance(a, Var)]
    returned = [name for name in _names_in(last, ast.Load) if name in values]
    _check(isinstance(last, ast.Return) and results == returned, f"{name} returns its results")


def check_names(code: str, defined: Sequence[str]) -> None:
    """Raise ValueError unless a file consists of imports and of these definitions, each once, and uses no other name.

    The last definition is the user's. No other function uses its name, which may be that of a module or a builtin.
    """
    _, *statements, load, main = ast.parse(code).body
    _check(isinstance(load, ast.Assign) and isinstance(main, ast.If), "it ends with the call that runs it")
    _check(all(isinstance(node, _STATEMENTS) for node in statements), "it has imports and definitions alone")
    imports = [node.names[0].name.split(".")[0] for node in statements if isinstance(node, ast.Import)]
    functions = [node.name for node in statements if isinstance(node, ast.FunctionDef)]
    assigned = [name for node in statements if isinstance(node, ast.Assign) for name in _names_in(node, ast.Store)]
    assigned += _names_in(load, ast.Store)
    _check(Counter(functions + assigned) == Counter(defined), "it defines the program's names")
    _check({*imports}.isdisjoint(defined[:-1]), "it defines no name of a module")
    names = {*imports, *defined[:-1], *dir(builtins), "__class__", "__file__"}
    used = {*_globals_of(symtable.symtable(code, "", "exec"))}
    _check(used <= names - {defined[-1]}, "its functions use the names that it defines")
    nodes = [node for node in (*statements, load, main) if not isinstance(node, ast.FunctionDef)]
    used = {name for node in nodes for name in _names_in(node, ast.Load)}
    _check(used <= names, "it uses the names that it defines")


def _names_in(node: ast.AST, context: type) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)]


def _globals_of(table: symtable.SymbolTable) -> Iterator[str]:
    """Return the names that the functions of a file look up outside of all functions."""
    for child in table.get_children():
        yield from (s.get_name() for s in child.get_symbols() if s.is_global() and s.is_referenced())
        yield from _globals_of(child)


def _check(holds: bool, claim: str) -> None:
    if not holds:
        raise ValueError(f"export: the file is not the program: it is not so that {claim}; please report this")
