"""Fewer collectives: each rewrite keeps types, values and derivatives, and can be left out by name."""

import itertools
import math
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import minidiff as md
import spmd
from collectives import at_root, axis_index, pbroadcast, pscatter, psum
from collectives.ops import psum_p, untyped_psum_p
from collectives.passes import SETTINGS
from collectives.passes.variadic import variadic
from minidiff.compiler.codegen import CompiledTape
from minidiff.compiler.program import optimize, rewrites
from spmd import P
from tests.checks.samples import each
from tests.programs.on_blocks import LOOPS, SUMS_IN_STEPS, assert_trees_close, equations, example
from tests.programs.rewrite import SIDE, RandomProgram, random_programs
from tests.spmd.test_programs import placements, programs

SIZES = {"i": 2, "j": 2}
MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
ALONE = ("fuse psums", "fuse shard maps")  # without these, each psum is for itself
IJ = ("i", "j")
PAIRS = [[0, 2], [3, 1]]


def communicating(tape):
    """Return the number of calls of each collective along axes of several ranks."""
    return dict(Counter(eqn.primitive.name for eqn in equations(tape) if eqn.primitive.sends(eqn.params)))


def mapped(body, in_specs=P(IJ), out_specs=P(IJ), mesh=MESH, **options):
    return spmd.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def data(dtype, shape=(16, 3), seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "i":
        return rng.integers(-5, 5, shape).astype(dtype)
    x = rng.normal(size=shape)
    return (x + 1j * rng.normal(size=shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def close(dtype):
    return {"rtol": 1e-4, "atol": 1e-4} if dtype in ("float32", "complex64") else {"rtol": 1e-9, "atol": 1e-11}


# ---------------------------------------------------------------- one by one

#: The rewrite, a body of blocks [4, 3], and what is communicated before and after.
CASES = {
    "a sum of copies": (
        "sum of copies",
        lambda x: psum(pbroadcast(psum(x, "i"), "i"), "i"),
        {"psum": 2},
        {"psum": 1},
    ),
    "a sum, then the local slice": (
        "delay psums",
        lambda x: pscatter(psum(x, "i"), "i", tiled=True),
        {"psum": 1},
        {"psum_scatter": 1},
    ),
    "a sum over two axes, then the local slice": (
        "delay psums",
        lambda x: pscatter(psum(x, IJ), ("j", "i"), axis=0),
        {"psum": 1},
        {"psum_scatter": 1},
    ),
    "a sum over two axes, then the local slice along one": (
        "delay psums",
        lambda x: pscatter(psum(x, IJ), "i", tiled=True),
        {"psum": 1},
        {"psum": 1},
    ),
    "a sum, then at the root": (
        "delay psums",
        lambda x: at_root(psum(x, IJ), ("j", "i"), root=1),
        {"psum": 1},
        {"reduce": 1},
    ),
    "sums apart, in groups": (
        "fuse psums",
        lambda x: psum(x, IJ, axis_index_groups=PAIRS) * psum(x * x, IJ, axis_index_groups=PAIRS),
        {"psum": 2},
        {"psum": 1},
    ),
    "sums apart": ("fuse psums", lambda x: psum(x, "i") * psum(x * x, "i"), {"psum": 2}, {"psum": 1}),
    "sums apart, and one before": (
        "fuse psums",
        lambda x: psum(psum(x, "j") ** 2, "i") * psum(x * x, "i"),
        {"psum": 3},
        {"psum": 2},
    ),
    "sums one after the other": ("fuse psums", lambda x: psum(psum(x, "i") * x, "i"), {"psum": 2}, {"psum": 2}),
    "sums over different axes": ("fuse psums", lambda x: psum(x, "i") * psum(x, "j"), {"psum": 2}, {"psum": 2}),
    "sums of different dtypes": (
        "fuse psums",
        lambda x: psum(x, "i") * psum((x.real * 0).astype(np.float16)[0], "i"),
        {"psum": 2},
        {"psum": 2},
    ),
}


@each("dtype", ["float64", "float32", "complex128", "int64"])
@each("case", CASES)
def test_each_rewrite(case, dtype):
    name, body, before, after = CASES[case]
    x, f = data(dtype), mapped(body)
    tape = md.make_tape(f)(x)
    tape.check()
    assert communicating(tape) == before
    none = spmd.rewritten(f, without=tuple(rewrites()))(x)
    apart = spmd.rewritten(f, without=(name,))(x)
    alone = spmd.rewritten(f, without=[n for n in rewrites() if n != name])(x)
    result = spmd.rewritten(f)(x)
    assert communicating(none) == before
    assert communicating(result) == after
    if before != after:  # it has done what it is here for
        assert str(alone) != str(none) and str(apart) != str(result)
    expected = [np.asarray(y) for y in tape(x)]
    for other in (none, apart, alone, result):
        other.check()
        assert other.out_types == tape.out_types
        for y, e in zip(other(x), expected):
            np.testing.assert_allclose(np.asarray(y), e, **close(dtype))
        if dtype != "int64":
            check_derivatives(tape, other, x, dtype)
    np.testing.assert_allclose(np.asarray(md.jit(f)(x)), expected[0], **close(dtype))


def check_derivatives(tape, other, *args):
    *args, dtype = args
    outs = [np.asarray(y) for y in tape(*args)]
    cts = [data(y.dtype, y.shape, seed=7) for y in outs]

    def gradients(t):
        value, pull = md.vjp(lambda *xs: [np.asarray(1) * 1.0 * y for y in t(*xs)], *args)
        return pull([np.asarray(c, md.typeof(v).dtype) for c, v in zip(cts, value)])

    def tangents(t):
        return md.jvp(lambda *xs: list(t(*xs)), args, args)[1]

    assert_trees_close(gradients(other), gradients(tape), **close(dtype))
    assert_trees_close(tangents(other), tangents(tape), **close(dtype))


#: Sums over ranks in one dtype, of which something is made in another.
WIDER = {
    "added to a wider one": lambda x, z: (psum(x, IJ) + z) + psum(x * x, IJ),
    "subtracted from a wider one": lambda x, z: (z - psum(x, IJ)) - psum(x * x, IJ),
    "multiplied by a wider one": lambda x, z: psum(x, IJ) * z + psum(x * x, IJ) * z,
    "divided": lambda x, z: psum(x, IJ) / 2 + psum(x * x, IJ) / 2,
    "converted": lambda x, z: psum(x, IJ).astype(z.dtype) + psum(x * x, IJ).astype(z.dtype),
    "terms of one dtype": lambda x, z: psum(x, IJ) - psum(x * x, IJ),
    "copies": lambda x, z: psum(pbroadcast(psum(x, IJ), IJ), IJ) + z,
}


@each("wider", ["float64", "int64"])
@each("dtype", ["int8", "uint8", "uint32", "float16", "float32"])
@each("name", WIDER)
def test_sums_stay_in_their_dtype(name, dtype, wider):
    """They wrap around, or overflow, where they did."""
    x = np.array([60, 50, 40, 30, 20, 10, 5, 100], dtype) * (200 if dtype == "float16" else 1)
    z = np.array([1, 1000], wider)
    f = mapped(WIDER[name], in_specs=(P(IJ), P()), out_specs=P())
    with np.errstate(over="ignore", invalid="ignore"):
        expected, got = np.asarray(f(x, z)), np.asarray(md.jit(f)(x, z))
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-3 if dtype == "float16" else 1e-6)


def test_a_sum_of_very_many_terms():
    """More than functions can be nested; every third one is summed over ranks."""

    def body(x):
        total = x
        for k in range(1100):
            total = total - psum(x * k, IJ) if k % 3 == 0 else total + x / (1 + k)
        return total

    x, f = data("float64", (4, 1)), mapped(body)
    tape = spmd.rewritten(f)(x)
    assert communicating(tape) == {"psum": 1}
    np.testing.assert_allclose(np.asarray(tape(x)[0]), np.asarray(f(x)), rtol=1e-9)


@pytest.mark.parametrize(
    "body, before, after",
    [
        (lambda x: psum(x, "i") * psum(x * x, "i"), {"psum": 2}, {"psum": 1}),
        (lambda x: psum(x, "i") + psum(x * x, "i"), {"psum": 2}, {"psum": 1}),
    ],
)
def test_without_types(body, before, after):
    x, f = data("float64"), mapped(body, check_rep=False)
    tape, smaller = md.make_tape(f)(x), spmd.rewritten(f)(x)
    assert (communicating(tape), communicating(smaller)) == (before, after)
    tape.check(), smaller.check()
    np.testing.assert_allclose(np.asarray(smaller(x)[0]), np.asarray(f(x)), rtol=1e-12)
    check_derivatives(tape, smaller, x, "float64")


@pytest.mark.parametrize(
    "body",
    [
        lambda x: psum(x, IJ)[axis_index(IJ)],
        lambda x: md.dynamic_slice_in_dim(psum(x, "i"), axis_index("i") * 2, 2),
        lambda x: psum(x, "i")[np.arange(2) + 2 * axis_index("i")],
        lambda x: pscatter(psum(x, "i"), "i", tiled=True),
    ],
)
@pytest.mark.parametrize("typed", [True, False])
def test_only_pscatter_is_a_local_slice(body, typed):
    """A slice at an index that the program computes is an ordinary slice, of a sum that all ranks have."""
    x, f = data("float64"), mapped(body, check_rep=typed)
    tape, smaller = md.make_tape(f)(x), spmd.rewritten(f)(x)
    smaller.check()
    pscattered = "pscatter" in str(tape)
    assert communicating(smaller) == {"psum_scatter" if pscattered else "psum": 1}
    np.testing.assert_allclose(np.asarray(smaller(x)[0]), np.asarray(f(x)), rtol=1e-12)
    check_derivatives(tape, smaller, x, "float64")


def test_unknown_names():
    f = mapped(lambda x: psum(x, "i"))
    with pytest.raises(ValueError, match=r"without names an unknown rewrite, 'fuse sums'; there are .*fuse psums"):
        spmd.rewritten(f, without=("fuse sums",))
    with pytest.raises(TypeError, match=r"got the string 'fuse psums'; write \('fuse psums',\)"):
        spmd.rewritten(f, without="fuse psums")
    with pytest.raises(TypeError, match=r"jit takes no bucket=.* Did you mean .bucket_bytes.\?$"):
        md.jit(f, bucket=3)(data("float64"))


# ---------------------------------------------------------------- several in one call


def fused(tape):
    """Return the number of operands of each psum of a tape."""
    return [len(eqn.inputs) for eqn in equations(tape) if eqn.primitive.name == "psum"]


def test_the_tape():
    f = mapped(lambda x: (psum(x, "i"), psum(x * x, "i")), out_specs=P("j"))
    assert str(spmd.rewritten(f)(np.ones((8, 2)))) == (
        "lambda a:f64[8,2]:\n"
        "  b:f64[4,2], c:f64[4,2] = shard_map(a, mesh=(i: 2, j: 2), in_specs=(P(('i', 'j')),), out_specs=(P('j'),\n"
        "        P('j')))\n"
        "    lambda d:f64[2,2]{i,j}:\n"
        "      e:f64[2,2]{i,j} = multiply(d, d)\n"
        "      f:f64[2,2]{j}, g:f64[2,2]{j} = psum(d, e, 'i')\n"
        "      return (f, g)\n"
        "  return (b, c)"
    )


@pytest.mark.parametrize("typed", [True, False])
def test_rules_of_several(typed):
    """The operation itself: transposition by the inner product, tangents of some, batches of some."""
    sum_p = variadic(psum_p if typed else untyped_psum_p)
    mesh = spmd.make_mesh((3,), ("i",), backend="simulated")

    def f(x, y, z):
        on_blocks = lambda *blocks: sum_p.bind(*blocks, axes=("i",), size=3)  # noqa: E731
        return mapped(on_blocks, P("i"), P(), mesh, check_rep=typed)(x, y, z)

    args = [data("float64", shape, k) for k, shape in enumerate([(6, 2), (3,), (9, 1)])]
    expected = [x.reshape(3, -1, *x.shape[1:]).sum(0) for x in args]
    mesh.reset_calls()
    assert_trees_close(f(*args), expected)
    assert mesh.calls == {"psum": 1} and mesh.bytes == {"psum": 8 * (4 + 1 + 3)}
    md.make_tape(f)(*args).check()
    cts = [data("float64", x.shape, 9) for x in expected]
    pulled = md.vjp(f, *args)[1](cts)
    np.testing.assert_allclose(
        sum((x * t).sum() for x, t in zip(pulled, args)), sum((y * c).sum() for y, c in zip(expected, cts))
    )
    some = md.grad(lambda y: (f(args[0], y, args[2])[1] ** 2).sum())(args[1])
    np.testing.assert_allclose(some, np.full(3, 2 * args[1].sum()))
    assert md.jvp(lambda y: f(args[0], y, args[2])[0], (args[1],), (args[1],))[1].sum() == 0
    tangent = md.jvp(lambda y: f(args[0], y, args[2])[1], (args[1],), (args[1],))[1]
    np.testing.assert_allclose(tangent, expected[1])
    batched = md.vmap(f, in_axes=(0, None, 0))(np.stack([args[0]] * 2), args[1], np.stack([args[2], 2 * args[2]]))
    assert_trees_close(batched, [np.stack([expected[0]] * 2), np.stack([expected[1]] * 2),
                                 np.stack([expected[2], 2 * expected[2]])])  # fmt: skip


def test_several_along_a_named_batch():
    def f(x, y):
        return variadic(untyped_psum_p).bind(x, y, axes=("b",), size=4)

    x, y = data("float64", (4, 2)), np.arange(3.0)
    sums = md.vmap(f, in_axes=(0, None), axis_name="b")(x, y)
    assert_trees_close(sums, [np.stack([x.sum(0)] * 4), np.stack([4 * y] * 4)])


def test_of_one_dtype():
    f = mapped(lambda x: variadic(psum_p).bind(x, x.astype("float32"), axes=("i",), size=2), out_specs=P("j"))
    with pytest.raises(TypeError, match=r"psum of several values takes one dtype, got f64\[2\]\{i,j\}, f32"):
        md.make_tape(f)(np.ones(8))


def test_results_that_nobody_takes_are_not_summed():
    f = mapped(lambda x: variadic(psum_p).bind(x, x * x, x + 1, axes=("i",), size=2), out_specs=P("j"))
    assert fused(optimize(md.make_tape(lambda x: f(x)[::2])(np.ones(8)))) == [2]
    assert fused(optimize(md.make_tape(lambda x: f(x)[1])(np.ones(8)))) == [1]


def many(x, w):
    return [psum(np.sin(x * k), "i") for k in range(1, 8)]


@pytest.mark.parametrize("size, expected", [(1, [1] * 7), (64, [2, 2, 2, 1]), (100, [3, 3, 1]), (None, [7])])
def test_buckets(size, expected):
    x, f = np.arange(16.0), mapped(lambda x: many(x, None), out_specs=P("j"))
    options = {} if size is None else {"bucket_bytes": size}
    tape = spmd.rewritten(f, **options)(x)
    tape.check()
    assert fused(tape) == expected  # of 32 bytes each
    MESH.reset_calls()
    assert_trees_close(md.jit(f, **options)(x), f(x))


def test_the_setting_for_all(monkeypatch):
    monkeypatch.setitem(SETTINGS, "bucket_bytes", 64)
    f = mapped(lambda x: many(x, None), out_specs=P("j"))
    assert fused(spmd.rewritten(f)(np.arange(16.0))) == [2, 2, 2, 1]
    assert fused(spmd.rewritten(f, bucket_bytes=1 << 20)(np.arange(16.0))) == [7]


def test_one_larger_array_has_a_bucket_of_its_own():
    f = mapped(lambda x: [psum(x[:1], "i"), psum(x, "i"), psum(x[:2], "i"), psum(x[2:], "i")], out_specs=P("j"))
    tape = spmd.rewritten(f, bucket_bytes=32)(np.arange(32.0))
    assert fused(tape) == [1, 1, 1, 1] or fused(tape) == [1, 1, 2]
    sizes = [sum(a.type.nbytes for a in e.inputs) for e in equations(tape) if e.primitive.name == "psum"]
    assert sizes == [8, 64, 16, 48]


def test_buckets_do_not_wait_for_each_other():
    """Two chains, crosswise: a over i before b over j in the one, b before a in the other."""

    def body(x):
        one = psum(np.sin(psum(x, "i")) * x, "j")
        other = psum(np.cos(psum(x * x, "j")) * x, "i")
        return one * other

    x, f = np.arange(16.0), mapped(body)
    tape = spmd.rewritten(f)(x)
    tape.check()
    assert communicating(tape)["psum"] == 3
    np.testing.assert_allclose(np.asarray(tape(x)[0]), np.asarray(f(x)))


def test_sums_in_bodies_of_their_own():
    def body(x):
        def step(c, _):
            return c + psum((c * x).sum(), IJ) * psum((c - x).sum(), IJ) * 1e-3, None

        return md.scan(step, 1.0, None, length=20)[0]

    f, x = mapped(body, out_specs=P()), np.arange(16.0) / 16
    assert fused(spmd.rewritten(f)(x)) == [2]
    MESH.reset_calls()
    np.testing.assert_allclose(md.jit(f)(x), f(x))
    assert MESH.calls["psum"] == 20 + 40


# ---------------------------------------------------------------- shard_maps one after the other


def shard_maps(tape):
    return [eqn.primitive.name for eqn in tape.equations].count("shard_map")


def test_joined():
    one, two = mapped(lambda x: np.sin(x)), mapped(lambda x: psum(x, "i"), out_specs=P("j"))
    moved = mapped(lambda x: x * 2, P(("j", "i")), P(("j", "i")))
    x = np.arange(16.0)
    for f, expected in [
        (lambda x: two(one(x)), 1),
        (lambda x: two(one(x) * 2.0), None),
        (lambda x: two(moved(one(x))), 1),  # blocks go from rank to rank in between, by a ppermute
        (lambda x: (one(x), moved(x), two(x)), 1),
        (lambda x: (two(x), two(one(x)), two(x[::-1])), 1),
        (lambda x: one(one(x)), 1),
    ]:
        tape = spmd.rewritten(f)(x)
        tape.check()
        assert expected is None or shard_maps(tape) == expected
        assert all(eqn.params.get("call") is None for eqn in tape.equations)  # ranks in one process compare nothing
        assert_trees_close(tape(x), md.tree.leaves(f(x)))
        assert_trees_close(md.jit(f)(x), f(x))
    assert shard_maps(spmd.rewritten(lambda x: two(one(x)), without=("fuse shard maps",))(x)) == 2


def test_not_joined_through_something_between():
    one, two = mapped(lambda x: psum(x.sum(), IJ), out_specs=P()), mapped(lambda x, c: x * c, (P(IJ), P()))
    f = lambda x: two(x, np.sin(one(x)))  # noqa: E731
    x = np.arange(16.0)
    tape = spmd.rewritten(f)(x)
    tape.check()
    assert shard_maps(tape) == 2
    assert_trees_close(md.jit(f)(x), f(x))


# ---------------------------------------------------------------- gradients of a network


def network(params, x):
    for w, b in params:
        x = np.tanh(x @ w + b)
    return x


def parameters(*sizes):
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(n, m)) / n, rng.normal(size=m)) for n, m in itertools.pairwise(sizes)]


