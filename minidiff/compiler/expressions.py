"""Source text: single operations as Python expressions, and fused loops as the Python loops that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff.compiler.layout import PIECES, iteration_shape, pieces_of
from minidiff.control_flow.checkpoint import recompute_p
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var
from minidiff.errors import printable
from minidiff.ops import elementwise, indexing, linalg, shape
from minidiff.ops.base import sum_p

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


# ---------------------------------------------------------------- loops


def types_of(outputs: Sequence[Var]) -> str:
    return printable(", ".join([str(v.type) for v in outputs]))


def loop_lines(name: str, body: Tape, names: dict[Any, str]) -> Iterator[str]:
    """Yield the lines of a fused loop, as Python would write it."""
    shape = iteration_shape(body)
    counters = [f"i{d}" for d in range(len(shape))]
    indent = "    " * (len(shape) + 1)

    def element(v: Var, indices: Sequence[str]) -> str:
        return f"{names[v]}[{', '.join(indices)}]" if indices else names[v]

    def whole(v: Var) -> str:
        sizes = list(zip(counters, shape))[len(shape) - len(v.type.shape) :]
        return element(v, [i if n == size else "0" for (i, size), n in zip(sizes, v.type.shape)])

    yield f"def {name}({', '.join(names[v] for v in body.inputs)}):  # one loop, compiled; {types_of(body.inputs)}"
    sums = [eqn.outputs[0] for eqn in body.equations if eqn.primitive is sum_p]
    if sums:
        yield f"    {' = '.join(names[v] for v in sums)} = 0"
    for d, n in enumerate(shape):
        yield f"{'    ' * (d + 1)}for {counters[d]} in range({n}):"
    texts: dict[Any, str] = {v: whole(v) for v in body.inputs}
    for eqn in body.equations:
        (v,) = eqn.outputs
        operands = [texts[a] if isinstance(a, Var) else repr(numpy.asarray(a).item()) for a in eqn.inputs]
        if eqn.primitive in PIECES:
            texts[v] = names[v]
            yield f"{indent}{names[v]} = {_read(eqn, counters, element)}"
        elif eqn.primitive is sum_p:
            remaining = [i for d, i in enumerate(counters) if d not in eqn.params["axes"]]
            yield f"{indent}{element(v, remaining)} += {operands[0]}"
        else:
            texts[v] = whole(v) if v in body.outputs else names[v]
            write = SOURCES.get(eqn.primitive)
            text = write(*operands) if write else f"{eqn.primitive.name}({', '.join(operands)})"
            yield f"{indent}{texts[v]} = {text}"
    yield f"    return {', '.join(names[v] for v in body.outputs)}"


def _read(eqn: Equation, counters: Sequence[str], element: Callable[[Any, Sequence[str]], str]) -> str:
    """Return the element that a loop reads through an operation: `x[i0 + 509] if i0 < 3 else x[i0 - 3]`."""
    whole, text = eqn.outputs[0].type.shape, ""
    pieces = pieces_of(eqn)
    for piece in pieces:
        x = eqn.inputs[piece.operand]
        places = [_plus(i, -o) for i, o in zip(counters, piece.origin)]
        text += element(x, _places(piece.part, places, x.type.shape))
        ends = [(i, o, o + n, m) for i, o, n, m in zip(counters, piece.origin, piece.shape, whole)]
        inside = [f"{f'{a} <= ' * (a > 0)}{i}{f' < {b}' * (b < n)}" for i, a, b, n in ends if a > 0 or b < n]
        if not inside or (piece is pieces[-1] and len(pieces) > 1):  # several are all of it
            return text
        text += f" if {' and '.join(inside)} else "
    return f"{text}0"


def _plus(text: str, n: int) -> str:
    return f"{text} + {n}" if n > 0 else f"{text} - {-n}" if n else text


def _places(index: tuple, places: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Return the indices of x, of this shape, in `x[index][places]`."""
    remaining, sizes = iter(places), iter(shape)
    texts = []
    for i in index:
        if i is None:
            next(remaining)
        elif isinstance(i, slice):
            start, _, step = i.indices(next(sizes))
            steps = f"{abs(step)} * " * (abs(step) > 1) + next(remaining)
            texts.append(_plus(steps, start) if step > 0 else f"{start} - {steps}")
        else:
            texts.append(str(i % next(sizes)))
    return [*texts, *remaining]
