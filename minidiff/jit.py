"""jit: a function staged to a tape, made cheaper, written out as straight-line NumPy source, and compiled.

This is differentiation's other implementation, source transformation, for the course to look at: `jit(grad(f))` is a
Python program that computes the gradient, and `jit(grad(f)).source(*args)` shows it, one line an operation, named as
on the tape. Results that are not needed any more lend their memory to later ones, where the tape proves that nobody
else looks at it.

>>> import numpy as np
>>> from minidiff import grad
>>> g = jit(grad(lambda x, y: np.log(x) + x * y - np.sin(y), argnums=(0, 1)))
>>> print(g.source(2.0, 5.0))
def gradient(a, b):  # f64[], f64[]
    c = cos(b)  # f64[]
    d = a - c  # f64[]
    e = 1 / a  # f64[]
    f = b + e  # f64[]
    return f, d
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.core import EVALUATE, Primitive, ShapedArray, Tracer, Value, _state, is_scalar_constant, typeof
from minidiff.forward import as_value
from minidiff.ops import elementwise, indexing, linalg, reduction, shape
from minidiff.optimize import optimize
from minidiff.staging import stage_flat
from minidiff.tape import Atom, Equation, Tape, Var, bodies_of, letters, names_of

# ---------------------------------------------------------------- how operations are written


def _infix(sign: str) -> Callable:
    return lambda x, y: f"{x} {sign} {y}"


def _transposed(x: str, axes: tuple[int, ...]) -> str:
    return f"{x}.T" if axes == tuple(reversed(range(len(axes)))) else f"{x}.transpose({axes})"


def _summed(x: str, axes: tuple[int, ...], keepdims: bool = False) -> str:
    return f"add.reduce({x}, axis={axes[0] if len(axes) == 1 else axes}{', keepdims=True' if keepdims else ''})"


def _indexed(x: str, index: tuple) -> str:
    return f"{x}[{', '.join(map(_index, index)) or '()'}]"


def _index(i: Any) -> str:
    if isinstance(i, slice):
        start, stop, step = ("" if n is None else str(n) for n in (i.start, i.stop, i.step))
        return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"
    return "..." if i is Ellipsis else repr(i)


#: How an operation is written, where that is not `name(operands, parameter=…)`.
SOURCES: dict[Primitive, Callable[..., str]] = {
    elementwise.add.primitive: _infix("+"),
    elementwise.subtract.primitive: _infix("-"),
    elementwise.multiply.primitive: _infix("*"),
    elementwise.divide.primitive: _infix("/"),
    elementwise.negative.primitive: lambda x: f"-{x}",
    linalg.matmul_p: _infix("@"),
    reduction.sum_p: _summed,
    shape.reshape_p: lambda x, shape: f"{x}.reshape({shape})",
    shape.transpose_p: _transposed,
    indexing.slice_p: _indexed,
}

#: Smaller results are not worth writing into memory that is there: NumPy finds new memory for them as fast.
REUSED_BYTES = 4096


def _ufunc(primitive: Primitive) -> numpy.ufunc | None:
    """The ufunc that an operation is: it can write its result into a given array."""
    return primitive.impl if isinstance(primitive.impl, numpy.ufunc) else None


# ---------------------------------------------------------------- memory


class Memory:
    """Who may still look at the memory of each value: names that share memory are one group, and live together."""

    def __init__(self, tape: Tape):
        self.group: dict[Var, int] = {}
        self.owned: set[int] = set()  # groups whose memory the program made itself
        last: dict[int, int] = {}  # group -> the equation that looks at it last
        for v in tape.inputs:
            self.group[v] = len(self.group)
        for k, eqn in enumerate(tape.equations):
            operands = [self.group[a] for a in eqn.inputs if isinstance(a, Var)]
            last.update(dict.fromkeys(operands, k))
            for v in eqn.outputs:
                self._place(v, eqn, operands, last)
                last.setdefault(self.group[v], k)
        kept = {self.group[a] for a in tape.outputs if isinstance(a, Var)}
        self.ending: dict[int, list[int]] = defaultdict(list)  # equation -> the groups that nobody looks at after it
        for group, k in last.items():
            if group not in kept:
                self.ending[k].append(group)
        self.members: dict[int, list[Var]] = defaultdict(list)
        for v, group in self.group.items():
            self.members[group].append(v)

    def _place(self, v: Var, eqn: Equation, operands: list[int], last: dict[int, int]) -> None:
        shares = eqn.primitive.shares_memory or eqn.primitive.has_body
        if not shares or not operands:
            self.group[v] = len(self.group)
            if not shares:
                self.owned.add(self.group[v])
            return
        first = operands[0]
        for other in operands[1:]:  # it may share memory with any of them
            self._merge(first, other, last)
        self.group[v] = first

    def _merge(self, kept: int, other: int, last: dict[int, int]) -> None:
        if kept == other:
            return
        self.group = {v: kept if g == other else g for v, g in self.group.items()}
        last[kept] = max(last.get(kept, -1), last.pop(other, -1))
        self.owned.discard(kept)


# ---------------------------------------------------------------- source


class Source:
    """The text of a tape as a Python function, and the names that the text takes for granted."""

    def __init__(self, tape: Tape, name: str = "f", foreign: Sequence[bool] = ()):
        self.namespace: dict[str, Any] = {"inf": math.inf, "nan": math.nan}
        self.tape = tape
        reserved = frozenset(e.primitive.name for e in _all_equations(tape)) | {"add", "inf", "nan"}
        self.names = names_of(tape, letters(reserved))
        self.memory = Memory(tape)
        #: Names of values that may be no plain arrays: nothing is written into them, NumPy's functions are called.
        self.foreign = {v for v, yes in zip(tape.inputs, foreign) if yes}
        self.free: list[tuple[Var, list[str]]] = []  # memory that nobody looks at: a value of its type, and its names
        self.earlier: dict[Var, list[str]] = {}  # the names that a value's memory had before
        self.bodies: list[str] = []  # the texts of the functions that operations run
        main = list(self._lines(name))
        self.text = "\n".join([*self.bodies, *main])
        self.function = self._compile(name)

    def _compile(self, name: str) -> Callable:
        scope = dict(self.namespace)
        exec(compile(self.text, f"<{name}, compiled by minidiff>", "exec"), scope)
        return scope[name]

    def results(self, *values: Value) -> list[Value]:
        """The results as a list, however many there are."""
        out = self.function(*values)
        return list(out) if len(self.tape.outputs) != 1 else [out]

    def _lines(self, name: str):
        types = ", ".join(str(v.type) for v in self.tape.inputs)
        yield f"def {name}({', '.join(self.names[v] for v in self.tape.inputs)}):  # {types}"
        for c in self.tape.constants:
            self.namespace[self.names[id(c)]] = c
            yield f"    # {self.names[id(c)]} is a constant, {typeof(c)}"
        for k, eqn in enumerate(self.tape.equations):
            ending = self.memory.ending[k]
            yield f"    {self._targets(eqn)} = {self._expression(eqn, ending)}  # {_types(eqn.outputs)}"
            forgotten = [n for group in ending for n in self._released(group, k)]
            if forgotten:
                yield f"    del {', '.join(forgotten)}"
        yield f"    return {', '.join(map(self._result, self.tape.outputs))}"

    def _targets(self, eqn: Equation) -> str:
        names = ", ".join(self.names[v] for v in eqn.outputs)
        return f"{names}," if eqn.primitive.multiple_results and len(eqn.outputs) == 1 else names

    def _expression(self, eqn: Equation, ending: list[int]) -> str:
        primitive = eqn.primitive
        operands = [self._operand(a, eqn) for a in eqn.inputs]
        foreign = any(isinstance(a, Var) and a in self.foreign for a in eqn.inputs)
        if foreign or primitive.has_body:
            self.foreign.update(eqn.outputs)
            return self._call(eqn, operands)
        out = self._memory_for(eqn, ending)
        if out is not None:
            self.namespace[primitive.name] = primitive.impl
            return f"{primitive.name}({', '.join(operands)}, out={out})"
        if primitive in SOURCES:
            self.namespace["add"] = numpy.add
            return SOURCES[primitive](*operands, **eqn.params)
        return self._call(eqn, operands)

    def _call(self, eqn: Equation, operands: list[str]) -> str:
        """`name(operands, parameters)`: parameters that are no plain numbers and names are bound to the function."""
        primitive, params = eqn.primitive, eqn.params
        if primitive.on_ranks:
            return f"{primitive.name}({', '.join([*operands, *filter(None, [primitive.show_params(params)])])})"
        if primitive.has_body:
            params = {k: self._with_bodies(v) for k, v in params.items()}
            function = self._bind(primitive.name, functools.partial(_run_body, primitive, params))
            return f"{function}({', '.join(operands)})"
        shown = [f"{k}={v!r}" for k, v in params.items() if _is_literal(v)]
        bound = {k: v for k, v in params.items() if not _is_literal(v)}
        function = functools.partial(primitive.impl, **bound) if bound else primitive.impl
        return f"{self._bind(primitive.name, function)}({', '.join([*operands, *shown])})"

    def _with_bodies(self, value: Any) -> Any:
        """A parameter whose tapes are compiled, and shown above the function."""
        if type(value) in (tuple, list):
            return type(value)([self._with_bodies(v) for v in value])
        if not isinstance(value, Tape):
            return value
        compiled = CompiledTape(value, f"body_{len(self.bodies) + 1}")
        self.bodies.append(compiled.source.text + "\n")
        return compiled

    def _bind(self, name: str, value: Any) -> str:
        """A name for a value: `name` itself, or where that is taken for another one, with a number."""
        for n in [name, *(f"{name}_{k}" for k in range(1, len(self.namespace) + 1))]:
            if self.namespace.setdefault(n, value) is value:
                return n
        raise AssertionError("as many names as values")

    def _operand(self, a: Atom, eqn: Equation) -> str:
        if isinstance(a, Var):
            return self.names[a]
        if not is_scalar_constant(a):
            return self.names[id(a)]
        if isinstance(a, numpy.generic) and not _is_weak(a, eqn):
            return self._bind(f"{a.dtype.name}_constant", a)
        number = a.item() if isinstance(a, numpy.generic) else a
        text = repr(number)
        return f"({text})" if text.startswith("-") else text

    # ------------------------------------------------ memory

    def _memory_for(self, eqn: Equation, ending: list[int]) -> str | None:
        """The name of an array that the result can be written into: an operand's, used here for the last time."""
        ufunc = _ufunc(eqn.primitive)
        (out, *more) = eqn.outputs
        if more or not out.type.shape or out.type.nbytes < REUSED_BYTES:
            return None
        if ufunc is None and eqn.primitive is not linalg.matmul_p:
            return None
        if ufunc is not None:
            for a in eqn.inputs:
                if isinstance(a, Var) and a.type == out.type and self._is_free_after(a, ending):
                    group = self.memory.group[a]
                    self.memory.owned.discard(group)
                    ending.remove(group)
                    self.earlier[out] = self._names_in(group)
                    return self.names[a]
        for k, (v, names) in enumerate(self.free):
            if v.type == out.type:
                del self.free[k]
                self.earlier[out] = names
                return self.names[v]
        return None

    def _is_free_after(self, a: Var, ending: list[int]) -> bool:
        group = self.memory.group[a]
        return group in ending and group in self.memory.owned and self.memory.members[group][0] is a

    def _names_in(self, group: int) -> list[str]:
        """All names of one memory, those too that values had whose memory it was before."""
        members = self.memory.members[group]
        return [*self.earlier.get(members[0], []), *[self.names[v] for v in members]]

    def _released(self, group: int, k: int) -> list[str]:
        """The names to forget of memory that nobody looks at any more, unless it is kept for a later result."""
        root = self.memory.members[group][0]
        if root.type.nbytes < REUSED_BYTES or root in self.tape.inputs:
            return []
        if group in self.memory.owned and self._is_wanted(root, k):
            self.free.append((root, self._names_in(group)))
            return []
        return self._names_in(group)

    def _is_wanted(self, root: Var, k: int) -> bool:
        """Whether an equation after the k-th could write its result into memory of this type."""
        return any(
            e.outputs[0].type == root.type and (_ufunc(e.primitive) or e.primitive is linalg.matmul_p)
            for e in self.tape.equations[k + 1 :]
        )

    def _result(self, a: Atom) -> str:
        """A result; constants are copied, lest the caller write into what the next call needs."""
        if isinstance(a, Var):
            return self.names[a]
        if is_scalar_constant(a):
            return self._bind("result", a)
        return f"{self.names[id(a)]}.copy()"