def data_parallel(mesh, **options):
    def loss(params, x):
        on_block = lambda params, x: psum((network(params, x) ** 2).sum(), "i")  # noqa: E731
        return mapped(on_block, (P(), P("i")), P(), mesh, **options)(params, x)

    return loss


def test_one_rank_alone_sums_without_communicating():
    mesh = spmd.make_mesh((1,), ("i",), backend="simulated")
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    step = md.value_and_grad(data_parallel(mesh))
    assert fused(spmd.rewritten(step)(params, x)) == [1] * 7  # there is no call that could be saved
    mesh.reset_calls()
    for out in (step(params, x), md.jit(step)(params, x)):
        assert_trees_close(out, md.value_and_grad(data_parallel(MESH))(params, x))
    assert mesh.calls == {} and str(spmd.communication(step)(params, x)) == "no communication"


@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_gradient(ranks):
    mesh = spmd.make_mesh((ranks,), ("i",), backend="simulated")
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    step = md.value_and_grad(data_parallel(mesh))
    assert fused(md.make_tape(step)(params, x)) == [1, 6]  # of the loss, and of its gradient
    mesh.reset_calls()
    step(params, x)
    assert mesh.calls == {"psum": 2}
    assert fused(spmd.rewritten(step, without=("fuse psums",))(params, x)) == [1] * 7
    tape = spmd.rewritten(step)(params, x)
    tape.check()
    assert fused(tape) == [7]
    assert spmd.communication(step, optimized=True)(params, x).counts == {"psum": 1}
    plain = spmd.communication(step)(params, x)
    assert spmd.communication(step, optimized=True)(params, x).bytes == plain.bytes
    compiled = md.jit(step)
    for _ in range(2):
        mesh.reset_calls()
        out = compiled(params, x)
        assert mesh.calls == {"psum": 1} and mesh.bytes == {"psum": plain.bytes}
    assert_trees_close(out, step(params, x))


