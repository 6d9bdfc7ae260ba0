"""Training with a parameter server on simulated and real ranks, and the data parallelism that it should equal."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import at_root, broadcast
from spmd import P
from spmd.examples import parameter_server
from spmd.examples.parameter_server import server_step
from spmd.parallel import init_params, loss
from tests.checks.documented import add, check_traffic, rows, traffic
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close

RATE, STEPS, EXAMPLES = 0.05, 3, 4  # examples of a worker


def example(workers):
    """Parameters, and one batch for each worker."""
    rng = np.random.default_rng(0)
    params = init_params(rng, (6, 5, 2))
    return params, [[(rng.normal(size=(EXAMPLES, 6)), rng.normal(size=(EXAMPLES, 2)))] for _ in range(workers)]


def whole_batch(batches):
    return tuple(map(np.concatenate, zip(*(batch for (batch,) in batches))))


def data_parallel(workers, steps):
    """Parameters and losses of gradient descent, by `spmd.parallel.data_parallel`."""
    params, batches = example(workers)
    mesh = spmd.make_mesh((workers,), ("batch",), backend="simulated")
    step, losses = md.value_and_grad(spmd.parallel.data_parallel(mesh)), []
    for _ in range(steps):
        value, gradients = step(params, whole_batch(batches))
        params = md.tree.map(lambda p, g: p - RATE * g, params, gradients)
        losses.append(float(value))
    return params, losses


@shows("reference", "derivatives", "counts", "modes")
def check_steps(mesh, root):
    """Some steps with a server are those of data parallelism; each communicates what the documentation says."""
    ranks = mesh.size
    params, batches = example(ranks)

    def train(params, block):
        server, losses = at_root(params, "workers", root), []
        for _ in range(STEPS):
            value, server = server_step(loss, server, block, RATE, "workers", root)
            losses.append(value)
        return broadcast(server, "workers", root), losses

    mapped = spmd.shard_map(train, mesh=mesh, in_specs=(P(), P("workers")), out_specs=P())
    args = params, whole_batch(batches)
    leaves = md.tree.leaves(params)
    names = {"leaves": len(leaves), "params": sum(leaf.size for leaf in leaves)}
    expected = traffic((cells for _, *cells in rows(parameter_server)), names, STEPS)
    add(expected, ("forward", "broadcast", "workers"), names["leaves"], 8 * names["params"])  # at the end
    actual = check_traffic(mapped, mesh, expected if ranks > 1 else {}, *args)
    assert_trees_close(actual, data_parallel(ranks, STEPS), rtol=1e-12)
