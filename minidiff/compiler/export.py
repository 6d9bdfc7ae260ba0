"""`export`: write a compiled program as one Python file that needs NumPy alone.

`ranks.exported(eqn)` says how the file runs an operation on ranks: by a function, with these parameters (tapes among
them), and the expressions of variables that the file assigns first. For other operations it is None.

A user's name is written unchanged where Python reads it as that name, and as a string elsewhere; the file's own
names avoid those of the function and its parameters.
"""

from __future__ import annotations

import builtins
import hashlib
import inspect
import io
import itertools
import keyword
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from minidiff import tree
from minidiff.api.recording import stage_flat
from minidiff.compiler import standalone
from minidiff.compiler.codegen import Source
from minidiff.compiler.definitions import Definitions, NotWrittenError
from minidiff.compiler.jit import Jitted, jit
from minidiff.compiler.program import optimize, plan_program
from minidiff.control_flow.bodies import Call
from minidiff.control_flow.cond import cond_p, switch_p
from minidiff.control_flow.loops import scan_p
from minidiff.control_flow.while_loop import while_p
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import ranks
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var, typeof
from minidiff.errors import PrintedText, is_identifier, printable
from minidiff.inputs.arguments import check_function
from minidiff.inputs.keywords import make_decorator
from minidiff.ops.base import sum_p
from minidiff.values.dtypes import NARROW

#: Operation with bodies -> the function that runs it in a file.
_LOOPS: dict[Primitive, Callable] = {
    scan_p: standalone.scan_loop,
    while_p: standalone.while_loop,
    cond_p: standalone.run_branch,
    switch_p: standalone.run_branch,
}
_ASSIGNED = ("TYPES", "RESULTS", "CONSTANTS", "CHECKSUM", "_program", "WORLD", "SIZES", "COMMUNICATORS")

_FILE = '''"""{title}

Written by minidiff.export. It needs {needs}.
"""

{imports}

{variables}


{definitions}


def {name}({parameters}):
    """Return {returned}."""
{checks}    [{leaves}] = {program}({arguments})
    return {result}


[{loaded}] = {load}(__file__)

if __name__ == "__main__":
    {run}({sys}.argv[1:])
'''


class ExportedSource(Source):
    """The source of a tape, which calls nothing but NumPy and what `definitions` has the text of.

    `variables` are the variables that the file assigns first, with their expressions.
    """

    reserved = Source.reserved.union(dir(builtins), sys.stdlib_module_names, ("numpy", "scipy", "mpi4py"))

    def __init__(
        self, tape: Tape, name: str, definitions: Definitions, variables: dict[str, str], bodies: dict[str, str]
    ):
        self.definitions = definitions
        self.variables = variables
        super().__init__(plan_program(tape, kernels=False), name, bodies, {"kernels": False})

    def _names_of_constants(self) -> dict[Any, str]:
        return {id(c): self.definitions.text(c) for c in self.constants}

    def _bind(self, name: str, value: Any) -> str:
        return self.definitions.text(value, name)

    def _name_of_body(self, first: str) -> str:
        name = super()._name_of_body(first)
        return self._name_of_body(f"{name}_") if name in self.definitions.hidden else name

    def _operand(self, a: Any) -> str:
        return self.definitions.text(a) if type(a) is float and not math.isfinite(a) else super()._operand(a)

    def _expression(self, eqn: Equation) -> str:
        try:
            if any(t.dtype in NARROW for t in map(typeof, (*eqn.inputs, *eqn.outputs))):
                raise NotWrittenError("16-bit floats are computed in float32, operation by operation")
            text = super()._expression(eqn)
            return f"{self.definitions.text(numpy)}.{text}" if eqn.primitive is sum_p else text
        except NotWrittenError as error:
            line = f" ({eqn.source})" if eqn.source else ""
            raise TypeError(f"export: {eqn.primitive}{line} needs more than NumPy: {error}") from None

    def _call(self, eqn: Equation, operands: list[str], in_place: Callable | None = None) -> str:
        primitive, params = eqn.primitive, eqn.params
        function: Any = in_place or primitive
        if eqn.bodies:  # which compute with numbers of their own types
            numbers = [a if isinstance(a, Var) or hasattr(a, "dtype") else numpy.asarray(a)[()] for a in eqn.inputs]
            operands = [self._operand(a) for a in numbers]
        if exported := ranks.exported(eqn):
            function, params, variables = exported
            for name, text in variables.items():
                if (other := self.variables.setdefault(name, text)) != text:
                    raise TypeError(f"export: a program must use one mesh, got {other} and {text}")
        elif primitive in _LOOPS and (params.get("length") != 0 or params["carry"] == len(eqn.outputs)):
            function = _LOOPS[primitive]
        elif isinstance(primitive, Call) and isinstance(params["body"], Tape):
            function, params = standalone.run_body, {"body": params["body"]}
        shown = [f"{k}={self._parameter(f'{primitive.name}_{k}', v)}" for k, v in params.items()]
        return f"{self._bind(primitive.name, function)}({', '.join([*operands, *shown])})"

    def _parameter(self, name: str, value: Any) -> str:
        if not isinstance(value, Tape):
            return self.definitions.text(value)
        name = self._name_of_body(name)
        self.bodies[name] = ""
        text = ExportedSource(value, name, self.definitions, self.variables, self.bodies).list_text
        del self.bodies[name]  # nested bodies come first
        self.bodies[name] = text
        return name


