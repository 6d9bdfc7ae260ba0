"""A body with Python's own `if` and `while`, of which each rank takes its branch and as many steps as it needs."""

import numpy

import minidiff as md
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped
from tests.checks.of_whole import check_kinds


def doubled(x, w):
    """A number of a block that is at least 50, and how often it was doubled."""
    y = x.sum()
    if y > 2:  # noqa: SIM108 (it is there for its statement)
        y = y * w
    else:
        y = y + w
    n = 0
    while y < 50:
        y = y * 2
        n += 1
    return y, n


def check_body(mesh):
    """Values and derivatives of the sums over ranks are those that Python makes of one block after another."""
    body = lambda x, w: psum(md.autograph(doubled, max_steps=60)(x, w), "i")  # noqa: E731

    def by_blocks(x, w):
        return [sum(results) for results in zip(*[doubled(block, w) for block in md.numpy.split(x, mesh.size)])]

    args = numpy.linspace(-1, 5, 12), 3.0
    check_kinds(mapped(body, mesh, (P("i"), P()), P()), args, by_blocks, ("value", "grad"))
