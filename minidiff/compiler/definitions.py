"""Python objects as text: functions by their source, with all that they use."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import math
import re
import sys
import types
import unicodedata
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy

from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Tracer
from minidiff.errors.location import warn_here

#: Parts of functions that bind a name, if they have one.
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
#: Functions of these packages are imported; others, ours and users', are written out.
_IMPORTED = frozenset({*sys.stdlib_module_names, "numpy", "scipy"})
_OURS = ("minidiff.", "collectives.", "spmd.")
#: Ours that need the engine: a file of NumPy calls has no types, and no interpreters.
_ENGINE = ("minidiff.core.", "minidiff.errors.", "minidiff.debug.", "minidiff.inputs.")
#: Ours -> what exported programs call in their place.
_INSTEAD: dict[Any, Any] = {warn_here: warnings.warn}
_LONG = (numpy.longdouble, numpy.clongdouble)
_LITERALS = (type(None), bool, int, str, bytes, types.EllipsisType)
_COLLECTIONS: dict[type, str] = {tuple: "({},)", list: "[{}]", set: "{{{}}}", frozenset: "frozenset([{}])"}
_UFUNCS = ("numpy", "numpy.linalg", "scipy.special")  # where a ufunc may be, which does not say


class NotWrittenError(TypeError):
    """An object has no text: the message says which, and why."""


class Definitions:
    """Definitions of the functions that a program calls, each once, in the order in which Python needs them.

    `text(value)` is an expression for a value; it adds the definitions, imports (`modules`) and `constants`, arrays by
    name, that the expression needs. `renames` has names that the program assigns itself, by the names
    that functions of this package call them. No other object has one of them, or a name in `hidden`.
    """

    def __init__(self, renames: Mapping[str, str], hidden: Collection[str] = ()):
        self.renames = renames
        self.hidden = {*renames.values(), *hidden}
        self.aliases: dict[str, str] = {}
        self.first: dict[str, str] = {}  # aliases of modules and builtins
        self.texts: dict[str, str] = {}
        self.modules: dict[str, None] = {"numpy": None}
        self.constants: dict[str, numpy.ndarray] = {}
        self._names: dict[int, tuple[str, Any]] = {}  # by id, with the object, which keeps the id

    def text(self, value: Any, name: str = "") -> str:
        """Return an expression for a value, with a `name` for a function without one. Raises NotWrittenError."""
        return ast.unparse(self.expression(value, self.hidden, name))

    def expression(self, value: Any, hidden: Collection[str], name: str = "") -> ast.expr:
        """Return a value's expression as a syntax tree, where the names in `hidden` have other meanings."""
        return _Unhide(self, hidden).visit(ast.parse(self._text(value, name), mode="eval").body)

    def alias(self, name: str, hidden: Collection[str]) -> str:
        """Return another name for a module, a builtin, a constant or a definition of the program."""
        if name not in self.aliases or self.aliases[name] in hidden:
            self.aliases[name] = other = self._name(object(), f"_{name.strip('_')}", hidden)
            if name in self.constants:
                self.constants[other] = self.constants[name]
            elif name not in self.texts:
                del self.texts[other]
                self.first[other] = f"{other} = {name}"
            elif self.texts[name]:
                self.texts[other] = f"{other} = {name}"
            else:
                raise NotWrittenError(f"a function that it calls has a variable named {name}, too: rename the variable")
        return self.aliases[name]

    def _text(self, value: Any, name: str) -> str:
        if base := next((t for t in _LITERALS if isinstance(value, t)), None):
            return getattr(base, "__repr__")(value)  # also of subclasses, such as enumerations  # noqa: B009
        if type(value) in (float, complex):
            plain = type(value) is float and math.isfinite(value)
            return repr(value) if plain else f"{type(value).__name__}('{value}')"
        if type(value) in _COLLECTIONS:
            inside = ", ".join(map(self.text, value))
            return _COLLECTIONS[type(value)].format(inside) if inside else f"{type(value).__name__}()"
        if isinstance(value, slice):
            return f"slice{self.text((value.start, value.stop, value.step))}"
        if type(value) is dict:
            return f"{{{', '.join(f'{self.text(k)}: {self.text(v)}' for k, v in value.items())}}}"
        if isinstance(value, numpy.dtype) and value.isbuiltin == 1:
            return f"numpy.dtype({value.str!r})"
        if isinstance(value, numpy.generic) and value.dtype.isbuiltin == 1 and not isinstance(value, _LONG):
            kind = "bool_" if value.dtype == bool else type(value).__name__
            return f"numpy.{kind}({self.text(value.item())})"
        if id(value) in self._names:
            return self._names[id(value)][0]
        if isinstance(value, _LONG):  # Python has no such number
            return f"{self._text(numpy.asarray(value), name)}[()]"
        if isinstance(value, numpy.ndarray):
            if value.dtype.isbuiltin != 1 or value.dtype.hasobject:
                raise NotWrittenError(f"NumPy's file format does not store arrays of {value.dtype}")
            name = self._name(value, f"constant_{len(self.constants)}")
            self.constants[name] = value
            return name
        value = getattr(value, "primitive", value) if isinstance(value, types.FunctionType) else value
        return self.text(_run(value), value.name) if isinstance(value, Primitive) else self._of_callable(value, name)

    def _of_callable(self, value: Any, called: str) -> str:
        value = _INSTEAD.get(value, value) if isinstance(value, types.FunctionType) else value
        if isinstance(value, types.ModuleType):
            self.modules[value.__name__] = None
            return value.__name__
        if isinstance(value, functools.partial):
            texts = [*map(self.text, (value.func, *value.args))]
            texts += [f"**{self.text(value.keywords)}"] if value.keywords else []
            return f"{self.text(functools)}.partial({', '.join(texts)})"
        if isinstance(value, functools._lru_cache_wrapper):
            return self.text(value.__wrapped__)
        name, module = getattr(value, "__name__", type(value).__name__), getattr(value, "__module__", None) or ""
        if getattr(builtins, name, None) is value:
            return name
        for place in (*_UFUNCS, *[module] * (module.split(".")[0] in _IMPORTED)):
            if getattr(sys.modules.get(place), "__dict__", {}).get(name) is value:
                return f"{self.text(sys.modules[place])}.{name}"
        if isinstance(value, type) and issubclass(value, BaseException):
            return next(c.__name__ for c in value.__mro__ if c.__module__ == "builtins")
        if isinstance(value, types.BuiltinMethodType):
            return f"{self.text(value.__self__)}.{name}"
        if isinstance(value, types.FunctionType) and not f"{module}.".startswith(_ENGINE):
            return self._define(value, called if name == "<lambda>" else name)
        raise NotWrittenError(f"{name}{f' of {module}' * bool(module)} is not written in NumPy")

    def _name(self, value: Any, first: str, hidden: Collection[str] = ()) -> str:
        """Return a name for an object that no other one has."""
        first = name = re.sub(r"\W", "_", unicodedata.normalize("NFKC", first))
        number = 1
        while any(name in names for names in (self.texts, self.first, self.hidden, hidden)):
            number += 1
            name = f"{first}_{number}"
        self._names[id(value)] = name, value
        self.texts[name] = ""  # a function may call itself
        return name

    def _define(self, f: types.FunctionType, name: str) -> str:
        node = _node_of(f.__code__)
        scope = {**builtins.__dict__, **f.__globals__, **inspect.getclosurevars(f).nonlocals}
        node.args.defaults, node.args.kw_defaults, named = [], [], f.__kwdefaults__ or {}
        renames = self.renames if f"{f.__module__}.".startswith(_OURS) else {}
        resolve = _Resolve(self, scope, node, renames)
        first = f"_{name.strip('_') or 'function'}"  # no value of a program has such a name
        name = self._name(f, first, resolve.bound)
        node = resolve.visit(node)
        node.args.defaults = [*map(resolve.expression, f.__defaults__ or ())]
        node.args.kw_defaults = [
            resolve.expression(named[a.arg]) if a.arg in named else None for a in node.args.kwonlyargs
        ]
        del self.texts[name]  # what it uses comes first
        if isinstance(node, ast.Lambda):
            self.texts[name] = f"def {name}({ast.unparse(node.args)}):\n    return {ast.unparse(node.body)}"
        else:
            node.name = name
            self.texts[name] = ast.unparse(ast.fix_missing_locations(node))
        return name


