"""A recommendation model whose tables are split: values and gradients of the whole one, and what it communicates."""

import minidiff as md
import minidiff.numpy as np
from spmd.examples.dlrm import dlrm, dlrm_loss, init_dlrm
from tests.checks.documented import check_traffic, rows, traffic
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close

TABLES, EXAMPLES, FEATURES = (8, 8, 16), 24, 3  # which 1, 2, 4 and 8 ranks divide


def example(tables=TABLES, examples=EXAMPLES):
    """Parameters and a batch, in which rows occur several times, and some never."""
    rng = np.random.default_rng(0)
    indices = rng.integers(tables[1] - 1, size=(examples, tables[0]))
    batch = rng.normal(size=(examples, FEATURES)), indices, rng.integers(2, size=examples).astype(float)
    return init_dlrm(rng, tables, bottom=(FEATURES, 5), top=(7,)), batch


@shows("reference", "derivatives", "counts", "modes")
def check_dlrm(mesh, split):
    """Loss and gradients are those of the whole model; what is communicated is what the docstring says."""
    ranks, (params, batch) = mesh.size, example()
    expected = md.value_and_grad(dlrm_loss)(params, batch)
    assert np.all(expected[1]["tables"][:, -1] == 0) and np.all(np.any(expected[1]["tables"][:, 0] != 0, axis=-1))
    gradient = md.value_and_grad(dlrm(mesh, split))
    names = dict(zip("TRdNp", (*TABLES, EXAMPLES, ranks)))
    names["mlps"] = sum(x.size for x in md.tree.leaves([params["bottom"], params["top"]]))
    documented = traffic((cells for name, *cells in rows(dlrm) if name == split), names) if ranks > 1 else {}
    actual = check_traffic(gradient, mesh, documented, params, batch, label=lambda label: label[:2])
    assert_trees_close(actual, expected, rtol=1e-10)
