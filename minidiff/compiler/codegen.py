"""Code generation: write a planned program as straight-line NumPy source, and compile it.

Each operation is one line, with the tape's names. The plan (`buffers.py`) says which memory each result takes. A fused
loop is shown as the Python loop that it is.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy

from minidiff.compiler import buffers
from minidiff.compiler.buffers import IN_PLACE, Memory, ProgramPlan, copy_p, fused_p
from minidiff.compiler.kernels import Kernel
from minidiff.compiler.layout import PIECES, REDUCTIONS, iteration_shape, stages_of
from minidiff.compiler.registers import RegisterKernel
from minidiff.control_flow.checkpoint import recompute_p
from minidiff.core.interpreter import EVALUATE, current_interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Atom, Equation, Tape, evaluate_equation, read
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.errors import is_identifier, printable
from minidiff.errors.location import ASKED_FOR, Location
from minidiff.ops import elementwise, indexing, linalg, shape
from minidiff.ops.base import Specialized, sum_p
from minidiff.printing import letters, names_of
from minidiff.tree import Structure
from minidiff.tree.compiled import source_of_builder
from minidiff.values.dtypes import evaluate_wide, is_scalar_constant
from minidiff.values.settings import setting

#: The profiler of programs that are compiled now, if there is one (`spmd/report/communication.py`). Its `line(eqn)` is
#: a line of source after each operation, which uses its `names`.
current_profiler: ContextVar[Any] = setting("current_profiler", None)


# ---------------------------------------------------------------- source of single operations


def _infix(sign: str) -> Callable:
    return lambda x, y: f"{x} {sign} {y}"


def _show_transpose(x: str, axes: tuple[int, ...]) -> str:
    return f"{x}.T" if axes == tuple(reversed(range(len(axes)))) else f"{x}.transpose({axes})"


def _show_index(x: str, index: tuple) -> str:
    return f"{x}[{', '.join(map(_index, index)) or '()'}]"


def _index(i: Any) -> str:
    if isinstance(i, slice):
        start, stop, step = ("" if n is None else str(n) for n in (i.start, i.stop, i.step))
        return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"
    return "..." if i is Ellipsis else repr(i)


def _show_sum(x: str, axes: tuple[int, ...], keepdims: bool = False) -> str:
    return f"add.reduce({x}, axis={axes[0] if len(axes) == 1 else axes}{', keepdims=True' if keepdims else ''})"


#: The source of operations that are not written as `name(operands, parameter=…)`.
SOURCES: dict[Primitive, Callable[..., str]] = {
    elementwise.add.primitive: _infix("+"),
    elementwise.subtract.primitive: _infix("-"),
    elementwise.multiply.primitive: _infix("*"),
    elementwise.divide.primitive: _infix("/"),
    elementwise.negative.primitive: lambda x: f"-{x}",
    linalg.matmul_p: _infix("@"),
    sum_p: _show_sum,
    shape.reshape_p: lambda x, shape: f"{x}.reshape({shape})",
    shape.transpose_p: _show_transpose,
    indexing.slice_p: _show_index,
    recompute_p: lambda x: x,
}


# ---------------------------------------------------------------- source of programs


class Source:
    """The source of a planned program as a Python function, and the namespace in which it runs.

    `bodies` collects the source of the functions that operations run. `options` are those of `optimize`, for programs
    compiled from the tape's bodies when they run.
    """

    #: Names that values must not take, in addition to the names of operations.
    reserved = frozenset({"add", "inf", "nan", "mark", "now"})

    def __init__(
        self, plan: ProgramPlan, name: str = "f", bodies: dict[str, str] | None = None, options: dict | None = None
    ):
        self.plan = plan
        self.tape = tape = plan.tape
        self.options = options or {}
        self.profiler = current_profiler.get()
        self.namespace: dict[str, Any] = {"inf": math.inf, "nan": math.nan, "add": numpy.add}
        self.namespace.update(self.profiler.names if self.profiler else {})
        reserved = self.reserved.union(_names_of_operations(tape))
        self.bodies = {} if bodies is None else bodies
        self.names = names_of(tape, letters(reserved))
        self.constants = tape.constants
        self.names.update(self._names_of_constants())
        name = name if is_identifier(name) else "f"
        taken = {*reserved, *(self.names[id(c)] for c in self.constants)}
        self.name = f"{name}_" if name in taken else name
        self.compiled: dict[Equation, Equation] = {}  # equations with bodies, and the same with compiled ones
        self._numbers: dict[str, int] = {}
        #: By line of the generated source: the user's line that it comes from.
        self.user_lines: dict[int, Location | None] = {}
        self.own_text = "\n".join(self._lines())

    @property
    def text(self) -> str:
        """The source of the function, below that of the functions its operations run."""
        return "\n".join([*(f"{body}\n" for body in self.bodies.values()), self.own_text])

    @functools.cached_property
    def function(self) -> Callable:
        """The compiled function, which returns one result or a tuple of results."""
        return self._compile(self.own_text)

    @functools.cached_property
    def results(self) -> Callable[..., list[Value]]:
        """The compiled function, which always returns a list."""
        return self._compile(self.list_text)

    @property
    def list_text(self) -> str:
        """The source of the function that always returns a list."""
        head, _, last = self.own_text.rpartition("    return ")
        return f"{head}    return [{'' if last == '()' else last}]"

    def function_of(self, structure: Structure) -> Callable:
        """Return the compiled function that returns a tree of this structure."""
        head = self.own_text.rpartition("    return ")[0]
        tree = source_of_builder(structure, iter(self.result_names), self._bind)
        return self._compile(f"{head}    return {tree}")

    def _compile(self, text: str) -> Callable:
        scope = {name: x.function() if isinstance(x, Kernel) else x for name, x in self.namespace.items()}
        scope.update((name, x.bind(scope, name)) for name, x in scope.items() if isinstance(x, Stub))
        scope[ASKED_FOR] = self.user_lines
        exec(compile(text, f"<{self.name}, compiled by minidiff>", "exec"), scope)
        return scope[self.name]

    def _lines(self) -> list[str]:
        arguments, types_ = [self.names[v] for v in self.tape.inputs], types_of(self.tape.inputs)
        lines = [f"def {self.name}({', '.join(arguments)}):" + (f"  # {types_}" if types_ else "")]
        for c in self.constants:
            self.namespace[self.names[id(c)]] = c
            lines.append(f"    # {self.names[id(c)]} is a constant, {typeof(c)}")
        lines += self._mark(None)
        for eqn, deleted in zip(self.tape.equations, self.plan.deletes):
            targets = ", ".join([self.names[v] for v in eqn.outputs])
            targets += "," * (eqn.primitive.multiple_results and len(eqn.outputs) == 1 and eqn.primitive is not fused_p)
            lines.append(f"    {targets}{' = ' * bool(targets)}{self._expression(eqn)}  # {_comment(eqn)}")
            self.user_lines[len(lines)] = eqn.source
            for v in eqn.outputs:
                if v in self.plan.fills:
                    lines.append(f"    {self.names[v]} = {self._copy_into(self.plan.fills[v], self.names[v])}")
            if deleted:
                lines.append(f"    del {', '.join([self.names[v] for v in deleted])}")
            lines += self._mark(eqn)
        self.result_names = [*map(self._result, self.tape.outputs)]
        return [*lines, f"    return {', '.join(self.result_names) or '()'}"]

    def _names_of_constants(self) -> dict[Any, str]:
        """Return names of constants, by their ids, where they are not letters."""
        return {}

    def _mark(self, eqn: Equation | None) -> list[str]:
        return [f"    {self.profiler.line(eqn)}"] if self.profiler else []

    def _copy_into(self, target: Var, text: str) -> str:
        return f"{self._bind('write_over', write_over)}({self.names[target]}, {text})"

    def _expression(self, eqn: Equation) -> str:
        primitive, operands = eqn.primitive, [*map(self._operand, eqn.inputs)]
        if buffers.upcasts(eqn) or any(v in self.plan.sharded for v in eqn.outputs):
            return self._call(eqn, operands)
        if primitive is fused_p:
            return f"{self._kernel(eqn)}({', '.join(operands)})"
        target = self.plan.reuses.get(eqn.outputs[0]) if eqn.outputs else None
        if primitive is copy_p:
            if target is not None:
                return self._copy_into(target, operands[0])
            return f"{operands[0]}{'.copy()' if eqn.outputs[0].type.shape else '[()]'}"
        if buffers.selects_array(eqn):
            return "({1} if {0} else {2}).copy()".format(*operands)
        if target is not None and (primitive in IN_PLACE or isinstance(primitive, Specialized)):
            return self._call(eqn, operands, IN_PLACE.get(primitive, primitive.impl))
        if target is not None:
            return f"{self._bind(primitive.name, primitive.impl)}({', '.join(operands)}, out={self.names[target]})"
        # Python's operators return a Python number for a Python complex and a NumPy float64.
        if primitive in SOURCES and (eqn.outputs[0].type.shape or complex not in map(type, eqn.inputs)):
            return SOURCES[primitive](*operands, **eqn.params)
        return self._call(eqn, operands)

    def _call(self, eqn: Equation, operands: list[str], in_place: Callable | None = None) -> str:
        """`name(operands, parameters)`; other parameters are bound to the function."""
        primitive, params = eqn.primitive, eqn.params
        if primitive.is_higher_order:
            compiled = eqn in self.plan.in_registers and not self.profiler
            function: Any = RegisterKernel(eqn) if compiled else functools.partial(_evaluate, primitive)
            params = {k: self._compile_body(eqn, k, v) for k, v in params.items()}
            self.compiled[eqn] = Equation(primitive, eqn.inputs, params, eqn.outputs, eqn.source)
        elif buffers.upcasts(eqn):
            function = functools.partial(evaluate_wide, primitive)
        else:
            function = in_place or primitive.impl
        name = f"{primitive.name}_in_place" if in_place else primitive.name
        if not params:
            return f"{self._bind(name, function)}({', '.join(operands)})"
        tapes = {k: v.name for k, v in params.items() if isinstance(v, CompiledTape)}
        self.namespace.update((v.name, v) for v in params.values() if isinstance(v, CompiledTape))
        shown, bound = tapes, {}
        if isinstance(primitive, Specialized):
            donated = self.plan.donates.get(eqn, ())
            more = {"donated": donated} if any(donated) else {"in_place": True} if in_place else {}
            function = Stub(primitive, {**params, **more})
        else:
            shown = {k: tapes.get(k) or repr(v) for k, v in params.items() if _is_shown(v) and is_identifier(k)}
            bound = {k: v for k, v in params.items() if k not in shown}
        name = self._bind(name, functools.partial(function, **bound) if bound else function)
        call = ", ".join([*operands, *(f"{k}={v}" for k, v in shown.items())])
        return f"{name}({call})"

    def _compile_body(self, eqn: Equation, key: str, value: Any) -> Any:
        """Compile a parameter that is a tape, and add its source to `bodies`."""
        if not isinstance(value, Tape):
            return value
        name = self._name_of_body(f"{eqn.primitive.name}_{key}")
        self.bodies[name] = ""  # reserve the name; nested bodies come first
        compiled = CompiledTape(value, Source(self.plan.bodies[eqn, key], name, self.bodies, self.options))
        del self.bodies[name]
        self.bodies[name] = compiled.source.own_text + "\n"
        return compiled

    def _name_of_body(self, first: str) -> str:
        name = first = first if is_identifier(first) else "body"
        while name in self.bodies or name in self.namespace or name == self.name:
            name = f"{first}_{self._next(first)}"
        return name

    def _kernel(self, eqn: Equation) -> str:
        """Bind the kernel of a fused group to a name, and add the loop to `bodies`, as Python would write it."""
        body, name = eqn.params["body"], self._name_of_body(fused_p.name)
        source = functools.cache(lambda: Source(buffers.assign_buffers(body), name))
        if "in_registers" in eqn.params:
            self.namespace[name], text = RegisterKernel(eqn), source().own_text
        else:
            self.namespace[name] = Kernel(body, lambda: source().function, self.options.get("threads"))
            text = "\n".join(loop_lines(name, body, self.names))
        self.bodies[name] = f"{text}\n"
        return name

    @property
    def llvm(self) -> str:
        """The kernels in LLVM's intermediate representation, those of bodies included."""
        texts = []
        for name, x in self.namespace.items():
            if isinstance(x, Kernel):
                texts.append(f"; {name}\n{x.llvm}\n")
            elif isinstance(x, CompiledTape):
                texts.append(x.source.llvm)
        return "\n".join(filter(None, texts))

    def _next(self, name: str) -> int:
        self._numbers[name] = number = self._numbers.get(name, 0) + 1
        return number

    def _bind(self, name: str, value: Any) -> str:
        """Bind a value to `name`, or to `name` with a number if another value has it."""
        first = name = name if is_identifier(name) else "function"
        while name == self.name or self.namespace.setdefault(name, value) is not value:
            name = f"{first}_{self._next(first)}"
        return name

    def _operand(self, a: Atom) -> str:
        if isinstance(a, Var):
            return self.names[a]
        if isinstance(a, ShapedArray):
            return self._bind("type_", a)
        if not is_scalar_constant(a):
            return self.names[id(a)]
        if isinstance(a, numpy.generic):
            return self._bind(f"{a.dtype.name}_constant", a)
        if type(a) is complex:  # "-1j" has another sign of zero, "infj" is a name
            return self._bind("complex_constant", a)
        text = repr(a)
        return f"({text})" if text.startswith("-") else text

    def _result(self, a: Atom) -> str:
        if isinstance(a, Var):
            return self.names[a]
        return self._bind("result", numpy.asarray(a)[()]) if is_scalar_constant(a) else self.names[id(a)]


