"""Checkpoints: trees of sharded and plain arrays, saved so that a killed run can resume.

>>> import tempfile
>>> import numpy as np
>>> import spmd
>>> from spmd import checkpoint
>>> path = tempfile.mkdtemp()
>>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
>>> rng = np.random.default_rng(0)
>>> state = {'w': spmd.distribute(np.arange(8.0), mesh, spmd.P('i')), 'rng': rng.bit_generator.state}

A training loop saves in the background, and keeps the last steps. When it starts again, it continues from the last one:

>>> with checkpoint.Checkpoints(path, mesh, keep=2) as saved:
...     for step in range(1, 4):
...         state['w'] = state['w'] + 1.0
...         saved.save(step, state, notes={'loss': 0.1})
>>> checkpoint.latest(path)
3

A tree of the same structure says how to load it: here with other shardings, on another number of ranks. Each rank reads
the slices that it needs from the saved blocks.

>>> other = spmd.make_mesh((2,), ('j',), backend='simulated')
>>> like = {'w': spmd.distribute(np.zeros(8), other, spmd.P('j')), 'rng': rng.bit_generator.state}
>>> loaded, notes = checkpoint.load(path, like)
>>> loaded['w'], loaded['rng'] == rng.bit_generator.state, notes
(ShardedArray([ 3.,  4.,  5.,  6.,  7.,  8.,  9., 10.], P('j')), True, {'loss': 0.1})

A part of the tree loads only that part. Without a tree, all arrays are loaded whole, by their paths:

>>> checkpoint.load(path, {'w': np.zeros(8)}, step=2)[0]
{'w': array([2., 3., 4., 5., 6., 7., 8., 9.])}
>>> checkpoint.load(path)[0]["['w']"].shape
(8,)

`python -m spmd.checkpoint PATH` lists what is saved, and what is damaged. `files.py` has the format.
"""

from minidiff.errors.tracebacks import hide_frames_of
from spmd.checkpoint.files import CheckpointError, latest
from spmd.checkpoint.loading import load
from spmd.checkpoint.saving import Checkpoints, save

__all__ = ["CheckpointError", "Checkpoints", "latest", "load", "save"]

hide_frames_of(globals(), __all__)
