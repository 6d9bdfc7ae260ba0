"""Reverse mode: linearize, then transpose.

The forward sweep runs the function in forward mode, on tangents that are variables on a tape: it
computes the primal values, and records the operations that are linear in the tangents. The backward
sweep walks the tape from its end and transposes each equation. So reverse mode needs no rules of its
own, and every function that can be linearized can be differentiated in reverse, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import tree
from minidiff.core.forward import JVP, JVPTracer, instantiate
from minidiff.core.interpreter import EVALUATE, become, current_interpreter, current_scope, name_of, running
from minidiff.core.ranks import ranks
from minidiff.core.scope import checking
from minidiff.core.states import ALL_INVARIANT
from minidiff.core.tape import Equation, RecordedTracer, Recorder, Tape, evaluate_equation
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import Var, array_type, typeof
from minidiff.diagnostics.location import transposes
from minidiff.fast import steps as fastpath
from minidiff.inputs.aliasing import apart, keep_residuals
from minidiff.inputs.arguments import (
    Flat,
    agreeing,
    arguments_of,
    as_value,
    as_values,
    check_scalar,
    checked_cotangents,
    checked_tangent,
    chosen_arguments,
    named_argument,
    not_differentiable,
    resharded,
    warn_if_summed,
)
from minidiff.inputs.dtypes import is_differentiable
from minidiff.inputs.keywords import transformation
from minidiff.inputs.linear_function import LinearFunction
from minidiff.inputs.promotion import are_weak


class Linearize(Recorder):
    """Record operations on tangents; pass all others to the interpreter below."""

    name = "the linear part of a derivative"

    def interpret(self, primitive, args, params):
        if primitive.is_higher_order:
            with running(self.below):
                return primitive.linearize_body(self, args, params)
        for x in args:
            if self.owns(x):
                return self.record(primitive, args, params)
        return self.below.process(primitive, args, params)


class Sweep(JVP):
    """Forward mode on top of a `Linearize`: compute values, and record tangents.

    Every operation under `grad` goes through it. A tangent is a variable on the tape. If possible, an operation's
    derivative is recorded as one equation, whose factors are computed only when it is transposed or applied.
    """

    on_arrays = False  # whether all values are plain arrays: see `FastSweep`

    def interpret(self, primitive, args, params):
        mine = [type(x) is JVPTracer and x.interpreter is self for x in args]
        if not primitive.by_parts or primitive.multiple_results or True not in mine:
            return super().interpret(primitive, args, params)
        out = ranks.dispatch(self, primitive, args, params)
        if out is not None:
            return out
        recorder = self.below
        primals = [x.primal if yes else x for x, yes in zip(args, mine)]
        names = [x.tangent for x, yes in zip(args, mine) if yes]
        out = primitive.apply(recorder.below, primals, params)
        type_ = typeof(out)
        recorded = primitive.recorded.get(fastpath.active_key(mine))
        if recorded is not None:
            linear = recorded.operation, recorded.keep((type_, out, *primals, *names)), params
        else:
            active = tuple([i for i, yes in enumerate(mine) if yes])
            linear = primitive.linearized(out, type_, primals, active, names, params)
        if type(linear) is tuple:
            return JVPTracer(self, out, recorder.add_step(type_, *linear))
        if linear is not None:
            return JVPTracer(self, out, linear)
        with running(recorder):
            return self.join(out, primitive.tangent(out, primals, self.split(args)[1], params))

    def split(self, args):
        primals, tangents = super().split(args)
        return primals, [None if t is None else RecordedTracer(self.below, t) for t in tangents]

    def join(self, primal, tangent):
        # A tangent that is not a variable on the tape does not depend on its inputs. It is linear in them, so zero.
        return JVPTracer(self, primal, tangent.variable) if self.below.owns(tangent) else primal

    def adopt_own(self, x):
        return self.join(self.below.adopt(x.primal), self.below.adopt(RecordedTracer(x.interpreter.below, x.tangent)))


class FastSweep(fastpath.RecordedSteps, Sweep):
    """The same, and faster on plain arrays."""


def linearize_flat(
    f: Callable, primals: Sequence[Value], active: Sequence[bool], origin: tuple[str, str] | None = None
) -> tuple[list[Value], Tape]:
    """Return the results of `f`, and its derivative in `active` primals as a tape.

    The tape is linear. Its output is None for a result that does not depend on an active primal. `origin` names the
    transformation and the function in errors.
    """
    recorder = Linearize(current_interpreter())
    sweep = FastSweep(recorder) if recorder.below is EVALUATE else Sweep(recorder)
    recorder.origin = sweep.origin = origin
    recorder.below.watch_sweep(sweep)
    args = []
    for p, yes in zip(primals, active):
        if yes:
            name = Var(array_type(p.shape, p.dtype) if type(p) is numpy.ndarray else typeof(p))
            sweep.on_arrays = sweep.on_arrays and not isinstance(p, Tracer)
            recorder.inputs.append(name)
            p = JVPTracer(sweep, p, name)
        args.append(p)
    try:  # as `with running(sweep)`, but faster, and an interrupt cannot leave `sweep` current
        become(sweep)
        results = f(*args)
    finally:
        become(recorder.below)
        sweep.end()
        recorder.end()
    outs, out_names = [], []
    for x in results:
        mine = type(x) is JVPTracer and x.interpreter is sweep
        outs.append(x.primal if mine else x)
        out_names.append(x.tangent if mine else None)
    tape = Tape(recorder.inputs, recorder.equations, out_names)
    tape.linear, tape.may_be_sharded = True, not sweep.on_arrays
    return outs, tape


# ---------------------------------------------------------------- transposition


class Cotangents:
    """The cotangents of variables that are known while a tape is transposed."""

    __slots__ = ("known", "owned")

    def __init__(self) -> None:
        self.known: dict[Var, Value] = {}
        self.owned: set[Var] = set()  # variables whose cotangent is a sum made here, which may be added to in place

    def add(self, a: Var, ct: Value) -> None:
        """Add `ct` to the cotangent of variable `a`, which may be used several times."""
        if a.type.states is not ALL_INVARIANT or isinstance(ct, Tracer):
            ct = agreeing(ct, a.type)
        known, owned = self.known, self.owned
        if a not in known:
            known[a] = ct
        elif a in owned and type(ct) is numpy.ndarray:
            numpy.add(known[a], ct, out=known[a])
        else:
            known[a] = total = known[a] + ct
            if type(total) is numpy.ndarray and total.dtype == a.type.dtype:
                owned.add(a)
            else:
                owned.discard(a)


@transposes
def backward_pass(
    tape: Tape, linear: Sequence[bool], values: Sequence[Value], cts: Sequence[Value | None], consume: bool = False
) -> list[Value | None]:
    """Map cotangents of a tape's outputs to cotangents of its `linear` inputs.

    `values` are the values of all inputs (ignored where linear). A zero cotangent is None. With `consume`,
    equations drop their operands once they are transposed, which frees memory.
    """
    scope = current_scope()
    if scope is not None:
        scope.transposed += 1
        if scope.checks:
            with checking(scope, False):
                return backward_pass(tape, linear, values, cts, consume)
    if not tape.linear:
        tape, consume = linear_part(tape, linear, values), True
        tape.may_be_sharded = any(isinstance(x, Tracer) for x in (*values, *cts))
    cotangents = Cotangents()
    for a, ct in zip(tape.outputs, cts):
        if ct is not None and isinstance(a, Var):
            cotangents.add(a, ct)
    if not tape.may_be_sharded and current_interpreter() is EVALUATE:
        fastpath.walk_back(tape.equations, cotangents, transpose_equation, consume)
    else:
        for eqn in reversed(tape.equations):
            transpose_equation(eqn, cotangents, consume)
    return [cotangents.known.get(v) for v in tape.inputs]


@transposes
def transpose_equation(eqn: Equation, cotangents: Cotangents, consume: bool = False) -> None:
    """Replace the cotangents of an equation's results by those of its linear operands."""
    primitive, inputs, interpreter = eqn.primitive, eqn.inputs, current_interpreter()
    if consume:
        eqn.inputs = ()
    out_cts = [cotangents.known.pop(v, None) for v in eqn.outputs]
    out_ct = out_cts if primitive.multiple_results else out_cts[0]
    if out_ct is None or (out_ct is out_cts and all(ct is None for ct in out_cts)):
        return
    operands = [a.type if isinstance(a, Var) else a for a in inputs]
    try:
        in_cts = interpreter.apply_rule(primitive.transpose, primitive, out_ct, operands, eqn.params)
    finally:
        become(interpreter)  # see `restores_interpreter`
    del out_cts, out_ct, operands  # free them before sums are allocated
    for a, ct in zip(inputs, in_cts):
        if ct is not None and isinstance(a, Var):
            cotangents.add(a, ct)


