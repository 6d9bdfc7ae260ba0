"""Vocabularies that the ranks do not divide: the losses, gradients and texts of one rank."""

import dataclasses

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd import P, parallel
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.checks.samples import each

SIZE = 13  # tokens; 16 rows on 4 ranks
TEXT = numpy.arange(20).reshape(4, 5) * 5 % SIZE
BATCH = TEXT[:, :-1], TEXT[:, 1:]
LINE = mesh(4, names=("feats",))


def config_of(cls=parallel.Config, **options):
    return cls(vocabulary=SIZE, features=8, heads=4, layers=1, hidden=8, **options)


@each("tied, sequence_parallel", [(False, True), (True, False)])
def test_a_transformer_pads_its_vocabulary(tied, sequence_parallel):
    config = config_of(tied=tied)
    params = parallel.init_transformer(numpy.random.default_rng(0), config)
    expected = md.value_and_grad(lambda params: parallel.next_token_loss(config, params, *BATCH))(params)
    loss = parallel.tensor_parallel_transformer(LINE, config, sequence_parallel)
    for f in (md.value_and_grad(loss), md.jit(md.value_and_grad(loss))):
        assert_trees_close(spmd.gather(f(params, BATCH)), expected)


def test_parameters_that_are_padded_stay_split():
    """Their gradients are split as they are, and zero in the padding; nothing is gathered."""
    config = config_of()
    params = parallel.init_transformer(numpy.random.default_rng(0), config)
    loss = parallel.tensor_parallel_transformer(LINE, config)
    padded, _ = spmd.pad(params, LINE, parallel.transformer_specs(config, "feats"))
    assert padded["embedding"].shape == (16, 8) and padded["head"].shape == (8, 16)
    assert_trees_close(spmd.gather(padded)["head"], parallel.pad_vocabulary(params, 4)["head"])
    gradient = md.grad(loss)(padded, BATCH)
    assert gradient["embedding"].spec == P("feats", None) and gradient["head"].spec == P(None, "feats")
    expected = parallel.pad_vocabulary(spmd.gather(md.grad(loss)(params, BATCH)), 4)
    assert_trees_close(spmd.gather(gradient), expected)
    even = parallel.tensor_parallel_transformer(LINE, dataclasses.replace(config, vocabulary=16))
    assert len({str(spmd.communication(md.grad(f))(padded, BATCH).counts) for f in (loss, even)}) == 1


@each("sizes", [{"feats": 4}, {"feats": 2, "shards": 2}])
def test_a_decoder_pads_its_vocabulary(sizes):
    config = config_of(parallel.DecoderConfig)
    params = parallel.init_decoder(md.random.key(0), config)
    losses = [parallel.decoder_loss(parallel.decoder_mesh("simulated", **axes), config) for axes in ({}, sizes)]
    expected, actual = (spmd.gather(md.value_and_grad(loss)(params, BATCH)) for loss in losses)
    assert_trees_close(actual, expected)


@each("vocabulary", [5, 13, 16])
def test_padding_is_no_token(vocabulary):
    """Ranks may have padding alone, whose logits do not count, whatever they are."""
    rng, split = numpy.random.default_rng(0), P(None, "feats")
    table, logits, labels = rng.normal(size=(16, 3)), rng.normal(size=(2, 16)), numpy.array([0, vocabulary - 1])
    logits[:, vocabulary:] = numpy.nan
    error, of_all = parallel.label_cross_entropy, md.value_and_grad(lambda x, f: np.sum(f(x, labels)))
    on_ranks = mapped(lambda x, labels: error(x, labels, "feats", vocabulary), LINE, (split, P()), P())
    expected = of_all(logits[:, :vocabulary], error)
    for f in (on_ranks, md.jit(on_ranks), lambda x, y: error(x, y, vocabulary=vocabulary)):
        loss, gradient = spmd.gather(of_all(logits, f))
        assert_trees_close((loss, gradient[:, :vocabulary]), expected)
        assert not gradient[:, vocabulary:].any()
    embed = lambda table, tokens: parallel.embed(table, tokens, "feats", vocabulary)  # noqa: E731
    look_up, beyond = mapped(embed, LINE, (P("feats"), P()), P()), numpy.array([vocabulary, 15])
    assert_trees_close(look_up(table, labels), table[labels])
    for f, x in ((look_up, table), (on_ranks, logits)) if vocabulary < 16 else ():
        with pytest.raises(IndexError):
            f(x, beyond)
        assert numpy.isnan(md.jit(f)(x, beyond)).all()
