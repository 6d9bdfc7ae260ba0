"""The networks of `spmd.parallel`, and what their documentation says they communicate: on simulated and real ranks."""

import functools
import warnings
from functools import partial
from typing import Any, NamedTuple

import minidiff as md
import minidiff.numpy as np
import spmd
import spmd.parallel
from spmd import P
from spmd.examples import scheduled_network
from spmd.examples.scheduled_network import blocked_layers, unblocked_layers
from spmd.examples.weight_versions import (
    double_buffered_versions,
    pipedream_versions,
    scheduled_training,
    train_with_versions,
)
from spmd.parallel import cross_entropy, init_params, loss, squared_error, stacked_layers, unstacked_layers
from spmd.pipeline import one_f_one_b
from tests.checks.documented import check_traffic, rows, traffic
from tests.checks.meshes import mapped, mesh
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close, by_rank_0
from tests.checks.whole import whole

MICROBATCH = 2


class Parallelism(NamedTuple):
    """A loss of `spmd.parallel`: the axes of its mesh, and how its parameters are arranged."""

    loss: Any
    axes: tuple[str, ...]
    arranged: Any = lambda x: x
    restored: Any = lambda x: x

    def __call__(self, shape, backend=None, **options):
        return self.loss(mesh(*shape, names=self.axes, backend=backend), **options)


PARALLELISMS = {
    "data_parallel": Parallelism(spmd.parallel.data_parallel, ("batch",)),
    "fully_sharded": Parallelism(spmd.parallel.fully_sharded, ("batch",)),
    "tensor_parallel": Parallelism(spmd.parallel.tensor_parallel, ("feats",)),
    "fully_sharded_tensor_parallel": Parallelism(spmd.parallel.fully_sharded_tensor_parallel, ("batch", "feats")),
    "pipeline_parallel": Parallelism(
        partial(spmd.parallel.pipeline_parallel, microbatch=MICROBATCH), ("stages",), stacked_layers, unstacked_layers
    ),
}

SHAPES = {
    # ranks: meshes of one axis, and of two
    1: ([(1,)], [(1, 1)]),
    2: ([(2,)], [(1, 2)]),
    4: ([(4,)], [(2, 2)]),
    8: ([(8,)], [(4, 2)]),
}


def cases(ranks):
    """Every parallelism on every mesh of so many ranks: (name, shape)."""
    for name, parallelism in PARALLELISMS.items():
        for shape in SHAPES[ranks][len(parallelism.axes) - 1]:
            yield name, shape


# ---------------------------------------------------------------- the network

SIZES = (16, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16)  # eight inner layers
EXAMPLES = 16


def example(error=squared_error, sizes=SIZES, examples=EXAMPLES):
    """Parameters and a batch; for the cross entropy, with targets that are probabilities."""
    rng = np.random.default_rng(0)
    params, inputs = init_params(rng, sizes), rng.normal(size=(examples, sizes[0]))
    targets = rng.normal(size=(examples, sizes[-1]))
    return params, (inputs, md.nn.softmax(targets) if error is cross_entropy else targets)


@functools.cache
def of_whole_network(error, sizes=SIZES):
    params, batch = example(error, sizes)
    return by_rank_0(lambda: md.value_and_grad(partial(loss, error=error))(params, batch))


WAYS = (squared_error, True), (cross_entropy, True), (squared_error, False)  # of two errors; without types too


@shows("reference", "derivatives", "types")
def check_numbers(line, case):
    """Loss and gradients are those of the network that is not distributed."""
    name, shape = case
    parallelism = PARALLELISMS[name]
    for error, typed in WAYS:
        params, batch = example(error)
        expected = of_whole_network(error)
        distributed = parallelism(shape, line.backend, error=error, check_rep=typed)
        value, gradients = md.value_and_grad(distributed)(parallelism.arranged(params), batch)
        gradients = md.tree.map(whole, gradients)
        assert_trees_close((value, parallelism.restored(gradients)), expected)


