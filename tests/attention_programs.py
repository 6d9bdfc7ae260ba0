"""Attention of a sequence that is split over ranks, and of the whole one, on any backend."""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.parallel import attention, ring_attention, zigzag
from tests.programs import assert_trees_close

TOKENS, HEADS, D = 16, 8, 3


def arguments(groups):
    rng = numpy.random.default_rng(0)
    return tuple(rng.normal(size=(TOKENS, heads, D)) for heads in (HEADS, groups, groups))


def whole(q, k, v, causal):
    positions = (np.arange(TOKENS),) * 2 if causal else ()
    return attention(q, k, v, *positions)


def check_split(mesh, attend, causal, groups):
    """Values, gradients, and what is communicated, against the whole sequence and the docstring's table."""
    ranks, args = mesh.size, arguments(groups)
    order = zigzag(TOKENS, ranks) if causal and attend is ring_attention else np.arange(TOKENS)
    body = lambda q, k, v: attend(q, k, v, "tokens", causal=causal)  # noqa: E731
    split = spmd.shard_map(body, mesh=mesh, in_specs=P("tokens"), out_specs=P("tokens"))

    def restored(*args):
        return spmd.reshard(split(*[x[order] for x in args]), P())[numpy.argsort(order)]

    loss = lambda f: lambda *args: np.sum(np.sin(f(*args)))  # noqa: E731
    reference = lambda *args: whole(*args, causal)  # noqa: E731
    for scale in (1, 100):  # of which no exponential overflows
        large = scale * args[0], *args[1:]
        for of in (lambda f: f, lambda f: md.grad(loss(f), argnums=(0, 1, 2))):
            assert_trees_close(of(restored)(*large), of(reference)(*large), rtol=1e-9)

    block = 8 * TOKENS // ranks * D
    ring = attend is ring_attention
    count = ranks - 1 if ring else 2 if groups == HEADS else 4
    nbytes = 2 * (ranks - 1) * groups * block if ring else (2 * HEADS + 2 * groups) * block
    name = "ppermute" if ring else "all_to_all"
    for f in (split, md.grad(loss(lambda *args: split(*args)), argnums=(0, 1, 2))):
        rows = [row for row in spmd.communication(f)(*args).rows if row.collective == name]
        for direction in {row.direction for row in rows}:
            those = [row for row in rows if row.direction == direction]
            assert (sum(row.count for row in those), sum(row.bytes for row in those)) == (count, nbytes)
    mesh.reset_calls()
    split(*args)
    assert mesh.calls == ({name: count} if ranks > 1 else {})
