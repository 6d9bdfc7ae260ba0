"""shard_map: a function of blocks, run on every rank of a mesh.

`mapped.py` binds the operation, and checks results by types. This file has everything else that users may ask for:
static arguments, `sum=`, axes that it does not map over, bodies in bodies, explicit casts, no types; and it checks what
they pass.

All axes of a mesh are in scope in every body. In a shard_map that maps over only some of them, values do not vary along
the others, and another shard_map inside may map over these. Values of the outer body are whole along them, so an inner
shard_map is only collectives: a `pscatter` where an argument is split, an `all_gather_invariant` where a result is
assembled, a `psum` where partial sums leave. The types say what their derivatives are. Arguments of the outer one that
are sharded along these axes stay so in its body (`auto_axes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from collectives.axes import size_of
from collectives.operands import sum_copies
from collectives.ops import all_gather_invariant, pscatter, psum
from minidiff import tree
from minidiff.core.interpreter import EVALUATE, Interpreter, current_scope
from minidiff.core.ranks import Scope, cast_to, ranks
from minidiff.core.states import INVARIANT, NONE, UNREDUCED, VARYING, combine_states
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import ShapedArray, typeof
from minidiff.core.vmap import Batch
from minidiff.errors import VarianceError, VarianceWarning, name_of, show_axes
from minidiff.inputs.arguments import key_of
from minidiff.inputs.global_random import random_state, warn_if_random
from minidiff.inputs.keywords import make_decorator
from minidiff.ops.base import convert
from minidiff.values.dtypes import is_scalar_constant
from minidiff.values.settings import checking, override, setting
from spmd.checks.agreement import compare_call, describe_call, describe_static
from spmd.mesh.checks import check_divides, check_ndim, check_not_summed, check_spec
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec, axes_of_entry, is_spec
from spmd.shard_map.auto_axes import split_of_arguments, with_auto_axes
from spmd.shard_map.mapped import Context, Mapped
from spmd.shard_map.operation import Body, shard_map_p
from spmd.shard_map.residuals import Specs
from spmd.sharding.sharded_array import sum_result


@make_decorator
def shard_map(
    f: Callable,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    axis_names: Collection[str] = frozenset(),
    auto: Collection[str] = frozenset(),
    check_rep: bool = True,
    check_vma: bool | None = None,
    auto_pbroadcast: bool = True,
) -> Callable:
    """Run `f` on every rank of `mesh`, each on its blocks of the arguments.

    `in_specs` says how each argument is split: a tree of partition specs that is a prefix of the tuple of arguments. A
    mesh axis that a spec does not name is unmapped: all ranks along it get the same block. In `f`, collectives
    communicate over the mesh's axes. `out_specs` says likewise how the results' blocks form the whole; along an unnamed
    axis they must be the same, and their types prove it. An axis in `unreduced=` is one along which they are partial
    sums; `sum=` adds these up after they leave, with one all-reduce. (A result that is the same on all ranks is
    multiplied by their number, as by `psum`: nothing is sent.) An argument whose spec has `reduced={'i'}` is the same
    on all ranks along i, and its gradient is unreduced there.

    Under MPI every rank calls it with the same arguments, and takes its own blocks of them. Arguments and results
    are trees. Results that are mapped over an axis are `ShardedArray`s, others plain arrays. None in `in_specs` marks
    static arguments, such as numbers, strings and functions: `f` gets them unchanged, not as traced values.
    Arrays that `f` closes over are unmapped inputs, and can be differentiated with respect to.

    It maps over the axes of the mesh in `axis_names`, by default over all; `auto` names the others instead. Along the
    others values are whole to `f`. An argument that is sharded along them stays sharded, and operations on it are
    dispatched to shards as outside a body; results leave as they are then split, and the specs name none of these axes.
    (Arrays that `f` closes over are gathered; with `check_rep=False`, all arguments are.)

    A further `shard_map` inside `f` may map over the other axes. It has the same mesh (which may be left out), and by
    default maps over all axes that are not yet in use. Its arguments are split along its own axes, and its results may
    vary along those of the outer body. In the outer body its results are whole again: still sharded if an argument of
    the outer `shard_map` was sharded, else gathered by an `all_gather_invariant`.

    `check_rep=False` turns off the types, the check of `out_specs`, and the savings in transposition. So does
    `check_vma=False`, JAX's name today.
    `auto_pbroadcast=False` inserts no `pbroadcast` in `f`, nor in a `shard_map` inside it: where values disagree in
    variance, `f` must write one, and so say where its derivative sums.

    Raises ValueError for specs that do not fit the mesh, the axes or the arrays, and for an inner `shard_map` over
    another mesh or over axes in use; VarianceError for a result that may differ along an axis its spec does not name,
    and with `auto_pbroadcast=False` wherever a `pbroadcast` is missing.

    >>> import numpy as np
    >>> from collectives import psum
    >>> from spmd import P, distribute, make_mesh
    >>> mesh = make_mesh((4,), ('i',), backend='simulated')
    >>> total = shard_map(lambda x: psum(x, 'i'), mesh=mesh, in_specs=P('i'), out_specs=P())
    >>> total(np.arange(8.0))
    array([12., 16.])
    >>> shard_map(lambda x: x, mesh=mesh, in_specs=P('i'), out_specs=P(sum='i'))(np.arange(8.0))
    array([12., 16.])

    Rows on the ranks along `i`, and in the body columns on those along `j`:

    >>> mesh = make_mesh((2, 2), ('i', 'j'), backend='simulated')
    >>> columns = lambda x: shard_map(lambda x: psum(x, ('i', 'j')), in_specs=P(None, 'j'), out_specs=P())(x)
    >>> shard_map(columns, mesh=mesh, in_specs=P('i'), out_specs=P(), axis_names={'i'})(np.arange(8.0).reshape(2, 4))
    array([[12., 16.]])

    Columns that are sharded along `j` stay so, and the matrix product sums over `j`:

    >>> x = distribute(np.ones((4, 2)), mesh, P('i', 'j'))
    >>> f = lambda x, n: (x + n, x @ np.ones(2))
    >>> shard_map(f, mesh, in_specs=(P('i'), None), out_specs=P('i'), axis_names={'i'})(x, 2)[0].spec
    P('i', 'j')

    Source: shard_map tutorial, "API specification"; JEP 17111 for the types, for `sum=` its "Partial solution", for
    `auto_pbroadcast` its "How to make the API convenient".
    """
    if not (callable(f) and (mesh is None or isinstance(mesh, Mesh))):
        raise TypeError(f"shard_map takes a function and a mesh, in this order; got {f!r} and {mesh!r}")
    if in_specs is None:
        raise TypeError(
            "shard_map: in_specs says how each argument is split: write in_specs=(P('i'), P()) for two arguments, "
            "the second the same on all ranks; and in_specs=() for none"
        )
    if not check_rep and check_vma is not None:
        raise TypeError(
            f"shard_map: check_vma= is JAX's name for check_rep=, got {check_vma} and {check_rep}: pass one"
        )
    typed = check_rep if check_vma is None else check_vma
    if not (typed or auto_pbroadcast):
        raise ValueError(
            "shard_map: auto_pbroadcast=False requires that types agree without casts, but with check_rep=False "
            "(check_vma=False in JAX) there are no types: pass only one of them"
        )
    call = MappedOverSome(f, mesh, in_specs, out_specs, axis_names, auto, typed, auto_pbroadcast)

    def mapped(*args: Any, **named: Any) -> Any:
        if named:
            raise TypeError(
                f"shard_map: {name_of(f)} takes its arguments by position, since in_specs has an entry for each, in "
                f"order; got {', '.join(f'{name}=' for name in named)} by name"
            )
        return call(*args)

    return mapped


@dataclass
class CallContext(Context):
    """The context of a call: also the axes that its body maps over, and a cache of what arguments need there."""

    axes: tuple[str, ...]
    mapped: tuple[str, ...]  # the axes that it and the bodies around it map over
    auto: tuple[str, ...]
    #: By arguments: their specs, those along auto axes if any is split there, and the description of the call.
    cached: dict[Any, tuple[Specs, Specs, Any]] = field(default_factory=dict)


@dataclass
class MappedOverSome(Mapped):
    """A function and the arguments of its `shard_map`, which may map over some axes of the mesh."""

    axis_names: Collection[str]
    auto: Collection[str]
    check_rep: bool
    auto_pbroadcast: bool
    contexts: dict[Any, CallContext] = field(default_factory=dict)  # by mesh and enclosing bodies

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for specs that no arguments fit."""
        super().__post_init__()
        self.in_paths = tree.flatten_with_paths(self.in_specs, "in_specs")[0]
        self.out_paths = tree.flatten_with_paths(self.out_specs, "out_specs")[0]
        self.has_static = None in tree.leaves(self.in_specs, is_leaf=lambda x: x is None)
        if self.mesh is not None:
            self.axes_of(self.mesh, self.mesh.axis_names)  # it may be called in any body
            for path, spec in [*self.in_paths, *self.out_paths]:
                check_spec(spec, self.mesh.shape, path)
        self.has_sums = any(is_spec(spec) and spec.summed for _, spec in self.out_paths)
        for path, spec in self.in_paths:
            if is_spec(spec):
                check_not_summed(spec, path)

    def __call__(self, *args: Any) -> Any:
        if not self.has_static:
            return super().__call__(*tree.with_settings(args))
        args = _with_static(self.in_specs, args)
        leaves, structure = tree.flatten(args)

        def build(arrays: list[Value]) -> Any:
            rest = iter(arrays)
            return structure.build([x.value if type(x) is _Static else next(rest) for x in leaves])

        return self.call(args, [x for x in leaves if type(x) is not _Static], structure, build)

    def bind(
        self, body: Body, values: Sequence[Value], specs: tuple[Specs, Specs, Any], context: CallContext
    ) -> list[Value]:
        scope, (in_specs, auto, call) = current_scope(), specs
        result_specs: Specs = ()

        def before_sums(*blocks: Value) -> tuple[list[Value], Specs]:
            nonlocal result_specs
            outs, result_specs = body(*blocks)
            return outs, tuple(map(PartitionSpec.before_sum, result_specs)) if self.has_sums else result_specs

        if scope is not None:
            if call is not None and scope.bottom.base is EVALUATE:
                compare_call(context.mesh, call)
            with checking(scope, False), _mapping(scope, self.name, context):  # values are whole along its axes
                blocks, _ = before_sums(*map(_split_by_spec, values, in_specs))
                return list(map(_join_by_spec, blocks, result_specs))
        run = before_sums if self.has_sums else body
        params = {**context.params, "call": call, "body": with_auto_axes(run, context.auto, auto) if auto else run}
        results = shard_map_p.bind(*values, in_specs=in_specs, **params)
        return list(map(sum_result, results, result_specs)) if self.has_sums else results

    def find_context(self, interpreter: Interpreter) -> CallContext:
        """Return the context of the body if it is called now."""
        scope = interpreter.scope
        typed = self.check_rep and not untyped.get()
        explicit = typed and (not self.auto_pbroadcast or (scope is not None and scope.explicit))
        mesh, enclosing = self.mesh, ()
        if scope is not None:
            mesh, enclosing = _inner_mesh(mesh, scope, typed), scope.bottom.mapped
        elif mesh is None:
            raise TypeError("shard_map: mesh is missing; only inside the body of another shard_map it may be left out")
        batch = NONE if interpreter is EVALUATE else batch_axes(interpreter)
        key = scope is None, mesh, enclosing, batch, typed, explicit
        if (context := self.contexts.get(key)) is None:
            axes = self.axes_of(mesh, enclosing)
            mapped = (*enclosing, *axes)
            auto = tuple(a for a in mesh.axis_names if a not in mapped and a not in batch) if typed else ()
            checked = mesh.axis_names if scope is None else axes
            params = {"mesh": mesh, "check_rep": typed, "auto_pbroadcast": not explicit}
            context = self.contexts[key] = CallContext(mesh, checked, params, axes, mapped, auto)
        return context

    def axes_of(self, mesh: Mesh, enclosing: Sequence[str]) -> tuple[str, ...]:
        """The axes that it maps over in a body that maps over the `enclosing` ones, checked."""
        for name, axes in (("axis_names", self.axis_names), ("auto", self.auto)):
            if isinstance(axes, str):
                raise TypeError(f"shard_map: {name} must be a set of names, {{{axes!r}}}, got {axes!r}")
            for a in axes:
                if a not in mesh.shape:
                    raise ValueError(f"shard_map: {name} names {a!r}, but the axes of the mesh are {mesh.axis_names}")
        not_auto = [a for a in mesh.axis_names if a not in self.auto]
        mapped, unmapped = set(self.axis_names or not_auto), {*not_auto}.difference(enclosing)
        if self.auto and not (unmapped <= mapped <= {*not_auto}):
            raise ValueError(
                f"shard_map: auto={set(self.auto)} and axis_names={mapped} name the axes that it does not map over, "
                f"and those that it does: each axis of {mesh.axis_names} belongs to one of them; pass only one"
            )
        if self.auto and not not_auto:
            raise ValueError(f"shard_map: auto names all axes of the mesh, {mesh.axis_names}: none is left to map over")
        return tuple(a for a in mesh.axis_names if a in mapped and a not in enclosing)

    def specs_for(
        self, args: tuple, structure: tree.Structure, values: Sequence[Value], context: CallContext
    ) -> tuple[Specs, Specs, Any]:
        """Return the specs of the arrays in `args`, checked; their parts on auto axes, and the call."""
        statics = [x.value for x in tree.leaves(args) if type(x) is _Static] if self.has_static else []
        if structure.of_derivatives is not structure:
            statics += tree.settings_among_leaves(structure.nested)
        static = describe_static(context.mesh, statics)
        key = (structure, static, *map(key_of, values))
        if (cached := context.cached.get(key)) is not None:
            return cached
        _check_axes([*self.in_paths, *self.out_paths], context)
        entries = tree.broadcast_prefix(self.in_specs, args, _is_entry, "in_specs")
        named = zip([spec for spec in entries if spec is not None], self.paths_of(args, structure))
        specs = tuple(spec.for_argument(path) for spec, path in named)
        for spec, x in zip(specs, values):
            check_divides(spec, x.shape, context.mesh.shape, "in_specs", spec.path)
        call = describe_call(self, context, specs, [typeof(x) for x in values], static)
        auto = split_of_arguments(values, specs, context) if context.auto else ()
        specs = tuple(map(PartitionSpec.extended, specs, auto)) if auto else specs
        context.cached[key] = specs, auto, call
        return specs, auto, call

    def paths_of(self, args: tuple, structure: tree.Structure) -> list[str]:
        paths = super().paths_of(args, structure)
        return [path for path, x in zip(paths, tree.leaves(args)) if type(x) is not _Static]

    def apply(self, args: tuple, context: CallContext, scope: Scope) -> Any:
        before = random_state()
        with _mapping(scope, self.name, context), checking(scope, True):
            out = self.f(*args)
        why = "on real ranks each has its own generator, so what types say is the same on all ranks may differ"
        warn_if_random(before, self.title, why)
        return out

    def check_result(
        self, x: Value, spec: PartitionSpec, path: str, context: CallContext, scope: Scope
    ) -> tuple[Value, PartitionSpec]:
        """Check a body's result against its spec; return it, and the spec.

        Along the axes in `sum=`, it is cast to unreduced. If it is invariant along one of these, it is multiplied by
        the axis's size, and the returned spec sums over the other axes only. Booleans that are summed are counted, as
        integers. Raises VarianceError also if the result lacks a cast, in an explicit scope.
        """
        if (spec.summed or spec.unreduced) and x.dtype == bool:
            x = convert(x, int)
        t = typeof(x)
        check_ndim(spec, t.shape, "out_specs", path)
        if not scope.typed or (t.states == spec.states and not spec.summed):
            return x, spec
        _check_states(x, t, spec, path, context.checked, scope)
        if spec.summed:
            alike = [a for a in spec.summed if a not in t.states.axes]
            x, spec = sum_copies(x, size_of(scope, alike)), spec.summing(a for a in spec.summed if a not in alike)
            x = cast_to(x, t.states.with_state(t.reduced.intersection(spec.summed), VARYING))
        return super().check_result(x, spec.before_sum(), path, context, scope)[0], spec


