"""Fused kernels: groups of elementwise operations, each compiled into one loop.

Elementwise operations wait, and those on arrays of one shape run in one loop when something else needs a result of it.
They do not wait longer than that keeps four arrays in memory which nothing else needs.

A loop may end with sums of its elements. Values that only the loop itself uses are never stored.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy

from minidiff.compiler import native
from minidiff.compiler.fusion import fused_p
from minidiff.compiler.layout import Shape, find_layout
from minidiff.compiler.loops import EXCEPTIONS_FROM, Loop
from minidiff.compiler.lowering import DTYPES, lowering_of
from minidiff.compiler.mathematics import FUNCTIONS
from minidiff.core.tape import Atom, Equation, Tape, with_equations
from minidiff.core.tracer import Value
from minidiff.core.types import Var, typeof
from minidiff.higher_order.dead_code import count_uses
from minidiff.ops import elementwise, reduction
from minidiff.ops.base import sum_p
from minidiff.values.dtypes import is_scalar_constant

#: Arrays of fewer elements stay with NumPy, and so do groups of fewer elements times operations: compiling a loop takes
#: some 40 ms, as long as thousands of calls of such a group. A function such as exp counts as many operations, since
#: that is what its loop saves beside NumPy's: from 4 (log) to 33 (tanh) times the time of an addition.
LEAST_ELEMENTS, LEAST_WORK, FUNCTION_WORK = 256, 1 << 15, 16

#: The most operations, and the most operands with results, of one kernel. NumPy's limit is 64 operands and results.
MOST_OPERATIONS, MOST_OPERANDS = 400, 48

#: The most results of a kernel with sums: a generalized ufunc has at most 64 dimensions in all, and each may have two.
MOST_WITH_SUMS = 24

#: The most arrays that operations keep in memory only because they wait.
MOST_HELD = 4

# ---------------------------------------------------------------- groups


def fuse(tape: Tape, excluded: Container[Var] = ()) -> Tape:
    """Group the elementwise operations of a tape into equations of `fused_p`.

    Values in `excluded`, which may not be plain arrays, are not in groups.
    """
    loops = {eqn: shape for eqn in tape.equations if (shape := _loop_of(eqn, excluded)) is not None}
    if not loops:
        return tape
    uses = count_uses(tape)
    groups = _group(tape, loops)
    return with_equations(tape, [e for group in groups for e in _fused(group, loops.get(group[0], ()), uses)])


def _group(tape: Tape, loops: dict[Equation, Shape]) -> Iterator[list[Equation]]:
    """Yield the equations in an order in which each group is together; `loops` has the shapes of their loops."""
    last: dict[Atom, Any] = {a: eqn for eqn in tape.equations for a in eqn.inputs if isinstance(a, Var)}
    last.update(dict.fromkeys([*tape.inputs, *(a for a in tape.outputs if isinstance(a, Var))]))
    waiting: dict[Shape, list[Equation]] = {}
    maker: dict[Var, Equation] = {}  # of the results that wait
    held: Counter[Shape] = Counter()  # by loop: operands that it keeps, and nothing else needs

    def run(shape: Shape) -> list[Equation]:
        group = waiting.pop(shape)
        del held[shape]
        for eqn in group:
            del maker[eqn.outputs[0]]
        return group

    for eqn in tape.equations:
        shape = loops.get(eqn)
        makers = [maker[a] for a in eqn.inputs if isinstance(a, Var) and a in maker]
        needed = dict.fromkeys([loops[m] for m in makers if loops[m] != shape or m.primitive in SUMS])
        if shape is None:
            needed |= {other: None for other, count in held.items() if count > MOST_HELD}
        for other in needed:
            yield run(other)
        if shape is None:
            yield [eqn]
            continue
        waiting.setdefault(shape, []).append(eqn)
        maker[eqn.outputs[0]] = eqn
        outside = {a for a in eqn.inputs if isinstance(a, Var) and a not in maker and a.type.shape == shape}
        held[shape] += sum(last[a] is eqn for a in outside)
    for shape in [*waiting]:
        yield run(shape)


#: What ends a loop.
SUMS = (sum_p, reduction.mean_p)


def _loop_of(eqn: Equation, excluded: Container[Var]) -> Shape | None:
    """The shape of the loop that an equation can be part of, or None."""
    if not eqn.outputs or eqn.outputs[0] in excluded:
        return None
    out = eqn.outputs[0].type
    if eqn.primitive in SUMS:
        operand = typeof(eqn.inputs[0])
        fits = operand.dtype == out.dtype and out.dtype in DTYPES and out.dtype.kind != "b"
        return operand.shape if fits and operand.size >= LEAST_ELEMENTS else None
    return out.shape if out.size >= LEAST_ELEMENTS and lowering_of(eqn) is not None else None


def _work(eqn: Equation) -> int:
    """How many additions an operation counts as."""
    return FUNCTION_WORK if eqn.primitive.name in FUNCTIONS else 1


def _fused(group: list[Equation], shape: Shape, uses: dict[Var, int]) -> list[Equation]:
    """The equation of a group's kernel, and those of NumPy that finish its means; or parts of the group."""
    operations = [eqn for eqn in group if eqn.primitive not in SUMS]
    if len(group) < 2 or sum(map(_work, group)) * math.prod(shape) < LEAST_WORK:
        return group
    found = _kernel_equation(group, uses) if len(group) <= MOST_OPERATIONS else None
    if found is not None:
        return found
    if len(operations) < len(group) <= MOST_OPERATIONS:  # the sums do not fit into one loop
        rest = [eqn for eqn in group if eqn.primitive in SUMS]
        return [*(_fused(operations, shape, uses) if len(operations) > 1 else operations), *rest]
    if len(group) < 4:
        return group
    half = len(group) // 2
    return [*_fused(group[:half], shape, uses), *_fused(group[half:], shape, uses)]


