"""ShardedArray: the global value, by its blocks; for NumPy, derivatives and batches it is the whole array."""

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
from tests.checks.of_whole import check_derivatives, check_values
from tests.checks.samples import each
from tests.programs.on_blocks import assert_trees_close
from tests.programs.propagated import A, C

PLANE = mesh(2, 2)
X = np.arange(4 * 6.0).reshape(4, 6)


def sharded(x=X, spec=P("i")):
    return spmd.distribute(x, PLANE, spec)


@each("spec", [P("i"), P("j", "i"), P(None, "j"), P(("j", "i"))])
def test_it_is_the_whole_array(spec):
    y = sharded(X, spec)
    assert (y.shape, y.dtype, y.ndim, y.size, len(y), y.mesh, y.spec) == ((4, 6), float, 2, 24, 4, PLANE, spec)
    assert (md.typeof(y), y.nbytes, y.itemsize) == (md.typeof(X), X.nbytes, X.itemsize)
    for whole in (np.asarray(y), y.gather(), pickle.loads(pickle.dumps(y))):
        np.testing.assert_array_equal(whole, X)


def test_blocks_of_each_rank():
    blocks = sharded(X, P("i", "j")).local
    np.testing.assert_array_equal(blocks, [X[:2, :3], X[:2, 3:], X[2:, :3], X[2:, 3:]])


def test_it_prints_as_what_it_is():
    y = sharded(np.arange(4))
    assert (repr(y), str(y)) == ("ShardedArray([0, 1, 2, 3], P('i'))", "[0 1 2 3]")


