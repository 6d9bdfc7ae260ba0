"""The tutorial's collectives on MPI ranks: each rank prints its own block, and has the tutorial's numbers."""

import numpy as np
import pytest

from tests.tutorial_collectives import EXAMPLES, text_of


@pytest.mark.parallel(4)
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_printed(name, capsys):
    example = EXAMPLES[name]
    mesh = example.mesh(backend="mpi")
    y = example.mapped(mesh, lambda when, block: print(f"{when}:\n", block))(example.x)
    before, after = (text_of(example, blocks, [mesh.rank]) for blocks in (example.before, example.after))
    assert capsys.readouterr().out == f"BEFORE:\n {before}\nAFTER:\n {after}\n"
    np.testing.assert_array_equal(y.gather() if hasattr(y, "gather") else y, example.result)
