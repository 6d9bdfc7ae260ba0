"""Nothing that is written into a plain array changes a sharded one."""

import numpy
import pytest

import spmd
from spmd import P
from spmd.checkpoint import Checkpoints, load
from spmd.data import batches

MESHES = [spmd.make_mesh(shape, ("i", "j"), backend="simulated") for shape in ((1, 1), (2, 1), (2, 2))]


def test_a_block_says_that_it_is_read_only():
    x = spmd.distribute(numpy.ones(4), MESHES[2], P("i"))
    with pytest.raises(ValueError, match="read-only"):
        x.local[0][0] = 3.0


def test_batches_and_checkpoints_are_copies(tmp_path):
    mesh, data = MESHES[2], numpy.arange(8.0)
    batch = next(batches(data, mesh, batch=8, spec=P("i")))
    with Checkpoints(tmp_path, mesh) as checkpoints:
        checkpoints.save(1, {"x": batch})
    loaded, _ = load(tmp_path, {"x": batch})
    data[:] = -1
    for x in (batch, loaded["x"]):
        assert sorted(x.gather()) == [*range(8)]
        assert not any(block.flags.writeable for block in x.local)


def test_no_copy_of_what_is_sharded_already():
    """An operation that moves nothing shares the blocks, since nobody can write into them."""
    x = spmd.distribute(numpy.ones((4, 4)), MESHES[2], P("i"))
    same = spmd.shard_map(lambda x: x, MESHES[2], in_specs=P("i"), out_specs=P("i"))(x)
    assert numpy.shares_memory(same.data, x.data)
