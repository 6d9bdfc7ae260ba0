"""Casts: change the state of a value along mesh axes, and move nothing.

The library inserts them where the operands of an operation disagree; users write them to say where sums over ranks are
taken. Their rows, with the transposes, are in the table of `ops.py`, which explains the drawings too; the states are
those of `minidiff.core.states`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy

from collectives.axes import Axes, axes_in_scope, collective_axes, size_of
from collectives.collective import Collective, check_operand
from collectives.operands import array_of, convert_booleans, each_leaf
from collectives.ops import CASTS, Tree, pbroadcast_p, reduced_p, unreduced_p
from collectives.typing_rules import cast_cotangent, check_operands, check_unreduced
from minidiff.core.interpreter import (
    EVALUATE,
    Interpreter,
    current_interpreter,
    current_scope,
    running,
    set_interpreter,
)
from minidiff.core.primitive import Primitive
from minidiff.core.ranks import Ranks, Scope, cast_to
from minidiff.core.states import ALL_INVARIANT, UNREDUCED, VARYING, AxisStates, combine_states, common_states
from minidiff.core.tape import program_around
from minidiff.core.tracer import Tracer, Value, WeakTracer, states_of
from minidiff.core.types import ShapedArray, operand_type, typeof
from minidiff.errors import VarianceError, show_axes
from minidiff.inputs.arguments import is_zero
from minidiff.values.aliasing import read_only_copy
from minidiff.values.dtypes import is_scalar_constant
from minidiff.values.settings import checking

# ---------------------------------------------------------------- inserting casts


def bind_in_body(interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
    """Apply an operation in the body of a `shard_map`, after the casts by which its operands agree."""
    if WeakTracer in map(type, args):
        args = primitive.strong(args)
    args = [x if getattr(x, "interpreter", interpreter) is interpreter else interpreter.lift(x) for x in args]
    if interpreter.scope.checks:
        if primitive.is_checked_in(interpreter.scope, params):
            return _bind_checked(interpreter, primitive, args, params)
    elif primitive.operands_agree and len(args) > 1:
        args = insert_casts(primitive, args)
    return primitive.apply(interpreter, args, params)


def _bind_checked(interpreter: Interpreter, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
    """Apply the user's operation, or raise VarianceError if it lacks a pbroadcast."""
    if primitive.operands_agree and args and not any(isinstance(x, Tracer) for x in args):
        with running(EVALUATE):  # the result of constants is a constant
            return primitive.bind(*args, **params)
    if primitive.operands_agree and len(args) > 1:
        args = insert_casts(primitive, args, explicit=True)
    if not primitive.is_higher_order:
        arrays = [x for x in args if not (primitive.operands_agree and is_scalar_constant(x))]
        primitive.check_variance([typeof(x) for x in arrays], params)
    with checking(interpreter.scope, False):
        return primitive.apply(interpreter, args, params)


def insert_casts(primitive: Primitive, args: Sequence[Value], explicit: bool = False) -> Sequence[Value]:
    """Insert casts where the operands of an operation disagree (JEP, "typing rules"; `minidiff.core.states`).

    With `explicit` (`auto_pbroadcast=False`) the user writes casts: cast only constants, and raise VarianceError where
    traced values disagree.
    """
    operand_states = tuple(
        [x.states if isinstance(x, Tracer) else None if is_scalar_constant(x) else ALL_INVARIANT for x in args]
    )
    casts = _casts(operand_states)
    if casts is None:
        return args
    args = list(args)
    if (combined := combine_states(*filter(None, operand_states))).unreduced:
        _cast_zeros(primitive, args, combined)
        check_unreduced(primitive, list(map(operand_type, args)))
        casts = _casts(tuple([states and states_of(x) for x, states in zip(args, operand_states)]))
    if explicit:
        check_operands(primitive.name, [typeof(x) if isinstance(x, Tracer) else None for x in args])
    for i, states in casts or ():
        args[i] = cast(args[i], states)
        if states_of(args[i]) != states:  # a constant that is lifted into a branch varies along further axes
            return insert_casts(primitive, args)
    return args