# ---------------------------------------------------------------- static arguments


class _Static:
    """A static argument, as a leaf of the tree of arguments."""

    def __init__(self, value: Any):
        self.value = value


def _is_entry(x: Any) -> bool:
    """Whether x is an entry of in_specs, for all leaves below: None is that of static arguments."""
    return x is None or is_spec(x)


def _with_static(in_specs: Any, args: tuple) -> tuple:
    """Wrap the arguments whose entry of in_specs is None; in trees, their leaves."""
    if isinstance(in_specs, (tuple, list)) and len(in_specs) == len(args):
        args = tuple(_Static(x) if entry is None else x for entry, x in zip(in_specs, args))
    leaves, structure = tree.flatten(args)
    entries = tree.broadcast_prefix(in_specs, args, _is_entry, "in_specs")
    wrapped = [_Static(x) if entry is None and type(x) is not _Static else x for entry, x in zip(entries, leaves)]
    return tree.unflatten(structure, wrapped)


# ---------------------------------------------------------------- auto axes


def batch_axes(interpreter: Any) -> frozenset[str]:
    """The mesh axes along which the enclosing vmaps split their batches."""
    axes: frozenset[str] = NONE
    while interpreter is not None:
        if isinstance(interpreter, Batch):
            axes = axes.union(axes_of_entry(interpreter.spmd_axis_name))
        interpreter = interpreter.below
    return axes