def pull_back(tape: Tape, cts: Sequence[Value | None], consume: bool = False) -> list[Value | None]:
    """Map output cotangents to input cotangents, for a tape linear in all inputs."""
    scope, count = current_scope(), len(tape.inputs)
    args = tape, [True] * count, [None] * count, cts, consume
    in_body = scope is not None and scope.typed
    return ranks.backward_pass(backward_pass, *args) if in_body else backward_pass(*args)


def linear_part(tape: Tape, linear: Sequence[bool], values: Sequence[Value]) -> Tape:
    """Compute what does not depend on linear inputs; the rest is a linear tape.

    The values that the rest needs are constants on it, and all others are freed after their last use.
    """
    linear_vars = {v for v, yes in zip(tape.inputs, linear) if yes}
    env = {v: x for v, x, yes in zip(tape.inputs, values, linear) if not yes}
    known, rest = [], []
    needed: set[Var] = set()
    for eqn in tape.equations:
        if any(isinstance(a, Var) and a in linear_vars for a in eqn.inputs):
            linear_vars.update(eqn.outputs)
            rest.append(eqn)
            needed.update(a for a in eqn.inputs if isinstance(a, Var))
        else:
            known.append(eqn)
    last = {a: i for i, eqn in enumerate(known) for a in (*eqn.inputs, *eqn.outputs) if isinstance(a, Var)}
    for i, eqn in enumerate(known):
        evaluate_equation(eqn, env)
        for a in (*eqn.inputs, *eqn.outputs):
            if isinstance(a, Var) and last[a] == i and a not in needed:
                env.pop(a, None)

    operands = [[env.get(a, a) if isinstance(a, Var) else a for a in e.inputs] for e in rest]
    equations = [Equation(e.primitive, xs, e.params, e.outputs, e.source) for e, xs in zip(rest, operands)]
    inputs = [v for v, yes in zip(tape.inputs, linear) if yes]
    out = Tape(inputs, equations, [a if isinstance(a, Var) and a in linear_vars else None for a in tape.outputs])
    out.linear = True
    return out


