"""Code generation: write a tape as straight-line NumPy source, and compile it.

Each operation is one line, with the tape's names. The result of a ufunc takes the memory of an operand that is not used
again, if the tape proves that no other value shares it.
"""

from __future__ import annotations

import functools
import itertools
import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.compiler import native
from minidiff.compiler.buffers import Memory, carries_of_its_own, copy_p, copy_views
from minidiff.compiler.clock import current_clock
from minidiff.compiler.expressions import SOURCES, loop_lines, types_of
from minidiff.compiler.factorizations import share_factorizations
from minidiff.compiler.fusion import fused_p
from minidiff.compiler.in_place import IN_PLACE, add_within
from minidiff.compiler.kernels import Kernel, find_reads, fuse
from minidiff.compiler.simplify import optimize
from minidiff.core.interpreter import EVALUATE, current_interpreter
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.diagnostics.location import ASKED_FOR, Location
from minidiff.diagnostics.text import is_identifier, printable
from minidiff.higher_order.dead_code import count_uses, dependents
from minidiff.higher_order.lists import choose
from minidiff.higher_order.scan import run_count
from minidiff.ops.base import Specialized
from minidiff.ops.elementwise import where_p
from minidiff.show.program import letters, names_of
from minidiff.transforms.recording import collecting_later, stage_flat
from minidiff.values.allocation import keep_by_default
from minidiff.values.dtypes import NARROW, is_scalar_constant
from minidiff.values.half import evaluate, runs_wide

#: Reuse memory for results of at least this size; for smaller ones NumPy allocates as fast.
REUSED_BYTES = 4096


# ---------------------------------------------------------------- source


def group_operations(tape: Tape, foreign: Collection[Var], kernels: bool = True, runs: int = 1) -> Tape:
    """The operations of a tape as a program runs them: sums within an array, shared factorizations, and fused loops.

    `foreign` are inputs that may not be plain arrays. `runs` says how often a call of the program runs the tape.
    """
    sharded = [v for eqn in tape.equations if _may_shard(eqn) for v in eqn.outputs]
    excluded = dependents(tape.equations, [*foreign, *sharded]) if foreign or sharded else frozenset()
    has_loops = kernels and native.is_available()
    tape = add_within(tape, {*excluded, *find_reads(tape, excluded)} if has_loops else excluded)
    if kernels and native.is_wanted():
        tape = share_factorizations(tape, excluded)
    return add_within(fuse(tape, excluded, runs), excluded) if has_loops else tape


