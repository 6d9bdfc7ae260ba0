"""psums moved past what is linear: to where two are one, as a whole or not at all, and never for a longer message."""

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
import spmd
from collectives import at_root, axis_index, ppermute, pscatter, psum
from spmd import P
from tests.checks.samples import each
from tests.collectives.passes.test_rewrites import ALONE, IJ, check_derivatives, communicating, data, mapped

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


@each("dtype", ["float64", "complex128"])
@each("case", PSUMS)
def test_psums(case, dtype):
    body, count = PSUMS[case]
    x, f = data(dtype), mapped(body, out_specs=P(("i", "j")))
    tape, delayed = md.make_tape(f)(x), spmd.rewritten(f, without=ALONE)(x)
    delayed.check()
    assert communicating(delayed).pop("psum") == count
    for y, expected in zip(delayed(x), tape(x)):
        np.testing.assert_allclose(np.asarray(y), np.asarray(expected), rtol=1e-9)
    check_derivatives(tape, delayed, x, dtype)


@pytest.mark.parametrize(
    "body, expected",
    [
        (lambda x: pscatter(psum(x, "i").T * 2, "i", axis=1, tiled=True), {"psum_scatter": 1}),
        (lambda x: pscatter(2 * psum(x, IJ) + psum(x * x, IJ), ("j", "i")), {"psum_scatter": 1}),
        (lambda x: at_root(psum(x, "i") / 3, "i", root=1), {"reduce": 1}),
        (lambda x: pscatter(psum(x, IJ), "i", tiled=True), {"psum": 1}),
        (lambda x: (lambda total: pscatter(total, "i", tiled=True) + total[0])(psum(x, "i")), {"psum": 1}),
        (lambda x: pscatter(psum(x.sum(), "i") * BIG, "i", tiled=True), {"psum": 1}),
    ],
)
def test_local_slices(body, expected):
    x, f = data("float64"), mapped(body)
    tape, delayed = md.make_tape(f)(x), spmd.rewritten(f, without=ALONE)(x)
    delayed.check()
    assert communicating(delayed) == expected
    np.testing.assert_allclose(np.asarray(delayed(x)[0]), np.asarray(tape(x)[0]), rtol=1e-9)
    check_derivatives(tape, delayed, x, "float64")


def test_what_meets_no_other_stays_where_it_was():
    f = mapped(lambda x: mnp.broadcast_to(psum(x.sum(0), "i") * 2, (5, 3)))
    args = (data("float64"),)
    assert str(spmd.rewritten(f)(*args)) == str(spmd.rewritten(f, without=("delay psums",))(*args))
