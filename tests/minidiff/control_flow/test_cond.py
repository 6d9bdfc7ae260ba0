"""Branches of which the elements of a `vmap` take different ones: as if each element were alone.

A branch meets operands of elements that take it, and no others: with theirs it may raise, or give an infinity, which
times a zero cotangent would be NaN.
"""

import functools
import warnings

import pytest

import minidiff as md
import minidiff.numpy as np
from tests.checks.meanings import MIXED, check_meaning
from tests.programs.branch import BY_ELEMENT, ELEMENTS, WEIGHT, alone, batched
from tests.programs.control import Unrolled


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


KINDS = ("value", "jvp", "linearize", "grad", "grad of grad", *MIXED)


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_elements_that_take_different_branches(name):
    f, xs = BY_ELEMENT[name], ELEMENTS[name]
    one, meaning = functools.partial(f, md), functools.partial(f, Unrolled)
    args, batches = (np.array(WEIGHT), xs), np.stack([xs, xs[::-1], xs[:1].repeat(len(xs), 0)])
    check_meaning(batched(one), alone(meaning), args, KINDS)
    check_meaning(batched(one), alone(meaning), args, ["value", "grad"], ["jit", "of jit", "of checkpoint"])
    gradients = [over(md.grad(g, (0, 1))) for over, g in ((batched, one), (alone, meaning))]
    check_meaning(*gradients, args, ["value", "grad"])
    for x in xs:  # one branch alone
        check_meaning(*gradients, (np.array(WEIGHT), np.stack([x, x])), ["value"], ["run", "jit"])
    check_meaning(*[over(g) for over, g in zip((batched, alone), gradients)], (np.array(WEIGHT), batches), ["value"])
