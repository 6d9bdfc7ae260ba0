"""The memory report beside what is measured on a rank: the memory that NumPy allocates, by tracemalloc."""

import numpy as np
import pytest

import minidiff as md
import spmd
from spmd import P
from spmd.parallel import init_params, loss, zero
from tests.programs.memory import peak_of, reported_and_measured

pytestmark = pytest.mark.parallel(2)

#: Programs of some MB that hold replicas, shards and optimizer states, or packed messages; and whether compiled.
PROGRAMS = [("data_parallel", True), ("zero", True), ("experts", False), ("sequence", False)]


@pytest.mark.parametrize("name, optimized", PROGRAMS)
def test_the_peak_is_the_one_measured(name, optimized):
    """The arguments are there before: what is compared is what the program allocates on each rank."""
    reported, measured = reported_and_measured(name, 2, "mpi", optimized)
    assert reported == pytest.approx(measured, rel=0.05) and measured > 4e6


def split(args, mesh):
    return spmd.distribute(args, mesh, P("i"))


def bytes_of(tree):
    return sum(getattr(x, "local", x).nbytes for x in md.tree.leaves(tree))


WIDTH, LAYERS, EXAMPLES = 256, 16, 32  # of each rank
SIZES = 2, 2, 12  # the bytes of a parameter in 16 bits, of its gradient and of its optimizer's state


def test_zero_takes_what_its_paper_says():
    """Return a rank's memory, and the peak of a compiled step with donated arguments, at each stage.

    The activations are the layers' results. Buckets, and what updates one parameter, are within the tolerance.
    """
    mesh, rng, optimizer = spmd.make_mesh((2,), ("i",)), np.random.default_rng(0), md.optim.adam(0.01)
    whole = md.tree.map(lambda x: x.astype("f2"), init_params(rng, (WIDTH,) * (LAYERS + 1)))
    count, activations = sum(x.size for x in md.tree.leaves(whole)), LAYERS * EXAMPLES * WIDTH * SIZES[0]
    batch = split([rng.normal(size=(2 * EXAMPLES, WIDTH)).astype("f2") for _ in range(2)], mesh)
    for stage in (1, 2, 3):
        init, step = zero(loss, md.precision.with_masters(optimizer), mesh, stage)
        run = md.jit(step, donate_argnums=(0, 1))
        params, state = init(whole)
        reported = spmd.memory(run)(params, state, batch).peak.total
        for _ in range(2):
            _, params, state = run(params, state, batch)
        taken = bytes_of((params, state, batch)) + peak_of(run, params, state, batch)
        formula = sum(size / (2 if split_from <= stage else 1) for size, split_from in zip(SIZES, (3, 2, 1))) * count
        assert formula < taken < 1.1 * (formula + activations)
        assert reported == pytest.approx(taken, rel=0.05)
