"""Load a saved tree: each process reads the slices that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minidiff import tree
from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray
from minidiff.inputs.arguments import check_array
from minidiff.values.dtypes import dtype_of, is_bfloat16
from spmd.arrays.blocks import from_blocks, local_starts
from spmd.checkpoint.files import SCALARS, Array, CheckpointError, Saved, Scalar, saved_steps, shorten
from spmd.checks.agreement import gather_texts, make_and_compare
from spmd.mesh.checks import check_sharding
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import block_type
from spmd.sharding.sharded_array import ShardedArray, Sharding

SAME_CALLS = "checkpoint: all ranks must make the same calls, with the same step, and trees of the same types"


def load(
    path: str | os.PathLike, like: Any = None, step: int | None = None, *, verify: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Return the saved tree, and the notes, of a step.

    If `like` has sharded arrays, all ranks of their mesh must call it, with the same step and trees of the same types.
    If one rank fails, all raise the same error. Nothing is overwritten or removed.

    Args:
        path: the directory that `Checkpoints` saved in.
        like: a tree with the structure to load: the saved one, or a part of it. An array, or a `ShapedArray` as from
            `md.eval_shape`, asks for an array of its shape, dtype and sharding, which need not be the sharding it was
            saved with: the mesh and the number of ranks may differ. A string or a Python number asks for one of its
            type. Without `like`, all leaves are returned by their paths, as whole arrays.
        step: the number of the step; by default of the last one.
        verify: whether each process that needs a slice of a block reads the whole block, and compares its checksum.

    Raises:
        ValueError: on all ranks, if they make different calls.
        CheckpointError: for leaves that are missing, damaged, or not like `like`; it names the file, the array and what
            was expected.

    >>> import tempfile
    >>> import numpy as np
    >>> import spmd
    >>> mesh, path = spmd.make_mesh((2,), ("i",), backend="simulated"), tempfile.mkdtemp()
    >>> spmd.checkpoint.save(path, 7, {"w": np.arange(4.0)}, notes={"loss": 0.5})
    >>> load(path, {"w": spmd.distribute(np.zeros(4), mesh, spmd.P("i"))})
    ({'w': ShardedArray([0., 1., 2., 3.], P('i'))}, {'loss': 0.5})
    """
    return load_on(path, mesh_of(like), like, step, verify)


def load_on(
    path: str | os.PathLike, mesh: Mesh | None, like: Any, step: int | None, verify: bool
) -> tuple[Any, dict[str, Any]]:
    """Load a step as `load` does, on all ranks of a mesh, or with None on this process alone."""
    folder = Path(path)
    leaves, structure = tree.flatten_with_paths(like)

    def described() -> tuple[None, list[str]]:
        for name, leaf in leaves:
            check_leaf("load", name, leaf)
        split = [(sharding := _sharding_of(leaf)) and sharding.spec for _, leaf in leaves]
        types = [f"{shorten(name)}: {_type_of(leaf)}, split as {spec}" for (name, leaf), spec in zip(leaves, split)]
        return None, ["load", f"step {step}", *types]

    if mesh is None:
        described()
    else:
        make_and_compare(SAME_CALLS, mesh, described)

    def read(step: int) -> tuple[Any, dict[str, Any]]:
        saved = Saved(folder, step, verify)
        if like is None:
            return {name: _read_whole(saved, name) for name in saved.leaves}, saved.notes
        return tree.unflatten(structure, [_read_like(saved, name, leaf) for name, leaf in leaves]), saved.notes

    if step is None:
        step = latest_on(folder, mesh)
    if step is None:
        raise CheckpointError(f"{path} has no complete step: there is nothing to load")
    return call_on_all_ranks(mesh, folder, "read", lambda: read(step))


def latest_on(path: Path, mesh: Mesh | None) -> int | None:
    """Return the last complete step, which all ranks of a mesh must see."""
    seen = call_on_all_ranks(mesh, path, "read", lambda: str(saved_steps(path)[-1:]))
    steps = sorted(set(gather_texts(mesh, seen))) if mesh else [seen]
    if len(steps) > 1:
        raise CheckpointError(
            f"{path}: ranks see different steps there, {', '.join(steps)}: save to a directory on a file system that "
            "all ranks share"
        )
    return int(steps[0][1:-1]) if steps[0] != "[]" else None


