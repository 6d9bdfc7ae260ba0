"""Networks under several parallelisms: losses and gradients of the unsharded one, collectives where they belong."""

from functools import partial

import pytest

import minidiff as md
import minidiff.numpy as np
import spmd
import spmd.parallel
from minidiff.nn import log_softmax, relu
from spmd import P, parallel
from tests.checks.meshes import mapped, mesh
from tests.checks.of_whole import check_derivatives
from tests.checks.results import assert_trees_close
from tests.programs import networks

RNG = np.random.default_rng(1)


def test_all_are_documented():
    assert set(networks.documented()) == set(networks.PARALLELISMS)
    assert set(networks.PARALLELISMS) <= set(spmd.parallel.__all__)


@pytest.mark.parametrize("name, shape", [*networks.cases(8)])
def test_types_never_communicate_more(name, shape):
    parallelism, (params, batch) = networks.PARALLELISMS[name], networks.example()
    comparison = spmd.compare(md.grad(parallelism(shape, "simulated")), parallelism.arranged(params), batch)
    assert comparison.same
    assert sum(comparison.typed.counts.values()) <= sum(comparison.untyped.counts.values())
    assert comparison.ratio >= 1


# ---------------------------------------------------------------- layers


def check_derivative(f, *args):
    """Its tape, transposed twice, computes the derivative again; the two tapes."""
    tape = md.make_tape(md.linearize(f, *args)[1])(*args)
    transposed = md.transpose(tape)
    back = md.transpose(transposed)
    values = md.tree.leaves(args)
    assert_trees_close(back(*values), tape(*values))
    assert md.transpose(back) == transposed
    return tape, back


@pytest.mark.parametrize("name", networks.PARALLELISMS)
def test_transposing_the_derivative_of_a_network_twice(name):
    parallelism, (params, batch) = networks.PARALLELISMS[name], networks.example(sizes=(4,) * 5, examples=4)
    f = parallelism((2, 1)[: len(parallelism.axes)])
    tape, back = check_derivative(lambda params: f(params, batch), parallelism.arranged(params))
    assert back == tape or name == "pipeline_parallel"  # in which np.where chooses between two values


@pytest.mark.parametrize("attend", [parallel.attention_by_heads, parallel.ring_attention])
def test_transposing_the_derivative_of_attention_twice(attend):
    split = partial(attend, axis="tokens")
    f = spmd.shard_map(split, mesh=mesh(2, names=("tokens",)), in_specs=P("tokens"), out_specs=P("tokens"))
    tape, back = check_derivative(f, *RNG.normal(size=(3, 4, 2, 3)))
    assert back == tape


def test_a_pair_of_layers_sums_once_each_way():
    """A column-parallel layer, an activation, a row-parallel layer: one all-reduce forward, one backward."""
    params, x = parallel.init_params(RNG, (6, 8, 4)), RNG.normal(size=(3, 6))

    def pair(x, first, second):
        return parallel.row_parallel(relu(parallel.column_parallel(x, *first)), *second, "feats")

    specs = (P(), (P(None, "feats"), P("feats")), (P("feats"), P()))
    f = mapped(pair, mesh(4, names=("feats",)), specs, P())
    check_derivatives(f, (x, *params), lambda x, *layers: parallel.predict(layers, x))
    rows = spmd.communication(md.grad(lambda *args: np.sum(f(*args) ** 2), (0, 1, 2)))(x, *params).rows
    sums = [(r.collective, r.count, r.bytes, r.direction) for r in rows]
    assert sums == [("psum", 1, 8 * 3 * 4, "forward"), ("psum", 1, 8 * 3 * 6, "backward")]


# ---------------------------------------------------------------- errors of examples


@pytest.mark.parametrize("axis", [None, "feats"])
def test_cross_entropy(axis):
    logits, targets, spec = RNG.normal(size=(3, 4)), np.eye(4)[[1, 3, 3]], P(None, "feats")
    error = partial(parallel.cross_entropy, axis=axis)
    error = mapped(error, mesh(2, names=("feats",)), (spec, spec), P()) if axis else error
    expected = lambda logits: -np.sum(targets * log_softmax(logits), axis=-1)  # noqa: E731
    check_derivatives(lambda logits: error(logits, targets), (logits,), expected)
    assert_trees_close(error(logits + 1000, targets), expected(logits))  # no exponential overflows


# ---------------------------------------------------------------- pipelines


def layer(W, x):
    return np.tanh(x @ W + 0.5)


def in_sequence(params, microbatches):
    x = microbatches
    for i in range(len(params)):
        x = layer(params[i], x)
    return x


@pytest.mark.parametrize("stages, per_stage, share", [(1, 3, 2), (3, 2, 1), (3, 1, 4)])
def test_a_pipeline_is_its_layers_one_after_the_other(stages, per_stage, share):
    """Pipelines of any length, with layers that do not commute, so that their order and that of microbatches matter."""
    params = RNG.normal(size=(stages * per_stage, 2, 2))
    microbatches = RNG.normal(size=(stages * share, 3, 2))
    calls, ticks = [], stages * share + stages - 1
    counting = lambda W, x: calls.append(W) or layer(W, x)  # noqa: E731
    piped = lambda params, x: parallel.pipeline(counting, params, x, "stages")  # noqa: E731
    piped = mapped(piped, mesh(stages, names=("stages",)), P("stages"), P("stages"))
    piped(params, microbatches)
    assert len(calls) == per_stage * ticks  # a rank evaluates each of its layers once a tick
    report = spmd.communication(piped)(params, microbatches)
    assert report.counts == ({"ppermute": ticks - 1 + 2 * (stages - 1)} if stages > 1 else {})
    check_derivatives(piped, (params, microbatches), in_sequence)
