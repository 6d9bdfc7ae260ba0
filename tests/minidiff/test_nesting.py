"""Transformations in any order: stacks of them, compared with the same derivatives by nested forward mode alone.

Each layer makes a function of two vectors out of another one: it takes a derivative, or it is a detour that changes
nothing (a checkpoint, a compilation, the mean over ranks that all compute the same).
"""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import axis_index, pbroadcast, pmean, psum
from spmd import P
from tests.checks.samples import each

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
N = 3
X, C = np.array([0.3, -0.5, 0.8]), np.array([0.7, 0.4, -0.2])
V = np.array([0.5, -1.0, 0.25])
A = np.sin(np.arange(9.0)).reshape(3, 3)

# ---------------------------------------------------------------- functions of two vectors


def of_tree(x, c):
    def inner(tree):
        return {"y": np.sin(tree["x"]) * tree["c"], "z": (tree["x"][0] ** 2, np.tanh(tree["c"]))}

    out = inner({"x": x, "c": c})
    return out["y"] + out["z"][0] * out["z"][1]


def with_closure(x, c):
    return np.stack([np.cos(t * c[1]) + c[0] for t in x]) * c


BASES = {
    "products": lambda x, c: np.sin(x) * c + 0.5 * x[::-1] * np.sum(c),
    "matrix": lambda x, c: np.tanh(A @ x * c) + c * c,
    "tree": of_tree,
    "closure": with_closure,
    "pieces": lambda x, c: np.where(x > 0, np.exp(0.5 * x) * c, np.abs(x) + c**3),
    "updates": lambda x, c: np.concatenate([x[1:] * c[0], np.cos(x[:1])]) + np.at(x * c)[1].set(c[2] * x[0]),
}

# ---------------------------------------------------------------- layers: what is tested, and what it must be


def ranks(f):
    mapped = spmd.shard_map(lambda y, c: psum(f(y, c), ("i", "j")) / 4, mesh=MESH, in_specs=P(), out_specs=P())
    return lambda x, c: mapped(x, c)


def ranks_closing_over(f):
    # Each rank has c for itself: a derivative in it, in the body, is that of this rank alone.
    def g(x, c):
        body = lambda y: pmean(f(y[0], pbroadcast(c, "i")), "i")  # noqa: E731
        return spmd.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P())(np.stack([x, x]))

    return g


def ranks_along_one_axis(f):
    """Leaving the other axis to one inside. All ranks have x and c alike, and a share of the result."""
    body = lambda x, c: psum(f(x, c) * (1 + axis_index("i")) / 3, "i")  # noqa: E731
    return lambda x, c: spmd.shard_map(body, mesh=MESH, in_specs=P(), out_specs=P(), axis_names={"i"})(x, c)


def ranks_along_the_other(f):
    body = lambda y, c: f(y, c)[None]  # noqa: E731
    return lambda x, c: spmd.shard_map(body, mesh=MESH, in_specs=P(), out_specs=P("j"), axis_names={"j"})(x, c)[1]


def sharded_result(f):
    def g(x, c):
        body = lambda y: f(y[0], pbroadcast(c, ("i", "j")))[None]  # noqa: E731
        return spmd.shard_map(body, mesh=MESH, in_specs=P(("i", "j")), out_specs=P(("i", "j")))(np.stack([x] * 4))[2]

    return g


def with_jvp(f):
    g = md.custom_jvp(lambda x, c: f(x, c))
    g.defjvp(lambda primals, tangents: md.jvp(f, primals, tangents))
    return lambda x, c: g(x, c)


def with_vjp(f):
    g = md.custom_vjp(lambda x, c: f(x, c))
    g.defvjp(lambda x, c: (f(x, c), (x, c)), lambda xc, ct: md.vjp(f, *xc)[1](ct))
    return lambda x, c: g(x, c)


def with_both_rules(f):
    g = md.custom_vjp(lambda x, c: f(x, c))
    g.defvjp(lambda x, c: (f(x, c), (x, c)), lambda xc, ct: md.vjp(f, *xc)[1](ct))
    g.defjvp(lambda primals, tangents: md.jvp(f, primals, tangents))
    return lambda x, c: g(x, c)


def steps(f, n):
    def g(x, c):
        for _ in range(n):
            x = 0.5 * f(x, c)
        return x

    return g


