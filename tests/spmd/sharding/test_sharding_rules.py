"""Operations on sharded arrays: derivatives, and what `propagation.md` does not show."""

import functools
import itertools
import sys

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import example, given, settings

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.core.primitive import Primitive
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.of_whole import check_derivatives
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

PLANE = mesh(2, 2)
A, C = numpy.sin(numpy.arange(24.0)).reshape(4, 6), numpy.cos(numpy.arange(48.0)).reshape(6, 8)
SPECS = [P(), P("i"), P("j"), P(None, "i"), P("i", "j"), P("j", "i"), P(("i", "j")), P(None, ("j", "i"))]


def counted(f, *args, over=PLANE):
    """The result of a function, whose collectives are those that the report counts; and the report."""
    report = spmd.communication(f)(*args)
    over.reset_calls()
    result = f(*args)
    assert (over.calls, sum(over.bytes.values())) == (report.counts, report.bytes)
    return result, report


def test_of_two_that_differ_the_larger_one_stays():
    x, y = spmd.distribute(A, PLANE, P("i")), spmd.distribute(A.astype("float32"), PLANE, P(None, "i"))
    assert (x + y).spec == (y + x).spec == P("i")


def test_every_operation_declares_its_dimensions():
    modules = [m for name, m in [*sys.modules.items()] if name.startswith(("minidiff", "spmd"))]
    values = [getattr(x, "primitive", x) for m in modules for x in vars(m).values()]
    operations = {p for p in values if isinstance(p, Primitive)}
    assert len(operations) > 150
    silent = {p.name for p in operations if p.sharding is None and not (p.is_higher_order or p.on_ranks)}
    assert silent == {"reshard"}  # it has a sharding of its own
    with pytest.raises(TypeError, match="declare it with sharding="):
        Primitive("silent", np.sin, lambda x: (x.shape, x.dtype)).bind(spmd.distribute(A, PLANE, P("i")))


# ---------------------------------------------------------------- derivatives


#: Look-ups and updates of x by v [3, 6].
UPDATES = [
    lambda x, v: x[[2, -4, 2]] * v,
    lambda x, v: np.at(x)[1:3].set(v[:2]),
    lambda x, v: np.at(x)[[3, 0, 3]].set(v),
    lambda x, v: np.at(x)[[3, 0, 3]].add(v),
    lambda x, v: np.at(x)[[3, 0, 3]].max(v),
    lambda x, v: np.at(x)[:, [1, 4]].multiply(v[0, :2]),
    lambda x, v: np.roll(x, 1, axis=1) + np.roll(v[0], 2),
    lambda x, v: np.linalg.solve(x[:, :4] + 4 * np.eye(4), v[0, :4]),
]


@each("f, spec", zip(UPDATES, itertools.cycle([P("i"), P(None, "j"), P("i", "j"), P(("j", "i"))])))
def test_gradients_of_updates_and_look_ups(f, spec):
    """In what is looked up, or updated, and in what is written."""
    v, loss = numpy.cos(C[:3, :6]), lambda x, v: np.sum(np.sin(f(x, v)))
    x, rows = spmd.distribute(A, PLANE, spec), spmd.distribute(numpy.concatenate([v, v[:1]]), PLANE, P("i"))
    check_derivatives(f, (x, v), f, (A, v))
    assert md.grad(loss)(x, v).spec == spec
    assert_trees_close(md.grad(loss, 1)(A, rows[:3]), md.grad(loss, 1)(A, v))


def test_reductions_share_ties_as_numpy_does():
    x = numpy.array([[1.0, 3.0, 3.0, 0.0], [3.0, 3.0, 2.0, 0.0]])
    for f in (np.max, np.min, np.prod, np.std, lambda x: np.sum(np.sort(x, axis=None)[2:])):
        g = md.grad(f)(spmd.distribute(x, PLANE, P("i", "j")))
        assert_trees_close(g, md.grad(f)(x))
        assert g.spec == P("i", "j")


