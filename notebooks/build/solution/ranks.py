"""Step 5: ranks, all of them in this process, and collectives."""

from collections import Counter

import numpy as np

from .tape import Var, make_tape
from .tracer import Operation, typeof

sizes = {}  # axis -> the number of its ranks, while a body is traced


def same(x, axis):
    return x


def longer(x, axis, size):
    return (x[0] * size, *x[1:])


def shorter(x, axis, size):
    return (x[0] // size, *x[1:])


def alone(*args, **params):
    raise TypeError("a collective runs on all ranks together: call it in the body of a shard_map")


psum_p = Operation("psum", alone, same)
all_gather_p = Operation("all_gather", alone, longer)
psum_scatter_p = Operation("psum_scatter", alone, shorter)


def psum(x, axis):
    """The sum over the ranks of an axis; all of them have it."""
    return psum_p(x, axis=axis)


def all_gather(x, axis):
    """The blocks of all ranks, one after the other; all ranks have them."""
    return all_gather_p(x, axis=axis, size=sizes[axis])


def psum_scatter(x, axis):
    """The sum over the ranks, of which each rank has its block."""
    return psum_scatter_p(x, axis=axis, size=sizes[axis])


# How simulated ranks run them: from `blocks`, the list of all ranks' blocks, to the list of their results.
def run_psum(blocks, axis):
    # HOLE 5.1 [1 point]
    # Each rank's result has the shape of its block.
    return [np.sum(blocks, axis=0)] * len(blocks)
    # END


def run_all_gather(blocks, axis, size):
    # HOLE 5.2 [1 point]
    # Blocks follow each other along dimension 0 (`np.concatenate`).
    return [np.concatenate(blocks)] * size
    # END


def run_psum_scatter(blocks, axis, size):
    # HOLE 5.3 [1 point]
    # The sum is split along dimension 0 (`np.split`).
    return np.split(np.sum(blocks, axis=0), size)
    # END


collectives = {psum_p: run_psum, all_gather_p: run_all_gather, psum_scatter_p: run_psum_scatter}


class Mesh:
    """Simulated ranks 0, 1, …, along one axis."""

    def __init__(self, size, axis="i"):
        self.size, self.axis = size, axis
        self.ranks = range(size)  # those that this process runs
        self.collectives = collectives  # how they run each
        self.calls = Counter()  # how often each collective has run

    def __repr__(self):
        return f"({self.axis}: {self.size})"

    def trace(self, body, types):
        """The tape of a body that runs on this mesh."""
        before, sizes[self.axis] = sizes.get(self.axis), self.size
        try:
            return make_tape(body)(*types)
        finally:
            sizes[self.axis] = before


def run_on_ranks(tape, mesh, inputs):
    """Run a tape on every rank. A value is the list of the ranks' blocks, as `inputs` are, and as the results are."""
    env = dict(zip(tape.inputs, inputs))

    def read(x):  # a constant is the same on every rank
        return env[x] if isinstance(x, Var) else [x] * len(mesh.ranks)

    for eqn in tape.equations:
        operands = [read(x) for x in eqn.inputs]
        # HOLE 5.4 [3 points]
        # Put the result into `env`. A collective (one in `mesh.collectives`) is called once, with the lists
        # of blocks and the params; count it in `mesh.calls`, by its name. Any other operation is run by each
        # rank alone: `eqn.op.run`.
        if eqn.op in mesh.collectives:
            result = mesh.collectives[eqn.op](*operands, **eqn.params)
            mesh.calls[eqn.op.name] += 1
        else:
            result = [eqn.op.run(*blocks, **eqn.params) for blocks in zip(*operands)]
        env[eqn.outputs[0]] = result
        # END
    return [read(x) for x in tape.outputs]


def on_ranks(body, mesh):
    """Run a body on every rank: a function from lists of blocks to the list of the results' lists of blocks."""

    def run(*inputs):
        return run_on_ranks(mesh.trace(body, [typeof(blocks[0]) for blocks in inputs]), mesh, inputs)

    return run
