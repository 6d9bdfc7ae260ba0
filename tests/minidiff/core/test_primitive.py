"""Operations, and what they declare."""

import numpy as np

import minidiff as md
from minidiff.checks.testing import check_grads
from minidiff.core.primitive import Primitive
from minidiff.ops.base import Elementwise

cube = Elementwise("cube", lambda x: x**3, (lambda out, x: 3 * x * x,))


def test_a_declared_operation_is_known_to_all_interpreters():
    x = np.array([1.0, 2.0])
    check_grads(cube.bind, (x,), order=3)
    assert md.vmap(cube.bind)(x).tolist() == cube.bind(x).tolist() == [1.0, 8.0]
    assert str(md.make_tape(cube.bind)(x)) == "lambda a:f64[2]:\n  b:f64[2] = cube(a)\n  return b"
    assert repr(cube) == "<Elementwise cube>"


def test_an_operation_has_eight_traits():
    traits = [name for name, x in vars(Primitive).items() if isinstance(x, bool)]
    assert len({*traits, "commutes"}) == 8
