"""Arguments and results of transformed functions: trees of values, validated and flattened."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.core.interpreter import current_interpreter, current_scope, lift
from minidiff.core.ranks import cast_like, ranks, vary_along
from minidiff.core.states import NONE, AxisStates, combine_states, common_states
from minidiff.core.tracer import Tracer, Value, WeakTracer, states_of, unwrap_weak
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import (
    LeakedTracerError,
    VarianceError,
    VarianceWarning,
    describe_operand,
    leak_message,
    list_items,
    name_of,
    show_axes,
)
from minidiff.values.dtypes import NATIVE, as_plain, float0, is_differentiable, is_real_float, is_scalar_constant

# ---------------------------------------------------------------- Python numbers, which promote weakly (NEP 50)

#: The types of values that promote weakly.
WEAK_TYPES = frozenset({bool, int, float, complex, WeakTracer})


_PYTHON_TYPES = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def python_type(x: Any) -> type:
    """Return the Python type whose numbers promote as a weakly promoting value does."""
    return _PYTHON_TYPES[x.dtype.kind] if type(x) is WeakTracer else type(x)


def promotion_argument(x: Value) -> Any:
    """Return the argument for `numpy.result_type`: a dtype, or a Python number."""
    return python_type(x)(0) if type(x) in WEAK_TYPES else x.dtype


def are_weak(leaves: Iterable[Any]) -> list[bool]:
    """Return whether each argument is a Python number, traced or not, as `restore_weak` takes it."""
    return list(map(WEAK_TYPES.__contains__, map(type, leaves)))


def restore_weak(weak: Sequence[bool], values: Sequence[Value]) -> Sequence[Value]:
    """Convert the values marked as `weak` back to Python numbers."""
    if True not in weak:
        return values
    return (
        [as_weak(x) if is_weak else x for x, is_weak in zip(values, weak)]
        if False in weak
        else list(map(as_weak, values))
    )


def as_weak(x: Value) -> Value:
    """Convert a number to a Python number, or a tracer to one that promotes like it."""
    if isinstance(x, Tracer):
        return WeakTracer(x, x.dtype.kind == "b")
    return x.item() if x.dtype.kind in _PYTHON_TYPES else x


# ---------------------------------------------------------------- leaves


def as_value(x: Any) -> Value:
    """Convert a leaf to an array in native byte order, a NumPy scalar, or a tracer."""
    if type(x) is float:
        return numpy.float64(x)
    if type(x) is numpy.float64 or (type(x) is numpy.ndarray and x.dtype in NATIVE):
        return x
    if isinstance(x, Tracer):
        if x.interpreter.ended:
            raise LeakedTracerError(leak_message(x))
        return x if x.interpreter is current_interpreter() and type(x) is not WeakTracer else lift(x)
    x = as_plain(x, tree.class_names)
    if not hasattr(x, "dtype"):
        return numpy.asarray(x)[()]
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def key_of(x: Any) -> Any:
    """Return the cache key of a leaf: its type and sharding."""
    if type(x) is numpy.ndarray:
        return x.shape, x.dtype
    return key_of_type(typeof(x))


def key_of_type(t: ShapedArray) -> tuple:
    """Return the cache key of values of a type."""
    return t.shape, t.dtype, t.states, t.sharding  # hashed faster than the type


def as_named_value(x: Any, caller: str, advice: str = "") -> Value:
    """Convert a leaf by `as_value`; a TypeError begins with `caller` and ends with `advice`."""
    try:
        return as_value(x)
    except LeakedTracerError:
        raise
    except TypeError as error:
        raise TypeError(f"{caller}: {error}{advice}") from None


def check_array(x: Any, caller: str) -> None:
    """Raise TypeError, which begins with `caller`, unless NumPy makes a plain array of numbers of `x`.

    Masked arrays, matrices and other array classes would lose what they add. Nothing is copied.
    """
    x = numpy.asanyarray(x)
    as_named_value(numpy.empty_like(x, shape=0), caller)


def as_values(caller: str, leaves: Sequence[Any], paths: Callable[[], Sequence[str]]) -> list[Value]:
    """Convert leaves to arrays or tracers; a TypeError names `caller` and the leaf."""
    try:
        return list(map(as_value, leaves))
    except TypeError:
        return [as_named_value(x, f"{caller}: {path}", tree.advice_on(path)) for x, path in zip(leaves, paths())]


def flatten_arguments(
    caller: str, args: Sequence[Any], describe: Callable[[tree.Structure], Sequence[str]]
) -> tuple[list[Any], list[Value], tree.Structure]:
    """Return the leaves of arguments, also as values, and their structure, with strings and functions as settings."""
    leaves, structure = tree.flatten(args)
    try:
        return leaves, list(map(as_value, leaves)), structure
    except TypeError:
        leaves, structure = tree.flatten(tree.with_settings(args))
        return leaves, as_values(caller, leaves, lambda: describe(structure)), structure


def flatten_tangents(tangents: Any, structure: tree.Structure) -> list | None:
    """Return the tangents of the leaves of a structure, where an integer may have None; None for another structure."""
    leaves, other = tree.flatten(tangents)
    if other == structure:
        return leaves
    leaves, other = tree.flatten(tree.with_settings(tangents))
    try:
        leaves = structure.of_derivatives.flatten_up_to(tree.unflatten(other.of_derivatives, leaves))
    except ValueError:
        return None
    return leaves if all(x is None or tree.children(x) is None for x in leaves) else None


def result_values(
    origin: Sequence[str], leaves: Sequence[Any], structure: tree.Structure, root: str = "the result"
) -> list[Value]:
    """Convert the leaves of a function's result to arrays or tracers.

    Raise TypeError for any other leaf, with its path from `root`. `origin` names the transformation and the function.
    """
    return as_values(" of ".join(origin), leaves, lambda: tree.paths(structure, root))


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
        self.out_structure: Any = None  # the tree.Structure of the value, once it was called; and that of aux
        self.aux_structure: Any = None

    def __call__(self, *leaves: Value) -> list[Value]:
        out = self.f(*tree.unflatten(self.structure, restore_weak(self.weak, leaves)))
        if self.has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    f"with has_aux=True the function returns a pair (value, aux), got {describe_operand(out)}"
                )
            out, aux = out
        outs, self.out_structure = tree.flatten(out)
        outs = result_values(current_interpreter().origin or [name_of(self)], outs, self.out_structure)
        if self.has_aux:
            extra, self.aux_structure = tree.flatten(aux)
            outs += map(unwrap_weak, extra)
        return outs

    def split(self, leaves: Sequence[Value]) -> tuple:
        """Split off the leaves of the value and, with `has_aux`, the aux tree."""
        count = self.out_structure.size
        aux = (tree.unflatten(self.aux_structure, leaves[count:]),) if self.has_aux else ()
        return leaves[:count], *aux


def close_over(f: Callable, args: Sequence[Any], fixed: Mapping[Any, Any]) -> tuple[Callable, tuple]:
    """Return `f` as a function of the positional arguments that are not `fixed`, and these of `args`."""

    def of_others(*others: Any, **kwargs: Any) -> Any:
        remaining = iter(others)
        return f(*[fixed[n] if n in fixed else next(remaining) for n in range(len(args))], **kwargs)

    return of_others, tuple(x for n, x in enumerate(args) if n not in fixed)


#: How transformations are called: with a function alone, also with values, and with values and tangents.
OF_FUNCTION, AT_PRIMALS = "{name}(f)(x), not {name}(f(x))", "{name}(f, x), not {name}(f(x))"
AT_PAIRS = "{name}(f, (x,), (t,)), not {name}(f(x), (x,), (t,))"


def check_function(name: str, f: Any, args: tuple = (), call: str = OF_FUNCTION) -> None:
    """Raise TypeError if a call is not of the form `name(f)(*args)`, or of another one that `call` shows."""
    if not callable(f):
        raise TypeError(f"{name} takes a function, got {type(f).__name__}: write {call.format(name=name)}")
    if args:
        raise TypeError(f"{name}(f) is a function of the arguments of f: write {name}(f)(*args)")


def normalize_axis(axis: Any, ndim: int, caller: str) -> int:
    """Make an axis non-negative; raise AxisError, naming `caller`, if impossible."""
    axis = operator.index(axis)
    if not -ndim <= axis < ndim:
        raise numpy.exceptions.AxisError(f"{caller}: axis {axis} is out of bounds for an array of {ndim} dimensions")
    return axis % ndim


# ---------------------------------------------------------------- arguments that are differentiated


def normalize_argnums(caller: str, argnums: int | Sequence[int], name: str = "argnums") -> tuple[int, ...]:
    """Return `argnums` as a tuple; `name` is that of the parameter."""
    if type(argnums) is int:
        return (argnums,)
    try:
        return tuple(map(operator.index, argnums if isinstance(argnums, Sequence) else [argnums]))
    except TypeError:
        raise TypeError(f"{caller}: {name} must be an int or a tuple of ints, got {argnums!r}") from None


def arguments_of(caller: str, args: tuple, numbers: tuple[int, ...], name: str) -> list[Any]:
    """Return the arguments selected by `numbers`; `caller` and `name` are for errors."""
    return list(map(args.__getitem__, _positions(caller, len(args), numbers, name)))


@functools.lru_cache(maxsize=1024)
def _positions(caller: str, count: int, numbers: tuple[int, ...], name: str) -> tuple[int, ...]:
    for n in numbers:
        if not -count <= n < count:
            raise TypeError(
                f"{caller}: argnums names argument {n}, but {name} was called with {count} (they count from 0)"
            )
    if len(numbers) > 1 and len({n % count for n in numbers}) < len(numbers):
        raise TypeError(f"{caller}: argnums names an argument of {name} twice: {tuple(numbers)}")
    return numbers


def describe_argument(path: str, numbers: Sequence[int], name: str = "") -> str:
    """Describe a leaf of the selected arguments of the function `name`: `argument 0['w'] of loss`."""
    index, _, key = path[1:].partition("]")
    return f"argument {numbers[int(index)]}{key}" + (f" of {name}" if name else "")


def not_differentiable_message(argument: str, x: Value) -> str:
    return (
        f"grad: {argument} has type {typeof(x)}; only floating-point numbers have "
        "gradients: convert it with float(), an array with .astype(float), or choose other arguments with argnums"
        f"{tree.advice_on(argument)}"
    )


def check_sequences(caller: str, primals: Any, tangents: Any) -> None:
    """Raise TypeError unless both are sequences: a bare array would be iterated."""
    if not (isinstance(primals, (tuple, list)) and isinstance(tangents, (tuple, list))):
        raise TypeError(
            f"{caller}: primals and tangents must be tuples with an entry for each argument, as in "
            f"{caller}(f, (x,), (t,)); got {type(primals).__name__} and {type(tangents).__name__}"
        )


def missing_axes(primal: Value, tangent: Any) -> frozenset:
    """Return the mesh axes along which a tangent varies, and its primal does not."""
    return tangent.states.varying - states_of(primal).varying_or_unreduced if isinstance(tangent, Tracer) else NONE


def vary_point(name: str, primals: Sequence[Value], tangents: Sequence[Any]) -> list[Value]:
    """Insert the pbroadcasts by which primals vary along mesh axes where their tangents do.

    With `auto_pbroadcast=False` the user writes them: raise VarianceError.
    """
    varied = list(primals)
    for i, (p, t) in enumerate(zip(primals, tangents)):
        if axes := missing_axes(p, t):
            if current_scope().checks:
                raise disagreement(
                    f"{name}: a primal and its tangent", ["the primal", "its tangent"], [typeof(p), typeof(t)]
                )
            varied[i] = vary_along(p, axes)
    return varied


def check_tangent(path: str, primal: Value, tangent: Any) -> Value | None:
    """Validate a tangent against the primal at `path`; None for an integer's."""
    p = typeof(primal)
    if tangent is None and not is_differentiable(p.dtype):
        return None
    tangent = as_value(tangent)
    t = typeof(tangent)
    if not is_differentiable(p.dtype):
        if t.dtype == float0:
            return None
        raise TypeError(
            f"jvp: {path} has type {p}, which carries no derivative; convert it with float(), an array with "
            ".astype(float), or pass a tangent of dtype float0"
        )
    if t.shape != p.shape:
        raise TypeError(f"jvp: {path} has type {p}, but its tangent has {t}: shapes must be equal")
    if t.dtype != p.dtype:
        raise TypeError(f"jvp: {path} has type {p}, but its tangent has {t}: dtypes must be equal")
    return cast_like(tangent, p)