def test_what_gradients_of_parameters_communicate():
    """A gathered parameter's gradient is scattered; rows of an embedding are summed on the way forward alone."""
    x, w = spmd.distribute(A[:, :4], PLANE, P("i")), spmd.distribute(C[:4], PLANE, P("i"))
    back = counted(lambda w: md.vjp(lambda w: x @ w, w)[1](x @ C[:4]), w)[1]
    assert back.counts == {"all_gather": 1, "psum_scatter": 1}
    table, words = spmd.distribute(C.T, PLANE, P("i")), numpy.array([[3, 1], [7, 1]])
    g, report = counted(md.grad(lambda table: np.sum(np.sin(table[words]))), table)
    assert (report.counts, g.spec) == ({"psum": 1}, P("i"))
    nothing = md.grad(lambda w: np.sum(A))(w)
    assert nothing.spec == P("i") and not nothing.gather().any()


@each("dtype", ["int8", "uint8", "uint64", "int64"])
def test_indices_of_any_integers_that_are_split_themselves(dtype):
    rows = numpy.arange(2.0 * 200).reshape(200, 2)
    x, i = spmd.distribute(rows, PLANE, P("i")), numpy.array([100, 3, 127, 99]).astype(dtype)
    for spec in (P("j"), P("i")):
        numpy.testing.assert_array_equal(x[spmd.distribute(i, PLANE, spec)], rows[i])
    if dtype == "int64":
        numpy.testing.assert_array_equal(x[spmd.distribute(i - 128, PLANE, P("j"))], rows[i - 128])
        for wrong in (200, -201):
            with pytest.raises(IndexError):
                x[spmd.distribute(numpy.array([0, wrong]), PLANE, P("j"))]


SLICES = st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.sampled_from([None, 1, 2, 3, 4, -1, -2, -3, -4]))


@settings(max_examples=30, deadline=None)
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
    over, whole = mesh(*shape), numpy.sin(numpy.arange(8.0 * 8 * 8)).reshape(8, 8, 8)
    x, index, run = spmd.distribute(whole, over, spec), tuple(index), functools.partial(counted, over=over)
    part, report = run(lambda x: x[index], x)
    numpy.testing.assert_array_equal(part, whole[index])
    gathered = sum(step.bytes for step in spmd.arrays.reshard.route_of(x, over, spec, P()))
    assert report.bytes <= max(gathered, whole[index].nbytes)
    f = lambda x: np.sum(np.sin(x[index]) * np.cos(whole[index]))  # noqa: E731
    gradient = run(md.grad(f), x)[0]
    assert gradient.spec == spec
    numpy.testing.assert_allclose(gradient, md.grad(f)(whole))
    written, report = run(lambda x: x.at[index].set(7 * np.cos(whole[index])), x)
    assert written.spec == spec and not report.rows
    expected = whole.copy()
    expected[index] = 7 * np.cos(whole[index])
    numpy.testing.assert_array_equal(written, expected)


# ---------------------------------------------------------------- random programs

ONE = {
    "sin": np.sin,
    "transpose": lambda x: x.T,
    "sum rows": lambda x: x + 0.1 * x.sum(axis=0),
    "max": lambda x: x - 0.3 * x.max(axis=0),
    "reshape": lambda x: np.tanh(x.reshape(2, 4, 8)).reshape(8, 8),
    "ravel": lambda x: np.cos(x.ravel()).reshape(8, 8),
    "concatenate": lambda x: np.concatenate([x[:4], 2 * x[4:]]),
    "take": lambda x: x[np.array([3, 1, 3, 0, 7, 7, 2, 5])],
    "look up": lambda x: x + x[[6], 1:3].sum(),
    "update": lambda x: np.at(x)[1:6:2].set(0.5 * x[:3]),
    "scatter": lambda x: np.at(x)[np.array([3, 1, 3])].set(np.cos(x[4:7])),
    "where": lambda x: np.where(x > 0.1, x, -0.5),
    "softmax": lambda x: md.nn.softmax(x, axis=0),
}
TWO = {
    "add": np.add,
    "multiply": np.multiply,
    "matmul": lambda x, y: x @ y / 8,
    "einsum": lambda x, y: np.einsum("ij,kj->ik", x, y) / 8,
    "outer": lambda x, y: x[:, 0, None] * y[0],
    "stack": lambda x, y: np.stack([x, y]).sum(0),
}


