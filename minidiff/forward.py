"""Forward mode: push tangents through a function together with its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy

from minidiff import tree
from minidiff.aliasing import apart
from minidiff.core import (
    NATIVE,
    Interpreter,
    LeakedTracerError,
    Primitive,
    ShapedArray,
    Tracer,
    TracerError,
    Value,
    are_weak,
    current_interpreter,
    enter,
    float0,
    is_differentiable,
    leak_message,
    name_of,
    pbroadcast_to,
    plain,
    restores_interpreter,
    running,
    strong,
    transforming,
    typeof,
    weak_where,
)
from minidiff.ops.base import zeros_like


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

    def __float__(self) -> float:
        return self._lose_derivative("float()")

    def __complex__(self) -> complex:
        return self._lose_derivative("complex()")

    def _lose_derivative(self, use: str) -> NoReturn:
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
            if below.watch is None:
                out, tangent = primitive.jvp(primals, tangents, params)
            else:
                out, tangent = below.watch(primitive.jvp, primitive, primals, tangents, params)
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

    def adopt_own(self, x: JVPTracer) -> Value:
        return JVPTracer(self, self.below.adopt(x.primal), self.below.adopt(x.tangent))


@restores_interpreter
def push_forward(f: Callable, primals: Sequence[Value], tangents: Sequence[Value | None], forward: JVP):
    """Apply `f` to dual numbers: lists of results and of tangents (None is zero)."""
    with transforming(forward):
        outs = f(*[forward.join(p, t) for p, t in zip(primals, tangents)])
    return forward.split(outs)


def as_value(x: Any) -> Value:
    """Convert a leaf to an array in native byte order, a NumPy scalar, or a tracer."""
    if type(x) is float:
        return numpy.float64(x)
    if type(x) is numpy.ndarray and x.dtype in NATIVE:
        return x
    if isinstance(x, Tracer):
        if x.interpreter.ended:
            raise LeakedTracerError(leak_message(x))
        return enter(x)
    x = plain(x, is_leaf=True)
    if not hasattr(x, "dtype"):
        return numpy.asarray(x)[()]
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def as_named_value(x: Any, what: str, advice: str = "") -> Value:
    """As `as_value`; a TypeError begins with `what` and ends with `advice`."""
    try:
        return as_value(x)
    except LeakedTracerError:
        raise
    except TypeError as error:
        raise TypeError(f"{what}: {error}{advice}") from None


def as_values(what: str, leaves: Sequence[Any], paths: Callable[[], Sequence[str]]) -> list[Value]:
    """Convert leaves to arrays or tracers; a TypeError names `what` and the leaf."""
    try:
        return list(map(as_value, leaves))
    except TypeError:
        return [as_named_value(x, f"{what}: {path}", tree.advice_on(path)) for x, path in zip(leaves, paths())]


def result_values(
    origin: Sequence[str], leaves: Sequence[Any], structure: tree.Structure, root: str = "the result"
) -> list[Value]:
    """Convert the leaves of a function's result to arrays or tracers.

    Raise TypeError for any other leaf, with its path from `root`. `origin` names the transformation and the function.
    """
    try:
        return [as_value(x) for x in leaves]
    except TypeError:
        return as_values(" of ".join(origin), leaves, lambda: tree.paths(structure, root))


def check_sequences(what: str, primals: Any, tangents: Any) -> None:
    """Raise TypeError unless both are sequences: a bare array would be iterated."""
    if not (isinstance(primals, (tuple, list)) and isinstance(tangents, (tuple, list))):
        raise TypeError(
            f"{what}: primals and tangents are tuples with an entry for each argument, as in {what}(f, (x,), (t,)); "
            f"got {type(primals).__name__} and {type(tangents).__name__}"
        )


class Flat:
    """A function of trees as one of leaves; a call stores the result's structure.

    With `has_aux` it returns the leaves of the value, then the leaves of aux. The latter may be anything, and pass
    through the transformation too, so that no tracer leaks. `weak` says which leaves are Python numbers.
    """

    def __init__(self, f: Callable, structure: tree.Structure, has_aux: bool = False, weak: Sequence[bool] = ()):
        self.f = f
        self.structure = structure
        self.has_aux = has_aux
        self.weak = weak
        self.out_structure: tree.Structure | None = None
        self.aux_structure: tree.Structure | None = None

    def __call__(self, *leaves: Value) -> list[Value]:
        out = self.f(*tree.unflatten(self.structure, weak_where(self.weak, leaves)))
        if self.has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(f"with has_aux=True the function returns a pair (value, aux), got {type(out).__name__}")
            out, aux = out
        outs, self.out_structure = tree.flatten(out)
        outs = result_values(current_interpreter().origin or [name_of(self)], outs, self.out_structure)
        if self.has_aux:
            extra, self.aux_structure = tree.flatten(aux)
            outs += map(strong, extra)
        return outs

    def split(self, leaves: Sequence[Value]) -> tuple:
        """Split off the leaves of the value and, with `has_aux`, the aux tree."""
        count = self.out_structure.size
        aux = (tree.unflatten(self.aux_structure, leaves[count:]),) if self.has_aux else ()
        return leaves[:count], *aux


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


def checked_tangent(path: str, primal: Value, tangent: Any) -> Value | None:
    """Validate a tangent against the primal at `path`; None for an integer's."""
    tangent, p = as_value(tangent), typeof(primal)
    t = typeof(tangent)
    if not is_differentiable(p.dtype):
        if t.dtype == float0:
            return None
        raise TypeError(
            f"jvp: {path} has type {p}, which carries no derivative; convert it with float(), an array with "
            ".astype(float), or give it a tangent of dtype float0"
        )
    if t.shape != p.shape:
        raise TypeError(f"jvp: {path} has type {p}, but its tangent {t}: shapes must be equal")
    if t.dtype != p.dtype:
        raise TypeError(f"jvp: {path} has type {p}, but its tangent {t}: dtypes must be equal")
    return pbroadcast_to(tangent, p.variance)


def instantiate(tangent: Value | None, like: Value) -> Value:
    """Replace a None tangent or cotangent by zeros (of `float0` for integers)."""
    if tangent is not None:
        return tangent
    t = typeof(like)
    if not is_differentiable(t.dtype):
        return numpy.zeros(t.shape, float0)
    return pbroadcast_to(zeros_like(t), t.variance)