def linear_positions(tape: Any, linear: Any) -> tuple[int, ...]:
    """Validate the positions of the linear inputs, and sort them."""
    count, positions = len(tape.inputs), tuple(sorted(normalize_argnums("transpose", linear, "linear")))
    for i in positions:
        if not 0 <= i < count:
            raise ValueError(f"transpose: linear names input {i}, but the tape has {count}, counted from 0")
    if len(set(positions)) != len(positions):
        raise ValueError(f"transpose: linear names an input twice: {positions}")
    if count and not positions:
        raise ValueError("transpose: linear names no input; a tape is transposed in one or more of its inputs")
    varying = next((t for t in tape.in_types if t.variance), None)
    if varying is not None and current_scope() is None:
        raise TypeError(
            f"transpose: the tape takes {varying}, so it is the body of a shard_map: transpose the tape around it, "
            "which transposes the body too"
        )
    return positions


# ---------------------------------------------------------------- results and their cotangents


def check_scalar(structure: tree.Structure, outs: list[Value], name: str) -> Value:
    """Return the one real scalar that the function returned, or raise TypeError."""
    if structure is not tree.LEAF:
        advice = (
            "is a `return` missing?"
            if str(structure) == "None"
            else "return the loss alone, or (loss, aux) and pass has_aux=True"
        )
        raise TypeError(f"grad: {name} must return one scalar, got {structure}; {advice}")
    value = outs[0]
    if not value.shape and is_real_float(value.dtype):
        return value
    if value.shape:
        advice = "reduce it to one number (with .sum(), say), or use md.vjp for a result of several numbers"
    elif value.dtype.kind == "c":
        advice = "take .real, .imag or abs of it; for a holomorphic function, md.jacrev(f, holomorphic=True)"
    else:
        advice = "integers and booleans carry no derivative: leave out the .astype(int), the comparison or the rounding"
    raise TypeError(f"grad: {name} must return a real scalar, got {typeof(value)}; {advice}")


