"""Custom rules: arguments named by `nondiff_argnames`, symbolic zeros, closures that become arguments."""

import numpy as np
import pytest

import minidiff as md
import spmd
from minidiff import SymbolicZero
from spmd import P

W = np.array([1.0, 2.0, 3.0])

# ---------------------------------------------------------------- nondiff_argnames


def power(f, x, n=2):
    return f(x) ** n


@pytest.mark.parametrize(
    "options",
    [
        {"nondiff_argnames": ("f", "n")},
        {"nondiff_argnames": ["n", "f"]},
        {"nondiff_argnums": 2, "nondiff_argnames": "f"},
        {"nondiff_argnums": (0, 2), "nondiff_argnames": ("n",)},
    ],
    ids=str,
)
def test_arguments_that_are_named(options):
    """Rules take them first, in the order of the function's arguments."""
    forward = md.custom_jvp(power, **options)
    forward.defjvp(lambda f, n, primals, tangents: (f(primals[0]) ** n, 10 * n * tangents[0]))
    backward = md.custom_vjp(power, **options)
    backward.defvjp(lambda f, x, n: (f(x) ** n, None), lambda f, n, _, ct: (10 * n * ct,))
    for g in (forward, backward):
        assert g(np.cos, 0.0) == 1.0
        assert md.grad(g, argnums=1)(np.cos, 0.0) == md.grad(lambda x, g=g: g(n=2, x=x, f=np.cos))(0.0) == 20.0
        assert md.jit(md.vmap(md.grad(lambda x, g=g: g(np.cos, x, 3))))(W).tolist() == [30.0] * 3


@pytest.mark.parametrize("custom", [md.custom_jvp, md.custom_vjp])
def test_a_name_that_is_no_argument(custom):
    with pytest.raises(TypeError, match=r"argnames names 'm', .*its positional arguments are \['f', 'x', 'n'\]"):
        custom(power, nondiff_argnames=("f", "m"))


# ---------------------------------------------------------------- symbolic zeros of a jvp rule


def product(rule_saw):
    """The product with a rule that tells which tangents are zero."""

    @md.custom_jvp
    def multiply(x, y, n):
        return {"xy": x * y, "x": x * 2.0, "n": n + 1}

    def rule(primals, tangents):
        (x, y, n), (tx, ty, tn) = primals, tangents
        rule_saw.append([type(t) is SymbolicZero for t in tangents])
        assert tn.dtype == md.typeof(tn.instantiate()).dtype and tn.shape == ()
        zero = SymbolicZero(md.typeof(x))
        terms = [a * b for a, b in ((tx, y), (x, ty)) if type(a) is not SymbolicZero and type(b) is not SymbolicZero]
        tangent = {"xy": sum(terms[1:], terms[0]), "x": zero if type(tx) is SymbolicZero else 2.0 * tx, "n": tn}
        return multiply(x, y, n), tangent

    multiply.defjvp(rule, symbolic_zeros=True)
    return multiply


def plain_product(x, y, n):
    return {"xy": x * y, "x": x * 2.0, "n": n + 1}


