"""The data-parallel network of notebook 12. On MPI ranks: `mpiexec -n 2 python -m
mine.network`.
"""

import sys
from itertools import pairwise

import numpy as np

from .operations import relu, total
from .ranks import Mesh, psum
from .reverse import value_and_grad
from .shard_map import P, shard_map

sizes, examples = [784, 128, 128, 128, 128, 128, 8], 32


def network(seed=0):
    """Parameters W, b, W, b, …, inputs and targets."""
    rng = np.random.default_rng(seed)
    layers = [
        (rng.normal(size=(m, n)) * np.sqrt(2 / m), np.zeros(n))
        for m, n in pairwise(sizes)
    ]
    return (
        sum(layers, ()),
        rng.normal(size=(examples, sizes[0])),
        rng.normal(size=(examples, sizes[-1])),
    )


def loss(*args):
    """The mean, over all examples, of the squared errors: args are parameters, a rank's
    inputs and its targets.
    """
    *params, x, targets = args
    for W, b in zip(params[::2], params[1::2]):
        outputs = x @ W + b
        x = relu(outputs)
    errors = outputs - targets
    return psum(total(errors * errors) * (1 / examples), axis="i")


def loss_and_gradients(mesh):
    """With the examples split over the ranks of a mesh."""
    params, inputs, targets = network()
    split = shard_map(loss, mesh, [P()] * len(params) + [P("i")] * 2, P())
    return value_and_grad(lambda *params: split(*params, inputs, targets), *params)


if __name__ == "__main__":
    from .mpi import MPIMesh

    mesh = MPIMesh()
    value, gradients = loss_and_gradients(mesh)
    here, simulated = loss_and_gradients(Mesh(mesh.size))
    same = np.isclose(value, here) and all(map(np.allclose, gradients, simulated))
    sent = f"{mesh.calls['psum']} psums, {mesh.bytes} bytes sent"
    message = f"loss {value:.4f}, {sent}, as on simulated ranks: {same}"
    # a line at once, whatever other ranks write
    sys.stdout.write(f"rank {mesh.ranks[0]} of {mesh.size}: {message}\n")
