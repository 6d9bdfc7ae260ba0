"""Recommendation models on simulated ranks: whole ones' values and gradients, and the communication documented."""

import pytest

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


def with_index(index):
    params, (dense, indices, clicks) = example()
    indices[0, 0] = index
    return params, (dense, indices, clicks)


MISFITS = {
    "tables": ("tables", example((6, 8, 4)), ValueError, "6 tables cannot be split evenly over 4 ranks.*to 8"),
    "rows": ("rows", example((4, 9, 4)), ValueError, "9 rows cannot be split evenly over 4 ranks.*to 12"),
    "columns": ("columns", example((4, 8, 3)), ValueError, "3 columns cannot be split evenly over 4 ranks.*to 4"),
    "examples": (
        "rows",
        example(examples=6),
        ValueError,
        r"dimension 0, of size 6, cannot be split evenly along 'ranks'",
    ),
    "indices": ("rows", (example()[0], example((4, 8, 4))[1]), ValueError, r"8 tables need indices of shape \[n, 8\]"),
    "too large": ("rows", with_index(8), IndexError, "tables have 8 rows; got indices from 0 to 8"),
    "too small": ("columns", with_index(-1), IndexError, "tables have 8 rows; got indices from -1 to 6"),
    "split": ("heads", example(), ValueError, "split='heads'; write one of 'tables', 'columns', 'rows'"),
}


@each("split, args, error, message", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit(split, args, error, message):
    with pytest.raises(error, match=message):
        dlrm(mesh_of(4), split)(*args)


def test_a_mesh_of_other_axes():
    with pytest.raises(ValueError, match="dlrm takes a mesh with one axis, for ranks"):
        dlrm(spmd.make_mesh((2, 2), ("i", "j"), backend="simulated"))