WAYS = {
    "plain": lambda f: f,
    "jit": md.jit,
    "vmap": lambda f: lambda x: md.vmap(f)(np.stack([x, 2 * x])),
    "jit of vmap": lambda f: md.jit(lambda x: md.vmap(f)(np.stack([x, 2 * x]))),
    "tape": lambda f: lambda x: md.make_tape(f)(x)(x)[0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrt", ["x", "y"])
def test_a_jvp_rule_sees_which_tangents_are_zero(way, wrt):
    seen = []

    def loss(multiply):
        def f(x):
            out = multiply(x, 3.0, 1) if wrt == "x" else multiply(3.0, x, 1)
            return out["xy"] + out["x"]

        return f

    local, expected = loss(product(seen)), loss(plain_product)
    for of in (md.grad, lambda f: lambda x: md.jvp(f, (x,), (1.0,))[1], lambda f: md.grad(md.grad(f)), md.jacfwd):
        np.testing.assert_array_equal(WAYS[way](of(local))(2.0), WAYS[way](of(expected))(2.0))
    assert {*map(tuple, seen)} == {(wrt == "y", wrt == "x", True)}


def test_symbolic_zeros_are_no_arrays():
    zero = SymbolicZero(md.ShapedArray((2,), np.dtype("float32")))
    assert (repr(zero), zero.ndim, zero.dtype) == ("SymbolicZero(f32[2])", 1, np.dtype("float32"))
    assert zero.instantiate().tolist() == [0, 0] and zero.instantiate().dtype == np.float32
    for use in (np.sin, lambda t: 2.0 * t, lambda t: np.ones(2) * t, md.jit(lambda t: t)):
        with pytest.raises(TypeError, match=r"SymbolicZero|unsupported operand"):
            use(zero)


def test_rules_get_arrays_unless_they_ask():
    """Also those that `defjvps` makes, declared after one that asked."""
    f = product([])
    f.defjvps(lambda t, out, *_: {"xy": t * 3.0, "x": t * 2.0, "n": 0}, None, None)
    assert md.grad(lambda x: f(x, 3.0, 1)["xy"])(2.0) == 3.0


# ---------------------------------------------------------------- symbolic zeros of a vjp rule


def telling(perturbed, zero_cts):
    @md.custom_vjp
    def f(p, y):
        return p["a"] * y, p["b"] * y

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


@pytest.mark.parametrize("way", WAYS)
def test_a_vjp_rule_sees_what_is_not_differentiated(way):
    perturbed, zero_cts = [], []
    f = telling(perturbed, zero_cts)
    plain = lambda p, y: (p["a"] * y, p["b"] * y)  # noqa: E731
    loss = lambda f: lambda x: f({"a": x, "b": 4.0}, 5.0)[0] ** 2  # noqa: E731
    np.testing.assert_array_equal(WAYS[way](md.grad(loss(f)))(2.0), WAYS[way](md.grad(loss(plain)))(2.0))
    assert {*perturbed} == {(True, False, False)} and {*zero_cts} == {(False, True)}
    perturbed.clear(), zero_cts.clear()
    loss = lambda f: lambda x: sum(f({"a": 2.0, "b": x}, x))  # noqa: E731
    np.testing.assert_array_equal(WAYS[way](md.grad(loss(f)))(3.0), WAYS[way](md.grad(loss(plain)))(3.0))
    assert {*perturbed} == {(False, True, True)} and {*zero_cts} == {(False, False)}


@pytest.mark.parametrize("mapped", [None, {"i"}])
def test_symbolic_zeros_in_a_shard_map(mapped):
    zero_cts = []
    f = telling([], zero_cts)
    mesh = spmd.make_mesh((2, 2), ("i", "j"))
    axes = {} if mapped is None else {"axis_names": mapped}
    g = spmd.shard_map(
        lambda x: f({"a": x, "b": x}, 0 * x + 5.0)[0], mesh=mesh, in_specs=P("i"), out_specs=P("i"), **axes
    )
    actual = md.grad(lambda x: np.sum(g(x) ** 2))(np.arange(4.0))
    np.testing.assert_array_equal(actual, 50 * np.arange(4.0))
    assert {*zero_cts} == {(False, True)}


# ---------------------------------------------------------------- closure_convert


def root_of(objective, guess):
    """The root of an objective by Newton's method, with the derivative of the implicit function."""
    f, values = md.closure_convert(objective, guess)
    return _root(f, guess, *values)


def _root(f, guess, *values):
    x = guess
    for _ in range(6):
        x = x - f(x, *values) / md.grad(f)(x, *values)
    return x


_root = md.custom_vjp(_root, nondiff_argnums=(0,))


def _root_forward(f, guess, *values):
    x = _root(f, guess, *values)
    return x, (x, values)


def _root_backward(f, residuals, ct):
    x, values = residuals
    slope, *of_values = md.grad(f, argnums=tuple(range(len(values) + 1)))(x, *values)
    return None, *[-ct * v / slope for v in of_values]


_root.defvjp(_root_forward, _root_backward)


@pytest.mark.parametrize("way", WAYS)
def test_a_rule_of_a_function_that_closes_over_what_is_differentiated(way):
    constant = np.array([1.0, 2.0])  # it stays in the closure
    square_root = lambda w: root_of(lambda x: x**2 - w * constant[0], 1.0)  # noqa: E731
    actual = WAYS[way](md.grad(square_root))(4.0)
    np.testing.assert_allclose(actual, WAYS[way](lambda w: 0.5 / np.sqrt(w))(4.0), rtol=1e-6)
    with pytest.raises(TypeError, match="closes over a value"):
        md.grad(lambda w: _root(lambda x: x**2 - w, 1.0))(4.0)


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


def test_a_converted_function_checks_its_arguments():
    f, _ = md.closure_convert(lambda p: p["x"] * 2, {"x": np.ones(2)})
    with pytest.raises(TypeError, match=r"closure_convert of .*: it was traced for arguments \(\{'x': \*\},\), got"):
        f({"y": np.ones(2)})
    with pytest.raises(TypeError, match=r"args\[0\]\['x'\] has type f64\[3\], but it was traced for f64\[2\]"):
        f({"x": np.ones(3)})
    with pytest.raises(TypeError, match=r"args\[0\]\['x'\]: expected an array or a number, got str"):
        f({"x": "text"})
