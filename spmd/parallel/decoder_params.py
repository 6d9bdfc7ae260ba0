"""The parameters of a decoder that is split along every axis of a mesh, and how they are split.

`dimensions` names the dimensions of each parameter, and `SPLIT` the axis along which each name is split. `decoder.py`
says what the axes are for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd.mesh.specs import P
from spmd.parallel.megatron import check_divided
from spmd.parallel.transformer import Config, sizes
from spmd.parallel.transformer import dimensions as dimensions_of_transformer

AXES = ("data", "shards", "experts", "stages", "tokens", "feats")
EXAMPLES = AXES[:4]  # along which examples are split

#: The axis along which each dimension of a parameter is split.
SPLIT = {"layers": "stages", "features": "shards", "experts": "experts"}
SPLIT |= dict.fromkeys(("vocabulary", "heads", "kv_heads", "hidden"), "feats")


@dataclass(frozen=True)
class DecoderConfig(Config):
    """Sizes of a transformer; the number of experts, and of those `chosen` for a token; their balancing coefficient.

    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=2, hidden=6, experts=4)
    >>> init_decoder(md.random.key(0), config)["layers"]["mlp"]["experts"]["up"].shape
    (2, 4, 4, 6)
    """

    experts: int = 0
    chosen: int = 2
    balance: float = 0.01


def dimensions(config: DecoderConfig) -> dict:
    """The tree of parameters, with the names of their dimensions as leaves. Layers are stacked."""
    whole = dimensions_of_transformer(config)
    layer = whole["layers"][0]
    if config.experts:
        experts = md.tree.map(lambda names: f"experts {names}", layer["mlp"])
        layer = {**layer, "mlp": {"router": "features choices", "experts": experts}}
    return {**whole, "layers": md.tree.map(lambda names: f"layers {names}", layer)}


def all_sizes(config: DecoderConfig) -> dict[str, int]:
    """The size of each dimension that `dimensions` names."""
    return {**sizes(config), "choices": config.experts}


def decoder_mesh(backend: str | None = None, **sizes: int) -> spmd.Mesh:
    """A mesh with all axes: those that are not given have size 1. Raises ValueError for an axis that does not exist.

    >>> decoder_mesh(data=2, feats=2, backend='simulated')
    Mesh(data: 2, shards: 1, experts: 1, stages: 1, tokens: 1, feats: 2; 4 ranks, simulated)
    """
    if unknown := sorted(set(sizes) - set(AXES)):
        raise ValueError(f"there is no axis {unknown[0]!r}: a decoder is split along {', '.join(AXES)}")
    return spmd.make_mesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, backend=backend)


def decoder_specs(config: DecoderConfig) -> dict:
    """The tree of parameters, with partition specs as leaves.

    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=2, hidden=6)
    >>> decoder_specs(config)["layers"]["mlp"]["up"]  # [layers, features, hidden]
    P('stages', 'shards', 'feats')
    """
    return md.tree.map(lambda names: P(*map(SPLIT.get, names.split())), dimensions(config))


def init_decoder(key: Any, config: DecoderConfig) -> dict:
    """Whole random weights, of standard deviation 1 / sqrt(features), and scales of 1.

    `key` is one of `minidiff.random`. On a mesh, use `spmd.initialize`, so that each rank computes only its shards.

    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=2, hidden=6)
    >>> init_decoder(md.random.key(0), config)['layers']['mlp']['up'].shape
    (2, 4, 6)
    """
    sizes = all_sizes(config)
    names, structure = md.tree.flatten(dimensions(config))

    def initial(names: str, key: Any) -> Any:
        shape = [sizes[name] for name in names.split()]
        weights = set(names.split()) - {"layers", "features"}
        return md.random.normal(key, shape) / np.sqrt(config.features) if weights else np.ones(shape)

    return md.tree.unflatten(structure, map(initial, names, md.random.split(key, len(names))))


def check_decoder(mesh: spmd.Mesh, config: DecoderConfig) -> None:
    """Raise ValueError for a mesh without the axes, or an axis that does not divide what is split along it."""
    if missing := [axis for axis in AXES if axis not in mesh.axis_names]:
        raise ValueError(f"decoder: {mesh} has no axis {missing[0]!r}: give it all of {AXES}, of size 1 if not used")
    if config.dropout or not config.causal:
        raise ValueError(f"decoder: it is causal and drops nothing; leave dropout and causal of {config} as they are")
    check_divided("decoder", mesh, all_sizes(config), SPLIT)


def check_batch(mesh: spmd.Mesh, examples: int, tokens: int, microbatches: int) -> None:
    """Raise ValueError for a batch [examples, tokens] that cannot be split over the mesh."""
    ranks, axes = math.prod(mesh.shape[axis] for axis in EXAMPLES), ", ".join(EXAMPLES)
    if examples % (ranks * microbatches):
        raise ValueError(
            f"decoder: {examples} examples are not a multiple of {ranks * microbatches}, the {ranks} ranks along "
            f"{axes} times {microbatches} microbatches: choose a multiple"
        )
    if tokens % (2 * mesh.shape["tokens"]):
        raise ValueError(
            f"decoder: {tokens} tokens are not a multiple of {2 * mesh.shape['tokens']}, two blocks for each rank "
            "along 'tokens': choose a multiple"
        )