def _types(outputs: Sequence[Var]) -> str:
    return ", ".join(str(v.type) for v in outputs)


def _all_equations(tape: Tape):
    for eqn in tape.equations:
        yield eqn
        for body in bodies_of(eqn):
            yield from _all_equations(body)


def _is_literal(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_literal, value))
    return value is None or type(value) in (bool, int, float, str)


def _is_weak(a: numpy.generic, eqn: Equation) -> bool:
    """Whether a Python number in the place of this NumPy one gives a result of the same type."""
    operands = [b.type if isinstance(b, Var) else b.item() if b is a else b for b in eqn.inputs]
    if all(isinstance(b, (bool, int, float, complex)) for b in operands):
        return False
    try:
        return eqn.primitive.typecheck(operands, eqn.params) == [v.type for v in eqn.outputs]
    except (AttributeError, TypeError):
        return False


# ---------------------------------------------------------------- bodies


class CompiledTape(Tape):
    """A tape that runs as compiled source where it is applied to plain arrays."""

    def __init__(self, tape: Tape, name: str):
        super().__init__(tape.inputs, tape.equations, tape.outputs)
        self.source = Source(self, name)
        self.lowered: dict[Any, Any] = {}  # what interpreters made of it

    def __call__(self, *values: Value) -> list[Value]:
        interpreter = _state.interpreter
        if interpreter is EVALUATE and not any(isinstance(x, Tracer) for x in values):
            return self.source.results(*values)
        found = interpreter.lower(self, values)
        return self.apply(*values) if found is None else found


