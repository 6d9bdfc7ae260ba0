"""Transformers whose tokens are split between half layers: numbers, communication, memory, on any backend."""

import minidiff as md
from spmd.parallel import next_token_loss, tensor, tensor_parallel_transformer
from tests.checks.documented import check_traffic, rows, traffic
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close
from tests.programs.transformers import AXIS, example


@shows("reference", "derivatives", "modes", "counts")
def check_numbers_and_communication(mesh, config):
    params, batch = example(config, examples=2, tokens=8)
    loss = tensor_parallel_transformer(mesh, config, sequence_parallel=True)
    expected = md.value_and_grad(lambda params: next_token_loss(config, params, *batch))(params)
    names = {"L": config.layers, "N": batch[0].size, "F": config.features, "p": mesh.size}
    documented = traffic(([way, name, AXIS, *counts] for way, name, *counts, _ in rows(tensor, 3)), names)
    actual = check_traffic(md.value_and_grad(loss), mesh, documented, params, batch)
    assert_trees_close(actual, expected, rtol=1e-10, atol=1e-12)


def residuals_of(config, mesh, sequence_parallel):
    """The bytes that a rank keeps for the backward pass: all results of the linearized forward body."""
    loss = tensor_parallel_transformer(mesh, config, sequence_parallel)
    tape = md.make_tape(md.grad(loss))(*example(config, examples=2, tokens=8))
    forward = next(eqn for eqn in tape.equations if eqn.primitive.body_scope(eqn.params) is not None)
    return sum(t.nbytes for t in forward.params["body"].out_types)


@shows("memory")
def check_memory(mesh, config):
    """The same without what is split over the ranks; the rest is inside half layers, and as large as before."""
    assert residuals_of(config, mesh, True) < 0.7 * residuals_of(config, mesh, False)
