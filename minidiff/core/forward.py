"""Forward mode: push tangents through a function together with its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy

from minidiff import tree
from minidiff.core.interpreter import Interpreter, current_interpreter, name_of, running, transforming
from minidiff.core.operation import Primitive
from minidiff.core.ranks import cast_like
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof, zeros_like
from minidiff.diagnostics.errors import TracerError
from minidiff.diagnostics.interrupts import restores_interpreter
from minidiff.inputs.aliasing import apart
from minidiff.inputs.arguments import Flat, as_value, as_values, check_sequences, checked_tangent
from minidiff.inputs.dtypes import float0, is_differentiable
from minidiff.inputs.promotion import are_weak


class JVPTracer(Tracer):
    """A dual number: a primal and a tangent, both values of the interpreter below."""

    __slots__ = ("primal", "tangent")

    def __init__(self, interpreter: JVP, primal: Value, tangent: Value):
        self.interpreter = interpreter
        self.primal = primal
        self.tangent = tangent

    @property
    def type(self) -> ShapedArray:
        return typeof(self.primal)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.primal.shape

    @property
    def dtype(self) -> numpy.dtype:
        return self.primal.dtype

    def concrete(self, use: str) -> Any:
        self.check_alive()
        return self.primal.concrete(use) if isinstance(self.primal, Tracer) else self.primal

    def number(self, use: str) -> NoReturn:
        """Raise TracerError: NumPy assignment and `math` would lose the derivative."""
        self.concrete(use)  # raises its own error if there is no value
        number = "x.item()" if self.size == 1 else "x[i].item(), for a list of them x.tolist()"
        raise TracerError(
            f"{use} of a value that is being differentiated ({self.type}) would lose its derivative. For the plain "
            f"number take {number}; to build an array use minidiff.numpy.array or np.stack; instead of math.sin, np.sin"
        )

    def __repr__(self) -> str:
        return repr(self.primal)

    def __str__(self) -> str:
        return str(self.primal)

    def __format__(self, spec: str) -> str:
        return format(self.primal, spec)


class JVP(Interpreter):
    """Apply each operation to primals and its derivative to tangents (None is zero)."""

    name = "a derivative"

    def interpret(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Value:
        below = self.below
        if primitive.is_higher_order:
            with running(below):
                return primitive.jvp_body(self, args, params)
        primals, tangents = self.split(args)
        for t in tangents:
            if t is not None:
                break
        else:
            return primitive.apply(below, args, params)
        with running(below):
            out, tangent = below.apply_rule(primitive.jvp, primitive, primals, tangents, params)
        if primitive.multiple_results:
            return [self.join(x, t) for x, t in zip(out, tangent)]
        return self.join(out, tangent)

    def split(self, args: Sequence[Value]) -> tuple[list[Value], list[Value | None]]:
        """Split `args` into primals and tangents; the tangent of a constant is None."""
        primals, tangents = [], []
        for x in args:
            if type(x) is JVPTracer and x.interpreter is self:
                primals.append(x.primal)
                tangents.append(x.tangent)
            else:
                primals.append(x)
                tangents.append(None)
        return primals, tangents

    def join(self, primal: Value, tangent: Value | None) -> Value:
        return primal if tangent is None else JVPTracer(self, primal, tangent)

    def adopt_own(self, x: Any) -> Value:
        return JVPTracer(self, self.below.adopt(x.primal), self.below.adopt(x.tangent))


@restores_interpreter
def push_forward(f: Callable, primals: Sequence[Value], tangents: Sequence[Value | None], forward: JVP):
    """Apply `f` to dual numbers: lists of results and of tangents (None is zero)."""
    with transforming(forward):
        outs = f(*[forward.join(p, t) for p, t in zip(primals, tangents)])
    return forward.split(outs)


def jvp(f: Callable, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> tuple:
    """The value and directional derivative: `(f(*primals), df(*primals) · tangents)`.

    `primals` and `tangents` are sequences with one tree of arrays per argument of `f`, with the same structures,
    shapes and dtypes. The results have the structure of the result of `f`. Integers have tangents of dtype `float0`,
    which holds no data. With `has_aux`, `f` returns a pair `(value, aux)`, where aux is anything that is not
    differentiated, and the result is `(value, tangent, aux)`. Raise TypeError if primals and tangents do not match.

    >>> import numpy as np
    >>> value, tangent = jvp(np.sin, (0.0,), (2.0,))
    >>> float(value), float(tangent)
    (0.0, 2.0)
    """
    check_sequences("jvp", primals, tangents)
    paths, structure = tree.flatten_with_paths(tuple(primals), "primals")
    flat_tangents, tangent_structure = tree.flatten(tuple(tangents))
    if structure != tangent_structure:
        raise TypeError(f"jvp: primals and tangents differ in structure: {structure} and {tangent_structure}")
    flat_primals = as_values("jvp", [x for _, x in paths], lambda: [path for path, _ in paths])
    flat_tangents = [checked_tangent(path, p, t) for (path, _), p, t in zip(paths, flat_primals, flat_tangents)]
    flat = Flat(f, structure, has_aux, are_weak(x for _, x in paths))
    forward = JVP(current_interpreter())
    forward.origin = "jvp", name_of(f)
    outs, out_tangents = push_forward(flat, flat_primals, flat_tangents, forward)
    outs, *aux = flat.split(outs)
    outs = list(map(as_value, outs))  # a result may not be a plain array, if it was multiplied by a duration
    out_tangents = [instantiate(t, x) for x, t in zip(outs, out_tangents)]
    out_tangents = apart(out_tangents, [*flat_primals, *flat_tangents, *outs])
    return tree.unflatten(flat.out_structure, outs), tree.unflatten(flat.out_structure, out_tangents), *aux


def instantiate(tangent: Value | None, like: Value) -> Value:
    """Replace a None tangent or cotangent by zeros (of `float0` for integers)."""
    if tangent is not None:
        return tangent
    t = typeof(like)
    if not is_differentiable(t.dtype):
        return numpy.zeros(t.shape, float0)
    return cast_like(zeros_like(t), t)
