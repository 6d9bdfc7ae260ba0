"""The table that simulated and MPI ranks share, on MPI ranks; and checks that simulated ranks run elsewhere."""

import functools

import pytest

from spmd import P
from tests.checks import gradients as grads_on_ranks
from tests.checks.of_collectives import check_scans_in_branches
from tests.checks.ranks import MPI, PARALLEL, TABLES, cases, line, mesh_of, run
from tests.checks.samples import check_each
from tests.minidiff.ops import test_callback as callbacks
from tests.minidiff.test_debug import check_on_ranks
from tests.programs import indexing, sharded_network
from tests.programs.syntax import check_body


@pytest.mark.parametrize(
    "name, ranks",
    [pytest.param(*case, marks=pytest.mark.parallel(case[1])) for case in cases(PARALLEL | TABLES, MPI)],
)
def test_on_mpi_ranks(name, ranks):
    run(name, ranks, MPI)


INDEXED = indexing.BATCHES | indexing.LOOKUPS | indexing.NEIGHBORS | indexing.TOTALS

#: Checks of a mesh along "i", by the numbers of ranks.
OF_A_LINE = {
    2: [
        check_on_ranks,
        callbacks.check_on_ranks,
        functools.partial(callbacks.check_on_ranks, check_rep=False),
        callbacks.check_calls_of_ranks,
        callbacks.check_sharded,
        *(getattr(grads_on_ranks, f"check_{label}") for label in ("programs", "failures", "differences", "body")),
    ],
    3: [
        sharded_network.check,
        check_body,
        *(functools.partial(indexing.check, program) for program in INDEXED.values()),
    ],
}


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.parallel(n)) for n in OF_A_LINE])
def test_of_a_line_of_ranks(ranks):
    check_each((str(check), functools.partial(check, line(MPI, ranks))) for check in OF_A_LINE[ranks])


@pytest.mark.parallel(4)
def test_on_a_grid():
    check_scans_in_branches(mesh_of(MPI, 2, 2, names="xy"))
    for name in ("take_along_axis", "set", "switch", "roll both"):
        indexing.check(INDEXED[name], mesh_of(MPI, 2, 2), P(("j", "i")))
