"""Exact sums: the nearest number, so the same bits in any order, grouping and number of ranks."""

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather, broadcast_varying, pcopies, pmean, pscan, psum, psum_scatter, reduce, reduced
from collectives.exact import exact, wire_bytes
from collectives.fixed_point import Grid, from_words, to_words, window_of
from collectives.ops import psum_p
from minidiff.core.types import ShapedArray
from minidiff.values.dtypes import finfo
from spmd import P
from spmd.prices.compiled_tape import rewritten
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

RANKS = (1, 2, 3, 4, 8)
inf, nan = numpy.inf, numpy.nan
DTYPES = (numpy.float64, numpy.float32, numpy.float16, ml_dtypes.bfloat16)


def over_ranks(f, ranks, in_specs=P("i"), out_specs=P(), **options):
    on = spmd.make_mesh((ranks,), ("i",), backend="simulated", **options) if options else mesh(ranks)
    return mapped(f, on, in_specs, out_specs)


def exact_total(x):
    return psum(x, "i", exact=True, axis=0)


def same_bits(x, y):
    x, y = numpy.asarray(x), numpy.asarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def nearest(total, dtype):
    """The number of a dtype that is nearest to a fraction, by another way: ties to even among its multiples."""
    info = finfo(dtype)
    bits = max(math.frexp(float(abs(total)) or 1.0)[1] - 1, int(info.minexp)) - int(info.nmant)
    rounded = round(total / Fraction(2) ** bits) * Fraction(2) ** bits
    largest = Fraction(float(info.max))
    return dtype(math.copysign(math.inf, total) if abs(rounded) > largest else float(rounded))


# ---------------------------------------------------------------- numbers as integers

NUMBERS = st.lists(
    st.one_of(st.floats(allow_nan=False, allow_infinity=False, width=64), st.floats(-4, 4), st.just(-0.0)), max_size=40
)


def local_sum(xs):
    x = numpy.array(xs, float)
    top, bottom, _ = window_of(x, 53)
    grid = Grid.of(top, -bottom, len(x))
    return from_words(to_words(x, grid).sum(0), grid, len(x), 53)


@given(NUMBERS)
@settings(max_examples=40)
@example([1e308, 1e308, -1e308])  # a partial sum is not a float
@example([5e-324] * 3 + [1e308])  # the whole range
@example([1.0, 2.0**-53])  # a tie, to even
@example([1.0, 2.0**-53, 5e-324])  # beyond it
@example([1.0 + 2.0**-52, 2.0**-53])
def test_sums_are_those_of_fsum(xs):
    try:
        expected = math.fsum(xs)
    except OverflowError:  # of the result, or of a partial sum
        total = sum(map(Fraction, xs))
        is_infinite = abs(total) >= 2**1024 - 2**970
        expected = math.inf * (1 if total > 0 else -1) if is_infinite else float(total)
    with numpy.errstate(over="ignore"):
        assert local_sum(xs) == expected


def test_a_sum_is_minus_zero_if_all_addends_are():
    for xs in itertools.product([0.0, -0.0], repeat=3):
        assert same_bits(local_sum(xs), numpy.float64(-0.0 if all(math.copysign(1, x) < 0 for x in xs) else 0.0))
    assert same_bits(local_sum([1.5, -1.5]), numpy.float64(0.0)) and same_bits(local_sum([]), numpy.float64(0.0))


# ---------------------------------------------------------------- on ranks


@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.booleans())
@settings(max_examples=15, deadline=None)
def test_sums_have_the_same_bits_on_any_number_of_ranks(seed, dtype, wide):
    rng = numpy.random.default_rng(seed)
    spread = 2.0 ** rng.integers(-20 if wide else -2, 14 if wide else 2, (24, 3))
    x = (rng.standard_normal((24, 3)) * spread).astype(dtype)
    expected = numpy.array([nearest(sum(map(Fraction, column.astype(float).tolist())), dtype) for column in x.T])
    for ranks in RANKS:
        assert same_bits(over_ranks(exact_total, ranks)(rng.permutation(x)), expected)


#: Operands, split along their first axis, and the sums of all rows: the nearest numbers.
SUMS = {
    "complex": ([1e7 + 2j, 1 + 1e7j, -1e7 + 0.5j, 0.25 - 1e7j], 1.25 + 2.5j),
    "single complex": (numpy.array([1e7 + 2j, 1 + 1e7j, -1e7 + 0.5j, 0.25 - 1e7j], "c8"), numpy.complex64(1.25 + 2.5j)),
    "integers": (numpy.arange(8, dtype="i4"), numpy.int32(28)),
    "booleans": (numpy.arange(8) > 3, 4),
    "not finite": (
        [[inf, inf, nan, -inf, 1e308, 0.0], [1.0, -inf, 1.0, -inf, 1e308, -0.0]],
        [inf, nan, nan, -inf, inf, 0.0],
    ),
    "empty": (numpy.ones((0, 3)), numpy.zeros(3)),
}