class Exported:
    """An exported program: its `code`, its `constants`, the `checksum` of both, and the packages that it `needs`."""

    def __init__(self, code: str, constants: dict[str, numpy.ndarray], needs: Sequence[str], variable: str):
        self.needs = tuple(needs)
        self.constants = constants
        buffer = io.BytesIO()
        numpy.savez(buffer, **constants)  # type: ignore[arg-type]
        self._data = buffer.getvalue() if constants else b""
        self.checksum = hashlib.sha256(code.encode() + self._data).hexdigest()
        self.code = PrintedText(code.replace(f'\n{variable} = ""\n', f'\n{variable} = "{self.checksum}"\n', 1))

    def save(self, path: Any) -> None:
        """Write the file `path`, and the constants, if there are any, to a file of the same name that ends in .npz.

        Raises ValueError if the name of the file does not end in .py.
        """
        path = Path(path)
        if path.suffix != ".py":
            raise ValueError(f"export: writes a Python file, but the path {str(path)!r} does not end in .py")
        path.write_text(self.code, encoding="utf-8")
        if self._data:
            path.with_suffix(".npz").write_bytes(self._data)

    def __repr__(self) -> str:
        return f"<exported program of {len(self.code.splitlines())} lines, needs {' and '.join(self.needs)}>"


@make_decorator
def export(f: Callable) -> Callable[..., Exported]:
    """Compile `f` ahead of time, to one Python file: `export(f)(*types).save('model.py')`.

    The arguments are trees of arrays or `ShapedArray`s, of which only the types matter; `f` may be a jitted function,
    with static arguments. The file has a function of `f`'s name and arguments, which takes and returns the same trees
    (of tuples, lists and dicts), and runs by itself: `python model.py inputs.npz outputs.npz`. It needs NumPy, SciPy
    for SciPy's functions, and mpi4py if it communicates: then `mpiexec` starts a process for each rank of the mesh, and
    arguments and results are whole arrays, the same on all of them. Arrays that `f` closes over are saved next to the
    file, which raises an error if it or they are not what was exported.

    Raises TypeError, which names the operation and the line, for what is not written in NumPy: `pure_callback`,
    `debug.print`, 16-bit floats.

    >>> import minidiff as md, minidiff.numpy as np
    >>> loss = lambda w, x: (np.tanh(x @ w) ** 2).sum()
    >>> exported = export(md.grad(loss))(md.ShapedArray((3,), float), md.ShapedArray((5, 3), float))
    >>> exported.needs, exported.constants
    (('numpy',), {})
    """
    check_function("export", f)
    jitted = f if isinstance(f, Jitted) else jit(f)

    def of_types(*args: Any, **kwargs: Any) -> Exported:
        function, dynamic, *_ = jitted._prepare_recording(args, kwargs, types_too=True)
        return _write(jitted, function, dynamic, _Parameters(jitted, args, kwargs))

    return of_types


