"""The collectives' cases: their arguments, shapes of blocks, and what each means on a list of blocks."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16)
import numpy

import collectives
import minidiff as md
from collectives.reference import collective_ref

INVARIANT_OPERAND = {"pbroadcast", "pscatter", "at_root"}
REDUCED = {"psum", "pmean", "pprod", "pmax", "pmin", "pany", "pall", "preduce"}
ORDERED = {"pmax", "pmin"}  # they compare, and take no complex numbers
INVARIANT_RESULT = REDUCED | {"all_gather_invariant", "broadcast"}
TRANSPOSES = {  # those that are linear
    "psum": "pbroadcast",
    "pmean": "pbroadcast",
    "pbroadcast": "psum",
    "all_gather": "psum_scatter",
    "psum_scatter": "all_gather",
    "all_gather_invariant": "pscatter",
    "pscatter": "all_gather_invariant",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
    "ppermute_start": "ppermute_start",
    "pscan": "pscan",
    "broadcast": "at_root",
    "at_root": "broadcast",
    "broadcast_varying": "reduce",
    "reduce": "broadcast_varying",
    "gather": "scatter",
    "scatter": "gather",
}
ADDS = {"psum", "pmean", "pprod", "preduce", "psum_scatter", "reduce", "pscan"}
ONE_OF = {
    "ppermute_start": "ppermute_start",
    "pmean": "psum",
    "pany": "pmax",
    "pall": "pmin",
}  # those that are another one's case
SILENT = {"pbroadcast", "pscatter", "at_root", "axis_index"}  # those that do not communicate


def groups(mesh, axes) -> list[list[int]]:
    """The ranks that differ along `axes` alone, counted in the order in which the axes are given."""
    outcome: dict[tuple, list] = {}
    for rank, at in enumerate(itertools.product(*map(range, mesh.shape.values()))):
        at = dict(zip(mesh.axis_names, at))
        rest = tuple(at[a] for a in mesh.axis_names if a not in axes)
        outcome.setdefault(rest, []).append((tuple(at[a] for a in axes), rank))
    return [[rank for _, rank in sorted(members)] for members in outcome.values()]


def reference(mesh, case, axes, blocks) -> list[numpy.ndarray]:
    """The result of each rank of a mesh, from the operand of each."""
    results: dict[int, Any] = {}
    for ranks in groups(mesh, axes):
        results.update(zip(ranks, case.reference([blocks[r] for r in ranks])))
    return [results[r] for r in range(mesh.size)]


# ---------------------------------------------------------------- cases


class Case(NamedTuple):
    """A collective, its further arguments, and the shape of the block it is applied to."""

    name: str
    shape: tuple[int, ...]
    options: dict[str, Any] = {}  # noqa: RUF012 (read only)

    def __call__(self, x, axes):
        if self.name == "axis_index":
            return collectives.axis_index(axes)
        out = getattr(collectives, self.name)(x, axes, **self.options)
        return out.wait() if self.name == "ppermute_start" else out

    @property
    def grouped(self) -> bool:
        return "axis_index_groups" in self.options

    def taking_part(self, n: int) -> int:
        """Return the largest number of n ranks that take part at a time."""
        return max(map(len, self.options.get("axis_index_groups", [range(n)])))

    @property
    def operation(self) -> str:
        """Its name on tapes, and in counts."""
        if self.name == "preduce":
            return "all_gather" if self.grouped else "all_gather_invariant"
        if self.name in ONE_OF:
            return ONE_OF[self.name]
        return "ragged_all_to_all" if "splits" in self.options else self.name

    @property
    def transposed(self) -> str:
        """The name of its transpose."""
        if self.grouped and self.operation == "psum":  # in each group for itself: it is the same for none
            return "psum"
        return self.operation if "splits" in self.options else TRANSPOSES[self.name]

    def reference(self, blocks):
        """Return the result on the blocks of the ranks along the axes."""
        return collective_ref(self.name, blocks, **self.options)


def affine(f, g):
    """One affine map after another, x -> f[1] + f[0] x: it is associative, and does not commute."""
    return md.numpy.stack([f[0] * g[0], g[0] * f[1] + g[1]])


def cases(n: int) -> Iterator[Case]:
    """All collectives over n ranks: stacked and tiled, along the first, a middle and the last dimension."""
    for name in ("psum", "pmean", "pprod", "pmax", "pmin", "pany", "pall", "pbroadcast"):
        yield from (Case(name, shape) for shape in [(), (3,), (2, 1, 3), (2, 0)])
    yield from (Case("preduce", shape, {"combine": affine}) for shape in [(2,), (2, 0), (2, 1, 3)])
    yield Case("axis_index", ())
    for name in ("all_gather", "all_gather_invariant"):
        yield from (Case(name, shape) for shape in [(), (3,), (2, 0)])
        yield from (Case(name, (2, 1, 3), {"axis": axis}) for axis in (1, 3, -1, -4))
        yield from (Case(name, (2, 1, 3), {"axis": axis, "tiled": True}) for axis in (0, 1, -1))
        yield Case(name, (2, 0), {"tiled": True})
    for name, axis in (("psum_scatter", "scatter_dimension"), ("pscatter", "axis")):
        yield Case(name, (n,))
        yield Case(name, (n, 0))
        yield Case(name, (2, n, 3), {axis: 1})
        yield Case(name, (2, 1, n), {axis: -1})
        yield Case(name, (2 * n,), {"tiled": True})
        yield Case(name, (2, n, 3), {axis: 1, "tiled": True})
        yield Case(name, (2, 1, 2 * n), {axis: -1, "tiled": True})
    for split, concat in itertools.product((0, 1, -1), repeat=2):
        shape = tuple(n if d == split % 3 else d + 2 for d in range(3))
        yield Case("all_to_all", shape, {"split_axis": split, "concat_axis": concat})
        shape = tuple(2 * n if d == split % 3 else d + 2 for d in range(3))
        yield Case("all_to_all", shape, {"split_axis": split, "concat_axis": concat, "tiled": True})
    yield Case("all_to_all", (n,), {"split_axis": 0, "concat_axis": 0})
    yield Case("all_to_all", (n, 0), {"split_axis": 0, "concat_axis": 1, "tiled": True})
    yield from (Case("ppermute", shape, {"perm": [(i, (i + 1) % n) for i in range(n)]}) for shape in [(), (2, 1, 3)])
    yield Case("ppermute", (3,), {"perm": [(i, i + 1) for i in range(n - 1)]})  # the first gets zeros
    yield Case("ppermute", (3,), {"perm": [(i, n - 1 - i) for i in range(n)]})
    yield Case("ppermute", (3,), {"perm": [(n - 1, 0)]})
    yield Case("ppermute", (3,), {"perm": []})
    yield Case("ppermute_start", (2, 1, 3), {"perm": [(i, (i + 1) % n) for i in range(n)]})
    yield Case("ppermute_start", (3,), {"perm": [(n - 1, 0)]})
    for reverse, exclusive in itertools.product((False, True), repeat=2):
        yield from (Case("pscan", s, {"reverse": reverse, "exclusive": exclusive}) for s in [(), (2, 1, 3), (0,)])
    yield from rooted_cases(n)
    yield from ragged_cases(n)
    yield from grouped_cases(n)


def rooted_cases(n: int) -> Iterator[Case]:
    """Those with a root: the first, the last and one in between in turn."""
    for name in ("broadcast", "broadcast_varying", "at_root", "reduce"):
        yield Case(name, (2, 1, 3), {"root": n // 2})
        yield Case(name, (), {"root": n - 1})
    yield Case("gather", (2, 1, 3), {"root": n // 2, "axis": 1})
    yield Case("gather", (2, 1, 3), {"axis": -1, "tiled": True})
    yield Case("gather", (), {"root": n - 1})
    yield Case("scatter", (2, n, 3), {"root": n // 2, "axis": 1})
    yield Case("scatter", (2, 1, 2 * n), {"axis": -1, "tiled": True})
    yield Case("scatter", (n, 0), {"root": n - 1})


def longest_block(splits: list) -> int:
    """Return the most rows that a rank sends."""
    return max(map(sum, splits))


def ragged_cases(n: int) -> Iterator[Case]:
    """all_to_all of parts of different lengths: all different, none from or to some ranks, none at all."""
    different = [[(2 * s + 3 * d + 1) % 4 for d in range(n)] for s in range(n)]
    yield Case("all_to_all", (longest_block(different), 3), {"split_axis": 0, "concat_axis": 0, "splits": different})
    last = [[s * (d == n - 1) for d in range(n)] for s in range(n)]
    yield Case("all_to_all", (2, longest_block(last)), {"split_axis": -1, "concat_axis": 1, "splits": last})
    yield Case("all_to_all", (0,), {"split_axis": 0, "concat_axis": 0, "splits": [[0] * n] * n})


def grouped_cases(n: int) -> Iterator[Case]:
    """In groups of the ranks, in an order that is not theirs: of different sizes, and all of one size."""
    ranks = list(range(n))[::-1]
    uneven = {"axis_index_groups": [ranks[:1], *([ranks[1:]] if n > 1 else [])]}
    yield from (Case(name, (3,), uneven) for name in ("psum", "pmax"))
    each = n // 2 if n % 2 == 0 and n > 2 else n
    even = {"axis_index_groups": [ranks[k :: n // each] for k in range(n // each)]}
    yield from (Case(name, (2, 3), even) for name in ("psum", "pmean", "pprod", "pmin", "pany"))
    yield Case("preduce", (2, 3), {"combine": affine, **even})
    yield Case("all_gather", (2, 3), {"axis": 1, **even})
    yield Case("psum_scatter", (2, 2 * each), {"scatter_dimension": 1, "tiled": True, **even})
    yield Case("all_to_all", (2, each), {"split_axis": 1, "concat_axis": 0, **even})


def one_case_each(n: int) -> list[Case]:
    """Return one case of each collective, plain, in groups and with splits, of several dimensions if there is one."""
    outcome = {}
    for case in cases(n):
        kind = case.name, "axis_index_groups" in case.options, "splits" in case.options
        if kind not in outcome or (math.prod(case.shape) and len(case.shape) > len(outcome[kind].shape)):
            outcome[kind] = case
    return list(outcome.values())


def axes_of(mesh) -> list[tuple[str, ...]]:
    """Every axis, and every tuple of several in every order."""
    counts = range(1, len(mesh.axis_names) + 1)
    return [axes for k in counts for axes in itertools.permutations(mesh.axis_names, k)]


def size_of(mesh, axes) -> int:
    return math.prod(mesh.shape[a] for a in axes)


# ---------------------------------------------------------------- blocks in and out

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex128", "complex64")


def random(shape, dtype, seed=0) -> numpy.ndarray:
    """Numbers that are the same in every process. Those that are floating-point are not exact in binary."""
    rng, dtype = numpy.random.default_rng(seed), numpy.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return rng.integers(0, 30, shape).astype(dtype)
    real = rng.standard_normal(shape)
    return (real + 1j * rng.standard_normal(shape) if dtype.kind == "c" else real).astype(dtype)


def ranks_blocks(mesh, stacked, varying) -> list[numpy.ndarray]:
    """Each rank's block of an array whose first dimension is split along `varying`."""
    indices = numpy.arange(size_of(mesh, varying)).reshape(
        [mesh.shape[a] if a in varying else 1 for a in mesh.axis_names]
    )
    everywhere = numpy.broadcast_to(indices, tuple(mesh.shape.values()))
    return [stacked[i] for i in everywhere.ravel()]


