"""Arguments of custom rules: ways to call, those that are not differentiated, trees, symbolic zeros, closures."""

import functools

import numpy as np
import pytest

import minidiff as md
from minidiff import SymbolicZero
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

W = np.array([1.0, 2.0, 3.0])
WAYS = {
    "plain": lambda f: f,
    "jit": md.jit,
    "vmap": lambda f: lambda x: md.vmap(f)(np.stack([x, 2 * x])),
    "jit of vmap": lambda f: md.jit(lambda x: md.vmap(f)(np.stack([x, 2 * x]))),
}


# ---------------------------------------------------------------- ways to call


def power(f, x, n=2):
    return f(x) ** n


NOT_DIFFERENTIATED = [
    {"nondiff_argnames": ("f", "n")},
    {"nondiff_argnums": 2, "nondiff_argnames": "f"},
    {"nondiff_argnums": (0, 2), "nondiff_argnames": ("n",)},
    {"nondiff_argnums": (-1, 0)},
]


@each("options", NOT_DIFFERENTIATED)
def test_arguments_that_are_not_differentiated_come_first(options):
    """In the order of the function's arguments, however they are named."""
    forward, backward = md.custom_jvp(power, **options), md.custom_vjp(power, **options)
    forward.defjvp(lambda f, n, primals, tangents: (f(primals[0]) ** n, 10 * n * tangents[0]))
    backward.defvjp(lambda f, x, n: (f(x) ** n, None), lambda f, n, _, ct: (10 * n * ct,))
    for g in (forward, backward):
        assert g(np.cos, 0.0) == 1.0
        assert md.grad(g, argnums=1)(np.cos, 0.0) == md.grad(lambda x, g=g: g(n=2, x=x, f=np.cos))(0.0) == 20.0
        assert md.jit(md.vmap(md.grad(lambda x, g=g: g(np.cos, x, 3))))(W).tolist() == [30.0] * 3


#: Functions of a number, which they double; the rest they have by keyword only, which rules do not take.
DOUBLES = [
    lambda x, n=2.0: n * x,
    lambda x, *, n=2.0: n * x,
    functools.partial(lambda n, x: n * x, 2.0),
    functools.partial(lambda x, *, n, m=1.0: n * m * x, n=2.0),
]


@each("kind", [md.custom_jvp, md.custom_vjp])
@each("f", DOUBLES)
@each("run", [lambda f: f, md.jit])
def test_defaults_and_partials(kind, f, run):
    ruled = kind(f)
    if kind is md.custom_jvp:
        ruled.defjvp(lambda p, t: (f(*p), 5.0 * t[0]))
    else:
        ruled.defvjp(lambda *args: (f(*args), len(args)), lambda n, ct: (5.0 * ct, 0.0 * ct)[:n])
    assert run(ruled)(3.0) == 6.0 and run(md.grad(ruled))(3.0) == md.grad(lambda y: ruled(x=y))(3.0) == 5.0
    assert_trees_close(run(md.vmap(md.grad(ruled)))(W), np.full(3, 5.0))


class Scale:
    @functools.partial(md.custom_jvp, nondiff_argnums=0)
    def apply(self, x):
        return 2 * x


def test_methods_may_have_rules():
    Scale.apply.defjvp(lambda scale, primals, tangents: (2 * primals[0], 3 * tangents[0]))
    assert md.grad(Scale().apply)(1.0) == md.grad(lambda x: Scale().apply(x))(1.0) == 3.0


def test_trees_in_and_out():
    f = md.custom_vjp(lambda p, xs: {"y": p["w"] * xs[0], "z": (xs[1],)})

    def bwd(residuals, ct):
        p, xs = residuals
        return {"w": ct["y"] * xs[0], "b": None}, [ct["y"] * p["w"], 10 * ct["z"][0]]

    f.defvjp(lambda p, xs: (f(p, xs), (p, xs)), bwd)
    p, xs = {"w": 2.0, "b": (1.0, 1.0)}, [3.0, 4.0]
    loss = lambda p, xs: f(p, xs)["y"] + f(p, xs)["z"][0]  # noqa: E731
    assert md.grad(loss, (0, 1))(p, xs) == ({"w": 3.0, "b": (0.0, 0.0)}, [2.0, 10.0])


