"""The tutorial's fully sharded network, checkpointed in several ways: for simulated ranks and real ones."""

import functools
import itertools
import math

import numpy as np

import minidiff as md
import spmd
from collectives import all_gather, psum
from minidiff.reverse import linearize_flat
from spmd import P

SIZES = (12, 18, 12)
RNG = np.random.default_rng(0)
PARAMS = [(RNG.standard_normal((m, n)) / 4, RNG.standard_normal(n)) for m, n in itertools.pairwise(SIZES)]
INPUTS = RNG.standard_normal((6, SIZES[0]))
POLICIES = {
    "no checkpoint": lambda f: f,
    "not the gathered": functools.partial(md.checkpoint, policy=lambda op, *_, **__: str(op) != "all_gather"),
    "nothing": md.checkpoint,
}


def network(mesh, checkpoint):
    """The loss, as a function of the parameters: weights are gathered just before their use."""

    @checkpoint
    def predict(params, inputs):
        for w, b in params:
            w, b = all_gather(w, "i", tiled=True), all_gather(b, "i", tiled=True)
            inputs = np.maximum(inputs @ w + b, 0.0)
        return inputs

    def loss(params, inputs):
        return psum((predict(params, inputs) ** 2).sum(), "i")

    mapped = spmd.shard_map(loss, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P())
    return lambda params: mapped(params, INPUTS)


def kept(f):
    """What the backward sweep holds besides arguments: the shapes of blocks, and the bytes on each rank."""
    leaves, structure = md.tree.flatten(PARAMS)
    _, tape = linearize_flat(lambda *xs: [f(md.tree.unflatten(structure, xs))], leaves, [True] * len(leaves))
    given = {id(x) for x in [*leaves, INPUTS]}
    residuals = [x for x in tape.constants if id(x) not in given]
    blocks = [np.shape(x.local[0] if isinstance(x.local, list) else x.local) for x in residuals]
    return sorted(blocks), sum(math.prod(shape) for shape in blocks) * 8


def check(mesh):
    """Gathers going forward and once more, of how many bytes on each rank, and what is kept in the meantime."""
    ranks = mesh.size
    rows = len(INPUTS) // ranks
    weights, biases = [(w.nbytes // ranks) for w, _ in PARAMS], [(b.nbytes // ranks) for _, b in PARAMS]
    forward = sum(weights) + sum(biases)
    between, after = (rows, SIZES[1]), (rows, SIZES[2])
    # Of each layer's derivative: the input of its product, and where its maximum is which; of the square, its base.
    activations = sorted([between, between, after, after])
    expected = {
        # The first weight is not needed again, since the inputs have no gradient; nor are biases.
        "no checkpoint": (4, forward, sorted([*activations, SIZES[1:]])),
        "not the gathered": (5, forward + weights[1], activations),
        "nothing": (8, 2 * forward, [after]),
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
        assert kept(f) == (blocks, sum(math.prod(shape) for shape in blocks) * 8), name
        tape = md.make_tape(md.grad(f))(PARAMS)
        tape.check()
        gradients.append(md.tree.unflatten(md.tree.structure(PARAMS), tape(*md.tree.leaves(PARAMS))))
    whole = md.grad(lambda params: sum_of_squares(params))(PARAMS)
    for found in gradients:
        for a, e in zip(md.tree.leaves(found), md.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a.gather(), e, rtol=1e-9, atol=1e-9)


def sum_of_squares(params):
    x = INPUTS
    for w, b in params:
        x = np.maximum(x @ w + b, 0.0)
    return (x**2).sum()
