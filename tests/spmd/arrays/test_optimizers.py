"""Optimizers of sharded arrays and in the bodies of shard_map: the same numbers, and what they communicate."""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff import optim
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each
from tests.programs.on_blocks import assert_trees_close
from tests.programs.optim import OPTIMIZERS, PARAMS, SHARDINGS, gradients_of, step_of, trained

PLANE = mesh(2, 2)
#: Those whose state is a tuple of named tuples, as that of a chain is; the others keep such a state in theirs.
CHAINS = {name: optimizer for name, optimizer in OPTIMIZERS.items() if name not in ("every second step", "partition")}


@each("optimizer", CHAINS.values(), ids=CHAINS)
def test_the_state_is_sharded_as_the_parameters(optimizer):
    params = spmd.distribute(PARAMS, PLANE, SHARDINGS["along several axes"][0])
    expected, states = spmd.spec_of(params), [init(params) for init in (optimizer.init, md.jit(optimizer.init))]
    for state in (*states, trained(optimizer, params)[1], trained(optimizer, params, compiled=True)[1]):
        for part in md.tree.children(state):
            for leaf in md.tree.children(part):  # trees like the parameters, and counts
                assert isinstance(leaf, numpy.int64) or md.tree.map(spmd.spec_of, leaf) == expected


def in_a_loop(optimizer, params):
    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(gradients_of(params), state, params)
        return (optim.apply_updates(params, updates), state), None

    return md.scan(step, (params, optimizer.init(params)), None, length=4)[0][0]


@each("way", [lambda optimizer, params: trained(optimizer, params)[0], in_a_loop], ids=["unrolled", "in a loop"])
@each("specs", [{"w": P("i", "j"), "b": P(), "s": P("j")}, {"w": P("i"), "b": P(), "s": P("j")}], ids=str)
@each("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_in_bodies(optimizer, specs, way):
    """Parameters that vary and those that do not: each rank updates its blocks, and keeps its blocks of the state."""
    steps = lambda params: way(optimizer, params)  # noqa: E731
    f = mapped(steps, PLANE, (specs,), specs)
    assert spmd.communication(f)(PARAMS).counts == {}
    for run in (f, md.jit(f)):
        assert_trees_close(run(PARAMS), steps(PARAMS))


def test_the_norm_in_a_body_is_that_of_the_ranks_values():
    norms = lambda x: (np.sqrt(psum(optim.global_norm(x) ** 2, "i")), optim.global_norm(x)[None])  # noqa: E731
    x, norm = numpy.arange(8.0), numpy.linalg.norm
    expected = norm(x), numpy.array([norm(x[:4]), norm(x[4:])])
    assert_trees_close(mapped(norms, PLANE, P("i"), (P(), P("i")))(x), expected)


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
