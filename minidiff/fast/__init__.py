"""What is here for speed alone: with this folder deleted everything works, and takes longer.

`install` sets two functions of the core's `engine`. `steps.py` records derivatives quickly, `arrays.py` walks a linear
tape of plain arrays, `cotangents.py` compiles derivative rules for it.
"""

from minidiff.core.reverse import engine
from minidiff.fast.arrays import backward_pass
from minidiff.fast.steps import linearize_flat


def install() -> None:
    """Compute derivatives by the functions of this folder."""
    engine.linearize_flat, engine.backward_pass = linearize_flat, backward_pass