def jacobian(f, x, c):
    """By forward mode, column by column."""
    return np.stack([md.jvp(lambda y: f(y, c), (x,), (e,))[1] for e in np.eye(N)], -1)


def plain_grad(f, x):
    return np.stack([md.jvp(f, (x,), (e,))[1] for e in np.eye(N)])


def unless(f, x, c):
    return f(x, c) if (x * x).sum() > 0.5 else -f(x, c) * c


def while_some(f):
    def body(state):
        n, y, c = state
        return n + 1, 0.5 * f(y, c), c

    return lambda x, c: md.while_loop(lambda state: state[0] < 2, body, (0, x, c))[1]


def named(f):
    def program(*args):
        return f(*args)

    return program


def same(f):
    return f


LAYERS = {
    # ways around
    "checkpoint": (md.checkpoint, same),
    "checkpoint, closed over": (lambda f: lambda x, c: md.checkpoint(lambda y: f(y, c))(x), same),
    "checkpoint, policy": (lambda f: md.checkpoint(f, policy=lambda op, *_, **__: str(op) in ("sin", "matmul")), same),
    "jit": (lambda f: md.jit(named(f)), same),
    "jit, closed over": (lambda f: lambda x, c: md.jit(named(lambda y: f(y, c)))(x), same),
    "tape": (lambda f: lambda x, c: md.make_tape(f)(x, c)(x, c)[0], same),
    "tape, closed over": (lambda f: lambda x, c: md.make_tape(lambda y: f(y, c))(x)(x)[0], same),
    "vmap of one": (lambda f: lambda x, c: md.vmap(f, (0, None))(x[None], c)[0], same),
    "vmap, closed over": (lambda f: lambda x, c: md.vmap(lambda y: f(y, c), 1, 1)(np.stack([x, -x], 1))[:, 0], same),
    "named vmap": (
        lambda f: lambda x, c: md.vmap(lambda y: pmean(f(y, c), "v"), axis_name="v")(np.stack([x, x]))[1],
        same,
    ),
    "shard_map": (ranks, same),
    "shard_map, closed over": (ranks_closing_over, same),
    "shard_map, mapped": (sharded_result, same),
    "shard_map along i": (ranks_along_one_axis, same),
    "shard_map along j": (ranks_along_the_other, same),
    "custom_jvp": (with_jvp, same),
    "custom_vjp": (with_vjp, same),
    "custom_vjp with both rules": (with_both_rules, same),
    # programs
    "scan": (
        lambda f: lambda x, c: md.scan(lambda y, d: (0.5 * f(y, d), y), x, np.stack([c, c]))[0],
        lambda f: steps(f, 2),
    ),
    "scan, closed over": (
        lambda f: lambda x, c: md.scan(lambda y, _: (y, f(y, c)), x, length=2)[1][1],
        same,
    ),
    "fori_loop": (lambda f: lambda x, c: md.fori_loop(0, 2, lambda i, y: 0.5 * f(y, c), x), lambda f: steps(f, 2)),
    "while_loop": (while_some, lambda f: steps(f, 2)),
    "cond": (
        lambda f: lambda x, c: md.cond((x * x).sum() > 0.5, f, lambda y, d: -f(y, d) * c, x, c),
        lambda f: lambda x, c: unless(f, x, c),
    ),
    "cond, closed over": (
        lambda f: lambda x, c: md.cond((x * x).sum() > 0.5, lambda: f(x, c), lambda: -f(x, c) * c),
        lambda f: lambda x, c: unless(f, x, c),
    ),
    # derivatives
    "grad": (
        lambda f: lambda x, c: md.grad(lambda y: f(y, c).sum())(x),
        lambda f: lambda x, c: plain_grad(lambda y: f(y, c).sum(), x),
    ),
    "grad in what is closed over": (
        lambda f: lambda x, c: md.grad(lambda d: f(x, d).sum())(c),
        lambda f: lambda x, c: plain_grad(lambda d: f(x, d).sum(), c),
    ),
    "grad in both": (
        lambda f: lambda x, c: sum(md.grad(lambda y, d: f(y, d).sum(), (0, 1))(x, c)),
        lambda f: lambda x, c: plain_grad(lambda y: f(y, c).sum(), x) + plain_grad(lambda d: f(x, d).sum(), c),
    ),
    "jvp": (
        lambda f: lambda x, c: md.jvp(f, (x, c), (c, V))[1],
        lambda f: lambda x, c: md.jvp(f, (x, c), (c, V))[1],
    ),
    "linearize": (
        lambda f: lambda x, c: md.linearize(lambda y: f(y, c), x)[1](c),
        lambda f: lambda x, c: jacobian(f, x, c) @ c,
    ),
    "vjp": (
        lambda f: lambda x, c: md.vjp(lambda y: f(y, c), x)[1](c)[0],
        lambda f: lambda x, c: c @ jacobian(f, x, c),
    ),
    "jacfwd": (lambda f: lambda x, c: md.jacfwd(f)(x, c) @ V, lambda f: lambda x, c: jacobian(f, x, c) @ V),
    "jacrev": (lambda f: lambda x, c: md.jacrev(f)(x, c) @ c, lambda f: lambda x, c: jacobian(f, x, c) @ c),
    "hessian": (
        lambda f: lambda x, c: md.hessian(lambda y: f(y, c).sum())(x) @ c,
        lambda f: lambda x, c: md.jvp(lambda y: plain_grad(lambda z: f(z, c).sum(), y), (x,), (c,))[1],
    ),
    "hvp": (
        lambda f: lambda x, c: md.hvp(lambda y: f(y, c).sum(), (x,), (c,)),
        lambda f: lambda x, c: md.jvp(lambda y: plain_grad(lambda z: f(z, c).sum(), y), (x,), (c,))[1],
    ),
}

