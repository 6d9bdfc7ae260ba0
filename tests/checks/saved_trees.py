"""Trees to save on any mesh of axes x and y, and meshes to load them on."""

from typing import Any, NamedTuple

import numpy as np

import spmd
from minidiff import tree
from spmd import P
from tests.checks.meshes import mesh

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 2), (2, 4)]
SPECS = [P(), P("x"), P("y"), P(None, "x"), P("y", "x"), P(("x", "y")), P(None, ("y", "x")), P("x", reduced={"y"})]
DTYPES = ["f8", "f4", "c16", "i4", "u1", "?", ">f8", "i8"]


class Layer(NamedTuple):
    w: Any
    b: Any


def draw(rng, shape, dtype):
    return rng.integers(-100, 100, shape).astype(dtype)


def tree_on(mesh, rng, specs=SPECS, shape=(24, 24)):
    """A tree of every kind of leaves, whose numbers depend on rng alone; its shardings on the mesh and the specs."""
    split = [spmd.distribute(draw(rng, shape, d), mesh, spec) for d, spec in zip(DTYPES, specs)]
    layers = [Layer(x, draw(rng, (3,), "f8")) for x in split]
    scalars = {"step": int(rng.integers(9)), "rate": float(rng.random()), "on": True, "z": 1 - 2j, "name": "é"}
    rest = {
        "empty": np.ones((0, 3)),
        "one": np.float32(rng.random()),
        "rng": rng.bit_generator.state,
        "none": None,
        "s": np.array(["aé", ""]),
    }
    return {"layers": layers, "scalars": scalars, "rest": (rest, draw(rng, (), "f4"))}


def held(x):
    """The type of a leaf and what this process has of it, to the last bit."""
    if isinstance(x, spmd.ShardedArray):
        return x.spec, x.mesh.shape, x.data.dtype.str, x.data.shape, x.data.tobytes()
    return type(x), x if isinstance(x, (int, str)) else (np.asarray(x).dtype.str, np.shape(x), np.asarray(x).tobytes())


def assert_like(actual, expected):
    """Two trees are the same: leaves, their types and shardings."""
    (leaves, structure), (others, same) = (tree.flatten_with_paths(x) for x in (actual, expected))
    assert structure == same
    assert [name for (name, x), (_, y) in zip(leaves, others) if held(x) != held(y)] == []


# ---------------------------------------------------------------- a small tree


def state(x=0.0):
    """Return a tree of a sharded array, a plain one, and other leaves."""
    split = spmd.distribute(np.arange(8.0).reshape(4, 2) + x, mesh(2, 2, names="xy"), P("x"))
    others = {"n": 3, "z": 1 - 2j, "name": "é", "h": np.float32(x), "none": np.zeros((0, 2))}
    return {"w": split, "b": np.full(3, x), **others}


def contents(path):
    """Return the bytes of all files in a directory, but of the lock."""
    files = {str(f.relative_to(path)): f for f in path.rglob("*") if f.is_file() and f.name != ".checkpoints.lock"}
    return {name: f.read_bytes() for name, f in files.items()}
