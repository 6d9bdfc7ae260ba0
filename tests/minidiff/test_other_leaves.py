"""Gradients and optimizers of trees with text, functions, integers and None among their leaves."""

import numpy as np

import minidiff as md
from minidiff import optim
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