@functools.lru_cache(maxsize=4096)
def _casts(operand_states: tuple[AxisStates | None, ...]) -> list[tuple[int, AxisStates]] | None:
    """Return the operands to cast, by position, and their new states; None if operands in these states agree.

    Numbers, whose states are None, agree with anything.
    """
    known = {i: states for i, states in enumerate(operand_states) if states is not None}
    wanted = common_states(tuple(known.values()))
    return [(i, new) for (i, states), new in zip(known.items(), wanted) if new != states] or None


def _cast_zeros(primitive: Primitive, args: list[Value], states: AxisStates) -> None:
    """Cast constant arrays of zeros to unreduced, if the operation is linear in them too."""
    parts = {i for i, x in enumerate(args) if states_of(x).unreduced}
    zeros = {i for i, x in enumerate(args) if isinstance(x, numpy.ndarray) and not x.any()}
    if primitive.is_linear_in(parts | zeros, len(args)):
        for i in zeros:
            args[i] = cast_to(args[i], states)


def cast(x: Value, states: AxisStates) -> Value:
    """Change the states of `x` along mesh axes by free casts, once per value and states.

    Later uses get the first result. The value's own interpreter runs the casts; for a plain array, the body's
    bottom interpreter does, or the program that is recorded there (`jit` in a body). For a view, cast its base and take
    the view again. Raises VarianceError where only communication leads to the new state.
    """
    interpreter = current_interpreter()
    scope = interpreter.scope
    if scope is None:
        raise VarianceError(f"{typeof(x)} needs the states {states}, but there is no shard_map with these axes here")
    owner = x.interpreter if isinstance(x, Tracer) else scope.bottom
    program = None if isinstance(x, Tracer) else program_around(interpreter)
    if program is not None:
        x, owner = read_only_copy(x), program if program.scope is scope else owner
    key = (id(x), states)
    if key not in owner.casts:
        set_interpreter(owner)  # as `running` does, which takes longer
        try:
            _insert_cast(x, states, scope, owner.casts)
        finally:
            set_interpreter(interpreter)
    # In a branch that some ranks take, the cast of a constant comes from outside.
    return interpreter.lift(owner.casts[key][1])


def record_view(scope: Scope, outs: Sequence[Value], primitive: Primitive, x: Value, params: dict) -> None:
    """Record how a view was made, if its base does not vary along all axes.

    A pbroadcast of a view is then a view of a pbroadcast, so that a weight and its transpose share one. And the
    backward pass can recompute a view instead of keeping it. The operand must belong to the interpreter that has the
    view, because an interpreter above may end earlier.
    """
    if not scope.typed or len(states_of(x).varying) == len(scope.axes):
        return
    if len({v.interpreter for v in (*outs, x) if isinstance(v, Tracer)}) == 1:
        several = outs[1:] and outs  # these are recorded for as long as the body runs, a single one while it is there
        for out in outs:
            scope.views[id(out)] = several, primitive, x, params, several or _reference(out, scope.views, id(out))


def _insert_cast(x: Value, states: AxisStates, scope: Scope, casts: dict) -> None:
    """Cast `x`, and add it to the `casts`; if it is a view, all results of the viewing operation.

    An entry lasts as long as the value that is cast: a long loop casts values in each step.
    """
    several, primitive, operand, params, _ = scope.views.get(id(x), (None,) * 5)
    pairs: Iterable = [(x, _cast(x, states, scope))] if primitive is None or primitive in CASTS else ()
    if not pairs:
        results = primitive.bind(cast(operand, states), **params)
        pairs = zip(several or [x], results if primitive.multiple_results else [results])
    for old, new in pairs:
        casts[id(old), states] = _reference(old, casts, (id(old), states)), new


def _reference(x: Value, entries: dict, key: Any) -> Any:
    """Return a weak reference to `x`, which removes an entry when `x` is freed; a number itself, which has none."""
    return x if isinstance(x, numpy.generic) else weakref.ref(x, lambda _: entries.pop(key, None))


