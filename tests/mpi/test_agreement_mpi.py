"""Whether ranks have the same values: said on all of them."""

import numpy as np
import pytest
from mpi4py import MPI

import spmd
from spmd import P

RANK = MPI.COMM_WORLD.rank
several = pytest.mark.parallel([2, 4])


def of_all():
    return spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",))


@several
def test_the_same():
    mesh, rng = of_all(), np.random.default_rng(0)
    x = {
        "w": [rng.normal(size=(3, 2)), 2.5],
        "b": spmd.distribute(np.arange(8.0), mesh, P("i")),
        "n": np.float32(np.nan),
    }
    assert spmd.check_invariant(x, mesh) is x
    assert spmd.check_invariant((), mesh) == ()


@several
def test_another_seed():
    x = {"a": np.ones(3), "w": [np.zeros(2), np.random.default_rng(min(RANK, 1)).normal(size=(3, 2))]}
    others = ", ".join(map(str, range(1, MPI.COMM_WORLD.size)))
    expected = rf"different values of x\['w'\]\[1\]: float64\[3, 2\]: rank 0: \w+; ranks? {others}: \w+\. Under mpirun"
    with pytest.raises(ValueError, match=expected):
        spmd.check_invariant(x, of_all())


@several
@pytest.mark.parametrize("other", [np.ones(4), np.ones(3, np.float32), [np.ones(3)], [], 1])
def test_another_type(other):
    mine = other if RANK == 1 else np.ones(3)
    with pytest.raises(ValueError, match=r"values of different types: ranks? 0.*: x: float64\[3\]; rank 1: "):
        spmd.check_invariant(mine, of_all())


@pytest.mark.parallel(2)
def test_another_spec():
    mesh = of_all()
    x = spmd.distribute(np.ones((4, 4)), mesh, P("i") if RANK else P(None, "i"))
    with pytest.raises(ValueError, match=r"rank 0: x: float64\[4, 4\] split as P\(None, 'i'\); rank 1: x: .*P\('i'\)"):
        spmd.check_invariant(x, mesh)