def warn_if_summed(caller: str, name: str, results: Sequence[Any], arguments: dict[str, Any]) -> None:
    """Warn of the derivative of a result that varies along mesh axes, in an argument that is the same there.

    Its type says that it is the same too: it is the derivative of the sum of the results of all ranks.
    """
    for result, (argument, x) in itertools.product(map(typeof, results), arguments.items()):
        summed = result.variance - typeof(x).states.axes
        if summed:
            axes, derivative = show_axes(summed), {"grad": "gradient", "jacrev": "Jacobian"}[caller]
            ranks.warn(
                f"{caller}: the result of {name}, {result}, varies along {axes}, but {argument}, {typeof(x)}, does "
                f"not: so this is the {derivative} of the sum of the results over {axes}. Return psum(loss, {axes}) to "
                f"say so; the {derivative} is the same. For that of the mean, return pmean(loss, {axes}); for each "
                f"rank's own, pass pbroadcast(w, {axes}) as the argument",
                VarianceWarning,
            )
            return


def check_cotangents(ct: Any, out_types: Sequence[ShapedArray], structure: tree.Structure) -> list[Value | None]:
    """Flatten and validate a cotangent of these results; None for integer leaves."""
    paths, ct_structure = tree.flatten_with_paths(ct, "ct")
    if ct_structure != structure:
        raise TypeError(f"pullback: the cotangent has the structure {ct_structure}, but the result has {structure}")
    return [_check_cotangent(path, as_value(x), t) for (path, x), t in zip(paths, out_types)]


