"""Beam search: the most probable texts of a decoder, whose cache moves with the beams.

    mpirun -n 4 python -m spmd.examples.beam_search

The program prints the texts that searches with four and two beams find, of a decoder with random parameters, and the
logarithms of their probabilities.

Source: Graves, "Sequence transduction with recurrent neural networks".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff.nn import log_softmax
from spmd.examples.study import numbers, run_study
from spmd.parallel.decoder import DecoderConfig, decoder_mesh, init_decoder
from spmd.parallel.generate import decode_step, empty_cache


def beam_search(
    config: DecoderConfig,
    params: dict,
    prompt: Any,
    count: int,
    context: int,
    beams: int,
    mesh: spmd.Mesh | None = None,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The most probable texts of `count` tokens after the prompt that a beam search finds.

    The result is (tokens [beams, count], log of their probabilities [beams]), the most probable one first. In each step
    it keeps the `beams` most probable of all continuations. Raises ValueError for more beams than tokens, and
    for what `decode_step` does not take, such as no token.

    >>> config = DecoderConfig(vocabulary=8, features=4, heads=2, layers=1, hidden=6)
    >>> tokens, scores = beam_search(config, init_decoder(md.random.key(0), config), [3, 1], 5, context=8, beams=4)
    >>> tokens.shape, bool(scores[0] > scores[3])
    ((4, 5), True)
    """
    if not 0 < beams <= config.vocabulary:
        raise ValueError(f"beam_search: beams={beams}: must be from 1 to {config.vocabulary}, the vocabulary")
    step = md.jit(decode_step(config, mesh))
    cache, position = empty_cache(config, beams, context, params["embedding"].dtype), min(len(prompt), context)
    logits, cache = step(params, cache, 0, numpy.tile(numpy.asarray(prompt[:position]), (beams, 1)))
    for token in prompt[position:]:
        logits, cache = step(params, cache, position, numpy.full((beams, 1), token))
        position += 1
    scores, tokens = numpy.array([0.0, *[-numpy.inf] * (beams - 1)]), numpy.empty((beams, 0), int)
    for k in range(count):
        scores = (scores[:, None] + log_softmax(spmd.gather(logits)[:, -1])).ravel()
        best = numpy.argsort(-scores, kind="stable")[:beams]
        parents, latest = numpy.divmod(best, config.vocabulary)
        scores, tokens = scores[best], numpy.concatenate([tokens[parents], latest[:, None]], axis=1)
        if k < count - 1:
            logits, cache = step(params, [np.take(x, parents, axis=1) for x in cache], position + k, latest[:, None])
    return tokens, scores


def show(mesh: spmd.Mesh) -> None:
    """Print the texts that searches with four and two beams find, and the log of their probabilities."""
    config = DecoderConfig(vocabulary=16, features=16, heads=4, layers=2, hidden=8)
    params = init_decoder(md.random.key(0), config)
    mesh = decoder_mesh(data=mesh.shape["data"], feats=mesh.shape["feats"], backend=mesh.backend)
    for beams in (4, 2):
        tokens, scores = beam_search(config, params, [3, 1, 4], count=6, context=16, beams=beams, mesh=mesh)
        for text, score in zip(tokens, scores):
            print(f"{beams} beams: {' '.join(map(str, text))}, {numbers([score])}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("data", "feats"), argv)


if __name__ == "__main__":
    main()