# ---------------------------------------------------------------- inside the body of another


class _mapping:
    """`with _mapping(scope, function, context):` make the running body that of `function`, with further axes."""

    __slots__ = ("scope", "bottom", "function", "context", "before")

    def __init__(self, scope: Scope, function: str, context: CallContext):
        self.scope = scope
        self.bottom = scope.bottom
        self.function = function
        self.context = context

    def __enter__(self) -> None:
        scope = self.scope
        self.before = self.bottom.mapped, scope.function or self.function, scope.explicit
        self.bottom.mapped, scope.function = self.context.mapped, self.function
        scope.explicit = not self.context.params["auto_pbroadcast"]

    def __exit__(self, *exc) -> None:
        scope = self.scope
        self.bottom.mapped, scope.function, scope.explicit = self.before


def _split_by_spec(x: Value, spec: PartitionSpec) -> Value:
    """The block of a value that is whole in the enclosing body."""
    for d, axes in enumerate(spec.dims(typeof(x).ndim)):
        x = pscatter(x, axes, axis=d, tiled=True) if axes else x
    return cast_to(x, combine_states(typeof(x).states, spec.states)) if current_scope().typed else x


def _join_by_spec(x: Value, spec: PartitionSpec) -> Value:
    """Return the result of which x is a block, or a partial sum."""
    x = psum(x, spec.summed) if spec.summed else x
    for d, axes in enumerate(spec.dims(typeof(x).ndim)):
        x = all_gather_invariant(x, axes, axis=d, tiled=True) if axes else x
    return x


