"""Positions of tokens: added to embeddings, as rotations of queries and keys, or added to scores.

    mpirun -n 4 python -m spmd.examples.positions

Tokens are split over ranks, which gather keys and values. For each kind, the program prints whether ranks compute what
one rank does, and whether all positions may be moved by the same number, so that distances alone count.

==============  =============================================================================
sinusoidal      sin and cos of the position at many frequencies are added to the embedding
learned         a row of a table is added
hierarchical    of n rows, n² positions: mixtures of the rows `i // n` and `i % n`
rotary          pairs of features are rotated by angles that grow with the position
interpolated    the same, with a quarter of the position, for texts that are longer
NTK             the same, with a larger base: only the slowest angle is divided by 4
ALiBi           a multiple of the distance is subtracted from the score
Transformer-XL  scores of the query and the sinusoidal embedding of i - j; two learned biases
XLNet           the same, and a score for whether both tokens are of one segment
==============  =============================================================================

Sources: Vaswani et al., 2017; Su, "Hierarchical decomposition of position encodings", 2020, and "RoFormer", 2021; Chen
et al., "Positional interpolation", 2023; bloc97, "NTK-aware scaled RoPE", 2023; Press et al., "Train short, test long",
2022; Dai et al., "Transformer-XL", 2019; Yang et al., "XLNet", 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather
from minidiff.nn import dot_product_attention
from spmd.examples.study import run_study
from spmd.mesh.specs import P
from spmd.parallel.transformer import rotary

HEADS, SIZE, FEATURES, SCALE = 2, 8, 16, 4.0
KINDS = ("sinusoidal", "learned", "hierarchical", "rotary", "interpolated", "NTK", "ALiBi", "Transformer-XL", "XLNet")


def sinusoidal(positions: Any, features: int = FEATURES) -> Any:
    angles = positions[..., None] * 10000.0 ** (-np.arange(0, features, 2) / features)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*positions.shape, features)


def hierarchical(table: Any, positions: Any, alpha: float = 0.4) -> Any:
    """Return embeddings of n² positions by n learned ones: those of the first n are the rows themselves."""
    rows = (table - alpha * table[0]) / (1 - alpha)
    return alpha * rows[positions // len(table)] + (1 - alpha) * rows[positions % len(table)]


def ntk_base(scale: float, size: int = SIZE, base: float = 10000.0) -> float:
    """Return the base with which the slowest of the `size / 2` angles is divided by the scale."""
    return base * scale ** (size / (size - 2))


def alibi(distances: Any) -> Any:
    return -(2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS))[:, None, None] * abs(distances)


def relative(params: dict, q: Any, k: Any, distances: Any, same: Any = None) -> Any:
    """Return what Transformer-XL adds to the scores q k; with `same`, whether segments agree, what XLNet does."""
    reach = len(k) - 1  # distances are from -reach to reach: one row of products for each
    rows = np.einsum("rf,fhs->rhs", sinusoidal(np.arange(-reach, reach + 1)), params["distance"])
    products = np.einsum("ths,rhs->htr", q + params["distance_bias"], rows)
    at = np.broadcast_to(distances + reach, (HEADS, *distances.shape))
    scores = np.take_along_axis(products, at, axis=-1) + np.einsum("hs,jhs->hj", params["key_bias"], k)[:, None]
    if same is not None:
        both = np.einsum("ths,chs->cht", q + params["segment_bias"], params["segments"])[..., None]
        scores = scores + np.where(same, both[1], both[0])
    return scores / SIZE**0.5


def layer(kind: str, params: dict, x: Any, positions: Any, segments: Any, axis: str | None = None) -> Any:
    """Return attention of tokens, [tokens / ranks, features], with one kind of positions."""
    tables: dict[str, Callable] = {
        "sinusoidal": sinusoidal,
        "learned": lambda positions: params["learned"][positions],
        "hierarchical": partial(hierarchical, params["table"]),
    }
    rotations = {"rotary": {}, "interpolated": {"scale": SCALE}, "NTK": {"base": ntk_base(SCALE)}}
    x = x + tables[kind](positions) if kind in tables else x
    q, k, v = (np.einsum("tf,fhs->ths", x, params[name]) for name in ("query", "key", "value"))
    if kind in rotations:
        q, k = (rotary(y, positions, **rotations[kind]) for y in (q, k))
    k, v, places, labels = (all_gather(y, axis, tiled=True) if axis else y for y in (k, v, positions, segments))
    distances, same = positions[:, None] - places, segments[:, None] == labels if kind == "XLNet" else None
    bias = alibi(distances) if kind == "ALiBi" else None
    if kind in ("Transformer-XL", "XLNet"):
        bias = relative(params, q, k, distances, same)
    return dot_product_attention(q, k, v, bias=bias)


def init(tokens: int) -> tuple[dict, Any, Any]:
    """Return parameters of all kinds, for three times as many positions as tokens; tokens, and their segments."""
    rng = numpy.random.default_rng(0)
    shapes: dict[str, tuple] = dict.fromkeys(("query", "key", "value", "distance"), (FEATURES, HEADS, SIZE))
    shapes |= dict.fromkeys(("distance_bias", "key_bias", "segment_bias"), (HEADS, SIZE))
    shapes |= {"segments": (2, HEADS, SIZE), "learned": (3 * tokens, FEATURES), "table": (tokens, FEATURES)}
    params = {name: rng.normal(size=shape) / FEATURES**0.5 for name, shape in shapes.items()}
    return params, rng.normal(size=(tokens, FEATURES)), numpy.arange(tokens) // (tokens // 2)


def show(mesh: spmd.Mesh) -> None:
    """Print, for each kind, whether ranks compute the same, and whether moved positions do."""
    params, x, segments = init(4 * mesh.size)
    positions, split = numpy.arange(len(x)), P("tokens")
    for kind in KINDS:
        whole, body = partial(layer, kind), partial(layer, kind, axis="tokens")
        on_ranks = spmd.shard_map(body, mesh=mesh, in_specs=(P(), *[split] * 3), out_specs=split)
        results = []
        for f in (on_ranks, whole):
            loss = lambda p, f=f: np.sum(np.sin(f(p, x, positions, segments)))  # noqa: E731
            results.append(md.tree.leaves(md.value_and_grad(loss)(params)))
        moved = whole(params, x, positions + 2 * len(x), segments)
        same = [all(map(numpy.allclose, *results)), numpy.allclose(moved, whole(params, x, positions, segments))]
        print(f"{kind:14} on ranks: {'the same' if same[0] else 'NO'}; moved: {'the same' if same[1] else 'different'}")
    slowest = (10000.0 / ntk_base(SCALE)) ** -((SIZE - 2) / SIZE)
    print(f"NTK: the slowest angle is divided by {slowest:.1f}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("tokens",), argv)


if __name__ == "__main__":
    main()
