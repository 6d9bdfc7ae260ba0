"""The tutorial's collectives on MPI ranks: each rank prints its own block, and has the tutorial's numbers."""

import itertools

import numpy as np
import pytest

from spmd import P, make_mesh, shard_map
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


SPECS = [P("i", "j"), P("j", "i"), P(("i", "j")), P(None, ("j", "i")), P("i"), P(None, "j"), P()]


@pytest.mark.parallel(4)
def test_blocks_tiled_and_transposed():
    """Cut up as one spec says and put together as another: the same whole as on simulated ranks."""
    meshes = [make_mesh((2, 2), ("i", "j"), backend=backend) for backend in ("mpi", "simulated")]
    x = np.arange(48).reshape(4, 12)
    for in_spec, out_spec in itertools.product(SPECS, SPECS):
        if in_spec.axes <= out_spec.axes:
            real, simulated = (shard_map(lambda x: x + 1, m, in_specs=in_spec, out_specs=out_spec)(x) for m in meshes)
            assert real.shape == simulated.shape
            np.testing.assert_array_equal(real.gather() if out_spec.axes else real, np.asarray(simulated))
