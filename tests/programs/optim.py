"""Training steps of optimizers, which tests run on simulated and on MPI ranks."""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff import optim
from spmd import P
from tests.checks.properties import shows

OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optim.adam(0.1),
    "adamw": optim.adamw(
        optim.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6), weight_decay=0.1, mask={"w": True, "b": False, "s": True}
    ),
    "nadam": optim.adamw(
        0.1,
        mu_dtype="f8",
        weight_decay=optim.linear_schedule(0.1, 0.0, 3, 1),
        mask={"w": numpy.array(True), "b": False, "s": True},
        nesterov=True,
    ),
    "lion": optim.lion(0.1, weight_decay=0.1),
    "every second step": optim.MultiSteps(optim.adam(0.1), 2).gradient_transformation(),
    "partition": optim.partition(
        {0: optim.inject_hyperparams(optim.adam)(optim.polynomial_schedule(0.1, 0.0, 2, 6)), 1: optim.scale(-0.1)},
        {"w": 0, "b": 1, "s": 0},
    ),
    "adagrad": optim.adagrad(optim.linear_schedule(0.1, 0.0, 6)),
}

RNG = numpy.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(8, 4)), "b": RNG.normal(size=4).astype("f4"), "s": RNG.normal(size=(4, 4, 2))}

#: How the parameters are sharded, and the number of psums that their norm needs.
SHARDINGS = {
    "along one axis": ({"w": P("i"), "b": P("i"), "s": P(None, "i")}, 1),
    "along one axis, or whole": ({"w": P("i"), "b": P(), "s": P("i")}, 1),
    "along two axes": ({"w": P("j", "i"), "b": P(("i", "j")), "s": P(None, ("i", "j"))}, 1),
    "along several axes": ({"w": P("i"), "b": P("j"), "s": P("i", "j")}, 3),
    "whole": ({"w": P(), "b": P(), "s": P()}, 0),
}


def gradients_of(params):
    """Gradients that communicate nothing, of a function of each parameter alone."""
    return md.tree.map(lambda p: np.sin(3 * p), params)


def step_of(optimizer, gradients=gradients_of):
    """A function that makes a step."""

    def step(params, state):
        updates, state = optimizer.update(gradients(params), state, params)
        return optim.apply_updates(params, updates), state

    return step


def trained(optimizer, params, steps=4, compiled=False):
    """The parameters and the state after some steps."""
    step, state = step_of(optimizer), optimizer.init(params)
    if compiled:
        step = md.jit(step)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


@shows("counts")
def check_steps(mesh, sharding, name, clips):
    """Sharded parameters train as whole ones, compiled or not, and each step makes these calls and no others."""
    (specs, psums), optimizer = SHARDINGS[sharding], OPTIMIZERS[name]
    if clips:
        optimizer = optim.chain(optim.clip_by_global_norm(0.5), optimizer)
    counts = {"psum": psums} if clips and psums else {}
    expected, _ = trained(optimizer, PARAMS)
    step = step_of(optimizer)
    for f in (step, md.jit(step)):
        params = spmd.distribute(PARAMS, mesh, specs)
        state = optimizer.init(params)
        for _ in range(4):
            mesh.reset_calls()
            params, state = f(params, state)
            assert mesh.calls == counts
        assert spmd.communication(f, optimized=True)(params, state).counts == counts
        assert counts or not spmd.communication(f)(params, state).rows
        for leaf, p in params.items():
            assert spmd.spec_of(p) == specs[leaf] and p.dtype == PARAMS[leaf].dtype
            numpy.testing.assert_allclose(spmd.gather(p), expected[leaf], rtol=1e-5 if p.dtype == "f4" else 1e-12)
    assert len(f.programs) == 1