@pytest.mark.parametrize("size, expected", [(200, [3, 1, 1, 1, 1]), (600, [5, 2]), (None, [7])])
def test_gradients_in_buckets(size, expected):
    """The last layer's come first: those are the first to be there."""
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    step = md.value_and_grad(data_parallel(mesh))
    options = {} if size is None else {"bucket_bytes": size}
    tape = spmd.rewritten(step, **options)(params, x)
    tape.check()
    shapes = [[v.type.shape for v in e.outputs] for e in equations(tape) if e.primitive.name == "psum"]
    assert [shape for bucket in shapes for shape in bucket] == [(), (3,), (6, 3), (6,), (7, 6), (7,), (5, 7)]
    assert [*map(len, shapes)] == expected
    compiled = md.jit(step, **options)
    assert_trees_close(compiled(params, x), step(params, x))
    mesh.reset_calls()
    compiled(params, x)
    assert mesh.calls == {"psum": len(shapes)}


@pytest.mark.parametrize("size, expected", [(1, [1] * 7), (560, [1, 4, 2])])
def test_buckets_of_a_gradient_that_is_not_compiled(monkeypatch, size, expected):
    monkeypatch.setitem(SETTINGS, "bucket_bytes", size)
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    step = md.value_and_grad(data_parallel(mesh))
    assert fused(md.make_tape(step)(params, x)) == expected
    mesh.reset_calls()
    out = step(params, x)
    assert mesh.calls == {"psum": len(expected)}
    monkeypatch.undo()
    assert_trees_close(out, step(params, x))


