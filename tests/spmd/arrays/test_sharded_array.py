"""ShardedArray: the global value, by its blocks."""

import itertools
import pickle
import sys

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import HealthCheck, example, given, settings

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.compiler.jit import Jitted
from minidiff.core.primitive import Primitive
from spmd import P
from tests.checks.samples import each

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
X = np.arange(4 * 6.0).reshape(4, 6)


def sharded(x, spec):
    return spmd.shard_map(lambda x: x, mesh=MESH, in_specs=spec, out_specs=spec)(x)


@pytest.mark.parametrize("spec", [P("i"), P("j", "i"), P(None, "j"), P(("j", "i"))])
def test_it_is_the_whole_array(spec):
    y = sharded(X, spec)
    assert isinstance(y, spmd.ShardedArray)
    assert (y.shape, y.dtype, y.ndim, y.size, len(y), y.mesh, y.spec) == ((4, 6), float, 2, 24, 4, MESH, spec)
    assert md.typeof(y) == md.typeof(X)
    np.testing.assert_array_equal(np.asarray(y), X)
    np.testing.assert_array_equal(y.gather(), X)
    np.testing.assert_array_equal(y[1:3, ::2], X[1:3, ::2])


def test_blocks_of_each_rank():
    blocks = sharded(X, P("i", "j")).local
    np.testing.assert_array_equal(blocks, [X[:2, :3], X[:2, 3:], X[2:, :3], X[2:, 3:]])


def test_arithmetic_on_arrays_split_alike_keeps_the_split():
    y, z = sharded(X, P("i")), sharded(np.cos(X), P("i"))
    for actual, expected in [
        (2.0 * y + z, 2.0 * X + np.cos(X)),
        (y - z / 3, X - np.cos(X) / 3),
        (np.sin(y) ** 2, np.sin(X) ** 2),
        (np.greater(z, y), np.cos(X) > X),
    ]:
        assert isinstance(actual, spmd.ShardedArray) and actual.spec == P("i")
        np.testing.assert_array_equal(actual, expected)
        assert actual.dtype == expected.dtype


@pytest.mark.parametrize("method", ["max", "min", "argmax", "ravel", "flatten", "transpose", "copy", "tolist"])
def test_methods_of_arrays(method):
    np.testing.assert_array_equal(getattr(sharded(X, P("i")), method)(), getattr(X, method)())


def test_it_prints_as_what_it_is():
    y = sharded(np.arange(4), P("i"))
    assert repr(y) == "ShardedArray([0, 1, 2, 3], P('i'))"
    assert str(y) == "[0 1 2 3]"


def test_derivatives_through_operations_outside():
    def f(x):
        y = spmd.shard_map(np.sin, mesh=MESH, in_specs=P("i", "j"), out_specs=P("i", "j"))(x)
        return (2 * y * y).sum()

    np.testing.assert_allclose(md.grad(f)(X), 4 * np.sin(X) * np.cos(X))
    np.testing.assert_allclose(md.grad(f)(sharded(X, P("i", "j"))), 4 * np.sin(X) * np.cos(X))
    md.testing.check_grads(f, (X / 24,), order=2)


# ---------------------------------------------------------------- specs as propagated

A, B = numpy.sin(X), numpy.cos(np.arange(6 * 8.0)).reshape(6, 8)


