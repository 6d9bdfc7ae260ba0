"""Transformations in any order: stacks of them, compared with the same derivatives by nested forward mode alone."""

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
import minidiff.numpy as np
from tests.checks.samples import each
from tests.programs.stacks import BASES, LAYERS, V, plain_grad

X, C = np.array([0.3, -0.5, 0.8]), np.array([0.7, 0.4, -0.2])

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


#: The errors that say what has no derivative of a kind: of which stacks of layers, the last one being the outermost.
DOCUMENTED = {
    "has a backward rule only": is_forward_through_a_backward_rule,
    "while_loop cannot be differentiated in reverse": lambda names: (
        not (REVERSE | FORWARD_OVER_REVERSE).isdisjoint(outside_of("while_loop", names))
    ),
    "inside the body of another": lambda names: sum(name.startswith("shard_map") for name in names) > 1,
    "the outer one maps over": lambda names: sum(name.startswith("shard_map") for name in names) > 1,
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
def test_each_layer_alone_and_differentiated(name):
    assert check("products", [name]) == {"custom_vjp": {"tangent"}, "while_loop": {"gradient"}}.get(name, set())
    check("products", [name, "grad"])


#: Each of these multiplies the work: with more than two of them in a stack, one example can take minutes.
COSTLY = {"hessian", "hvp", "jacrev", "jacfwd", "grad in both"}
stacks = st.lists(st.sampled_from(list(LAYERS)), min_size=2, max_size=4)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(BASES)), stacks.filter(lambda names: sum(name in COSTLY for name in names) <= 2))
def test_layers_in_any_order(base, names):
    check(base, names)


# ---------------------------------------------------------------- found by the above


@each(
    "base, names",
    [
        ("updates", ["hvp", "vmap, closed over"]),  # a sum of cotangents that became a batch, and is added to again
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


@each(
    "names, absent",
    [
        (["custom_vjp", "jvp", "custom_vjp"], set(OUTERMOST)),  # forward mode in a rule, of one with a backward rule
        (["custom_vjp", "custom_vjp", "hessian"], set(OUTERMOST)),
        (["custom_vjp", "scan", "jit", "grad", "jit"], set()),
        (["custom_vjp", "cond", "vmap, closed over", "tape", "hessian"], set()),
        (["custom_vjp", "scan, closed over", "shard_map, mapped", "tape", "grad in both"], set()),
        (["custom_vjp with both rules", "scan", "jit", "jvp", "tape", "custom_vjp with both rules"], set()),
    ],
)
def test_examples_of_backward_rules(names, absent):
    assert check("products", names) == absent
