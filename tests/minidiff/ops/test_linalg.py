"""Products: what the table of operations does not say of them."""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff.ops import einsum
from tests.checks.samples import each
from tests.minidiff.refusals import refusals

X, Y = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
modest = settings(max_examples=60, deadline=None)


def steps(f: Callable, *args: Any) -> list[str]:
    """The operations on the tape of `f`, each with the shape of its result."""
    return [f"{e.primitive} {e.outputs[0].type.shape}" for e in md.make_tape(f)(*args).equations]


# ---------------------------------------------------------------- matmul


def test_a_product_is_one_operation():
    assert steps(lambda x, y: x @ y, X, Y) == ["matmul (2, 4)"]
    assert steps(lambda x, y: x @ y, X, Y[:, 0]) == ["matmul (2,)"]
    assert steps(lambda x: x @ x, X[0]) == ["matmul ()"]


def test_a_batch_of_vectors_is_a_matrix():
    xs = np.ones((7, 3))
    assert steps(md.vmap(lambda x: x @ Y), xs) == ["matmul (7, 4)"]
    assert steps(md.vmap(lambda x: X @ x), xs)[-1] == "matmul (7, 2)"
    assert steps(md.vmap(lambda x: X[0] @ x), xs) == ["matmul (7,)"]


def test_weights_shared_by_a_stack_get_their_derivative_in_one_product():
    xs = np.ones((7, 2, 3))
    for f, w in ((lambda w: (xs @ w).sum(), Y), (lambda w: (w @ np.swapaxes(xs, 1, 2)).sum(), Y.T)):
        sizes = [e.outputs[0].type.size for e in md.make_tape(md.grad(f))(w).equations]
        assert max(sizes) <= 7 * 2 * 4  # that of the product: no stack of derivatives


# ---------------------------------------------------------------- einsum

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


@modest
@given(contractions(), st.integers(0, 10**6), st.sampled_from([True, False, "optimal"]))
def test_contractions_are_numpys_and_their_derivatives_adjoint(contraction, seed, optimize):
    subscripts, shapes = contraction
    random = np.random.default_rng(seed)
    xs, ts = ([random.standard_normal(s) for s in shapes] for _ in range(2))

    def f(*xs):
        return np.einsum(subscripts, *xs, optimize=optimize)

    value, tangent = md.jvp(f, xs, ts)
    np.testing.assert_allclose(value, np.einsum(subscripts, *xs), atol=1e-10)
    moved = sum(np.einsum(subscripts, *xs[:i], t, *xs[i + 1 :]) for i, t in enumerate(ts))
    np.testing.assert_allclose(tangent, moved, atol=1e-10)
    cts = md.vjp(f, *xs)[1](value)
    np.testing.assert_allclose(sum((c * t).sum() for c, t in zip(cts, ts)), (value * tangent).sum(), atol=1e-8)
    together = md.vmap(f)(*[np.stack([x, t]) for x, t in zip(xs, ts)])
    np.testing.assert_allclose(together, [value, np.einsum(subscripts, *ts)], atol=1e-10)


def test_many_operands_are_contracted_in_the_best_order():
    x, y, z = np.ones((50, 2)), np.ones((2, 50)), np.ones((50, 1))
    shapes = [s for s in steps(lambda x, y, z: np.einsum("ij,jk,kl->il", x, y, z), x, y, z) if "einsum" in s]
    assert shapes == ["einsum (2, 1)", "einsum (50, 1)"]
    assert steps(lambda *xs: np.linalg.multi_dot(xs), x, y, z) == ["matmul (2, 1)", "matmul (50, 1)"]


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
    np.testing.assert_allclose(einsum.einsum_p.bind(windows, other, subscripts=subscripts), expected, atol=1e-10)
    swapped = f"{b},{a}->{out}"
    np.testing.assert_allclose(einsum.einsum_p.bind(other, windows, subscripts=swapped), expected, atol=1e-10)


def test_einsum_path_is_numpys():
    seen = []
    md.make_tape(lambda x, y: seen.append(np.einsum_path("ij,jk,k", x, y, np.ones(4))) or x)(X, Y)
    assert seen == [np.einsum_path("ij,jk,k", X, Y, np.ones(4))]


@each("subscripts", ["ij->", "ij,ij->i", "ij,kl->jl", "ii", "i...->..."])
@each("dtype", [bool, np.int8, np.float32])
def test_types_are_numpys(subscripts, dtype):
    xs = [np.array([[1, 0], [1, 100]], dtype)] * (subscripts.count(",") + 1)
    expected = np.einsum(subscripts, *xs)
    tape = md.make_tape(lambda *xs: np.einsum(subscripts, *xs))(*xs)
    assert md.typeof(tape(*xs)[0]) == tape.out_types[0] == md.typeof(expected)
    np.testing.assert_array_equal(tape(*xs)[0], expected)


def test_einsum_takes_a_dtype():
    x = np.array([100, 100], np.int8)
    tape = md.make_tape(lambda x: np.einsum("i,i", x, x, dtype=float))(x)
    assert tape(x)[0] == 20000.0


# ---------------------------------------------------------------- convolve