class _Parameters:
    """The parameters of a file's function: the parameters of the exported one that take arrays.

    Keywords that Python does not read as names, as in `f(**{"a b": x})`, are in a dict.
    """

    def __init__(self, jitted: Jitted, args: tuple, kwargs: dict):
        try:
            declared: Any = inspect.signature(jitted.f).parameters.values()
        except (TypeError, ValueError):  # of a function written in C
            declared = ()
        static = jitted.static.among(args, kwargs, jitted.name)
        ordered = [p for p in declared if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = [p.name for p in ordered[: len(args)]] + [f"argument_{k}" for k in range(len(ordered), len(args))]
        only = sum(p.kind is p.POSITIONAL_ONLY for p in ordered[: len(args)])
        only = len(args) if len(args) > len(ordered) else only
        named = {name for name in kwargs if name not in static}
        following = [p.name for p in ordered[len(args) :] if p.name not in static]
        self.either = [name for k, name in enumerate(names) if k >= only and k not in static]
        self.either += itertools.takewhile(named.__contains__, following)
        self.first: list[str] = []
        for k, name in enumerate(names[:only]):
            self.first += [_fresh_name(name, {*self.first, *self.either, *kwargs})] * (k not in static)
        self.named = [name for name in sorted(named) if name not in self.either and is_identifier(name)]
        self.others = [name for name in sorted(named) if name not in self.either and not is_identifier(name)]
        self.names = [*self.first, *self.either, *self.named]
        self.names += [_fresh_name("keywords", self.names)] * bool(self.others)

    def __str__(self) -> str:
        last = [f"**{self.names[-1]}"] if self.others else []
        words = [*self.first, *["/"] * bool(self.first), *self.either, *["*"] * bool(self.named), *self.named, *last]
        return ", ".join(words)

    def arguments(self, dynamic: tuple) -> dict[str, Any]:
        """Return the arguments, positional ones and named ones, by their expressions in the function."""
        values, named = dynamic
        expressions = {name: f"{self.names[-1]}[{str.__repr__(name)}]" for name in self.others}
        by_name = {expressions.get(name, name): named[name] for name in sorted(named)}
        return {**dict(zip([*self.first, *self.either], values)), **by_name}


def _fresh_name(name: str, taken: Collection[str]) -> str:
    return _fresh_name(f"{name}_", taken) if name in taken else name


def _public_name(name: str) -> str:
    """Return the name of the exported function, or one like it that Python takes."""
    return name if is_identifier(name) else f"{name}_" if keyword.iskeyword(name) else "function"


def _write(jitted: Jitted, f: Callable, dynamic: Any, parameters: _Parameters) -> Exported:
    """Export `f` of the arguments `dynamic`, which the file's function takes by these parameters."""
    tape, _, structure = stage_flat(f, dynamic, f"export of {jitted.name}")
    name, variables, bodies = _public_name(jitted.name), dict[str, str](), dict[str, str]()
    hidden = {name, *parameters.names}
    renames = {first: _fresh_name(first, hidden) for first in _ASSIGNED}
    definitions = Definitions(renames, hidden)
    tape = optimize(tape, **{**jitted.options, "kernels": False})
    source = ExportedSource(tape, renames["_program"], definitions, variables, bodies)
    functions = standalone.as_argument, standalone.load_constants, standalone.run_file, sys
    as_argument, load, run, system = map(definitions.text, functions)
    arguments = f"{parameters.names[-1]}, {definitions.text(parameters.others)}" if parameters.others else ""
    checks = f"    {definitions.text(standalone.check_keywords)}({arguments})\n" if arguments else ""
    paths = [path for root, x in parameters.arguments(dynamic).items() for path in _paths(x, root, definitions)]
    types = {path: v.type for path, v in zip(paths, tape.inputs)}
    outs = [f"result_{k}" for k in range(structure.size)]
    results, result = _paths(structure, "result", definitions), _tree_text(structure.nested, iter(outs), definitions)
    variables = {**_variables(definitions, types, results), **variables}
    needs = _packages(definitions, variables.get("WORLD", ""))
    assigned = {renames[k]: text for k, text in variables.items()}
    code = _FILE.format(
        title=_documented(f"{name}({', '.join(f'{path}: {t}' for path, t in types.items())})"),
        needs=" and ".join(needs),
        imports="\n".join(f"import {m}" for m in sorted({*definitions.modules, "sys"})),
        variables="\n".join([*definitions.first.values(), *map(" = ".join, assigned.items())]),
        definitions="\n\n\n".join([*filter(None, definitions.texts.values()), *bodies.values(), source.list_text]),
        name=name,
        parameters=parameters,
        returned=_documented(", ".join(str(t) for t in tape.out_types) or "nothing"),
        checks=checks,
        leaves=", ".join(outs),
        program=source.name,
        arguments=", ".join(f"{as_argument}({path!r}, {path})" for path in types),
        result=result,
        loaded=", ".join(definitions.constants),
        load=load,
        run=run,
        sys=system,
    )
    return Exported(code, definitions.constants, needs, renames["CHECKSUM"])


def _variables(definitions: Definitions, types: dict[str, Any], results: list[str]) -> dict[str, str]:
    """Return the variables that each file has, and their expressions."""
    return {
        "CHECKSUM": '""',
        "TYPES": definitions.text({path: (t.shape, t.dtype) for path, t in types.items()}),
        "RESULTS": definitions.text(results),
        "CONSTANTS": definitions.text([*definitions.constants]),
    }


def _packages(definitions: Definitions, world: str) -> list[str]:
    """Return the packages that a file needs: mpi4py too, if its `world` is MPI's."""
    definitions.modules.update({"mpi4py.MPI": None} if "mpi4py" in world else {})
    packages = {m.split(".")[0] for m in definitions.modules}
    return [package for package in ("numpy", "scipy", "mpi4py") if package in packages]


def _documented(text: str) -> str:
    """Return a text as docstrings have it."""
    return printable(text).replace("\\", r"\\").replace('"', r"\"")


def _paths(x: Any, root: str, definitions: Definitions) -> list[str]:
    """Return how Python reads each leaf of a tree. Raises TypeError for a class that files do not have."""

    def paths(nested: Any, root: str) -> list[str]:
        if nested is None:
            return [root]
        kind, keys, _, children = nested
        if not issubclass(kind, (tuple, list, dict, type(None))):
            raise TypeError(
                f"export: {root} is a {kind.__name__}: exported programs take tuples, lists and dicts as trees"
            )
        steps = [_key_text(k, root, definitions) for k in keys] if issubclass(kind, dict) else range(len(children))
        return [path for k, child in zip(steps, children) for path in paths(child, f"{root}[{k}]")]

    return paths((x if isinstance(x, tree.Structure) else tree.structure(x)).nested, root)


def _key_text(key: Any, root: str, definitions: Definitions) -> str:
    try:
        if key == key:
            return definitions.text(key)
    except NotWrittenError:
        pass
    raise TypeError(f"export: {root} has the key {key!r}: keys must be strings, numbers, or tuples of these")


def _tree_text(nested: Any, leaves: Iterator[str], definitions: Definitions) -> str:
    """Return the expression that builds a tree from its leaves; named tuples are tuples."""
    if nested is None:
        return next(leaves)
    kind, keys, _, children = nested
    inside = [_tree_text(child, leaves, definitions) for child in children]
    if issubclass(kind, dict):
        return f"{{{', '.join(f'{definitions.text(k)}: {x}' for k, x in zip(keys, inside))}}}"
    if issubclass(kind, list):
        return f"[{', '.join(inside)}]"
    return f"({''.join(f'{x}, ' for x in inside)})" if kind is not type(None) else "None"
