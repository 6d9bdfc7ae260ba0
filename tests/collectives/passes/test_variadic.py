"""A psum of several values: transposition by the inner product, tangents of some, batches of some."""

import numpy as np
import pytest

import minidiff as md
from collectives.ops import psum_p, untyped_psum_p
from collectives.passes.variadic import variadic
from minidiff.compiler.program import optimize
from spmd import P
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.checks.rewrites import data, fused, mapped
from tests.checks.samples import each


@each("typed", [True, False])
def test_rules_of_several(typed):
    sum_p, on = variadic(psum_p if typed else untyped_psum_p), mesh(3)

    def f(x, y, z):
        on_blocks = lambda *blocks: sum_p.bind(*blocks, axes=("i",), size=3)  # noqa: E731
        return mapped(on_blocks, P("i"), P(), on, check_rep=typed)(x, y, z)

    args = [data("float64", shape, k) for k, shape in enumerate([(6, 2), (3,), (9, 1)])]
    whole = lambda *args: [x.reshape(3, -1, *x.shape[1:]).sum(0) for x in args]  # noqa: E731
    expected = whole(*args)
    on.reset_calls()
    assert_trees_close(f(*args), expected)
    assert on.calls == {"psum": 1} and on.bytes == {"psum": 8 * (4 + 1 + 3)}
    md.make_tape(f)(*args).check()
    cts = [data("float64", x.shape, 9) for x in expected]
    assert_trees_close(md.vjp(f, *args)[1](cts), md.vjp(whole, *args)[1](cts))
    for k in (0, 1):
        some = lambda g, k=k: lambda y: g(args[0], y, args[2])[k]  # noqa: E731
        assert_trees_close(md.jvp(some(f), args[1:2], args[1:2]), md.jvp(some(whole), args[1:2], args[1:2]))
        square = lambda g, some=some: lambda y: (some(g)(y) ** 2).sum()  # noqa: E731
        assert_trees_close(*[md.grad(square(g))(args[1]) for g in (f, whole)])
    batches = np.stack([args[0]] * 2), args[1], np.stack([args[2], 2 * args[2]])
    assert_trees_close(*[md.vmap(g, in_axes=(0, None, 0))(*batches) for g in (f, whole)])


def test_several_along_a_named_batch():
    f = lambda x, y: variadic(untyped_psum_p).bind(x, y, axes=("b",), size=4)  # noqa: E731
    x, y = data("float64", (4, 2)), np.arange(3.0)
    sums = md.vmap(f, in_axes=(0, None), axis_name="b")(x, y)
    assert_trees_close(sums, [np.stack([x.sum(0)] * 4), np.stack([4 * y] * 4)])


def test_of_one_dtype():
    f = mapped(lambda x: variadic(psum_p).bind(x, x.astype("float32"), axes=("i",), size=2), out_specs=P("j"))
    with pytest.raises(TypeError, match=r"f64\[2\]\{i,j\}, f32"):
        md.make_tape(f)(np.ones(8))


@each("used, expected", [(slice(None, None, 2), [2]), (1, [1])])
def test_results_that_nobody_takes_are_not_summed(used, expected):
    f = mapped(lambda x: variadic(psum_p).bind(x, x * x, x + 1, axes=("i",), size=2), out_specs=P("j"))
    assert fused(optimize(md.make_tape(lambda x: f(x)[used])(np.ones(8)))) == expected
