"""Training with states and parameters in files, on simulated and real ranks, and what it should equal."""

import tempfile
from pathlib import Path

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff import optim
from spmd.examples.offload import offload
from spmd.parallel import zero
from tests.checks.documented import rows, value
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close
from tests.programs.zero import size_of, trained, whole_step

STEPS, FEATURES, HIDDEN = 3, 8, 16
#: Of tokens; leaves that are split along a dimension, or not at all; and a layer without parameters.
LAYERS = [
    lambda p, x: np.tanh(p["W"][x] + p["b"]),
    lambda p, x: x * 0.5,
    lambda p, x: np.tanh(x @ p["W"]) * p["scale"],
    lambda p, x: x @ p["W"],
]
OPTIMIZERS = {"adam": optim.adam(0.05), "momentum": optim.sgd(0.1, momentum=0.9)}


def mean_error(x, y):
    return np.mean((x - y) ** 2)


def example():
    rng = np.random.default_rng(0)
    W = lambda *shape: rng.normal(size=shape) / 3  # noqa: E731
    params = [
        {"W": W(FEATURES, HIDDEN), "b": W(HIDDEN)},
        {},
        {"W": W(HIDDEN, HIDDEN), "scale": W(3)[:1]},
        {"W": W(HIDDEN, FEATURES)},
    ]
    return params, (rng.integers(0, FEATURES, size=16), rng.normal(size=(16, FEATURES)))


def whole_loss(params, batch):
    x, targets = batch
    for layer, p in zip(LAYERS, params):
        x = layer(p, x)
    return mean_error(x, targets)


def in_memory(optimizer):
    """Losses and parameters of one process that updates all layers at once."""
    params, batch = example()
    return trained(whole_step(whole_loss, optimizer), params, optimizer.init(params), batch, STEPS)[:2]


def by_zero(stage, mesh, optimizer):
    """The same by ZeRO, whose parameters and states stay in memory."""
    params, batch = example()
    init, step = zero(whole_loss, optimizer, mesh, stage)
    return spmd.gather(trained(step, *init(params), batch, STEPS)[:2])


def train(stage, mesh, optimizer, folder):
    params, batch = example()
    init, step = offload(LAYERS, mean_error, optimizer, mesh, folder, stage)
    params, states = init(iter(params))
    losses = [float(step(params, states, batch)) for _ in range(STEPS)]
    return losses, spmd.gather([stored.read() for stored in params]), states


@shows("reference", "derivatives", "memory")
def check_training(mesh, stage, name):
    """Losses and parameters are those of the whole network, and to the last bit those of training without files.

    The files have the sizes that the documentation says.
    """
    optimizer = OPTIMIZERS[name]
    with tempfile.TemporaryDirectory() as folder:  # each rank has one of its own
        losses, params, states = train(stage, mesh, optimizer, folder)
        sizes = {file.name: file.stat().st_size - 1 for file in Path(folder).glob("*/*")}
        assert len(sizes) == len(LAYERS) * (stage - 1)
        kept_losses, kept_params, _ = train(stage, mesh, optimizer, None)
        assert losses == kept_losses and len({*losses}) == STEPS
        assert all(np.array_equal(*pair) for pair in zip(*map(md.tree.leaves, (params, kept_params))))
        for expected in (in_memory(optimizer), by_zero(stage, mesh, optimizer)):
            assert_trees_close((losses, params), expected, rtol=1e-10)
        if mesh.size == 1:
            assert losses == in_memory(optimizer)[0]
        assert len(md.tree.leaves([stored.read() for stored in states])) == (14 if name == "adam" else 5)
    processes = 1 if mesh.backend == "simulated" else mesh.size
    names = {"P": size_of(params), "p": processes, "K": 2 if name == "adam" else 1}
    (expected,) = (cells[2] for cells in rows(offload) if int(cells[0]) == stage)
    few = 8 * len(LAYERS) * 4  # bytes of counts of steps, and of a leaf that no dimension splits
    assert abs(sum(sizes.values()) - 8 * value(expected, names)) <= few
