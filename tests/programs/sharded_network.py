"""The fully sharded network, checkpointed in several ways: for simulated ranks and real ones."""

import functools

import numpy as np

import minidiff as md
import spmd
from minidiff.core.reverse import engine
from spmd.parallel import fully_sharded, init_params, loss
from spmd.parallel.data import gathering_again
from tests.checks.results import assert_trees_close

SIZES = (12, 18, 12)
RNG = np.random.default_rng(0)
PARAMS = init_params(RNG, SIZES)
BATCH = RNG.standard_normal((6, SIZES[0])), RNG.standard_normal((6, SIZES[-1]))
POLICIES = {
    "no checkpoint": lambda f: f,
    "not the gathered": gathering_again,
    "nothing": md.checkpoint,
}


def network(mesh, checkpoint):
    """The loss, as a function of the parameters: weights are gathered just before their use."""
    distributed = fully_sharded(mesh, checkpoint=checkpoint)
    return lambda params: distributed(params, BATCH)


def residuals_of(f):
    """Return the residuals other than arguments: the shapes of blocks."""
    leaves, structure = md.tree.flatten(PARAMS)
    _, tape = engine.linearize_flat(lambda *xs: [f(md.tree.unflatten(structure, xs))], leaves, [True] * len(leaves))
    inputs = {id(x) for x in [*leaves, *BATCH]}
    residuals = [x for x in tape.constants if id(x) not in inputs]
    return sorted(np.shape(x.local[0] if isinstance(x.local, list) else x.local) for x in residuals)


def check(mesh):
    """Gathers going forward and once more, of how many bytes on each rank, and what is kept in the meantime."""
    ranks = mesh.size
    rows = len(BATCH[0]) // ranks
    weights, biases = [(w.nbytes // ranks) for w, _ in PARAMS], [(b.nbytes // ranks) for _, b in PARAMS]
    forward = sum(weights) + sum(biases)
    between, after = (rows, SIZES[1]), (rows, SIZES[2])
    # The input of the second product, which says too where relu was zero; and the base of the square.
    activations = [after, between]
    expected = {
        # The first weight is not needed again, since the inputs have no gradient; nor are biases.
        "no checkpoint": (4, forward, sorted([*activations, SIZES[1:]])),
        "not the gathered": (5, forward + weights[1], activations),
        # Of the last layer all that is needed is its weight: nobody asks for its result again.
        "nothing": (7, 2 * forward - biases[1], [after]),
    }
    gradients = []
    for name, checkpoint in POLICIES.items():
        f = network(mesh, checkpoint)
        gathers, nbytes, blocks = expected[name]
        mesh.reset_calls()
        gradients.append(md.grad(f)(PARAMS))
        if ranks > 1:
            assert (mesh.calls["all_gather"], mesh.bytes["all_gather"]) == (gathers, nbytes), name
            assert mesh.calls["psum_scatter"] == 4 and mesh.calls["psum"] == 1
        assert mesh.calls == spmd.communication(md.grad(f))(PARAMS).counts
        assert residuals_of(f) == blocks, name
        tape = md.make_tape(md.grad(f))(PARAMS)
        tape.check()
        gradients.append(md.tree.unflatten(md.tree.structure(PARAMS), tape(*md.tree.leaves(PARAMS))))
    whole = md.grad(functools.partial(loss, batch=BATCH))(PARAMS)
    for actual in gradients:
        assert_trees_close(actual, whole, atol=1e-9)
