"""ShardedArray: the global value, by its blocks; for NumPy, derivatives and batches it is the whole array."""

import itertools
import pickle

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.compiler.jit import Jitted
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_derivatives
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

PLANE = mesh(2, 2)
X = np.arange(4 * 6.0).reshape(4, 6)
A, C = np.sin(X), np.cos(np.arange(48.0)).reshape(6, 8)


def sharded(x=X, spec=P("i")):
    return spmd.distribute(x, PLANE, spec)


@each("spec", [P("i"), P("j", "i"), P(("j", "i"))])
def test_it_is_the_whole_array(spec):
    y = sharded(X, spec)
    assert (y.shape, y.dtype, y.ndim, y.size, len(y), y.mesh, y.spec) == ((4, 6), float, 2, 24, 4, PLANE, spec)
    assert (md.typeof(y), y.nbytes, y.itemsize) == (md.typeof(X), X.nbytes, X.itemsize)
    for whole in (np.asarray(y), y.gather(), pickle.loads(pickle.dumps(y))):
        np.testing.assert_array_equal(whole, X)
    if spec == P("j", "i"):
        np.testing.assert_array_equal(y.local, [X[:2, :3], X[2:, :3], X[:2, 3:], X[2:, 3:]])
    y = sharded(np.arange(4))
    assert (repr(y), str(y)) == ("ShardedArray([0, 1, 2, 3], P('i'))", "[0 1 2 3]")


#: Of an array alone, by NumPy and its methods; results are split as it is.
SPLIT_ALIKE = [
    lambda y: 2.0 * y + np.cos(y),
    lambda y: np.greater(np.cos(y), y),
    lambda y: numpy.sin(y),
    lambda y: numpy.add.reduce(y, axis=1),
    lambda y: numpy.sum(y, axis=1),
    lambda y: X + y,
    lambda y: numpy.float64(2) * y,
    lambda y: numpy.full_like(y, 2.0),
    lambda y: y.at[1].set(0.0) if hasattr(y, "at") else np.at(y)[1].set(0.0),
]
METHODS = ("max", "argmax", "ravel", "flatten", "transpose", "copy", "tolist")
#: And results that are not.
WHOLE = [
    *(lambda y, m=m: getattr(y, m)() for m in METHODS),
    lambda y: numpy.histogram(y)[0],
    lambda y: numpy.add(y, y, where=X > 3, out=numpy.zeros((4, 6))),
    lambda y: [float(np.sum(row)) for row in y],
    lambda y: y[y > 3],
    lambda y: (float(y[1, 1]), y.sum().item()),
    lambda y: (7.0 in y, 7.5 in y, X[1] in y),
    lambda y: numpy.ones((4, 6)).__iadd__(y),
]


@each("f", [*SPLIT_ALIKE, *WHOLE])
def test_functions_and_methods_of_numpy(f):
    actual, expected = f(sharded()), f(X)
    np.testing.assert_array_equal(actual, expected)
    if f in SPLIT_ALIKE:
        assert (actual.spec, actual.dtype) == (P("i"), expected.dtype)


WRITES = [
    lambda y: y.__setitem__(0, 1),
    lambda y: numpy.add(y, 1, out=y),
    lambda y: numpy.spacing(y, out=y),
    lambda y: numpy.add.at(y, 0, 1),
    lambda y: numpy.nanmax(y, axis=0, out=y),
    lambda y: numpy.copyto(y, 3.0),
]


@each("write", WRITES)
def test_nothing_is_written_into_it(write):
    """Writing into a copy would be a silent loss."""
    y = sharded()
    with pytest.raises(TypeError):
        write(y)
    numpy.testing.assert_array_equal(y, X)


@each("spec", [P("i"), P(None, "j"), P("i", "j")])
def test_distribute_and_gather_copy(spec):
    """An operation that moves nothing shares the blocks, since nobody can write into them."""
    whole = X.copy()
    y = sharded(whole, spec)
    whole += 1
    y.gather()[:] = 7
    numpy.asarray(y)[:] = 7
    numpy.testing.assert_array_equal(y, X)
    with pytest.raises(ValueError):
        y.local[0][0] = 3.0
    assert numpy.shares_memory(mapped(lambda x: x, PLANE, spec, spec)(y).data, y.data)


# ---------------------------------------------------------------- derivatives, meshes, bodies

