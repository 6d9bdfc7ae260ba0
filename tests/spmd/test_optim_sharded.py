"""Optimizers of sharded arrays and in the bodies of shard_map: the same numbers, and what they communicate."""

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff import optim
from spmd import P
from tests.programs.optim import OPTIMIZERS, PARAMS, SHARDINGS, gradients_of, step_of, trained

MESH = spmd.make_mesh((2, 2), ("i", "j"), backend="simulated")
each = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


#: Those whose state is a tuple of named tuples, as that of a chain is; the others keep such a state in theirs.
CHAINS = {name: optimizer for name, optimizer in OPTIMIZERS.items() if name not in ("every second step", "partition")}


@pytest.mark.parametrize("optimizer", CHAINS.values(), ids=CHAINS)
def test_the_state_is_sharded_as_the_parameters(optimizer):
    specs, _ = SHARDINGS["along several axes"]
    params = spmd.distribute(PARAMS, MESH, specs)
    expected = md.tree.map(lambda p: spmd.spec_of(p), params)
    starts = [init(params) for init in (optimizer.init, md.jit(optimizer.init))]
    for state in (*starts, trained(optimizer, params)[1], trained(optimizer, params, compiled=True)[1]):
        for part in md.tree.children(state):
            for held in md.tree.children(part):  # trees like the parameters, and counts
                assert isinstance(held, numpy.int64) or md.tree.map(spmd.spec_of, held) == expected


@each
def test_in_bodies(optimizer):
    """Parameters that vary and those that do not: each rank updates its blocks, and keeps its blocks of the state."""
    specs = {"w": P("i", "j"), "b": P(), "s": P("j")}

    def steps(params):
        return trained(optimizer, params)[0]

    sharded = spmd.shard_map(steps, mesh=MESH, in_specs=(specs,), out_specs=specs)
    for f in (sharded, md.jit(sharded)):
        assert spmd.communication(f)(PARAMS).counts == {}
        actual = spmd.gather(f(PARAMS))
        for x, y in zip(md.tree.leaves(actual), md.tree.leaves(steps(PARAMS))):
            numpy.testing.assert_allclose(x, y, rtol=1e-12)


@each
def test_the_state_is_carried_by_a_loop_in_a_body(optimizer):
    def steps(params):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(gradients_of(params), state, params)
            return (optim.apply_updates(params, updates), state), None

        return md.scan(step, (params, optimizer.init(params)), None, length=4)[0][0]

    specs = {"w": P("i"), "b": P(), "s": P("j")}
    actual = spmd.gather(spmd.shard_map(steps, mesh=MESH, in_specs=(specs,), out_specs=specs)(PARAMS))
    for x, y in zip(md.tree.leaves(actual), md.tree.leaves(steps(PARAMS))):
        numpy.testing.assert_allclose(x, y, rtol=1e-12)


def test_the_norm_in_a_body_is_that_of_the_ranks_values():
    x = numpy.arange(8.0)

    def norms(x):
        return np.sqrt(psum(optim.global_norm(x) ** 2, "i")), optim.global_norm(x)[None]

    whole, local = spmd.shard_map(norms, mesh=MESH, in_specs=P("i"), out_specs=(P(), P("i")))(x)
    numpy.testing.assert_allclose(whole, numpy.linalg.norm(x))
    numpy.testing.assert_allclose(spmd.gather(local), [numpy.linalg.norm(x[:4]), numpy.linalg.norm(x[4:])])


def test_gradients_of_a_sharded_loss_train_as_those_of_the_whole():
    """A whole step, compiled: its loss communicates, the optimizer only for the norm."""
    rng = numpy.random.default_rng(0)
    w, x = rng.normal(size=(4, 4)), rng.normal(size=(8, 4))
    optimizer = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(optim.linear_schedule(0.1, 0.0, 5)))
    step = step_of(optimizer, md.grad(lambda w: np.sum(np.tanh(x @ w) ** 2)))
    sharded = spmd.distribute(w, MESH, P("i"))
    (one, one_state), (two, two_state) = [(p, optimizer.init(p)) for p in (w, sharded)]
    compiled = md.jit(step)
    for _ in range(4):
        one, one_state = step(one, one_state)
        two, two_state = compiled(two, two_state)
    numpy.testing.assert_allclose(two.gather(), one, rtol=1e-12)
    assert len(compiled.programs) == 1
    loss_alone = spmd.communication(md.grad(lambda w: np.sum(np.tanh(x @ w) ** 2)), optimized=True)(sharded)
    both = spmd.communication(compiled, optimized=True)(two, two_state).counts
    assert both == {**loss_alone.counts, "psum": loss_alone.counts.get("psum", 0) + 1}
