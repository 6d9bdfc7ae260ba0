"""Programs with Python's statements that `md.autograph` rewrites, against Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

import minidiff as md
from minidiff.checks.testing import check_grads
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close


def returns(*examples: Any, smooth: bool = False) -> Callable:
    """Decorate a program that returns what Python's does for each example, compiled and in batches, too; print that.

    An example is an argument, or a tuple of them, of which booleans are static. Smooth programs have derivatives.
    """
    examples = [args if isinstance(args, tuple) else (args,) for args in examples]

    def check(f: Callable) -> None:
        expected, rewritten = [f(*args) for args in examples], md.autograph(f)
        check_values(rewritten, examples, expected)
        if not _static(examples):
            check_batches(rewritten, examples, expected)
        if smooth:
            check_derivatives(md.autograph(f, max_steps=64), examples[:2])
        print(*[md.tree.map(lambda x: numpy.round(x, 4).tolist(), value) for value in expected], sep=" | ")

    return check


def _static(examples: Sequence[tuple]) -> list[int]:
    return [k for k, x in enumerate(examples[0]) if type(x) is bool]


@shows("reference", "modes")
def check_values(f: Callable, examples: Sequence[tuple], expected: Sequence[Any]) -> None:
    for g in (f, md.jit(f, static_argnums=_static(examples))):
        for args, value in zip(examples, expected):
            _check_equal(g(*args), value)


@shows("reference", "modes")
def check_batches(f: Callable, examples: Sequence[tuple], expected: Sequence[Any]) -> None:
    columns = [numpy.stack(column) for column in zip(*examples)]
    rows = md.tree.map(lambda *xs: numpy.stack(xs), *[md.tree.map(numpy.asarray, value) for value in expected])
    for g in (md.vmap(f), md.jit(md.vmap(f))):
        _check_equal(g(*columns), rows)


@shows("derivatives")
def check_derivatives(f: Callable, examples: Sequence[tuple]) -> None:
    """Derivatives of results that are floats, in arguments that are, are those of differences."""
    for args in examples:
        places = [k for k, x in enumerate(args) if numpy.asarray(x).dtype == float]

        def of_floats(*values, args=args, places=places):
            outs = f(*[values[places.index(k)] if k in places else x for k, x in enumerate(args)])
            return [x for x in md.tree.leaves(outs) if md.typeof(x).dtype == float]

        check_grads(md.jit(of_floats), [args[k] for k in places], order=1)


def _check_equal(actual: Any, expected: Any) -> None:
    assert md.tree.structure(actual) == md.tree.structure(expected)
    assert_trees_close(actual, expected)
    for x, y in zip(md.tree.leaves(actual), md.tree.leaves(expected)):
        assert numpy.asarray(x).dtype == numpy.asarray(y).dtype
