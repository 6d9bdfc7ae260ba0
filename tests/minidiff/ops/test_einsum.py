"""Contractions of random subscripts, of windows, and of small dtypes."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.ops import einsum
from tests.checks.as_numpy import check_as_numpy
from tests.checks.samples import each

LABELS = "abcd"
SIZES = {"a": 2, "b": 3, "c": 1, "d": 2}


@st.composite
def contractions(draw: Callable) -> tuple[str, list[tuple[int, ...]]]:
    """Subscripts, explicit or not, with repeated labels, and shapes where some sizes of 1 are to be repeated."""
    terms = draw(st.lists(st.text(LABELS, max_size=3), min_size=1, max_size=4))
    shapes = [[SIZES[i] for i in term] for term in terms]
    for term, shape in zip(terms, shapes):
        for k, i in enumerate(term):
            if term.count(i) == 1 and draw(st.integers(0, 5)) == 0:
                shape[k] = 1
    subscripts = ",".join(terms)
    if draw(st.booleans()):
        labels = draw(st.permutations(sorted(set("".join(terms)))))
        subscripts += "->" + "".join(labels[: draw(st.integers(0, len(labels)))])
    return subscripts, [tuple(s) for s in shapes]


@settings(max_examples=60, deadline=None)
@given(contractions(), st.sampled_from([True, False, "optimal"]))
def test_contractions_are_numpys(contraction, optimize):
    subscripts, shapes = contraction
    xs = [np.random.default_rng(k).standard_normal(s) for k, s in enumerate(shapes)]
    check_as_numpy(lambda *xs: np.einsum(subscripts, *xs, optimize=optimize), *xs)


@pytest.mark.parametrize(
    "subscripts",
    [
        "xyzuvc,uvcf->xyzf",  # a convolution
        "xyzuvc,uvcf->fzxy",
        "xyzuvc,xyzf->uvcf",  # the cotangent of its kernel
        "xyzuvc,xyzf->fcvu",
        "xyzuvc,uvcfg->xyzfg",
        "xyzuvc,yzuvc->x",
        "xyzuvc,xyzuvc->",
    ],
)
@pytest.mark.parametrize("tile", [1 << 8, 1 << 12, 1 << 30])
def test_products_of_windows_tile_by_tile(subscripts, tile, monkeypatch):
    """The windows may be the first operand or the second."""
    monkeypatch.setattr(einsum, "LARGE_BYTES", 1 << 10)
    monkeypatch.setattr(einsum, "TILE_BYTES", tile)
    rng = np.random.default_rng(0)
    x = np.lib.stride_tricks.sliding_window_view(rng.normal(size=(3, 8, 9, 2)), (3, 2), (1, 2))
    windows, (terms, out) = np.moveaxis(x, 3, -1), subscripts.split("->")
    a, b = terms.split(",")
    sizes = {**dict(zip("xyzuvc", windows.shape)), "f": 4, "g": 2}
    other = rng.normal(size=[sizes[i] for i in b])
    expected = np.einsum(subscripts, windows, other)
    for operands, names in (((windows, other), subscripts), ((other, windows), f"{b},{a}->{out}")):
        np.testing.assert_allclose(einsum.einsum_p.bind(*operands, subscripts=names), expected, atol=1e-10)


def test_einsum_path_is_numpys():
    x, y, z = np.ones((2, 3)), np.ones((3, 4)), np.ones(4)
    tape = md.make_tape(lambda x, y: x * len(np.einsum_path("ij,jk,k", x, y, z)[1]))(x, y)
    np.testing.assert_array_equal(tape(x, y)[0], x * len(np.einsum_path("ij,jk,k", x, y, z)[1]))


def full(shape: tuple, dtype: str) -> np.ndarray:
    return np.full(shape, 1.5 if dtype[0] == "f" else np.iinfo(dtype).max if dtype != "?" else True, dtype)


#: Subscripts and operands; sums and products of integers alone would overflow where another operand has floats.
TYPES = [
    *(
        (subscripts, [np.array([[1, 0], [1, 100]], dtype)] * (subscripts.count(",") + 1))
        for subscripts in ("ij->", "ij,ij->i", "ij,kl->jl", "ii", "i...->...")
        for dtype in (bool, np.int8, np.float32)
    ),
    ("...c,...c", [full((3, 1), "f8"), full((3,), "i8")]),
    ("a,a,a", [full((3,), "i1"), full((3,), "i1"), full((3,), "f8")]),
    ("ab,c->c", [full((2, 3), "u1"), full((4,), "f4")]),
]


@each("subscripts, xs", TYPES)
@each("options", [{}, {"dtype": float}])
def test_types_are_numpys(subscripts, xs, options):
    f = lambda *xs: np.einsum(subscripts, *xs, **options)  # noqa: E731
    expected = f(*xs)
    for actual in (md.jit(f)(*xs), md.make_tape(f)(*xs)(*xs)[0], md.vjp(f, *xs)[0]):
        assert md.typeof(actual) == md.typeof(expected)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
