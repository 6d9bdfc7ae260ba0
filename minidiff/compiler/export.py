"""`export`: write a compiled program as one Python file that needs NumPy alone.

`ranks.exported(eqn)` says how the file runs an operation on ranks: by a function, with these parameters (tapes among
them), and lines that the file begins with. For other operations it is None.
"""

from __future__ import annotations

import hashlib
import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from minidiff import tree
from minidiff.compiler import standalone
from minidiff.compiler.codegen import Source
from minidiff.compiler.definitions import Definitions, NotWrittenError
from minidiff.compiler.jit import Jitted, jit
from minidiff.compiler.simplify import optimize
from minidiff.core.ranks import ranks
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var, typeof
from minidiff.diagnostics.text import PrintedText
from minidiff.higher_order.bodies import Call
from minidiff.inputs.arguments import check_function
from minidiff.inputs.keywords import make_decorator
from minidiff.transforms.recording import stage_flat
from minidiff.values.dtypes import NARROW

#: Operation with bodies -> the function that runs it in a file.
_LOOPS: dict[str, Callable] = {
    "scan": standalone.scan_loop,
    "while_loop": standalone.while_loop,
    "cond": standalone.run_branch,
    "switch": standalone.run_branch,
}
_GIVEN = ("TYPES", "RESULTS", "CONSTANTS", "CHECKSUM", "_program", "WORLD", "SIZES", "COMMUNICATORS")

_FILE = '''"""{title}

Written by minidiff.export. It needs {needs}.
"""

{imports}

CHECKSUM = "{checksum}"
TYPES = {types}
RESULTS = {results}
CONSTANTS = {constants}
{lines}


{definitions}


def {name}({parameters}):
    """Return {returned}."""
    [{leaves}] = _program({arguments})
    return {result}


[{loaded}] = _load_constants(__file__)

if __name__ == "__main__":
    _run_file(sys.argv[1:])
'''


class ExportedSource(Source):
    """The source of a tape, which calls nothing but NumPy and what `definitions` has the text of.

    `lines` are those that its file begins with.
    """

    def __init__(self, tape: Tape, name: str, definitions: Definitions, lines: dict[str, None], bodies: dict[str, str]):
        self.definitions = definitions
        self.lines = lines
        super().__init__(tape, name, bodies=bodies, options={"kernels": False})

    def _names_of_constants(self) -> dict[Any, str]:
        return {id(c): self.definitions.text(c) for c in self.constants}

    def _bind(self, name: str, value: Any) -> str:
        return self.definitions.text(value, name)

    def _expression(self, eqn: Equation, k: int) -> str:
        try:
            if any(t.dtype in NARROW for t in map(typeof, (*eqn.inputs, *eqn.outputs))):
                raise NotWrittenError("16-bit floats are computed in float32, operation by operation")
            return super()._expression(eqn, k)
        except NotWrittenError as error:
            line = f" ({eqn.source})" if eqn.source else ""
            raise TypeError(f"export: {eqn.primitive}{line} needs more than NumPy: {error}") from None

    def _call(self, eqn: Equation, operands: list[str], k: int, in_place: Callable | None = None) -> str:
        primitive, params = eqn.primitive, eqn.params
        function: Any = in_place or primitive
        if eqn.bodies:  # which compute with numbers of their own types
            numbers = [a if isinstance(a, Var) or hasattr(a, "dtype") else numpy.asarray(a)[()] for a in eqn.inputs]
            operands = [self._operand(a) for a in numbers]
        if found := ranks.exported(eqn):
            function, params, lines = found
            self.lines.update(dict.fromkeys(lines))
        elif primitive.name in _LOOPS and params.get("length") != 0:
            function = _LOOPS[primitive.name]
        elif isinstance(primitive, Call) and isinstance(params["body"], Tape):
            function, params = standalone.run_body, {"body": params["body"]}
        shown = [f"{k}={self._parameter(f'{primitive.name}_{k}', v)}" for k, v in params.items()]
        return f"{self._bind(primitive.name, function)}({', '.join([*operands, *shown])})"

    def _parameter(self, name: str, value: Any) -> str:
        if not isinstance(value, Tape):
            return self.definitions.text(value)
        name = self._name_of_body(name)
        self.bodies[name] = ""
        text = ExportedSource(value, name, self.definitions, self.lines, self.bodies).list_text
        del self.bodies[name]  # nested bodies come first
        self.bodies[name] = text
        return name


