"""Machines as data: what a device computes a second, what it holds, and the links between devices.

A `Machine` has the numbers of a data sheet, each with its source. A roofline turns the work of an operation into
seconds: the longer of its arithmetic and of its memory traffic, and a cost of launching it. Of the peak, a matrix
product gets the share that an `Efficiency` says, by its size. Links join devices, the fast ones a few, the slow ones
all; `Machine.on(shape, nearest)` places the axes of a mesh on them.

>>> import spmd
>>> machine = spmd.machines.A100
>>> placed = machine.on({'data': 8, 'feats': 8}, nearest=('feats', 'data'))
>>> [(link.name, ranks) for link, ranks in placed.levels(('feats',))], placed.levels(('data',))[0][0].name
([('NVLink', 8)], 'InfiniBand')
>>> placed.seconds('psum', 8, 10**8, ('feats',)) < placed.seconds('psum', 8, 10**8, ('data',))
True
"""

from spmd.prices.data_sheets import A100, H100, TPU_V5E, TPU_V5P
from spmd.prices.machine import Efficiency, Link, Machine, Placement, link
from spmd.prices.measured_machine import this_machine

__all__ = [
    "A100", "H100", "TPU_V5E", "TPU_V5P", "Efficiency", "Link", "Machine", "Placement", "link", "this_machine",
]  # fmt: skip