@each("ranks", [1, 2])
@each("name", SUMS)
def test_sums(name, ranks):
    x, expected = map(numpy.asarray, SUMS[name])
    total = numpy.asarray(over_ranks(exact_total, ranks)(x))
    assert_array_equal(total, expected, strict=True)
    assert_array_equal(numpy.copysign(1, total.real)[total == 0], numpy.copysign(1, expected.real)[total == 0])
    if name == "not finite":
        with numpy.errstate(invalid="ignore"):
            assert_array_equal(over_ranks(lambda x: psum(x[0], "i"), 2, exact_sums=True)(x), expected)


def test_blocks_scalars_trees_and_several_axes():
    x = numpy.arange(8, dtype=numpy.int32)
    assert_array_equal(over_ranks(lambda x: psum(x, "i", exact=True), 2)(x), x[:4] + x[4:])
    assert over_ranks(lambda: psum(2.5, "i", exact=True), 4, in_specs=())() == 10.0
    on, x = mesh(2, 3), numpy.array([[1e16, 1, 1, 1, 1, -1e16]] * 2)
    both = mapped(lambda t: psum(t, ("i", "j"), exact=True, axis=1), on, P(None, ("i", "j")), P())
    assert_array_equal(both({"a": x, "b": -x})["a"], [4, 4])
    assert_array_equal(mapped(lambda x: psum(x, "j", exact=True, axis=1), on, P("i", "j"), P("i"))(x), [4, 4])


# ---------------------------------------------------------------- derivatives


def pieces_loss(w, x):
    y = np.sum(pcopies(w, "i", len(x)) * x, axis=1)
    return psum(y * y * y, "i", exact=True, axis=0)


def test_gradients_have_the_same_bits_on_any_number_of_ranks():
    rng = numpy.random.default_rng(0)
    w, x = rng.standard_normal(5), rng.standard_normal((24, 5)) * 10.0 ** rng.integers(-6, 6, (24, 1))
    results = {}
    for ranks in RANKS:
        f = over_ranks(pieces_loss, ranks, in_specs=(P(), P("i")))
        with md.disable_jit():
            values = (
                md.value_and_grad(f)(w, x),
                md.jvp(f, (w, x), (w, x)),
                md.grad(lambda w, f=f: md.grad(f)(w, x).sum())(w),
            )
        results[ranks] = b"".join(numpy.asarray(leaf).tobytes() for leaf in md.tree.leaves(values))
    assert len({*results.values()}) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_derivatives_are_those_of_sums(ranks):
    rng = numpy.random.default_rng(0)
    x = rng.standard_normal((2, 2))
    f = over_ranks(pieces_loss, ranks, in_specs=(P(), P("i")))
    md.testing.check_grads(f, (x[0], x), order=2)
    md.testing.check_grads(over_ranks(lambda x: psum(x**2, "i", exact=True, axis=1), ranks, P(None, "i")), (x,))
    assert_array_equal(md.vmap(md.grad(f), (0, None))(x, x), numpy.stack([md.grad(f)(w, x) for w in x]))
    swept = over_ranks(lambda w, x: md.vmap(pieces_loss, (None, 1))(w, x), ranks, in_specs=(P(), P("i")))
    assert_array_equal(swept(x[0], x[:, None]), f(x[0], x)[None])


# ---------------------------------------------------------------- a mesh with exact sums


PARTS = 10.0 ** numpy.random.default_rng(0).integers(-12, 12, (3, 6)) * numpy.linspace(-1, 1, 18).reshape(3, 6)
TOTAL = numpy.array([math.fsum(column) for column in PARTS.T])

#: Bodies of a block [1, 6] of each of three ranks, their out_specs, and what they give: each sum is the nearest number.
ADDING = {
    "psum": (lambda x: psum(x[0], "i"), P(), TOTAL),
    "pmean": (lambda x: pmean(x[0], "i"), P(), TOTAL / 3),
    "scatter": (lambda x: psum_scatter(x[0], "i", tiled=True), P("i"), TOTAL),
    "reduce": (lambda x: reduce(x[0], "i", root=1), P("i"), numpy.concatenate([0 * TOTAL, TOTAL, 0 * TOTAL])),
    "pscan": (lambda x: pscan(x, "i"), P("i"), numpy.stack([PARTS[0], PARTS[0] + PARTS[1], TOTAL])),
    "groups": (lambda x: psum(x, "i", axis_index_groups=[[0, 1, 2]]), P("i"), numpy.stack([TOTAL] * 3)),
}