def _run(primitive: Primitive) -> Any:
    if primitive.has_effect or primitive.is_higher_order or primitive.on_ranks:
        raise NotWrittenError("it is not a function of arrays")
    return primitive.impl


class _Resolve(ast.NodeTransformer):
    """Replace names and attributes that a function does not bind by what they are, and leave out types and tracers."""

    def __init__(
        self, definitions: Definitions, scope: Mapping[str, Any], function: ast.AST, renames: Mapping[str, str]
    ):
        self.definitions = definitions
        self.scope = scope
        self.renames = renames
        inside = [*ast.walk(function)]
        bound = {n.id for n in inside if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        bound |= {n.name for n in inside if isinstance(n, _NAMED) and n.name and n is not function}
        bound |= {n.asname or n.name.split(".")[0] for n in inside if isinstance(n, ast.alias)}
        self.bound = {*bound, *[n.arg for n in inside if isinstance(n, ast.arg)]}
        self.hidden = {*self.bound, *definitions.hidden}

    def visit_Name(self, node):
        if node.id in self.bound:
            return node
        return ast.Name(self.renames[node.id]) if node.id in self.renames else self.expression(self._value(node))

    def visit_Attribute(self, node):
        try:
            return self.expression(self._value(node))
        except LookupError:
            return self.generic_visit(node)

    def visit_Call(self, node):
        return ast.Constant(False) if self._asks_for_tracer(node) else self.generic_visit(node)

    def visit_If(self, node):
        return [*map(self.visit, node.orelse)] if self._asks_for_tracer(node.test) else self.generic_visit(node)

    def visit_IfExp(self, node):
        return self.visit(node.orelse) if self._asks_for_tracer(node.test) else self.generic_visit(node)

    def visit_arg(self, node):
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node):
        node.returns, node.decorator_list = None, []
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        return self.visit(ast.Assign([node.target], node.value))

    def _value(self, node: ast.AST) -> Any:
        """Return the object that a name is, or an attribute of one of ours. Raises LookupError for others."""
        if isinstance(node, ast.Name) and node.id not in self.bound:
            if node.id not in self.scope:
                raise NotWrittenError(f"{node.id} is not defined where it is used")
            return self.scope[node.id]
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            if isinstance(owner, Primitive) and node.attr == "bind":
                return _run(owner)
            module = getattr(owner, "__name__" if isinstance(owner, types.ModuleType) else "__module__", "")
            if isinstance(owner, Primitive) or f"{module}.".startswith(_OURS):
                return getattr(owner, node.attr)
        raise LookupError

    def _asks_for_tracer(self, node: ast.AST) -> bool:
        """Return True for `isinstance(x, Tracer)`, which is false where nothing is traced."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"):
            return False
        kind = node.args[1]
        return isinstance(kind, ast.Name) and kind.id not in self.bound and self._value(kind) is Tracer

    def expression(self, value: Any) -> ast.expr:
        return self.definitions.expression(value, self.hidden)


class _Unhide(ast.NodeTransformer):
    """Replace names in an expression that would have another meaning where it is written."""

    def __init__(self, definitions: Definitions, hidden: Collection[str]):
        self.definitions = definitions
        self.hidden = hidden

    def visit_Name(self, node):
        return ast.Name(self.definitions.alias(node.id, self.hidden)) if node.id in self.hidden else node


@functools.cache
def _functions_of(path: str) -> list[Any]:
    text = "".join(linecache.getlines(path))
    return [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.Lambda))]


def _node_of(code: types.CodeType) -> Any:
    """Return the syntax tree of a function. Raises NotWrittenError unless its file has one such function there."""
    nodes = {}
    for node in _functions_of(code.co_filename):
        first = min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
        args = tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args))
        signature = (code.co_firstlineno, code.co_name, code.co_varnames[: code.co_argcount])
        if (first, getattr(node, "name", "<lambda>"), args) == signature:
            nodes[ast.unparse(node)] = node
    if len(nodes) != 1:
        raise NotWrittenError(f"{code.co_filename} has {len(nodes)} such functions in line {code.co_firstlineno}")
    (statement,) = ast.parse(next(iter(nodes))).body
    return statement.value if isinstance(statement, ast.Expr) else statement
