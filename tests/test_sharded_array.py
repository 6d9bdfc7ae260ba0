"""ShardedArray: the global value, by its blocks."""

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P

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


def test_other_operations_gather():
    y, z = sharded(X, P("i")), sharded(X, P("j"))
    pairs = [(y + z, 2 * X), (y @ X.T, X @ X.T), (y.T, X.T), (np.sum(y, axis=0), X.sum(0)), (y + X, 2 * X)]
    for actual, expected in pairs:
        assert isinstance(actual, np.ndarray)
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.concatenate([y, z]), np.concatenate([X, X]))
    np.testing.assert_array_equal(y.mean(axis=1), X.mean(axis=1))


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