def _run_body(primitive: Primitive, params: dict, *args: Value) -> list[Value]:
    return primitive.evaluate(args, params)


# ---------------------------------------------------------------- what users call

_SCALARS = {float: numpy.float64, int: numpy.asarray, bool: numpy.bool_, complex: numpy.complex128}


class Program:
    """A function compiled for arguments of one type."""

    def __init__(self, f: Callable, args: tuple, name: str):
        tape, _, self.out_structure = stage_flat(f, args, "jit")
        self.tape = optimize(tape)
        foreign = [type(x) is not numpy.ndarray and hasattr(x, "spec") for x in tree.leaves(args)]
        self.source = Source(self.tape, name, foreign)
        self.function = self._with_structure()

    def _with_structure(self) -> Callable:
        """The compiled function, its flat results put together again; where they need no putting, itself."""
        run, structure = self.source.function, self.out_structure
        if structure is tree.LEAF:
            return run
        if structure.size == 1:
            return lambda *leaves: tree.unflatten(structure, [run(*leaves)])
        if structure.node is tuple and all(child is tree.LEAF for child in structure.children):
            return run
        return lambda *leaves: tree.unflatten(structure, run(*leaves))


def _key_of(x: Any) -> Any:
    """What of a leaf a program depends on: its type, and what is there beside it."""
    t = typeof(x)
    return t.shape, t.dtype, getattr(x, "spec", None)


