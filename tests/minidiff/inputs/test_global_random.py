"""Functions that draw from NumPy's global generator, under every transformation that records them."""

import subprocess
import sys
import warnings

import numpy as np

from tests import PATIENCE
from tests.checks.samples import each
from tests.checks.transformations import NESTED, TRANSFORMATIONS

DRAWS = [
    lambda: np.random.rand(),
    lambda: np.random.normal(size=3)[0],
    lambda: float(np.random.permutation(4)[0]),
    lambda: float(np.random.seed(0) is None),
]
QUIET = [lambda: 1.0, lambda: np.random.default_rng(0).normal(), lambda: np.random.RandomState(0).normal()]


#: Transformations, and the name that the warning begins with.
RECORDED = {
    **{"jit": "jit", "make_tape": "make_tape", "jit of grad": "jit", "scan in jit": "scan"},
    **{"shard_map": "shard_map", "jit of shard_map": "shard_map", "grad of shard_map": "shard_map"},
}
RUN = {**TRANSFORMATIONS, **NESTED}


def warned(call):
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in actual]


@each("how", RECORDED)
@each("draw", DRAWS)
def test_drawing_is_warned_of_once(how, draw):
    np.random.seed(7)
    (text,) = warned(lambda: RUN[how](lambda x: x * draw(), np.ones(4)))
    why = "differ" if "shard_map" in how else "is a constant of the program"
    assert text.startswith(RECORDED[how]) and why in text


@each("how", RECORDED)
@each("draw", QUIET)
def test_generators_of_ones_own_are_not(how, draw):
    assert not warned(lambda: RUN[how](lambda x: x * draw(), np.ones(4)))


PROGRAM = """
import sys, warnings, minidiff as md, numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    md.make_tape(lambda x: x * 1)(1.0)
    print("numpy.random" in sys.modules, len(caught))
    md.make_tape(lambda x: x * np.random.default_rng(0).normal())(1.0)
    print("numpy.random" in sys.modules, len(caught))
"""


def test_in_a_process_that_has_not_loaded_numpys_module():
    """It is loaded only by a function that uses it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "False 0\nTrue 0\n", done.stderr
