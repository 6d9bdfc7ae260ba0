"""A function that runs on every rank of a mesh, each on its blocks of the arguments.

It binds one operation, whose parameter is the function as a body (`operation.py`), and checks results against their
specs by types. `shard_map.py` has the function that users call, which makes a subclass of `Mapped`: with options,
checks of the arguments, and bodies inside others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minidiff import tree
from minidiff.core.interpreter import Interpreter, current_interpreter
from minidiff.core.ranks import Scope, cast_to
from minidiff.core.states import INVARIANT, REDUCED, UNREDUCED, VARYING
from minidiff.core.tracer import Value
from minidiff.core.types import typeof
from minidiff.errors import VarianceError, name_of
from minidiff.inputs.arguments import are_weak, as_values, restore_weak
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import PartitionSpec, is_spec
from spmd.shard_map.operation import Body, shard_map_p, typed_params
from spmd.shard_map.residuals import Specs


@dataclass
class Context:
    """The context of a call: its mesh, and the axes along which results that vary have specs that say so."""

    mesh: Mesh
    checked: tuple[str, ...]
    params: dict[str, Any]  # of the operation


@dataclass
class Mapped:
    """A function of blocks as one of whole arrays: `Mapped(f, mesh, in_specs, out_specs)(*args)` runs it on all ranks.

    `in_specs` is a tree of partition specs that is a prefix of the tuple of arguments, and `out_specs` one that is a
    prefix of the result.
    """

    f: Callable
    mesh: Any
    in_specs: Any
    out_specs: Any

    def __post_init__(self) -> None:
        self.name = name_of(self.f)
        self.title = f"shard_map of {self.name}"
        self.latest: tuple = (None, (), ())  # the structure of the latest result, its arrays' specs and paths

    def __call__(self, *args: Any) -> Any:
        arrays, structure = tree.flatten(args)
        return self.call(args, arrays, structure, structure.build)

    def call(self, args: tuple, arrays: list, structure: tree.Structure, build: Callable[[list], Any]) -> Any:
        """Run the function on the ranks: on the arrays in `args`, of whose blocks `build` makes its arguments."""
        values = as_values("shard_map", arrays, lambda: self.paths_of(args, structure))
        weak, context = are_weak(arrays), self.find_context(current_interpreter())
        out_structure: Any = None

        def body(*blocks: Value) -> tuple[list[Value], Specs]:
            nonlocal out_structure
            scope = current_interpreter().scope
            out = self.apply(build(list(restore_weak(weak, blocks))), context, scope)
            outs, specs, out_structure = self.check_results(out, context, scope)
            return outs, specs

        results = self.bind(body, values, self.specs_for(args, structure, values, context), context)
        return out_structure.build(results)

    # ------------------------------------------------ steps that `shard_map.py` extends

    def find_context(self, interpreter: Interpreter) -> Any:
        """Return the context of the body if it is called now."""
        return Context(self.mesh, self.mesh.axis_names, typed_params(self.mesh))

    def specs_for(self, args: tuple, structure: tree.Structure, values: Sequence[Value], context: Any) -> Any:
        """Return the spec of each array in `args`, which errors name by its path."""
        entries = tree.broadcast_prefix(self.in_specs, args, is_spec, "in_specs")
        return tuple(spec.for_argument(path) for spec, path in zip(entries, self.paths_of(args, structure)))

    def paths_of(self, args: tuple, structure: tree.Structure) -> list[str]:
        """Return the paths of the arrays among the arguments."""
        return tree.paths(structure, "args")

    def bind(self, body: Body, values: Sequence[Value], specs: Any, context: Any) -> list[Value]:
        """Bind the operation."""
        return shard_map_p.bind(*values, body=body, in_specs=specs, **context.params)

    def apply(self, args: tuple, context: Any, scope: Scope) -> Any:
        """Return the result of the function, in the running body."""
        return self.f(*args)

    # ------------------------------------------------ results

    def check_results(self, out: Any, context: Any, scope: Scope) -> tuple[list[Value], Specs, tree.Structure]:
        """Return the arrays in a result, their specs, and its structure."""
        leaves, structure = tree.flatten(out)
        outs = as_values(self.title, leaves, lambda: tree.paths(structure, "the result"))
        latest, out_specs, paths = self.latest
        if structure is not latest:
            out_specs = tree.broadcast_prefix(self.out_specs, out, is_spec, "out_specs")
            paths = tree.paths(structure, "the result")
            self.latest = structure, out_specs, paths
        specs = []
        for k, result in enumerate(zip(outs, out_specs, paths)):
            outs[k], spec = self.check_result(*result, context, scope)
            specs.append(spec)
        return outs, tuple(specs), structure

    def check_result(
        self, x: Value, spec: PartitionSpec, path: str, context: Any, scope: Scope
    ) -> tuple[Value, PartitionSpec]:
        """Cast a body's result to the states that its spec says; return it, and the spec.

        Raises VarianceError if it is not invariant along an axis that the spec does not name.
        """
        t = typeof(x)
        if not scope.typed or t.states == spec.states:
            return x, spec
        axes = [a for a in context.checked if t.states.along(a) != INVARIANT and a not in spec.states.axes]
        if axes:
            raise VarianceError(
                f"{path} has type {t}: it may differ from rank to rank along {', '.join(map(repr, axes))}, which its "
                f"out_specs entry {spec} does not name"
            )
        states = t.states.with_state(spec.axes, VARYING).with_state(spec.reduced, REDUCED)
        return cast_to(cast_to(x, states), states.with_state(spec.unreduced, UNREDUCED)), spec
