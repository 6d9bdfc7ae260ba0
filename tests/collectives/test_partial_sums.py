"""out_specs=P(sum='i'): what leaves a body as partial sums is added up at the boundary, and its transpose is free."""

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import given, settings

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast, psum
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.programs.on_blocks import assert_trees_close, run_and_count
from tests.programs.partial_sum import PROGRAMS, W, X, of_whole, sharded

MESH, MESH2 = mesh(4), mesh(2, 2)
TYPED = each("check_rep", [True, False], ids=["typed", "untyped"])


def mapped(f, in_specs=P("i"), out_specs=P(sum="i"), mesh=MESH, **options):
    return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def transpose_of(f, *example):
    return lambda y: md.linear_transpose(f, *example)(y)[0]


def equation_of(f, *args):
    """The one shard_map of a function that does more than to cast or to sum; its tape is checked."""
    tape = md.make_tape(f)(*args)
    tape.check()
    moved = ({"reduced"}, {"psum"})
    (equation,) = [e for e in tape.equations if {b.primitive.name for b in e.params["body"].equations} not in moved]
    return equation


def shown(f, *args):
    """Operations of the body, its types, and the specs."""
    equation = equation_of(f, *args)
    body = equation.params["body"]
    casts = ("unreduced", "pbroadcast")
    operations = [
        (e.primitive.name, *[a for a in e.inputs if isinstance(a, (int, float))])
        for e in body.equations
        if e.primitive.name not in casts
    ]
    return operations, str(body.in_types[0]), equation.params["in_specs"], equation.params["out_specs"]


@st.composite
def layouts(draw):
    """A mesh, how an array is split over it, and how the results are split or summed along what the array is."""
    sizes = dict(zip("ijk", draw(st.sampled_from([(2, 2, 1), (3, 2, 1), (1, 2, 2)]))))
    ins, outs, summed = ([], []), ([], []), []
    for a in draw(st.permutations(list(sizes))):
        here = draw(st.sampled_from([0, 1, None]))
        there = draw(st.sampled_from([0, 1, "summed"] if here is not None else [0, 1, "summed", None]))
        if here is not None:
            ins[here].append(a)
        if there is not None:
            (summed if there == "summed" else outs[there]).append(a)
    return sizes, tuple(map(tuple, ins)), tuple(map(tuple, outs)), tuple(summed)


BLOCKWISE = {
    "nonlinear": lambda x: np.sin(x) * x,
    "transposed": lambda x: x.T[::-1],
    "itself": lambda x: x,
    "a constant": lambda x: np.zeros_like(x) + 2.0,
}


@settings(deadline=None, max_examples=25)
@given(layouts(), st.sampled_from(list(BLOCKWISE)), st.sampled_from([float, complex]), st.booleans())
def test_any_layout(layout, name, dtype, check_rep):
    sizes, ins, outs, summed = layout
    mesh = spmd.make_mesh(tuple(sizes.values()), tuple(sizes), backend="simulated")
    f = mapped(BLOCKWISE[name], P(*ins), P(*outs, sum=summed), mesh, check_rep=check_rep)
    whole = of_whole(BLOCKWISE[name], ins, outs, summed, sizes)
    x = np.sin(np.arange(144.0)).reshape(12, 12).astype(dtype) * (1 if dtype is float else 1 + 0.5j)
    y = whole(x)
    for run in (f, md.jit(f)):
        assert_trees_close(run(x), y)
    assert_trees_close(md.vmap(f)(np.stack([x, -x])), np.stack([y, whole(-x)]))
    assert_trees_close(md.jvp(f, (x,), (x * x,))[1], md.jvp(whole, (x,), (x * x,))[1])
    (ct,) = md.vjp(whole, x)[1](y)
    for pull in (lambda x, y: md.vjp(f, x)[1](y)[0], md.jit(lambda x, y: md.vjp(f, x)[1](y)[0])):
        assert_trees_close(pull(x, y), ct)
    linear = md.linearize(f, x)[1]
    transposed = transpose_of(linear, x)
    again = transpose_of(transposed, y)
    assert_trees_close(again(x), linear(x))
    for tape in (md.make_tape(f)(x), md.make_tape(transposed)(y), spmd.rewritten(f)(x)):
        tape.check()
    if check_rep:
        assert md.make_tape(transpose_of(again, x))(y) == md.make_tape(transposed)(y)