def _cast(x: Value, states: AxisStates, scope: Scope) -> Value:
    """Apply one operation for each pair of states along axes, the state of `x` and the new one."""
    before = states_of(x)
    if states.unreduced and is_zero(x):
        x = pbroadcast_p.bind(x, **axes_in_scope(scope, states.unreduced).params)
        before = states_of(x)
    for move, axes in _moves(before, states, tuple(scope.axes)):
        if move not in _FREE:
            raise VarianceError(
                f"{typeof(x)} is {move[0]} along {show_axes(axes)}, but must be {move[1]} there: "
                f"{_INSTEAD_OF_CAST.get(move[0], _OF_THE_SAME).format(axes=show_axes(axes))}"
            )
        x = _FREE[move].bind(x, axes=axes, size=size_of(scope, axes))
    return x


@functools.lru_cache(maxsize=4096)
def _moves(
    before: AxisStates, states: AxisStates, scope: tuple[str, ...]
) -> list[tuple[tuple[str, str], tuple[str, ...]]]:
    """Return the pairs of different states along axes, before and after, and the axes of each."""
    moves: dict[tuple[str, str], tuple[str, ...]] = {}
    for a in scope:
        move = before.along(a), states.along(a)
        if move[0] != move[1]:
            moves[move] = (*moves.get(move, ()), a)
    return [*moves.items()]


def cast_type(t: ShapedArray, primitive: Any, axes: Collection[str]) -> ShapedArray:
    """Return the type of a cast of type `t`, along some axes."""
    return t.update(states=t.states.with_state(axes, primitive.gives))


#: The cast from one state to another, where there is one that moves nothing.
_FREE = {(state, p.gives): p for p in CASTS for state in p.takes}
_INSTEAD_OF_CAST = {
    VARYING: "sum it, with psum over {axes}, or gather it, with all_gather(x, {axes}, to='reduced')",
    UNREDUCED: "take the sum, with psum(x, {axes}) or psum_scatter",
}
_OF_THE_SAME = (
    "there ranks hold the same value; to use it as a partial sum, write unreduced(at_root(x, {axes}), {axes})"
)


# ---------------------------------------------------------------- public functions


def pbroadcast(x: Tree, axis_name: Axes) -> Tree:
    """Return the same value, typed as varying. For an invariant value it transposes to `psum`.

        x:                   [a]  [a]
        pbroadcast(x, 'i'):  [a]  [a]  {i}
        backward:            [u]  [v]  {i}  ->  [u+v]  [u+v]

    For a reduced value it transposes to `unreduced`. It does not communicate. Operations insert it automatically where
    their operands disagree, once per value and axes; in a `shard_map` with `auto_pbroadcast=False` the user writes it,
    and each call counts. Raises VarianceError for a value that already varies along one of the axes, or is unreduced
    there. (To send one rank's value to all, use `broadcast`.) `pvary` is another name for it, JAX's before version
    0.10; since then JAX writes `pcast(x, 'i', to='varying')`, which is the same here.

    >>> f = lambda x: pbroadcast(x, 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P('i'))(np.array([3, 1]))
    ShardedArray([3, 1, 3, 1], P('i'))

    Source: JEP 17111, "Full solution".
    """
    return _write_cast(pbroadcast_p, x, axis_name)


pvary = pbroadcast


def reduced(x: Tree, axis_name: Axes) -> Tree:
    """Return the same value, with a cotangent that is unreduced. Invariant -> reduced.

        x:                [a]  [a]
        reduced(x, 'i'):  [a]  [a]  {R:i}
        backward:         [u]  [v]  {U:i}  ->  [u+v]  [u+v]

    It does not communicate. It transposes to the `psum` of an unreduced value: the backward pass sums where this is
    written, and not where the value is used. Each use adds its part to the cotangent, so several uses share one sum.
    Raises VarianceError for a value that varies or is unreduced along one of the axes.

    >>> from collectives import psum
    >>> loss = lambda w, x: psum(np.sum(reduced(w, 'i') * x), 'i')
    >>> f = spmd.shard_map(loss, mesh=mesh, in_specs=(P(), P('i')), out_specs=P())
    >>> float(md.grad(f)(2.0, np.array([3.0, 1.0])))
    4.0

    Source: JAX, "Autodiff and sharding".
    """
    return _write_cast(reduced_p, x, axis_name)