FORWARD = {"custom_jvp", "jvp", "linearize", "jacfwd", "tangent"}
FORWARD_OVER_REVERSE = {"hessian", "hvp"}
REVERSE = {
    *("grad", "grad in what is closed over", "grad in both", "vjp", "jacrev", "gradient"),
    *("custom_vjp", "custom_vjp with both rules"),
}
DERIVATIVES = FORWARD | FORWARD_OVER_REVERSE | REVERSE


def outside_of(layer, names):
    """The layers around the innermost one that is called so; none if there is no such layer."""
    return names[names.index(layer) + 1 :] if layer in names else []


def is_forward_through_a_backward_rule(names):
    """First derivatives of a function with a backward rule; any forward derivative of one in another's rules."""
    outside = outside_of("custom_vjp", names)
    if names.count("custom_vjp") + names.count("custom_vjp with both rules") > 1:
        return not (FORWARD | FORWARD_OVER_REVERSE).isdisjoint(outside)
    return next((name for name in outside if name in DERIVATIVES), None) in FORWARD


def is_reverse_through_a_while_loop(names):
    return not (REVERSE | FORWARD_OVER_REVERSE).isdisjoint(outside_of("while_loop", names))


def has_two_maps_over_ranks(names):
    return sum(name.startswith("shard_map") for name in names) > 1


#: The errors that say what has no derivative of a kind: of which stacks of layers, the last one being the outermost.
DOCUMENTED = {
    "has a backward rule only": is_forward_through_a_backward_rule,
    "while_loop cannot be differentiated in reverse": is_reverse_through_a_while_loop,
    "inside the body of another": has_two_maps_over_ranks,
    "the outer one maps over": has_two_maps_over_ranks,
}

OUTERMOST = {
    "value": lambda f: (f(X, C),) * 2,
    "gradient": lambda f: md.grad(lambda x, c: (f(x, c) * V).sum(), (0, 1))(X, C),
    "tangent": lambda f: md.jvp(f, (X, C), (V, X)),
}


def plain_gradient(f):
    return plain_grad(lambda x: (f(x, C) * V).sum(), X), plain_grad(lambda c: (f(X, c) * V).sum(), C)


def stacked(base, names, which):
    f = BASES[base]
    for name in names:
        f = LAYERS[name][which](f)
    return f


