"""`check_grads` itself: it passes what is right, and says where what is wrong went wrong."""

import re

import numpy as np
import pytest

from minidiff.checks.testing import check_grads
from minidiff.ops.base import Elementwise, Linear
from tests.checks.gradients import check_body, check_differences, check_failures, check_programs
from tests.checks.meshes import mesh
from tests.checks.samples import each

right = Elementwise("right", np.sin, (lambda out, x: np.cos(x),))
wrong = Elementwise("wrong", np.sin, (lambda out, x: np.sin(x),))
wrong_cosine = Elementwise("wrong_cosine", np.cos, (lambda out, x: np.sin(x),))
wrong_second = Elementwise("wrong_second", np.sin, (lambda out, x: wrong_cosine.bind(x),))
wrong_transpose = Linear("double", lambda x: 2 * x, lambda x: (x.shape, x.dtype), lambda ct, operands: [3 * ct], None)
wrong_product = Elementwise("product", np.multiply, (lambda out, x, y: y, lambda out, x, y: -x))
conjugate = Elementwise("conj", np.conj, (lambda out, z: np.ones(()),))

X, REV = np.array([0.3, 0.7]), {"modes": ["rev"]}


def failure(f, args, **options):
    with pytest.raises(AssertionError) as caught:
        check_grads(f, args, **options)
    return str(caught.value)


def program(operation):
    """A program of several operations, one of which is `operation`; its arguments are a tree and a whole number."""
    return lambda p, n: {"bad": np.exp(p["b"]) * operation.bind(p["a"]) * n, "good": p["b"] * n, "count": n}


NUMBERS = r"-?[\d.e-]+ by the rules, -?[\d.e-]+ by differences"
#: Operations, options, the operation and the mode that are named, and the first line of the message.
FAILURES = [
    (wrong, {}, "wrong", "fwd", "fwd: the tangent['bad'] by the rules"),
    (wrong, REV, "wrong", "rev", "rev: <cotangent, tangent> by the rules"),
    (wrong_second, {}, "wrong_cosine", "fwd", "fwd of fwd: the tangent['bad']"),
    (wrong_second, REV, "wrong_cosine", "rev", "rev of rev: <cotangent, tangent>"),
    (wrong_transpose, {}, "double", "rev", "rev: <cotangent, tangent>"),
]


@each("operation, options, name, mode, first", FAILURES)
def test_the_message_names_the_operation_the_argument_and_the_result(operation, options, name, mode, first):
    text = failure(program(operation), ({"a": X, "b": np.ones(2)}, 3), **options)
    assert f"\n{first}" in f"\n{text}" and re.search("ACTUAL: (?s:.*)DESIRED: ", text)
    assert re.search(rf"\n in args\[0\]\['a'\] \(f64\[2\]\): {NUMBERS}\n", text)
    expected = rf"the operation {name}, number \d+ on the tape, is wrong in {mode} mode in operand 0 \(f64\[2\]\): "
    assert re.search(expected + NUMBERS + "$", text)


def chooses(x):
    return wrong.bind(x) if x > 0 else x


#: Functions, arguments, and what the message has. Along 1, the derivative of the conjugate seems right.
MESSAGES = [
    (lambda x, y: wrong_product.bind(x, y) + x, (2.0, 3.0), "\n in args[1] (f64[])"),
    (lambda x, y: wrong_product.bind(x, y) + x, (2.0, 3.0), "in operand 1 (f64[])"),
    (conjugate.bind, (1.0 + 2.0j,), "in args[0] (c128[]), imaginary direction: "),
    (chooses, (0.3,), "branches on its values, so it has no tape"),
    (lambda x: np.where(x > 0.5, 100.0, 0.0) + x, (np.array([0.5]),), "each operation is right by itself"),
]


@each("f, args, words", MESSAGES)
def test_messages_of_other_failures(f, args, words):
    assert words in failure(f, args, order=1)


#: What is right: whole numbers are held constant.
RIGHT = [
    (lambda x, n, mask: (x * n, n + 1, mask), (np.ones(2), 3, np.array([True, False])), 2),
    (lambda x: x, (np.ones((0, 3)),), 2),
    (right.bind, (0.3,), 3),
    (lambda x: (right.bind(x) * x).sum(), (X.astype("f4"),), 2),
    (lambda z, w: np.exp(z) * w, (0.3 + 0.4j, 1.0 - 2.0j), 2),
    (lambda z: np.exp(z) * z, (np.array([0.3 + 0.4j], np.complex64),), 2),
    (lambda x: np.exp(1j * x), (0.3,), 2),
]


@each("f, args, order", RIGHT)
def test_what_is_right_passes(f, args, order):
    check_grads(f, args, order=order)


def test_only_what_is_asked_for_is_checked():
    check_grads(wrong_second.bind, (X,), order=1)
    check_grads(wrong_transpose.bind, (X,), modes=["fwd"])
    check_grads(wrong.bind, (0.3,), rtol=100.0)
    failure(right.bind, (0.3,), rtol=0.0, atol=0.0)  # differences are never exact


@each("check", [check_programs, check_failures, check_differences, check_body])
def test_sharded_arrays(check):
    check(mesh(2))
