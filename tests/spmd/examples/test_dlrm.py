"""Recommendation models on simulated ranks: whole ones' values and gradients, and the communication documented."""

import minidiff as md
import minidiff.numpy as np
from spmd.examples.dlrm import SPLITS, dlrm, dlrm_loss, lookup
from tests.checks.meshes import mesh
from tests.checks.samples import each
from tests.programs.on_blocks import assert_trees_close
from tests.programs.recommendation import example

RANKS = mesh(2, names=("ranks",))


@each("split", SPLITS)
def test_without_types_compiled_and_by_differences(split):
    (params, batch), f = example(), dlrm(RANKS, split)
    expected = md.grad(dlrm_loss)(params, batch)
    for gradient in (md.grad(dlrm(RANKS, split, check_rep=False)), md.jit(md.grad(f))):
        assert_trees_close(gradient(params, batch), expected, rtol=1e-10)
    md.testing.check_grads(lambda tables: f({**params, "tables": tables}, batch), (params["tables"],), order=1)


def test_a_lookup_is_a_row_of_each_table():
    params, (_, indices, _) = example()
    rows = [[table[i] for table, i in zip(params["tables"], row, strict=True)] for row in indices]
    np.testing.assert_array_equal(lookup(params["tables"], indices), rows)
