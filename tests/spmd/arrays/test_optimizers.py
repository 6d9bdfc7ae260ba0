"""Optimizers of sharded arrays and in the bodies of shard_map: the same numbers, and what they communicate."""

import itertools

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff import optim
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs.optim import OPTIMIZERS, PARAMS, SHARDINGS, gradients_of, step_of, trained

PLANE = mesh(2, 2)
#: Those whose state is a tuple of named tuples, as that of a chain is; the others keep such a state in theirs.
CHAINS = {name: optimizer for name, optimizer in OPTIMIZERS.items() if name not in ("every second step", "partition")}


@each("name", CHAINS)
def test_the_state_is_sharded_as_the_parameters(name):
    optimizer, params = CHAINS[name], spmd.distribute(PARAMS, PLANE, SHARDINGS["along several axes"][0])
    states = [md.jit(optimizer.init)(params), trained(optimizer, params, 2)[1]]
    for leaf in (leaf for state in states for part in md.tree.children(state) for leaf in md.tree.children(part)):
        # trees like the parameters, and counts
        assert isinstance(leaf, numpy.int64) or md.tree.map(spmd.spec_of, leaf) == spmd.spec_of(params)


def in_a_loop(optimizer, params):
    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(gradients_of(params), state, params)
        return (optim.apply_updates(params, updates), state), None

    return md.scan(step, (params, optimizer.init(params)), None, length=4)[0][0]


WAYS = [lambda optimizer, params: trained(optimizer, params)[0], in_a_loop]


@each("name, way, w", zip(OPTIMIZERS, itertools.cycle(WAYS), itertools.cycle([P("i", "j"), P("i"), P("j")])))
def test_in_bodies(name, way, w):
    """Parameters that vary and those that do not: each rank updates its blocks, and keeps its blocks of the state."""
    specs, steps = {"w": w, "b": P(), "s": P("j")}, lambda params: way(OPTIMIZERS[name], params)
    f = mapped(steps, PLANE, (specs,), specs)
    assert spmd.communication(f)(PARAMS).counts == {}
    for run in (f, md.jit(f)):
        assert_trees_close(run(PARAMS), steps(PARAMS))


def test_a_step_of_a_sharded_loss_is_compiled_once_and_communicates_for_the_norm_alone():
    rng = numpy.random.default_rng(0)
    w, x = rng.normal(size=(4, 4)), rng.normal(size=(8, 4))
    optimizer = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(optim.linear_schedule(0.1, 0.0, 5)))
    gradient = md.grad(lambda w: np.sum(np.tanh(x @ w) ** 2))
    step, split = step_of(optimizer, gradient), spmd.distribute(w, PLANE, P("i"))
    compiled, one, two = md.jit(step), (w, optimizer.init(w)), (split, optimizer.init(split))
    for _ in range(4):
        one, two = step(*one), compiled(*two)
    assert_trees_close(two[0], one[0])
    assert len(compiled.programs) == 1
    alone = spmd.communication(gradient, optimized=True)(split).counts
    counts = spmd.communication(compiled, optimized=True)(*two).counts
    assert counts == {**alone, "psum": alone.get("psum", 0) + 1}
