"""Transformers over ranks, simulated and real: numbers, communication, and the pair of functions f and g."""

from dataclasses import replace
from functools import partial

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from minidiff.nn import gelu
from spmd import P
from spmd.parallel import (
    Config,
    embed,
    init_transformer,
    label_cross_entropy,
    next_token_loss,
    tensor,
    tensor_parallel_transformer,
)
from tests.checks.documented import check_traffic, communicated, rows, traffic, value
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close, by_rank_0
from tests.checks.whole import whole

WIDE = Config(vocabulary=8, features=16, heads=8, layers=2, hidden=16)  # which 2, 4 and 8 ranks divide
CONFIGS = {
    "rms norm, SwiGLU": WIDE,
    "layer norm, GELU": replace(WIDE, layer_norm=True, swiglu=False, layers=1),
    "tied, an encoder": replace(WIDE, tied=True, causal=False),
    "grouped queries": replace(WIDE, features=32, heads=16, kv_heads=8, layers=1),
}
AXIS = "feats"


def example(config, examples=4, tokens=5):
    text = numpy.random.default_rng(0).integers(config.vocabulary, size=(examples, tokens + 1))
    return init_transformer(numpy.random.default_rng(1), config), (text[:, :-1], text[:, 1:])


def of_one_device(config):
    params, batch = example(config)
    return by_rank_0(lambda: md.value_and_grad(lambda params: next_token_loss(config, params, *batch))(params))


@shows("reference", "derivatives", "modes", "types")
def check_numbers(mesh, config):
    """Loss and gradients are those of one device, with types and without, compiled too."""
    (params, batch), expected = example(config), of_one_device(config)
    for options in ({}, {"check_rep": False}):
        f = md.value_and_grad(tensor_parallel_transformer(mesh, config, **options))
        for g in (f, md.jit(f)):
            assert_trees_close(g(params, batch), expected, rtol=1e-10, atol=1e-12)


@shows("counts", "modes")
def check_communication(mesh, config):
    """The report of the gradient is what the documentation says; and so is what the mesh counts."""
    params, batch = example(config)
    names = {"L": config.layers, "N": batch[0].size, "F": config.features}
    documented = traffic(([way, name, AXIS, *counts] for way, name, *counts, _ in rows(tensor, 1)), names)
    check_traffic(md.grad(tensor_parallel_transformer(mesh, config)), mesh, documented, params, batch)


@shows("errors")
def check_labels(mesh):
    """A token or label out of range is named on every rank, also in the gradient."""
    params, (tokens, labels) = example(WIDE)
    loss = tensor_parallel_transformer(mesh, WIDE)
    for f in (loss, md.grad(loss)):
        for label, batch in (("label 8", (tokens, labels + 1)), ("token 8", (tokens + 1, labels))):
            with pytest.raises(IndexError, match=rf"{label} is not in the vocabulary of 8: from 0 to 7"):
                f(params, batch)


@shows("reference", "derivatives", "modes", "counts")
def check_vocabulary(mesh):
    """The look-up and the cross entropy are those of one device, also where exponentials overflow."""
    rng, numbers = numpy.random.default_rng(0), numpy.array([[0, 7, 3], [4, 4, 1]])
    table, logits = rng.normal(size=(8, 5)), rng.normal(size=(2, 3, 8))
    row, element = 8 * numbers.size * 5, 8 * numbers.size
    sent_by = {"embed": {"psum": (1, row)}, "label_cross_entropy": {"pmax": (1, element), "psum": (2, 2 * element)}}
    for f, x, split in ((embed, table, P(AXIS)), *((label_cross_entropy, s * logits, LAST) for s in (1, 1e4))):
        local = partial(f, axis=AXIS)
        mapped = spmd.shard_map(local, mesh=mesh, in_specs=(split, P()), out_specs=P())
        of_sum = [md.value_and_grad(lambda x, h=h: np.sum(h(x, numbers) ** 2)) for h in (mapped, f)]
        assert_trees_close(of_sum[0](x), of_sum[1](x), rtol=1e-10, atol=1e-12)
        expected = {("forward", name, AXIS): sent for name, sent in sent_by[f.__name__].items()}
        assert communicated(spmd.communication(of_sum[0])(x)) == expected
        for h in (mapped, f):  # on a tape there are no values to check
            for wrong in (-1, 8):
                actual = md.jit(h)(x, numpy.array([[wrong, 2, 3]] * 2))
                assert numpy.isnan(actual[:, 0]).all()
                assert numpy.isfinite(actual[:, 1:]).all()


LAST = P(None, None, AXIS)

# ---------------------------------------------------------------- f and g written by hand


@md.custom_vjp
def custom_f(x):
    return x


@md.custom_vjp
def custom_g(x):
    return psum(x, AXIS)


custom_f.defvjp(lambda x: (x, None), lambda _, ct: (psum(ct, AXIS),))
custom_g.defvjp(lambda x: (psum(x, AXIS), None), lambda _, ct: (ct,))

BEGIN = {"inserted": lambda x: x, "custom": custom_f}
END = {"psum": partial(psum, axis_name=AXIS), "custom": custom_g}


def gradients(mesh, f, g, typed, inside):
    """Gradients of a perceptron's loss in x, A and B; in x, one for each rank if taken in the body."""

    def loss(x, A, B):
        return np.sum(g(gelu(f(x) @ A) @ B) ** 2)

    specs = P(), P(None, AXIS), P(AXIS)
    options = {"mesh": mesh, "in_specs": specs, "check_rep": typed}
    if not inside:
        return md.grad(spmd.shard_map(loss, out_specs=P(), **options), argnums=(0, 1, 2))
    gradient = md.grad(loss, argnums=(0, 1, 2))
    return spmd.shard_map(gradient, out_specs=(P(AXIS), *specs[1:]), **options)


@shows("derivatives", "types")
def check_pairs(mesh):
    """Each pair's gradients are the right ones times what the documentation says."""
    rng = numpy.random.default_rng(0)
    x, A, B = rng.normal(size=(3, 4)), rng.normal(size=(4, 8)), rng.normal(size=(8, 4))
    right = md.grad(lambda x, A, B: np.sum((gelu(x @ A) @ B) ** 2), argnums=(0, 1, 2))(x, A, B)
    pairs = rows(tensor, 2)
    assert len(pairs) == 4
    for f, g, *factors in pairs:
        typed, inside, outside = map(str.split, factors)
        for check_rep, within, factors in (
            (True, False, typed),
            (True, True, typed),
            (False, True, inside),
            (False, False, outside),
        ):
            actual = map(whole, gradients(mesh, BEGIN[f], END[g], check_rep, within)(x, A, B))
            for factor, y, z in zip(factors, actual, right):
                parts = y.reshape(-1, *z.shape)  # the rank's each, of x in the body
                if factor == "term":
                    assert not numpy.allclose(parts[0], parts[1])
                    parts, factor = numpy.sum(parts, axis=0, keepdims=True), inside[1]
                expected = value(factor, {"p": mesh.size}) * numpy.stack([z] * len(parts))
                numpy.testing.assert_allclose(parts, expected, rtol=1e-10, err_msg=f"{f}, {g}, {check_rep}, {within}")
