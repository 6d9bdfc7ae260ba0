"""A parameter server on MPI ranks: what does not depend on the order of messages, and what its record tells."""

import math
import time

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import spmd
from spmd.examples.parameter_server import run_parameter_server, simulate_parameter_server
from tests.checks.meshes import mesh
from tests.checks.results import assert_trees_close
from tests.programs import server as programs

RATE, RANKS = programs.RATE, MPI.COMM_WORLD.size


def mesh_of():
    return mesh(RANKS, names=("ranks",), backend="mpi")


def train(updates, bound, loss=programs.loss):
    params, batches = programs.example(RANKS - 1)
    return run_parameter_server(mesh_of(), loss, params, batches, RATE, updates, bound)


def replay(trained, workers):
    """The parameters and losses of the gradients that the record names, computed one after the other."""
    params, batches = programs.example(workers)
    history, losses = [params], []
    for k, update in enumerate(trained.updates):
        actual = [
            md.value_and_grad(programs.loss)(history[k - staleness], batches[worker][0])
            for worker, staleness in zip(update.workers, update.staleness)
        ]
        values, gradients = zip(*actual)
        losses.append(numpy.mean(values))
        history.append(md.tree.map(lambda p, *g: p - RATE / workers * sum(g), history[-1], *gradients))
    return history[-1], losses


@pytest.mark.parallel([2, 3])
def test_synchronous_training_is_the_simulation():
    trained = train(5, bound=0)
    params, batches = programs.example(RANKS - 1)
    simulated = simulate_parameter_server(programs.loss, params, batches, RATE, [1] * (RANKS - 1), until=5)
    assert_trees_close(trained.params, simulated.params, rtol=1e-12)
    assert [update.workers for update in trained.updates] == [update.workers for update in simulated.updates]
    assert_trees_close([u.loss for u in trained.updates], [u.loss for u in simulated.updates], rtol=1e-12)
    assert trained.staleness == simulated.staleness == {0: 5 * (RANKS - 1)}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("bound", [1, 2, math.inf])
def test_the_record_of_stale_training_explains_its_numbers(bound):
    """Whatever comes first: no gradient is staler than the bound, and the numbers are those of the record."""
    slow = 0.01 * (RANKS > 1 and MPI.COMM_WORLD.rank == 1)

    def loss(params, batch):
        time.sleep(slow)
        return programs.loss(params, batch)

    trained = train(20, bound, loss)
    assert len(trained.updates) == 20 and max(trained.staleness) <= min(bound, 20)
    params, losses = replay(trained, RANKS - 1)
    assert_trees_close(trained.params, params, rtol=1e-10)
    assert_trees_close([update.loss for update in trained.updates], losses, rtol=1e-10)
    times = [update.time for update in trained.updates]
    assert times == sorted(times) and all(0 <= waited <= times[-1] for waited in trained.waited)
    if bound == math.inf:  # the server holds nothing
        assert trained.waited == [0.0] * (RANKS - 1) and all(len(update.workers) == 1 for update in trained.updates)
    spmd.check_invariant(trained.params, mesh_of())


@pytest.mark.parallel([2, 3])
def test_a_mistake_on_one_rank_is_an_error_on_all():
    on, count = mesh_of(), []

    def fails(params, batch):
        count.append(on.rank)
        if on.rank == RANKS - 1 and len(count) == 3:
            raise OverflowError("three is too many")
        return programs.loss(params, batch)

    for bound in (0, math.inf):
        count.clear()
        with pytest.raises(ValueError, match=r"(?s)run_parameter_server: .*OverflowError: three is too many"):
            train(10**6, bound, fails)
        assert len(train(3, bound).updates) == 3  # no message is left
    params, batches = programs.example(RANKS - 1)
    cases = [
        ({"updates": 2 + (on.rank == 1)}, "run_parameter_server: .*updates=2.*updates=3"),
        ({"bound": -1}, "bound is -1: pass 0"),
        ({"batches": [*batches, *batches] if on.rank else batches}, "batches for .* workers, but .* and a server"),
        ({"params": spmd.distribute(numpy.ones(RANKS), on, spmd.P("ranks"))}, "cannot be pickled"),
    ]
    for changed, message in cases:
        inputs = {"params": params, "batches": batches, "rate": RATE, "updates": 2, **changed}
        with pytest.raises((ValueError, TypeError), match=f"(?s){message}"):
            run_parameter_server(on, programs.loss, **inputs)
    assert len(train(3, 0).updates) == 3
