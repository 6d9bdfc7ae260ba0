"""Kernels of small arrays: loops, and groups of operations, as one function whose values are in registers.

Arrays of instructions (`ir.py`) stand for arrays of numbers. NumPy moves, adds and multiplies them as it does numbers,
and an elementwise operation is written once for each element. So the step of a loop costs no call, which would take
about 1 µs for each operation, however small the arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy

from minidiff.compiler.buffers import copy_p, fused_p
from minidiff.compiler.ir import Code, Value, constant, convert, type_of
from minidiff.compiler.kernels import Kernel, compile_kernel, is_for_numpy
from minidiff.compiler.loops import EXCEPTION, FINISH, WARNING
from minidiff.compiler.lowering import DTYPES, lowering_of
from minidiff.compiler.mathematics import FUNCTIONS
from minidiff.control_flow.dead_code import count_uses
from minidiff.control_flow.loops import scan_p
from minidiff.control_flow.partial_eval import CARRY, CONST, SCANNED
from minidiff.control_flow.while_loop import while_p
from minidiff.core.tape import Atom, Equation, Tape, with_equations
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.ops import base, indexing, linalg, rearranging, reduction, shape
from minidiff.values.dtypes import is_scalar_constant
from minidiff.values.lists import split_list

#: The most elements of an array, and instructions of an operation; the most instructions of a loop and of a group: LLVM
#: compiles some 10 in a millisecond, but only 1 or 2 where thousands follow each other. As how many a function counts.
MAX_SIZE, MAX_INSTRUCTIONS, GROUP_INSTRUCTIONS, FUNCTION_INSTRUCTIONS = 256, 4096, 1024, 32

#: The fewest operations of NumPy, over all steps of all runs, whose time is worth compiling a kernel; the fewest in a
#: group, whose kernel costs a call; the number of steps that a `while_loop` is assumed to have.
MIN_CALLS, MIN_GROUP, WHILE_STEPS = 64, 8, 16

#: About the number of instructions that run in one call, which takes some milliseconds, so that Ctrl-C can stop a loop.
CALL_INSTRUCTIONS = 1 << 22

#: Operations that NumPy runs on arrays of instructions.
_MOVES = {
    *(base.reshape_p, base.broadcast_to_p, copy_p, indexing.slice_p, indexing.unslice_p, rearranging.roll_p),
    *(rearranging.diagonal_p, rearranging.embed_diagonal_p, shape.transpose_p, shape.concatenate_p, shape.split_p),
    *(shape.stack_p, shape.unstack_p),
}
_SUMS = {base.sum_p, reduction.mean_p, linalg.matmul_p}

_KERNEL = """define void @kernel(ptr %args, ptr %sizes, ptr %steps, ptr %report) {{
entry:
%events = alloca i32
store i32 0, ptr %events
{entry}
{lines}
br label %end
{finish}
{declarations}"""

# ---------------------------------------------------------------- what is in a kernel


def _count_instructions(eqn: Equation) -> float:
    """Return about how many instructions an operation is on elements in registers; infinity if it cannot be there."""
    types = [*map(typeof, eqn.inputs), *[v.type for v in eqn.outputs]]
    if not types or math.isinf(sum(map(_size, types))):
        return math.inf
    is_uniform = len({t.dtype for t in types}) == 1
    if eqn.primitive in _MOVES:
        return 0 if is_uniform else math.inf
    if eqn.primitive in _SUMS:
        work = types[-1].size * types[0].shape[-1] if eqn.primitive is linalg.matmul_p else types[0].size
        return work if is_uniform and work <= MAX_SIZE and types[0].dtype != bool else math.inf
    work = types[-1].size * (FUNCTION_INSTRUCTIONS if eqn.primitive.name in FUNCTIONS else 1)
    return work if work <= MAX_SIZE and lowering_of(eqn) is not None else math.inf


def _size(t: ShapedArray) -> float:
    return t.size if 0 < t.size <= MAX_SIZE and t.dtype in DTYPES and t.sharding is None else math.inf


def fuse_small(tape: Tape, excluded: Container[Var], runs: int) -> Tape:
    """Group operations on small arrays that follow each other, each group as a kernel."""
    groups: list[list[Equation]] = []
    work, uses = math.inf, count_uses(tape)
    for eqn in tape.equations:
        is_plain = not eqn.bodies and not any(v in excluded for v in eqn.outputs)
        count = _count_instructions(eqn) if is_plain else math.inf
        work += count
        if work > GROUP_INSTRUCTIONS:
            groups.append([])
            work = count
        groups[-1].append(eqn)
    kernels = [_kernel(g, uses) if len(g) >= MIN_GROUP and runs * len(g) >= MIN_CALLS else g for g in groups]
    return with_equations(tape, [eqn for group in kernels for eqn in group])


def _kernel(group: list[Equation], uses: dict[Var, int]) -> list[Equation]:
    used = Counter(a for eqn in group for a in eqn.inputs if isinstance(a, Var))
    results = [v for eqn in group for v in eqn.outputs]
    operands, returned = [v for v in used if v not in results], [v for v in results if uses.get(v, 0) > used[v]]
    params = {"body": Tape(operands, group, returned), "in_registers": True}
    return [Equation(fused_p, operands, params, returned, group[0].source)] if returned else group


def find_loops(tape: Tape, excluded: Container[Var], runs: int) -> set[Equation]:
    """Return the loops of a tape that runs `runs` times which are worth compiling, and fit in registers."""

    def is_worthwhile(eqn: Equation) -> bool:
        if eqn.primitive not in (scan_p, while_p) or any(v in excluded for v in eqn.outputs):
            return False
        steps, equations = eqn.params.get("length", WHILE_STEPS), [e for body in eqn.bodies for e in body.equations]
        shared = [_size(typeof(a)) for a, group in zip(eqn.inputs, _groups(eqn)) if group != SCANNED]
        is_small = sum([*shared, *map(_count_instructions, equations)]) <= MAX_INSTRUCTIONS
        return runs * steps * len(equations) >= MIN_CALLS and is_small

    return {eqn for eqn in tape.equations if is_worthwhile(eqn)}


def _groups(eqn: Equation) -> list[int]:
    """Return how a loop takes its operands (see `BodyOperation`); a group of operations is one step without carries."""
    loop: Any = eqn.primitive
    if loop is fused_p:
        return [CONST] * len(eqn.inputs)
    return [*[CONST] * loop.count_leading(eqn.params), *loop.groups(eqn.params)[0]]


# ---------------------------------------------------------------- kernels

Array = numpy.ndarray  # of values, the instructions of its elements
_INDEX, _BOOL = numpy.dtype("i8"), numpy.dtype(bool)


class RegisterKernel(Kernel):
    """A loop, or a group of operations, in registers.

    Its function runs steps from one number to another. It takes these, and the addresses of operands and results, and
    returns whether there are more steps.
    """

    def __init__(self, eqn: Equation):
        self.eqn, self.code, self.entry = eqn, Code(), list[str]()
        self.groups = _groups(eqn)
        self._write_function()

    @property
    def llvm(self) -> str:
        entry, declarations = "\n".join(self.entry), "\n".join(sorted(self.code.declarations))
        return _KERNEL.format(entry=entry, lines=self.code, finish=FINISH, declarations=declarations)

    def function(self) -> Callable:
        ufunc, raised = compile_kernel(self.llvm, (_INDEX, _INDEX), (_BOOL,), "(two),(n)->()")
        eqn, types = self.eqn, [v.type for v in self.eqn.outputs]
        n, m = map(self.groups.count, (CONST, CARRY))
        span = numpy.array([0, max(1, CALL_INSTRUCTIONS // len(self.code.lines))])

        def run(*operands: Any, **params: Any) -> Any:
            """Run all steps; `params` has the compiled bodies, in which NumPy computes what the kernel cannot."""
            arrays = [*map(_adjacent, operands)]
            outs = [numpy.empty(t.shape, t.dtype) for t in types]
            carry, numbers, has_more = arrays[n : n + m], span, True
            while has_more:
                before, outs[:m] = raised.value, [*map(numpy.empty_like, carry)]
                addresses = [x.ctypes.data for x in (*arrays[:n], *carry, *arrays[n + m :], *outs)]
                has_more = ufunc(numbers, addresses)
                if (after := raised.value) != before and is_for_numpy(before, after):
                    outs, has_more = eqn.primitive.evaluate([x[()] for x in arrays], {**eqn.params, **params}), False
                carry, numbers = outs[:m], numbers + span[1]
            outs = [x if x.shape else x[()] for x in outs]
            return outs[0] if len(outs) == 1 and eqn.primitive is fused_p else outs

        return run

    # ------------------------------------------------ memory

    def _write(self, instruction: str) -> str:
        """Write an instruction that depends on memory, and return the name of its result."""
        name = f"%m{len(self.code.lines)}"
        self.code.lines.append(f"{name} = {instruction}")
        return name

    def _addresses(self, array: str, count: int) -> list[str]:
        places = [self.code.write(f"getelementptr ptr, ptr {array}, i64 {k}") for k in range(count)]
        return [self._write(f"load ptr, ptr {place}") for place in places]

    def _elements(self, address: str, dtype: numpy.dtype, size: int, row: Value | None) -> list[str]:
        """Return the addresses of an array's elements, or of those of a row."""
        step = f"getelementptr {_memory(dtype)}, ptr"
        start = address if row is None else self.code.write(f"{step} {address}, {row * size}")
        return [self.code.write(f"{step} {start}, i64 {k}") for k in range(size)]

    def _load(self, address: str, t: ShapedArray, row: Value | None = None) -> Array:
        elements = self._elements(address, t.dtype, t.size, row)
        names = [self._write(f"load {_memory(t.dtype)}, ptr {element}") for element in elements]
        if t.dtype == bool:
            names = [self.code.write(f"icmp ne i8 {name}, 0") for name in names]
        return self._array([Value(self.code, name, t.dtype) for name in names], t.dtype).reshape(t.shape)

    def _store(self, addresses: Sequence[str], arrays: Sequence[Array], row: Value | None = None) -> None:
        """Store arrays, and report the conditions of the instructions so far: see `loops.py`."""
        for address, values in zip(addresses, arrays):
            for element, x in zip(self._elements(address, values.flat[0].dtype, values.size, row), values.flat):
                text = f"i8 {self.code.write(f'zext {x} to i8')}" if x.dtype == bool else x
                self.code.lines.append(f"store {text}, ptr {element}")
        for conditions, flags in ((self.code.warnings, WARNING), (self.code.exceptions, EXCEPTION)):
            for condition in conditions:
                bits = self._write(f"select {condition}, i32 {flags}, i32 0")
                before = self._write("load i32, ptr %events")
                self.code.lines.append(f"store i32 {self._write(f'or i32 {before}, {bits}')}, ptr %events")
            conditions.clear()

    # ------------------------------------------------ operations

    def _array(self, x: Any, dtype: numpy.dtype) -> Array:
        """Return an array of values, whose numbers become constants of this dtype."""
        lift = lambda y: y if isinstance(y, Value) else constant(self.code, y, dtype)  # noqa: E731
        return numpy.asarray(numpy.frompyfunc(lift, 1, 1)(numpy.asarray(x, object)), object)

    def _evaluate(self, tape: Tape, arrays: Sequence[Array]) -> list[Array]:
        values = dict(zip(tape.inputs, arrays))
        read = lambda a: values[a] if isinstance(a, Var) else self._array(a, numpy.asarray(a).dtype)  # noqa: E731
        for eqn in tape.equations:
            if eqn.primitive in _MOVES or eqn.primitive in _SUMS:
                outs = eqn.primitive.impl(*map(read, eqn.inputs), **eqn.params)
                outs = outs + 0 if eqn.primitive in _SUMS else outs  # NumPy's sums begin at 0.0: there is no -0.0
            else:
                outs = self._elementwise(eqn, read)
            for v, x in zip(eqn.outputs, outs if eqn.primitive.multiple_results else [outs]):
                values[v] = self._array(x, v.type.dtype)
        return [*map(read, tape.outputs)]

    def _elementwise(self, eqn: Equation, read: Callable[[Atom], Array]) -> Any:
        lowering = lowering_of(eqn)
        assert lowering is not None
        (write, dtypes), result = lowering, eqn.outputs[0].type.dtype
        operands = [
            self._array(d.type(a), d) if is_scalar_constant(a) else read(a)  # a Python number has the operation's dtype
            for a, d in zip(eqn.inputs, dtypes)
        ]
        run = lambda *xs: convert(write(*map(convert, xs, dtypes)), result)  # noqa: E731
        return numpy.frompyfunc(run, len(operands), 1)(*operands)

    # ------------------------------------------------ loops

    def _write_function(self) -> None:
        params, types = self.eqn.params, [typeof(a) for a in self.eqn.inputs]
        body, length, k = params["body"], params.get("length", 0), params.get("cond_consts", 0)
        n, m = map(self.groups.count, (CONST, CARRY))
        span, table, flag = self._addresses("%args", 3)
        sources, targets = split_list(self._addresses(table, len(types) + len(self.eqn.outputs)), len(types))
        consts, carry = split_list([*map(self._load, sources[: n + m], types)], n)

        def holds(i: Value, carry: Sequence[Array]) -> Any:
            return i < length if length else self._evaluate(params["cond"], [*consts[:k], *carry])[0][()]

        def step(i: Value, carry: Sequence[Array]) -> Sequence[Array]:
            row = length - 1 - i if params.get("reverse") else i
            elements = [self._load(x, t, row) for x, t in zip(sources[n + m :], body.in_types[n - k + m :])]
            outs = self._evaluate(body, [*consts[k:], *carry, *elements])
            self._store(targets[m:], outs[m:], row)
            return outs[:m]

        if self.eqn.primitive is fused_p:
            outs, has_more = self._evaluate(body, consts), constant(self.code, False, _BOOL)
        else:
            numbers = self._load(span, ShapedArray((2,), _INDEX))
            *outs, has_more = self._repeat(numbers, [v.type for v in self.eqn.outputs[:m]], carry, holds, step)
        self._store([*targets[: len(outs)], flag], [*outs, self._array(has_more, _BOOL)])

    def _repeat(
        self, span: Array, types: Sequence[ShapedArray], carry: Sequence[Array], holds: Callable, step: Callable
    ) -> list[Any]:
        """Write a loop: while a number is in a span and `holds` is true, `step` returns the next carries.

        Returns the last carries, and then whether it still holds. LLVM puts the carries into registers.
        """
        types = [ShapedArray((), _INDEX), *types]
        cells = [f"%c{k}" for k in range(len(types))]
        self.entry += [f"{cell} = alloca [{t.size} x {_memory(t.dtype)}]" for cell, t in zip(cells, types)]
        self._store(cells, [self._array(span[0], _INDEX), *carry])
        self.code.lines += ["br label %head", "head:"]
        i, *last = map(self._load, cells, types)
        has_more = holds(i[()], last)
        self._store([], [])
        self.code.lines += [f"br {has_more & (i[()] < span[1])}, label %step, label %last", "step:"]
        known = {**self.code.known}
        self._store(cells, [self._array(i[()] + 1, _INDEX), *step(i[()], last)])
        self.code.known = known  # without instructions of the step, which is not always executed
        self.code.lines += ["br label %head", "last:"]
        return [*last, has_more]


def _adjacent(x: Any) -> numpy.ndarray:
    """Return an array whose elements are adjacent and aligned."""
    return x if type(x) is numpy.ndarray and x.flags.carray else numpy.require(x, requirements=["C", "A"])


def _memory(dtype: numpy.dtype) -> str:
    return "i8" if dtype.kind == "b" else type_of(dtype)