def test_integers_have_tangents_without_values():
    seen = []
    f, g = md.custom_jvp(lambda x, n: (x * n, n + 1)), md.custom_vjp(lambda x, n: (x * n, n + 1))
    f.defjvp(lambda p, t: seen.append(t[1]) or ((p[0] * p[1], p[1] + 1), (t[0] * p[1], t[1])))
    g.defvjp(lambda x, n: (g(x, n), n), lambda n, cts: (n * cts[0], None))
    for h in (f, g):
        assert md.grad(lambda x, h=h: h(x, 3)[0])(2.0) == 3.0
        np.testing.assert_array_equal(md.grad(lambda x, h=h: md.vmap(h)(x, np.arange(3))[0].sum())(W), np.arange(3))
    assert (seen[0].dtype.name, seen[0].shape) == ("void", ())


def test_integers_and_static_arguments_in_loops():
    for declare in (lambda f: None, lambda f: f.defjvp(lambda g, p, t: (g(p[1]) * p[0] + p[2].sum(), t[1] * p[0] * 2))):
        f = md.custom_vjp(lambda n, x, k, g: g(x) * n + k.sum(), nondiff_argnums=(3,))
        f.defvjp(lambda n, x, k, g: (g(x) * n + k.sum(), n), lambda g, n, ct: (None, 2.0 * n * ct, None))
        declare(f)

        def loop(x, k, f=f):
            return md.scan(lambda c, n: (f(n, c, k, lambda v: 2.0 * v), None), x, np.arange(1, 3))[0]

        for gradient in (md.grad(loop, (0, 1)), md.jit(md.grad(loop, (0, 1))), md.grad(md.jit(loop), (0, 1))):
            assert_trees_close(gradient(1.0, W), (8.0, np.zeros(3)))
    assert md.jvp(md.jit(loop), (1.0, 0 * W), (1.0, W)) == (8.0, 8.0)


# ---------------------------------------------------------------- symbolic zeros


def product(seen):
    """Products with a rule that tells which tangents are zero."""
    multiply = md.custom_jvp(lambda x, y, n: {"xy": x * y, "x": x * 2.0, "n": n + 1})

    def rule(primals, tangents):
        (x, y, n), (tx, ty, tn) = primals, tangents
        seen.append(tuple(type(t) is SymbolicZero for t in tangents))
        assert tn.dtype == md.typeof(tn.instantiate()).dtype and tn.shape == ()
        zero = SymbolicZero(md.typeof(x))
        terms = [a * b for a, b in ((tx, y), (x, ty)) if type(a) is not SymbolicZero and type(b) is not SymbolicZero]
        tangent = {"xy": sum(terms[1:], terms[0]), "x": zero if type(tx) is SymbolicZero else 2.0 * tx, "n": tn}
        return multiply(x, y, n), tangent

    multiply.defjvp(rule, symbolic_zeros=True)
    return multiply


@each("way", WAYS.values(), WAYS)
@each("wrt", ["x", "y"])
def test_a_jvp_rule_sees_which_tangents_are_zero(way, wrt):
    seen = []
    ruled = lambda x, y: sum(product(seen)(x, y, 1)[k] for k in ("xy", "x"))  # noqa: E731
    plain = lambda x, y: x * y + x * 2.0  # noqa: E731
    for of in (md.grad, lambda f: lambda x: md.jvp(f, (x,), (1.0,))[1], lambda f: md.grad(md.grad(f)), md.jacfwd):
        actual, expected = (
            way(of((lambda x: f(x, 3.0)) if wrt == "x" else (lambda x: f(3.0, x))))(2.0)  # noqa: B023
            for f in (ruled, plain)
        )
        np.testing.assert_array_equal(actual, expected)
    assert {*seen} == {(wrt == "y", wrt == "x", True)}