def _kernel_equation(group: list[Equation], uses: dict[Var, int]) -> list[Equation] | None:
    """The equation of a kernel; None if it would have too many operands, or its sums do not fit together."""
    members = {v for eqn in group for v in eqn.outputs}
    inner: dict[Var, int] = {}
    names: dict[Any, Var] = {}  # atom from outside, by identity -> its name inside
    outside: list[Atom] = []
    body: list[Equation] = []
    finished: list[Equation] = []
    results: dict[Var, Var] = {}

    def operand(a: Atom) -> Atom:
        if not isinstance(a, Var) and is_scalar_constant(a):
            return a
        if isinstance(a, Var) and a in members:
            inner[a] = inner.get(a, 0) + 1
            return names[a]
        key = a if isinstance(a, Var) else id(a)
        if key not in names:
            names[key] = Var(typeof(a))
            outside.append(a)
        return names[key]

    for eqn in group:
        inputs = [operand(a) for a in eqn.inputs]
        (v,) = eqn.outputs
        names[v] = Var(v.type)
        if eqn.primitive is reduction.mean_p:
            total = Var(v.type)
            size = reduction.size_along(typeof(eqn.inputs[0]), eqn.params["axes"])
            finished.append(Equation(elementwise.divide.primitive, [total, size], {}, [v], eqn.source))
            results[v] = total
        elif eqn.primitive is sum_p or uses.get(v, 0) > 0:
            results[v] = v
        primitive = sum_p if eqn.primitive in SUMS else eqn.primitive
        body.append(Equation(primitive, inputs, eqn.params, [names[v]], eqn.source))
    kept = [v for v in results if uses.get(v, 0) > inner.get(v, 0)]
    if len(outside) + len(kept) > MOST_OPERANDS:
        return None
    inputs_ = [v for k, v in names.items() if k not in members]
    tape = Tape(inputs_, body, [names[v] for v in kept])
    if any(eqn.primitive is sum_p for eqn in body) and (len(kept) > MOST_WITH_SUMS or find_layout(tape) is None):
        return None
    return [Equation(fused_p, outside, {"body": tape}, [results[v] for v in kept], group[0].source), *finished]


# ---------------------------------------------------------------- kernels


class Kernel:
    """A compiled loop: a function of arrays that returns its results, as NumPy's operations would compute them.

    If an operation overflowed, divided by zero or had no result, the group runs again by `reference()`, NumPy's
    operations, which then warn of it, unless all warnings are ignored.
    """

    def __init__(self, body: Tape, reference: Callable[[], Callable]):
        self.body = body
        self.reference = reference
        sums = any(eqn.primitive is sum_p for eqn in body.equations)
        self.loop = Loop(body, find_layout(body) if sums else None)

    @property
    def llvm(self) -> str:
        """The kernel in LLVM's intermediate representation."""
        return self.loop.text()

    def compiled(self) -> tuple[numpy.ufunc, Any]:
        """The kernel as a ufunc, compiled or from the cache, and the cell in which it reports exceptions."""
        dtypes = [tuple([p.dtype for p in ps]) for ps in (self.loop.operands, self.loop.results)]
        return _compile(self.llvm, *dtypes, self.loop.signature)

    def function(self) -> Callable:
        """What the program calls."""
        (ufunc, raised), reference = self.compiled(), self.reference
        run = ufunc if self.loop.layout is None else self._of_blocks(ufunc)

        def fused(*operands: Value) -> Any:
            before = raised.value
            out = run(*operands)
            after = raised.value
            if after != before:
                exact = after >> EXCEPTIONS_FROM == before >> EXCEPTIONS_FROM
                if not (exact and _warnings_are_ignored()):
                    return reference()(*operands)
            return out

        return fused

    def _of_blocks(self, ufunc: numpy.ufunc) -> Callable:
        """The kernel with operands seen as rows and columns, and results as they are wanted."""
        layout = self.loop.layout
        assert layout is not None
        rows, columns = layout.sizes
        blocks = {"mn": (rows, columns), "n": (columns,), "m": (rows,), "": ()}
        given = [blocks[p.dimensions] for p in self.loop.operands]
        wanted = [v.type.shape for v in self.body.outputs]

        def run(*operands: Value) -> Any:
            out = ufunc(*[x.reshape(s) for x, s in zip(operands, given)])
            outs = out if type(out) is tuple else (out,)
            outs = tuple([x.reshape(s) if s else x for x, s in zip(outs, wanted)])
            return outs if len(outs) > 1 else outs[0]

        return run


def _warnings_are_ignored() -> bool:
    return {"ignore"}.issuperset(numpy.geterr().values())


@functools.lru_cache(maxsize=4096)
def _compile(
    text: str, inputs: tuple[numpy.dtype, ...], outputs: tuple[numpy.dtype, ...], signature: str | None
) -> tuple[numpy.ufunc, Any]:
    """The ufunc of a loop, and the cell in which it says that it raised a floating-point exception."""
    raised = ctypes.c_int64(0)
    address = native.load_function(text, "kernel")
    return native.make_ufunc("fused", address, inputs, outputs, signature, raised), raised