#: Of an array alone, by NumPy and its methods; results are split as it is.
SPLIT_ALIKE = [
    lambda y: 2.0 * y + np.cos(y),
    lambda y: np.sin(y) ** 2 - y / 3,
    lambda y: np.greater(np.cos(y), y),
    lambda y: numpy.sin(y),
    lambda y: numpy.add.reduce(y, axis=1),
    lambda y: numpy.sum(y, axis=1),
    lambda y: X + y,
    lambda y: numpy.float64(2) * y,
    lambda y: numpy.zeros_like(y),
    lambda y: numpy.full_like(y, 2.0),
    lambda y: y.at[1].set(0.0) if hasattr(y, "at") else np.at(y)[1].set(0.0),
]
#: And results that are not.
WHOLE = [
    *(
        lambda y, m=m: getattr(y, m)()
        for m in ("max", "min", "argmax", "ravel", "flatten", "transpose", "copy", "tolist")
    ),
    lambda y: numpy.histogram(y)[0],
    lambda y: numpy.add(y, y, where=X > 3, out=numpy.zeros((4, 6))),
    lambda y: [float(np.sum(row)) for row in y],
    lambda y: y[y > 3],
    lambda y: y[1:3, ::2],
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
    lambda y: numpy.sum(y, axis=0, out=y),
    lambda y: numpy.nanmax(y, axis=0, out=y),
    lambda y: numpy.copyto(y, 3.0),
    lambda y: numpy.put(y, [0], [3.0]),
    lambda y: numpy.fill_diagonal(y, 3.0),
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
    whole = X.copy()
    y = sharded(whole, spec)
    whole += 1
    y.gather()[:] = 7
    numpy.asarray(y)[:] = 7
    numpy.testing.assert_array_equal(y, X)
    with pytest.raises(ValueError):
        y.local[0][0] = 3.0


def test_no_copy_of_what_is_sharded_already():
    """An operation that moves nothing shares the blocks, since nobody can write into them."""
    x = sharded()
    assert numpy.shares_memory(mapped(lambda x: x, PLANE, P("i"), P("i"))(x).data, x.data)


# ---------------------------------------------------------------- meshes


def test_operands_on_different_meshes():
    """The first operand stays where it is, the others are gathered: both ways, for the derivatives too."""
    x, y = sharded(), spmd.distribute(2 * X, mesh(2, names="k"), P("k"))
    f = lambda x, y: np.sin(x) * y  # noqa: E731
    check_derivatives(f, (x, y), f, (X, 2 * X))
    assert (f(x, y).mesh, f(x, y).spec) == (x.mesh, x.spec)
    assert spmd.communication(f)(x, y).counts == {"all_gather_invariant": 1}
    dx, dy = md.grad(lambda x, y: f(x, y).sum(), (0, 1))(x, y)
    assert (dx.mesh, dx.spec, dy.mesh, dy.spec) == (x.mesh, x.spec, y.mesh, y.spec)


def test_meshes_of_the_same_ranks_are_one():
    """Over one as over the other: after a cell of a notebook has run again, or an array has been unpickled."""
    again = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
    assert PLANE.is_like(again) and not PLANE.is_like(mesh(2, 2, names="ji"))
    x, y = sharded(X, P("i", "j")), spmd.distribute(2 * X, again, P("i", "j"))
    on_again = mapped(np.sin, again, P("i", "j"), P("i", "j"))
    unpickled = pickle.loads(pickle.dumps(x))
    f = lambda x, y: np.sum(x * on_again(x) + unpickled * y)  # noqa: E731
    both = md.value_and_grad(f, (0, 1))
    assert_trees_close(both(x, y), both(X, 2 * X))
    assert spmd.communication(both)(x, y).counts == {"psum": 1}
    assert spmd.communication(lambda y: spmd.reshard(y + x, P("i")))(y).counts == {"all_gather_invariant": 1}
    assert not spmd.communication(md.vmap(lambda y, x: x + spmd.distribute(y, PLANE, P("j"))))(y, x).rows


# ---------------------------------------------------------------- in and around bodies


def test_a_body_that_closes_over_it_gathers_it_by_a_collective_that_is_counted():
    f = lambda y: mapped(lambda r: np.sin(r @ y), PLANE, P("j"), P("j"))(A[:, :4])  # noqa: E731
    check_derivatives(f, (sharded(),), lambda y: np.sin(A[:, :4] @ y), (X,))
    for g in (f, md.jit(f), md.grad(lambda y: np.sum(f(y)))):
        PLANE.reset_calls()
        g(sharded())
        assert PLANE.calls == spmd.communication(g)(sharded()).counts
    assert spmd.communication(f)(sharded()).counts == {"all_gather_invariant": 1}


def test_a_batch_that_is_split_through_a_shard_map():
    """A body maps over its own dimensions alone: the batch is gathered, by a visible collective."""
    f = md.vmap(mapped(lambda r: r * psum(r.sum(), "j"), PLANE, P("j"), P("j")))
    y = sharded(X, P("i", "j"))
    PLANE.reset_calls()
    numpy.testing.assert_allclose(f(y), X * X.sum(1, keepdims=True))
    assert PLANE.calls == spmd.communication(f)(y).counts == {"all_gather_invariant": 1, "psum": 1}


def test_transformations_of_functions_of_it():
    x, w = sharded(A), sharded(C, P(None, "j"))
    f = lambda w, x=x: np.sum(np.tanh(x @ w) ** 2)  # noqa: E731
    whole = lambda w: f(w, A)  # noqa: E731
    for g, expected in ((f, whole), (md.checkpoint(f), whole)):
        check_derivatives(g, (w,), expected, (C,))
    gradient = md.grad(f)
    hessian = md.grad(lambda w: np.sum(gradient(w) * w))(w)
    assert hessian.spec == gradient(w).spec == md.jit(gradient)(w).spec == P(None, "j")
    rows = md.vmap(lambda r: np.sin(r) * r.sum())
    check_values(rows, (x,), rows, (A,))
    assert rows(x).spec == P("i")
    of_each = md.vmap(md.grad(lambda w, r: f(w, r)), in_axes=(None, 0))
    check_values(of_each, (w, x[:, None]), of_each, (C, A[:, None]))
    steps = lambda x: md.scan(lambda c, r: (np.tanh(c + r @ C[:, :6]), None), np.zeros(6), x)[0]  # noqa: E731
    check_values(steps, (x,), steps, (A,))


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


@each("specs", LAYOUTS, ids=str)
@each("f", [_of_one, _of_one_resharded, _of_one_mapped])
@each("name", EACH)
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
    y, leaked = sharded(), []
    for wrong in (lambda: y @ y, lambda: y + numpy.ones(5)):
        with pytest.raises(ValueError):
            wrong()
    md.grad(lambda x: (leaked.append(x), x.sum())[1])(X)
    with pytest.raises(md.LeakedTracerError):
        y + leaked[0]