MIXED = lambda x, y: np.sin(x) * y  # noqa: E731
LOSS = lambda x, w: np.sum(np.tanh(x @ w) ** 2)  # noqa: E731
GATHER = {"all_gather_invariant": 1}
OTHER = mesh(2, names="k")
#: A function of sharded arrays, these, the same of whole ones, and what is communicated.
CASES = {
    "the first operand stays on its mesh": (MIXED, [sharded(), spmd.distribute(2 * X, OTHER, P("k"))], MIXED, GATHER),
    "a body that closes over it gathers it": (
        lambda y: mapped(lambda r: np.sin(r @ y), PLANE, P("j"), P("j"))(A[:, :4]),
        [sharded()],
        lambda y: np.sin(A[:, :4] @ y),
        GATHER,
    ),
    "a body maps over its dimensions alone: a batch is gathered": (
        md.vmap(mapped(lambda r: r * psum(r.sum(), "j"), PLANE, P("j"), P("j"))),
        [sharded(X, P("i", "j"))],
        lambda x: x * x.sum(1, keepdims=True),
        {**GATHER, "psum": 1},
    ),
    "a loss": (LOSS, [sharded(A), sharded(C, P(None, "j"))], LOSS, {"psum": 1}),
    "computed again": (md.checkpoint(LOSS), [sharded(A), sharded(C, P(None, "j"))], LOSS, {"psum": 1}),
}


@each("name", CASES)
def test_values_derivatives_and_counts(name):
    f, args, whole, counts = CASES[name]
    check_derivatives(f, args, whole, spmd.gather(args))
    assert spmd.communication(f)(*args).counts == counts
    PLANE.reset_calls()
    f(*args)
    assert PLANE.calls in (counts, {})
    gradients = md.grad(lambda *args: np.sum(f(*args)), tuple(range(len(args))))(*args)
    assert [(g.mesh, g.spec) for g in gradients] == [(x.mesh, x.spec) for x in args]


def test_meshes_of_the_same_ranks_are_one():
    """Over one as over the other: after a cell of a notebook has run again, or an array has been unpickled."""
    again = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
    assert PLANE.is_like(again) and not PLANE.is_like(mesh(2, 2, names="ji"))
    x, y = sharded(X, P("i", "j")), spmd.distribute(2 * X, again, P("i", "j"))
    on_again, unpickled = mapped(np.sin, again, P("i", "j"), P("i", "j")), pickle.loads(pickle.dumps(x))
    both = md.value_and_grad(lambda x, y: np.sum(x * on_again(x) + unpickled * y), (0, 1))
    assert_trees_close(both(x, y), both(X, 2 * X))
    assert spmd.communication(both)(x, y).counts == {"psum": 1}
    assert not spmd.communication(md.vmap(lambda y, x: x + spmd.distribute(y, PLANE, P("j"))))(y, x).rows


def _of_one(e, w):
    return np.sum(np.tanh(e @ w + e) * e.max())


def _of_one_resharded(e, w):
    e = spmd.distribute(2 * e, PLANE, P("j"))
    return np.sum(spmd.reshard(e, P()) * np.sin(e))


def _of_one_mapped(e, w):
    return mapped(lambda e, w: psum((e * w.sum(1)).sum(), "j"), PLANE, (P("j"), P("j")), P())(e, w)


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
LAYOUTS = [(P("i"), P()), (P("i", "j"), P()), (P("i"), P("j")), (P(None, "j"), P("i"))]


LOSSES = [_of_one, _of_one_resharded, _of_one_mapped]


@each(
    "name, f, specs",
    [
        *zip(2 * [*EACH], itertools.cycle(LOSSES), itertools.cycle(LAYOUTS)),
        *[(name, _of_one, LAYOUTS[0]) for name in EACH],
    ],
)
def test_derivatives_of_each_element_of_a_batch_that_is_split(name, f, specs):
    """Results are those of whole arrays, counts are those of the run, and elementwise batches are not gathered."""
    derivatives, arrays = EACH[name](f), (C[:6, :6], numpy.sin(C[:6, :6]))
    args = [sharded(x, spec) for x, spec in zip(arrays, specs)]
    PLANE.reset_calls()
    result = derivatives(*args)
    assert PLANE.calls == spmd.communication(derivatives, optimized=isinstance(derivatives, Jitted))(*args).counts
    if f is _of_one and specs == (P("i"), P()) and not name.startswith(("along", "from", "of these")):
        assert PLANE.calls == {} and result.spec == P("i")
    assert_trees_close(result, derivatives(*arrays), rtol=1e-7, atol=1e-9)


def test_errors():
    leaked = []
    md.grad(lambda x: (leaked.append(x), x.sum())[1])(X)
    with pytest.raises(md.LeakedTracerError):
        sharded() + leaked[0]