# ---------------------------------------------------------------- without types

#: Whether every `shard_map` is called as with `check_rep=False`.
untyped: ContextVar[bool] = setting("untyped", False)


def without_types() -> AbstractContextManager[bool]:
    """Treat every `shard_map` in `with without_types():` as with `check_rep=False`."""
    return override(untyped, True)


# ---------------------------------------------------------------- checks of axes and specs


def _inner_mesh(mesh: Mesh | None, scope: Scope, typed: bool) -> Mesh:
    """The mesh of a shard_map inside another's body: the outer one's."""
    outer = scope.bottom.mesh
    if mesh is not None and mesh is not outer:
        raise ValueError(
            f"a shard_map inside the body of another must use the same mesh, {outer}, got {mesh}: make one mesh with "
            "the axes of both, and let each shard_map map over its own, by axis_names={…}"
        )
    if typed is not scope.typed:
        raise ValueError(
            f"a shard_map inside the body of another must have the same check_rep: write check_rep={scope.typed} "
            "here, or change it there"
        )
    return outer


def _check_axes(paths: Sequence[tuple[str, Any]], context: CallContext) -> None:
    """Raise ValueError for a spec with an axis that this shard_map does not map over."""
    for path, spec in paths:
        check_spec(spec, context.mesh.shape, path)
        over = ", ".join(map(repr, context.axes))
        for a in sorted(spec.states.axes.union(spec.summed).difference(context.axes)):
            inside = a in context.mapped
            raise ValueError(
                f"{path} = {spec} names the axis {a!r}, but this shard_map maps over {{{over}}}: "
                + (
                    f"the outer one maps over {a!r}, so values here are already blocks along it; leave it out, "
                    "or let the outer one map over fewer axes, with its axis_names"
                    if inside
                    else f"add {a!r} to axis_names, or leave it out, and split the value inside by a further shard_map"
                )
            )


