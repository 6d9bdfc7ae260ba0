"""`spmd.pad`, and masked functions of whole and sharded arrays and in bodies."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from tests.checks.samples import each
from tests.programs.masked import (
    BODIES,
    COLUMNS,
    FUNCTIONS,
    LOCAL,
    ROWS,
    check_in_body,
    check_on_ranks,
    derivatives,
    every,
    example,
    loss_of,
)
from tests.programs.on_blocks import assert_trees_close

MESH = spmd.make_mesh((4,), ("i",), backend="simulated")
PLANE = spmd.make_mesh((2, 3), ("i", "j"), backend="simulated")
KINDS = ["rows", "columns", "elements"]


# ---------------------------------------------------------------- pad


@each("spec", [P("i"), P(None, "j"), P("i", "j"), P(("i", "j")), P(), P(None, ("j", "i"))])
def test_padded_arrays_and_masks(spec):
    x = numpy.arange(1.0, 36.0).reshape(5, 7)
    padded, mask = spmd.pad(x, PLANE, spec)
    assert spmd.spec_of(padded) == spec and numpy.broadcast_shapes(padded.shape, mask.shape) == padded.shape
    whole, where = spmd.gather((padded, mask))
    numpy.testing.assert_array_equal(whole[numpy.broadcast_to(where, whole.shape)].reshape(5, 7), x)
    assert whole.sum() == x.sum() and whole.shape == tuple(
        -(-n // k) * k for n, k in zip(x.shape, [spmd.mesh.specs.part_count(a, PLANE.shape) for a in spec.dims(2)])
    )
    assert float(np.mean(padded, where=mask)) == x.mean()


def test_what_is_divided_is_not_padded():
    x, mask = spmd.pad(numpy.ones((8, 3)), MESH, P("i"))
    assert x.shape == (8, 3) and mask.shape == (8, 1) and mask.gather().all()
    empty, mask = spmd.pad(numpy.ones((0, 3)), MESH, P("i"))
    assert empty.shape == (0, 3) and mask.shape == (0, 1)


def test_trees_and_other_fillings():
    tree = {"x": numpy.arange(3.0), "y": (numpy.arange(6), 2.0)}
    padded, mask = spmd.pad(tree, MESH, {"x": P("i"), "y": (P("i"), P())}, mode="edge")
    assert spmd.gather(padded["x"]).tolist() == [0, 1, 2, 2] and padded["y"][1] == 2.0
    assert spmd.gather(mask["x"]).tolist() == [True, True, True, False] and mask["y"][0].shape == (8,)
    assert spmd.gather(spmd.pad(numpy.arange(3), MESH, P("i"), constant_values=-1)[0]).tolist() == [0, 1, 2, -1]
    assert spmd.pad((), MESH, P("i")) == ((), ())


def test_derivatives_through_padding():
    x = numpy.arange(1.0, 7.0)

    def loss(x):
        padded, mask = spmd.pad(x, MESH, P("i"), mode="edge")
        return np.mean(np.log(padded) ** 2, where=mask)

    expected = lambda x: np.mean(np.log(x) ** 2)  # noqa: E731
    for f in (loss, md.jit(loss)):
        assert_trees_close((f(x), md.grad(f)(x)), (expected(x), md.grad(expected)(x)))
        assert_trees_close(md.hessian(f)(x), md.hessian(expected)(x))


def test_padding_sends_nothing_and_a_mean_one_number():
    x = numpy.arange(6.0)
    assert spmd.communication(lambda x: spmd.pad(x, MESH, P("i")))(x).counts == {}
    mean = spmd.communication(lambda x: np.mean(*spmd.pad(x, MESH, P("i"))[:1], where=spmd.pad(x, MESH, P("i"))[1]))
    assert mean(x).counts == {"psum": 2}


def test_errors_name_the_call():
    x = numpy.ones(6)
    for call in (
        lambda: spmd.distribute(x, MESH, P("i")),
        lambda: spmd.shard_map(lambda x: x, mesh=MESH, in_specs=P("i"), out_specs=P("i"))(x),
        lambda: spmd.reshard(spmd.distribute(numpy.ones((8, 6)), MESH, P("i")), P(None, "i")),
    ):
        with pytest.raises(ValueError, match=r"x, mask = spmd\.pad\(x, mesh, P\((None, )?'i'\)\)"):
            call()
    with pytest.raises(ValueError, match="has 2 entries, but pad: x has 1 dimension"):
        spmd.pad(x, MESH, P("i", None))
    with pytest.raises(ValueError, match="names the axis 'k'"):
        spmd.pad(x, MESH, P("k"))
    with pytest.raises(TypeError, match=r"write pad\(x, mesh, P"):
        spmd.pad(x, P("i"), MESH)
    with pytest.raises(TypeError, match="pad shards whole arrays"):
        spmd.shard_map(lambda x: spmd.pad(x, MESH, P("i"))[0], mesh=MESH, in_specs=P(), out_specs=P())(x)


# ---------------------------------------------------------------- masked functions


#: A mean of nothing is NaN, as NumPy warns.
quiet = pytest.mark.filterwarnings("ignore:invalid value|Mean of empty|Degrees of freedom")


@quiet
@each("name", ["mean, axis=1", "softmax", "batch_norm"])
def test_masked_functions_of_sharded_arrays(name):
    check_on_ranks(name, MESH, "rows")


@quiet
@each("kind", KINDS)
@each("name", sorted(FUNCTIONS))
def test_all_masked_functions_of_sharded_arrays(name, kind):
    check_on_ranks(name, MESH, kind)


@quiet
@each("name", ["mean", "layer_norm"])
def test_masked_functions_in_bodies(name):
    test_all_masked_functions_in_bodies.__wrapped__(name=name, kind="rows")


@quiet
@each("kind", KINDS)
@each("name", [*BODIES, *LOCAL])
def test_all_masked_functions_in_bodies(name, kind):
    body, of_whole = BODIES.get(name) or (FUNCTIONS[name], FUNCTIONS[name])
    check_in_body(body, of_whole, P() if name in BODIES else P("i"), MESH, kind)


@quiet
@each("name", sorted(FUNCTIONS))
def test_masked_functions_are_those_of_what_is_left(name):
    """Rows and columns that are left out might as well not be there."""
    keep_all = numpy.ones((1, 1), bool)
    for kind, left in (("rows", (slice(9), slice(None))), ("columns", (slice(None), slice(3)))):
        if kind == "columns" and ("norm" in name or "cross" in name):
            continue  # scales and labels are of all columns
        x, mask = example(kind)
        small = numpy.ascontiguousarray(x[left])

        def select(y, left=left):
            axis = {(): (), (COLUMNS,): left[1:], (ROWS,): left[:1]}.get(tuple(y.shape), left)
            return every(y[axis] if axis else y)

        actual = derivatives(loss_of(FUNCTIONS[name], select), x, mask)
        expected = derivatives(loss_of(FUNCTIONS[name], every), small, keep_all)
        assert_trees_close((actual[0], actual[1][left], actual[2][left]), expected)


@each("name", ["softmax", "log_softmax", "cross entropy", "cross entropy of labels", "layer_norm", "batch_norm"])
def test_nothing_is_left(name, recwarn):
    """Without any element, these are 0, and so are their derivatives; there is no warning."""
    x = numpy.full((ROWS, COLUMNS), numpy.nan)
    for array in derivatives(loss_of(FUNCTIONS[name], every), x, numpy.zeros((ROWS, 1), bool)):
        assert not numpy.any(array)
    assert not recwarn.list


def test_a_mean_of_nothing_is_numpy_s():
    x, nothing = numpy.ones((4, 3)), numpy.zeros((4, 1), bool)
    for arguments in ((x, nothing), [spmd.distribute(leaf, MESH, P("i")) for leaf in (x, nothing)]):
        with pytest.warns(RuntimeWarning):
            assert numpy.isnan(spmd.gather(np.mean(arguments[0], axis=1, where=arguments[1]))).all()
        assert float(np.sum(arguments[0], where=arguments[1])) == 0
        with pytest.raises(ValueError, match="initial"):
            np.max(arguments[0], where=arguments[1])
