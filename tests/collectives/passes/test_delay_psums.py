"""psums moved past what is linear: to where two are one, as a whole or not at all, and never for a longer message."""

import numpy as np

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import at_root, axis_index, pbroadcast, ppermute, pscatter, psum
from spmd import P
from tests.checks.results import assert_trees_close
from tests.checks.rewrites import ALONE, IJ, check_derivatives, check_rewrite, communicating, data, mapped
from tests.checks.samples import each

BIG = np.random.default_rng(0).normal(size=(100, 100))  # no short message


def both(x):
    total = psum(x, "i")
    return 2 * total + psum(x * x, "i"), np.sin(total)


def apart_and_together(x):
    total = psum(x * 3, "i")
    return mnp.concatenate([total[:2] - total[2:], total[:2] / 2]) + psum(x * x, "i")


def three_in_two_sums(x):
    a, b, c = psum(x, "i"), psum(x * x, "i"), psum(x + 1, "i")
    return 2 * a + b, 3 * a + c


#: A body, and how many psums there are in the end; nothing else is sent.
PSUMS = {
    "added": (lambda x: psum(x, "i") + psum(x * x, "i"), 1),
    "added in any order": (
        lambda x: (psum(x, "i") - 3 * psum(x * x, "i")) - (psum(x * x * x, "i") / 2).reshape(4, 3),
        1,
    ),
    "multiplied by what all ranks have": (lambda x: psum(x, "i") * axis_index("j") - psum(x * x, "i").T.T, 1),
    "chosen": (lambda x: np.where(BIG[:4, :3] > 0, psum(x, "i"), psum(-x, "i")), 2),
    "sent along other axes": (lambda x: ppermute(psum(x, "i"), "j", [(0, 1), (1, 0)]) + psum(x * x, "i"), 2),
    "over one axis after another": (lambda x: psum(psum(x, "i") * 2, "j"), 1),
    "used twice": (apart_and_together, 2),
    "used by something else too": (both, 2),
    "used in two sums": (three_in_two_sums, 3),
    "over different axes": (lambda x: 2 * psum(x, "i") + 3 * psum(x, "j"), 2),
    "not linear": (lambda x: np.sin(psum(x, "i")) + psum(x * x, "i"), 2),
    "a product of two": (lambda x: psum(x, "i") * psum(x * x, "i") + psum(x + 1, "i"), 3),
    "one waits for the other": (lambda x: psum(np.sin(psum(x, "i")) * x, "i"), 2),
    "two short ones would be a long one": (lambda x: psum(x.sum(), IJ) * BIG + psum((x * x).sum(), IJ) * BIG.T, 2),
    "a short one and a long one": (lambda x: psum(x.sum(), IJ) * BIG + psum(x.sum() * BIG, IJ), 1),
}


#: A body that takes this rank's part of a sum, and what is communicated before and after.
LOCAL_SLICES = {
    "of a multiple": (lambda x: pscatter(psum(x, "i").T * 2, "i", axis=1, tiled=True), {"psum_scatter": 1}),
    "over two axes": (lambda x: pscatter(psum(x, IJ), ("j", "i"), axis=0), {"psum_scatter": 1}),
    "of two sums": (lambda x: pscatter(2 * psum(x, IJ) + psum(x * x, IJ), ("j", "i")), {"psum_scatter": 1}),
    "of a third, at a root": (lambda x: at_root(psum(x, "i") / 3, "i", root=1), {"reduce": 1}),
    "at a root along two axes": (lambda x: at_root(psum(x, IJ), ("j", "i"), root=1), {"reduce": 1}),
    "along one axis": (lambda x: pscatter(psum(x, IJ), "i", tiled=True), {"psum": 1}),
    "of what is used whole too": (
        lambda x: (lambda total: pscatter(total, "i", tiled=True) + total[0])(psum(x, "i")), {"psum": 1},
    ),
    "of a long product": (lambda x: pscatter(psum(x.sum(), "i") * BIG, "i", tiled=True), {"psum": 1}),
}  # fmt: skip


