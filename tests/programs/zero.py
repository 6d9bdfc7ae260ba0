"""Training by ZeRO's stages: numbers of the whole network, what is communicated, and what a rank holds."""

import minidiff as md
import minidiff.numpy as np
import spmd
from minidiff import optim
from spmd.parallel import init_params, loss, zero
from tests.checks.documented import add, check_traffic, rows, traffic, value
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close, by_rank_0, equations

STAGES, EXAMPLES, ADAM_STATES = (1, 2, 3), 32, 2
SIZES = (8, 16, 24, 8)  # which 2, 4 and 8 ranks divide
EVERYTHING = 1 << 30  # bytes of a bucket

OPTIMIZERS = {
    "adam": optim.adam(0.05),
    "clipped": optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1, momentum=0.9)),
    "decayed": optim.adamw(0.05, weight_decay=0.1, mask={"net": True, "scale": False, "shift": False, "empty": True}),
}


def network(sizes=SIZES):
    rng = np.random.default_rng(0)
    return init_params(rng, sizes), (rng.normal(size=(EXAMPLES, sizes[0])), rng.normal(size=(EXAMPLES, sizes[-1])))


def odd_network():
    """Leaves that are split along another dimension than the first, or not at all."""
    net, batch = network((8, 3, 8))
    return {"net": net, "scale": 1.5, "shift": np.ones(8), "empty": np.zeros((8, 0))}, batch


def odd_loss(params, batch):
    inputs, targets = batch
    return loss(params["net"], (params["scale"] * inputs + params["shift"], targets)) + np.sum(params["empty"])


def whole_step(loss, optimizer):
    """A step of one process, which updates all parameters at once."""

    def step(params, state, batch):
        value, gradients = md.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return value, optim.apply_updates(params, updates), state

    return step


def trained(step, params, state, batch, steps=3):
    losses = []
    for _ in range(steps):
        value, params, state = step(params, state, batch)
        losses.append(value)
    return losses, params, state


#: By the number of ranks: microbatches and an optimizer.
TRAINED = {1: [(2, "adam")], 2: [(4, "decayed")], 4: [(1, "adam"), (2, "clipped")], 8: [(2, "adam")]}


@shows("reference", "derivatives", "modes")
def check_training(mesh, stage, trained_by):
    """Losses, parameters and states are those of the whole network's training; compiled, too."""
    (params, batch), (microbatches, name) = odd_network(), trained_by
    chosen = OPTIMIZERS[name]
    expected = by_rank_0(lambda: trained(whole_step(odd_loss, chosen), params, chosen.init(params), batch))
    init, step = zero(odd_loss, chosen, mesh, stage, microbatches, bucket_bytes=512)
    for f in (step, md.jit(step, bucket_bytes=512)):
        actual = trained(f, *init(params), batch)
        assert_trees_close(actual, expected, rtol=1e-10)


@shows("counts", "modes")
def check_communication(mesh, stage, microbatches):
    """A step communicates what the table of the documentation says; so do the calls counted, and a report."""
    params, batch = network()
    init, step = zero(loss, OPTIMIZERS["adam"], mesh, stage, microbatches, EVERYTHING)
    state = init(params)
    names = {"params": size_of(params), "p": mesh.size, "M": microbatches}
    documented = traffic(([name, *counts] for at, _, name, *counts in rows(zero, 1) if int(at) == stage), names)
    add(documented, ("psum",), 1, 8)  # of the loss
    check_traffic(step, mesh, documented, *state, batch, label=lambda label: label[1:2])


def size_of(tree):
    return sum(np.size(x) for x in md.tree.leaves(tree))


def held(tree):
    """The number of array elements of which this process holds one rank's."""
    blocks = [getattr(x, "local", x) for x in md.tree.leaves(tree) if np.ndim(x)]
    return size_of([b[0] if isinstance(b, list) else b for b in blocks])


@shows("memory")
def check_memory(mesh, stage):
    """Parameters and states are blocks of the documented sizes; gradients are, on the tape, where they are summed.

    So says the report of the memory, too: sums of gradients are what a collective returns, and at stage 3, where the
    transpose of a gather sums, what the backward pass makes.
    """
    params, batch = network()
    init, step = zero(loss, OPTIMIZERS["adam"], mesh, stage, 1, EVERYTHING)
    names = {"params": size_of(params), "p": mesh.size, "K": ADAM_STATES}
    (expected,) = ([value(x, names) for x in cells] for at, *cells in rows(zero) if int(at) == stage)
    after = step(*init(params), batch)[1:]
    sums = [e for e in equations(md.make_tape(step)(*after, batch)) if e.primitive.name in ("psum", "psum_scatter")]
    gradients = sum(np.prod(v.type.shape) for e in sums for v in e.outputs if v.type.ndim)
    assert [held(after[0]), gradients, held(after[1])] == expected
    use = spmd.memory(step)(*after, batch)  # the number of the step is no array, and not in the table
    returned = max(m.bytes.get("communication", 0) for m in use.moments if m.operation in ("psum", "psum_scatter"))
    summed, sizes = use.highest["gradients"] if stage == 3 else returned, iter(use.arguments)
    operands = [sum(n for x, n in zip(md.tree.leaves(tree), sizes) if np.ndim(x)) for tree in after]
    assert [operands[0], summed, operands[1]] == [8 * n for n in expected]
    assert sum(use.arguments) == use.highest["arguments"]