def call_on_all_ranks(mesh: Mesh | None, path: Path, done: str, act: Callable) -> Any:
    """Call `act` on all ranks of a mesh, and wait for all. An error on one is raised on all: it cannot be `done`."""
    result, failure = None, ""
    cause: BaseException | None = None
    try:
        result = act()
    except CheckpointError as error:
        cause, failure = error.__cause__, str(error)  # it is raised again, with this text
    except (OSError, MemoryError) as error:
        cause, failure = error, f"{path}: it cannot be {done}: {type(error).__name__}: {error}"
    if failures := [x for x in (gather_texts(mesh, failure) if mesh else [failure]) if x]:
        raise CheckpointError(failures[0]) from cause
    return result


def mesh_of(x: Any) -> Mesh | None:
    """Return the mesh of the first sharded array in a tree; None if there is none."""
    shardings = [_sharding_of(leaf) for leaf in tree.leaves(x)]
    return next((sharding.mesh for sharding in shardings if sharding is not None), None)


def check_leaf(call: str, name: str, leaf: Any) -> None:
    """Raise TypeError for a leaf that cannot be saved, or that does not tell what to load."""
    if isinstance(leaf, Tracer) and not isinstance(leaf, ShardedArray):
        raise TypeError(f"checkpoint.{call}: {name} is traced: {call} outside of jit, derivatives and shard_map")
    sharding = _sharding_of(leaf)
    if sharding is not None and sharding.spec.unreduced:
        raise TypeError(
            f"checkpoint.{call}: {name} is split as {sharding.spec}, partial sums: add them up first, with "
            f"spmd.reshard(x, {sharding.spec.summed_up()})"
        )
    if type(leaf) in SCALARS or isinstance(leaf, ShardedArray) or (call == "load" and isinstance(leaf, ShapedArray)):
        return
    dtype = np.asarray(leaf).dtype
    if dtype.hasobject or (np.dtype(dtype.str) != dtype and not is_bfloat16(dtype)):
        raise TypeError(
            f"checkpoint.{call}: {name} is {leaf!r:.60} of type {type(leaf).__name__}, which cannot be saved: make it "
            "a number, a string, or an array of numbers; for a random generator, save rng.bit_generator.state"
        )
    if isinstance(leaf, np.ndarray) and type(leaf) not in (np.ndarray, np.memmap):
        check_array(leaf, f"checkpoint.{call}: {name}")


def _type_of(leaf: Any) -> str:
    """Return the type that a leaf of `like` asks for, as messages and the index show it."""
    if type(leaf) in SCALARS:
        return str(Scalar(type(leaf).__name__, leaf))
    t = leaf if isinstance(leaf, (ShapedArray, ShardedArray)) else np.asarray(leaf)
    return f"{t.dtype}{list(t.shape)}"


def _sharding_of(leaf: Any) -> Sharding | None:
    if isinstance(leaf, ShardedArray):
        return Sharding(leaf.mesh, leaf.spec)
    return leaf.sharding if isinstance(leaf, ShapedArray) else None


def _read_whole(saved: Saved, name: str) -> Any:
    leaf = saved.leaf(name)
    return saved.read(name, (0,) * len(leaf.shape), leaf.shape) if isinstance(leaf, Array) else leaf.read()


def _read_like(saved: Saved, name: str, like: Any) -> Any:
    """Read a leaf with the type and the sharding of `like`."""
    if type(like) in SCALARS:
        leaf = saved.leaf(name)
        if isinstance(leaf, Array) and not leaf.shape and dtype_of(leaf.dtype).kind == np.asarray(like).dtype.kind:
            return _read_whole(saved, name)[()]  # a number that a step has made NumPy's
    if str(saved.leaf(name)) != _type_of(like):
        raise CheckpointError(f"{saved.file}: {shorten(name)} is {saved.leaf(name)}, expected {_type_of(like)}")
    sharding = _sharding_of(like)
    if sharding is None:
        whole = _read_whole(saved, name)
        return whole[()] if isinstance(like, np.generic) else whole
    check_sharding(sharding.spec, like.shape, sharding.mesh.shape, name)
    block = block_type(ShapedArray(like.shape, like.dtype), sharding.spec, sharding.mesh.shape).shape
    return from_blocks(like, sharding, [saved.read(name, start, block) for start in local_starts(sharding, block)])