def test_symbolic_zeros_are_no_arrays():
    zero = SymbolicZero(md.ShapedArray((2,), np.dtype("float32")))
    assert (repr(zero), zero.ndim, zero.dtype) == ("SymbolicZero(f32[2])", 1, np.dtype("float32"))
    assert zero.instantiate().tolist() == [0, 0] and zero.instantiate().dtype == np.float32
    for use in (np.sin, lambda t: 2.0 * t, lambda t: np.ones(2) * t, md.jit(lambda t: t)):
        with pytest.raises(TypeError):
            use(zero)


def telling(perturbed, zero_cts):
    """Products by y with a rule that tells what is differentiated, and which cotangents are zero."""
    f = md.custom_vjp(lambda p, y: (p["a"] * y, p["b"] * y))

    def fwd(p, y):
        perturbed.append((p["a"].perturbed, p["b"].perturbed, y.perturbed))
        p, y = md.tree.map(lambda x: x.value, (p, y))
        return f(p, y), (p, y)

    def bwd(residuals, cts):
        p, y = residuals
        zero_cts.append(tuple(type(ct) is SymbolicZero for ct in cts))
        first, second = (ct.instantiate() if type(ct) is SymbolicZero else ct for ct in cts)
        of_b = cts[1] if type(cts[1]) is SymbolicZero else second * y
        return {"a": first * y, "b": of_b}, first * p["a"] + second * p["b"]

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


@each("way", WAYS.values(), WAYS)
@each(
    "loss, differentiated, zeros",
    [
        (lambda f: lambda x: f({"a": x, "b": 4.0}, 5.0)[0] ** 2, (True, False, False), (False, True)),
        (lambda f: lambda x: sum(f({"a": 2.0, "b": x}, x)), (False, True, True), (False, False)),
    ],
    ["first", "both"],
)
def test_a_vjp_rule_sees_what_is_not_differentiated(way, loss, differentiated, zeros):
    perturbed, zero_cts = [], []
    actual = way(md.grad(loss(telling(perturbed, zero_cts))))(2.0)
    expected = way(md.grad(loss(lambda p, y: (p["a"] * y, p["b"] * y))))(2.0)
    np.testing.assert_array_equal(actual, expected)
    assert {*perturbed} == {differentiated} and {*zero_cts} == {zeros}


@each("axes", [{}, {"axis_names": {"i"}}])
def test_symbolic_zeros_in_a_shard_map(axes):
    zero_cts = []
    f = telling([], zero_cts)
    g = mapped(lambda x: f({"a": x, "b": x}, 0 * x + 5.0)[0], mesh(2, 2), P("i"), P("i"), **axes)
    np.testing.assert_array_equal(md.grad(lambda x: np.sum(g(x) ** 2))(np.arange(4.0)), 50 * np.arange(4.0))
    assert {*zero_cts} == {(False, True)}


# ---------------------------------------------------------------- closure_convert


def test_what_is_hoisted():
    seen = []

    def outer(w, n, x):
        f, values = md.closure_convert(lambda x, y: {"out": w * x["x"] + n + y + W[0]}, {"x": 1.0}, 2.0)
        seen.append(values)
        return f({"x": x}, 2.0, *values)["out"]

    assert md.grad(outer)(3.0, 4, 5.0) == 5.0 and len(seen[-1]) == 1
    assert md.jit(outer)(3.0, 4, 5.0) == 22.0 and len(seen[-1]) == 1  # an integer stays in the closure
    assert md.vmap(outer, in_axes=(0, None, None))(W, 4, 5.0).tolist() == [12.0, 17.0, 22.0]
    f, values = md.closure_convert(lambda x: x * W, 1.0)
    assert values == [] and f(2.0).tolist() == [2.0, 4.0, 6.0]
