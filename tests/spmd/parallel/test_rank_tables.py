"""The table of checks that simulated and MPI ranks share, of parallelisms and examples, on simulated ranks."""

import pytest

from tests.checks.ranks import PARALLEL, SIMULATED, cases, run


@pytest.mark.parametrize("name, ranks", cases(PARALLEL, SIMULATED))
def test_on_simulated_ranks(name, ranks):
    run(name, ranks, SIMULATED)
