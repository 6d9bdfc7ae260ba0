"""Random numbers on ranks, simulated and real: types, blocks of large draws, and dropout in transformers."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import minidiff as md
import spmd
from collectives import axis_index
from spmd import P
from spmd.parallel import next_token_loss, tensor_parallel_transformer
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close, equations
from tests.checks.whole import whole
from tests.programs.transformers import AXIS, WIDE, example

KEY = md.random.key(3)

DRAWS = {
    "normal": md.random.normal,
    "uniform": lambda k, shape: md.random.uniform(k, shape, np.float32),
    "randint": lambda k, shape: md.random.randint(k, shape, 0, 100),
    "truncated_normal": lambda k, shape: md.random.truncated_normal(k, -1.0, 1.0, shape),
    "bernoulli": lambda k, shape: md.random.bernoulli(k, 0.3, shape),
    "loggamma": lambda k, shape: md.random.loggamma(k, np.array([0.1, 1.0, 30.0]), shape),
    "poisson": lambda k, shape: md.random.poisson(k, 20.0, shape),
    "rademacher": md.random.rademacher,
    "dropout": lambda k, shape: md.nn.dropout(k, np.ones(getattr(shape, "shape", shape)), 0.4, shape),
}


@shows("reference", "modes")
def check_states(mesh):
    """A key that is the same on all ranks draws the same numbers; with the rank folded in, each its own."""
    types = []

    def body(key):
        local = md.random.fold_in(key, axis_index("i"))
        pair = md.random.split(local)
        draws = md.random.normal(key, 3), md.random.normal(local, 3), md.nn.dropout(pair[0], np.ones(3), 0.5)
        types.extend(map(str, (key, *map(md.typeof, (local, pair, *draws)))))
        return draws

    specs = P(), P("i"), P("i")
    mapped = spmd.shard_map(body, mesh=mesh, in_specs=P(), out_specs=specs)
    local = [md.random.fold_in(KEY, i) for i in range(mesh.shape["i"])]
    expected = (
        md.random.normal(KEY, 3),
        np.concatenate([md.random.normal(k, 3) for k in local]),
        np.concatenate([md.nn.dropout(md.random.split(k)[0], np.ones(3), 0.5) for k in local]),
    )
    for f in (mapped, md.jit(mapped)):
        types.clear()
        for x, y in zip(f(KEY), expected, strict=True):
            np.testing.assert_array_equal(whole(x), y)
        assert types[1:] == ["u32[2]{i}", "u32[2,2]{i}", "f64[3]", "f64[3]{i}", "f64[3]{i}"]
    wrong = spmd.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(md.VarianceError, match=r"has type f64\[3\]\{i\}: it may differ from rank to rank along 'i'"):
        wrong(KEY)


@shows("reference", "modes")
def check_keys_for_each_rank(mesh):
    """Keys that are split over the ranks, and a loop over them on each."""
    n = mesh.shape["i"]
    keys = md.random.split(KEY, 2 * n)
    expected = np.stack([md.random.normal(k, 3) for k in keys])
    at_once = md.vmap(lambda k: md.random.normal(k, 3))
    for body in (at_once, lambda keys: md.scan(lambda c, k: (c, md.random.normal(k, 3)), 0, keys)[1]):
        mapped = spmd.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        for f in (mapped, md.jit(mapped)):
            np.testing.assert_array_equal(whole(f(keys)), expected)
    sharded = spmd.distribute(keys, mesh, P("i"))  # outside of a body
    actual = at_once(sharded)
    assert actual.spec == P("i")
    np.testing.assert_array_equal(whole(actual), expected)


@shows("reference", "modes")
def check_blocks(mesh, specs):
    """The blocks of a draw are those of the whole, which no rank draws."""
    shape = (4, 8, 3)
    for spec in specs:
        for name, draw in DRAWS.items():
            drawn = []

            def body(key, draw=draw, spec=spec, drawn=drawn):
                x = draw(key, spmd.local_block(shape, spec))
                drawn.append(md.typeof(x))
                return x

            mapped = spmd.shard_map(body, mesh=mesh, in_specs=P(), out_specs=spec)
            for f in (mapped, md.jit(mapped)):
                x = f(KEY)
                np.testing.assert_array_equal(whole(x), draw(KEY, shape), err_msg=name)
                assert drawn[-1].variance == spec.axes
                assert md.typeof(x).size == drawn[-1].size * np.prod([mesh.shape[a] for a in spec.axes])


def init(key):
    """Parameters of a network, drawn and made in many ways."""
    keys = md.random.split(key, 8)
    w = md.random.normal(keys[0], (8, 12)) / np.sqrt(8)
    return {
        "scaled": w,
        "also whole": w.sum() + np.zeros(8),
        "of seeds": md.random.loggamma(keys[6], np.array([0.5, 2.0, 30.0, 100.0]), (8, 4)),
        "product": w @ md.random.uniform(keys[1], (12, 4)),
        "constant": np.arange(8.0),
        "of several keys": md.vmap(lambda k: md.random.truncated_normal(k, -1, 1, (8,)))(keys),
        "of split keys": md.vmap(lambda k: md.random.normal(k, 3))(keys),
        "broadcast": np.broadcast_to(md.random.normal(keys[2], (8,)), (4, 8)),
        "per row": md.random.normal(keys[3], (8, 4)) * md.random.bernoulli(keys[4], 0.5, (8, 1)),
        "permuted": md.random.permutation(keys[5], 8),
        "reshaped": md.random.normal(keys[3], (8, 4)).reshape(32),
        "whole": md.random.randint(keys[4], (3,), 0, 9),
        "cut": md.random.normal(keys[1], (16, 3))[4:12],
        "pair": np.stack([w, 2 * w]),
    }


@shows("reference", "modes", "counts")
def check_initialize(mesh, axes):
    """Each rank makes its blocks of what one device makes; nothing is communicated."""
    a, b = axes
    rows = ("also whole", "of seeds", "constant", "product", "permuted", "reshaped", "cut", "of split keys")
    specs = {
        **{name: P(a) for name in rows},
        **{"scaled": P(b, a), "of several keys": P(None, a), "broadcast": P(b, a), "per row": P(a, b)},
        **{"whole": P(), "pair": P(None, a, b)},
    }
    expected = init(KEY)
    f = spmd.initialize(init, mesh, specs)
    for g in (f, md.jit(f)):
        actual = g(KEY)
        assert spmd.spec_of(actual) == specs
        for name, x in md.tree.map(whole, actual).items():
            np.testing.assert_allclose(x, expected[name], rtol=1e-13, err_msg=name)
    assert spmd.communication(f)(KEY).counts == {}


def check_that_no_rank_draws_the_whole(mesh, axis):
    def f(key):
        return 1 + 0.1 * md.random.normal(key, (16, 6))

    for draws in (spmd.initialize(f, mesh, P(axis)), spmd.initialize(f, mesh, P(None, axis))):
        drawn = [e.outputs[0] for e in equations(md.make_tape(draws)(KEY)) if e.primitive.name == "random_bits"]
        assert [v.type.size for v in drawn] == [16 * 6 // mesh.shape[axis]]


@shows("reference", "derivatives", "modes", "counts")
def check_dropout_of_transformers(mesh):
    """Loss and gradients are those of one device with the same key, and nothing more is communicated."""
    mesh = spmd.make_mesh((mesh.size,), (AXIS,), backend=mesh.backend)
    config = replace(WIDE, dropout=0.3)
    params, batch = example(config, examples=2, tokens=8)
    expected = md.value_and_grad(lambda params: next_token_loss(config, params, *batch, key=KEY))(params)
    assert abs(expected[0] - next_token_loss(config, params, *batch)) > 1e-3
    for split in (False, True):
        make = partial(tensor_parallel_transformer, sequence_parallel=split)
        f = md.value_and_grad(make(mesh, config))
        for g in (f, md.jit(f), md.value_and_grad(make(mesh, config, check_rep=False))):
            assert_trees_close(g(params, batch, KEY), expected, rtol=1e-10, atol=1e-12)
        without = spmd.communication(md.grad(make(mesh, WIDE)))(params, batch)
        assert spmd.communication(f)(params, batch, KEY).counts == without.counts
