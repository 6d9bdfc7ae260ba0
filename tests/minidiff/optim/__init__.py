"""Tests of optimizers: parameters, gradients, and steps with them."""

import pathlib

import numpy

import minidiff as md
from minidiff import optim

RNG = numpy.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(3, 2)), "b": [RNG.normal(size=2), RNG.normal(size=())[()]]}
GRADIENTS = [md.tree.map(lambda p: RNG.normal(size=p.shape)[()], PARAMS) for _ in range(5)]

#: Parameters and gradients of the numbers in `optax.txt`, where those of a name are behind it.
THERE = {"w": numpy.array([1.0, -2.0, 0.5]), "b": numpy.float64(0.25)}
GRADIENTS_THERE = [
    {"w": numpy.array(w), "b": numpy.float64(b)}
    for w, b in (([0.5, -1.0, 3.0], 2.0), ([-0.25, 0.1, 1.0], -1.0), ([2.0, 0.3, -0.1], 0.125))
]
_LINES = pathlib.Path(__file__).with_name("optax.txt").read_text().splitlines()
OPTAX = {name: numbers.split() for name, _, numbers in (line.partition(": ") for line in _LINES) if numbers}


def trained(optimizer, params=PARAMS, gradients=GRADIENTS, compiled=False):
    """The parameters and the state after a step for each of the gradients."""
    update = md.jit(optimizer.update) if compiled else optimizer.update
    state = optimizer.init(params)
    for g in gradients:
        updates, state = update(g, state, params)
        params = optim.apply_updates(params, updates)
    if compiled:
        assert len(update.programs) == 1
    return params, state


def assert_trees_equal(actual, expected, rtol=1e-13):
    assert md.tree.structure(actual) == md.tree.structure(expected)
    for x, y in zip(md.tree.leaves(actual), md.tree.leaves(expected)):
        numpy.testing.assert_allclose(x, y, rtol=rtol)


def check_optax(name, optimizer):
    """Compare three steps, compiled or not, with optax's."""
    for compiled in (False, True):
        params, _ = trained(optimizer, THERE, GRADIENTS_THERE, compiled)
        numpy.testing.assert_allclose([*params["w"], params["b"]], [*map(float, OPTAX[name])], rtol=3e-7)
