"""out_specs=P(sum='i'): what leaves a body as partial sums is added up at the boundary, and its transpose is free."""

import itertools

import hypothesis.strategies as st
import numpy
from hypothesis import given, settings

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast, psum
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

MESH, MESH2 = mesh(4), mesh(2, 2)


def mapped(f, in_specs=P("i"), out_specs=P(sum="i"), mesh=MESH, **options):
    return spmd.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def transpose_of(f, *example):
    return lambda y: md.linear_transpose(f, *example)(y)[0]


def counted(f, *args, mesh=MESH):
    """The result of a call, and how many all-reduces the mesh counted."""
    mesh.reset_calls()
    result = f(*args)
    assert {*mesh.calls} <= {"psum"}
    return result, sum(mesh.calls.values())


# ---------------------------------------------------------------- any layout


def of_whole(f, ins, outs, summed, sizes):
    """The reference for a shard_map of `f`: `f` of each rank's block, the results concatenated and summed.

    `ins` and `outs` have, for each dimension, the axes that it is split along.
    """

    def block(x, at):
        for d, axes in enumerate(ins):
            for a in axes:
                x = np.split(x, sizes[a], d)[at[a]]
        return x

    def result(x, at, d=0):
        if d == len(outs):
            rest = [range(sizes[a]) for a in summed]
            return sum(f(block(x, {**at, **dict(zip(summed, ranks))})) for ranks in itertools.product(*rest))
        ranks = itertools.product(*[range(sizes[a]) for a in outs[d]])
        return np.concatenate([result(x, {**at, **dict(zip(outs[d], r))}, d + 1) for r in ranks], d)

    return lambda x: result(x, dict.fromkeys(sizes, 0))


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


@settings(deadline=None, max_examples=15)
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


#: Functions of x and w on a mesh of two axes: their specs, what they are summed along, and options.
SECOND_ORDER = [
    (lambda x, w: np.tanh(x) @ w, (P(("i", "j")), P()), P(sum=("i", "j")), {"check_rep": False}),
    (lambda x, w: np.sum(np.cos(psum(x * w, "i"))), (P("i", "j"), P("j")), P(sum=("j",)), {}),
    (lambda x, w: x * pbroadcast(w, ("i", "j")), (P(("i", "j")), P()), P(sum=("i", "j")), {"auto_pbroadcast": False}),
]


@each("f, in_specs, out_specs, options", SECOND_ORDER)
def test_derivatives_of_second_order(f, in_specs, out_specs, options):
    x, w = np.sin(np.arange(16.0)).reshape(4, 4), np.cos(np.arange(4.0))
    md.testing.check_grads(mapped(f, in_specs, out_specs, MESH2, **options), (x, w), order=2)


# ---------------------------------------------------------------- what it communicates


def test_the_better_example_1_of_the_jep(golden):
    """t(f1_better) = shard_map(t(g), in_specs=P(), out_specs=P('i')), and t of that is f1_better again."""
    x, y = np.arange(8.0), np.ones(2)
    better = mapped(lambda x: 3.0 * x)
    transposed = transpose_of(better, x)
    golden("partial_sums", f"{md.make_tape(better)(x)}\n\n{md.make_tape(transposed)(y)}")
    assert md.make_tape(transpose_of(transposed, y))(x) == md.make_tape(better)(x)
    assert counted(better, x)[1] == 1 and counted(transposed, y)[1] == 0


@each("check_rep, compiled, step", [(True, 2, 1), (False, 3, 2)])  # untyped, a sum in a body is not fused with others
def test_compiled_they_are_summed_together(check_rep, compiled, step):
    """With one another, and with what is summed inside: by buckets, and only as long as that is not switched off."""
    body = lambda x: (x.sum(), np.sin(x), psum(x * x, "i"), (x > 2).astype(int))  # noqa: E731
    f = mapped(body, P("i"), (P(sum="i"), P(sum="i"), P(), P(sum="i")), check_rep=check_rep)
    x = np.arange(8.0)
    expected = (28.0, np.sin(x).reshape(4, 2).sum(0), (x**2).reshape(4, 2).sum(0), np.array([2, 3]))
    for g, count in ((f, 4), (md.jit(f), compiled), (md.jit(f, without=("fuse shard maps",)), 4)):
        result, calls = counted(g, x)
        assert calls == count
        assert_trees_close(result, expected)
    reports = [spmd.communication(f, optimized=flag)(x).counts for flag in (False, True)]
    assert reports == [{"psum": 4}, {"psum": compiled}]
    loss = mapped(lambda w, x: np.sum(np.tanh(x * w)), (P(), P("i")), P(sum="i"), check_rep=check_rep)
    assert counted(md.grad(loss), np.ones(2), x)[1] == 2
    assert counted(md.jit(md.value_and_grad(loss)), np.ones(2), x)[1] == step  # the loss, and its gradient


@each("spec, varies, factor", [(P(sum="i"), (), 2), (P(sum=("j", "i")), (), 4), (P(sum=("i", "j")), ("j",), 2)])
def test_what_does_not_vary_is_multiplied(spec, varies, factor):
    """Nothing is sent for what is the same on all ranks, forth or back, nor along the axes where it is."""
    w = np.array([0.5, 2.0])
    f = mapped(np.sin, P(*varies), spec, MESH2)
    whole = [np.sin(w), np.sin(w[:1]) + np.sin(w[1:])][len(varies)] * factor
    for run in (f, md.jit(f)):
        result, calls = counted(run, w, mesh=MESH2)
        np.testing.assert_allclose(result, whole)
        assert calls == len(varies)
    assert counted(transpose_of(md.linearize(f, w)[1], w), whole, mesh=MESH2)[1] == 0
    md.testing.check_grads(f, (w,), order=2)


#: A block on each of four ranks, and what comes of it: booleans are counted, integers stay integers and wrap around.
DTYPES = [
    (lambda: np.arange(2) > 0, numpy.array([0, 4])),
    (lambda: np.ones(2, "int8") * 100, numpy.full(2, 400).astype("int8")),
    (lambda: np.ones(2, "float32"), numpy.full(2, 4, "float32")),
    (lambda: 2.0, numpy.float64(8.0)),
]


@each("block, expected", DTYPES)
@each("varies", [False, True])
def test_dtypes(block, expected, varies):
    f = mapped(lambda: pbroadcast(block(), "i") if varies else block(), ())
    total, calls = counted(f)
    numpy.testing.assert_array_equal(numpy.asarray(total), numpy.asarray(expected), strict=True)
    assert calls == varies


def test_results_are_plain_or_split_as_the_rest_says():
    x = np.arange(16.0).reshape(4, 4)
    y = mapped(lambda x: x, P("i", "j"), P("i", sum="j"), MESH2)(x)
    assert (type(y), y.spec, y.shape) == (spmd.ShardedArray, P("i"), (4, 2))
    assert type(mapped(lambda x: x, P("i", "j"), P(sum=("i", "j")), MESH2)(x)) is numpy.ndarray


def test_specs_with_sums():
    assert repr(P("j", None, sum="i")) == "P('j', None, sum='i')"
    assert P(sum="i") == P(None, sum=("i",)) != P()
    assert P(sum=("i", "j")) == P(sum=("j", "i"))
    assert len({P(sum="i"), P(sum=("i",)), P()}) == 2
    assert P("j", sum="i").axes == {"j"}
