"""Reverse mode: linearize, then transpose.

The forward sweep runs the function in forward mode, on tangents that are variables on a tape: it
computes the primal values, and records the operations that are linear in the tangents. The backward
sweep walks the tape from its end and transposes each equation. So reverse mode needs no rules of its
own, and every function that can be linearized can be differentiated in reverse, to any order.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from minidiff import core, tree
from minidiff.aliasing import apart, keep_residuals
from minidiff.core import (
    EVALUATE,
    PLAIN,
    Interpreter,
    MisfitError,
    ShapedArray,
    Tracer,
    Value,
    VarianceError,
    are_weak,
    array_type,
    become,
    checking,
    current_interpreter,
    current_scope,
    is_differentiable,
    is_misfit,
    name_of,
    pbroadcast_to,
    running,
    show_axes,
    typeof,
    variance_of,
)
from minidiff.forward import JVP, Flat, JVPTracer, as_value, as_values, checked_tangent, float0, instantiate
from minidiff.keywords import transformation
from minidiff.location import transposes
from minidiff.ops.base import active_key, match_arrays
from minidiff.tape import Equation, LocatedStep, RecordedTracer, Recorder, Step, Tape, Var, evaluate_equation


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


_new = object.__new__


class Sweep(JVP):
    """Forward mode on top of a `Linearize`: compute values, and record tangents.

    Every operation under `grad` goes through it. A tangent is a variable on the tape. If possible, an operation's
    derivative is recorded as one equation, whose factors are computed only when it is transposed or applied.
    """

    def __init__(self, below: Linearize, outer: Interpreter | None = None):
        super().__init__(below, outer)
        self.on_arrays = below.below is EVALUATE
        self.equations = below.equations

    def process(self, primitive, args, params):
        # The fast path, which runs for every operation under `grad`. Nearly all have one or two operands, which are
        # plain values or this sweep's tracers, and a derivative with a known `Recording`. Unrolled for speed.
        if not self.on_arrays:
            return super().process(primitive, args, params)
        try:
            if len(args) == 1:
                (x,) = args
                recorded = primitive.recorded.get(0b11)
                if recorded is None or type(x) is not JVPTracer or x.interpreter is not self:
                    return super().process(primitive, args, params)
                a, name = x.primal, x.tangent
                out = primitive.run(a, **params) if params else primitive.run(a)
                known, _, type_ = recorded.types
                if known is not name.type or params:
                    type_ = recorded.type_of(out, name.type, None)
                inputs = recorded.keep((type_, out, a, name))
            elif len(args) == 2:
                x, y = args
                if type(x) is JVPTracer and x.interpreter is self:
                    a, name = x.primal, x.tangent
                    if type(y) is JVPTracer and y.interpreter is self:
                        recorded, b, other = primitive.recorded.get(0b111), y.primal, y.tangent
                    else:
                        recorded, b, other = primitive.recorded.get(0b101), y, None
                elif type(y) is JVPTracer and y.interpreter is self:
                    recorded, a, b, name, other = primitive.recorded.get(0b110), x, y.primal, y.tangent, None
                else:
                    recorded = None
                if recorded is None:
                    return super().process(primitive, args, params)
                if other is None and type(y if b is y else x) not in PLAIN:
                    return super().process(primitive, args, params)
                out = primitive.run(a, b, **params) if params else primitive.run(a, b)
                if other is not None:
                    known, known_other, type_ = recorded.types
                    if known is not name.type or known_other is not other.type or params:
                        type_ = recorded.type_of(out, name.type, other.type)
                    inputs = recorded.keep((type_, out, a, b, name, other))
                else:
                    if type(out) is complex:  # of a Python complex number and a real NumPy scalar
                        out = numpy.complex128(out)
                    type_ = array_type(out.shape, out.dtype)
                    inputs = recorded.keep((type_, out, a, b, name))
            else:
                return super().process(primitive, args, params)
        except (AttributeError, TypeError, ValueError) as error:
            if is_misfit(primitive, args, error):
                raise MisfitError(primitive, args, str(error).strip()) from None
            raise
        step = _new(Step)  # skip the constructors, which would take as long as all the rest
        step.primitive, step.type, step.inputs, step.params = recorded.operation, type_, inputs, params
        self.equations.append(step)
        tracer = _new(JVPTracer)
        tracer.interpreter, tracer.primal, tracer.tangent = self, out, step
        return tracer

    def interpret(self, primitive, args, params):
        mine = [type(x) is JVPTracer and x.interpreter is self for x in args]
        if not primitive.by_parts or primitive.multiple_results or True not in mine:
            out = super().interpret(primitive, args, params)
            for x in out if primitive.multiple_results else (out,):
                if type(x) is JVPTracer and isinstance(x.primal, Tracer):
                    self.on_arrays = False  # the result is sharded over a mesh
            if hasattr(primitive, "body_scope"):
                self.on_arrays = False  # a shard_map's results, or its operands' cotangents, may be sharded
            return out
        out = core.dispatch_to_shards(self, primitive, args, params)
        if out is not None:
            self.on_arrays = False  # the result is sharded
            return out
        recorder = self.below
        primals = [x.primal if yes else x for x, yes in zip(args, mine)]
        names = [x.tangent for x, yes in zip(args, mine) if yes]
        out = primitive.apply(recorder.below, primals, params)
        type_ = typeof(out)
        recorded = primitive.recorded.get(active_key(mine))
        if recorded is not None:
            linear = recorded.operation, recorded.keep((type_, out, *primals, *names)), params
        else:
            active = tuple([i for i, yes in enumerate(mine) if yes])
            linear = primitive.linearized(out, type_, primals, active, names, params)
        if type(linear) is tuple:
            source = None if self.on_arrays else recorder.source()
            step = Step(type_) if source is None else LocatedStep(type_)
            if source is not None:
                step.source = source
            step.primitive, step.inputs, step.params = linear
            recorder.equations.append(step)
            return JVPTracer(self, out, step)
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


def linearize_flat(
    f: Callable, primals: Sequence[Value], active: Sequence[bool], origin: tuple[str, str] | None = None
) -> tuple[list[Value], Tape]:
    """Return the results of `f`, and its derivative in `active` primals as a tape.

    The tape is linear. Its output is None for a result that does not depend on an active primal. `origin` names the
    transformation and the function in errors.
    """
    recorder = Linearize(current_interpreter())
    sweep = Sweep(recorder)
    recorder.origin = sweep.origin = origin
    if recorder.below.watch is not None:
        recorder.below.watch_sweep(sweep)
    inputs, args = recorder.inputs, []
    for p, yes in zip(primals, active):
        if yes:
            name = _new(Var)
            if type(p) is numpy.ndarray:
                name.type = array_type(p.shape, p.dtype)
            else:
                name.type = typeof(p)
                sweep.on_arrays = sweep.on_arrays and not isinstance(p, Tracer)
            inputs.append(name)
            value, p = p, _new(JVPTracer)
            p.interpreter, p.primal, p.tangent = sweep, value, name
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


@transposes
def backward_pass(
    tape: Tape, linear: Sequence[bool], values: Sequence[Value], cts: Sequence[Value | None], consume: bool = False
) -> list[Value | None]:
    """Map cotangents of a tape's outputs to cotangents of its `linear` inputs.

    `values` are the values of all inputs (ignored where linear). A zero cotangent is None. With `consume`,
    equations drop their operands once they are transposed, which frees memory.
    """
    interpreter = current_interpreter()
    scope = interpreter.scope
    if scope is not None:
        scope.transposes()
        if scope.checks:
            with checking(scope, False):
                return backward_pass(tape, linear, values, cts, consume)
    wanted = [v for v, yes in zip(tape.inputs, linear) if yes]
    if not tape.linear:
        tape, consume = linear_part(tape, linear, values), True
        tape.may_be_sharded = any(isinstance(x, Tracer) for x in (*values, *cts))
    adjoints: dict[Var, Value] = {}
    owned: set[Var] = set()  # variables whose adjoint is a sum made here, which may be added to in place
    for a, ct in zip(tape.outputs, cts):
        if ct is not None and isinstance(a, Var):
            _accumulate(adjoints, owned, a, ct)
    plain = tape.linear and not tape.may_be_sharded and interpreter is EVALUATE
    watch = interpreter.watch
    for eqn in reversed(tape.equations):
        primitive, inputs = eqn.primitive, eqn.inputs
        if consume:
            eqn.inputs = ()
        pulls = primitive.pulls
        if plain and pulls is not None:
            name = eqn if type(eqn) is Step else eqn.outputs[0]
            out_ct = adjoints.pop(name, None)
            if out_ct is not None:
                i, type_, params = primitive.count, name.type, eqn.params
                for pull in pulls:
                    a, ct = inputs[i], out_ct
                    i += 1
                    if not isinstance(a, Var):  # a constant zero tangent
                        continue
                    if pull is not None:
                        ct = pull(ct, *inputs, **params) if params else pull(ct, *inputs)
                    t = a.type
                    if t is not type_ and (ct.shape != t.shape or ct.dtype is not t.dtype):
                        ct = match_arrays(ct, t)
                    if a in adjoints:
                        _accumulate(adjoints, owned, a, ct)
                    else:
                        adjoints[a] = ct
            continue
        if primitive.multiple_results:
            out_cts = [adjoints.pop(v, None) for v in eqn.outputs]
            if all(ct is None for ct in out_cts):
                continue
        else:
            out_cts = adjoints.pop(eqn.outputs[0], None)
            if out_cts is None:
                continue
        operands = [a.type if isinstance(a, Var) else a for a in inputs]
        try:
            if watch is None:
                in_cts = primitive.transpose(out_cts, operands, eqn.params)
            else:
                in_cts = watch(primitive.transpose, primitive, out_cts, operands, eqn.params)
        finally:
            become(interpreter)  # see `restores_interpreter`
        for a, ct in zip(inputs, in_cts):
            if ct is not None and isinstance(a, Var):
                _accumulate(adjoints, owned, a, ct)
    return [adjoints.get(v) for v in wanted]


#: `backward_pass` in a typed `shard_map` body, for a tape recorded there. A hook: `collectives` sets a version with
#: fewer sums over ranks.
backward_pass_on_ranks: Callable = backward_pass


def pull_back(tape: Tape, cts: Sequence[Value | None], consume: bool = False) -> list[Value | None]:
    """Map output cotangents to input cotangents, for a tape linear in all inputs."""
    scope, count = current_scope(), len(tape.inputs)
    pull = backward_pass_on_ranks if scope is not None and scope.typed else backward_pass
    return pull(tape, [True] * count, [None] * count, cts, consume)


def _accumulate(adjoints: dict[Var, Value], owned: set[Var], a: Var, ct: Value) -> None:
    """Add a cotangent to the adjoint of a variable."""
    if a.type.variance or isinstance(ct, Tracer):
        ct = agreeing(ct, a.type)
    if a not in adjoints:
        adjoints[a] = ct
    elif a in owned and type(ct) is numpy.ndarray:
        numpy.add(adjoints[a], ct, out=adjoints[a])
    else:
        adjoints[a] = total = adjoints[a] + ct
        if type(total) is numpy.ndarray and total.dtype == a.type.dtype:
            owned.add(a)
        else:
            owned.discard(a)


def linear_part(tape: Tape, linear: Sequence[bool], values: Sequence[Value]) -> Tape:
    """Compute what does not depend on linear inputs; the rest is a linear tape.

    The values that the rest needs are constants on it, and all others are freed after their last use.
    """
    linear_vars = {v for v, yes in zip(tape.inputs, linear) if yes}
    env = {v: x for v, x, yes in zip(tape.inputs, values, linear) if not yes}
    known, rest, needed = [], [], set()
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


def agreeing(ct: Value, type: ShapedArray) -> Value:
    """Give a cotangent the variance of its primal, or raise VarianceError."""
    variance = variance_of(ct)
    if variance == type.variance:
        return ct
    extra = variance - type.variance
    if extra:
        axes = show_axes(extra)
        raise VarianceError(
            f"a cotangent of type {typeof(ct)} for a value of type {type} varies along {axes}, where the value does "
            f"not: sum it, psum(ct, {axes}), if each rank has a partial sum; or, if each has its own cotangent, let "
            f"the value vary too: compute it from pbroadcast(x, {axes})"
        )
    return pbroadcast_to(ct, type.variance)


# ---------------------------------------------------------------- public functions


def linearize(f: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    """The value and the derivative as a linear function: `(f(*primals), f_linear)`.

    `f_linear(*tangents)` takes trees like the primals and returns one like the result of `f`. It stores the primal
    values that it needs, so it does not run `f` again. It copies those that you may write into (arguments, results,
    arrays that `f` closes over), so it remains the derivative at the point of linearization. With `has_aux`, `f`
    returns a pair `(value, aux)`, and the result is `(value, f_linear, aux)`.

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

    def f_linear(*tangents: Any) -> Any:
        flat_tangents, given = tree.flatten(tangents)
        if given != structure:
            raise TypeError(f"f_linear: tangents have the structure {given}, the primals {structure}")
        checked = [checked_tangent(path, p, t) for (path, _), p, t in zip(leaves, values, flat_tangents)]
        results = tape(*[t for t, yes in zip(checked, active) if yes])
        results = [instantiate(t, x) for t, x in zip(results, types)]
        return tree.unflatten(flat.out_structure, apart(results, checked))

    return tree.unflatten(flat.out_structure, outs), f_linear, *aux