class Source:
    """The source of a tape as a Python function, and the namespace in which it runs.

    `foreign` marks inputs that may not be plain arrays. Results that depend on them are computed by NumPy's functions,
    and their memory is not reused. `donated` marks inputs that it may write into; if they are `given_up`, results are
    written over them. `bodies` collects the source of the functions that operations run. `options` are those of
    `optimize`, for programs compiled from the tape's bodies when they run.
    """

    #: Names that values must not take, besides those of functions that operations run.
    reserved = frozenset({"add", "inf", "nan", "mark", "now"})

    def __init__(
        self,
        tape: Tape,
        name: str = "f",
        foreign: Sequence[bool] = (),
        bodies: dict[str, str] | None = None,
        options: dict | None = None,
        donated: Sequence[bool] = (),
        given_up: bool = False,
        runs: int = 1,
    ):
        self.namespace: dict[str, Any] = {"inf": math.inf, "nan": math.nan, "add": numpy.add}
        self.foreign = {v for v, yes in zip(tape.inputs, foreign) if yes}
        self.options = options or {}
        self.clock = current_clock.get()
        self.namespace.update(self.clock.names if self.clock else {})
        tape = group_operations(tape, self.foreign, self.options.get("kernels", True), runs)
        self.runs = runs
        given = [v for v, yes in zip(tape.inputs, donated) if yes]
        if given and given_up:
            tape = copy_views(tape, {v.type for v in given} - {v.type for v in self.foreign})
        self.tape = tape
        reserved = self.reserved.union(_names_of_operations(tape))
        self.bodies = {} if bodies is None else bodies
        self.names = names_of(tape, letters(reserved))
        self.constants = tape.constants
        self.names.update(self._names_of_constants())
        name = name if is_identifier(name) else "f"
        taken = {*reserved, *(self.names[id(c)] for c in self.constants)}
        self.name = f"{name}_" if name in taken else name
        self.given_up = {*given} if given_up else set()  # with the results that took their memory
        self.memory = Memory(tape, given)
        #: Values of REUSED_BYTES or more, and those that may be views of such.
        made = itertools.chain(tape.inputs, *[e.outputs for e in tape.equations])
        self.large = {v for v in made if v.type.nbytes >= REUSED_BYTES}
        self.large |= {v for v, roots in self.memory.roots.items() if not self.large.isdisjoint(roots)}
        self.returned = {a for a in tape.outputs if isinstance(a, Var) and a in self.large}
        self.earlier: dict[Var, list[str]] = {}  # earlier names of a value's memory
        self.reused: set[Var] = set()  # values whose memory belongs to another value now
        self.takes: dict[Var, Var] = {}  # a ufunc's result -> the operand whose memory it takes
        self.copied: set[Var] = set()  # results that are written over arguments once they are there
        self.passed_on: dict[Equation, tuple[bool, ...]] = {}  # which operands a shard_map may write into
        self.dead: dict[Var, None] = {}  # arguments that were given up, after their last use, in its order
        self.compiled: dict[Equation, Equation] = {}  # equations with bodies, and the same with compiled ones
        self._numbers: dict[str, int] = {}
        #: By line of the generated source: the user's line that it comes from.
        self.asked_for: dict[int, Location | None] = {}
        self.own_text = "\n".join(self._lines())

    @property
    def overwritten(self) -> set[int]:
        """The inputs, by their places, whose memory the program may write into."""
        return {k for k, v in enumerate(self.tape.inputs) if v in self.reused}

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

    def _compile(self, text: str) -> Callable:
        scope = {name: x.function() if isinstance(x, Kernel) else x for name, x in self.namespace.items()}
        scope.update((name, x.first_in(scope, name)) for name, x in scope.items() if isinstance(x, Undecided))
        scope[ASKED_FOR] = self.asked_for
        exec(compile(text, f"<{self.name}, compiled by minidiff>", "exec"), scope)
        return scope[self.name]

    def _lines(self) -> list[str]:
        arguments, types_ = [self.names[v] for v in self.tape.inputs], types_of(self.tape.inputs)
        lines = [f"def {self.name}({', '.join(arguments)}):" + (f"  # {types_}" if types_ else "")]
        for c in self.constants:
            self.namespace[self.names[id(c)]] = c
            lines.append(f"    # {self.names[id(c)]} is a constant, {typeof(c)}")
        lines += self._mark(None)
        for k, eqn in enumerate(self.tape.equations):
            targets = ", ".join([self.names[v] for v in eqn.outputs])
            targets += "," * (eqn.primitive.multiple_results and len(eqn.outputs) == 1 and eqn.primitive is not fused_p)
            lines.append(f"    {targets}{' = ' * bool(targets)}{self._expression(eqn, k)}  # {_comment(eqn)}")
            self.asked_for[len(lines)] = eqn.source
            if self.given_up:
                lines += self._written_over(eqn, k)
            forgotten = [n for v in self.memory.ending[k] if v in self.large for n in self._release(v)]
            if forgotten:
                lines.append(f"    del {', '.join(forgotten)}")
            lines += self._mark(eqn)
        return [*lines, f"    return {', '.join(map(self._result, self.tape.outputs)) or '()'}"]

    def _names_of_constants(self) -> dict[Any, str]:
        """Names of constants, by their ids, where they are not letters."""
        return {}

    def _mark(self, eqn: Equation | None) -> list[str]:
        return [f"    {self.clock.line(eqn)}"] if self.clock else []

    def _expression(self, eqn: Equation, k: int) -> str:
        primitive = eqn.primitive
        operands = [self.names[a] if isinstance(a, Var) else self._operand(a) for a in eqn.inputs]
        foreign = _may_shard(eqn) or self._takes_foreign(eqn)
        if foreign:
            self.foreign.update(eqn.outputs)
        if foreign or _runs_wide(eqn):
            return self._call(eqn, operands, k)
        if primitive is fused_p:
            return f"{self._kernel(eqn)}({', '.join(operands)})"
        if primitive is copy_p:
            if target := self._given_up_for(eqn.outputs[0]):
                return f"{self._bind('write_over', write_over)}({target}, {operands[0]})"
            return f"{operands[0]}{'.copy()' if eqn.outputs[0].type.shape else '[()]'}"
        if primitive is where_p and _chooses_one(eqn):
            return "({1} if {0} else {2}).copy()".format(*operands)
        out = self._memory_for(eqn, k)
        if out is not None and primitive in IN_PLACE:
            return self._call(eqn, operands, k, IN_PLACE[primitive])
        if out is not None and isinstance(primitive, Specialized):
            return self._call(eqn, operands, k, primitive.impl)
        if out is not None:
            return f"{self._bind(primitive.name, primitive.impl)}({', '.join(operands)}, out={out})"
        # Python's operators return a Python number for a Python complex and a NumPy float64.
        if primitive in SOURCES and (eqn.outputs[0].type.shape or complex not in map(type, eqn.inputs)):
            return SOURCES[primitive](*operands, **eqn.params)
        return self._call(eqn, operands, k)

    def _takes_foreign(self, eqn: Equation) -> bool:
        return bool(self.foreign) and not self.foreign.isdisjoint([a for a in eqn.inputs if isinstance(a, Var)])

    def _call(self, eqn: Equation, operands: list[str], k: int, in_place: Callable | None = None) -> str:
        """`name(operands, parameters)`; other parameters are bound to the function."""
        primitive, params = eqn.primitive, eqn.params
        if primitive.is_higher_order:
            function: Any = functools.partial(_evaluate, primitive)
            foreign = self._takes_foreign(eqn)
            donated = [] if foreign else carries_of_its_own(eqn)
            params = {
                k: self._compile_body(eqn, k, v, foreign, donated if k == "body" else []) for k, v in params.items()
            }
            self.compiled[eqn] = Equation(primitive, eqn.inputs, params, eqn.outputs, eqn.source)
        else:
            function = functools.partial(evaluate, primitive) if _runs_wide(eqn) else in_place or primitive.impl
        name = f"{primitive.name}_in_place" if in_place else primitive.name
        if not params:
            return f"{self._bind(name, function)}({', '.join(operands)})"
        tapes = {k: v.name for k, v in params.items() if isinstance(v, CompiledTape)}
        self.namespace.update((v.name, v) for v in params.values() if isinstance(v, CompiledTape))
        shown, bound = tapes, {}
        if isinstance(primitive, Specialized):
            given_up = self._given_up_to(eqn) if _may_shard(eqn) else ()
            more = {"donated": given_up} if any(given_up) else {"in_place": True} if in_place else {}
            function = Undecided(primitive, {**params, **more})
        else:
            shown = {k: tapes.get(k) or repr(v) for k, v in params.items() if _is_shown(v) and is_identifier(k)}
            bound = {k: v for k, v in params.items() if k not in shown}
        name = self._bind(name, functools.partial(function, **bound) if bound else function)
        call = ", ".join([*operands, *(f"{k}={v}" for k, v in shown.items())])
        return f"{name}({call})"

    def _compile_body(self, eqn: Equation, key: str, value: Any, foreign: bool, donated: Sequence[bool]) -> Any:
        """Compile a parameter that is a tape, and add its source to `bodies`.

        If an operand of its operation is `foreign`, any of the body's may be. It may write into inputs in `donated`.
        """
        if not isinstance(value, Tape):
            return value
        name = self._name_of_body(f"{eqn.primitive.name}_{key}")
        self.bodies[name] = ""  # reserve the name; nested bodies come first
        compiled = CompiledTape(value, name, self.bodies, self.options, foreign, donated, self.runs * run_count(eqn))
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
        reference = functools.cache(lambda: Source(body, name, options={"kernels": False}).function)
        self.namespace[name] = Kernel(body, reference)
        self.bodies[name] = "\n".join(loop_lines(name, body, self.names)) + "\n"
        return name

    @property
    def llvm(self) -> str:
        """The kernels in LLVM's intermediate representation, those of bodies included."""
        found = []
        for name, x in self.namespace.items():
            if isinstance(x, Kernel):
                found.append(f"; {name}\n{x.llvm}\n")
            elif isinstance(x, CompiledTape):
                found.append(x.source.llvm)
        return "\n".join(filter(None, found))

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

    # ------------------------------------------------ memory

    def _memory_for(self, eqn: Equation, k: int) -> str | None:
        """The name of a dying operand whose memory a ufunc's large result can take, or None."""
        large = not self.large.isdisjoint(eqn.outputs)
        a = self.memory.reused_by(eqn, k, REUSED_BYTES, self.reused) if large else None
        if a is None:
            return None
        self.reused.add(a)
        self.takes[eqn.outputs[0]] = a
        if a in self.given_up:
            self.given_up.add(eqn.outputs[0])
        self.earlier[eqn.outputs[0]] = names = self.earlier.pop(a, [])
        names.append(self.names[a])
        return self.names[a]

    def _given_up_for(self, v: Var) -> str | None:
        """The name of an argument that was given up and is free, for a result; None if there is none."""
        if v not in self.returned or v in self.given_up or v in self.foreign:
            return None
        target = next((d for d in self.dead if d.type == v.type and d not in self.reused), None)
        if target is None:
            return None
        self.reused.add(target)
        self.given_up.add(v)
        return self.names[target]

    def _written_over(self, eqn: Equation, k: int) -> list[str]:
        """The lines that write results into arguments that were given up, and are not needed any more."""
        dead = [v for v in self.memory.ending[k] if v in self.given_up and v not in self.foreign]
        self.dead = dict.fromkeys([*dead, *self.dead])  # the last one first: it is the one that a result replaces
        lines = []
        for v in eqn.outputs:
            target = self._given_up_for(v)
            if target:
                self.copied.add(v)
                write = self._bind("write_over", write_over)
                lines.append(f"    {self.names[v]} = {write}({target}, {self.names[v]})")
        return lines

    def _given_up_to(self, eqn: Equation) -> tuple[bool, ...]:
        """Which operands are arguments that were given up, and that nothing else needs."""
        uses = count_uses(self.tape)
        given = [isinstance(a, Var) and a in self.given_up and uses[a] == 1 for a in eqn.inputs]
        self.reused.update(choose(eqn.inputs, given))
        self.passed_on[eqn] = tuple(given)
        return self.passed_on[eqn]

    def _release(self, v: Var) -> list[str]:
        """The names of a large dead value, to be deleted; none if its memory was reused."""
        if v in self.reused or v in self.given_up:
            return []
        return [*self.earlier.get(v, ()), self.names[v]]

    def _result(self, a: Atom) -> str:
        if isinstance(a, Var):
            return self.names[a]
        return self._bind("result", numpy.asarray(a)[()]) if is_scalar_constant(a) else self.names[id(a)]