@each("case", PSUMS)
def test_psums(case):
    body, count = PSUMS[case]
    dtype = "complex128" if case == "added in any order" else "float64"
    x, f = data(dtype), mapped(body)
    tape, delayed = md.make_tape(f)(x), spmd.rewritten(f, without=ALONE)(x)
    delayed.check()
    assert communicating(delayed).pop("psum") == count
    assert_trees_close(delayed(x), tape(x), rtol=1e-9)
    check_derivatives(tape, delayed, x, dtype)


@each("dtype", ["float64", "int64"])
@each("case", LOCAL_SLICES)
def test_local_slices(case, dtype):
    body, after = LOCAL_SLICES[case]
    if dtype != "int64" or "of" not in case.split():  # products of integers stay where they are
        before = {"psum": 2 if case == "of two sums" else 1}
        check_rewrite("delay psums", body, before, after, dtype)


def test_what_meets_no_other_stays_where_it_was():
    f = mapped(lambda x: mnp.broadcast_to(psum(x.sum(0), "i") * 2, (5, 3)))
    args = (data("float64"),)
    assert str(spmd.rewritten(f)(*args)) == str(spmd.rewritten(f, without=("delay psums",))(*args))


#: Sums over ranks in one dtype, of which something is made in another.
WIDER = {
    "added to a wider one": lambda x, z: (psum(x, IJ) + z) + psum(x * x, IJ),
    "subtracted from a wider one": lambda x, z: (z - psum(x, IJ)) - psum(x * x, IJ),
    "multiplied by a wider one": lambda x, z: psum(x, IJ) * z + psum(x * x, IJ) * z,
    "divided": lambda x, z: psum(x, IJ) / 2 + psum(x * x, IJ) / 2,
    "converted": lambda x, z: psum(x, IJ).astype(z.dtype) + psum(x * x, IJ).astype(z.dtype),
    "terms of one dtype": lambda x, z: psum(x, IJ) - psum(x * x, IJ),
    "copies": lambda x, z: psum(pbroadcast(psum(x, IJ), IJ), IJ) + z,
}


@each("wider", ["float64", "int64"])
@each("dtype", ["int8", "uint32", "float16"])
@each("name", WIDER)
def test_sums_stay_in_their_dtype(name, dtype, wider):
    """They wrap around, or overflow, where they did."""
    x = np.array([60, 50, 40, 30, 20, 10, 5, 100], dtype) * (200 if dtype == "float16" else 1)
    z = np.array([1, 1000], wider)
    f = mapped(WIDER[name], in_specs=(P(IJ), P()), out_specs=P())
    with np.errstate(over="ignore", invalid="ignore"):
        expected, got = np.asarray(f(x, z)), np.asarray(md.jit(f)(x, z))
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-3 if dtype == "float16" else 1e-6)


def test_a_sum_of_very_many_terms():
    """More than functions can be nested; every third one is summed over ranks."""

    def body(x):
        total = x
        for k in range(1100):
            total = total - psum(x * k, IJ) if k % 3 == 0 else total + x / (1 + k)
        return total

    x, f = data("float64", (4, 1)), mapped(body)
    tape = spmd.rewritten(f)(x)
    assert communicating(tape) == {"psum": 1}
    np.testing.assert_allclose(np.asarray(tape(x)[0]), np.asarray(f(x)), rtol=1e-9)


@each("body", [
    lambda x: psum(x, IJ)[axis_index(IJ)],
    lambda x: md.dynamic_slice_in_dim(psum(x, "i"), axis_index("i") * 2, 2),
    lambda x: psum(x, "i")[np.arange(2) + 2 * axis_index("i")],
    lambda x: pscatter(psum(x, "i"), "i", tiled=True),
])  # fmt: skip
@each("typed", [True, False])
def test_only_pscatter_is_a_local_slice(body, typed):
    """A slice at an index that the program computes is an ordinary slice, of a sum that all ranks have."""
    x, f = data("float64"), mapped(body, check_rep=typed)
    tape, smaller = md.make_tape(f)(x), spmd.rewritten(f)(x)
    smaller.check()
    pscattered = "pscatter" in str(tape)
    assert communicating(smaller) == {"psum_scatter" if pscattered else "psum": 1}
    np.testing.assert_allclose(np.asarray(smaller(x)[0]), np.asarray(f(x)), rtol=1e-12)
    check_derivatives(tape, smaller, x, "float64")
