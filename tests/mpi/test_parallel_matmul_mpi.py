"""Matrix products on MPI ranks: values, gradients and calls; and blocks that are on their way while others multiply."""

from collections import Counter

import numpy as np
import pytest
from mpi4py import MPI

import minidiff as md
import spmd
from tests.matmul_programs import PRODUCTS, operands, plain_loss, sharded, sharded_loss

everywhere = pytest.mark.parallel([2, 4])


@everywhere
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_gradients_and_calls(name):
    mesh, theory = spmd.make_mesh((MPI.COMM_WORLD.size,), ("i",)), PRODUCTS[name]
    product, args = sharded(name, mesh), operands(mesh.size)
    before = Counter(mesh.calls)
    out = product(*args)
    assert Counter(mesh.calls) - before == {theory.collective: theory.calls(mesh.size)}
    np.testing.assert_allclose(out.gather(), args[0] @ args[1], rtol=1e-12)

    gradient = md.value_and_grad(sharded_loss(name, mesh), (0, 1))
    value, expected = md.value_and_grad(plain_loss, (0, 1))(*args)
    wanted = Counter(psum=1)
    for collective in (theory.collective, theory.backward):
        wanted[collective] += theory.calls(mesh.size)
    for g in (gradient, md.jit(gradient)):
        before = Counter(mesh.calls)
        loss, found = g(*args)
        assert Counter(mesh.calls) - before == wanted
        np.testing.assert_allclose(loss, value, rtol=1e-10)
        for a, e in zip(found, expected):
            np.testing.assert_allclose(a.gather(), e, rtol=1e-10)