# ---------------------------------------------------------------- results


def _check_states(
    x: Value, t: ShapedArray, spec: PartitionSpec, path: str, axes: tuple[str, ...], scope: Scope
) -> None:
    """Raise VarianceError, or warn, if a result of type `t` varies along other axes of `axes` than its spec says."""
    named = spec.states.axes.union(spec.summed)
    for a in axes:
        if t.states.along(a) != INVARIANT and a not in named:
            raise VarianceError(
                _unnamed_axes_message(path, t, spec, tuple(b for b in axes if b in t.states.axes - named))
            )
    if (
        scope.explicit
        and not spec.axes.union(spec.summed).issubset(t.states.varying_or_unreduced)
        and not is_scalar_constant(x)
    ):
        missing = show_axes(spec.axes.union(spec.summed) - t.states.varying_or_unreduced)
        raise VarianceError(
            f"{path} has type {t}: it is the same on all ranks along {missing}, but its out_specs entry {spec} says "
            f"that it varies there; with auto_pbroadcast=False, return pbroadcast(x, {missing}) instead"
        )
    copies = spec.axes - t.states.varying_or_unreduced
    if copies and isinstance(x, Tracer):  # a constant agrees with any spec
        shown = show_axes(copies)
        ranks.warn(
            f"{path} has type {t}: it is the same on all ranks along {shown}, but its out_specs entry {spec} splits it "
            f"there: so the result repeats the same block once for each rank, one after another. Leave {shown} out "
            f"of the entry for one block; or return pbroadcast(x, {shown}) to say that you want the copies",
            VarianceWarning,
        )


def _unnamed_axes_message(path: str, t: ShapedArray, spec: PartitionSpec, axes: tuple[str, ...]) -> str:
    """The message that a result is not the same on all ranks along axes that its spec does not name."""
    shown, over = " and ".join(map(repr, axes)), show_axes(axes)
    state = t.states.along(axes[0])
    if state == VARYING:
        return (
            f"{path} has type {t}: it may differ from rank to rank along {shown}, but its out_specs entry {spec} does "
            f"not name {shown}, and so promises that it is the same. Three ways out: map it, by naming {shown} in "
            f"out_specs; reduce it, with psum, pmean, pmax or pmin over {over}; or collect it, with "
            f"all_gather_invariant over {over}"
        )
    advice = f"name it there: {state}={{{', '.join(map(repr, axes))}}}"
    if state == UNREDUCED:
        advice += f"; or take the sum, with psum(x, {over}), or sum={over} in out_specs"
    return f"{path} has type {t}: it is {state} along {shown}, which its out_specs entry {spec} does not say: {advice}"
