"""Step 8: collectives on a ring. `shift(x)` sends x to the next rank, and returns what
comes from the one before.
"""

import numpy as np


def ring_psum_scatter(x, shift, rank, size):
    """Rank r's block of the sum: r's of `size` pieces along dimension 0."""
    pieces = np.split(x, size)
    # HOLE 8.1 [3 points]
    # In size - 1 steps, a sum of pieces travels around the ring, and each rank adds its
    # own piece. Which one does a rank send first, so that the sum of the pieces `rank`
    # ends here?
    travels = pieces[(rank - 1) % size]
    for step in range(1, size):
        travels = shift(travels) + pieces[(rank - 1 - step) % size]
    return travels
    # END


def ring_all_gather(x, shift, rank, size):
    """The blocks of all ranks, one after the other."""
    # HOLE 8.2 [2 points]
    # In size - 1 steps, each rank passes on what it received last. Whose block is it,
    # in step s?
    blocks = {rank: x}
    for step in range(1, size):
        x = shift(x)
        blocks[(rank - step) % size] = x
    return np.concatenate([blocks[r] for r in range(size)])
    # END


def ring_psum(x, shift, rank, size):
    """The sum, on all ranks."""
    # HOLE 8.3 [2 points]
    # Scatter the sum, then gather it. x has any shape, also (): flatten it, and fill it
    # up with zeros to a multiple of `size`, as with `np.pad(flat, (0, missing))`.
    flat = np.ravel(x)
    padded = np.pad(flat, (0, -flat.size % size))
    summed = ring_all_gather(
        ring_psum_scatter(padded, shift, rank, size), shift, rank, size
    )
    return summed[: flat.size].reshape(np.shape(x))
    # END