class Exported:
    """An exported program: its `code`, its `constants`, the `checksum` of both, and the packages that it `needs`."""

    def __init__(self, code: str, constants: dict[str, numpy.ndarray], needs: Sequence[str]):
        self.needs = tuple(needs)
        self.constants = constants
        buffer = io.BytesIO()
        numpy.savez(buffer, **constants)  # type: ignore[arg-type]
        self._data = buffer.getvalue() if constants else b""
        self.checksum = hashlib.sha256(code.encode() + self._data).hexdigest()
        self.code = PrintedText(code.replace('CHECKSUM = ""', f'CHECKSUM = "{self.checksum}"', 1))

    def save(self, path: Any) -> None:
        """Write the file `path`, and the constants, if there are any, beside it as .npz.

        Raises ValueError if the name of the file does not end in .py.
        """
        path = Path(path)
        if path.suffix != ".py":
            raise ValueError(f"export: the program is a Python file, and {str(path)!r} does not end in .py")
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
    arguments and results are whole arrays, the same on all of them. Arrays that `f` closes over are saved beside the
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
        try:
            parameters: Any = inspect.signature(jitted.f).parameters.values()
        except (TypeError, ValueError):  # of a function written in C
            parameters = ()
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: len(args)]
        names = [*known, *[f"argument_{k}" for k in range(len(known), len(args))]]
        fixed = jitted.static.among(args, kwargs, jitted.name)
        given = dict(zip([name for k, name in enumerate(names) if k not in fixed], dynamic[0]))
        return _write(jitted, function, dynamic, {**given, **dict(sorted(dynamic[1].items()))})

    return of_types


def _write(jitted: Jitted, f: Callable, dynamic: Any, given: dict[str, Any]) -> Exported:
    """Export `f` of the arguments `dynamic`, which the file's function takes by the names in `given`."""
    tape, _, structure = stage_flat(f, dynamic, f"export of {jitted.name}")
    definitions, lines, bodies = Definitions(_GIVEN), dict[str, None](), dict[str, str]()
    tape = optimize(tape, **{**jitted.options, "kernels": False})
    source = ExportedSource(tape, "_program", definitions, lines, bodies)
    if len([line for line in lines if line.startswith("SIZES")]) > 1:
        raise TypeError(f"export: one program runs on one mesh, and this one on {'; '.join(lines)}")
    for function in (standalone.load_constants, standalone.as_argument, standalone.run_file):
        definitions.text(function)
    paths = [path for name, x in given.items() for path in _paths(tree.structure(x).nested, name)]
    types = {path: v.type for path, v in zip(paths, tape.inputs)}
    outs = [f"result_{k}" for k in range(structure.size)]
    needs = [name for name in ("numpy", "scipy") if any(m.split(".")[0] == name for m in definitions.modules)]
    needs += ["mpi4py"] * any("mpi4py" in line for line in lines)
    name = jitted.name if jitted.name.isidentifier() else "function"
    code = _FILE.format(
        title=f"{name}({', '.join(f'{path}: {t}' for path, t in types.items())})",
        needs=" and ".join(needs),
        imports="\n".join(f"import {m}" for m in sorted({*definitions.modules, "sys"})),
        checksum="",
        types=definitions.text({path: (t.shape, t.dtype) for path, t in types.items()}),
        results=_paths(structure.nested, "result"),
        constants=[*definitions.constants],
        lines="\n".join(["from numpy import add, inf, nan", *lines]),
        definitions="\n\n\n".join([*filter(None, definitions.texts.values()), *bodies.values(), source.list_text]),
        name=f"{name}_" if name in definitions.texts or name in bodies or name in _GIVEN else name,
        parameters=", ".join(given),
        returned=", ".join(str(t) for t in tape.out_types) or "nothing",
        leaves=", ".join(outs),
        arguments=", ".join(f"_as_argument({path!r}, {path})" for path in types),
        result=_tree_text(structure.nested, iter(outs)),
        loaded=", ".join(definitions.constants),
    )
    return Exported(code, definitions.constants, needs)


def _paths(nested: Any, root: str) -> list[str]:
    """How Python reads each leaf of a tree. Raises TypeError for a class that a file without packages does not have."""
    if nested is None:
        return [root]
    kind, keys, _, children = nested
    if not issubclass(kind, (tuple, list, dict, type(None))):
        raise TypeError(f"export: {root} is a {kind.__name__}: the trees of exported programs are tuples, lists, dicts")
    steps = keys if issubclass(kind, dict) else range(len(children))
    return [path for k, child in zip(steps, children) for path in _paths(child, f"{root}[{k!r}]")]


def _tree_text(nested: Any, leaves: Iterator[str]) -> str:
    """The expression that builds a tree from its leaves; named tuples are tuples."""
    if nested is None:
        return next(leaves)
    kind, keys, _, children = nested
    inside = [_tree_text(child, leaves) for child in children]
    if issubclass(kind, dict):
        return f"{{{', '.join(f'{k!r}: {x}' for k, x in zip(keys, inside))}}}"
    if issubclass(kind, list):
        return f"[{', '.join(inside)}]"
    return f"({''.join(f'{x}, ' for x in inside)})" if kind is not type(None) else "None"
