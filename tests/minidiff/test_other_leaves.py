"""Trees with strings, functions, integers and None among their leaves, under all transformations."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import minidiff as md
import spmd
from minidiff import optim
from spmd import P
from tests.checks.samples import each

W = np.array([0.5, -1.0])
PARAMS = {"w": W, "name": "linear", "f": np.tanh, "n": 3, "flag": True, "ids": np.arange(2), "none": None}
NUMBERS = {"w": W}
NONE = dict.fromkeys(("name", "f", "n", "flag", "ids", "none"))


def outputs(p):
    assert p["name"] == "linear" and p["none"] is None and p["ids"].dtype == int
    return p["f"](p["w"]) * p["n"]


def loss(p):
    return (outputs(p) ** 2).sum()


def of_numbers(f):
    return lambda p: f({**PARAMS, **p})


def assert_like(actual, expected):
    """The same tree: None where there is no number, and the derivative at w."""
    assert md.tree.structure(actual) == md.tree.structure({**NONE, **expected})
    np.testing.assert_allclose(actual["w"], expected["w"], rtol=1e-14)


WHOLE = {
    "grad": (md.grad, loss),
    "value_and_grad": (lambda f: lambda p: md.value_and_grad(f)(p)[1], loss),
    "jit of grad": (lambda f: md.jit(md.grad(f)), loss),
    "grad of jit": (lambda f: md.grad(md.jit(f)), loss),
    "checkpoint": (lambda f: md.grad(md.checkpoint(f)), loss),
    "jacrev": (md.jacrev, outputs),
    "jacfwd": (md.jacfwd, outputs),
    "jacobian of jit": (lambda f: md.jacfwd(md.jit(f)), outputs),
    "hvp": (lambda f: lambda p: md.hvp(f, (p,), (md.grad(f)(p),)), loss),
}


@each("name", WHOLE)
def test_the_gradient_has_none_at_other_leaves(name):
    transform, f = WHOLE[name]
    assert_like(transform(f)(PARAMS), transform(of_numbers(f))(NUMBERS))


def test_hessians_are_nested():
    actual, expected = md.hessian(loss)(PARAMS), md.hessian(of_numbers(loss))(NUMBERS)
    assert {k: v for k, v in actual.items() if k != "w"} == NONE
    assert_like(actual["w"], expected["w"])


def test_tangents_and_cotangents():
    direction = md.grad(loss)(PARAMS)
    expected = md.jvp(of_numbers(loss), (NUMBERS,), ({"w": direction["w"]},))
    value, linear = md.linearize(loss, PARAMS)
    for tangents in (direction, {**PARAMS, "w": direction["w"], **dict.fromkeys(("n", "flag", "ids"))}):
        np.testing.assert_allclose(md.jvp(loss, (PARAMS,), (tangents,)), expected)
        np.testing.assert_allclose((value, linear(tangents)), expected)
    (pulled,) = md.vjp(loss, PARAMS)[1](1.0)
    assert pulled["f"] is pulled["name"] is None and pulled["n"].dtype.names == ("float0",)
    np.testing.assert_allclose(pulled["w"], direction["w"])
    with pytest.raises(TypeError, match="primals and tangents differ in structure"):
        md.jvp(loss, (PARAMS,), ({"w": W},))


def test_settings_of_compiled_functions_are_static():
    count = 0

    def scaled(p):
        nonlocal count
        count += 1
        return {**p, "w": p["w"] * (2 if p["name"] == "linear" else 5)}

    compiled = md.jit(scaled)
    for name, factor in (("linear", 2), ("other", 5), ("linear", 2)):
        result = compiled({"w": W, "name": name, "f": np.tanh})
        np.testing.assert_array_equal(result.pop("w"), factor * W)
        assert result == {"name": name, "f": np.tanh}
    assert count == 2


def test_vmap_and_shard_map():
    p = {k: PARAMS[k] for k in ("w", "name", "f")}
    g = lambda p, x: (p["f"](p["w"]) * x).sum()  # noqa: E731
    x = np.arange(3.0)
    rows = md.vmap(md.grad(g), in_axes=(None, 0))(p, x)
    np.testing.assert_allclose(rows["w"], np.outer(x, 1 - np.tanh(W) ** 2))
    assert rows["name"] is rows["f"] is None
    axes = {"w": 0, "name": None, "f": None}
    np.testing.assert_allclose(md.vmap(g, in_axes=(axes, 0))(p, W), np.tanh(W) * W)
    mesh = spmd.make_mesh((2,), ("i",))
    for specs in (P("i"), ({"w": P("i"), "name": P(), "f": P()},)):
        mapped = spmd.shard_map(lambda p: p["f"](p["w"]), mesh=mesh, in_specs=specs, out_specs=P("i"))
        np.testing.assert_allclose(np.asarray(mapped(p)), np.tanh(W))
        gradient = md.jit(md.grad(lambda p, mapped=mapped: mapped(p).sum()))(p)
        np.testing.assert_allclose(np.asarray(gradient["w"]), 1 - np.tanh(W) ** 2)
        assert gradient["name"] is gradient["f"] is None


@each("name", ["sgd", "momentum", "adam", "adamw", "lion", "adagrad"])
def test_optimizers_leave_other_leaves_alone(name):
    optimizer = optim.sgd(0.1, momentum=0.9) if name == "momentum" else getattr(optim, name)(0.1)

    def steps(f, p, compiled):
        state, update = optimizer.init(p), lambda p, state: optimizer.update(md.grad(f)(p), state, p)
        update = md.jit(update) if compiled else update
        for _ in range(3):
            updates, state = update(p, state)
            p = optim.apply_updates(p, updates)
        return p

    for compiled in (False, True):
        after = steps(loss, PARAMS, compiled)
        expected = steps(of_numbers(loss), NUMBERS, compiled)
        np.testing.assert_allclose(after.pop("w"), expected["w"], rtol=1e-12)
        assert all(after[k] is PARAMS[k] for k in after)


@dataclass
class Layer:
    w: Any
    activation: Any


def test_fields_of_classes():
    gradient = md.grad(lambda layer: layer.activation(layer.w).sum())(Layer(W, np.sin))
    np.testing.assert_allclose(gradient.w, np.cos(W))
    assert gradient.activation is None


def test_what_is_refused():
    """Arguments without a number to differentiate in, and objects that may hold parameters."""
    for p in (np.arange(2), 3, {"w": np.arange(2)}, True):
        with pytest.raises(TypeError, match="only floating-point numbers have gradients"):
            md.grad(lambda p: 1.0)(p)
        assert md.tree.leaves(md.grad(lambda p: 1.0, allow_int=True)(p)) == []
    assert md.value_and_grad(lambda n, x: n * x, (0, 1), allow_int=True)(3, 2.0) == (6.0, (None, 3.0))
    with pytest.raises(TypeError, match="argument 0 of <lambda> has type"):
        md.grad(lambda n, x: n * x, (0, 1))(3, 2.0)
    for x in (object(), {1}):
        for transform in (md.grad, md.jit, md.vmap, md.checkpoint):
            with pytest.raises(TypeError, match="expected an array or a number"):
                transform(lambda p: p["w"].sum())({"w": np.ones(2), "other": x})
    with pytest.raises(TypeError, match="got str"):
        md.grad(lambda p: 1.0)("name")