def run(steps, arrays):
    values = list(arrays)
    for name, *places in steps:
        x, y = (values[k % len(values)] for k in places)
        values.append(ONE[name](x) if name in ONE else TWO[name](x, y))
    return values[-1]


STEPS = st.tuples(st.sampled_from(sorted({**ONE, **TWO})), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([(2, 2), (4, 2)]),
    st.lists(st.sampled_from(SPECS), min_size=3, max_size=3),
    st.lists(STEPS, min_size=1, max_size=5),
)
@example((4, 2), [P("i"), P(), P()], [("reshape", 0, 0)])
@example((2, 2), [P("i"), P("j"), P()], [("matmul", 0, 1), ("max", 3, 0), ("einsum", 4, 2)])
def test_random_programs(shape, specs, steps):
    """The value, the gradients and a tangent are those of the whole arrays; what is counted is what is done."""
    over, whole = mesh(*shape), [numpy.sin(numpy.arange(64.0) * k).reshape(8, 8) for k in (1, 2, 3)]
    args = [spmd.distribute(x, over, spec) for x, spec in zip(whole, specs)]
    f = lambda *arrays: np.sum(np.sin(run(steps, arrays)))  # noqa: E731
    assert_trees_close(run(steps, args), run(steps, whole), rtol=1e-7, atol=1e-9)
    both = md.value_and_grad(f, (0, 1, 2))
    (value, gradients), _ = counted(both, *args, over=over)
    assert_trees_close((value, gradients), both(*whole), rtol=1e-6, atol=1e-8)
    assert [*map(spmd.spec_of, gradients)] == specs
    tangents = [md.jvp(f, xs, xs)[1] for xs in (args, whole)]
    assert_trees_close(*tangents, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- nothing to split

OF_NOTHING = {
    **{f.__name__: f for f in (np.sin, np.sum, np.cumsum, np.sort, np.transpose, np.ravel, np.squeeze, np.flip)},
    **{f.__name__: f for f in (np.flipud, np.fliplr, np.rot90, np.mean, np.diff, np.var, np.tril)},
    **{str(i): lambda x, i=i: x[i] for i in np.index_exp[::-1, ::-2, 1:, ..., None, 0:0, []]},
    "columns backwards": lambda x: x[..., ::-1],
    "roll": lambda x: np.roll(x, 1, -1),
    "joined": lambda x: np.concatenate([x, x]),
    "product": lambda x: x @ x.T,
    "reshape": lambda x: x.reshape(-1),
    "update": lambda x: np.at(x)[:].set(1.0),
    "repeat": lambda x: np.repeat(x, 2, 0),
    "pad": lambda x: np.pad(x, 1),
    "fft": np.fft.fft,
    "split": lambda x: np.split(x, 2),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each("name, shape", zip(2 * [*OF_NOTHING], itertools.cycle([(0,), (0, 2), (2, 0)])))
def test_dimensions_of_size_0(name, shape):
    f, x = OF_NOTHING[name], numpy.zeros(shape)
    total = lambda x: sum(np.abs(y).sum() for y in md.tree.leaves(f(x)) if y.dtype.kind in "fc")  # noqa: E731
    try:
        expected = md.tree.leaves(f(x))
    except ValueError:  # NumPy's mean, fft or fliplr of too little
        return
    for d, n in enumerate(shape):
        sharded = spmd.distribute(x, PLANE, P(*[None] * d, "j" if n % 4 else ("i", "j")))
        assert md.grad(total)(sharded).shape == shape
        for run in (f, md.jit(f)):
            for y, z in zip(md.tree.leaves(run(sharded)), expected, strict=True):
                np.testing.assert_array_equal(np.asarray(y), z, strict=True)