@each("name", ADDING)
def test_all_that_add_are_exact_on_such_a_mesh(name):
    body, out_specs, expected = ADDING[name]
    f = over_ranks(body, 3, out_specs=out_specs, exact_sums=True)
    for run in (f, md.jit(f)):
        assert_array_equal(run(PARTS), expected)
    if name == "psum":
        on = spmd.make_mesh((3,), ("i",), backend="simulated", exact_sums=True)
        assert_array_equal(mapped(body, on, P("i"), P(), check_rep=False)(PARTS), TOTAL)


#: Losses of w and of a rank's block: the gradient in w sums the blocks.
TRANSPOSED = {
    "pbroadcast": (lambda w, x: psum(np.sum(w * x), "i"), P()),
    "reduced": (lambda w, x: psum(np.sum(reduced(w, "i") * x), "i"), P()),
    "all_gather": (lambda w, x: psum(np.sum(all_gather(w[:2], "i", tiled=True) * x), "i"), P("i")),
    "broadcast": (lambda w, x: psum(np.sum(broadcast_varying(w, "i") * x), "i"), P()),
}


@each("name", TRANSPOSED)
def test_transposes_are_exact_on_such_a_mesh(name):
    body, spec = TRANSPOSED[name]
    f = over_ranks(body, 3, in_specs=(spec, P("i")), exact_sums=True)
    for g in (md.grad(f), md.jit(md.grad(f))):
        assert_array_equal(g(numpy.ones(6), PARTS), TOTAL)


def test_compiled_and_fused_sums_have_the_same_bits():
    x, w = PARTS, numpy.linspace(1, 2, 6)

    def body(w, x):
        return psum(w * x[0], "i") * 4.0 + psum(x[0], "i"), psum(-x[0], "i")

    f = over_ranks(body, 3, in_specs=(P(), P("i")), out_specs=(P(), P()), exact_sums=True)
    g = lambda w: md.grad(lambda w: np.sum(f(w, x)[0]))(w)  # noqa: E731
    for h, args in ((f, (w, x)), (g, (w,))):
        expected = md.tree.leaves(h(*args))
        for jitted in (md.jit(h), md.jit(h, without=("fuse psums",)), md.jit(h, kernels=False)):
            assert all(map(same_bits, md.tree.leaves(jitted(*args)), expected))
    tape = str(rewritten(f)(w, x))
    assert tape.count("exact_psum") == 1 and " psum" not in tape  # in one call; and none was moved past a product


def test_a_program_traced_in_a_body_is_not_shared_with_an_exact_mesh():
    total = md.jit(lambda x: psum(x, "i"))
    x = numpy.array([1e16, 1.0, 1.0, -1e16])
    for flag in (False, True):
        tape = str(md.make_tape(over_ranks(total, 4, exact_sums=flag))(x))
        assert ("exact_psum" in tape) == flag
    assert over_ranks(total, 4, exact_sums=True)(x) == [2.0]


# ---------------------------------------------------------------- reports


def test_reports_count_the_words_that_are_sent():
    inexact, f = (over_ranks(lambda x: psum(x[0], "i"), 4, **options) for options in ({}, {"exact_sums": True}))
    x = numpy.random.default_rng(0).standard_normal((4, 100))
    on = md.make_tape(f)(x).equations[0].params["mesh"]
    on.reset_calls()
    f(x)
    assert on.bytes == {"pmax": 24, "psum": 1600} and on.calls == {"pmax": 1, "psum": 1}
    for g in (f, md.jit(f)):
        report = spmd.communication(g)(x)
        assert (report.counts, report.bytes) == ({"exact_psum": 1}, 1624)
    one_axis = {"axes": ("i",), "size": 4}
    assert [wire_bytes(exact(psum_p), ShapedArray((100,), t), one_axis) for t in ("f4", "f2")] == [1624, 824]
    seconds = [spmd.predict(g, spmd.machines.A100)(x).seconds for g in (f, inexact)]
    assert seconds[0] > seconds[1]
    assert [row.collective for row in spmd.communication(f, measured=True)(x).rows] == ["exact_psum"]
    assert spmd.memory(md.jit(f))(x).peak.total > spmd.memory(md.jit(inexact))(x).peak.total
