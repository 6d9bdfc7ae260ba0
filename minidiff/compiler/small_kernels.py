"""Kernels of small arrays: programs of many operations on them, and loops whose steps are such programs.

`registers.py` writes them. Each replaces as many calls of NumPy, which take about 1 µs each, however small the arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import numpy

from minidiff.compiler.buffers import fused_p
from minidiff.compiler.kernels import MAX_OPERANDS, Kernel, is_for_numpy
from minidiff.compiler.registers import MAX_INSTRUCTIONS, Registers, count_instructions, size_in_registers
from minidiff.control_flow.dead_code import count_uses
from minidiff.control_flow.loops import scan_p, while_p
from minidiff.control_flow.partial_eval import CARRY, CONST, SCANNED
from minidiff.core.tape import Equation, Tape, with_equations
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.values.lists import split_list

#: The fewest operations of NumPy, over all steps of all runs, whose time (about 1 µs each) is worth compiling a kernel;
#: and the number of steps that a `while_loop` is assumed to have.
MIN_CALLS, WHILE_STEPS = 64, 16

#: The fewest operations on small arrays whose kernel, which costs a call, takes less time.
MIN_GROUP = 8

#: About the number of instructions that a loop runs in one call, which takes some milliseconds.
STEP_INSTRUCTIONS = 1 << 22

# ---------------------------------------------------------------- what is a kernel


def fuse_small(tape: Tape, excluded: Container[Var], runs: int) -> Tape:
    """Group operations on small arrays that follow each other, each group as a kernel: see `registers.py`."""
    groups: list[list[Equation]] = []
    work, uses = math.inf, count_uses(tape)
    for eqn in tape.equations:
        is_plain = not eqn.bodies and not any(v in excluded for v in eqn.outputs)
        count = count_instructions(eqn) if is_plain else math.inf
        work += count
        if work > MAX_INSTRUCTIONS:
            groups.append([])
            work = count
        groups[-1].append(eqn)
    kernels = [_small_kernel(g, uses) if len(g) >= MIN_GROUP and runs * len(g) >= MIN_CALLS else g for g in groups]
    return with_equations(tape, [eqn for group in kernels for eqn in group])


def _small_kernel(group: list[Equation], uses: dict[Var, int]) -> list[Equation]:
    """Return the equation of a kernel in registers; the group if it has too many operands."""
    used = Counter(a for eqn in group for a in eqn.inputs if isinstance(a, Var))
    results = {v: uses.get(v, 0) > used[v] for eqn in group for v in eqn.outputs}
    operands = [v for v in used if v not in results]
    returned = [v for v, is_used_later in results.items() if is_used_later]
    if not 0 < len(operands) + len(returned) <= MAX_OPERANDS:
        return group
    body = Tape(operands, group, returned)
    return [Equation(fused_p, operands, {"body": body, "small": True}, returned, group[0].source)]


def find_loops(tape: Tape, excluded: Container[Var], runs: int) -> set[Equation]:
    """Return the loops of a tape that runs `runs` times which are worth compiling, and fit in registers."""

    def is_worthwhile(eqn: Equation) -> bool:
        if eqn.primitive not in (scan_p, while_p) or any(v in excluded for v in eqn.outputs):
            return False
        steps, equations = eqn.params.get("length", WHILE_STEPS), [e for body in eqn.bodies for e in body.equations]
        shared = [typeof(a) for a, group in zip(eqn.inputs, _groups(eqn)) if group != SCANNED]
        work = sum([*map(size_in_registers, shared), *map(count_instructions, equations)])
        calls = runs * steps * sum(e.params.get("length", 1) for e in equations)
        return calls >= MIN_CALLS and work <= MAX_INSTRUCTIONS

    return {eqn for eqn in tape.equations if is_worthwhile(eqn)}


def _groups(eqn: Equation) -> list[int]:
    """Return how a loop takes its operands: see `BodyOperation`."""
    loop: Any = eqn.primitive
    return [*[CONST] * loop.count_leading(eqn.params), *loop.groups(eqn.params)[0]]


# ---------------------------------------------------------------- kernels


class SmallKernel(Kernel):
    """A group of operations on small arrays as one function."""

    def __init__(self, body: Tape, reference: Callable[[], Callable]):
        self.body = body
        self.reference = reference
        self.loop = Registers(body.in_types, body.out_types).write_tape(body)

    def caller(self, ufunc: numpy.ufunc) -> Callable:
        return lambda *xs: ufunc(*[x if x.flags.c_contiguous else numpy.ascontiguousarray(x) for x in xs])


class LoopKernel(Kernel):
    """A loop whose steps run inside the kernel, so many in each call that Ctrl-C can stop it."""

    def __init__(self, eqn: Equation):
        self.eqn = eqn
        shapes = (2,), (len(eqn.inputs) + len(eqn.outputs),)
        numbers = [ShapedArray(s, numpy.dtype("i8")) for s in shapes]
        self.loop = Registers(numbers, [ShapedArray((), numpy.dtype(bool))]).write_loop(eqn)
        self.steps = max(1, STEP_INSTRUCTIONS // len(self.loop.code.lines))

    def function(self) -> Callable:
        (ufunc, raised), eqn, steps = self.compiled(), self.eqn, self.steps
        shapes = [typeof(a).shape for a in eqn.inputs]
        n, m = map(_groups(eqn).count, (CONST, CARRY))

        def run(*operands: Value, **params: Any) -> list[Value]:
            """Run the loop; `params` has the compiled body, in which NumPy computes what the kernel cannot."""
            arrays = [numpy.require(x, requirements=["C", "A"]).reshape(s) for x, s in zip(operands, shapes)]
            shared, carry, xs = split_list(arrays, n, m)
            ys = [numpy.empty(v.type.shape, v.type.dtype) for v in eqn.outputs[m:]]
            first, has_more = 0, True
            while has_more:
                before, new = raised.value, [*map(numpy.empty_like, carry)]
                addresses = [x.ctypes.data for x in (*shared, *carry, *xs, *new, *ys)]
                has_more = ufunc([first, first + steps], addresses)
                if (after := raised.value) != before and is_for_numpy(before, after):
                    return eqn.primitive.evaluate([x[()] for x in arrays], params)
                carry, first = new, first + steps
            return [*[x if x.shape else x[()] for x in carry], *ys]

        return run
