"""Attention: causal, of grouped queries, in chunks, and of sequences that are split over ranks."""

import tracemalloc

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.parallel import chunked_attention, ring_attention, zigzag
from spmd.parallel.attention import MASKED
from tests.checks.of_whole import check_agree
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs.attention import HEADS, TOKENS, arguments, check_masked, whole


def test_a_query_sees_no_later_key():
    q, k, v = arguments(HEADS)
    out = whole(q, k, v, causal=True)
    changed = whole(q, *[np.concatenate([x[:9], x[9:] + 1.0]) for x in (k, v)], causal=True)
    numpy.testing.assert_array_equal(out[:9], changed[:9])
    assert not numpy.isclose(out[9:], changed[9:]).all(axis=(1, 2)).any()
    numpy.testing.assert_allclose(out[0], v[0])


@each("chunk, groups, causal", [(1, HEADS, True), (4, 2, True), (4, HEADS, False), (TOKENS, 2, False)])
def test_chunks(chunk, groups, causal):
    chunked = lambda *args: chunked_attention(*args, chunk, causal)  # noqa: E731
    check_agree(chunked, lambda *args: whole(*args, causal), arguments(groups))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_zigzag_order_is_balanced(ranks):
    """Pairs of a block of queries and one of keys that are not skipped: 3 at first, then 2 in each step."""
    blocks = zigzag(4 * ranks, ranks).reshape(ranks, 2, 2)[:, :, 0] // 2
    for rank in range(ranks):
        for step in range(ranks):
            pairs = [(q, k) for q in blocks[rank] for k in blocks[(rank - step) % ranks] if q >= k]
            assert len(pairs) == (2 if step else 3)


WINDOW = 3
SLOPES = 2.0 ** -np.arange(1.0, HEADS + 1)
#: name: (causal, score, blocks of 4 by 4 queries and keys, which keys a query attends to, a bias)
SPARSE = {
    "causal": (True, None, None, lambda i, j: i >= j, 0),
    "a window": (
        True,
        lambda s, i, j: np.where(i[:, None] - j < WINDOW, s, MASKED),
        [[0 <= i - j <= 1 for j in range(4)] for i in range(4)],
        lambda i, j: (i >= j) & (i - j < WINDOW),
        0,
    ),
    "ALiBi": (
        False,
        lambda s, i, j: s - SLOPES[:, None, None] * abs(i[:, None] - j),
        None,
        lambda i, j: i == i,
        -SLOPES[:, None, None] * abs(np.arange(TOKENS)[:, None] - np.arange(TOKENS)),
    ),
    "lists of several lengths": (
        False,
        None,
        [[True, False, True, True], [False, True, False, False], [True] * 4, [False, False, False, True]],
        lambda i, j: np.array([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], bool)[i // 4, j // 4],
        0,
    ),
}


@pytest.mark.parametrize("name", SPARSE)
def test_tiles_of_queries_with_scores_and_blocks(name):
    """Values and gradients are those of dense attention with a mask and a bias; compiled, and under vmap."""
    causal, score, blocks, sees, bias = SPARSE[name]
    i, j = np.arange(TOKENS)[:, None], np.arange(TOKENS)
    args = arguments(HEADS)

    def tiled(*args):
        return chunked_attention(*args, 4, causal, tile=4, score=score, blocks=blocks)

    def dense(*args):
        return md.nn.dot_product_attention(*args, bias=bias + np.zeros((HEADS, 1, 1)), mask=sees(i, 0 * i + j))

    check_agree(tiled, dense, args)
    batch = [np.stack([x, 2 * x]) for x in args]
    assert_trees_close(md.vmap(tiled)(*batch), np.stack([dense(*x) for x in zip(*batch)]), rtol=1e-10)


def test_the_memory_of_tiles():
    """The backward pass keeps the sums of one tile at a time: of those of all queries, a fraction."""
    q, peaks = numpy.random.default_rng(0).normal(size=(1024, 2, 8)), []
    for tile in (None, 64):
        f = md.jit(md.grad(lambda q, tile=tile: np.sum(np.sin(chunked_attention(q, q, q, 64, True, tile=tile)))))
        f(q)
        tracemalloc.start()
        f(q)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 0.4 * peaks[0]


def test_chunks_that_are_skipped_are_not_computed():
    """A NaN among keys that no query sees changes nothing, and in a list for one tile spoils that tile alone."""
    q, k, v = arguments(HEADS)
    v = np.concatenate([v[:12], np.nan * v[12:]])
    blocks = np.ones((4, 4), bool)
    blocks[:3, 3] = False
    out = chunked_attention(q, k, v, 4, tile=4, blocks=blocks)
    assert np.isfinite(out[:12]).all() and np.isnan(out[12:]).all()


def test_a_ring_with_a_window_sends_to_neighbors_alone():
    """All masks are in `tests/checks/ranks.py`."""
    check_masked(spmd.make_mesh((2,), ("tokens",), backend="simulated"), "segments in a window")
    q, k, v = (np.zeros((16, *x.shape[1:])) for x in arguments(HEADS))
    mesh = spmd.make_mesh((8,), ("tokens",), backend="simulated")
    body = lambda q, k, v: ring_attention(q, k, v, "tokens", causal=True, window=4, in_order=True)  # noqa: E731
    split = spmd.shard_map(body, mesh=mesh, in_specs=P("tokens"), out_specs=P("tokens"))
    perms = [
        eqn.params["perm"]
        for eqn in md.make_tape(split)(q, k, v).equations[0].params["body"].equations
        if eqn.primitive.name == "ppermute"
    ]
    assert perms == [tuple((r - i, r) for r in range(i, 8)) for i in (1, 2)]
