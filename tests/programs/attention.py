"""Attention of a sequence that is split over ranks, and of the whole one, on any backend."""

from functools import partial

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.parallel import attention, attention_by_heads, ring_attention, zigzag
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_agree, gradient
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close

TOKENS, HEADS, D = 16, 8, 3


WAYS = attention_by_heads, ring_attention


def arguments(groups):
    rng = numpy.random.default_rng(0)
    return tuple(rng.normal(size=(TOKENS, heads, D)) for heads in (HEADS, groups, groups))


def whole(q, k, v, causal):
    positions = (np.arange(TOKENS),) * 2 if causal else ()
    return attention(q, k, v, *positions)


def in_order(split, order, *labels):
    """Return a function of sequences in their order, of one that takes their tokens, and labels, in another."""
    return lambda *args: spmd.reshard(split(*[x[order] for x in args], *labels), P())[numpy.argsort(order)]


@shows("reference", "derivatives", "counts", "modes")
def check_split(mesh, attend, causal, groups):
    """Values, gradients, and what is communicated, against the whole sequence and the docstring's table."""
    ranks, args = mesh.size, arguments(groups)
    order = zigzag(TOKENS, ranks) if causal and attend is ring_attention else np.arange(TOKENS)
    body = lambda q, k, v: attend(q, k, v, "tokens", causal=causal)  # noqa: E731
    split = mapped(body, mesh, P("tokens"), P("tokens"))
    restored = in_order(split, order)
    check_agree(restored, lambda *args: whole(*args, causal), args)
    large = 100 * args[0], *args[1:]  # of which no exponential overflows
    assert_trees_close(restored(*large), whole(*large, causal))
    block = 8 * TOKENS // ranks * D
    ring = attend is ring_attention
    count = ranks - 1 if ring else 2 if groups == HEADS else 4
    nbytes = 2 * (ranks - 1) * groups * block if ring else (2 * HEADS + 2 * groups) * block
    name = "ppermute" if ring else "all_to_all"
    for f in (split, gradient(split)):
        rows = [row for row in spmd.communication(f)(*args).rows if row.collective == name]
        for direction in {row.direction for row in rows}:
            those = [row for row in rows if row.direction == direction]
            assert (sum(row.count for row in those), sum(row.bytes for row in those)) == (count, nbytes)
    mesh.reset_calls()
    split(*args)
    assert mesh.calls == ({name: count} if ranks > 1 else {})


# ---------------------------------------------------------------- windows, prefixes, segments

#: Segments of packed sequences: some within a rank's tokens, some over several ranks; and keys that are padding.
PACKED = numpy.array([0] * 3 + [1] * 6 + [2] + [3] * 6)
LENGTHS = numpy.where(numpy.arange(TOKENS) < 11, 0, -1)

#: Options of `ring_attention`, and the number of messages of the forward pass on 4 ranks.
MASKS = {
    "a causal window": ({"causal": True, "window": 3, "in_order": True}, 1),
    "a causal window of two blocks": ({"causal": True, "window": 6, "in_order": True}, 2),
    "a causal window in zigzag order": ({"causal": True, "window": 3}, 2),
    "a window": ({"window": 3}, 2),
    "a window of itself": ({"window": 1}, 0),
    "causal, in order": ({"causal": True, "in_order": True}, 3),
    "a prefix": ({"causal": True, "prefix": 5}, 3),
    "a prefix and a window": ({"causal": True, "window": 2, "prefix": 3, "in_order": True}, 3),
    "segments": ({"causal": True, "segments": PACKED}, 6),
    "segments of both directions": ({"segments": PACKED}, 6),
    "lengths of keys": ({"segments": (0 * LENGTHS, LENGTHS)}, 6),
    "segments in a window": ({"causal": True, "window": 4, "segments": PACKED, "in_order": True}, 2),
}


def mask_of(tokens, causal=False, window=None, prefix=0, segments=None, in_order=False):
    """Return which query sees which key, one pair of positions after the other."""
    of_query, of_key = segments if isinstance(segments, tuple) else (segments, segments)
    mask = numpy.zeros((tokens, tokens), bool)
    for i, j in numpy.ndindex(*mask.shape):
        near = (j <= i or not causal) and (window is None or abs(i - j) < window)
        mask[i, j] = (near or j < prefix) and (segments is None or of_query[i] == of_key[j])
    return mask


@shows("reference", "derivatives", "modes", "counts")
def check_masked(mesh, name):
    """Values and gradients are those of dense attention with a mask; messages are as few as the mask allows."""
    (options, count), tokens = MASKS[name], TOKENS - TOKENS % (2 * mesh.size)
    segments, options = options.get("segments"), {k: v for k, v in options.items() if k != "segments"}
    zigzagged = options.get("causal") and not options.get("in_order")
    order = zigzag(tokens, mesh.size) if zigzagged else numpy.arange(tokens)
    labels = segments if isinstance(segments, tuple) else (segments, segments)
    labels = [None if x is None else x[order] for x in labels]

    def body(q, k, v, *labels):
        packed = {} if labels[0] is None else {"segments": labels}
        return ring_attention(q, k, v, "tokens", **options, **packed)

    specs = *[P("tokens")] * 3, *[None if x is None else P("tokens") for x in labels]
    split = mapped(body, mesh, specs, P("tokens"))
    mask = mask_of(tokens, **options, segments=segments)
    reference = lambda q, k, v: md.nn.dot_product_attention(q, k, v, mask=mask)  # noqa: E731
    groups = 4 + 4 * ([*MASKS].index(name) % 2)
    args = tuple(x[:tokens] for x in arguments(groups))
    check_agree(in_order(split, order, *labels), reference, args)
    mesh.reset_calls()
    split(*args, *labels)
    assert mesh.size != 4 or mesh.calls.get("ppermute", 0) == count


@shows("reference")
def check_other_keys(mesh):
    """Queries of a window that are more than the keys, as of a longer sequence that attends to a shorter one."""
    q, k, v = arguments(HEADS)
    k, v = k[: TOKENS // 2], v[: TOKENS // 2]
    near = numpy.abs(numpy.arange(TOKENS)[:, None] - numpy.arange(TOKENS // 2)) < TOKENS - 4
    body = lambda q, k, v: ring_attention(q, k, v, "tokens", window=TOKENS - 4)  # noqa: E731
    split = mapped(body, mesh, P("tokens"), P("tokens"))
    reference = md.nn.dot_product_attention(q, k, v, mask=near)
    assert_trees_close(spmd.reshard(split(q, k, v), P()), reference, rtol=1e-9, atol=1e-12)


@shows("reference", "derivatives", "counts")
def check_ring_of_heads(line, groups):
    """By heads within a ring: values, gradients and messages along both axes of a mesh."""
    on = mesh(2, 2, names=("ring", "heads"), backend=line.backend)
    order, args = zigzag(TOKENS, 2), arguments(groups)
    ring = partial(ring_attention, axis="ring", causal=True)
    spec = P(("ring", "heads"))
    split = mapped(lambda q, k, v: attention_by_heads(q, k, v, "heads", attend=ring), on, spec, spec)
    check_agree(in_order(split, order), lambda *args: whole(*args, True), args)
    counts = {"ppermute": 1, "all_to_all": 2 if groups == HEADS else 4}
    assert spmd.communication(split)(*args).counts == counts