# ---------------------------------------------------------------- what it communicates


def documented():
    """The table of `spmd.parallel`: for each loss, (direction, collective, axis, count, numbers) of each line."""
    actual = {}
    for name, *cells in rows(spmd.parallel):
        actual.setdefault(name, []).append(cells)
    return actual


def expected_communication(name, shape, params, batch):
    """Return the table as {(direction, collective, axis): (count, bytes)}."""
    (first, *_, last), layers = params, len(params)

    def size(*trees):
        return sum(np.size(x) for x in md.tree.leaves(trees))

    names = {
        **{"L": layers, "N": len(batch[0]), "M": len(batch[0]) // MICROBATCH, "F": np.shape(first[0])[1]},
        **{"p": shape[0], "q": shape[-1], "params": size(params), "weights": size([W for W, _ in params])},
        **{"first": size(first[0]), "ends": size(first, last), "outputs": size([b for _, b in params])},
    }
    ranks, actual = dict(zip(PARALLELISMS[name].axes, shape)), traffic(documented()[name], names)
    return {label: counts for label, counts in actual.items() if counts[0] and ranks[label[-1]] > 1}


@shows("counts", "modes")
def check_communication(line, case, sizes=SIZES, examples=EXAMPLES):
    """The report of the gradient is what the table says, line by line; and so is what the mesh counts."""
    (name, shape), (params, batch) = case, example(sizes=sizes, examples=examples)
    parallelism = PARALLELISMS[name]
    on = mesh(*shape, names=parallelism.axes, backend=line.backend)
    gradient, arranged = md.grad(parallelism.loss(on)), parallelism.arranged(params)
    check_traffic(gradient, on, expected_communication(name, shape, params, batch), arranged, batch)


# ---------------------------------------------------------------- schedules

SCHEDULES = {
    "gpipe": spmd.pipeline.gpipe,
    "one_f_one_b": spmd.pipeline.one_f_one_b,
    "interleaved": partial(spmd.pipeline.interleaved, chunks=2),
    "zero_bubble": spmd.pipeline.zero_bubble,
}


@shows("reference", "derivatives", "modes", "counts")
def check_schedule(mesh, name, microbatches=None):
    """Loss and gradients are those of the whole network; what is communicated is what the documentation says."""
    microbatches = microbatches or max(4, mesh.size)
    schedule = SCHEDULES[name](mesh.size, microbatches)
    sizes = SIZES if schedule.chunks * mesh.size <= 8 else (16, *[8] * (schedule.chunks * mesh.size + 1), 16)
    params, batch = example(sizes=sizes)
    run, blocked = scheduled_network.scheduled_value_and_grad(mesh, schedule), blocked_layers(params, schedule)
    ends = sum(x.size for x in md.tree.leaves((params[0], params[-1])))
    names = {"ticks": schedule.ticks, "N": EXAMPLES, "M": microbatches, "F": params[0][1].size, "ends": ends}
    expected = traffic(rows(scheduled_network), names) if mesh.size > 1 else {}
    value, gradients = check_traffic(run, mesh, expected, blocked, batch, label=lambda label: label[1:])
    gradients = unblocked_layers(md.tree.map(whole, gradients))
    assert_trees_close((value, gradients), of_whole_network(squared_error, sizes))


#: Rules by which a pipeline without a flush updates: the versions of p stages and a schedule, and the group.
WITHOUT_FLUSH = {
    "pipedream": lambda p, schedule: (pipedream_versions(schedule), 1),
    "vertical": lambda p, schedule: (pipedream_versions(schedule, vertical=True), 1),
    "double": lambda p, schedule: (double_buffered_versions(p, schedule.microbatches, group=p), p),
    "flushed": lambda p, schedule: ([[0] * schedule.microbatches] * p, schedule.microbatches),
}


@shows("reference", "derivatives", "modes", "counts")
def check_without_flush(mesh, rule):
    """Losses and parameters are those of the simulation with the same versions; compiled, too."""
    microbatches = 3 * mesh.size
    schedule = one_f_one_b(mesh.size, microbatches)
    versions, group = WITHOUT_FLUSH[rule](mesh.size, schedule)
    rng, rate = np.random.default_rng(1), 0.05 * group
    params = rng.normal(size=(3, 4)), rng.normal(size=(1, mesh.size, 4, 4)), rng.normal(size=(4, 2))
    inputs, targets = rng.normal(size=(microbatches, 5, 3)), rng.normal(size=(microbatches, 5, 2))
    layers = (
        lambda first, x: np.tanh(x @ first),
        lambda block, x: np.tanh(x @ block[0]),
        lambda last, x, y: np.mean((x @ last - y) ** 2),
    )

    def on_stages(params, inputs, targets):
        return scheduled_training(schedule, layers, params, inputs, targets, "stages", versions, rate, group)

    def whole_network(stages, microbatch):
        x = layers[0](stages[0]["first"], microbatch[0])
        for stage in stages:
            x = layers[1](stage["block"], x)
        return layers[2](stages[-1]["last"], x, microbatch[1])

    stages = [{"block": params[1][:1, i]} for i in range(mesh.size)]
    stages[0]["first"], stages[-1]["last"] = params[0], params[2]
    ends, losses = train_with_versions(whole_network, stages, [*zip(inputs, targets)], versions, rate, group)
    assert len({*map(float, losses)}) == microbatches and not np.allclose(ends[0]["first"], params[0])
    expected = (
        np.array(losses),
        (ends[0]["first"], np.stack([stage["block"] for stage in ends], axis=1), ends[-1]["last"]),
    )
    specs = P(), P(None, "stages"), P()
    run = spmd.shard_map(on_stages, mesh=mesh, in_specs=(specs, P(), P()), out_specs=(P(), specs))
    for f in (run, md.jit(run)):
        assert_trees_close(f(params, inputs, targets), expected, rtol=1e-10)
    report = spmd.communication(run)(params, inputs, targets)
    counts = {"ppermute": 2 * schedule.ticks, "broadcast": 3}
    assert report.counts == (counts if mesh.size > 1 else {})


# ---------------------------------------------------------------- layers that are not finite everywhere

#: Layers of a number and rows, where rows are positive at first: at zeros, and some at what another layer takes, they
#: are not finite, or their derivatives.
PARTIAL_LAYERS = {
    "sqrt": lambda p, x: np.sqrt(p * p * x),
    "log": lambda p, x: 3 + p * np.log(x),
    "1/x": lambda p, x: p / x,
    "norm": lambda p, x: p * x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True)),
    "of alternating sign": lambda p, x: -p * np.sqrt(p * x),
}


@shows("reference", "derivatives", "modes")
def check_partial_layers(mesh, name, typed):
    """Values and gradients of a pipeline are those of its layers one after the other.

    Without a warning, unless a stage is not finite at microbatches as they enter the first one.
    """
    layer, (stages,) = PARTIAL_LAYERS[name], mesh.shape.values()
    params = np.linspace(0.5, 1.0, stages) * (-1) ** (np.arange(stages) * (name == "of alternating sign"))
    microbatches = np.random.default_rng(0).uniform(1, 2, size=(2 * stages, 3, 2))
    body = lambda params, x: spmd.parallel.pipeline(layer, params, x, "stages")  # noqa: E731
    piped = mapped(body, mesh, P("stages"), P("stages"), check_rep=typed)

    def in_sequence(params, x):
        for p in params:
            x = layer(p, x)
        return x

    def with_gradients(f):
        return lambda *args: (f(*args), md.grad(lambda *args: np.sum(f(*args) ** 3), (0, 1))(*args))

    expected = with_gradients(in_sequence)(params, microbatches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "of alternating sign" else "error", RuntimeWarning)
        for f in (with_gradients(piped), md.jit(with_gradients(piped))):
            assert_trees_close(f(params, microbatches), expected)
