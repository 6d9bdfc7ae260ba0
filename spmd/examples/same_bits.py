"""Train a network whose losses have the same bits on any number of ranks.

    mpirun -n 1 python -m spmd.examples.same_bits
    mpirun -n 4 python -m spmd.examples.same_bits

Both print the same numbers, to the last bit. Ordinary data parallelism does not (`--ordinary`): each rank rounds the
sum over its own examples, and the sum over ranks is rounded again, so both depend on how many ranks there are.

Here a batch is PIECES pieces, whatever the number of ranks. Each piece has its own copy of the parameters, its own loss
and its own gradient, which is computed by itself, from arrays of the same shape on any rank. Losses are added by
`psum(exact=True)`, gradients by the transpose of `pcopies`: both add over a rank's pieces and over ranks, and round
once.
"""

import argparse
import hashlib

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pcopies, psum
from minidiff.optim import apply_updates, sgd
from spmd import P
from spmd.examples.digits import load_digits
from spmd.parallel import init_params

PIECES, ROWS = 72, 5  # of a batch: pieces, which 1, 2, 3, 4, 6 or 8 ranks share, and examples of a piece
LAYERS = (64, 32, 10)


def error(params, x, y):
    """Return the sum of the cross entropies of some examples."""
    for w, b in params[:-1]:
        x = np.tanh(x @ w + b)
    w, b = params[-1]
    logits = x @ w + b
    return np.sum(np.log(np.sum(np.exp(logits), axis=1))) - np.sum(logits * y)


def exact_error(params, x, y):
    """Return the sum over all pieces, of which a rank has those in `x`: it computes one after the other."""
    copies = pcopies(params, "i", len(x))
    _, errors = md.scan(lambda _, piece: (None, error(*piece)), None, (copies, x, y))
    return psum(errors, "i", exact=True, axis=0)


def ordinary_error(params, x, y):
    """Return the same sum, rounded by each rank."""
    return psum(error(params, x.reshape(-1, 64), y.reshape(-1, 10)), "i")


def train(mesh, steps=20, of_rank=exact_error):
    """Yield the losses of training on a mesh, and last the digest of the parameters."""
    rng = numpy.random.default_rng(0)
    (images, targets), _ = load_digits(rng, 10)
    params, optimizer = init_params(rng, LAYERS), sgd(0.5, momentum=0.9)
    state = optimizer.init(params)
    total = spmd.shard_map(of_rank, mesh=mesh, in_specs=(P(), P("i"), P("i")), out_specs=P())

    @md.jit
    def step(params, state, x, y):
        loss, grads = md.value_and_grad(lambda params: total(params, x, y) / (PIECES * ROWS))(params)
        updates, state = optimizer.update(grads, state, params)
        return loss, apply_updates(params, updates), state

    for _ in range(steps):
        batch = rng.permutation(len(images))[: PIECES * ROWS].reshape(PIECES, ROWS)
        loss, params, state = step(params, state, images[batch], targets[batch])
        yield float(loss).hex()
    yield hashlib.sha256(b"".join(numpy.asarray(x).tobytes() for x in md.tree.leaves(params))).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="number of steps")
    parser.add_argument("--ordinary", action="store_true", help="sum as usual")
    options = parser.parse_args()
    mesh = spmd.make_mesh((-1,), ("i",))
    for line in train(mesh, options.steps, ordinary_error if options.ordinary else exact_error):
        if mesh.rank == 0:
            print(line)


if __name__ == "__main__":
    main()
