"""Attention: causal, of grouped queries, in chunks, and of sequences that are split over ranks."""

import tracemalloc

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P
from spmd.parallel import attention, attention_by_heads, chunked_attention, ring_attention, zigzag
from tests.attention_programs import HEADS, TOKENS, arguments, whole
from tests.programs import assert_trees_close


def test_a_query_sees_no_later_key():
    q, k, v = arguments(HEADS)
    out = whole(q, k, v, causal=True)
    changed = whole(q, *[np.concatenate([x[:9], x[9:] + 1.0]) for x in (k, v)], causal=True)
    numpy.testing.assert_array_equal(out[:9], changed[:9])
    assert not numpy.isclose(out[9:], changed[9:]).all(axis=(1, 2)).any()
    numpy.testing.assert_allclose(out[0], v[0])


def test_groups_are_repeated_heads():
    q, k, v = arguments(2)
    repeated = [np.repeat(x, HEADS // 2, axis=1) for x in (k, v)]
    assert_trees_close(whole(q, k, v, True), whole(q, *repeated, True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_chunks(groups, causal):
    args, loss = arguments(groups), lambda f: lambda *args: np.sum(np.sin(f(*args)))
    for chunk in (1, 4, TOKENS):
        chunked = lambda *args, chunk=chunk: chunked_attention(*args, chunk, causal)  # noqa: E731
        assert_trees_close(chunked(*args), whole(*args, causal))
        found, expected = (md.grad(loss(f), argnums=(0, 1, 2)) for f in (chunked, lambda *a: whole(*a, causal)))
        assert_trees_close(found(*args), expected(*args), rtol=1e-10)


def test_the_memory_of_chunks():
    """The weights of 512 tokens take 2 MiB for each head; a chunk's 1/16 of that, and the sums so far less still."""
    q, k, v = (numpy.random.default_rng(0).normal(size=(512, 1, 4)) for _ in range(3))
    peaks = []
    for f in (attention, lambda q, k, v: chunked_attention(q, k, v, chunk=32)):
        gradient = md.grad(lambda *args, f=f: np.sum(np.sin(f(*args))), argnums=(0, 1, 2))
        gradient(q, k, v)
        tracemalloc.start()
        gradient(q, k, v)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] > 3 * 2**21 and peaks[1] < peaks[0] / 6


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_zigzag_order_is_balanced(ranks):
    """Pairs of a block of queries and one of keys that are not skipped: 3 at first, then 2 in each step."""
    blocks = zigzag(4 * ranks, ranks).reshape(ranks, 2, 2)[:, :, 0] // 2
    for rank in range(ranks):
        for step in range(ranks):
            pairs = [(q, k) for q in blocks[rank] for k in blocks[(rank - step) % ranks] if q >= k]
            assert len(pairs) == (2 if step else 3)


def test_bad_input():
    mesh = spmd.make_mesh((4,), ("tokens",), backend="simulated")
    mapped = lambda f: spmd.shard_map(f, mesh=mesh, in_specs=P("tokens"), out_specs=P("tokens"))  # noqa: E731
    with pytest.raises(ValueError, match=r"4 ranks along 'tokens' cannot share 8 heads of q .* and 2 of k and v"):
        mapped(lambda q, k, v: attention_by_heads(q, k, v, "tokens"))(*arguments(2))
    for f in (attention_by_heads, ring_attention):
        wrong = rf"{f.__name__}: q f64\[4,8,3\].* k f64\[4,3,3\].* 4 ranks along 'tokens' do not fit.*of groups"
        with pytest.raises(ValueError, match=wrong):
            mapped(lambda q, k, v, f=f: f(q, k, v, "tokens"))(*arguments(3))
        longer = (
            rf"{f.__name__}: q f64\[2,8,3\].* k f64\[4,8,3\].* do not fit causal=True, .* not of 2 and 4; attention"
        )
        q, k, v = arguments(HEADS)
        with pytest.raises(ValueError, match=longer):
            mapped(lambda q, k, v, f=f: f(q, k, v, "tokens", causal=True))(q[:8], k, v)
        assert_trees_close(mapped(lambda q, k, v, f=f: f(q, k, v, "tokens"))(q[:8], k, v), attention(q[:8], k, v))
    with pytest.raises(ValueError, match="N is a multiple of K"):
        attention(*arguments(3))
    with pytest.raises(ValueError, match="12 tokens cannot be split into two blocks for each of 4 ranks"):
        zigzag(12, 4)
    with pytest.raises(ValueError, match="1 tokens are not even"):
        mapped(lambda x: ring_attention(x, x, x, "tokens", causal=True))(np.ones((4, 1, 1)))
    with pytest.raises(ValueError, match="chunks of 3 do not divide 16 tokens"):
        chunked_attention(*arguments(HEADS), chunk=3)
