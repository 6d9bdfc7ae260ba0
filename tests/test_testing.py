"""`check_grads` itself: it passes what is right, and says where what is wrong went wrong."""

import numpy as np
import pytest

from minidiff.ops.kinds import Elementwise, Linear
from minidiff.testing import check_grads


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


def test_tolerances_are_taken_as_given():
    check_grads(right.bind, (0.3,), order=3)
    with pytest.raises(AssertionError):  # differences are never exact
        check_grads(right.bind, (0.3,), rtol=0.0, atol=0.0)
    check_grads(wrong.bind, (0.3,), rtol=100.0)


def test_single_precision_and_complex_arguments():
    check_grads(lambda x: (right.bind(x) * x).sum(), (np.array([0.3, 0.7], np.float32),))
    check_grads(lambda z, w: np.exp(z) * w, (0.3 + 0.4j, 1.0 - 2.0j))


@pytest.mark.parametrize(
    "f, args, options, error, message",
    [
        (np.sin, (3,), {}, TypeError, r"must be floating-point, got i64\[\]"),
        (np.argmax, (np.ones(3),), {"modes": ["rev"]}, TypeError, r"must be floating-point, got i64\[\]"),
        (np.sin, (3.0,), {"modes": ["reverse"]}, ValueError, "a mode is 'fwd' or 'rev', got 'reverse'"),
    ],
)
def test_wrong_use(f, args, options, error, message):
    with pytest.raises(error, match=message):
        check_grads(f, args, **options)