def write_over(target: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    """Copy `x` into `target`, and return that."""
    numpy.copyto(target, x)
    return target


class Stub(NamedTuple):
    """An operation that is specialized on the types of its first operands, and then replaced in its namespace."""

    primitive: Specialized
    params: dict

    def bind(self, scope: dict[str, Any], name: str) -> Callable:
        """Return the function that `name` has in `scope` until its first call."""

        def stub(*operands, **bodies):
            scope[name] = run = self.primitive.specialize(operands, self.params)
            return run(*operands, **bodies)

        return stub


def _names_of_operations(tape: Tape) -> frozenset[str]:
    """Return the names of the operations of a tape, bodies included."""
    bodies = [_names_of_operations(body) for eqn in tape.equations for body in eqn.bodies]
    return frozenset({eqn.primitive.name for eqn in tape.equations}).union(*bodies)


def _comment(eqn: Equation) -> str:
    """Return a line's comment: the results' types, and parameters not written out."""
    params = {k: v for k, v in eqn.params.items() if not isinstance(v, Tape)} if eqn.params else {}
    if eqn.primitive in SOURCES or all(map(_is_shown, params.values())):
        return types_of(eqn.outputs)
    shown = printable(textwrap.shorten(eqn.primitive.show_params(params), 80))
    return "; ".join(filter(None, [types_of(eqn.outputs), shown]))


def _is_shown(value: Any) -> bool:
    """Return True if a parameter is written out: a number, string, tuple of these, or body."""
    if isinstance(value, tuple):
        return all(map(_is_shown, value))
    return value is None or type(value) in (bool, int, str, CompiledTape) or (type(value) is float and value == value)


# ---------------------------------------------------------------- source of loops


def types_of(outputs: Sequence[Var]) -> str:
    return printable(", ".join([str(v.type) for v in outputs]))


def _source_of(eqn: Equation, operands: Sequence[str]) -> str:
    if eqn.primitive in SOURCES:
        return SOURCES[eqn.primitive](*operands, **eqn.params)
    return f"{eqn.primitive.name}({', '.join([*operands, *[f'{k}={v!r}' for k, v in eqn.params.items()]])})"


def _source_of_reduction(primitive: Primitive, total: str, x: str) -> str:
    return f"{total} += {x}" if primitive is sum_p else f"{total} = {primitive.name}imum({total}, {x})"


def loop_lines(name: str, body: Tape, names: dict[Any, str]) -> Iterator[str]:
    """Yield the lines of a fused loop, as Python would write it."""
    shape, stages = iteration_shape(body), stages_of(body)
    counters = [f"i{d}" for d in range(len(shape))]
    reads = [eqn for eqn in body.equations if eqn.primitive in PIECES]
    axes = [e.params["axes"] for e in body.equations if e.primitive in REDUCTIONS and e.outputs[0] in stages.crossing]
    rows = axes[0][0] if axes else 0  # the first dimension of a row

    def element(v: Var, indices: Sequence[str]) -> str:
        return f"{names[v]}[{', '.join(indices)}]" if indices else names[v]

    def whole(v: Var) -> str:
        sizes = list(zip(counters, shape))[len(shape) - len(v.type.shape) :]
        return element(v, [i if n == size else "0" for (i, size), n in zip(sizes, v.type.shape)])

    def loop(first: int, last: int) -> list[str]:
        return [f"{'    ' * (d + 1)}for {counters[d]} in range({shape[d]}):" for d in range(first, last)]

    yield f"def {name}({', '.join(names[v] for v in body.inputs)}):  # one loop, compiled; {types_of(body.inputs)}"
    yield from loop(0, rows)
    texts: dict[Any, str] = {v: whole(v) for v in body.inputs}
    for k, equations in enumerate(stages.equations):
        depth = rows if k % 2 else len(shape)
        for p in REDUCTIONS:
            if totals := [names[eqn.outputs[0]] for eqn in equations if eqn.primitive is p]:
                yield f"{'    ' * (rows + 1)}{' = '.join(totals)} = {getattr(p, 'infinity', 0)}"
        yield from loop(rows, depth)
        for eqn in reads * (k == 0) + equations:
            (v,) = eqn.outputs
            is_array = v in body.outputs or (v in stages.crossing and v.type.shape == shape)
            texts[v] = whole(v) if is_array else names[v]
            operands = [texts[a] if isinstance(a, Var) else repr(numpy.asarray(a).item()) for a in eqn.inputs]
            line = f"{texts[v]} = {_source_of(eqn, operands)}"
            if eqn.primitive in PIECES:
                line = f"{names[v]} = {_source_of(eqn, [names[a] for a in eqn.inputs])}[{', '.join(counters)}]"
            elif eqn.primitive in REDUCTIONS:
                dimensions = range(0 if v in body.outputs else rows, len(shape))
                texts[v] = element(v, [counters[d] for d in dimensions if d not in eqn.params["axes"]])
                line = _source_of_reduction(eqn.primitive, texts[v], operands[0])
            yield "    " * (depth + 1) + line
    yield f"    return {', '.join(names[v] for v in body.outputs)}"


# ---------------------------------------------------------------- bodies


class CompiledTape(Tape):
    """A tape that runs as compiled source on plain arrays.

    If an interpreter applies its operations one by one, their bodies are compiled tapes.
    """

    def __init__(self, tape: Tape, source: Source):
        super().__init__(tape.inputs, [source.compiled.get(eqn, eqn) for eqn in tape.equations], tape.outputs)
        self.name = source.name
        self.options = source.options
        self.source = source
        self.overwritten = source.plan.overwritten_inputs  # a loop copies the first of these carries
        self.lowered: dict[Any, Any] = {}  # lowered forms, cached by interpreters

    def __call__(self, *values: Value) -> list[Value]:
        interpreter = current_interpreter()
        if interpreter is EVALUATE:
            return self.source.results(*values)
        results: Any = interpreter.run_compiled(self, values)
        if results is None and self.source.profiler:
            equations: Any = self.source.profiler.noting(self.equations)
            return Tape(self.inputs, equations, self.outputs).apply(*values)
        return self.apply(*values) if results is None else results

    @functools.cached_property
    def ending(self) -> Mapping[int, list[Var]]:
        """By equation: the values that no later one uses."""
        return Memory(self).ending

    def apply(self, *values: Value) -> list[Value]:
        """Apply the operations one by one, and free each value after its last use."""
        env = dict(zip(self.inputs, values))
        for k, eqn in enumerate(self.equations):
            evaluate_equation(eqn, env)
            for v in self.ending[k]:
                env.pop(v, None)
        return [a.copy() if isinstance(a, numpy.ndarray) else read(env, a) for a in self.outputs]


def _evaluate(primitive: Primitive, *args: Value, **params: Any) -> list[Value]:
    return primitive.evaluate([x if hasattr(x, "dtype") else numpy.asarray(x)[()] for x in args], params)
