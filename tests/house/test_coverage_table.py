"""Every check of a table says which properties it shows, and every row has some."""

import pytest

from tests import coverage_table
from tests.checks import ranks
from tests.checks.properties import shown_by
from tests.minidiff.ops.test_ops import CHECKS, DIFFERENTIABLE


def test_checks_say_what_they_show():
    checks = {*CHECKS, *DIFFERENTIABLE}
    for table in (ranks.PARALLEL | ranks.TABLES).values():
        checks |= {check.func for check in table.checks((table.simulated or table.mpi)[-1], ranks.SIMULATED)}
    assert {check.__name__ for check in checks if not shown_by(check)} == {"check_collectives"}  # which is many


@pytest.mark.parametrize("lines", [coverage_table.operations, coverage_table.collectives])
def test_all_rows_are_compared_with_a_reference(lines):
    assert [line.name for line in lines() if not all("reference" in shown for shown in line.programs)] == []
