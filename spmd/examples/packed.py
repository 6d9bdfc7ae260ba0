"""Texts of different lengths without padding: one after the other in a row of tokens, split over ranks.

    mpirun -n 4 python -m spmd.examples.packed

A batch of texts is usually padded to the longest one, and the padding is computed for nothing. Packed, all tokens form
one row. Embeddings, norms and perceptrons need no more than that. Attention takes the place of each token in its text,
and the number of its text, its *segment*: tokens attend to their own text alone. On one rank, each text has its own
attention; on ranks, which have the same number of tokens each, keys go around a ring with their segments.

The program prints tokens and operations of a gradient with padding and packed, and whether losses and gradients agree.

Sources: Krell et al., "Efficient sequence packing without cross-contamination", 2021; Zhai et al., "ByteTransformer: A
high-performance transformer boosted for variable-length inputs", 2023.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd.examples.study import numbers, print_calls, run_study
from spmd.machines import A100
from spmd.mesh.specs import P
from spmd.parallel.attention import ring_attention
from spmd.parallel.transformer import (
    Config,
    causal,
    causal_attention,
    init_transformer,
    label_cross_entropy,
    mlp,
    normalize,
    transformer,
)

CONFIG = Config(vocabulary=16, features=16, heads=2, layers=2, hidden=32)
PADDING = -1  # the segment of tokens that make the row a multiple of the ranks


def pack(texts: Sequence[Any], ranks: int = 1) -> tuple[Any, Any, Any, Any]:
    """Return tokens, labels, positions and segments of texts in one row, whose length the ranks divide."""
    lengths = numpy.array([len(text) - 1 for text in texts])  # the last token is a label alone
    empty = -lengths.sum() % ranks
    fill = lambda rows, value: numpy.concatenate([*rows, numpy.full(empty, value)]).astype(int)  # noqa: E731
    tokens, labels = fill([text[:-1] for text in texts], 0), fill([text[1:] for text in texts], 0)
    positions = fill([numpy.arange(n) for n in lengths], 0)
    return tokens, labels, positions, fill([numpy.full(n, k) for k, n in enumerate(lengths)], PADDING)


def packed_loss(params: dict, tokens: Any, labels: Any, positions: Any, segments: Any, attend: Callable) -> Any:
    """Return the sum of the errors of a row of tokens; `attend` takes queries, keys, values and segments."""
    attend_row = lambda q, k, v: attend(q[0], k[0], v[0], segments)[None]  # noqa: E731
    x = params["embedding"][tokens][None]
    for layer in params["layers"]:
        y = normalize(CONFIG, layer["attention_norm"], x)
        x = x + causal_attention(layer["attention"], y, positions, attend_row)
        x = x + mlp(layer["mlp"], normalize(CONFIG, layer["mlp_norm"], x))
    errors = label_cross_entropy(normalize(CONFIG, params["norm"], x)[0] @ params["head"], labels)
    return np.sum(np.where(segments == PADDING, 0.0, errors))


def attend_text_by_text(lengths: Sequence[int], q: Any, k: Any, v: Any, segments: Any) -> Any:
    """Compute the attention of each text by itself: no pair of tokens of two texts is computed."""
    slices = [slice(*pair) for pair in itertools.pairwise(numpy.cumsum([0, *lengths]))]
    return np.concatenate([causal(q[s], k[s], v[s]) for s in slices])


def attend_on_ring(q: Any, k: Any, v: Any, segments: Any) -> Any:
    return ring_attention(q, k, v, "tokens", causal=True, in_order=True, segments=segments)


def padded_loss(params: dict, tokens: Any, labels: Any, mask: Any) -> Any:
    """Return the sum of the errors of texts that are padded to one length, [texts, longest]."""
    errors = label_cross_entropy(transformer(CONFIG, params, tokens), labels)
    return np.sum(np.where(mask, errors, 0.0))


def pad(texts: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return tokens, labels, and which ones are not padding."""
    longest = max(map(len, texts))
    rows = numpy.array([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = numpy.arange(1, longest) < numpy.array(list(map(len, texts)))[:, None]
    return rows[:, :-1], rows[:, 1:], mask


def show(mesh: spmd.Mesh) -> None:
    """Compare padded texts with packed ones, on one rank and on ranks."""
    rng = numpy.random.default_rng(0)
    lengths = [24, 5, 9, 14]
    texts = [rng.integers(CONFIG.vocabulary, size=n + 1) for n in lengths]
    params = init_transformer(rng, CONFIG)

    def on_rank(params: dict, tokens: Any, labels: Any, positions: Any, segments: Any) -> Any:
        return psum(packed_loss(params, tokens, labels, positions, segments, attend_on_ring), "tokens")

    on_ranks = spmd.shard_map(on_rank, mesh=mesh, in_specs=(P(), *[P("tokens")] * 4), out_specs=P())
    by_text = partial(packed_loss, attend=partial(attend_text_by_text, lengths))
    results = []
    for title, f, batch in (("with padding", padded_loss, pad(texts)), ("packed", by_text, pack(texts))):
        gradient = md.value_and_grad(f)
        results.append(gradient(params, *batch))
        operations = spmd.predict(gradient, A100)(params, *batch).flops
        print(f"{title}: {batch[0].size} tokens, {operations:,.0f} operations")
    results.append(print_calls("on ranks", md.value_and_grad(on_ranks), params, *pack(texts, mesh.size)))
    same = [all(map(numpy.allclose, *map(md.tree.leaves, (results[0], other)))) for other in results[1:]]
    print(f"losses: {numbers([value for value, _ in results])}; gradients: {'the same' if all(same) else 'NO'}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("tokens",), argv)


if __name__ == "__main__":
    main()
