"""The networks of `spmd.parallel`, and what their documentation says they communicate: on simulated and real ranks."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
import spmd
import spmd.parallel
from spmd.parallel import cross_entropy, init_params, loss, squared_error, stacked_layers, unstacked_layers
from tests.programs import assert_trees_close

MICROBATCH = 2


def same(x):
    return x


@dataclass
class Parallelism:
    """A loss of `spmd.parallel`: the axes of its mesh, and how its parameters are arranged."""

    loss: Any
    axes: tuple[str, ...]
    arranged: Any = same
    restored: Any = same

    def __call__(self, shape, backend=None, **options):
        return self.loss(spmd.make_mesh(shape, self.axes, backend=backend), **options)


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


def check_numbers(name, shape, backend=None):
    """Loss and gradients are those of the network that is not distributed: of two errors; without types too."""
    parallelism = PARALLELISMS[name]
    for error, typed in ((squared_error, True), (cross_entropy, True), (squared_error, False)):
        params, batch = example(error)
        expected = md.value_and_grad(partial(loss, error=error))(params, batch)
        distributed = parallelism(shape, backend, error=error, check_rep=typed)
        value, gradients = md.value_and_grad(distributed)(parallelism.arranged(params), batch)
        gradients = md.tree.map(whole, gradients)
        assert_trees_close((value, parallelism.restored(gradients)), expected)


def whole(x):
    return x.gather() if isinstance(x, spmd.ShardedArray) else x


# ---------------------------------------------------------------- what it communicates


def documented():
    """The table of `spmd.parallel`: for each loss, (direction, collective, axis, count, numbers) of each line."""
    _, _, lines, _ = (part.strip("\n") for part in _between_rules(spmd.parallel.__doc__))
    found = {}
    for line in filter(None, lines.splitlines()):
        name, direction, collective, axis, count, numbers = line.split(maxsplit=5)
        found.setdefault(name, []).append((direction, collective, axis, count, numbers))
    return found


def _between_rules(text):
    """The text before, between and after the rules of a table."""
    parts = [""]
    for line in text.splitlines():
        if line.startswith("==="):
            parts.append("")
        else:
            parts[-1] += line + "\n"
    return parts


def expected_communication(name, shape, params, batch):
    """What the table says: {(direction, collective, axis): (count, bytes)}."""
    (first, *_, last), layers = params, len(params)

    def size(*trees):
        return sum(np.size(x) for x in md.tree.leaves(trees))

    names = {
        **{"L": layers, "N": len(batch[0]), "M": len(batch[0]) // MICROBATCH, "F": np.shape(first[0])[1]},
        **{"p": shape[0], "q": shape[-1], "params": size(params), "weights": size([W for W, _ in params])},
        **{"first": size(first[0]), "ends": size(first, last), "outputs": size([b for _, b in params])},
    }
    return {
        (direction, collective, axis): (eval(count, {}, names), 8 * eval(numbers, {}, names))
        for direction, collective, axis, count, numbers in documented()[name]
    }


def communicated(report):
    """What a report says, in the same form."""
    found = {}
    for row in report.rows:
        count, nbytes = found.get((row.direction, row.collective, *row.axes), (0, 0))
        found[(row.direction, row.collective, *row.axes)] = count + row.count, nbytes + row.bytes
    return found


def check_communication(name, shape, backend=None, sizes=SIZES, examples=EXAMPLES):
    """The report of the gradient is what the table says, line by line; and so is what the mesh counts."""
    parallelism, (params, batch) = PARALLELISMS[name], example(sizes=sizes, examples=examples)
    mesh = spmd.make_mesh(shape, parallelism.axes, backend=backend)
    gradient, arranged = md.grad(parallelism.loss(mesh)), parallelism.arranged(params)
    report = spmd.communication(gradient)(arranged, batch)
    expected = expected_communication(name, shape, params, batch)
    assert not report.notes
    assert communicated(report) == {what: numbers for what, numbers in expected.items() if numbers[0]}
    mesh.reset_calls()
    gradient(arranged, batch)
    assert mesh.calls == report.counts
    assert sum(mesh.bytes.values()) == report.bytes == math.fsum(nbytes for _, nbytes in expected.values())