def unreduced(x: Tree, axis_name: Axes) -> Tree:
    """Return each rank's value as its partial sum, to be added up later. Varying -> unreduced.

        x:                  [a]  [b]  {i}
        unreduced(x, 'i'):  [a]  [b]  {U:i}
        backward:           [u]  [u]  {R:i}  ->  [u]  [u]  {i}

    It does not communicate. `psum` or `psum_scatter` takes the sum later; until then linear operations apply to the
    parts. Booleans become integers, so that they are counted. It transposes to `pbroadcast` of a reduced value, which
    moves nothing. Raises VarianceError for a value that does not vary along one of the axes, unless it is a constant
    that is zero.

    >>> from collectives import psum
    >>> f = lambda x: psum(2 * unreduced(x, 'i'), 'i')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(np.array([3, 1, 4, 1]))
    array([14,  4])

    Source: JAX, "Autodiff and sharding".
    """
    return _write_cast(unreduced_p, x, axis_name)


def pcast(x: Tree, axis_name: Axes, *, to: str) -> Tree:
    """Change the state of `x` along mesh axes, moving nothing: `to` is the new state.

        x:                            [a]  [a]
        pcast(x, 'i', to='varying'):  [a]  [a]  {i}
        backward:                     [u]  [v]  {i}  ->  [u+v]  [u+v]

    `to="varying"` is `pbroadcast`, `to="reduced"` is `reduced`, `to="unreduced"` is `unreduced`: this is how JAX writes
    the three. Raises ValueError for another `to`, VarianceError if only communication leads there.

    >>> f = lambda x: pcast(x, 'i', to='varying')
    >>> spmd.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P('i'))(np.array([3, 1]))
    ShardedArray([3, 1, 3, 1], P('i'))
    """
    for primitive in CASTS:
        if primitive.gives == to:
            return _write_cast(primitive, x, axis_name)
    raise ValueError(f"pcast: to={to!r}; write one of {', '.join(repr(p.gives) for p in CASTS)}")


def _write_cast(primitive: Collective, x: Any, axis_name: Axes) -> Any:
    """Apply a cast that the user writes."""
    groups = collective_axes(primitive.name, axis_name, ordered=False)
    axes = tuple(a for group in groups if group.scope.typed for a in group.axes)
    if not axes:
        return x
    scope = current_scope()

    def cast_leaf(leaf):
        leaf = convert_booleans(array_of(leaf)) if primitive is unreduced_p else array_of(leaf)
        zeros = primitive is unreduced_p and is_zero(leaf)
        for a in axes if not zeros else ():
            check_operand(primitive.name, primitive.takes, typeof(leaf), {"axes": (a,)})
        states = typeof(leaf).states.with_state(axes, primitive.gives)
        if scope.checks:  # with auto_pbroadcast=False every cast that the user writes is its own equation
            return _cast(leaf, states, scope)
        return cast(leaf, states)

    return each_leaf(cast_leaf, x)


# ---------------------------------------------------------------- the questions of `minidiff`


class TypedRanks(Ranks):
    """The answers to the questions of `minidiff.core.ranks.Ranks`: values have states along axes, and are cast."""

    bind = staticmethod(bind_in_body)
    record_view = staticmethod(record_view)
    cast = staticmethod(cast)
    cast_cotangent = staticmethod(cast_cotangent)
    check_operands = staticmethod(check_operands)
    check_unreduced = staticmethod(check_unreduced)

    def backward_pass(
        self, run: Callable, tape: Any, cts: Sequence[Value | None], is_whole: bool
    ) -> list[Value | None]:
        with checking(current_scope(), False):  # its operations insert their casts, as in any derivative rule
            return run(tape, cts)
