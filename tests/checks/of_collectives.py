"""Checks of the collectives against what each means on a list of blocks (`collectives.reference`), on any mesh.

They take a mesh, so that they are the same on simulated ranks and on real ones, where every process runs them: what
they compute with is the same on all.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16)
import numpy
from numpy.testing import assert_allclose, assert_array_equal

import collectives
import minidiff as md
import spmd
from collectives.collective import Collective
from collectives.reference import collective_ref
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.properties import shown_by, shows
from tests.checks.samples import check_each
from tests.checks.whole import whole

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


def on_blocks(mesh, body, varying, out_varying=None, check_rep=True) -> Callable:
    """`body` on the blocks of an array whose first dimension is split along `varying`: each block is one entry.

    The results are stacked likewise: each rank's own, unless `out_varying` are fewer axes.
    """
    out = mesh.axis_names if out_varying is None else out_varying
    return spmd.shard_map(
        lambda x: body(x[0])[None], mesh=mesh, in_specs=P(varying), out_specs=P(out), check_rep=check_rep
    )


def every_rank(mesh, results) -> list[list[numpy.ndarray]]:
    """Return each rank's entry of each result of `on_blocks`.

    Under MPI all processes look at those of all, sent without the help of what is tested: so a wrong one is
    an error everywhere, and none goes on to wait for those that have stopped.
    """
    outcome = [result.local for result in results]
    if mesh.backend != "simulated":
        outcome = zip(*mesh.ranks.comm.allgather(outcome))
    return [[block[0] for block in blocks] for blocks in outcome]


class Sample(NamedTuple):
    """A collective, and the blocks it is applied to: one for each rank along `varying`, stacked."""

    case: Case
    axes: tuple[str, ...]
    stacked: numpy.ndarray
    varying: tuple[str, ...]

    def __str__(self) -> str:
        inputs = f"{md.typeof(self.stacked[0])}{{{','.join(self.varying)}}}"
        return f"{self.case.name} of {inputs} over {self.axes}, {self.case.options}"

    def results(self, mesh, stacked=None) -> list[numpy.ndarray]:
        """Return each rank's expected result, for these blocks or others."""
        blocks = self.stacked if stacked is None else stacked
        return reference(mesh, self.case, self.axes, ranks_blocks(mesh, blocks, self.varying))


def sample(mesh, case, axes, dtype="float64", varying=None, batch=()) -> Sample:
    """Random blocks. `varying` are the axes along which the operand varies, if not all that it may."""
    varying = operand_axes(mesh, case, axes) if varying is None else varying
    return Sample(case, axes, random((size_of(mesh, varying), *case.shape, *batch), dtype), varying)


def on_ranks(mesh, samples, apply, check_rep=True) -> list[list[numpy.ndarray]]:
    """Return each rank's value of `apply(sample, block)`, for each sample; all are computed in one body."""

    def body(*xs):
        results = []
        for s, x in zip(samples, xs, strict=True):
            try:
                results.append(apply(s, x[0])[None])
            except Exception as error:
                raise AssertionError(f"{s} fails") from error
        return results

    specs = {"in_specs": tuple(P(s.varying) for s in samples), "out_specs": P(mesh.axis_names)}
    f = spmd.shard_map(body, mesh=mesh, check_rep=check_rep, **specs)
    return every_rank(mesh, f(*[s.stacked for s in samples]))


def assert_ranks_have(blocks, expected, case) -> None:
    for block, e in zip(blocks, expected, strict=True):
        assert_same(block, e, exact=case.name not in ADDS)


def assert_same(actual, expected, exact: bool) -> None:
    """Same shape, dtype and values; sums of floating-point numbers may be added up in another order."""
    actual = numpy.asarray(actual)
    if exact or actual.dtype.kind in "biu":
        assert_array_equal(actual, expected, strict=True)
    else:
        eps = md.values.dtypes.finfo(actual.dtype).eps
        assert_allclose(actual, expected, rtol=32 * eps, atol=32 * eps, strict=True)


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
    "columns first": lambda x: numpy.asfortranarray(x),
    "backwards": lambda x: x[..., ::-1].copy()[..., ::-1] if x.ndim else x,
    "long double": lambda x: x.astype(numpy.longdouble),
    "complex long double": lambda x: x.astype(numpy.clongdouble),
    "small integers": lambda x: numpy.ceil(x).astype(numpy.int8),
}


