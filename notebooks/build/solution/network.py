"""The data-parallel network of notebook 12. On MPI ranks: `mpiexec -n 2 python -m mine.network`."""

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
    params = []
    for m, n in pairwise(sizes):
        params += [rng.normal(size=(m, n)) * np.sqrt(2 / m), np.zeros(n)]
    return params, rng.normal(size=(examples, sizes[0])), rng.normal(size=(examples, sizes[-1]))


def local_loss(*args):
    """The mean, over all examples, of the squared errors of some of them: args are parameters, inputs and targets."""
    *params, x, targets = args
    for W, b in zip(params[::2], params[1::2]):
        outputs = x @ W + b
        x = relu(outputs)
    errors = outputs - targets
    return total(errors * errors) * (1 / examples)


def data_parallel(mesh):
    """The loss, with the examples split over the ranks of a mesh."""
    in_specs = [P()] * (2 * len(sizes) - 2) + [P(mesh.axis)] * 2
    return shard_map(lambda *args: psum(local_loss(*args), mesh.axis), mesh, in_specs, P())


def loss_and_gradients(mesh):
    params, inputs, targets = network()
    loss = data_parallel(mesh)
    return value_and_grad(lambda *params: loss(*params, inputs, targets))(*params)


if __name__ == "__main__":
    from .mpi import MPIMesh

    mesh = MPIMesh()
    value, gradients = loss_and_gradients(mesh)
    here, simulated = loss_and_gradients(Mesh(mesh.size))
    same = np.isclose(value, here) and all(map(np.allclose, gradients, simulated))
    sys.stdout.write(  # a line at once, whatever other ranks write
        f"rank {mesh.ranks[0]} of {mesh.size}: loss {value:.4f}, {mesh.calls['psum']} psums, {mesh.bytes} bytes sent, "
        f"as on simulated ranks: {same}\n"
    )
