"""Recommendation models on simulated ranks: whole ones' values and gradients, and the communication documented."""

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd.examples.dlrm import SPLITS, dlrm, dlrm_loss, lookup
from tests.checks.samples import each
from tests.programs.on_blocks import assert_trees_close
from tests.programs.recommendation import example


def mesh_of(ranks):
    return spmd.make_mesh((ranks,), ("ranks",), backend="simulated")


@each("split", SPLITS)
def test_without_types_compiled_and_by_differences(split):
    (params, batch), f = example(), dlrm(mesh_of(2), split)
    expected = md.grad(dlrm_loss)(params, batch)
    for gradient in (md.grad(dlrm(mesh_of(2), split, check_rep=False)), md.jit(md.grad(f))):
        assert_trees_close(gradient(params, batch), expected, rtol=1e-10)
    md.testing.check_grads(lambda tables: f({**params, "tables": tables}, batch), (params["tables"],), order=1)


def test_a_lookup_is_a_row_of_each_table():
    params, (_, indices, _) = example()
    rows = [[table[i] for table, i in zip(params["tables"], row, strict=True)] for row in indices]
    np.testing.assert_array_equal(lookup(params["tables"], indices), rows)
