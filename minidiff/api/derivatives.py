"""Derivatives of functions of trees: `jvp` in forward mode; `grad`, `vjp` and `linearize` in reverse mode.

`vjp` and `linearize` return linear functions that are trees, with their residuals as leaves (`LinearFunction`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from minidiff import tree
from minidiff.core.forward import JVP, instantiate, push_forward
from minidiff.core.interpreter import EVALUATE, current_interpreter, current_scope
from minidiff.core.reverse import engine, run_backward_pass, substitute
from minidiff.core.tape import ConsumedEquations, Equation, Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.errors import name_of
from minidiff.errors.tracebacks import hide_own_frames
from minidiff.inputs.arguments import (
    AT_PAIRS,
    AT_PRIMALS,
    Flat,
    are_weak,
    arguments_of,
    as_value,
    check_cotangents,
    check_function,
    check_scalar,
    check_sequences,
    check_tangent,
    describe_argument,
    flatten_arguments,
    flatten_tangents,
    missing_axes,
    normalize_argnums,
    not_differentiable_message,
    vary_point,
    warn_if_summed,
)
from minidiff.inputs.keywords import make_decorator
from minidiff.values.aliasing import copy_shared, copy_view, is_frozen
from minidiff.values.dtypes import is_differentiable
from minidiff.values.lists import scatter, select


def jvp(f: Callable, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> tuple:
    """Return the value and the directional derivative of `f`: `(f(*primals), df(*primals) · tangents)`.

    Args:
        f: a function of trees of arrays.
        primals: a sequence with one tree for each argument. A primal whose tangent varies along a mesh axis varies
            there too, by a `pbroadcast`.
        tangents: a sequence of trees with the structures, shapes and dtypes of the primals; for integers of dtype
            `float0`, which holds no data.
        has_aux: `f` returns a pair `(value, aux)`, where aux is anything that is not differentiated.

    Returns:
        A pair of trees with the structure of the result of `f`; with `has_aux`, `(value, tangent, aux)`.

    Raises:
        TypeError: if primals and tangents do not match.

    >>> import numpy as np
    >>> value, tangent = jvp(np.sin, (0.0,), (2.0,))
    >>> float(value), float(tangent)
    (0.0, 2.0)
    """
    check_function("jvp", f, call=AT_PAIRS)
    check_sequences("jvp", primals, tangents)
    leaves, values, structure = flatten_arguments("jvp", tuple(primals), _primal_paths)
    flat_tangents: Any = flatten_tangents(tuple(tangents), structure)
    if flat_tangents is None:
        other = tree.structure(tuple(tangents))
        raise TypeError(f"jvp: primals and tangents differ in structure: {structure} and {other}")
    flat_primals = vary_point("jvp", values, flat_tangents)
    flat_tangents = list(map(check_tangent, _primal_paths(structure), flat_primals, flat_tangents))
    flat = Flat(f, structure, has_aux, are_weak(leaves))
    forward = JVP(current_interpreter())
    forward.origin = "jvp", name_of(f)
    outs, out_tangents = push_forward(flat, flat_primals, flat_tangents, forward)
    outs, *aux = flat.split(outs)
    outs = list(map(as_value, outs))  # a result may not be a plain array, if it was multiplied by a duration
    out_tangents = [instantiate(t, x) for x, t in zip(outs, out_tangents)]
    out_tangents = copy_shared(out_tangents, [*flat_primals, *flat_tangents, *outs])
    return tree.unflatten(flat.out_structure, outs), tree.unflatten(flat.out_structure, out_tangents), *aux


def linearize(f: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    """Return the value and the derivative as a linear function: `(f(*primals), f_linear)`.

    `f_linear` stores the primal values that it needs, so it does not run `f` again. It copies those that you may write
    into (arguments, results, arrays that `f` closes over), so it remains the derivative at the point of linearization.
    It is a tree of the values that it stores.

    Args:
        f: a function of trees of arrays.
        primals: the arguments at which `f` is linearized.
        has_aux: `f` returns a pair `(value, aux)`, where aux is anything that is not differentiated.

    Returns:
        The value, and `f_linear(*tangents)`, which takes trees like the primals and returns one like the value; with
        `has_aux`, `(value, f_linear, aux)`. In a body, for tangents that vary along a mesh axis where their primals do
        not, `f_linear` is the `jvp` at the `pbroadcast` of these, which runs `f` once more.

    Raises:
        TypeError: by `f_linear`, for tangents whose structure, shapes or dtypes are not those of the primals.

    >>> import numpy as np
    >>> value, f_linear = linearize(np.sin, 0.0)
    >>> float(f_linear(3.0))
    3.0
    """
    flat, values, active = _flatten_at("linearize", f, primals, has_aux)
    structure, primal_types = flat.structure, list(map(typeof, values))
    outs, aux, tape = linearize_leaves(("linearize", name_of(f)), flat, values, active)
    types, out_structure = list(map(typeof, outs)), flat.out_structure
    keep_residuals(tape)
    point = None if current_scope() is None else (f, primals, values)

    def f_linear(tape: Tape, *tangents: Any) -> Any:
        flat_tangents = flatten_tangents(tangents, structure)
        if flat_tangents is None:
            other = tree.structure(tangents)
            raise TypeError(f"f_linear: tangents have the structure {other}, the primals {structure}")
        if point is not None and any(map(missing_axes, point[2], flat_tangents)):
            return jvp(point[0], point[1], tangents, has_aux)[1]
        checked = list(map(check_tangent, _primal_paths(structure), primal_types, flat_tangents))
        results = tape(*select(checked, active))
        results = [instantiate(t, x) for t, x in zip(results, types)]
        return tree.unflatten(out_structure, copy_shared(results, checked))

    return tree.unflatten(out_structure, outs), LinearFunction(f_linear, tape), *aux


def vjp(f: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    """Return the value of `f` and its pullback: `(f(*primals), pullback)`.

    `pullback` may be called several times, even after arguments, results, or arrays that `f` closes over have been
    overwritten: it has copies of those that it needs. It is a tree of these, so a compiled function may take or return
    it, and a rule of `custom_vjp` may keep it.

    Args:
        f: a function of trees of arrays.
        primals: the arguments at which `f` is differentiated.
        has_aux: `f` returns a pair `(value, aux)`, where aux is anything that is not differentiated.

    Returns:
        The value, and `pullback(ct)`, which takes a cotangent like the value (same structure, shapes, dtypes) and
        returns a tuple with a cotangent for each primal (for integers of dtype `float0`). With `has_aux`, aux follows.

    Raises:
        TypeError: by `pullback`, for a cotangent whose structure, shapes or dtypes are not those of the value.

    >>> import numpy as np
    >>> value, pullback = vjp(lambda x, y: x * y, 2.0, 3.0)
    >>> [float(ct) for ct in pullback(1.0)]
    [3.0, 2.0]
    >>> value, pullback, aux = vjp(lambda x: (x * x, {'x': x}), 2.0, has_aux=True)
    >>> float(pullback(1.0)[0]), float(aux['x'])
    (4.0, 2.0)
    """
    value, aux, pullback, tape = _pullback_at(f, primals, has_aux)
    keep_residuals(tape)
    return value, LinearFunction(pullback, tape), *aux


def _pullback_at(f: Callable, primals: tuple, has_aux: bool) -> tuple[Any, list[Any], Callable, Tape]:
    """Return the value of `f`, aux if it has any, and its pullback, a function of a linear tape and a cotangent."""
    flat, values, active = _flatten_at("vjp", f, primals, has_aux)
    outs, aux, tape = linearize_leaves(("vjp", name_of(f)), flat, values, active)
    out_types, ct_types = list(map(typeof, outs)), [typeof(x).cotangent for x in values]
    structure, out_structure = flat.structure, flat.out_structure

    def pullback(tape: Tape, ct: Any) -> tuple:
        cts = check_cotangents(ct, out_types, out_structure)
        pulled = scatter(run_backward_pass(tape, cts, is_whole=True), active)
        in_cts = list(map(as_cotangent, pulled, ct_types))
        return tree.unflatten(structure.of_derivatives, copy_shared(in_cts, cts))

    return tree.unflatten(out_structure, outs), aux, pullback, tape


def pull_back(f: Callable, primals: tuple, ct: Any) -> tuple:
    """Apply the pullback of `f` at once: nobody can write into arrays that it needs, so that none is copied."""
    *_, pullback, tape = _pullback_at(f, primals, False)
    tape.equations = ConsumedEquations(tape.equations)
    return pullback(tape, ct)


@make_decorator
def value_and_grad(
    f: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, allow_int: bool = False
) -> Callable:
    """Return a function that computes the value of `f` and its gradient.

    Args:
        f: a function of trees of arrays that returns a real scalar.
        argnums: the arguments to differentiate in, by position: an int gives one gradient, a tuple a tuple of
            gradients.
        has_aux: `f` returns a pair of the scalar and anything else.
        allow_int: arguments without a floating-point number are allowed; their gradients are None.

    Returns:
        A function of the arguments of `f` that returns `(value, grads)`, with `has_aux` `((value, aux), grads)`.
        Gradients have the structure, shapes and dtypes of the arguments; other leaves than floating-point numbers are
        as in `grad`.

    Raises:
        TypeError: by that function, for a result that is not a real scalar, or an integer argument.

    >>> import numpy as np
    >>> value, g = value_and_grad(lambda x: (x ** 2).sum())(np.array([1.0, 2.0]))
    >>> float(value), g
    (5.0, array([2., 4.]))
    """
    check_function("value_and_grad", f)
    return _value_and_gradient(f, argnums, has_aux, allow_int)


@make_decorator
def grad(f: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, allow_int: bool = False) -> Callable:
    """Return a function that computes the gradient of a scalar function.

    It is `value_and_grad` without the value.

    Only floating-point numbers have gradients. In a tree, other leaves (integers, booleans, strings, functions, None)
    are passed to `f` as they are, and the gradient has None in their places. The same rule holds for `jacrev`, `jacfwd`
    and `hessian`, and for strings and functions in all transformations. `vjp` and `jvp` give and take None there too,
    but `float0` zeros for integers, as in JAX. Under `jit`, strings and functions are static.

    Args:
        f: a function of trees of arrays that returns a real scalar.
        argnums: the arguments to differentiate in, by position: an int gives one gradient, a tuple a tuple of
            gradients.
        has_aux: `f` returns a pair of the scalar and anything else.
        allow_int: arguments without a floating-point number are allowed; their gradients are None.

    Returns:
        A function of the arguments of `f` that returns the gradient, with `has_aux` `(grads, aux)`. A gradient has the
        structure, the shapes and the dtypes of its argument.

    Raises:
        TypeError: by that function, if the result of `f` is not a real scalar, or an argument that `argnums` selects
            has integers only, and not `allow_int`.

    >>> import numpy as np
    >>> grad(lambda x: (x ** 2).sum())(np.array([1.0, 2.0]))
    array([2., 4.])
    >>> grad(lambda p: p['scale'] * p['f'](p['w']))({'w': 0.0, 'scale': 3, 'f': np.sin})
    {'f': None, 'scale': None, 'w': np.float64(3.0)}
    """
    check_function("grad", f)
    both = _value_and_gradient(f, argnums, has_aux, allow_int)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def _value_and_gradient(f: Callable, argnums: int | Sequence[int], has_aux: bool, allow_int: bool) -> Callable:
    """Return `value_and_grad` of a function that was checked, without what `make_decorator` adds."""
    chosen = Chosen("grad", f, argnums, has_aux, allow_int)
    origin = ("grad", chosen.name)

    def gradient(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        values, flat = chosen.flatten(args, kwargs)
        active = [is_differentiable(x.dtype) for x in values]
        if is_partial := False in active:
            active = chosen.active(values, flat.structure)
            for name, x in zip(select(chosen.describe(flat.structure), active), select(values, active)):
                if not is_differentiable(x.dtype):
                    raise TypeError(not_differentiable_message(name, x))
        outs, tape = engine.linearize_flat(flat, values, active, origin)
        value = check_scalar(flat.out_structure, outs, chosen.name)
        tape.equations = ConsumedEquations(tape.equations)
        cts = run_backward_pass(tape, [value.dtype.type(1)], is_whole=True)
        if isinstance(value, Tracer) and value.states.varying:
            named_cts = zip(chosen.describe(flat.structure), values, scatter(cts, active))
            warn_if_summed("grad", chosen.name, [value], {arg: x for arg, x, ct in named_cts if ct is not None})
        grads: Sequence = [as_cotangent(ct, v.type.cotangent) for ct, v in zip(cts, tape.inputs)]
        result = (value, tree.unflatten(flat.aux_structure, outs[1:])) if has_aux else value
        grads = copy_shared(grads)
        return result, chosen.unflatten(flat.structure, scatter(grads, active) if is_partial else grads)

    return gradient


# ---------------------------------------------------------------- functions of leaves


class Chosen:
    """The arguments, chosen by `argnums`, in which a transformation named `caller` differentiates `f`."""

    def __init__(self, caller: str, f: Callable, argnums: int | Sequence[int], has_aux: bool, allow_int: bool = False):
        self.caller = caller
        self.f = f
        self.name = name_of(f)
        self.numbers = normalize_argnums(caller, argnums)
        self.has_aux = has_aux
        self.allow_int = allow_int
        self.several = type(argnums) is not int and isinstance(argnums, Sequence)

    def flatten(self, args: tuple, kwargs: dict) -> tuple[list[Value], Flat]:
        """Return the leaves of the chosen arguments, and `f` as a function of them."""
        f, numbers = self.f, self.numbers
        chosen = arguments_of(self.caller, args, numbers, self.name)
        leaves, values, structure = flatten_arguments(self.caller, chosen, self.describe)

        def of_chosen(*replaced: Any) -> Any:
            full = list(args)
            for n, x in zip(numbers, replaced):
                full[n] = x
            return f(*full, **kwargs)

        return values, Flat(of_chosen, structure, self.has_aux, are_weak(leaves))

    def active(self, values: Sequence[Value], structure: tree.Structure) -> list[bool]:
        """Return which leaves to differentiate in: those of floating-point dtypes; all of an argument without one."""
        active = [is_differentiable(x.dtype) for x in values]
        if not self.allow_int and False in active:
            ends = itertools.accumulate([argument.num_leaves for argument in structure.children], initial=0)
            for start, end in itertools.pairwise(ends):
                active[start:end] = active[start:end] if any(active[start:end]) else [True] * (end - start)
        return active

    def describe(self, structure: tree.Structure) -> list[str]:
        """Return descriptions of the leaves for errors: `argument 0['w'] of loss`."""
        return [describe_argument(path, self.numbers, self.name) for path in tree.paths(structure)]

    def unflatten(self, structure: tree.Structure, leaves: Sequence[Any]) -> Any:
        """Return a tree like the argument, or a tuple of trees if `argnums` is a tuple."""
        trees = tree.unflatten(structure.of_derivatives, leaves)
        return tuple(trees) if self.several else trees[0]


def _flatten_at(caller: str, f: Callable, primals: tuple, has_aux: bool) -> tuple[Flat, list[Value], list[bool]]:
    """Return `f` as a function of leaves, the leaves of the primals, and which of them are differentiable."""
    check_function(caller, f, call=AT_PRIMALS)
    leaves, values, structure = flatten_arguments(caller, primals, _primal_paths)
    active = [is_differentiable(typeof(x).dtype) for x in values]
    return Flat(f, structure, has_aux, are_weak(leaves)), values, active


def _primal_paths(structure: tree.Structure) -> list[str]:
    return tree.paths(structure, "primals")


def linearize_leaves(
    origin: tuple[str, str], flat: Flat, values: Sequence[Value], active: Sequence[bool]
) -> tuple[list[Value], list[Any], Tape]:
    """Return the results of a function of leaves, aux if it has any, and the derivative as a linear tape."""
    outs, tape = engine.linearize_flat(flat, values, active, origin)
    outs, *aux = flat.split(outs)
    tape.outputs = tape.outputs[: len(outs)]
    return outs, aux, tape


# ---------------------------------------------------------------- cotangents and residuals


def as_cotangent(ct: Value | None, type: ShapedArray) -> Value:
    """Return a cotangent of this type: zeros for None, a sharded array resharded."""
    if ct is None:
        ct = instantiate(ct, type)
    return ct if type.sharding is None else type.sharding.reshard(ct)


def keep_residuals(tape: Tape) -> None:
    """Copy the arrays on a linear tape that the user can still write into.

    These are arguments, results and closed-over arrays. An array is copied if something besides the tape refers to it
    (by its reference count), or if it is a view.
    """
    if current_interpreter() is not EVALUATE:
        return  # the pullback runs before the user can write into any array
    arrays = [x for eqn in _equations(tape) for x in eqn.inputs if isinstance(x, numpy.ndarray)]
    uses: dict[int, int] = {}
    for i in map(id, arrays):
        uses[i] = uses.get(i, 0) + 1
    counts = list(map(sys.getrefcount, arrays))  # each use is a reference by the tape and one by the list
    copies: dict[int, numpy.ndarray] = {}
    for x, count in zip(arrays, counts):
        i = id(x)
        if (count > 2 * uses[i] + _OF_THE_CALL or x.base is not None) and i not in copies and not is_frozen(x):
            copies[i] = copy_view(x)
    if copies:
        for eqn in _equations(tape):
            eqn.inputs = [copies.get(id(x), x) for x in eqn.inputs]


def _equations(tape: Tape) -> Iterator[Equation]:
    """Yield the equations of a tape and its bodies (for a checkpoint, the recomputation)."""
    for eqn in tape.equations:
        yield eqn
        if eqn.primitive.is_higher_order:
            for body in eqn.bodies:
                yield from _equations(body)


#: The extra references to an object while `keep_residuals` counts the references to it.
_OF_THE_CALL = next(map(sys.getrefcount, [object()])) - 1


# ---------------------------------------------------------------- linear functions that are trees


class LinearFunction:
    """A pullback, or a linear function: `apply(tape, *args)` for a linear tape.

    It is a tree, whose leaves are the residuals on the tape, and whose structure is everything else. So a compiled
    function may take and return it, `vmap` may make many at once, and a rule of `custom_vjp` may keep it.

    >>> import minidiff as md
    >>> pullback = md.jit(lambda x: md.vjp(lambda x: x * x, x)[1])(3.0)
    >>> [float(x) for x in md.tree.leaves(pullback)]
    [3.0]
    >>> float(pullback(1.0)[0])
    6.0
    """

    def __init__(self, apply: Callable, tape: Tape, closed: tuple[_Program, Sequence[Value]] | None = None):
        self.apply = apply
        self.tape = tape
        self.closed = closed  # its structure and its leaves, once they have been asked for
        self.__name__ = apply.__name__

    def __repr__(self) -> str:
        return f"<{self.__name__}, a function that is linear>"

    @hide_own_frames
    def __call__(self, *args: Any) -> Any:
        return self.apply(self.tape, *args)


class _Program(NamedTuple):
    """A linear function without its residuals, which the tape takes as its first inputs."""

    apply: Callable
    tape: Tape

    def __repr__(self) -> str:
        return self.apply.__name__


def _flatten(f: LinearFunction) -> tuple[Sequence[Value], _Program]:
    if f.closed is None:
        tape, constants = Tape(f.tape.inputs, f.tape.equations, ()).close()
        f.closed = _Program(f.apply, Tape(tape.inputs, tape.equations, f.tape.outputs)), constants
    program, residuals = f.closed
    return residuals, program


def _unflatten(program: _Program, residuals: Sequence[Value]) -> LinearFunction:
    values = dict(zip(program.tape.inputs, residuals))

    closed = program.tape
    equations = [substitute(eqn, values) for eqn in closed.equations]
    tape = Tape(closed.inputs[len(residuals) :], equations, closed.outputs)
    return LinearFunction(program.apply, tape, (program, residuals))


tree.register(LinearFunction, _flatten, _unflatten)
