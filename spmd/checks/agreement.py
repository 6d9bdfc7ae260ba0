"""Checks that ranks agree on their calls and on unmapped values."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import numpy

from collectives.backends.base import coordinates_of
from collectives.guards.mismatch import DisagreementError, first_difference, group_reports, report
from minidiff import tree
from minidiff.core.types import ShapedArray
from minidiff.diagnostics.location import current_location
from minidiff.values.settings import override
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import P
from spmd.sharding.sharded_array import ShardedArray

# ---------------------------------------------------------------- calls of shard_map


class UserCall:
    """A description of a user's `shard_map` call, for ranks to compare.

    It is compared before the call runs for the first time. It is a parameter of the operation, so that a compiled
    program compares when it runs, not when it is recorded, which one rank may do alone. Nothing computed depends on it:
    as parameters, all calls are equal.
    """

    __slots__ = ("function", "lines", "agreed")

    def __init__(self, function: str, lines: Callable[[], list[str]] | None):
        self.function = function
        self.lines: Any = lines
        self.agreed = lines is None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserCall)

    def __hash__(self) -> int:
        return 0


#: A call with nothing to compare: the library made it, or all ranks are in one process.
NO_CALL = UserCall("", None)


def compare_call(mesh: Mesh, call: UserCall) -> None:
    """Raise DisagreementError on all ranks if they call a `shard_map` over this mesh differently."""
    if call.agreed:
        return
    name = f"shard_map of {call.function}"
    if said := mesh.ranks.compare_once(name, [name, *call.lines()]):
        others = any(line.startswith("shard_map") for line in said.values())
        what = "ranks call different shard_maps" if others else f"ranks call {name} differently"
        advice = next(text for start, text in _ADVICE.items() if any(map(start.match, said.values())))
        raise DisagreementError(report(what, said, advice))
    call.agreed, call.lines = True, None


def fused_call(params: Sequence[dict]) -> UserCall:
    """One call for several fused ones, whose descriptions are compared at once."""
    rest = {id(call): call for call in (p.get("call", NO_CALL) for p in params) if not call.agreed}.values()
    names, parts = dict.fromkeys(call.function for call in rest), [call.lines for call in rest]
    return UserCall(" and ".join(names), lambda: [line for lines in parts for line in lines()]) if rest else NO_CALL


def call_describer(
    where: Any, specs: Sequence[P], types: Sequence[ShapedArray], out_specs: Sequence, static: str = ""
) -> Callable:
    """Return a function that describes a call as lines for ranks to compare."""

    def lines() -> list[str]:
        sizes = ", ".join(f"{a}: {n}" for a, n in where.mesh.shape.items())
        return [
            f"arrays in the arguments: {len(specs)}",
            f"mesh ({sizes})",
            f"axis_names={{{', '.join(map(repr, where.axes))}}}",
            *[f"{name}={getattr(where, name)}" for name in ("check_rep", "auto_pbroadcast")],
            *[f"in_specs of {spec.path}: {spec}" for spec in specs],
            *[f"{path}: {spec}" for path, spec in out_specs],
            f"static arguments: {static}",
            *[
                f"{spec.path}: {t}" + (f", a ShardedArray split as {t.sharding.spec}" if t.sharding else "")
                for spec, t in zip(specs, types)
            ],
        ]

    return lines


_ADVICE = {
    re.compile("shard_map|arrays"): "All ranks call the same functions, with as many arguments, in one order",
    re.compile("mesh"): "All ranks use one mesh: give make_mesh the same sizes and names on all of them",
    re.compile("in_specs|out_specs|axis_names|check_rep|auto_pbroadcast"): (
        "All ranks split values in the same way: write the same arguments of shard_map on all of them, "
        "independent of the rank"
    ),
    re.compile("static"): "All ranks pass the same static arguments, those whose entry of in_specs is None",
    re.compile(".* a ShardedArray"): "Split it the same on all ranks: spmd.distribute(x, mesh, spec), with one spec",
    re.compile(""): (
        "All ranks pass the same whole arrays, of which each takes its own blocks. Where only one rank has read the "
        "data, send it to the others first (MPI.COMM_WORLD.bcast(x)); where dtypes differ, convert them on all "
        "(np.asarray(x, np.float64))"
    ),
}

# ---------------------------------------------------------------- values


def gather_texts(mesh: Mesh, text: str) -> list[str]:
    """The texts of all processes of a mesh, in the order of ranks. It is a barrier too."""
    return mesh.ranks.texts(text)


def check_invariant(x: Any, mesh: Mesh) -> Any:
    """Check that `x` is the same on all ranks of the mesh, and return it.

    Values are compared bit for bit, with their types. Arguments of a `shard_map` must be the same on all ranks, and
    under MPI only the program can ensure that: a random generator without a seed, or seeded by the rank, gives each
    rank other parameters. `x` is a tree of arrays; for a `ShardedArray`, type and spec are compared, not the blocks,
    which differ by design. It is a collective of a few bytes for each array: every rank must call it. Simulated ranks
    always agree.

    Raises ValueError on all ranks, naming the first array that is not the same, and which ranks have which value.

    >>> import numpy as np, spmd
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> params = check_invariant({'w': np.random.default_rng(0).normal(size=3)}, mesh)
    """
    leaves, _ = tree.flatten_with_paths(x, "x")
    types = [f"{path}: {_describe_type(leaf)}" for path, leaf in leaves]
    check_types("ranks have values of different types", mesh, [types])
    check_blocks(mesh, [(path, leaf, ()) for path, leaf in leaves if not isinstance(leaf, ShardedArray)])
    return x


def check_types(what: str, mesh: Mesh, types: Sequence[Sequence[str]]) -> None:
    """Raise ValueError on all ranks if `types`, a list for each rank in this process, differ. It is a collective."""
    if mesh.backend == "mpi":
        types = [text.split("\n") for text in gather_texts(mesh, "\n".join(*types))]
    if found := first_difference(dict(enumerate(types))):
        raise ValueError(f"{what}: {'; '.join(group_reports(found))}")


def make_and_compare(what: str, mesh: Mesh, make: Callable[[], tuple[Any, list[str]]]) -> Any:
    """Return `found` of `found, lines = make()`, after comparing the lines, which describe it.

    Raises ValueError on all ranks, beginning with `what`, if the lines differ. If `make` raises on some ranks, all
    ranks raise, so that none waits for another. It is a collective.
    """
    try:
        error, (found, lines) = None, make()
    except Exception as caught:
        error, found, lines = caught, None, [f"{type(caught).__name__}: {caught}"]
    check_types(what, mesh, [lines])
    if error is not None:
        raise error
    return found


def check_copies(what: str, mesh: Mesh, held: Sequence[str], digests: Sequence[str]) -> None:
    """Raise ValueError if ranks in the same place along the axes `held` have different `digests` of a block."""
    # Place along `held` -> the digest of each rank that must have the same block.
    groups: defaultdict[tuple, dict[int, str]] = defaultdict(dict)
    for rank, digest in enumerate(digests):
        place = coordinates_of(rank, mesh.shape)
        groups[(*map(place.get, held),)][rank] = digest
    for found in groups.values():
        if len(set(found.values())) > 1:
            raise ValueError(
                f"ranks have different values of {what}: {'; '.join(group_reports(found))}. Under mpirun every rank "
                "runs the whole script: let each compute or read the same, and seed random generators alike, as in "
                "numpy.random.default_rng(0)"
            )


#: Whether every `shard_map` checks that unmapped values are the same on all ranks.
_checking: ContextVar[bool] = ContextVar("checking", default=os.environ.get("SPMD_CHECKING", "0") not in ("", "0"))
checks_values: Callable[[], bool] = _checking.get


def checking() -> AbstractContextManager[bool]:
    """Check in every `shard_map` that ranks have the same unmapped values.

    The check is bit for bit, within `with spmd.checking():`. Unmapped arguments, and arrays that a body closes over,
    must be the same on all ranks. A random generator without a seed, or a different file on each rank, makes them
    differ, and no other check notices. With the environment variable SPMD_CHECKING=1 a whole program is checked,
    compiled functions too. It costs a hash of these values, and a message, at each call; without it, nothing. Simulated
    ranks always agree.

    Raises ValueError on all ranks, naming the argument, and which ranks have the same value of it.

    >>> import numpy as np, spmd
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> f = spmd.shard_map(lambda w, x: w * x, mesh=mesh, in_specs=(P(), P('i')), out_specs=P('i'))
    >>> with checking():
    ...     y = f(np.random.normal(), np.ones(4))
    """
    return override(_checking, True)


def check_blocks(mesh: Mesh, blocks: Sequence[tuple[str, numpy.ndarray, tuple[str, ...]]]) -> None:
    """Raise ValueError on all ranks if copies of a block differ.

    Copies are blocks on ranks along axes that do not split the array. `blocks` are (name in errors, this rank's block,
    the axes that it is split along). All ranks of the mesh must call it.
    """
    blocks = [block for block in blocks if len(block[2]) < len(mesh.shape)]
    if mesh.backend == "simulated" or not blocks:
        return
    said = gather_texts(mesh, " ".join(digest_of(x) for _, x, _ in blocks))
    for (name, x, held), digests in zip(blocks, zip(*map(str.split, said))):
        check_copies(f"{name}: {_describe_type(x)} ({current_location()})", mesh, held, digests)


def _describe_type(x: Any) -> str:
    where = f" split as {x.spec}" if isinstance(x, ShardedArray) else ""
    return f"{numpy.result_type(x)}{list(numpy.shape(x))}{where}"


def digest_of(x: Any) -> str:
    """A short text that differs if arrays of one type differ."""
    return hashlib.sha256(numpy.asarray(x).tobytes()).hexdigest()[:16]