@each("function", [np.convolve, np.correlate])
@each("mode", ["full", "same", "valid"])
@each("n, m", list(itertools.product((1, 2, 3, 5), repeat=2)))
def test_convolutions_of_all_lengths(function, mode, n, m):
    xs, y = np.random.default_rng(0).standard_normal((3, n)), np.ones(m) + 1j * np.arange(m)
    f = functools.partial(function, mode=mode)
    value, tangent = md.jvp(lambda x: f(x, y), (xs[0],), (xs[1],))
    np.testing.assert_allclose(value, f(xs[0], y))
    np.testing.assert_allclose(tangent, f(xs[1], y))
    np.testing.assert_allclose(md.vmap(lambda x: f(x, y))(xs), [f(x, y) for x in xs], atol=1e-12)
    np.testing.assert_allclose(md.vmap(lambda x: f(y, x))(xs), [f(y, x) for x in xs], atol=1e-12)
    np.testing.assert_allclose(md.vmap(f)(xs, xs[::-1]), [f(a, b) for a, b in zip(xs, xs[::-1])], atol=1e-12)


@each("dtype", [np.float64, np.float16, np.complex128])
def test_convolutions_of_infinities(dtype):
    xs, y = np.array([[1.0, np.inf, 2.0], [0.0, 1.0, 3.0]], dtype), np.array([2.0, -np.inf], dtype)
    with np.errstate(all="ignore"):
        for f in (lambda x: np.convolve(x, y), lambda x: np.convolve(y, x)):
            np.testing.assert_array_equal(md.vmap(f)(xs), [f(x) for x in xs])


def test_vectors_of_two_elements_have_a_cross_product_of_one():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert md.grad(lambda x: np.cross(x, np.array([3.0, 4.0])))(np.ones(2)).tolist() == [4.0, -3.0]


# ---------------------------------------------------------------- errors

ERRORS = [
    (lambda x: np.einsum("i$->i", x), r"\$ is not a valid symbol, in 'i\$->i' .* shapes \(2, 3\)"),
    (lambda x: np.einsum("i.->i", x), r"Invalid Ellipses, in 'i\.->i'"),
    (lambda x: np.einsum("ij,jk", x), r"equal to the number of operands, in 'ij,jk'"),
    (lambda x: np.einsum("i", x), r"number of indices for operand 0, in 'i'"),
    (lambda x: np.einsum("ijk...", x), r"Ellipses lengths do not match, in 'ijk\.\.\.'"),
    (lambda x: np.einsum("...i->i", x), r"The result has no ellipsis"),
    (lambda x: np.einsum("ij->ik", x), r"k did not appear in the input, in 'ij->ik'"),
    (lambda x: np.einsum("ij->ii", x), r"i appeared more than once in the output, in 'ij->ii'"),
    (lambda x: np.einsum("ii", x), r"label 'i' for operand 0 \(2\) does not match previous terms \(3\)"),
    (lambda x: np.einsum("ij,jk", x, x), r"label 'j' for operand 1 \(3\) does not match previous terms \(2\)"),
    (lambda x: np.einsum(x, [0, 52]), r"labels must be integers below 52, or '...'; got \[0, 52\]"),
    (lambda x: np.inner(x, x.T), r"inner: last dimensions differ in inner\(f64\[2,3\], f64\[3,2\]\)"),
    (lambda x: np.tensordot(x, x, 1), r"axes \(1,\) of f64\[2,3\] and \(0,\) of f64\[2,3\] differ"),
    (lambda x: np.tensordot(x, x, 3), r"tensordot: 3 axes, but the operands are f64\[2,3\] and"),
    (lambda x: np.vecdot(x, x[:, :1]), r"vecdot: f64\[2,3\] and f64\[2,1\] do not match"),
    (lambda x: np.linalg.outer(x, x), r"expected vectors, got f64\[2,3\] and .*; np\.outer flattens"),
    (lambda x: np.linalg.multi_dot([x]), r"expected at least two arrays, got 1"),
    (lambda x: np.cross(x, x[:, :1]), r"vectors must have 2 or 3 elements, got 3 and 1"),
    (lambda x: np.linalg.cross(x, x, axis=0), r"vectors need 3 elements, got f64\[2,3\]"),
    (lambda x: np.convolve(x, x), r"convolve: operands must be non-empty vectors, got f64\[2,3\]"),
    (lambda x: np.correlate(x[0], x[0, :0]), r"correlate: .* non-empty vectors, got f64\[3\] and f64\[0\]"),
    (lambda x: np.convolve(x[0], x[0], "all"), r"mode must be 'full', 'same' or 'valid', got 'all'"),
    (lambda x: np.trace(x[0]), r"diagonal: .* at least two dimensions.*, got f64\[3\]"),
]
test_errors_say_what_does_not_fit = refusals(ERRORS, lambda f: md.make_tape(f)(X), error=ValueError)


def test_matrices_are_wanted_between_the_ends_of_a_chain():
    with pytest.raises(np.linalg.LinAlgError, match=r"operands must be matrices .* got \[\(2, 3\), \(3,\), \(2, 3\)\]"):
        md.make_tape(lambda x: np.linalg.multi_dot([x, x[0], x]))(X)


@pytest.mark.parametrize(
    "subscripts, shapes, dtypes",
    [
        ("...c,...c", [(3, 1), (3,)], ["f8", "i8"]),
        ("a,a,a", [(3,), (3,), (3,)], ["i1", "i1", "f8"]),
        ("ab,c->c", [(2, 3), (4,)], ["u1", "f4"]),
    ],
)
def test_einsum_computes_in_the_dtype_of_all_operands(subscripts, shapes, dtypes):
    """Sums and products of integers alone would overflow."""
    largest = [1.5 if d[0] == "f" else np.iinfo(d).max for d in dtypes]
    args = list(map(np.full, shapes, largest, dtypes))
    expected = np.einsum(subscripts, *args)
    f = lambda *args: np.einsum(subscripts, *args)  # noqa: E731
    for actual in (md.jit(f)(*args), md.make_tape(f)(*args)(*args)[0], md.vjp(f, *args)[0]):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
