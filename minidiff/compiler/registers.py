"""Programs on small arrays, as one function of machine code: each element has a register, and loops run inside.

Arrays of instructions (`ir.py`) stand for arrays of numbers. NumPy moves, adds and multiplies them as it does numbers,
and an elementwise operation is written once for each element. So the step of a loop costs no call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff.compiler.buffers import copy_p
from minidiff.compiler.ir import Code, Value, constant, convert, type_of
from minidiff.compiler.loops import EXCEPTION, FINISH, WARNING
from minidiff.compiler.lowering import DTYPES, lowering_of
from minidiff.compiler.mathematics import FUNCTIONS
from minidiff.control_flow.loops import scan_p
from minidiff.core.tape import Atom, Equation, Tape
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.ops import base, indexing, linalg, rearranging, reduction, shape
from minidiff.values.dtypes import is_scalar_constant
from minidiff.values.lists import split_list

#: The most elements of an array, and instructions of an operation; the most instructions of a function of machine code;
#: and as how many a function such as exp counts. Compiling takes some 0.1 s for 1,000 of them.
MAX_SIZE, MAX_INSTRUCTIONS, FUNCTION_INSTRUCTIONS = 256, 4096, 32

#: Operations that NumPy runs on arrays of instructions.
_MOVES = {
    *(base.reshape_p, base.broadcast_to_p, copy_p, indexing.slice_p, indexing.unslice_p, rearranging.roll_p),
    *(rearranging.diagonal_p, rearranging.embed_diagonal_p, shape.transpose_p, shape.concatenate_p, shape.split_p),
    *(shape.stack_p, shape.unstack_p),
}
_SUMS = {base.sum_p, reduction.mean_p, linalg.matmul_p}

Array = numpy.ndarray  # of values, the instructions of its elements
_INDEX, _BOOL = numpy.dtype("i8"), numpy.dtype(bool)

_KERNEL = """define void @kernel(ptr %args, ptr %sizes, ptr %steps, ptr %report) {{
entry:
%events = alloca i32
store i32 0, ptr %events
{entry}
{lines}
br label %end
{finish}
{declarations}"""

# ---------------------------------------------------------------- what fits


def count_instructions(eqn: Equation) -> float:
    """Return about how many instructions an equation is on elements in registers; infinity if it cannot be there."""
    if eqn.primitive is scan_p and eqn.params["length"]:
        return sum(
            [*map(size_in_registers, map(typeof, eqn.inputs)), *map(count_instructions, eqn.params["body"].equations)]
        )
    types = [*map(typeof, eqn.inputs), *[v.type for v in eqn.outputs]]
    size, is_uniform = max(map(size_in_registers, types), default=0), len({t.dtype for t in types}) == 1
    if eqn.primitive in _MOVES:
        return 0 if is_uniform and size <= MAX_SIZE else math.inf
    if eqn.primitive in _SUMS:
        size = types[-1].size * types[0].shape[-1] if eqn.primitive is linalg.matmul_p else size
        return size if is_uniform and size <= MAX_SIZE and types[0].dtype != bool else math.inf
    size *= FUNCTION_INSTRUCTIONS if eqn.primitive.name in FUNCTIONS else 1
    return size if size <= MAX_SIZE and lowering_of(eqn) is not None else math.inf


def size_in_registers(t: ShapedArray) -> float:
    """Return the size of an array; infinity if it has elements that registers do not hold."""
    return t.size if 0 < t.size <= MAX_SIZE and t.dtype in DTYPES and t.sharding is None else math.inf


# ---------------------------------------------------------------- functions


class Registers:
    """The function of a tape whose arrays are small: `kernel` is what NumPy calls, with addresses of arrays."""

    layout = None  # no dimension is NumPy's to walk over

    def __init__(self, operands: Sequence[ShapedArray], results: Sequence[ShapedArray]):
        self.code, self.entry = Code(), list[str]()
        self.operands, self.results = operands, results
        self.sources, self.targets = split_list(self._addresses("%args", len(operands) + len(results)), len(operands))

    def write_tape(self, tape: Tape) -> Registers:
        """Write the function of a tape, from arrays of its inputs to arrays of its results."""
        self._finish(self.targets, self._evaluate(tape, [*map(self._load, self.sources, tape.in_types)]))
        return self

    @property
    def signature(self) -> str:
        """The signature of the generalized ufunc, all of whose dimensions have fixed sizes."""
        groups = [[f"({','.join(map(str, t.shape))})" for t in ts] for ts in (self.operands, self.results)]
        return "->".join(",".join(group) for group in groups)

    def text(self) -> str:
        """Return the module."""
        entry, declarations = "\n".join(self.entry), "\n".join(sorted(self.code.declarations))
        return _KERNEL.format(entry=entry, lines=self.code, finish=FINISH, declarations=declarations)

    # ------------------------------------------------ memory

    def _write(self, instruction: str) -> str:
        """Write an instruction that depends on memory, and return the name of its result."""
        name = f"%m{len(self.code.lines)}"
        self.code.lines.append(f"{name} = {instruction}")
        return name

    def _addresses(self, array: str, count: int) -> list[str]:
        places = [self.code.write(f"getelementptr ptr, ptr {array}, i64 {k}") for k in range(count)]
        return [self._write(f"load ptr, ptr {place}") for place in places]

    def _allocate(self, t: ShapedArray) -> str:
        """Return the address of memory for an array. LLVM replaces it by registers if no index depends on a value."""
        name = f"%c{len(self.entry)}"
        self.entry.append(f"{name} = alloca [{t.size} x {_memory(t)}]")
        return name

    def _elements(self, address: str, t: ShapedArray, row: Value | None) -> list[str]:
        """Return the addresses of an array's elements, or of those of a row."""
        step = f"getelementptr {_memory(t)}, ptr"
        start = address if row is None else self.code.write(f"{step} {address}, {row * t.size}")
        return [self.code.write(f"{step} {start}, i64 {k}") for k in range(t.size)]

    def _load(self, address: str, t: ShapedArray, row: Value | None = None) -> Array:
        names = [self._write(f"load {_memory(t)}, ptr {element}") for element in self._elements(address, t, row)]
        if t.dtype == bool:
            names = [self.code.write(f"icmp ne i8 {name}, 0") for name in names]
        return self._array([Value(self.code, name, t.dtype) for name in names], t.dtype).reshape(t.shape)

    def _store(self, address: str, values: Array, row: Value | None = None) -> None:
        t = ShapedArray(values.shape, values.flat[0].dtype)
        for element, x in zip(self._elements(address, t, row), values.flat):
            text = f"i8 {self.code.write(f'zext {x} to i8')}" if t.dtype == bool else x
            self.code.lines.append(f"store {text}, ptr {element}")

    def _report(self) -> None:
        """Report the conditions of the instructions so far: see `loops.py`."""
        for conditions, flags in ((self.code.warnings, WARNING), (self.code.exceptions, EXCEPTION)):
            for condition in conditions:
                bits = self._write(f"select {condition}, i32 {flags}, i32 0")
                before = self._write("load i32, ptr %events")
                self.code.lines.append(f"store i32 {self._write(f'or i32 {before}, {bits}')}, ptr %events")
            conditions.clear()

    def _finish(self, targets: Sequence[str], outs: Sequence[Array]) -> None:
        for target, x in zip(targets, outs):
            self._store(target, x)
        self._report()

    # ------------------------------------------------ operations

    def _array(self, x: Any, dtype: numpy.dtype) -> Array:
        """Return an array of values, whose numbers become constants of this dtype."""
        lift = lambda y: y if isinstance(y, Value) else constant(self.code, y, dtype)  # noqa: E731
        return numpy.asarray(numpy.frompyfunc(lift, 1, 1)(numpy.asarray(x, object)), object)

    def _evaluate(self, tape: Tape, arrays: Sequence[Array]) -> list[Array]:
        values = dict(zip(tape.inputs, arrays))
        read = lambda a: values[a] if isinstance(a, Var) else self._array(a, numpy.asarray(a).dtype)  # noqa: E731
        for eqn in tape.equations:
            if eqn.primitive is scan_p:
                outs = self._nested_scan(eqn, [*map(read, eqn.inputs)])
            elif eqn.primitive in _MOVES or eqn.primitive in _SUMS:
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

    def write_loop(self, eqn: Equation) -> Registers:
        """Write the function of a loop: its steps from one number to another, or to the last one.

        It takes the numbers, and the addresses of the operands and results. It returns whether there are more steps.
        """
        params, count = eqn.params, len(eqn.inputs)
        span = self._load(self.sources[0], self.operands[0])
        sources, targets = split_list(self._addresses(self.sources[1], self.operands[1].size), count)
        types, m = [*map(typeof, eqn.inputs)], len(eqn.outputs)
        if eqn.primitive is scan_p:
            count, m = params["consts"] + params["carry"], params["carry"]
        values = [*map(self._load, sources[:count], types)]
        if eqn.primitive is scan_p:
            carry, more = self._scan(params, values, sources[count:], targets[m:], span)
        else:
            tests, consts, carry = split_list(values, params["cond_consts"], params["body_consts"])
            holds = lambda i, carry: self._evaluate(params["cond"], [*tests, *carry])[0][()]  # noqa: E731
            step = lambda i, carry: self._evaluate(params["body"], [*consts, *carry])  # noqa: E731
            carry, more = self._repeat(span, carry, holds, step)
        self._finish([*targets[:m], *self.targets], [*carry, self._array(more, _BOOL)])
        return self

    def _repeat(
        self, span: Array, carry: Sequence[Array], holds: Callable, step: Callable
    ) -> tuple[Sequence[Array], Value]:
        """Write a loop: while a number is in a span and `holds` is true, `step` returns the next carries.

        Returns the last carries, and whether it still holds.
        """
        state = [self._array(span[0], _INDEX), *carry]
        types = [ShapedArray(x.shape, x.flat[0].dtype) for x in state]
        cells, label = [*map(self._allocate, types)], len(self.code.lines)
        self._finish(cells, state)
        self.code.lines += [f"br label %head{label}", f"head{label}:"]
        i, *carry = map(self._load, cells, types)
        more = holds(i[()], carry)
        self._report()
        condition = more & (i[()] < span[1])
        self.code.lines += [f"br {condition}, label %step{label}, label %done{label}", f"step{label}:"]
        known = {**self.code.known}
        self._finish(cells, [self._array(i[()] + 1, _INDEX), *step(i[()], carry)])
        self.code.known = known  # without instructions of the step, which is not always executed
        self.code.lines += [f"br label %head{label}", f"done{label}:"]
        return carry, more

    def _scan(
        self, params: dict, values: Sequence[Array], xs: Sequence[str], ys: Sequence[str], span: Array
    ) -> tuple[Sequence[Array], Value]:
        """Write a `scan` from rows at the addresses `xs` to rows at `ys`; return the last carries."""
        body, length = params["body"], params["length"]
        consts, carry = split_list(values, params["consts"])

        def step(i: Value, carry: Sequence[Array]) -> Sequence[Array]:
            row = length - 1 - i if params["reverse"] else i
            elements = [self._load(x, t, row) for x, t in zip(xs, body.in_types[len(values) :])]
            outs = self._evaluate(body, [*consts, *carry, *elements])
            for y, x in zip(ys, outs[len(carry) :]):
                self._store(y, x, row)
            return outs[: len(carry)]

        return self._repeat(span, carry, lambda i, carry: i < length, step)

    def _nested_scan(self, eqn: Equation, arrays: Sequence[Array]) -> list[Array]:
        m = eqn.params["carry"]
        values, xs = split_list(arrays, eqn.params["consts"] + m)
        sources = [self._allocate(typeof(a)) for a in eqn.inputs[len(values) :]]
        targets = [self._allocate(v.type) for v in eqn.outputs[m:]]
        self._finish(sources, xs)
        carry, _ = self._scan(eqn.params, values, sources, targets, self._array([0, eqn.params["length"]], _INDEX))
        return [*carry, *[self._load(y, v.type) for y, v in zip(targets, eqn.outputs[m:])]]


def _memory(t: ShapedArray) -> str:
    return "i8" if t.dtype == bool else type_of(t.dtype)