def test_cotangents_of_what_is_pbroadcast_and_of_what_is_not():
    """Inputs used as they are too, of several dtypes, pbroadcast along one axis or two: as with all inputs whole."""

    def body(a, b, c, d, x):
        invariant = np.sum(np.sin(a)) + np.sum(b * b)
        first = psum(np.sum(a * b * x), IJ) + psum(np.sum(c * x.astype(c.dtype)), IJ) * 1.0
        row = psum(np.sum(x, 0), "j")
        return invariant * first + psum(np.sum(np.sin(d * row) * b), "i")

    f = mapped(body, (P(), P(), P(), P(), P(IJ)), P())
    args = [data("float64", (3,), 1), data("float64", (3,), 2), data("float32", (3,), 3), data("float64", (3,), 4)]
    args.append(data("float64", (8, 3), 5))
    md.testing.check_grads(f, tuple(a.astype(float) for a in args), order=2)
    gradient = md.grad(f, (0, 1, 2, 3))
    tape = md.make_tape(gradient)(*args)
    tape.check()
    assert_trees_close(tape(*args), gradient(*args), rtol=1e-6)
    assert max(fused(tape)) > 1
    untyped = md.grad(mapped(body, (P(), P(), P(), P(), P(IJ)), P(), check_rep=False), (0, 1, 2, 3))
    assert_trees_close(gradient(*args), untyped(*args), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- while the program computes


def lowered(compiled, *args):
    """The sources that ran on the ranks' data."""
    compiled(*args)
    bound = compiled.program(*args).source.namespace.values()
    programs = [p for t in bound if isinstance(t, CompiledTape) for p in t.lowered.values() if p]
    for source, _ in programs:
        source.tape.check()
    return [source.text for source, _ in programs]


def test_started_early_and_waited_for_late():
    def body(x):
        total = psum(x, "i")
        other = np.sin(np.cos(x))
        return other, total * 2

    f = mapped(body, out_specs=(P(IJ), P("j")))
    (text,) = lowered(md.jit(f), np.arange(16.0))
    lines = [line.split("#")[0].split(" = ")[-1].strip() for line in text.splitlines()[1:]]
    assert [line.split("(")[0] for line in lines[:4]] == ["psum_start", "cos", "sin", "psum_wait"]
    (text,) = lowered(md.jit(f, without=("overlap communication",)), np.arange(16.0))
    assert "psum_start" not in text and "psum(" in text
    assert_trees_close(md.jit(f)(np.arange(16.0)), f(np.arange(16.0)))


def test_nothing_to_compute_in_between():
    (text,) = lowered(md.jit(mapped(lambda x: psum(np.sin(x), "i") * 2, out_specs=P("j"))), np.arange(16.0))
    assert "psum_start" not in text and "psum(" in text


def test_one_sum_waits_for_another():
    f = mapped(lambda x: (psum(np.sin(psum(x, "i")) * x, "i"), np.cos(np.exp(x))), out_specs=(P("j"), P(IJ)))
    (text,) = lowered(md.jit(f), np.arange(16.0))
    lines = [line.split(" = ")[-1].split("(")[0] for line in text.splitlines()]
    assert [line for line in lines if "psum" in line] == ["psum", "psum_start", "psum_wait"]
    assert_trees_close(md.jit(f)(np.arange(16.0)), f(np.arange(16.0)))


def test_what_needs_a_result_lets_others_go_first():
    def body(x):
        total = psum(np.sin(x), "i")
        after = np.exp(total) + x  # recorded before what could be computed meanwhile
        return after, np.cos(np.cos(x))

    f = mapped(body, out_specs=(P(IJ), P(IJ)))
    (text,) = lowered(md.jit(f), np.arange(16.0))
    names = [line.split(" = ")[-1].split("(")[0] for line in text.splitlines()[1:]]
    assert names[:5] == ["sin", "psum_start", "cos", "cos", "psum_wait"]
    assert_trees_close(md.jit(f)(np.arange(16.0)), f(np.arange(16.0)))


def test_what_leads_to_another_sum_does_not_wait_for_others():
    """So the second one is on its way while they are computed."""

    def body(x):
        second = psum(psum(np.sin(x), "i") * x, "i")
        return second * x, np.cos(np.cos(x))

    f = mapped(body, out_specs=P(IJ))
    (text,) = lowered(md.jit(f), np.arange(16.0))
    names = [line.split(" = ")[-1].split("(")[0] for line in text.splitlines()[1:]]
    assert [name for name in names if name in ("psum", "psum_start", "cos", "psum_wait")] == [
        "psum", "psum_start", "cos", "cos", "psum_wait",
    ]  # fmt: skip
    assert_trees_close(md.jit(f)(np.arange(16.0)), f(np.arange(16.0)))


def test_effects_stay_in_order(capsys):
    def body(x):
        total = psum(np.sin(x), "i")
        md.debug.print("first {}", np.sum(total) * 0)
        md.debug.print("second {}", np.sum(np.cos(x)) * 0)
        return total

    md.jit(mapped(body, out_specs=P("j")))(np.arange(16.0))
    shown = capsys.readouterr().out
    assert shown.index("first") < shown.index("second")


def test_buckets_are_on_their_way_while_gradients_are_computed():
    mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
    params, x = parameters(5, 7, 6, 3), data("float64", (8, 5))
    (text,) = lowered(md.jit(md.value_and_grad(data_parallel(mesh)), bucket_bytes=300), params, x)
    lines = text.splitlines()
    starts = [k for k, line in enumerate(lines) if "psum_start" in line]
    waits = [k for k, line in enumerate(lines) if "psum_wait" in line]
    products = [k for k, line in enumerate(lines) if " @ " in line or "matmul" in line]
    assert len(starts) >= 2 and starts[0] < products[-1] < min(waits)


def test_results_are_the_callers_own():
    f = mapped(lambda x: (psum(x, IJ), psum(x * x, IJ)), out_specs=P())
    compiled = md.jit(f)
    a, b = compiled(np.arange(8.0))
    saved = b.copy()
    a += 100.0
    np.testing.assert_array_equal(b, saved)
    np.testing.assert_array_equal(compiled(np.arange(8.0))[0], a - 100.0)


# ---------------------------------------------------------------- properties


@settings(deadline=None, max_examples=60)
@given(random_programs(), st.booleans())
@hypothesis.example(RandomProgram([("pmax", 0, 0, ("i", "j"))], {"i": 1, "j": 3}), True)  # along an axis of one rank
@hypothesis.example(RandomProgram([("pmax", 0, 0, ("i",)), ("pmax", 0, 0, ("i",))], {"i": 2}), False)  # along one axis
def test_random_programs(program, typed):
    """Optimized or not: the same values, types and derivatives, and never more collectives."""
    _, f = program.mapped(check_rep=typed)
    x, w = data("float64", (SIDE * math.prod(program.sizes.values()), 2)), data("float64", (SIDE, 2), 1)
    tape, smaller = md.make_tape(f)(x, w), spmd.rewritten(f)(x, w)
    check_smaller(tape, smaller, x, w)

    def gradient(x, w):
        outs, pull = md.vjp(f, x, w)
        return pull(tuple(np.cos(y) for y in outs))

    tape, smaller = md.make_tape(gradient)(x, w), spmd.rewritten(gradient)(x, w)
    check_smaller(tape, smaller, x, w)
    assert_trees_close(md.jit(f)(x, w), f(x, w), rtol=1e-8, atol=1e-8)


def check_smaller(tape, smaller, *args):
    tape.check(), smaller.check()
    assert tape.out_types == smaller.out_types
    assert sum(communicating(smaller).values()) <= sum(communicating(tape).values())
    assert_trees_close(smaller(*args), tape(*args), rtol=1e-8, atol=1e-8)


@settings(deadline=None, max_examples=40)
@given(programs, placements())
def test_typed_gradients_never_communicate_more(program, placement):
    """Where types let a gathered value be invariant, a psum may take the place of a psum_scatter: both are counted.

    Each sum counts for itself: in a loop without types there are more, and these may be one call with others.
    """
    mesh, axes = placement
    args = example(program, rows=2 * math.prod(mesh.shape[a] for a in axes), seed=0)
    gradients = [md.grad(program.sharded(mesh, axes, check_rep=rep), (0, 1)) for rep in (True, False)]
    before = spmd.communication(gradients[0])(*args).counts
    fused = [spmd.communication(f, optimized=True)(*args).counts for f in gradients]
    alone = [spmd.communication(spmd.rewritten(f, without=ALONE)(*args)).counts for f in gradients]
    compared = [] if SUMS_IN_STEPS.intersection(program.steps) else [alone]
    for typed, untyped in (*compared, *([] if LOOPS.intersection(program.steps) else [fused])):
        reductions = [counts.get("psum", 0) + counts.get("psum_scatter", 0) for counts in (typed, untyped)]
        assert reductions[0] <= reductions[1]
        assert sum(typed.values()) <= sum(untyped.values())
        if "psum_scatter" not in untyped:
            assert typed.get("psum", 0) <= untyped.get("psum", 0)
    assert sum(fused[0].values()) <= sum(before.values())


def test_random_programs_are_programs():
    assert RandomProgram([("psum", 0, 0, ("i",))], {"i": 2}).mapped()[0].size == 2
