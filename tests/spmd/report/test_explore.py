"""Pages on which programs are explored: their steps, with blocks of the ranks."""

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh


def test_a_page_shows_the_steps_of_a_called_program():
    f = md.jit(mapped(lambda x: psum(x, "i") * 2, mesh(2), P("i"), P()))
    steps = spmd.explore(lambda x: f(x) + 1)(numpy.arange(4.0)).steps
    (sums,) = [step for step in steps if "psum" in step.text]
    assert sums.bytes == 16 and [x.tolist() for x in sums.blocks[0]] == [[2.0, 4.0]] * 2
    assert steps[-1].blocks[0][0].tolist() == [5.0, 9.0]


def test_a_page_shows_whole_sharded_arrays():
    first, *_ = spmd.explore(np.sin)(spmd.distribute(numpy.arange(4.0), mesh(2), P("i"))).steps
    assert [x.tolist() for x in first.blocks[0]] == [[0.0, 1.0, 2.0, 3.0]]