# ---------------------------------------------------------------- checks


@shows("reference", "types")
def check_all_values(mesh, axes, layout="plain", check_rep=True) -> None:
    """All collectives over these axes."""
    check_values(mesh, [sample(mesh, case, axes) for case in cases(size_of(mesh, axes))], layout, check_rep)


@shows("reference", "types")
def check_one_each(mesh, axes, layout="plain", check_rep=True, varying=None) -> None:
    """One case of each collective over these axes."""
    samples = [sample(mesh, case, axes, varying=varying) for case in one_case_each(size_of(mesh, axes))]
    check_values(mesh, samples, layout, check_rep)


@shows("reference", "types")
def check_fewer_axes(mesh, axes) -> None:
    """Operands that vary along some of the axes along which they may, or along none."""
    samples = []
    for case in one_case_each(size_of(mesh, axes)):
        may_vary = operand_axes(mesh, case, axes)
        for varying in itertools.chain(*(itertools.combinations(may_vary, k) for k in range(len(may_vary)))):
            samples.append(sample(mesh, case, axes, "int64", varying))
    if samples:
        check_values(mesh, samples)


@shows("reference")
def check_stored(mesh, axes, kind) -> None:
    """All collectives of arrays of a kind in `STORED`: of arguments, and of arrays that the body closes over."""
    extrema, cases = ("pmax", "pmin"), one_case_each(size_of(mesh, axes))
    cases = [c for c in cases if c.name != "axis_index" and not (c.name in extrema and kind.startswith("complex"))]
    inputs = [s._replace(stacked=STORED[kind](s.stacked)) for s in (sample(mesh, case, axes) for case in cases)]
    numbers = [s._replace(stacked=s.stacked.astype(s.stacked.dtype.newbyteorder("="))) for s in inputs]
    check_kept(mesh, numbers, on_ranks(mesh, inputs, lambda s, x: s.case(x, s.axes)))
    # Of what all ranks have, an extremum is that itself, without MPI.
    alike = [s._replace(stacked=s.stacked[:1], varying=()) for s in numbers if s.case.name not in extrema]
    closed = {str(s.case): STORED[kind](numpy.array(s.stacked[0])) for s in alike}
    nothing = [s._replace(stacked=numpy.zeros(mesh.size), varying=mesh.axis_names) for s in alike]
    check_kept(mesh, alike, on_ranks(mesh, nothing, lambda s, x: s.case(closed[str(s.case)], s.axes)))


def check_kept(mesh, samples, outcome) -> None:
    """Each rank's results against the reference; their dtypes are of this machine."""
    for s, blocks in zip(samples, outcome, strict=True):
        assert all(block.dtype.isnative for block in blocks), s
    check_found(samples, outcome, [s.results(mesh) for s in samples])


def check_found(samples, outcome, expected) -> None:
    check_each(
        (str(s), functools.partial(assert_ranks_have, blocks, results, s.case))
        for s, blocks, results in zip(samples, outcome, expected, strict=True)
    )


@shows("reference")
def check_values(mesh, samples, layout="plain", check_rep=True) -> None:
    """Each rank's results against the reference."""
    store, read = LAYOUTS[layout]
    stored = [s._replace(stacked=numpy.stack([store(block) for block in s.stacked])) for s in samples]
    outcome = on_ranks(mesh, stored, lambda s, x: s.case(read(x), s.axes), check_rep)
    check_found(samples, outcome, [s.results(mesh) for s in samples])


