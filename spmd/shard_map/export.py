"""Exported programs that have a `shard_map`."""

from __future__ import annotations

from collectives import exported
from minidiff.core.tape import Equation
from spmd.shard_map.operation import shard_map_p


def exported_on_mesh(eqn: Equation) -> exported.Form | None:
    """Return the form of a shard_map in an exported program: see `minidiff.compiler.export`.

    Raises TypeError if it has none.
    """
    if eqn.primitive is not shard_map_p:
        return exported.exported_collective(eqn)
    mesh, body, in_specs, out_specs = (eqn.params[k] for k in ("mesh", "body", "in_specs", "out_specs"))
    if any(spec.unreduced for spec in in_specs):
        raise TypeError("export: an argument of a shard_map is unreduced, which a plain array cannot be: sum it first")
    shown = {
        "body": body,
        "split": [spec.dims(len(t.shape)) for spec, t in zip(in_specs, body.in_types)],
        "gathered": [spec.dims(len(t.shape)) for spec, t in zip(out_specs, body.out_types)],
        "summed": [mesh.ranks.sort_axes(spec.unreduced) for spec in out_specs],
    }
    return exported.map_over_ranks, shown, exported.variables_for(mesh.shape)
