"""Trees with strings, functions, integers and None among their leaves, under all transformations."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import minidiff as md
import spmd
from minidiff import optim
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

W = np.array([0.5, -1.0])
PARAMS = {"w": W, "name": "linear", "f": np.tanh, "n": 3, "flag": True, "ids": np.arange(2), "none": None}
NONE = dict.fromkeys(("name", "f", "n", "flag", "ids", "none"))


def outputs(p):
    assert p["name"] == "linear" and p["none"] is None and p["ids"].dtype == int
    return p["f"](p["w"]) * p["n"]


def loss(p):
    return (outputs(p) ** 2).sum()


def of_numbers(f):
    return lambda p: f({**PARAMS, **p})


TRANSFORMED = {
    "grad": md.grad(loss),
    "value_and_grad": lambda p: md.value_and_grad(loss)(p)[1],
    "jit of grad": md.jit(md.grad(loss)),
    "grad of jit": md.grad(md.jit(loss)),
    "checkpoint": md.grad(md.checkpoint(loss)),
    "hvp": lambda p: md.hvp(loss, (p,), (md.grad(loss)(p),)),
    "hessian": lambda p: {k: v if v is None else v["w"] @ W for k, v in md.hessian(loss)(p).items()},
    "jacrev": lambda p: {k: v if v is None else v.sum(0) for k, v in md.jacrev(outputs)(p).items()},
    "jacfwd of jit": lambda p: {k: v if v is None else v.sum(0) for k, v in md.jacfwd(md.jit(outputs))(p).items()},
}
SLOPE = 1 - np.tanh(W) ** 2
SECOND = 18 * SLOPE * (SLOPE - 2 * np.tanh(W) ** 2)
EXPECTED = {"hvp": SECOND * 18 * np.tanh(W) * SLOPE, "hessian": SECOND * W}
EXPECTED |= {"jacrev": 3 * SLOPE, "jacfwd of jit": 3 * SLOPE}


@each("name", TRANSFORMED)
def test_the_gradient_has_none_at_other_leaves(name):
    actual = TRANSFORMED[name](PARAMS)
    assert md.tree.structure(actual) == md.tree.structure({**NONE, "w": W})
    np.testing.assert_allclose(actual["w"], EXPECTED.get(name, 18 * np.tanh(W) * SLOPE), rtol=1e-13)


def test_tangents_and_cotangents():
    direction = md.grad(loss)(PARAMS)
    expected = md.jvp(of_numbers(loss), ({"w": W},), ({"w": direction["w"]},))
    value, linear = md.linearize(loss, PARAMS)
    for tangents in (direction, {**PARAMS, "w": direction["w"], **dict.fromkeys(("n", "flag", "ids"))}):
        np.testing.assert_allclose(md.jvp(loss, (PARAMS,), (tangents,)), expected)
        np.testing.assert_allclose((value, linear(tangents)), expected)
    (pulled,) = md.vjp(loss, PARAMS)[1](1.0)
    assert pulled["f"] is pulled["name"] is None and pulled["n"].dtype.names == ("float0",)
    np.testing.assert_allclose(pulled["w"], direction["w"])


def test_settings_of_compiled_functions_are_static():
    calls = []
    scaled = md.jit(lambda p: calls.append(1) or {**p, "w": p["w"] * (2 if p["name"] == "linear" else 5)})
    for name, factor in (("linear", 2), ("other", 5), ("linear", 2)):
        result = scaled({"w": W, "name": name, "f": np.tanh})
        np.testing.assert_array_equal(result.pop("w"), factor * W)
        assert result == {"name": name, "f": np.tanh}
    assert len(calls) == 2


def test_vmap_and_shard_map():
    p, axes = {"w": W, "name": "linear", "f": np.tanh}, {"w": 0, "name": None, "f": None}
    g = lambda p, x: (p["f"](p["w"]) * x).sum()  # noqa: E731
    rows = md.vmap(md.grad(g), in_axes=(None, 0))(p, np.arange(3.0))
    np.testing.assert_allclose(rows["w"], np.outer(np.arange(3.0), SLOPE))
    assert rows["name"] is rows["f"] is None
    np.testing.assert_allclose(md.vmap(g, in_axes=(axes, 0))(p, W), np.tanh(W) * W)
    for specs in (P("i"), ({"w": P("i"), "name": P(), "f": P()},)):
        f = mapped(lambda p: p["f"](p["w"]), mesh(2), specs, P("i"))
        np.testing.assert_allclose(spmd.gather(f(p)), np.tanh(W))
        gradient = md.jit(md.grad(lambda p, f=f: f(p).sum()))(p)
        np.testing.assert_allclose(spmd.gather(gradient["w"]), SLOPE)
        assert gradient["name"] is gradient["f"] is None


OPTIMIZERS = [optim.sgd(0.1, 0.9), *(getattr(optim, f)(0.1) for f in ("sgd", "adam", "adamw", "lion", "adagrad"))]


@each("optimizer", OPTIMIZERS, ids=lambda o: str(OPTIMIZERS.index(o)))
@each("jit", [lambda f: f, md.jit], ["eager", "compiled"])
def test_optimizers_leave_other_leaves_alone(optimizer, jit):
    def steps(f, p):
        state, update = optimizer.init(p), jit(lambda p, state: optimizer.update(md.grad(f)(p), state, p))
        for _ in range(3):
            updates, state = update(p, state)
            p = optim.apply_updates(p, updates)
        return p

    after = steps(loss, PARAMS)
    np.testing.assert_allclose(after["w"], steps(of_numbers(loss), {"w": W})["w"], rtol=1e-12)
    assert all(after[k] is PARAMS[k] for k in NONE)


@dataclass
class Layer:
    w: Any
    activation: Any


def test_fields_of_classes():
    gradient = md.grad(lambda layer: layer.activation(layer.w).sum())(Layer(W, np.sin))
    np.testing.assert_allclose(gradient.w, np.cos(W))
    assert gradient.activation is None


@each("p", [np.arange(2), 3, {"w": np.arange(2)}, True], ids=str)
def test_arguments_without_a_number_to_differentiate_in(p):
    with pytest.raises(TypeError):
        md.grad(lambda p: 1.0)(p)
    assert md.tree.leaves(md.grad(lambda p: 1.0, allow_int=True)(p)) == []
    assert md.value_and_grad(lambda n, x: n * x, (0, 1), allow_int=True)(3, 2.0) == (6.0, (None, 3.0))


@each("x", [object(), {1}], ids=str)
@each("transform", [md.grad, md.jit, md.vmap, md.checkpoint])
def test_objects_that_may_hold_parameters_are_refused(x, transform):
    with pytest.raises(TypeError):
        transform(lambda p: p["w"].sum())({"w": np.ones(2), "other": x})
