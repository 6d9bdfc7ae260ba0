"""`check_grads` itself: it passes what is right; `check_grads.md` shows what it says of what is wrong."""

import numpy as np

from minidiff.checks.testing import check_grads
from minidiff.ops.base import Elementwise
from tests.checks.gradients import check_body, check_differences, check_failures, check_programs
from tests.checks.meshes import mesh
from tests.checks.samples import each

right = Elementwise("right", np.sin, (lambda out, x: np.cos(x),))


#: What is right: whole numbers are held constant.
RIGHT = [
    (lambda x, n, mask: (x * n, n + 1, mask), (np.ones(2), 3, np.array([True, False])), 2),
    (lambda x: x, (np.ones((0, 3)),), 2),
    (right.bind, (0.3,), 3),
    (lambda x: (right.bind(x) * x).sum(), (np.float32([0.3, 0.7]),), 2),
    (lambda z, w: np.exp(z) * w, (0.3 + 0.4j, 1.0 - 2.0j), 2),
    (lambda z: np.exp(z) * z, (np.array([0.3 + 0.4j], np.complex64),), 2),
    (lambda x: np.exp(1j * x), (0.3,), 2),
]


@each("f, args, order", RIGHT)
def test_what_is_right_passes(f, args, order):
    check_grads(f, args, order=order)


@each("check", [check_programs, check_failures, check_differences, check_body])
def test_sharded_arrays(check):
    check(mesh(2))