@TYPED
@each("name", PROGRAMS)
def test_derivatives_of_second_order(name, check_rep):
    md.testing.check_grads(sharded(name, MESH2, check_rep=check_rep), (X, W), order=2)


# ---------------------------------------------------------------- the JEP's examples


def g(x):
    return 3.0 * x


@TYPED
def test_example_1_better(check_rep):
    """t(f1_better) = shard_map(t(g), in_specs=P(), out_specs=P('i')), and t of that is f1_better again."""
    x, y, state = np.arange(8.0), np.ones(2), "{R:i}" if check_rep else ""
    f1, f1_better = mapped(lambda x: psum(g(x), "i"), out_specs=P()), mapped(g, check_rep=check_rep)
    np.testing.assert_array_equal(f1(x), f1_better(x))
    assert spmd.communication(f1_better)(x).counts == {"psum": 1}
    transposed = transpose_of(f1_better, x)
    assert shown(transposed, y) == ([("multiply", 3.0)], f"f64[2]{state}", (P(reduced={"i"}),), (P("i"),))
    assert str(spmd.communication(transposed)(y)) == "no communication"
    np.testing.assert_array_equal(transposed(y), np.full(8, 3.0))
    if check_rep:
        assert shown(f1_better, x) == ([("multiply", 3.0)], "f64[2]{i}", (P("i"),), (P(unreduced={"i"}),))
        assert md.make_tape(transpose_of(transposed, y))(x) == md.make_tape(f1_better)(x)
        # That with the psum in the body has it there again: the two are different programs of the same function.
        assert shown(transpose_of(transpose_of(f1, x), y), x)[0] == [("multiply", 3.0), ("psum",)]


# ---------------------------------------------------------------- what it communicates


def test_it_is_one_all_reduce():
    f = mapped(lambda x: (x.sum(), np.sin(x)), P(("i", "j")), (P(sum=("i", "j")), P(("i", "j"))), MESH2)
    (row,) = spmd.communication(f)(np.arange(8.0)).rows
    assert (row.collective, row.axes, row.count, row.bytes) == ("psum", ("i", "j"), 1, 8)
    for run in (f, md.jit(f)):
        run_and_count(run, MESH2, np.arange(8.0))


@pytest.mark.parametrize("check_rep", [True, False])
def test_compiled_they_are_summed_together(check_rep):
    """With one another, and with what is summed inside: by buckets, and only as long as that is not switched off."""

    def body(x):
        return x.sum(), np.sin(x), psum(x * x, "i"), (x > 2).astype(int)

    specs = (P(sum="i"), P(sum="i"), P(), P(sum="i"))
    f = mapped(body, P("i"), specs, check_rep=check_rep)
    x = np.arange(8.0)
    compiled = 2 if check_rep else 3  # the sum inside a body without types is not fused with those outside
    for g, count in ((f, 4), (md.jit(f), compiled), (md.jit(f, without=("fuse shard maps",)), 4)):
        MESH.reset_calls()
        assert_trees_close(g(x), (28.0, np.sin(x).reshape(4, 2).sum(0), (x**2).reshape(4, 2).sum(0), np.array([2, 3])))
        assert MESH.calls == {"psum": count}
    assert spmd.communication(f)(x).counts == {"psum": 4}
    assert spmd.communication(f, optimized=True)(x).counts == {"psum": compiled}
    spmd.rewritten(f)(x).check()

    def loss(w, x):
        return mapped(lambda w, x: np.sum(np.tanh(x * w)), (P(), P("i")), P(sum="i"), check_rep=check_rep)(w, x)

    step, w = md.jit(md.value_and_grad(loss)), np.ones(2)
    MESH.reset_calls()
    actual = step(w, x)
    assert MESH.calls == {"psum": 1 if check_rep else 2}  # the loss, and its gradient
    assert_trees_close(actual, md.value_and_grad(lambda w: np.sum(np.tanh(x.reshape(4, 2) * w)))(w))


