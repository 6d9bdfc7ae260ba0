"""`check_grads` itself: it passes what is right, and says where what is wrong went wrong."""

import re

import numpy as np
import pytest

import spmd
from minidiff.checks.testing import check_grads
from minidiff.ops.base import Elementwise, Linear
from tests.checks.gradients import check_body, check_differences, check_failures, check_programs


def _linear(transpose):
    return Linear("double", lambda x: 2 * x, lambda x: (x.shape, x.dtype), transpose, None)


right = Elementwise("right", np.sin, (lambda out, x: np.cos(x),))
wrong = Elementwise("wrong", np.sin, (lambda out, x: np.sin(x),))
wrong_cosine = Elementwise("wrong_cosine", np.cos, (lambda out, x: np.sin(x),))
wrong_second = Elementwise("wrong_second", np.sin, (lambda out, x: wrong_cosine.bind(x),))
wrong_transpose = _linear(lambda ct, operands: [3 * ct])

FAILURES = [
    (wrong, {}, r"(?m)^fwd: the tangent by the rules"),
    (wrong, {"modes": ["rev"]}, r"(?m)^rev: <cotangent, tangent> by the rules"),
    (wrong_second, {}, r"(?m)^fwd of fwd: the tangent"),
    (wrong_second, {"modes": ["rev"]}, r"(?m)^rev of rev: <cotangent, tangent>"),
    (wrong_transpose, {}, r"(?m)^rev: <cotangent, tangent>"),
]


@pytest.mark.parametrize("primitive, options, message", FAILURES)
def test_a_wrong_rule_is_found_and_named(primitive, options, message):
    with pytest.raises(AssertionError, match=message):
        check_grads(primitive.bind, (np.array([0.3, 0.7]),), **options)


@pytest.mark.parametrize("primitive, options", [(wrong_second, {"order": 1}), (wrong_transpose, {"modes": ["fwd"]})])
def test_only_what_is_asked_for_is_checked(primitive, options):
    x = np.array([0.3, 0.7])
    check_grads(primitive.bind, (x,), **options)
    with pytest.raises(AssertionError):
        check_grads(primitive.bind, (x,))


def test_the_message_names_the_output_and_shows_both_numbers():
    with pytest.raises(AssertionError, match=r"the tangent\['bad'\] by the rules(?s:.*)ACTUAL: (?s:.*)DESIRED: "):
        check_grads(lambda x: {"bad": wrong.bind(x), "a": x}, (0.3,))


def _failure(f, args, **options):
    with pytest.raises(AssertionError) as caught:
        check_grads(f, args, **options)
    return str(caught.value)


def _program(operation):
    """A program of several operations, one of which is `operation`; its arguments are a tree and a whole number."""
    return lambda p, n: {"bad": np.exp(p["b"]) * operation.bind(p["a"]) * n, "good": p["b"] * n, "count": n}


ARGS = ({"a": np.array([0.3, 0.7]), "b": np.ones(2)}, 3)

NUMBERS = r"-?[\d.e-]+ by the rules, -?[\d.e-]+ by differences"


@pytest.mark.parametrize(
    "operation, options, name, mode",
    [
        (wrong, {}, "wrong", "fwd"),
        (wrong, {"modes": ["rev"]}, "wrong", "rev"),
        (wrong_second, {}, "wrong_cosine", "fwd"),
        (wrong_second, {"modes": ["rev"]}, "wrong_cosine", "rev"),
        (wrong_transpose, {}, "double", "rev"),
    ],
)
def test_the_message_names_the_operation_and_the_argument(operation, options, name, mode):
    text = _failure(_program(operation), ARGS, **options)
    assert re.search(rf"\n in args\[0\]\['a'\] \(f64\[2\]\): {NUMBERS}\n", text)
    expected = rf"the operation {name}, number \d+ on the tape, is wrong in {mode} mode in operand 0 \(f64\[2\]\): "
    assert re.search(expected + NUMBERS + "$", text)


def test_both_numbers_are_those_of_one_entry():
    x = np.array([0.3, 0.7])
    text = _failure(wrong.bind, (x,), order=1)
    rules, differences = map(float, re.search(r"in args\[0\] .*: (\S+) by the rules, (\S+) by", text).groups())
    assert any(differences / rules == pytest.approx(np.cos(y) / np.sin(y)) for y in [0.3, 0.7])


def test_an_operation_of_several_operands():
    product = Elementwise("product", np.multiply, (lambda out, x, y: y, lambda out, x, y: -x))
    text = _failure(lambda x, y: product.bind(x, y) + x, (2.0, 3.0))
    assert "\n in args[1] (f64[])" in text and "in operand 1 (f64[])" in text


def test_a_complex_argument_is_varied_in_both_directions():
    """The derivative of the conjugate is no complex number times the tangent: along 1 it seems right."""
    conj = Elementwise("conj", np.conj, (lambda out, z: np.ones(()),))
    text = _failure(conj.bind, (1.0 + 2.0j,), order=1)
    assert "in args[0] (c128[]), imaginary direction: " in text


def test_whole_numbers_are_held_constant():
    check_grads(lambda x, n, mask: (x * n, n + 1, mask), (np.ones(2), 3, np.array([True, False])))
    check_grads(lambda p: p["x"] ** p["n"], ({"x": 2.0, "n": np.arange(3)},), order=3)


def test_where_no_operation_can_be_named():
    def chooses(x):
        return wrong.bind(x) if x > 0 else x

    assert "branches on its values, so it has no tape" in _failure(chooses, (0.3,))
    x = np.array([0.5])
    text = _failure(lambda x: np.where(x > 0.5, 100.0, 0.0) + x, (x,))
    assert "each operation is right by itself" in text


def test_nothing_to_check():
    check_grads(lambda: (), ())
    check_grads(lambda x: x, (np.ones((0, 3)),))


def test_tolerances_are_taken_as_given():
    check_grads(right.bind, (0.3,), order=3)
    with pytest.raises(AssertionError):  # differences are never exact
        check_grads(right.bind, (0.3,), rtol=0.0, atol=0.0)
    check_grads(wrong.bind, (0.3,), rtol=100.0)


def test_single_precision_and_complex_arguments():
    check_grads(lambda x: (right.bind(x) * x).sum(), (np.array([0.3, 0.7], np.float32),))
    check_grads(lambda z, w: np.exp(z) * w, (0.3 + 0.4j, 1.0 - 2.0j))
    check_grads(lambda z: np.exp(z) * z, (np.array([0.3 + 0.4j], np.complex64),))
    check_grads(lambda x: np.exp(1j * x), (0.3,))


@pytest.mark.parametrize(
    "f, args, options, error, message",
    [
        (np.sin, (3,), {}, TypeError, r"must be floating-point, got i64\[\]"),
        (np.argmax, (np.ones(3),), {"modes": ["rev"]}, TypeError, r"must be floating-point, got i64\[\]"),
        (np.sin, (3.0,), {"modes": ["reverse"]}, ValueError, "a mode must be 'fwd' or 'rev', got 'reverse'"),
    ],
)
def test_wrong_use(f, args, options, error, message):
    with pytest.raises(error, match=message):
        check_grads(f, args, **options)


# ---------------------------------------------------------------- sharded arrays


@pytest.mark.parametrize("check", [check_programs, check_failures, check_differences, check_body])
def test_sharded_arrays(check):
    check(spmd.make_mesh((2,), ("i",), backend="simulated"))