def write_over(target: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    """Copy `x` into `target`, and return that."""
    numpy.copyto(target, x)
    return target


class Undecided(NamedTuple):
    """What a program calls for an operation until it has been decided what runs it."""

    primitive: Specialized
    params: dict

    def first_in(self, scope: dict[str, Any], name: str) -> Callable:
        """The first function of this `name`, which puts what has been decided in its place."""

        def first(*operands, **bodies):
            scope[name] = run = self.primitive.specialize(operands, self.params)
            return run(*operands, **bodies)

        return first


def _may_shard(eqn: Equation) -> bool:
    """Whether the results of an equation may be sharded arrays: those of a shard_map."""
    return eqn.primitive.is_higher_order and eqn.primitive.body_scope(eqn.params) is not None


def _runs_wide(eqn: Equation) -> bool:
    return bool(NARROW) and runs_wide(eqn.primitive, [a.type if isinstance(a, Var) else a for a in eqn.inputs])


def _chooses_one(eqn: Equation) -> bool:
    """Whether a `where` of one condition returns one of two arrays, neither of which it converts or broadcasts."""
    t, (condition, *arrays) = eqn.outputs[0].type, eqn.inputs
    return typeof(condition).shape == () != t.shape and all(isinstance(a, Var) and a.type == t for a in arrays)


def _names_of_operations(tape: Tape) -> frozenset[str]:
    """The names of the operations of a tape, bodies included."""
    bodies = [_names_of_operations(body) for eqn in tape.equations for body in eqn.bodies]
    return frozenset({eqn.primitive.name for eqn in tape.equations}).union(*bodies)


def _comment(eqn: Equation) -> str:
    """A line's comment: the results' types, and parameters not written out."""
    params = {k: v for k, v in eqn.params.items() if not isinstance(v, Tape)} if eqn.params else {}
    if eqn.primitive in SOURCES or all(map(_is_shown, params.values())):
        return types_of(eqn.outputs)
    shown = printable(textwrap.shorten(eqn.primitive.show_params(params), 80))
    return "; ".join(filter(None, [types_of(eqn.outputs), shown]))


def _is_shown(value: Any) -> bool:
    """Whether a parameter is written out: a number, string, tuple of these, or body."""
    if isinstance(value, tuple):
        return all(map(_is_shown, value))
    return value is None or type(value) in (bool, int, str, CompiledTape) or (type(value) is float and value == value)


# ---------------------------------------------------------------- bodies


class CompiledTape(Tape):
    """A tape that runs as compiled source on plain arrays.

    If an interpreter applies its operations one by one, their bodies are compiled tapes.
    """

    def __init__(
        self,
        tape: Tape,
        name: str,
        bodies: dict[str, str],
        options: dict,
        foreign: bool = False,
        donated: Sequence[bool] = (),
        runs: int = 1,
    ):
        super().__init__(tape.inputs, tape.equations, tape.outputs)
        self.name = name
        self.options = options
        self.source = Source(self, name, [foreign] * len(tape.inputs), bodies, options, donated, runs=runs)
        self.overwritten = self.source.overwritten  # a loop copies the first of these carries
        self.equations = [self.source.compiled.get(eqn, eqn) for eqn in tape.equations]
        self.lowered: dict[Any, Any] = {}  # lowered forms, cached by interpreters

    def __call__(self, *values: Value) -> list[Value]:
        interpreter = current_interpreter()
        if interpreter is EVALUATE:
            return self.source.results(*values)
        found: Any = interpreter.lower(self, values)
        if found is None and (clock := self.source.clock):
            noted: Any = clock.noting(self.equations)
            return Tape(self.inputs, noted, self.outputs).apply(*values)
        return self.apply(*values) if found is None else found


def _evaluate(primitive: Primitive, *args: Value, **params: Any) -> list[Value]:
    return primitive.evaluate([x if hasattr(x, "dtype") else numpy.asarray(x)[()] for x in args], params)


# ---------------------------------------------------------------- programs


class CompiledProgram:
    """A function compiled for arguments of given types: its `tape` and its `source`.

    It writes into the arguments in `overwritten`, by their places, which are some of those that are `donated`.
    """

    @collecting_later
    def __init__(self, f: Callable, args: Any, name: str, options: dict, donated: Sequence[bool] = ()):
        keep_by_default()
        tape, _, self.out_structure = stage_flat(f, args, f"jit of {name}")
        foreign = [typeof(x).sharding is not None for x in tree.leaves(args)]
        self.source = Source(optimize(tape, **options), name, foreign, options=options, donated=donated, given_up=True)
        self.tape = self.source.tape
        self.overwritten = self.source.overwritten
        structure = self.out_structure
        is_tuple = structure.node is tuple and structure.size != 1 and {*structure.children} <= {tree.LEAF}
        if structure is tree.LEAF or is_tuple:
            self.function = self.source.function
        else:
            run = self.source.results
            self.function = lambda *leaves: tree.unflatten(structure, run(*leaves))