def vjp(f: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    """The value of `f` and its pullback: `(f(*primals), pullback)`.

    `pullback(ct)` takes a cotangent like the result of `f` (same structure, shapes, dtypes) and returns a tuple with a
    cotangent for each primal. Integers get cotangents of dtype `float0`. It may be called several times, even after
    arguments, results, or arrays that `f` closes over have been overwritten: it has copies of those that it needs.
    With `has_aux`, `f` returns a pair `(value, aux)`, and the result is `(value, pullback, aux)`.

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

    def pullback(ct: Any) -> tuple:
        cts = checked_cotangents(ct, out_types, flat.out_structure)
        pulled = iter(pull_back(tape, cts))
        found = [instantiate(next(pulled) if yes else None, x) for x, yes in zip(values, active)]
        found = [resharded(ct, typeof(x)) for ct, x in zip(found, values)]
        return tree.unflatten(structure, apart(found, cts))

    return tree.unflatten(flat.out_structure, outs), pullback, *aux


def checked_cotangents(ct: Any, out_types: Sequence[ShapedArray], structure: tree.Structure) -> list[Value | None]:
    """Flatten and validate a cotangent of these results; None for integer leaves."""
    paths, given = tree.flatten_with_paths(ct, "ct")
    if given != structure:
        raise TypeError(f"pullback: the cotangent has the structure {given}, the result {structure}")
    return [_checked_cotangent(path, as_value(x), t) for (path, x), t in zip(paths, out_types)]


def resharded(ct: Value, type: ShapedArray) -> Value:
    """Reshard a cotangent like its primal's type, if that is sharded."""
    return ct if type.sharding is None else type.sharding.resharded(ct)


def _checked_cotangent(path: str, ct: Value, out: ShapedArray) -> Value | None:
    t = typeof(ct) if ct.dtype != float0 else out
    if t.shape != out.shape or (t.dtype != out.dtype and is_differentiable(out.dtype)):
        raise TypeError(f"pullback: the result has type {out}, but its cotangent {path} has type {t}")
    return ct if is_differentiable(out.dtype) else None


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
                if x.dtype.kind not in "fc":
                    raise TypeError(_not_differentiable(named()[i], x))

        def of_chosen(*replaced):
            full = list(args)
            for n, x in zip(numbers, replaced):
                full[n] = x
            return f(*full, **kwargs)

        flat = Flat(of_chosen, structure, has_aux, () if values is leaves else are_weak(leaves))
        active = [True] * len(values)
        outs, tape = linearize_flat(flat, values, active, origin)
        value = _check_scalar(flat.out_structure, outs, name)
        if values is leaves:
            cts = backward_pass(tape, active, values, [value.dtype.type(1)], consume=True)
        else:
            cts = pull_back(tape, [value.dtype.type(1)], consume=True)
        grads = [instantiate(ct, x) if ct is None else ct for ct, x in zip(cts, values)]
        if values is not leaves:
            grads = [resharded(ct, typeof(x)) for ct, x in zip(grads, values)]
        grads = tree.unflatten(structure, apart(grads))
        grads = tuple(grads) if several else grads[0]
        return ((value, tree.unflatten(flat.aux_structure, outs[1:])) if has_aux else value), grads

    return gradient


@transformation
def grad(f: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """Return a function that computes the gradient of a scalar function.

    It is `value_and_grad` without the value. With `has_aux` the result is `(grads, aux)`.

    >>> import numpy as np
    >>> grad(lambda x: (x ** 2).sum())(np.array([1.0, 2.0]))
    array([2., 4.])
    """
    both = value_and_grad.__wrapped__(f, argnums, has_aux)  # skips `named_like`: the name is not visible

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def chosen_arguments(what: str, argnums: int | Sequence[int]) -> tuple[int, ...]:
    """`argnums` as a tuple."""
    if type(argnums) is int:
        return (argnums,)
    try:
        return tuple(map(operator.index, argnums if isinstance(argnums, Sequence) else [argnums]))
    except TypeError:
        raise TypeError(f"{what}: argnums must be an int or a tuple of ints, got {argnums!r}") from None


def arguments_of(what: str, args: tuple, numbers: tuple[int, ...], name: str) -> list[Any]:
    """The arguments selected by `numbers`; `what` and `name` are for errors."""
    return [args[n] for n in _positions(what, len(args), numbers, name)]


@functools.lru_cache(maxsize=1024)
def _positions(what: str, count: int, numbers: tuple[int, ...], name: str) -> tuple[int, ...]:
    for n in numbers:
        if not -count <= n < count:
            raise TypeError(f"{what}: argnums names argument {n}, but {name} was called with {count}")
    if len(numbers) > 1 and len({n % count for n in numbers}) < len(numbers):
        raise TypeError(f"{what}: argnums names an argument of {name} twice: {tuple(numbers)}")
    return numbers


def named_argument(path: str, numbers: Sequence[int], name: str) -> str:
    """Describe a leaf of the selected arguments: `argument 0['w'] of loss`."""
    index, _, rest = path[1:].partition("]")
    return f"argument {numbers[int(index)]}{rest} of {name}"


def _not_differentiable(argument: str, x: Value) -> str:
    return (
        f"grad: {argument} has type {typeof(x)}; gradients are of floating-point "
        "numbers: convert it with float(), an array with .astype(float), or choose other arguments with argnums"
        f"{tree.advice_on(argument)}"
    )


def _check_scalar(structure: tree.Structure, outs: list[Value], name: str) -> Value:
    """Return the one real scalar that the function returned, or raise TypeError."""
    if structure is not tree.LEAF:
        raise TypeError(f"grad: {name} must return one scalar, got {structure} (for more, has_aux=True)")
    value = outs[0]
    if not value.shape and value.dtype.kind == "f":
        return value
    if value.shape:
        advice = "reduce it to one number (with .sum(), say), or use md.vjp for a result of several"
    elif value.dtype.kind == "c":
        advice = "take .real, .imag or abs of it; for a holomorphic function, md.jacrev(f, holomorphic=True)"
    else:
        advice = "integers and booleans carry no derivative: leave out the .astype(int), the comparison or the rounding"
    raise TypeError(f"grad: {name} must return a real scalar, got {typeof(value)}; {advice}")