def check(base, names):
    """Compare the derivatives that the stack has. Returns those that it does not have, by an error that allows it."""
    absent = set()
    for label, result in OUTERMOST.items():
        try:
            actual = result(stacked(base, names, 0))
        except (TypeError, ValueError, md.VarianceError) as error:
            if not any(text in str(error) and allows([*names, label]) for text, allows in DOCUMENTED.items()):
                raise
            absent.add(label)
            continue
        expected = (plain_gradient if label == "gradient" else result)(stacked(base, names, 1))
        for a, b in zip(actual, expected):
            numpy.testing.assert_allclose(np.asarray(a), b, rtol=1e-7, atol=1e-8, err_msg=f"{label}: {base}, {names}")
    return absent


@each("name", LAYERS)
def test_each_layer_alone(name):
    assert check("products", [name]) == {"custom_vjp": {"tangent"}, "while_loop": {"gradient"}}.get(name, set())


#: Each of these multiplies the work: with more than two of them in a stack, one example can take minutes.
COSTLY = {"hessian", "hvp", "jacrev", "jacfwd", "grad in both"}
stacks = st.lists(st.sampled_from(list(LAYERS)), min_size=2, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(BASES)), stacks.filter(lambda names: sum(name in COSTLY for name in names) <= 2))
def test_layers_in_any_order(base, names):
    check(base, names)


# ---------------------------------------------------------------- found by the above


@pytest.mark.parametrize(
    "base, names",
    [
        ("updates", ["hvp", "vmap of one"]),  # a sum of cotangents that became a batch, and is added to again
        ("products", ["shard_map, mapped", "jit, closed over"]),  # staged, and closing over what is outside the stage
        ("products", ["shard_map, closed over", "tape, closed over", "grad"]),
        ("products", ["grad in what is closed over", "shard_map along i"]),
        ("pieces", ["grad", "shard_map", "hvp", "shard_map along i"]),
        ("updates", ["scan", "hessian"]),  # the zero that a loop hands to the transpose of an update
        ("updates", ["scan", "jacrev", "vjp", "shard_map, closed over"]),  # which ranks have each for themselves
        ("matrix", ["shard_map, closed over", "hessian", "hessian"]),  # what ranks have each, and what is split, added
    ],
)
def test_examples(base, names):
    assert not check(base, names)


@pytest.mark.parametrize(
    "names, absent",
    [
        (["custom_vjp", "jvp", "custom_vjp"], set(OUTERMOST)),  # forward mode in a rule, of one with a backward rule
        (["custom_vjp", "custom_vjp", "hessian"], set(OUTERMOST)),
        (["custom_vjp", "hessian", "jvp"], set()),
        (["custom_vjp", "scan", "jit"], {"tangent"}),
        (["custom_vjp", "scan", "jit", "grad", "jit"], set()),
        (["custom_vjp", "custom_vjp", "fori_loop", "checkpoint", "grad"], {"tangent"}),
        (["custom_vjp", "custom_vjp", "fori_loop", "checkpoint", "grad", "vjp"], set()),
        (["custom_vjp", "cond", "vmap, closed over", "tape", "hessian"], set()),
        (["custom_vjp", "scan, closed over", "shard_map, mapped", "tape", "grad in both"], set()),
        (["custom_vjp with both rules", "scan", "jit", "jvp", "tape", "custom_vjp with both rules"], set()),
    ],
)
def test_examples_of_backward_rules(names, absent):
    assert check("products", names) == absent


# ---------------------------------------------------------------- perturbation confusion


def derivative(f):
    return lambda x: md.jvp(f, (x,), (1.0,))[1]


D = {"grad": md.grad, "jvp": derivative, "jacfwd": md.jacfwd, "jacrev": md.jacrev}


@each("outer", D)
@each("inner", D)
def test_perturbations_are_not_confused(outer, inner):
    outer, inner = D[outer], D[inner]
    assert outer(lambda x: x * inner(lambda y: x + y)(1.0))(1.0) == 1.0
    assert outer(lambda x: x * inner(lambda y: x * y)(x))(3.0) == 6.0
    assert outer(lambda x: inner(lambda y: x * x * y * y * y)(2.0) + inner(lambda x: x**2)(x))(3.0) == 2 * 3 * 12 + 2
    # a function that hands out functions: its derivative is one in x, whatever is done with what it hands out
    shifted = lambda x: lambda f: lambda y: f(x + y)  # noqa: E731
    twice = outer(lambda x: inner(shifted(x)(inner(shifted(x)(np.exp))))(0.5))(0.0)
    assert twice == pytest.approx(2 * np.exp(0.5))


