"""Compare the text of exported programs with their tapes: names and strings of users must not become other code.

`check_exports` does so for all programs that a test exports.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import itertools
import symtable
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy

import minidiff as md
from minidiff.compiler import export
from minidiff.core.tape import Tape
from minidiff.core.types import Var

_numbers = itertools.count()
_STATEMENTS = (ast.Import, ast.Assign, ast.FunctionDef)


def read(path: Path) -> Any:
    """Import a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(exported: Any, folder: Path) -> Any:
    """Save an exported program in a folder, and import it."""
    path = folder / f"program{next(_numbers)}.py"
    exported.save(path)
    return read(path)


def same(actual: Any, expected: Any) -> None:
    """Check that trees have the same types and bits."""
    for a, e in zip(md.tree.leaves(actual), md.tree.leaves(expected), strict=True):
        assert md.typeof(a) == md.typeof(e)
        numpy.testing.assert_array_equal(a, e)
        for part in (numpy.real, numpy.imag) if md.typeof(a).dtype.kind == "c" else (numpy.real,):
            numpy.testing.assert_array_equal(numpy.signbit(part(a)), numpy.signbit(part(e)))


def check_exports(monkeypatch: Any) -> None:
    """Compare each program that is exported from now on with its tape, and check the names in its file."""
    initialize, write = export.ExportedSource.__init__, export._write

    def compare(self, *args):
        initialize(self, *args)
        compare_with_tape(self.list_text, self.name, self.tape, self.names)

    def check(jitted, *args):
        exported = write(jitted, *args)
        check_names(str(exported.code), export._public_name(jitted.name))
        return exported

    monkeypatch.setattr(export.ExportedSource, "__init__", compare)
    monkeypatch.setattr(export, "_write", check)


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


def check_names(code: str, name: str) -> None:
    """Raise ValueError unless a file consists of imports and of definitions, each once, and uses no other name.

    The last definition is the user's, by this name. No other function uses it: it may be that of a module or a builtin.
    """
    _, *statements, load, main = ast.parse(code).body
    _check(isinstance(load, ast.Assign) and isinstance(main, ast.If), "it ends with the call that runs it")
    _check(all(isinstance(node, _STATEMENTS) for node in statements), "it has imports and definitions alone")
    imports = [node.names[0].name.split(".")[0] for node in statements if isinstance(node, ast.Import)]
    functions = [node.name for node in statements if isinstance(node, ast.FunctionDef)]
    assigned = [name for node in statements if isinstance(node, ast.Assign) for name in _names_in(node, ast.Store)]
    assigned += _names_in(load, ast.Store)
    defined = [x for x in functions + assigned if x != name]
    _check(functions[-1] == name and {*Counter(functions + assigned).values()} == {1}, "it defines each name once")
    _check({*imports}.isdisjoint(defined), "it defines no name of a module")
    names = {*imports, *defined, *dir(builtins), "__class__", "__file__"}
    used = {*_globals_of(symtable.symtable(code, "", "exec"))}
    _check(used <= names - {name}, "its functions use the names that it defines")
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
        raise ValueError(f"the file is not the program: it is not so that {claim}")