@shows("modes")
def check_compiled(mesh, case, axes) -> None:
    """The compiled program's results, and those of its derivative's."""
    varying = operand_axes(mesh, case, axes)
    stacked = random((size_of(mesh, varying), *case.shape), "float64")
    result = md.jit(on_blocks(mesh, lambda x: case(x, axes) + 0, varying))(stacked)
    (blocks,) = every_rank(mesh, [result])
    assert_ranks_have(blocks, [x + 0 for x in Sample(case, axes, stacked, varying).results(mesh)], case)
    if case.name != "axis_index":
        gradient = md.grad(loss_of(mesh, case, axes))
        assert_allclose(whole(md.jit(gradient)(stacked)), whole(gradient(stacked)), rtol=1e-9, atol=1e-12)


@shows("reference", "types")
def check_dtypes(mesh, axes, dtypes=DTYPES) -> None:
    """All collectives on blocks of each dtype; where they are ordered, also the extrema."""
    check_values(
        mesh,
        [
            sample(mesh, case, axes, dtype)
            for dtype in dtypes
            for case in one_case_each(size_of(mesh, axes))
            if case.name not in ORDERED or numpy.dtype(dtype).kind != "c"
        ],
    )


@shows("modes")
def check_vmapped(mesh, cases, axes) -> None:
    """Collectives vectorized along a batch axis that is the last: applied to each entry."""
    samples = [sample(mesh, case, axes, batch=(2,)) for case in cases if case.name != "axis_index"]
    outcome = on_ranks(mesh, samples, lambda s, x: md.vmap(lambda x: s.case(x, s.axes), in_axes=-1)(x))
    entries = [[s.results(mesh, s.stacked[..., k]) for k in range(2)] for s in samples]
    check_found(samples, outcome, [list(map(numpy.stack, zip(*of_both))) for of_both in entries])


@shows("reference")
def check_nan(mesh, axes) -> None:
    """A NaN that one rank has is the extremum on all ranks: which rank has it makes no difference."""
    stacked = random((mesh.size, mesh.size), "float64")
    numpy.fill_diagonal(stacked, numpy.nan)
    cases = [Case(name, (mesh.size,)) for name in ("pmax", "pmin")]
    check_values(mesh, [Sample(case, axes, stacked, mesh.axis_names) for case in cases])


@shows("reference")
def check_scans(mesh, axes) -> None:
    """Prefix sums of 16-bit floats are added up in float32, and of what is not finite only later ranks know."""
    n = size_of(mesh, axes)
    for dtype in ("float16", "bfloat16"):
        small = md.values.dtypes.finfo(dtype).eps / 2  # what alone is lost beside 1
        stacked = numpy.asarray([1.0, *[small] * (mesh.size - 1)]).astype(dtype)
        local = Sample(Case("pscan", ()), mesh.axis_names, stacked, mesh.axis_names)
        expected = numpy.cumsum(stacked.astype("float32")).astype(dtype)
        for block, e in zip(on_ranks(mesh, [local], lambda s, x: s.case(x, s.axes))[0], expected, strict=True):
            assert_array_equal(block, e, strict=True)
    for reverse, exclusive in itertools.product((False, True), repeat=2):
        case = Case("pscan", (n,), {"reverse": reverse, "exclusive": exclusive})
        stacked = numpy.zeros((mesh.size, n))
        stacked[numpy.arange(mesh.size), numpy.arange(mesh.size) % n] = numpy.inf
        check_values(mesh, [Sample(case, axes, stacked, mesh.axis_names)])


@shows("modes")
def check_scans_in_branches(mesh) -> None:
    """Scans over y, on a mesh (x: 2, y: 2), in a branch that some ranks along x take: the first call of each kind."""

    def body(x):
        scans = [collectives.pscan(x, "y", reverse=r, exclusive=e) for r in (False, True) for e in (False, True)]
        return md.numpy.stack(scans)

    def mapped(f):
        return spmd.shard_map(f, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(None, ("x", "y")))

    def zeros(x):
        return md.numpy.stack([0 * x] * 4)

    some = mapped(lambda x: md.cond(collectives.axis_index("x") == 1, body, zeros, x))
    x = numpy.arange(1.0, 5.0)
    for run in (lambda f: f, md.jit):
        outcome = whole(run(some)(x))
        assert_array_equal(outcome, whole(mapped(body)(x * [0, 0, 1, 1])))
        assert_array_equal(outcome, [[0, 0, 3, 7], [0, 0, 0, 3], [0, 0, 7, 4], [0, 0, 4, 0]])


def check_transpose(mesh, case, axes, dtype="float64", check_rep=True) -> None:
    """<f(x), y> == <x, f_t(y)>, without conjugation; and the transpose of the transpose is f.

    The specs say exactly where blocks vary: nothing but the collective itself is transposed.
    """
    varying, out_varying = operand_axes(mesh, case, axes), result_axes(mesh, case, axes)
    f = on_blocks(mesh, lambda x: case(x, axes), varying, out_varying, check_rep)
    x = random((size_of(mesh, varying), *case.shape), dtype)
    fx = whole(f(x))
    y = random(fx.shape, dtype, seed=1)

    transposed = md.linear_transpose(f, x)

    def f_t(ct):
        return transposed(ct)[0]

    (f_tt_x,) = md.linear_transpose(f_t, y)(x)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype in ("float32", "complex64") else {"rtol": 1e-10, "atol": 1e-10}
    assert_allclose((fx * y).sum(), (x * whole(f_t(y))).sum(), **tolerance)
    assert_allclose(whole(f_tt_x), fx, **tolerance)
    if check_rep:
        tape = md.make_tape(f)(x)
        back = md.transpose(tape)
        names = [case.transposed, *(["ppermute_wait"] if case.name == "ppermute_start" else [])]
        assert [eqn.primitive.name for eqn in collectives_on(back)] == names
        assert md.transpose(back) == tape


@shows("adjoint")
def check_transposes(mesh, cases, axes, dtype="float64", check_rep=True) -> None:
    """`check_transpose` of those of the collectives that are linear."""
    check_each(
        (str(case), functools.partial(check_transpose, mesh, case, axes, dtype, check_rep))
        for case in cases
        if case.name in TRANSPOSES
    )


def check_counts(mesh, f, *args) -> None:
    """Check that a run's counts are those that `communication` reads from the tape."""
    reported = spmd.communication(f)(*args)
    mesh.reset_calls()
    f(*args)
    assert mesh.calls == reported.counts
    assert sum(mesh.bytes.values()) == reported.bytes


@shows("counts")
def check_case_counts(mesh, case, axes) -> None:
    """The counts of a collective over one group of axes, and of its gradient."""
    varying = operand_axes(mesh, case, axes)
    x = random((size_of(mesh, varying), *case.shape), "float64")
    f = on_blocks(mesh, lambda x: case(x, axes), varying)
    check_counts(mesh, f, x)
    silent = case.name in SILENT or case.taking_part(size_of(mesh, axes)) == 1
    assert mesh.calls == ({} if silent else {case.operation: 1})
    nbytes = x[0].size if case.name in ("pany", "pall") else x[0].nbytes
    assert mesh.bytes == ({} if silent else {case.operation: nbytes})
    if case.name != "axis_index":
        check_counts(mesh, md.grad(loss_of(mesh, case, axes)), x)


def loss_of(mesh, case, axes) -> Callable:
    """A scalar, equal on all ranks, of an array whose first dimension is split over those that `case` lets vary."""

    def body(x):
        y = case(md.numpy.sin(x[0]), axes)
        return collectives.psum(md.numpy.sum(y * md.numpy.cos(y)), mesh.axis_names)

    return spmd.shard_map(body, mesh=mesh, in_specs=P(operand_axes(mesh, case, axes)), out_specs=P())


@shows("derivatives", "modes")
def check_derivatives(mesh, cases, axes, check_rep=True) -> None:
    """First and second derivatives in both modes, of functions of an array that every rank has whole."""
    everything = mesh.axis_names

    def body(x):
        local, results = x[collectives.axis_index(everything)], {}
        for case in cases:
            y = md.numpy.sin(case(md.numpy.sin(local) * x[0], axes))
            results[str(case)] = collectives.psum(y * (1.0 + collectives.axis_index(everything)), everything)
        return results

    f = spmd.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_rep=check_rep)
    md.testing.check_grads(f, (random((mesh.size, *cases[0].shape), "float64"),), order=2)


@shows("derivatives", "modes")
def check_extremum(mesh, name, axes, check_rep=True) -> None:
    """Derivatives of an extremum over ranks, at values that tie, against NumPy's of all the ranks' blocks.

    And of a product, of which many factors are zero.
    """
    everything, numpys = mesh.axis_names, {"pmax": md.numpy.max, "pmin": md.numpy.min, "pprod": md.numpy.prod}[name]
    members = groups(mesh, axes)
    weights = random((mesh.size, 3), "float64")

    def body(x):
        me = collectives.axis_index(everything)
        y = getattr(collectives, name)(x[me] * x[me], axes)
        return collectives.psum(md.numpy.sum(y * md.numpy.take(weights, me, axis=0)), everything)

    def whole(x):
        y = [(numpys(md.numpy.stack([x[r] * x[r] for r in ranks]), axis=0), ranks) for ranks in members]
        return sum(md.numpy.sum(best * weights[r]) for best, ranks in y for r in ranks)

    f = spmd.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_rep=check_rep)
    x = numpy.random.default_rng(0).integers(1, 3, (mesh.size, 3)).astype(float)  # many tie
    x = x - 1 if name == "pprod" else x
    t = random(x.shape, "float64", seed=1)

    def twice(f):
        return md.grad(lambda x: md.numpy.sum(md.grad(f)(x) * t))

    assert_allclose(md.grad(f)(x), md.grad(whole)(x), rtol=1e-12)
    assert_allclose(md.jvp(f, (x,), (t,))[1], md.jvp(whole, (x,), (t,))[1], rtol=1e-12)
    assert_allclose(twice(f)(x), twice(whole)(x), rtol=1e-12)
    several = numpy.stack([x, 1 + x, x[::-1]])
    assert_allclose(md.vmap(md.grad(f))(several), numpy.stack([md.grad(whole)(x) for x in several]), rtol=1e-12)


#: The collectives that reduce, of which the order of the axes does not matter.
REDUCTIONS = [Case(name, (2,)) for name in ("psum", "pmean", "pprod", "pmax", "pmin")]


def _every(mesh, last) -> list:
    return axes_of(mesh)


def _in_order(mesh, last) -> list:
    """For what does not depend on the order of axes, which the values have."""
    return [axes for axes in axes_of(mesh) if list(axes) == sorted(axes)]


def _of_few(mesh, last) -> list:
    return _in_order(mesh, last) if len(mesh.axis_names) < 3 else []


def _of_many(mesh, last) -> list:
    """All groups of many axes, and of few those that are not in order."""
    return axes_of(mesh) if len(mesh.axis_names) > 2 else [a for a in axes_of(mesh) if list(a) != sorted(a)]


def _some(mesh, last) -> list:
    return {(4,): [("x",)], (2, 3): [("y",), ("y", "x")]}.get(tuple(mesh.shape.values()), [])


def _backwards(mesh, last) -> list:
    """All axes, in the order that is not that of the ranks."""
    return [mesh.axis_names[::-1]]


def _last(mesh, last) -> list:
    return _backwards(mesh, last) if last else []


def _last_two(mesh, last) -> list:
    return [mesh.axis_names[::-1][:2]] if last else []


def _nowhere(mesh, last) -> list:
    return []


def _of_one(check) -> Callable:
    """Apply a check of a mesh, a case and axes to one case of each collective."""
    return shows(*shown_by(check))(
        lambda mesh, axes: [check(mesh, case, axes) for case in one_case_each(size_of(mesh, axes))]
    )


def _transposes(cases, *more) -> Callable:
    return shows("adjoint")(lambda mesh, axes: check_transposes(mesh, cases(size_of(mesh, axes)), axes, *more))


def _vmapped(cases) -> Callable:
    return shows("modes")(lambda mesh, axes: check_vmapped(mesh, [*cases(size_of(mesh, axes))], axes))


def _derivatives(check_rep) -> Callable:
    return shows("derivatives")(lambda mesh, axes: check_derivatives(mesh, REDUCTIONS, axes, check_rep))


