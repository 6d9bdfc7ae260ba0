"""Trees with strings, functions, integers and None among their leaves, under all transformations."""

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
NONE = PARAMS.keys() - {"w"}


def loss(p):
    assert p["name"] == "linear" and p["none"] is None and p["ids"].dtype == int
    return ((p["f"](p["w"]) * p["n"]) ** 2).sum()


def of_numbers(f):
    return lambda p: f({**PARAMS, **p})


#: Of functions of the parameters.
TRANSFORMED = {
    "grad": lambda f: md.grad(f),
    "value_and_grad": lambda f: lambda p: md.value_and_grad(f)(p)[1],
    "jit of grad": lambda f: md.jit(md.grad(f)),
    "grad of jit": lambda f: md.grad(md.jit(f)),
    "checkpoint": lambda f: md.grad(md.checkpoint(f)),
    "hvp": lambda f: lambda p: md.hvp(f, (p,), (md.grad(f)(p),)),
    "hessian": lambda f: md.hessian(f),
    "jacrev": lambda f: md.jacrev(f),
    "jacfwd of jit": lambda f: md.jacfwd(md.jit(f)),
}


@each("name", TRANSFORMED)
def test_the_gradient_has_none_at_other_leaves(name):
    transform = TRANSFORMED[name]
    actual, expected = transform(loss)(PARAMS), transform(of_numbers(loss))({"w": W})
    assert {k for k, x in actual.items() if x is None} == {*NONE}
    np.testing.assert_allclose(md.tree.leaves(actual), md.tree.leaves(expected), rtol=1e-13)


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
    slope = 1 - np.tanh(W) ** 2
    rows = md.vmap(md.grad(g), in_axes=(None, 0))(p, np.arange(3.0))
    np.testing.assert_allclose(rows["w"], np.outer(np.arange(3.0), slope))
    assert rows["name"] is rows["f"] is None
    np.testing.assert_allclose(md.vmap(g, in_axes=(axes, 0))(p, W), np.tanh(W) * W)
    for specs in (P("i"), ({"w": P("i"), "name": P(), "f": P()},)):
        f = mapped(lambda p: p["f"](p["w"]), mesh(2), specs, P("i"))
        np.testing.assert_allclose(spmd.gather(f(p)), np.tanh(W))
        gradient = md.jit(md.grad(lambda p, f=f: f(p).sum()))(p)
        np.testing.assert_allclose(spmd.gather(gradient["w"]), slope)
        assert gradient["name"] is gradient["f"] is None


@each("optimizer", [optim.sgd(0.1, 0.9), optim.sgd(0.1), optim.adam(0.1), optim.adamw(0.1), optim.adagrad(0.1)])
def test_optimizers_leave_other_leaves_alone(optimizer):
    def steps(f, p):
        state, update = optimizer.init(p), md.jit(lambda p, state: optimizer.update(md.grad(f)(p), state, p))
        for _ in range(2):
            updates, state = update(p, state)
            p = optim.apply_updates(p, updates)
        return p

    after = steps(loss, PARAMS)
    np.testing.assert_allclose(after["w"], steps(of_numbers(loss), {"w": W})["w"], rtol=1e-12)
    assert all(after[k] is PARAMS[k] for k in NONE)


@each("p", [np.arange(2), 3, {"w": np.arange(2)}, True], ids=str)
def test_arguments_without_a_number_to_differentiate_in(p):
    with pytest.raises(TypeError):
        md.grad(lambda p: 1.0)(p)
    assert md.value_and_grad(lambda p, x: 3 * x, (0, 1), allow_int=True)(p, 2.0)[1][1] == 3.0
    assert md.tree.leaves(md.grad(lambda p: 1.0, allow_int=True)(p)) == []
