"""The table of checks that simulated and MPI ranks share, on simulated ranks."""

import pytest

from tests.checks.ranks import PARALLEL, SIMULATED, TABLES, cases, run


@pytest.mark.parametrize("name, ranks", cases(TABLES, SIMULATED))
def test_on_simulated_ranks(name, ranks):
    run(name, ranks, SIMULATED)


def test_every_table_runs_on_ranks():
    assert not PARALLEL.keys() & TABLES.keys()
    assert all(table.mpi for table in (PARALLEL | TABLES).values())