def _check_cotangent(path: str, ct: Value, out: ShapedArray) -> Value | None:
    t = typeof(ct) if ct.dtype != float0 else out
    if t.shape != out.shape or (t.dtype != out.dtype and is_differentiable(out.dtype)):
        raise TypeError(f"pullback: the result has type {out}, but its cotangent {path} has type {t}")
    return ct if is_differentiable(out.dtype) else None


def disagreement(caller: str, labels: Sequence[str], types: Sequence[ShapedArray]) -> VarianceError:
    """Return the error that values of these `labels` and `types` disagree along a mesh axis."""
    missing: dict[str, list[str]] = {}
    for label, t, states in zip(labels, types, common_states(tuple(t.states for t in types))):
        casts = {"pbroadcast": states.varying - t.variance, "reduced": states.reduced - t.reduced}
        for name, axes in casts.items():
            if axes:
                missing.setdefault(f"{name}(x, {show_axes(axes)})", []).append(label)
    advice = " and ".join(f"{cast} for {list_items(names)}" for cast, names in missing.items())
    return VarianceError(f"{caller} disagree in variance: write {advice}")


def is_zero(x: Value) -> bool:
    """Whether `x` is constant zeros, which are partial sums of zero."""
    return not isinstance(x, (Tracer, ShapedArray)) and not numpy.any(x)


def joint_states(caller: str, labels: Sequence[str], values: Sequence[Value]) -> AxisStates:
    """Return the states along mesh axes that values or types, alternatives of one value, are cast to.

    Raise VarianceError where only some are unreduced, but for constants that are zero; and in an explicit scope where
    they disagree, since the user must write the casts there. Numbers agree with anything. `caller` and `labels` are as
    in `disagreement`.
    """
    scope = current_scope()
    arrays = [(label, typeof(x)) for label, x in zip(labels, values) if not is_scalar_constant(x)]
    if scope is not None and scope.checks and len({t.states for _, t in arrays}) > 1:
        raise disagreement(caller, *zip(*arrays))
    states = combine_states(*[typeof(x).states for x in values])
    for label, x in zip(labels, values) if states.unreduced else ():
        missing = states.unreduced - typeof(x).unreduced
        if missing and not is_zero(x):
            axes = show_axes(missing)
            raise VarianceError(
                f"{caller} disagree: {label} is not unreduced along {axes}, as the other is. Write "
                f"unreduced(x, {axes}) for it if it varies there, or psum(x, {axes}) for the other"
            )
    return states
