"""Errors name what the user's function sees: shapes of its values, and its lines."""

import re

import numpy
import pytest

import minidiff as md
import minidiff.numpy as np
from tests.checks.samples import each
from tests.checks.transformations import NESTED, TRANSFORMATIONS

M = numpy.ones((4, 2))
#: Functions of a vector of size 3, the operation that does not fit, and the two shapes.
SHAPES = {
    "operator": (lambda x: x * numpy.ones(4), "multiply", "3", "4"),
    "comparison": (lambda x: np.where(x > numpy.ones(4), x, 0), "greater", "3", "4"),
    "clip": (lambda x: np.clip(x, numpy.zeros(4), None), "maximum", "3", "4"),
    "@": (lambda x: x @ M, "matmul", "3", "4,2"),
    "inner": (lambda x: np.inner(x, M), "inner", "3", "4,2"),
    "einsum": (lambda x: np.einsum("i,ij->j", x, M), "einsum", "3,", "4, 2"),
    "concatenate": (lambda x: np.concatenate([x, M]), "concatenate", "3,", "4, 2"),
    "stack": (lambda x: np.stack([x, numpy.ones(4)]), "stack", "3,", "4,"),
    "where": (lambda x: np.where(numpy.array([True, False]), x, 0.0), "where", "2", "3"),
    "solve": (lambda x: np.linalg.solve(numpy.eye(4), x), "solve", "4,4", "3"),
    "set": (lambda x: x.at[:2].set(numpy.ones(3)), r"at\[...\].set", "3", "2"),
    "broadcast_to": (lambda x: np.broadcast_to(x, (2, 4)), "broadcast_to", "3", "2, 4"),
    "reshape": (lambda x: x.reshape(2, 2), "reshape", "3", "2, 2"),
}


@each("transformation", TRANSFORMATIONS)
@each("name", SHAPES)
def test_shapes_that_do_not_fit(name, transformation):
    f, operation, *shapes = SHAPES[name]
    with pytest.raises(ValueError, match=rf"(?s){operation}\b.*") as error:
        TRANSFORMATIONS[transformation](f, numpy.ones(3))
    text = str(error.value).replace("[2,3]", "").replace("(2, 3)", "")
    assert all(re.search(rf"[\[( ]{shape}[\]),]", text) for shape in shapes), text


def of_the_wrong_size(x):
    return np.reshape(x, (3, -1))


def of_the_users(x):
    raise ValueError("no such thing")


BODIES = {
    **TRANSFORMATIONS,
    **NESTED,
    "jvp of scan": lambda f, x: md.jvp(lambda x: NESTED["scan in jit"](f, x), (x,), (x,)),
}


@each("wrong", [of_the_wrong_size, of_the_users])
@each("body", BODIES)
def test_the_line_in_the_body_is_in_the_traceback(body, wrong):
    with pytest.raises(ValueError) as actual:
        BODIES[body](wrong, numpy.ones(4))
    assert wrong.__name__ in [entry.name for entry in actual.traceback]
    assert " of f64" not in str(actual.value)  # nothing is said of the operation around it