#: Functions of A and of the cosines of X, for specs of these: the spec of the result, and what is communicated.
PROPAGATED = [
    # number by number
    (np.add, (P("i"), P("i")), P("i"), {}),
    (np.add, (P("i"), P("j")), P("i"), {"all_gather_invariant": 1}),
    (np.add, (P("i"), P("i", "j")), P("i", "j"), {}),
    (lambda x, y: x * y[0], (P(None, "j"), P("i", "j")), P(None, "j"), {"broadcast": 1}),
    (lambda x: x + A, (P("i", "j"),), P("i", "j"), {}),
    (lambda x: x + A[0], (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.where(x > 0, x, 0.0), (P("j"),), P("j"), {}),
    (lambda x: x.astype("float32"), (P("j"),), P("j"), {}),
    (lambda x: np.clip(x, 0, 1), (P(("i", "j")),), P(("i", "j")), {}),
    (lambda x: -x.conj() + x.real, (P("j"),), P("j"), {}),
    # reductions
    (lambda x: x.sum(axis=0), (P(None, "i"),), P("i"), {}),
    (lambda x: x.sum(axis=0), (P("i"),), P(), {"psum": 1}),
    (lambda x: x.sum(axis=0), (P("i", "j"),), P("j"), {"psum": 1}),
    (lambda x: x.sum(), (P("i", "j"),), P(), {"psum": 1}),
    (lambda x: x.mean(axis=(0, 1), keepdims=True), (P("i", "j"),), P(), {"psum": 1}),
    (lambda x: x.max(axis=1, keepdims=True), (P("i", "j"),), P("i"), {"pmax": 1}),
    (lambda x: x.min(axis=1), (P("i"),), P("i"), {}),
    (lambda x: x.prod(axis=1), (P("i", "j"),), P("i"), {"all_gather_invariant": 1}),
    (lambda x: (x > 0).any(axis=0), (P("i"),), P(), {"pmax": 1}),
    (lambda x: (x > 0).all(axis=0), (P("i"),), P(), {"pmin": 1}),
    (lambda x: x.var(axis=0), (P("i"),), P(), {"psum": 2}),
    (lambda x: x.std(axis=1, ddof=1), (P("i"),), P("i"), {}),
    (lambda x: x.argmax(axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.cumsum(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.sort(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.linalg.norm(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: md.nn.softmax(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: md.nn.softmax(x, axis=0), (P("i"),), P("i"), {"pmax": 1, "psum": 1}),
    (lambda x: md.nn.logsumexp(x, axis=0), (P("i", "j"),), P("j"), {"pmax": 1, "psum": 1}),
    # dimensions elsewhere
    (lambda x: x.T, (P("i", "j"),), P("j", "i"), {}),
    (lambda x: x.transpose(1, 0), (P("i"),), P(None, "i"), {}),
    (lambda x: x.swapaxes(0, 1), (P(("j", "i")),), P(None, ("j", "i")), {}),
    (lambda x: np.moveaxis(x[None], 1, 0), (P("i"),), P("i"), {}),
    (lambda x: x.reshape(2, 2, 6), (P("i", "j"),), P("i", None, "j"), {}),
    (lambda x: x.reshape(4, 2, 3), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: x.ravel(), (P("i"),), P("i"), {}),
    (lambda x: x.ravel(), (P("i", "j"),), P(("i", "j")), {"all_to_all": 1}),
    (lambda x: np.broadcast_to(x, (3, 4, 6)), (P("i", "j"),), P(None, "i", "j"), {}),
    (lambda x: np.concatenate([x, x], axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.concatenate([x, A], axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.stack([x, 2 * x]), (P("i", "j"),), P(None, "i", "j"), {}),
    (lambda x: np.split(x, 2, axis=1)[1], (P("i"),), P("i"), {}),
    (lambda x: x[:, 1:3], (P("i"),), P("i"), {}),
    (lambda x: x[:, 2], (P("i"),), P("i"), {}),
    (lambda x: x[2], (P("i", "j"),), P("j"), {"broadcast": 1}),
    (lambda x: x[..., None, ::2], (P("i"),), P("i"), {}),
    (lambda x: x[:, [0, 2, 2]], (P("i"),), P("i"), {}),
    # products
    (lambda x: x @ B, (P("i"),), P("i"), {}),
    (lambda x: x @ B, (P(None, "i"),), P(), {"psum": 1}),
    (lambda x: x @ B[:, 0], (P("i", "j"),), P("i"), {"psum": 1}),
    (lambda x: (x > 0) @ (B > 0), (P(None, "i"),), P(), {"pmax": 1}),
    (lambda x: x[0] @ B, (P(None, "j"),), P(), {"psum": 1}),
    (lambda x: B.T @ x.T, (P("i"),), P(None, "i"), {}),
    (lambda x, y: x.T @ y, (P("i"), P("i")), P(), {"psum": 1}),
    (lambda x, y: x @ y.T, (P("i"), P("j")), P("i", "j"), {}),
    (lambda x, y: np.einsum("ik,jk->ij", x, y), (P("i", "j"), P(None, "j")), P("i"), {"psum": 1}),
    (lambda x, y: np.tensordot(x, y, axes=([0], [0])), (P("i", "j"), P("i")), P("j"), {"psum": 1}),
    (lambda x, y: np.dot(x, y.T), (P("i"), P()), P("i"), {}),
    (lambda x, y: np.outer(x[:, 0], y[0]), (P("i"), P(None, "j")), P("i", "j"), {}),
    # along dimensions that are not split, and one array of a stack by itself
    (lambda x: np.roll(x, 1, axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.fft.rfft(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.fft.irfft(x, axis=0), (P(None, "j"),), P(None, "j"), {}),
    (lambda x: np.unwrap(x, axis=1), (P("i"),), P("i"), {}),
    (lambda x: np.searchsorted(np.sort(B[0]), x), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.digitize(x, [0.1, 0.5]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.isin(x, A[0]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.interp(x, np.sort(A[0]), B[0, :6]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.stack(list(x.T)), (P("i"),), P(None, "i"), {}),
    (lambda x: np.diagonal(x[:, :4].reshape(4, 2, 2), 0, 1, 2), (P("i"),), P("i"), {}),
    (lambda x: np.linalg.inv(x[:, :4].reshape(4, 2, 2) + 2 * np.eye(2)), (P("i"),), P("i"), {}),
    (lambda x: np.linalg.svd(x.reshape(4, 2, 3))[1], (P("i"),), P("i"), {}),
    (lambda x: np.linalg.solve(np.eye(4) + 0.1, x), (P(None, "j"),), P(None, "j"), {}),
    (lambda x, y: np.linalg.solve(x[:, :4].reshape(4, 2, 2), y[:, :2, None]), (P("i"), P("i")), P("i"), {}),
    # along a dimension that is split: another one is split instead
    (lambda x: np.sort(x, axis=0), (P("i"),), P(None, "i"), {"all_to_all": 2}),
    (lambda x: np.cumsum(x, axis=0), (P("j"),), P("j"), {"all_gather": 1}),
    (lambda x: np.fft.fft(x, axis=0), (P("i"),), P(None, "i"), {"all_to_all": 1}),
    (lambda x: np.concatenate([x, A]), (P("i"),), P(None, "i"), {"all_to_all": 1}),
    (lambda x: x.reshape(2, 2, 6).argmax(axis=0), (P("i"),), P(), {"all_gather_invariant": 2}),
    (lambda x: np.roll(x, 1, axis=0), (P("i", "j"),), P("i", "j"), {"ppermute": 1}),
    (lambda x: (1j * x).max(axis=0), (P("i"),), P("i"), {"all_to_all": 1}),
    # a few places of a dimension that is split
    (lambda x: x[-1], (P(("j", "i")),), P(), {"broadcast": 1}),
    (lambda x: x[1, 4], (P("i", "j"),), P(), {"broadcast": 2}),
    (lambda x: x[None, 3, 1:3], (P("i"),), P(), {"broadcast": 1}),
    # slices of a dimension that is split: in step with the blocks, from their end, of one, of several of them
    (lambda x: x[::2, 1::3], (P("i", "j"),), P("i", "j"), {}),
    (lambda x: x[1::2], (P("i"),), P("i"), {}),
    (lambda x: x[::-1], (P("i", "j"),), P("i", "j"), {"ppermute": 1}),
    (lambda x: x[::-1, 5::-2], (P(("j", "i")),), P(("j", "i")), {"ppermute": 1}),
    (lambda x: x[2::-2, ::-1], (P("i", "j"),), P("i", "j"), {"ppermute": 2}),
    (lambda x: x[:2], (P("i", "j"),), P("i", "j"), {"ppermute": 1}),
    (lambda x: x[1:3], (P(("i", "j")),), P(), {"all_gather_invariant": 1}),
    (lambda x: x[2:0:-1, None, 3:1:-1], (P("i", "j"),), P(), {"all_gather_invariant": 2}),
    (lambda x: x[2:0:-1], (P("i"),), P(), {"all_gather_invariant": 1}),
    (lambda x: x[1:], (P(("i", "j")),), P(), {"all_gather_invariant": 1}),
    (lambda x: x[1:1], (P("i"),), P(), {"broadcast": 1}),
    (lambda x: np.flip(x, 0), (P("i"),), P("i"), {"ppermute": 1}),
    (lambda x: x[np.array([-4])], (P("i"),), P(), {"psum": 1}),
    (lambda x: x[[3, 0], [1, -1]], (P("i", "j"),), P(), {"psum": 1}),
    (lambda x: (x > 0)[[3]], (P("i"),), P(), {"pmax": 1}),
    (lambda x: x[np.arange(40) % 4], (P("i"),), P(None, "i"), {"all_to_all": 1}),  # less than to add up
    # updates
    (lambda x: np.at(x)[1].set(0.0), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[:, 1::2].set(B[:4, :3]), (P("i"),), P("i"), {}),
    (lambda x: np.at(x)[1:3, ::-2].set(B[:2, :3]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[None, 3, ..., 1:1].set(7.0), (P("i"),), P("i"), {}),
    (lambda x: np.at(x)[[3, 0, 3]].set(B[:3, :6]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[[3, 0], [1, -1]].set([5.0, 6.0]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[:, [0, 2]].set(7.0), (P("i"),), P("i"), {}),
    (lambda x: np.at(x)[1:3].add(1.0), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[[3, 0, 3]].add(B[:3, :6]), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[x > 0.5].set(0.0), (P("i", "j"),), P("i", "j"), {}),
    (lambda x: np.at(x)[[0, 1, 1]].max(B[:3, :6]), (P(None, "j"),), P(None, "j"), {}),
    (lambda x, y: np.at(x)[1].set(y[2]), (P("i"), P("i")), P("i"), {"broadcast": 1}),
    # no rule, or no dimension that stays: gathered
    (lambda x: np.linalg.inv(x[:, :4] + np.eye(4)), (P("i"),), P(), {"all_gather_invariant": 1}),
    (lambda x: np.roll(x, 1), (P("i"),), P("i"), {"ppermute": 1}),
]


@each("f, specs, expected, counts", PROPAGATED)
def test_specs_and_communication(f, specs, expected, counts):
    arrays = [A, numpy.cos(X)][: len(specs)]
    args = [spmd.distribute(x, MESH, spec) for x, spec in zip(arrays, specs)]
    out, whole = f(*args), numpy.asarray(f(*arrays))
    numpy.testing.assert_allclose(out, whole, rtol=1e-9)
    assert out.dtype == whole.dtype
    assert getattr(out, "spec", P()) == expected
    report = spmd.communication(f)(*args)
    assert report.counts == counts
    MESH.reset_calls()
    f(*args)
    assert (MESH.calls, sum(MESH.bytes.values())) == (report.counts, report.bytes)


def test_of_two_that_differ_the_larger_one_stays():
    x, y = spmd.distribute(A, MESH, P("i")), spmd.distribute(A.astype("float32"), MESH, P(None, "i"))
    assert (x + y).spec == (y + x).spec == P("i")
    assert spmd.communication(np.add)(x, y).bytes == y.dtype.itemsize * 12


# ---------------------------------------------------------------- derivatives


def weights(*spec):
    return spmd.distribute(B, MESH, P(*spec))


SPECS = [P(), P("i"), P("j"), P(None, "i"), P("i", "j"), P("j", "i"), P(("i", "j")), P(None, ("j", "i"))]


@pytest.mark.parametrize("closed_over", [False, True])
def test_gradients_are_split_as_what_they_are_gradients_of(closed_over):
    """Gradients of a layer, for any layout of inputs and parameters, closed over or not."""
    rows = numpy.concatenate([A, A + 1])[:, :4]
    params = B[:4]

    def loss(x, w):
        return np.mean(np.tanh(x @ w) ** 2)

    expected = md.grad(loss, (0, 1))(rows, params)
    for xs, ws in itertools.product(SPECS, SPECS):
        try:
            x, w = spmd.distribute(rows, MESH, xs), spmd.distribute(params, MESH, ws)
        except ValueError:
            continue
        if closed_over:
            grads = md.grad(lambda x, w=w: loss(x, w))(x), md.grad(lambda w, x=x: loss(x, w))(w)
        else:
            grads = md.grad(loss, (0, 1))(x, w)
        for g, e, spec in zip(grads, expected, (xs, ws)):
            numpy.testing.assert_allclose(g, e, rtol=1e-9)
            assert getattr(g, "spec", P()) == spec


def test_fully_sharded_parameters_are_gathered_and_their_gradients_scattered():
    """The all-gather of a parameter transposes to a reduce-scatter, by the JEP's table: no gradient is ever whole."""
    x, w = spmd.distribute(A[:, :4], MESH, P("i")), spmd.distribute(B[:4], MESH, P("i"))
    report = spmd.communication(lambda w: md.vjp(lambda w: x @ w, w)[1](x @ B[:4]))(w)
    assert report.counts == {"all_gather": 1, "psum_scatter": 1}


@each("spec", [P("i"), P(None, "j"), P("i", "j"), P(("j", "i"))])
@each(
    "f",
    [
        lambda x, v: x[2] * v[0],
        lambda x, v: x[[2, -4, 2]] * v,
        lambda x, v: np.at(x)[1].set(v[0]),
        lambda x, v: np.at(x)[1:3].set(v[:2]),
        lambda x, v: np.at(x)[[3, 0, 3]].set(v),
        lambda x, v: np.at(x)[[3, 0, 3]].add(v),
        lambda x, v: np.at(x)[[3, 0, 3]].max(v),
        lambda x, v: np.at(x)[:, [1, 4]].multiply(v[0, :2]),
        lambda x, v: np.roll(x, 1, axis=1) + np.roll(v[0], 2),
        lambda x, v: np.linalg.solve(x[:, :4] + 4 * np.eye(4), v[0, :4]),
    ],
)
def test_gradients_of_updates_and_look_ups(f, spec):
    """In what is looked up, or updated, and in what is written."""
    v = numpy.cos(B[:3, :6])
    loss = lambda x, v: np.sum(np.sin(f(x, v)))  # noqa: E731
    x, both = spmd.distribute(A, MESH, spec), md.grad(loss, (0, 1))
    for grads in (both(x, v), md.jit(both)(x, v)):
        for g, e in zip(grads, both(A, v)):
            numpy.testing.assert_allclose(g, e, atol=1e-12)
        assert grads[0].spec == spec
    again = md.grad(lambda x: np.sum(md.grad(loss)(x, v) ** 2))
    numpy.testing.assert_allclose(again(x), again(A), atol=1e-12)
    assert again(x).spec == spec
    swapped = md.grad(lambda v: loss(A, v))(spmd.distribute(numpy.concatenate([v, v[:1]]), MESH, P("i"))[:3])
    numpy.testing.assert_allclose(swapped, both(A, v)[1], atol=1e-12)


def test_an_embedding_that_is_split_along_its_words():
    """Each rank looks up the words it has; the gradient of its rows needs nobody else."""
    table, words = spmd.distribute(B, MESH, P(None, "i")).T, numpy.array([[3, 1], [7, 1]])
    assert table.spec == P("i")
    f = lambda table: np.sum(np.sin(table[words]))  # noqa: E731
    assert spmd.communication(md.grad(f))(table).counts == {"psum": 1}  # of what was found, on the way forward
    g = md.grad(f)(table)
    numpy.testing.assert_allclose(g, md.grad(f)(B.T))
    assert g.spec == P("i")


SLICES = st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.sampled_from([None, 1, 2, 3, 4, -1, -2, -3, -4]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([(2, 2), (4, 2), (1, 4), (8, 1)]),
    st.sampled_from([P("i"), P(None, "i"), P("i", "j"), P("j", "i"), P(("j", "i")), P("j", None, "i")]),
    st.lists(SLICES | st.integers(-8, 7) | st.none(), max_size=3).filter(lambda i: i.count(None) < 2),
)
@example((4, 2), P("i", "j"), [slice(6, 0, -3), None, slice(3, 5)])
@example((2, 2), P(("j", "i")), [slice(3, 3)])
@example((4, 2), P("i"), [slice(None, None, 4)])
def test_any_slice(shape, spec, index):
    """Its values, its gradient, an update at it: as of the whole. What is counted is done, and never dearer than it."""
    mesh = spmd.make_mesh(shape, ("i", "j"), backend="simulated")
    whole = numpy.sin(numpy.arange(8.0 * 8 * 8)).reshape(8, 8, 8)
    x, index = spmd.distribute(whole, mesh, spec), tuple(index)
    gathered = sum(step.bytes for step in spmd.arrays.reshard.route_of(x, mesh, spec, P()))

    def run(f):
        mesh.reset_calls()
        result = f(x)
        report = spmd.communication(f)(x)
        assert (mesh.calls, sum(mesh.bytes.values())) == (report.counts, report.bytes)
        return result, report

    part, report = run(lambda x: x[index])
    numpy.testing.assert_array_equal(part, whole[index])
    assert report.bytes <= max(gathered, whole[index].nbytes)
    f = lambda x: np.sum(np.sin(x[index]) * np.cos(whole[index]))  # noqa: E731
    gradient = run(md.grad(f))[0]
    assert gradient.spec == spec
    numpy.testing.assert_allclose(gradient, md.grad(f)(whole))
    written, report = run(lambda x: x.at[index].set(7 * np.cos(whole[index])))
    assert written.spec == spec and not report.rows
    expected = whole.copy()
    expected[index] = 7 * np.cos(whole[index])
    numpy.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64", "int64"])
def test_indices_of_any_integers_that_are_split_themselves(dtype):
    """They are looked up among sharded rows; one that is out of bounds is an error, as in NumPy."""
    rows = numpy.arange(2.0 * 200).reshape(200, 2)
    x, i = spmd.distribute(rows, MESH, P("i")), numpy.array([100, 3, 127, 99]).astype(dtype)
    for spec in (P("j"), P("i")):
        numpy.testing.assert_array_equal(x[spmd.distribute(i, MESH, spec)], rows[i])
    if dtype == "int64":
        numpy.testing.assert_array_equal(x[spmd.distribute(i - 128, MESH, P("j"))], rows[i - 128])
        for wrong in (200, -201):
            with pytest.raises(IndexError, match="out of bounds"):
                x[spmd.distribute(numpy.array([0, wrong]), MESH, P("j"))]


def test_gradients_through_reductions_share_ties_as_numpy_does():
    x = numpy.array([[1.0, 3.0, 3.0, 0.0], [3.0, 3.0, 2.0, 0.0]])
    for f in (np.max, np.min, np.prod, np.std, lambda x: np.sum(np.sort(x, axis=None)[2:])):
        g = md.grad(f)(spmd.distribute(x, MESH, P("i", "j")))
        numpy.testing.assert_allclose(g, md.grad(f)(x))
        assert g.spec == P("i", "j")


def test_a_parameter_without_influence_has_zeros_split_alike():
    w = weights("j")
    g = md.grad(lambda w: np.sum(A))(w)
    assert g.spec == P("j") and not g.gather().any()
    assert md.vjp(lambda w: np.sum(A), w)[1](1.0)[0].spec == P("j")


def test_other_transformations():
    x, w = spmd.distribute(A, MESH, P("i")), weights(None, "j")

    def f(w, x=x):
        return np.sum(np.tanh(x @ w) ** 2)

    g, expected = md.grad(f), md.grad(lambda w: f(w, A))
    numpy.testing.assert_allclose(md.jvp(f, (w,), (w,))[1], np.sum(expected(B) * B))
    hessian = md.grad(lambda w: np.sum(g(w) * w))(w)
    numpy.testing.assert_allclose(hessian, md.grad(lambda w: np.sum(expected(w) * w))(B))
    assert hessian.spec == md.jit(g)(w).spec == P(None, "j")
    numpy.testing.assert_allclose(md.jit(g)(w), expected(B))
    tape = md.make_tape(g)(w)
    tape.check()
    numpy.testing.assert_allclose(tape(w)[0], expected(B))
    numpy.testing.assert_allclose(md.vmap(lambda r: np.sin(r) * r.sum())(x), np.sin(A) * A.sum(1, keepdims=True))
    assert md.vmap(lambda r: np.sin(r) * r.sum())(x).spec == P("i")
    per_row = md.vmap(md.grad(lambda w, r: f(w, r)), in_axes=(None, 0))
    numpy.testing.assert_allclose(per_row(w, x[:, None]), per_row(B, A[:, None]))
    numpy.testing.assert_allclose(md.checkpoint(f)(w), f(B, A))
    numpy.testing.assert_allclose(md.grad(md.checkpoint(f))(w), expected(B))
    final, _ = md.scan(lambda c, r: (np.tanh(c + r @ B[:, :6]), None), np.zeros(6), x)
    numpy.testing.assert_allclose(final, md.scan(lambda c, r: (np.tanh(c + r @ B[:, :6]), None), np.zeros(6), A)[0])


# ---------------------------------------------------------------- random programs

ONE = {
    "sin": np.sin,
    "times": lambda x: 0.5 * x,
    "transpose": lambda x: x.T,
    "sum rows": lambda x: x + 0.1 * x.sum(axis=0),
    "sum columns": lambda x: x - 0.1 * x.sum(axis=1, keepdims=True),
    "mean": lambda x: x * x.mean(),
    "max": lambda x: x - 0.3 * x.max(axis=0),
    "reshape": lambda x: np.tanh(x.reshape(2, 4, 8)).reshape(8, 8),
    "ravel": lambda x: np.cos(x.ravel()).reshape(8, 8),
    "concatenate": lambda x: np.concatenate([x[:4], 2 * x[4:]]),
    "slice": lambda x: x[:, :4] @ x[:4],
    "take": lambda x: x[np.array([3, 1, 3, 0, 7, 7, 2, 5])],
    "one row": lambda x: x * x[5] + x[-1, 2],
    "look up": lambda x: x + x[[6], 1:3].sum(),
    "update": lambda x: np.at(x)[1:6:2].set(0.5 * x[:3]),
    "scatter": lambda x: np.at(x)[np.array([3, 1, 3])].set(np.cos(x[4:7])),
    "where": lambda x: np.where(x > 0.1, x, -0.5),
    "cumsum": lambda x: np.cumsum(x, axis=1) / 8,
    "softmax": lambda x: md.nn.softmax(x, axis=0),
    "var": lambda x: x / (1 + x.var(axis=1, keepdims=True)),
    "roll": lambda x: np.roll(x, 1, axis=0),
}
TWO = {
    "add": np.add,
    "multiply": np.multiply,
    "matmul": lambda x, y: x @ y / 8,
    "einsum": lambda x, y: np.einsum("ij,kj->ik", x, y) / 8,
    "outer": lambda x, y: x[:, 0, None] * y[0],
    "stack": lambda x, y: np.stack([x, y]).sum(0),
}
MESHES = {shape: spmd.make_mesh(shape, ("i", "j"), backend="simulated") for shape in ((2, 2), (4, 2))}


def run(steps, arrays):
    values = list(arrays)
    for name, i, j in steps:
        values.append(
            ONE[name](values[i % len(values)])
            if name in ONE
            else TWO[name](values[i % len(values)], values[j % len(values)])
        )
    return values[-1]


def step(names):
    return st.tuples(st.sampled_from(sorted(names)), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(MESHES)),
    st.lists(st.sampled_from(SPECS), min_size=3, max_size=3),
    st.lists(step({**ONE, **TWO}), min_size=1, max_size=5),
)
@example((4, 2), [P("i"), P(), P()], [("reshape", 0, 0)])
@example((2, 2), [P("i"), P("j"), P()], [("matmul", 0, 1), ("max", 3, 0), ("einsum", 4, 2)])
def test_random_programs(shape, specs, steps):
    """The value, the gradients and a tangent are those of the whole arrays; what is counted is what is done."""
    mesh = MESHES[shape]
    whole = [numpy.sin(numpy.arange(64.0) * k).reshape(8, 8) for k in (1, 2, 3)]
    args = [spmd.distribute(x, mesh, spec) for x, spec in zip(whole, specs)]

    def f(*arrays):
        return np.sum(np.sin(run(steps, arrays)))

    numpy.testing.assert_allclose(run(steps, args), run(steps, whole), rtol=1e-7, atol=1e-9)
    both, chosen = md.value_and_grad(f, (0, 1, 2)), (0, 1, 2)
    mesh.reset_calls()
    value, grads = both(*args)
    calls = mesh.calls
    expected_value, expected = both(*whole)
    numpy.testing.assert_allclose(value, expected_value, rtol=1e-7)
    for g, e, spec in zip(grads, expected, specs):
        numpy.testing.assert_allclose(g, e, rtol=1e-6, atol=1e-8)
        assert getattr(g, "spec", P()) == spec
    assert len(chosen) == 3 and spmd.communication(both)(*args).counts == calls
    tangent = md.jvp(f, args, args)[1]
    numpy.testing.assert_allclose(tangent, sum(np.sum(g * x) for g, x in zip(expected, whole)), rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- loops


def _trained(w, xs):
    def step(w, x):
        value, gradient = md.value_and_grad(lambda w: np.sum(np.tanh(w @ x) ** 2))(w)
        return w - 0.1 * gradient, value

    return md.scan(step, w, xs)


def _mapped(w, h):
    """By a `shard_map` of its own, what the way back needs staying on its ranks."""
    where = {"mesh": MESH, "in_specs": (P("i", "j"), P("j")), "out_specs": P("i")}
    return spmd.shard_map(lambda w, h: np.tanh(psum(np.sin(w) @ h, "j")), **where)(w, h)


LOOPS = {
    "of shard_maps": lambda w, xs: md.scan(lambda h, x: (_mapped(w, h) * x, h[1]), xs[0], xs),
    "recurrent": lambda w, xs: md.scan(lambda h, x: (np.tanh(h @ w + x), h.sum()), xs[1], xs),
    "from zeros": lambda w, xs: md.scan(lambda h, x: (np.tanh(w @ h + x), h * x), np.zeros(4), xs, reverse=True),
    "layers": lambda w, xs: md.scan(lambda h, w: (np.tanh(w @ h), h), xs, np.stack([w, 2 * w, w.T])),
    "changing places": lambda w, xs: md.scan(lambda w, x: (w.T * x, w[1]), w, xs),
    "trained": _trained,
    "counted": lambda w, xs: [md.fori_loop(0, 3, lambda i, h: np.sin(w @ h), xs[:4].T)],
}


@pytest.mark.parametrize("specs", [(P("i"), P("i")), (P("j", "i"), P(None, "j")), (P(), P("i", "j"))], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name, specs, monkeypatch):
    """Their values and gradients, run and compiled; and compiled, what is counted is done, that of each step too."""
    w, xs = numpy.sin(numpy.arange(16.0)).reshape(4, 4), numpy.cos(numpy.arange(24.0).reshape(6, 4))
    xs = xs[:4] if name == "layers" else xs
    args = [spmd.distribute(x, MESH, spec) for x, spec in zip((w, xs), specs)]
    loop = LOOPS[name]
    total = md.grad(lambda *args: sum(np.sum(np.sin(y)) for y in loop(*args)), (0, 1))
    for f in (loop, total):
        expected, compiled = md.tree.leaves(f(w, xs)), md.jit(f)
        MESH.reset_calls()
        with monkeypatch.context() as patch:
            patch.delattr(spmd.ShardedArray, "gather")  # which simulated ranks do not count
            result = md.tree.leaves(compiled(*args))
        report = spmd.communication(compiled, optimized=True)(*args)
        assert (MESH.calls, sum(MESH.bytes.values())) == (report.counts, report.bytes)
        tape = md.make_tape(f)(*args)
        tape.check()
        for ways in (result, md.tree.leaves(f(*args)), tape(*args)):
            for x, e in zip(ways, expected):
                numpy.testing.assert_allclose(x, e, rtol=1e-7, atol=1e-12)


def test_carries_are_sharded_as_steps_leave_them():
    """Not as it starts: it is brought there once, and no step moves it."""
    w = spmd.distribute(numpy.ones((4, 4)), MESH, P("i"))
    loop = lambda h: md.fori_loop(0, 5, lambda i, h: w * h.sum(), h)  # noqa: E731
    for start, moved in [(P("i"), {}), (P(), {}), (P(None, "i"), {"all_to_all": 1})]:
        h = spmd.distribute(numpy.ones((4, 4)), MESH, start)
        assert spmd.communication(loop)(h).counts == {"psum": 5, **moved}
        assert md.jit(loop)(h).spec == P("i")


# ---------------------------------------------------------------- NumPy's ways in


def test_functions_of_numpy_itself():
    y = sharded(X, P("i"))
    for out, expected in [
        (numpy.sin(y), numpy.sin(X)),
        (numpy.add.reduce(y, axis=1), X.sum(1)),
        (numpy.sum(y, axis=1), X.sum(1)),
        (X + y, 2 * X),
        (numpy.float64(2) * y, 2 * X),
        (numpy.zeros_like(y), 0 * X),
        (numpy.full_like(y, 2.0), 2 + 0 * X),
    ]:
        assert isinstance(out, spmd.ShardedArray) and out.spec == P("i")
        numpy.testing.assert_array_equal(out, expected)
    z = numpy.ones((4, 6))
    z += y
    numpy.testing.assert_array_equal(z, X + 1)
    numpy.testing.assert_array_equal(numpy.histogram(y)[0], numpy.histogram(X)[0])
    numpy.testing.assert_array_equal(numpy.add(y, y, where=X > 3, out=numpy.zeros((4, 6))), 2 * X * (X > 3))
    assert [float(np.sum(r)) for r in y] == list(X.sum(1))
    numpy.testing.assert_array_equal(y[y > 3], X[X > 3])
    numpy.testing.assert_array_equal(y.at[1].set(0.0), np.where(np.arange(4)[:, None] == 1, 0, X))
    assert float(y[1, 1]) == 7 and y.sum().item() == X.sum() and y.tolist() == X.tolist()


@pytest.mark.parametrize(
    "write",
    [
        lambda y: numpy.add(y, 1, out=y),
        lambda y: numpy.spacing(y, out=y),
        lambda y: numpy.add.at(y, 0, 1),
        lambda y: numpy.sum(y, axis=0, out=y),
        lambda y: numpy.nanmax(y, axis=0, out=y),
        lambda y: numpy.copyto(y, 3.0),
        lambda y: numpy.put(y, [0], [3.0]),
        lambda y: numpy.fill_diagonal(y, 3.0),
    ],
)
def test_functions_of_numpy_do_not_write_into_it(write):
    """Writing into a copy is an error, not a silent loss."""
    y = sharded(X, P("i"))
    with pytest.raises(TypeError, match=r"write y = np|np\.at\(x\)\["):
        write(y)
    numpy.testing.assert_array_equal(y, X)


@pytest.mark.parametrize("spec", [P("i"), P(None, "j"), P("i", "j")])
def test_distribute_and_gather_copy(spec):
    """Who writes into the array that was distributed, or into what was gathered, does not mean the sharded one."""
    whole = X.copy()
    y = spmd.distribute(whole, MESH, spec)
    whole += 1
    y.gather()[:] = 7
    numpy.asarray(y)[:] = 7
    numpy.testing.assert_array_equal(y, X)


def test_operands_on_different_meshes():
    """The first operand stays where it is, the others are gathered: both ways, for the derivatives too."""
    other = spmd.make_mesh((2,), ("k",), backend="simulated")
    x, y = sharded(X, P("i")), spmd.distribute(2 * X, other, P("k"))
    f = lambda x, y: np.sin(x) * y  # noqa: E731
    z = f(x, y)
    assert (z.mesh, z.spec) == (x.mesh, x.spec)
    numpy.testing.assert_allclose(z, np.sin(X) * 2 * X)
    assert spmd.communication(f)(x, y).counts == {"all_gather_invariant": 1}
    dx, dy = md.grad(lambda x, y: f(x, y).sum(), (0, 1))(x, y)
    numpy.testing.assert_allclose(dx, np.cos(X) * 2 * X)
    numpy.testing.assert_allclose(dy, np.sin(X))
    assert (dx.mesh, dx.spec, dy.mesh, dy.spec) == (x.mesh, x.spec, y.mesh, y.spec)


def test_meshes_of_the_same_ranks_are_one():
    """Over one as over the other: after a cell of a notebook has run again, or an array has been unpickled."""
    again = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
    other = spmd.make_mesh((2, 2), ("j", "i"), backend="simulated")
    x, y = sharded(X, P("i", "j")), spmd.distribute(2 * X, again, P("i", "j"))
    local = sharded(X, P("i", "j"))
    assert MESH.is_like(again) and not MESH.is_like(other)
    mapped = spmd.shard_map(np.sin, mesh=again, in_specs=P("i", "j"), out_specs=P("i", "j"))
    f = lambda x, y: np.sum(x * mapped(x) + pickle.loads(pickle.dumps(local)) * y)  # noqa: E731
    both = md.value_and_grad(f, (0, 1))
    for result, expected in [*zip(md.tree.leaves(both(x, y)), md.tree.leaves(both(X, 2 * X)))]:
        numpy.testing.assert_allclose(result, expected)
    assert spmd.communication(both)(x, y).counts == {"psum": 1}
    assert spmd.communication(lambda y: spmd.reshard(y + x, P("i")))(y).counts == {"all_gather_invariant": 1}
    assert not spmd.communication(md.vmap(lambda y, x: x + spmd.distribute(y, MESH, P("j"))))(y, x).rows


def test_a_body_that_closes_over_it_has_it_whole():
    y = sharded(X, P("i"))
    f = spmd.shard_map(lambda r: r @ y, mesh=MESH, in_specs=P("j"), out_specs=P("j"))
    numpy.testing.assert_array_equal(f(X[:, :4]), X[:, :4] @ X)
    g = md.grad(lambda r: np.sum(f(r) ** 2))(X[:, :4])
    numpy.testing.assert_allclose(g, md.grad(lambda r: np.sum((r @ X) ** 2))(X[:, :4]))


def test_what_a_body_closes_over_is_gathered_in_sight():
    """By a collective that is counted, and that the report shows; the cotangent goes back by one too."""
    y = sharded(X, P("i"))

    def f(y):
        return spmd.shard_map(lambda r: np.sin(r @ y), mesh=MESH, in_specs=P("j"), out_specs=P("j"))(A[:, :4])

    for g, counts in [(f, {"all_gather_invariant": 1}), (md.jit(f), {"all_gather_invariant": 1})]:
        MESH.reset_calls()
        numpy.testing.assert_allclose(g(y), numpy.sin(A[:, :4] @ X))
        assert MESH.calls == spmd.communication(g)(y).counts == counts
    both = md.grad(lambda y: np.sum(f(y)))
    MESH.reset_calls()
    numpy.testing.assert_allclose(both(y), A[:, :4].T @ numpy.cos(A[:, :4] @ X), atol=1e-12)
    assert MESH.calls == spmd.communication(both)(y).counts


def _of_one(e, w):
    return np.sum(np.tanh(e @ w + e) * e.max())


def _of_one_resharded(e, w):
    e = spmd.distribute(2 * e, MESH, P("j"))
    return np.sum(spmd.reshard(e, P()) * np.sin(e))


def _of_one_mapped(e, w):
    body = lambda e, w: psum((e * w.sum(1)).sum(), "j")  # noqa: E731
    return spmd.shard_map(body, mesh=MESH, in_specs=(P("j"), P("j")), out_specs=P())(e, w)


EACH = {
    "gradients": lambda f: md.vmap(md.grad(f), (0, None)),
    "of what is closed over": lambda f: md.vmap(md.grad(f, 1), (0, None)),
    "along another axis": lambda f: md.vmap(md.grad(f), (1, None), out_axes=1),
    "second": lambda f: md.vmap(md.hessian(f), (0, None)),
    "tangents": lambda f: md.vmap(lambda e, w: md.jvp(lambda e: f(e, w), (e,), (e,))[1], (0, None)),
    "compiled": lambda f: md.vmap(md.jit(md.grad(f)), (0, None)),
    "compiled as a whole": lambda f: md.jit(md.vmap(md.grad(f), (0, None))),
    "from outside": lambda f: md.grad(lambda b, w: np.sum(md.vmap(f, (0, None))(b, w) ** 2), (0, 1)),
    "of these, too": lambda f: md.grad(lambda b, w: np.sum(md.vmap(md.grad(f), (0, None))(b, w) ** 2), (0, 1)),
    "computed again": lambda f: md.vmap(md.grad(md.checkpoint(f)), (0, None)),
}


@each("f", [_of_one, _of_one_resharded, _of_one_mapped])
@each("name", EACH)
def test_derivatives_of_each_element_of_a_batch_that_is_split(name, f):
    """Results are those of whole arrays, counts are those of the run, and elementwise batches are not gathered."""
    each, (b, w) = EACH[name](f), (B[:6, :6], numpy.sin(B[:6, :6]))
    expected = md.tree.leaves(each(b, w))
    for spec, weights in [(P("i"), P()), (P("i", "j"), P()), (P("i"), P("j")), (P(None, "j"), P("i"))]:
        args = spmd.distribute(b, MESH, spec), spmd.distribute(w, MESH, weights)
        MESH.reset_calls()
        result = md.tree.leaves(each(*args))
        assert MESH.calls == spmd.communication(each, optimized=isinstance(each, Jitted))(*args).counts
        if f is _of_one and spec == P("i") and weights == P() and not name.startswith(("along", "from", "of these")):
            assert MESH.calls == {} and result[0].spec == P("i")
        for x, e in zip(result, expected):
            numpy.testing.assert_allclose(x, e, rtol=1e-7, atol=1e-9)


def test_a_batch_that_is_split_through_a_shard_map():
    """A body maps over its own dimensions alone: the batch is gathered, by a visible collective."""
    y = sharded(X, P("i", "j"))
    f = md.vmap(spmd.shard_map(lambda r: r * psum(r.sum(), "j"), mesh=MESH, in_specs=P("j"), out_specs=P("j")))
    MESH.reset_calls()
    numpy.testing.assert_allclose(f(y), X * X.sum(1, keepdims=True))
    assert MESH.calls == spmd.communication(f)(y).counts == {"all_gather_invariant": 1, "psum": 1}


def test_membership():
    y = sharded(X, P("i"))
    assert 7.0 in y and 7.5 not in y and X[1] in y
    assert md.grad(lambda x: x.sum() * (7.0 in x))(y).tolist() == np.ones_like(X).tolist()


def test_what_numpy_says_of_memory():
    y = sharded(X, P("i"))
    assert (y.nbytes, y.itemsize) == (X.nbytes, X.itemsize)


def test_every_operation_declares_its_dimensions():
    result = [
        x for name, m in [*sys.modules.items()] if name.startswith(("minidiff", "spmd")) for x in vars(m).values()
    ]
    operations = {p for x in result if isinstance(p := getattr(x, "primitive", x), Primitive)}
    assert len(operations) > 150
    silent = {p.name for p in operations if p.sharding is None and not (p.is_higher_order or p.on_ranks)}
    assert silent == {"reshard"}  # it has a sharding of its own
    with pytest.raises(
        TypeError, match=r"silent does not say how its dimensions correspond.*declare it with sharding="
    ):
        Primitive("silent", np.sin, lambda x: (x.shape, x.dtype)).bind(sharded(X, P("i")))


def test_errors():
    y = sharded(X, P("i"))
    with pytest.raises(TypeError, match=r"a ShardedArray cannot be written into.*x.at\[i\].set"):
        y[0] = 1
    with pytest.raises(ValueError, match=r"matmul: inner dimensions differ in f64\[4,6\] @ f64\[4,6\]"):
        y @ y
    with pytest.raises(ValueError, match="cannot be broadcast together"):
        y + numpy.ones(5)
    leaked = []
    md.grad(lambda x: (leaked.append(x), x.sum())[1])(X)
    with pytest.raises(md.LeakedTracerError):
        y + leaked[0]


# ---------------------------------------------------------------- nothing to split

NOTHING = [(0,), (0, 2), (2, 0)]
OF_NOTHING = {
    **{f.__name__: f for f in (np.sin, np.sum, np.cumsum, np.sort, np.transpose, np.ravel, np.squeeze, np.copy)},
    **{f.__name__: f for f in (np.flip, np.flipud, np.fliplr, np.rot90, np.mean, np.diff, np.var, np.tril)},
    **{str(i): lambda x, i=i: x[i] for i in np.index_exp[::-1, ::2, 1:, :1, ..., ..., ::-1, None, 0:0, []]},
    "columns backwards": lambda x: x[..., ::-1],
    "all backwards": lambda x: x[(slice(None, None, -1),) * x.ndim],
    "every other one, backwards": lambda x: x[::-2],
    "roll": lambda x: np.roll(x, 1, -1),
    "joined": lambda x: np.concatenate([x, x]),
    "product": lambda x: x @ x.T,
    "reshape": lambda x: x.reshape(-1),
    "update": lambda x: np.at(x)[:].set(1.0),
    "repeat": lambda x: np.repeat(x, 2, 0),
    "pad": lambda x: np.pad(x, 1),
    "fft": lambda x: np.fft.fft(x),
    "split": lambda x: np.split(x, 2),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("name", OF_NOTHING)
def test_dimensions_of_size_0(name):
    f = OF_NOTHING[name]
    for shape in NOTHING:
        x = numpy.zeros(shape)
        try:
            expected = md.tree.leaves(f(x))
        except ValueError:  # NumPy's mean, fft or fliplr of too little
            continue
        for d, n in enumerate(shape):
            sharded = spmd.distribute(x, MESH, P(*[None] * d, "j" if n % 4 else ("i", "j")))
            gradient = md.grad(lambda x: sum(np.abs(y).sum() for y in md.tree.leaves(f(x)) if y.dtype.kind in "fc"))
            assert gradient(sharded).shape == shape
            for run in (f, md.jit(f)):
                for y, z in zip(md.tree.leaves(run(sharded)), expected, strict=True):
                    np.testing.assert_array_equal(np.asarray(y), z, strict=True)