# ---------------------------------------------------------------- public functions


def linearize(f: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    """The value and the derivative as a linear function: `(f(*primals), f_linear)`.

    `f_linear(*tangents)` takes trees like the primals and returns one like the result of `f`. It stores the primal
    values that it needs, so it does not run `f` again. It copies those that you may write into (arguments, results,
    arrays that `f` closes over), so it remains the derivative at the point of linearization. It is a tree of what it
    stores. With `has_aux`, `f` returns a pair `(value, aux)`, and the result is `(value, f_linear, aux)`.

    >>> import numpy as np
    >>> value, f_linear = linearize(np.sin, 0.0)
    >>> float(f_linear(3.0))
    3.0
    """
    leaves, structure = tree.flatten_with_paths(primals, "primals")
    values = [as_value(x) for _, x in leaves]
    flat = Flat(f, structure, has_aux, are_weak(x for _, x in leaves))
    active = [is_differentiable(typeof(x).dtype) for x in values]
    outs, tape = linearize_flat(flat, values, active, ("linearize", name_of(f)))
    outs, *aux = flat.split(outs)
    types, tape.outputs = [typeof(x) for x in outs], tape.outputs[: len(outs)]
    keep_residuals(tape)
    primal_types, out_structure = [(path, typeof(x)) for (path, _), x in zip(leaves, values)], flat.out_structure

    def f_linear(tape: Tape, *tangents: Any) -> Any:
        flat_tangents, given = tree.flatten(tangents)
        if given != structure:
            raise TypeError(f"f_linear: tangents have the structure {given}, the primals {structure}")
        checked = [checked_tangent(path, p, t) for (path, p), t in zip(primal_types, flat_tangents)]
        results = tape(*[t for t, yes in zip(checked, active) if yes])
        results = [instantiate(t, x) for t, x in zip(results, types)]
        return tree.unflatten(out_structure, apart(results, checked))

    return tree.unflatten(out_structure, outs), LinearFunction(f_linear, tape), *aux


def vjp(f: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    """The value of `f` and its pullback: `(f(*primals), pullback)`.

    `pullback(ct)` takes a cotangent like the result of `f` (same structure, shapes, dtypes) and returns a tuple with a
    cotangent for each primal. Integers get cotangents of dtype `float0`. It may be called several times, even after
    arguments, results, or arrays that `f` closes over have been overwritten: it has copies of those that it needs. It
    is a tree of these, so a compiled function may take or return it, and a rule of `custom_vjp` keep it. With
    `has_aux`, `f` returns a pair `(value, aux)`, and the result is `(value, pullback, aux)`.

    >>> import numpy as np
    >>> value, pullback = vjp(lambda x, y: x * y, 2.0, 3.0)
    >>> [float(ct) for ct in pullback(1.0)]
    [3.0, 2.0]
    >>> value, pullback, aux = vjp(lambda x: (x * x, {'x': x}), 2.0, has_aux=True)
    >>> float(pullback(1.0)[0]), float(aux['x'])
    (4.0, 2.0)
    """
    leaves, structure = tree.flatten(primals)
    flat, values = Flat(f, structure, has_aux, are_weak(leaves)), [as_value(x) for x in leaves]
    active = [is_differentiable(typeof(x).dtype) for x in values]
    outs, tape = linearize_flat(flat, values, active, ("vjp", name_of(f)))
    outs, *aux = flat.split(outs)
    out_types, tape.outputs = [typeof(x) for x in outs], tape.outputs[: len(outs)]
    keep_residuals(tape)
    ct_types, out_structure = [typeof(x).cotangent for x in values], flat.out_structure

    def pullback(tape: Tape, ct: Any) -> tuple:
        cts = checked_cotangents(ct, out_types, out_structure)
        pulled = iter(pull_back(tape, cts))
        found = [instantiate(next(pulled) if yes else None, t) for t, yes in zip(ct_types, active)]
        found = [resharded(ct, t) for ct, t in zip(found, ct_types)]
        return tree.unflatten(structure, apart(found, cts))

    return tree.unflatten(out_structure, outs), LinearFunction(pullback, tape), *aux


_FLOAT64 = numpy.dtype(float)


@transformation
def value_and_grad(f: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """Return a function that computes the value of `f` and its gradient.

    It returns `(value, grads)`. `f` returns a real scalar; with `has_aux` it returns a pair of the scalar and anything
    else, and the result is `((value, aux), grads)`. `argnums` selects the arguments: an int gives one gradient, a tuple
    of ints a tuple of gradients. Gradients have the structure, shapes and dtypes of the arguments. Raise TypeError for
    a result that is not a real scalar, or an integer argument.

    >>> import numpy as np
    >>> value, g = value_and_grad(lambda x: (x ** 2).sum())(np.array([1.0, 2.0]))
    >>> float(value), g
    (5.0, array([2., 4.]))
    """

    numbers = chosen_arguments("grad", argnums)
    several = type(argnums) is not int and isinstance(argnums, Sequence)
    name = name_of(f)
    origin = ("grad", name)

    def gradient(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, structure = tree.flatten(arguments_of("grad", args, numbers, name))
        values = leaves
        if not all(type(x) is numpy.ndarray and x.dtype is _FLOAT64 for x in leaves):
            named = lambda: [named_argument(path, numbers, name) for path in tree.paths(structure)]  # noqa: E731
            values = as_values("grad", leaves, named)
            for i, x in enumerate(values):
                if not is_differentiable(x.dtype):
                    raise TypeError(not_differentiable(named()[i], x))

        def of_chosen(*replaced):
            full = list(args)
            for n, x in zip(numbers, replaced):
                full[n] = x
            return f(*full, **kwargs)

        flat = Flat(of_chosen, structure, has_aux, () if values is leaves else are_weak(leaves))
        active = [True] * len(values)
        outs, tape = linearize_flat(flat, values, active, origin)
        value = check_scalar(flat.out_structure, outs, name)
        if values is leaves:
            cts = backward_pass(tape, active, values, [value.dtype.type(1)], consume=True)
        else:
            cts = pull_back(tape, [value.dtype.type(1)], consume=True)
        if isinstance(value, Tracer) and value.states.varying:
            names = [named_argument(path, numbers, name) for path in tree.paths(structure)]
            named_cts = zip(names, values, cts)
            warn_if_summed("grad", name, [value], {arg: x for arg, x, ct in named_cts if ct is not None})
        grads = [instantiate(ct, typeof(x).cotangent) if ct is None else ct for ct, x in zip(cts, values)]
        if values is not leaves:
            grads = [resharded(ct, typeof(x).cotangent) for ct, x in zip(grads, values)]
        chosen = tree.unflatten(structure, apart(grads))
        result = (value, tree.unflatten(flat.aux_structure, outs[1:])) if has_aux else value
        return result, tuple(chosen) if several else chosen[0]

    return gradient


@transformation
def grad(f: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """Return a function that computes the gradient of a scalar function.

    It takes the arguments of `f`, arrays or trees of arrays, and returns the gradient in those that `argnums` selects:
    an int gives one gradient, a tuple of ints a tuple of them. A gradient has the structure, the shapes and the dtypes
    of its argument. With `has_aux`, `f` returns a pair of the scalar and anything else, and the result is
    `(grads, aux)`. Raise TypeError if the result of `f` is not a real scalar, or if an argument that `argnums` selects
    is of integers. It is `value_and_grad` without the value.

    >>> import numpy as np
    >>> grad(lambda x: (x ** 2).sum())(np.array([1.0, 2.0]))
    array([2., 4.])
    """
    both = value_and_grad.__wrapped__(f, argnums, has_aux)  # skips `named_like`: the name is not visible

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient
