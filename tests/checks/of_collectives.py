"""Checks of the collectives against what each means on a list of blocks (`collectives.reference`), on any mesh.

They take a mesh, so that they are the same on simulated ranks and on real ones, where every process runs them: what
they compute with is the same on all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16)
import numpy
from numpy.testing import assert_allclose, assert_array_equal

import collectives
import minidiff as md
import spmd
from collectives.collective import Collective
from spmd import P
from tests.checks.collective_cases import (
    ADDS,
    DTYPES,
    LAYOUTS,
    ORDERED,
    SILENT,
    STORED,
    TRANSPOSES,
    Case,
    axes_of,
    cases,
    groups,
    one_case_each,
    operand_axes,
    random,
    ranks_blocks,
    reference,
    result_axes,
    size_of,
)
from tests.checks.meshes import mesh
from tests.checks.properties import shows
from tests.checks.samples import check_each
from tests.checks.whole import whole


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


# ---------------------------------------------------------------- checks


@shows("reference", "types")
def check_cases(
    mesh, axes, of=one_case_each, dtypes=("float64",), layout="plain", check_rep=True, varying=None
) -> None:
    """Collectives over these axes, on blocks of each dtype; where those are ordered, also the extrema."""
    samples = [
        sample(mesh, case, axes, dtype, varying)
        for dtype in dtypes
        for case in of(size_of(mesh, axes))
        if case.name not in ORDERED or numpy.dtype(dtype).kind != "c"
    ]
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
    check_native(mesh, numbers, on_ranks(mesh, inputs, lambda s, x: s.case(x, s.axes)))
    # Of what all ranks have, an extremum is that itself, without MPI.
    alike = [s._replace(stacked=s.stacked[:1], varying=()) for s in numbers if s.case.name not in extrema]
    closed = {str(s.case): STORED[kind](numpy.array(s.stacked[0])) for s in alike}
    nothing = [s._replace(stacked=numpy.zeros(mesh.size), varying=mesh.axis_names) for s in alike]
    check_native(mesh, alike, on_ranks(mesh, nothing, lambda s, x: s.case(closed[str(s.case)], s.axes)))


def check_native(mesh, samples, outcome) -> None:
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
def check_compiled(mesh, axes) -> None:
    """The compiled programs' results, and those of their derivatives."""
    for case in one_case_each(size_of(mesh, axes)):
        varying = operand_axes(mesh, case, axes)
        stacked = random((size_of(mesh, varying), *case.shape), "float64")
        result = md.jit(on_blocks(mesh, lambda x, case=case: case(x, axes) + 0, varying))(stacked)
        (blocks,) = every_rank(mesh, [result])
        assert_ranks_have(blocks, [x + 0 for x in Sample(case, axes, stacked, varying).results(mesh)], case)
        if case.name != "axis_index":
            gradient = md.grad(loss_of(mesh, case, axes))
            assert_allclose(whole(md.jit(gradient)(stacked)), whole(gradient(stacked)), rtol=1e-9, atol=1e-12)


@shows("modes")
def check_vmapped(mesh, axes, of=one_case_each) -> None:
    """Collectives vectorized along a batch axis that is the last: applied to each entry."""
    named = [case for case in of(size_of(mesh, axes)) if case.name != "axis_index"]
    samples = [sample(mesh, case, axes, batch=(2,)) for case in named]
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
def check_transposes(mesh, axes, of=one_case_each, dtype="float64", check_rep=True) -> None:
    """`check_transpose` of those of the collectives that are linear."""
    check_each(
        (str(case), functools.partial(check_transpose, mesh, case, axes, dtype, check_rep))
        for case in of(size_of(mesh, axes))
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
def check_case_counts(mesh, axes) -> None:
    """The counts of each collective over one group of axes, and of its gradient."""
    for case in one_case_each(size_of(mesh, axes)):
        varying = operand_axes(mesh, case, axes)
        x = random((size_of(mesh, varying), *case.shape), "float64")
        check_counts(mesh, on_blocks(mesh, lambda x, case=case: case(x, axes), varying), x)
        silent = case.name in SILENT or case.taking_part(size_of(mesh, axes)) == 1
        nbytes = x[0].size if case.name in ("pany", "pall") else x[0].nbytes
        assert mesh.calls == ({} if silent else {case.operation: 1})
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
def check_reduction(mesh, name, axes, check_rep=True) -> None:
    """Derivatives of a reduction over ranks, to second order and in both modes, against NumPy's of all blocks.

    Of extrema, many values tie; of a product, many factors are zero.
    """
    everything, numpys = mesh.axis_names, getattr(md.numpy, name.removeprefix("p"))
    members, weights = groups(mesh, axes), random((mesh.size, 3), "float64")

    def body(x):
        me = collectives.axis_index(everything)
        y = getattr(collectives, name)(x[me] * x[me], axes)
        return collectives.psum(md.numpy.sum(md.numpy.sin(y) * md.numpy.take(weights, me, axis=0)), everything)

    def whole(x):
        y = [(numpys(md.numpy.stack([x[r] * x[r] for r in ranks]), axis=0), ranks) for ranks in members]
        return sum(md.numpy.sum(md.numpy.sin(best) * weights[r]) for best, ranks in y for r in ranks)

    f = spmd.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_rep=check_rep)
    x = numpy.random.default_rng(0).integers(1, 3, (mesh.size, 3)).astype(float)
    x = x - 1 if name == "pprod" else x
    t = random(x.shape, "float64", seed=1)

    def twice(f):
        return md.grad(lambda x: md.numpy.sum(md.grad(f)(x) * t))

    for of in (md.grad, lambda f: lambda x: md.jvp(f, (x,), (t,))[1], twice):
        assert_allclose(of(f)(x), of(whole)(x), rtol=1e-12, atol=1e-12)
    several = numpy.stack([x, 1 + x, x[::-1]])
    expected = numpy.stack([md.grad(whole)(x) for x in several])
    assert_allclose(md.vmap(md.grad(f))(several), expected, rtol=1e-12, atol=1e-12)


@shows("derivatives", "modes")
def check_derivatives(mesh, axes, check_rep=True) -> None:
    for name in ("psum", "pmean", "pprod", "pmax", "pmin"):
        check_reduction(mesh, name, axes, check_rep)


#: Over which axes of a mesh a check is asked: each and all in order, all in the other order, both, or none.
OVER: dict[str, Callable] = {
    "in order": lambda mesh: [axes for axes in axes_of(mesh) if list(axes) == sorted(axes)],
    "backwards": lambda mesh: [mesh.axis_names[::-1]],
    "each": lambda mesh: [*OVER["in order"](mesh), *OVER["backwards"](mesh)],
    "no": lambda mesh: [],
}
UNTYPED = {"check_rep": False}

#: Checks of all collectives, their options, and over which axes simulated ranks and MPI ranks are asked them.
CHECKS: dict[str, tuple[Callable, dict, str, str]] = {
    "every case": (check_cases, {"of": cases}, "in order", "backwards"),
    "values": (check_cases, {}, "backwards", "each"),
    "values without types": (check_cases, UNTYPED, "each", "no"),
    "transposed blocks": (check_cases, {"layout": "transposed"}, "backwards", "backwards"),
    "blocks backwards": (check_cases, {"layout": "backwards, every other"}, "in order", "backwards"),
    "dtypes": (check_cases, {"dtypes": DTYPES}, "in order", "backwards"),
    "operands that vary along fewer axes": (check_fewer_axes, {}, "in order", "no"),
    "operands that do not vary": (check_cases, {"varying": ()}, "no", "backwards"),
    "every case vectorized": (check_vmapped, {"of": cases}, "backwards", "no"),
    "vectorized": (check_vmapped, {}, "in order", "no"),
    "compiled": (check_compiled, {}, "backwards", "backwards"),
    "NaN": (check_nan, {}, "in order", "in order"),
    "scans": (check_scans, {}, "in order", "in order"),
    "every transpose": (check_transposes, {"of": cases}, "backwards", "no"),
    "transposes": (check_transposes, {}, "in order", "backwards"),
    "complex transposes": (check_transposes, {"dtype": "complex64"}, "backwards", "no"),
    "transposes without types": (check_transposes, UNTYPED, "backwards", "no"),
    "derivatives": (check_derivatives, {}, "in order", "backwards"),
    "derivatives without types": (check_derivatives, UNTYPED, "backwards", "no"),
    "counts": (check_case_counts, {}, "in order", "backwards"),
}


def check_collectives(mesh, name) -> None:
    check, options, simulated, mpi = CHECKS[name]
    for axes in OVER[simulated if mesh.backend == "simulated" else mpi](mesh):
        check(mesh, axes, **options)


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