def _extrema(check_rep) -> Callable:
    return shows("derivatives", "modes")(
        lambda mesh, axes: [check_extremum(mesh, name, axes, check_rep) for name in ("pmax", "pmin", "pprod")]
    )


#: What is asked of all collectives: a check of a mesh and axes, and over which axes of a mesh simulated ranks and MPI
#: ranks are asked it. `last` says that the mesh is the last one of as many ranks.
CHECKS: dict[str, tuple[Callable, Callable, Callable]] = {
    "values": (check_all_values, _every, _last),
    "values without types": (functools.partial(check_all_values, check_rep=False), _in_order, _nowhere),
    "one each": (check_one_each, _nowhere, _every),
    "one each without types": (functools.partial(check_one_each, check_rep=False), _nowhere, _backwards),
    **{
        f"{layout} blocks": (functools.partial(check_one_each, layout=layout), _in_order, _last)
        for layout in LAYOUTS
        if layout != "plain"
    },
    "dtypes": (check_dtypes, _in_order, _last),
    "every case vectorized": (_vmapped(cases), _in_order, _nowhere),
    "vectorized": (_vmapped(one_case_each), _nowhere, _backwards),
    "operands that vary along fewer axes": (check_fewer_axes, _in_order, _nowhere),
    "operands that do not vary": (functools.partial(check_one_each, varying=()), _nowhere, _backwards),
    "compiled": (_of_one(check_compiled), _some, _last),
    "NaN": (check_nan, _in_order, _in_order),
    "scans": (check_scans, _in_order, _in_order),
    "every transpose": (_transposes(cases), _of_few, _nowhere),
    "transposes": (_transposes(one_case_each), _of_many, _backwards),
    "complex transposes": (_transposes(one_case_each, "complex64"), _of_few, _backwards),
    "transposes of wide complex numbers": (_transposes(one_case_each, "complex128"), _of_few, _nowhere),
    "single transposes": (_transposes(one_case_each, "float32"), _of_few, _nowhere),
    "transposes without types": (_transposes(one_case_each, "float64", False), _in_order, _backwards),
    "derivatives": (_derivatives(True), _in_order, _last_two),
    "derivatives without types": (_derivatives(False), _in_order, _nowhere),
    "extrema": (_extrema(True), _some, _last_two),
    "extrema without types": (_extrema(False), _some, _nowhere),
    "counts": (_of_one(check_case_counts), _in_order, _backwards),
}


def collectives_in(f, *args) -> list:
    """The equations of collectives in the bodies of the shard_maps that `f` runs, in order."""
    return collectives_on(md.make_tape(f)(*args))


def collectives_on(tape) -> list:
    tapes = [eqn.params["body"] for eqn in tape.equations if eqn.primitive.name == "shard_map"]
    for body in tapes:
        body.check(typed=False)
    return [eqn for body in tapes for eqn in body.equations if isinstance(eqn.primitive, Collective)]


# ---------------------------------------------------------------- types

OPERANDS = random(36, "float64"), random(18, "float64"), random(6, "float64")


def types(body) -> None:
    """Print the collectives of a body of x:f64[6]{i,j}, u:f64[6]{j} and w:f64[6], with their types; check counts."""
    on, seen = mesh(2, 3), []

    def mapped(f, out_specs):
        return spmd.shard_map(f, on, in_specs=(P(("i", "j")), P("j"), P()), out_specs=out_specs)

    def look(*blocks):
        seen.append(md.typeof(body(*blocks)).variance)
        return ()

    mapped(look, P())(*OPERANDS)
    axes = tuple(a for a in on.axis_names if a in seen[0])  # so that nothing is pbroadcast at the end
    f = mapped(lambda *blocks: body(*blocks).reshape(-1), P(axes))
    for eqn in collectives_in(f, *OPERANDS):
        print(f"{eqn.primitive} {','.join(eqn.params['axes'])}: {eqn.inputs[0].type} -> {eqn.outputs[0].type}")
    check_counts(on, f, *OPERANDS)
    check_counts(on, md.grad(lambda *args: md.numpy.sum(md.numpy.sin(f(*args))), (0, 1, 2)), *OPERANDS)