def operand_axes(mesh, case, axes) -> tuple[str, ...]:
    """The axes along which the operand of a collective over `axes` varies, if it varies along all that it may."""
    return tuple(a for a in mesh.axis_names if case.name not in INVARIANT_OPERAND or a not in axes)


def result_axes(mesh, case, axes) -> tuple[str, ...]:
    return tuple(a for a in mesh.axis_names if case.name not in INVARIANT_RESULT or case.grouped or a not in axes)


# Blocks that are not contiguous in memory: how one is stored, and how the body reads it.
LAYOUTS: dict[str, tuple[Callable, Callable]] = {
    "plain": (lambda block: block, lambda x: x),
    "transposed": (lambda block: block.T, lambda x: x.T),
    "backwards, every other": (
        lambda block: numpy.repeat(block[..., ::-1], 2, axis=-1) if block.ndim else block,
        lambda x: x[..., ::-2] if x.ndim else x,
    ),
}


def _unaligned(x: numpy.ndarray) -> numpy.ndarray:
    out = numpy.ndarray(x.shape, x.dtype, bytearray(x.nbytes + 1), 1)
    out[...] = x
    return out


def _read_only(x: numpy.ndarray) -> numpy.ndarray:
    out = x.copy()
    out.flags.writeable = False
    return out


def _memory_mapped(x: numpy.ndarray) -> numpy.ndarray:
    if not x.size:
        return _read_only(x)
    with tempfile.NamedTemporaryFile() as file:
        file.write(x.tobytes())
        file.flush()
        return numpy.memmap(file.name, x.dtype, "r", shape=x.shape)


#: Arrays of the same numbers that are kept in another way, which MPI may read, write into or know no dtype of.
STORED: dict[str, Callable[[numpy.ndarray], numpy.ndarray]] = {
    "memory-mapped": _memory_mapped,
    "read-only": _read_only,
    "unaligned": _unaligned,
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder("S")),
    "long double": lambda x: x.astype(numpy.longdouble),
    "small integers": lambda x: numpy.ceil(x).astype(numpy.int8),
}
