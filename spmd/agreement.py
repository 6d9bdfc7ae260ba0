"""What ranks say to each other outside of programs: texts, and whether they have the same values."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import numpy

from collectives.lockstep import ranks_named
from minidiff import tree
from minidiff.core import ShapedArray
from spmd.mesh import Mesh
from spmd.partition import P
from spmd.sharded_array import ShardedArray


def everyone(mesh: Mesh, text: str, longest: int = 1000) -> list[str]:
    """What all processes of a mesh say, in the order of ranks: so many bytes of it. It is a barrier too."""
    if mesh.backend == "simulated":
        return [text]
    mine = numpy.frombuffer(text.encode()[:longest].ljust(longest), numpy.uint8).reshape(1, longest)
    split = ShardedArray(mesh, P(mesh.axis_names), ShapedArray(mine.shape, mine.dtype), mine)
    return [bytes(row).decode(errors="ignore").rstrip() for row in split.gather()]


def check_invariant(x: Any, mesh: Mesh) -> Any:
    """`x` itself, after a check that all ranks of the mesh have the same: bit for bit, and of the same types.

    What goes into a `shard_map` must be the same on all ranks, and under MPI nothing but the program sees to it: with a
    random generator that is seeded by nothing, or by the rank, each has other parameters. `x` is a tree of arrays; of a
    `ShardedArray` type and spec are compared, its blocks are each rank's own. A collective, of a few bytes: every rank
    calls it. Simulated ranks agree.

    Raises ValueError on all ranks, with the first array that is not the same, and who has which.

    >>> import numpy as np, spmd
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> params = check_invariant({'w': np.random.default_rng(0).normal(size=3)}, mesh)
    """
    leaves, _ = tree.flatten_with_paths(x, "x")
    types = [f"{path}: {_described(leaf)}" for path, leaf in leaves]
    kinds = everyone(mesh, f"{_digest(*types)} {', '.join(types)}")
    if len({kind.split()[0] for kind in kinds}) > 1:
        raise ValueError(f"ranks have values of different types: {_who([kind.partition(' ')[2] for kind in kinds])}")
    digests = [_digest(path, _content(leaf)) for path, leaf in leaves]
    if len(set(everyone(mesh, _digest(*digests)))) == 1:
        return x
    for digest, type in zip(digests, types):
        found = everyone(mesh, digest)
        if len(set(found)) > 1:
            raise ValueError(
                f"ranks have different values of {type}: {_who(found)}. Under mpirun every rank runs the whole script: "
                "let each compute or read the same, and seed random generators alike, as in numpy.random.default_rng(0)"
            )
    return x


def _described(x: Any) -> str:
    where = f" split as {x.spec}" if isinstance(x, ShardedArray) else ""
    return f"{numpy.result_type(x)}{list(numpy.shape(x))}{where}"


def _content(x: Any) -> Any:
    return b"" if isinstance(x, ShardedArray) else numpy.asarray(x).tobytes()


def _digest(*parts: Any) -> str:
    """A short text that differs where any of these do."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.encode())
    return found.hexdigest()[:16]


def _who(said: list[str]) -> str:
    """Who says what."""
    ranks = defaultdict(list)
    for rank, text in enumerate(said):
        ranks[text].append(rank)
    return "; ".join(f"{ranks_named(who)}: {text}" for text, who in ranks.items())