class jit:
    """`f`, compiled when it is called with arguments of new types: the same function, at NumPy's speed.

    The function is run once for each structure and types of arguments, on names in the place of arrays, and what it
    does is recorded, simplified and written out as Python source (`.source(*args)`). Python's own side effects happen
    then only. Arrays that it closes over are constants. Arguments named by `static_argnums` are not arrays but
    settings: they are hashable, the program is compiled for their values, and Python may branch on them. A Python
    branch on any other value raises TracerError.

    It works on derivatives (`jit(grad(f))`), and can be differentiated, mapped and staged itself.

    >>> import numpy as np
    >>> power = jit(lambda x, n: x ** n, static_argnums=1)
    >>> power(np.array([1.0, 2.0]), 3)
    array([1., 8.])
    """

    def __init__(self, f: Callable, static_argnums: int | Sequence[int] = ()):
        self.f = f
        self.static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        self.programs: dict[Any, Program] = {}
        self.fast: dict[Any, Callable] = {}  # programs of plain arrays and numbers, by the types of these
        functools.update_wrapper(self, f)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and not self.static and _state.interpreter is EVALUATE:
            key = tuple([(x.shape, x.dtype) if type(x) is numpy.ndarray else type(x) for x in args])
            run = self.fast.get(key)
            if run is not None:
                return run(*args)
        return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict) -> Any:
        f, dynamic, settings = self._split(args, kwargs)
        leaves, structure = tree.flatten(dynamic)
        values = [as_value(x) for x in leaves]
        if _state.interpreter is not EVALUATE or any(isinstance(x, Tracer) for x in values):
            return self._inline(f, dynamic, values)
        key = structure, settings, tuple(map(_key_of, values))
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = Program(f, tree.unflatten(structure, values), _name(self.f))
        if not kwargs and not self.static and all(type(x) in _SCALARS or type(x) is numpy.ndarray for x in args):
            self._remember(args, program)
        return program.function(*values)

    def _remember(self, args: tuple, program: Program) -> None:
        """The next call with arguments like these finds its program at once."""
        key = tuple([(x.shape, x.dtype) if type(x) is numpy.ndarray else type(x) for x in args])
        converters = [None if type(x) is numpy.ndarray else _SCALARS[type(x)] for x in args]
        run = program.function
        if any(type(x) is numpy.ndarray and not x.dtype.isnative for x in args):
            return
        if not any(converters):
            self.fast[key] = run
        elif len(args) == 1:
            self.fast[key] = lambda x, c=converters[0]: run(c(x))
        else:
            self.fast[key] = lambda *xs: run(*[c(x) if c else x for c, x in zip(converters, xs)])

    def _split(self, args: tuple, kwargs: dict) -> tuple[Callable, tuple, Any]:
        """The function of what is no setting, those arguments, and the settings."""
        static = {n % len(args) if args else n for n in self.static}
        settings = tuple((n, args[n]) for n in sorted(static) if n < len(args))
        try:
            hash(settings)
        except TypeError:
            raise TypeError(
                f"jit: {_name(self.f)} was called with a static argument that is not hashable: {settings}; static "
                "arguments are settings (numbers, strings, tuples, functions); leave arrays out of static_argnums"
            ) from None

        def f(args_: tuple, kwargs_: dict) -> Any:
            rest = iter(args_)
            fixed = dict(settings)
            return self.f(*[fixed[n] if n in fixed else next(rest) for n in range(len(args))], **kwargs_)

        return f, (tuple(x for n, x in enumerate(args) if n not in static), kwargs), settings

    def _inline(self, f: Callable, dynamic: tuple, values: list[Value]) -> Any:
        """Within another transformation: the same program, its operations applied one by one."""
        types = tree.unflatten(tree.structure(dynamic), [typeof(x) for x in values])
        tape, _, out_structure = stage_flat(f, types, "jit")
        return tree.unflatten(out_structure, tape(*values))

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The Python source that runs for arguments of these types."""
        return self.program(*args, **kwargs).source.text

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """What was compiled for arguments of these types: its `tape`, and its `source`."""
        f, dynamic, _ = self._split(args, kwargs)
        leaves, structure = tree.flatten(dynamic)
        return Program(f, tree.unflatten(structure, [as_value(x) for x in leaves]), _name(self.f))


def _name(f: Callable) -> str:
    name = getattr(f, "__name__", "f")
    return name if name.isidentifier() else "f"


__all__ = ["CompiledTape", "Program", "ShapedArray", "Source", "jit"]