@pytest.mark.parametrize("outer", D)
def test_a_curried_derivative(outer):
    """The derivative of x -> (the derivative of y -> f(x, y)), of which f captures more than one level."""
    f = lambda x: derivative(lambda y: md.grad(lambda z: x * y * z * np.sin(x * z))(y))(2.0)  # noqa: E731
    assert D[outer](f)(0.7) == pytest.approx((f(0.7 + 1e-6) - f(0.7 - 1e-6)) / 2e-6, rel=1e-6)


# ---------------------------------------------------------------- second derivatives where there are ties


@each(
    "f, at, second",
    [
        (lambda x: np.where(x > 0, x**3, x**2), 0.0, 2.0),
        (lambda x: np.where(x >= 0, x**3, x**2), 0.0, 0.0),
        (lambda x: np.abs(x) * x, 0.0, 0.0),
        (lambda x: np.maximum(x * x, x), 1.0, 1.0),  # half of each: (2 + 0) / 2
        (lambda x: np.max(np.stack([x * x, x, -x])), 1.0, 1.0),
        (lambda x: np.minimum(x**3, x**3), 2.0, 12.0),
        (lambda x: np.clip(x, -1.0, 1.0) ** 2, 0.5, 2.0),
        (lambda x: md.cond(x > 0, lambda: x**3, lambda: x**2), 0.0, 2.0),
    ],
)
@each("outer", D)
@each("inner", D)
def test_second_derivatives_at_ties(f, at, second, outer, inner):
    assert D[outer](D[inner](f))(at) == second


# ---------------------------------------------------------------- captured values


def in_scan(x):
    return md.scan(lambda s, t: (s * x + t, s * x), x, np.arange(3.0))[1].sum()


def in_rule_argument(x):
    g = md.custom_jvp(lambda y, z: y * z)
    g.defjvp(lambda yz, t: (yz[0] * yz[1], t[0] * yz[1] + yz[0] * t[1]))
    return md.vmap(lambda y: g(y, x))(np.arange(3.0)).sum() * x


CAPTURES = {
    "scan": in_scan,
    "cond": lambda x: md.cond(x > 0, lambda y: x * y * y, lambda y: y, x * 2.0),
    "fori_loop": lambda x: md.fori_loop(0, 3, lambda i, s: s * x + i, x * 1.0),
    "shard_map": lambda x: spmd.shard_map(
        lambda b: psum((b * x * np.sin(x)).sum(), "i"), mesh=MESH, in_specs=P("i"), out_specs=P()
    )(np.arange(4.0)),
    "checkpoint": lambda x: md.checkpoint(lambda y: np.sin(x * y) * x)(x * x),
    "jit": lambda x: md.jit(named(lambda y: np.sin(x * y) * x))(x * x),
    "tape": lambda x: md.make_tape(lambda y: np.sin(x * y) * x)(1.0)(x * x)[0],
    "vmap": lambda x: md.vmap(lambda y: np.sin(x * y) * x)(x * np.arange(3.0)).sum(),
    "an argument of a rule": in_rule_argument,
    "pullback": lambda x: md.vjp(lambda y: x * y * y, x)[1](x)[0],
    "linearize": lambda x: md.linearize(lambda y: x * y * y, x)[1](x * x),
}


@each("name", CAPTURES)
@each("staged", [False, True])
def test_derivatives_in_captured_values(name, staged):
    """To the second order, in both modes, eagerly and on tapes."""
    f, x = CAPTURES[name], 0.6
    if staged:
        f = lambda x, f=CAPTURES[name]: md.make_tape(f)(x)(x)[0]  # noqa: E731
        staged_grad = md.make_tape(md.grad(CAPTURES[name]))(x)(x)[0]
        assert staged_grad == pytest.approx(md.grad(CAPTURES[name])(x), rel=1e-12)
    h = 1e-4
    plain = CAPTURES[name]
    first, second = (plain(x + h) - plain(x - h)) / (2 * h), (plain(x + h) - 2 * plain(x) + plain(x - h)) / h**2
    for one in D.values():
        assert one(f)(x) == pytest.approx(first, rel=1e-6)
        for two in D.values():
            assert two(one(f))(x) == pytest.approx(second, rel=1e-5, abs=1e-6)
