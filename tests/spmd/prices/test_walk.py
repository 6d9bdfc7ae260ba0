"""When resources of a walk are busy, and which seconds of communication are exposed."""

from spmd.prices.tape_cost import COMPUTE, Category, OperationCosts
from spmd.prices.walk import TapeRun, Walk

FIRST, SECOND = (Category(name, "psum", ("i",), None) for name in ("first", "second"))


def test_collectives_that_overlap_are_not_exposed_twice():
    run = TapeRun(Walk(OperationCosts()))
    run.free[COMPUTE] = 1.0
    run.sent = [(0.0, 0.5, FIRST), (0.0, 2.0, FIRST), (1.5, 4.0, SECOND)]
    run.wait(3.0)
    assert run.free[COMPUTE] == 3.0
    assert {key.kind: entry.exposed for key, entry in run.cost.entries.items()} == {"first": 1.0, "second": 1.0}


def test_a_collective_that_does_not_overlap_begins_after_computation():
    run = TapeRun(Walk(OperationCosts()))
    run.free[COMPUTE] = 2.0
    assert run.occupy("link", 1.0, ready=0.5) == (0.5, 1.5)
    assert run.occupy("link", 1.0, ready=0.5, blocks=True) == (2.0, 3.0)
    assert run.occupy("link", 1.0, ready=0.5) == (3.0, 4.0)