def test_what_does_not_vary_is_multiplied():
    """Nothing is sent for what is the same on all ranks, forth or back, nor along the axes where it is."""
    w = np.array([0.5, 2.0])
    for spec, varies, factor in ((P(sum="i"), (), 2), (P(sum=("j", "i")), (), 4), (P(sum=("i", "j")), ("j",), 2)):
        f = mapped(lambda w: np.sin(w), P(*varies), spec, MESH2)
        whole = [np.sin(w), np.sin(w[:1]) + np.sin(w[1:])][len(varies)] * factor
        np.testing.assert_allclose(f(w), whole)
        np.testing.assert_allclose(md.jit(f)(w), whole)
        assert [row.axes for row in spmd.communication(f)(w).rows] == [varies] * len(varies)
        assert str(spmd.communication(transpose_of(md.linearize(f, w)[1], w))(whole)) == "no communication"
        md.testing.check_grads(f, (w,), order=2)
    count = mapped(lambda w: (w > 1, np.ones(2, "int8") * 100, 2.0), P(), P(sum=("i", "j")), MESH2)
    assert str(spmd.communication(count)(w)) == "no communication"
    ones, wrapped, eight = count(w)
    np.testing.assert_array_equal(ones, [0, 4])
    np.testing.assert_array_equal(wrapped, np.full(2, 400).astype("int8"))
    assert (ones.dtype, wrapped.dtype, eight) == (int, "int8", 8.0)


def test_a_gradient_communicates_for_its_value_alone():
    """The loss is summed at the boundary; of a parameter there is one psum, as with the psum in the body."""
    loss = lambda w, x: mapped(lambda x: np.sum(np.tanh(x @ w)), P("i"), P(sum="i"))(x)  # noqa: E731
    x, w = np.arange(24.0).reshape(8, 3) / 24, np.ones(3)
    run_and_count(md.grad(loss), MESH, w, x)
    assert MESH.calls == {"psum": 2}
    md.testing.check_grads(loss, (w, x), order=2)


def test_results_are_plain_or_split_as_the_rest_says():
    y = mapped(lambda x: x, P("i", "j"), P("i", sum="j"), MESH2)(X)
    assert (type(y), y.spec, y.shape) == (spmd.ShardedArray, P("i"), (4, 2))
    assert type(mapped(lambda x: x, P("i", "j"), P(sum=("i", "j")), MESH2)(X)) is numpy.ndarray
    np.testing.assert_array_equal(mapped(lambda x: x, P("i"), P("i"), MESH2)(y), y)


@TYPED
def test_dtypes(check_rep):
    """Integers stay integers, booleans are counted."""
    count = mapped(lambda x: x > 2, P("i"), P(sum="i"), check_rep=check_rep)(np.arange(8))
    np.testing.assert_array_equal(count, [2, 3])
    assert count.dtype == int
    assert mapped(lambda x: x, check_rep=check_rep)(np.arange(8, dtype="int32")).dtype == "int32"
    assert mapped(lambda x: x, check_rep=check_rep)(np.arange(8, dtype="float32")).dtype == "float32"


def test_with_explicit_types():
    f = mapped(lambda x, w: x * pbroadcast(w, "i"), (P("i"), P()), P(sum="i"), auto_pbroadcast=False)
    md.testing.check_grads(f, (np.arange(8.0), np.ones(2)), order=2)


def test_specs_with_sums():
    assert repr(P("j", None, sum="i")) == "P('j', None, sum='i')"
    assert repr(P(sum=("i", "j"))) == "P(sum=('i', 'j'))"
    assert P(sum="i") == P(None, sum=("i",)) != P()
    assert P(sum=("i", "j")) == P(sum=("j", "i"))
    assert len({P(sum="i"), P(sum=("i",)), P()}) == 2
    assert P("j", sum="i").axes == {"j"}
