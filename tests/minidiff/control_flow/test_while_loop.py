"""`while_loop` and `fori_loop` of unknown length: elements that finish at different times, and no reverse mode."""

import functools

import numpy as np
import pytest

import minidiff as md
import minidiff.numpy as mnp
from tests.checks.results import assert_trees_close
from tests.checks.samples import each
from tests.programs.branch import alone, batched
from tests.programs.control import Unrolled

MATRICES = np.array([5 * np.eye(2), 3 * np.eye(2), -np.eye(2)])


def rooted(lax, w, x):
    """Steps that would raise for an element that has finished: it is not given to them."""
    half = np.eye(2) / 2
    return lax.while_loop(lambda c: c[0, 0] > 0.5, lambda c: mnp.linalg.cholesky(c - half) * w, x)


def often(lax, w, x):
    """A product with a matrix that is closed over, as often as its elements say."""
    count = mnp.maximum(mnp.ceil(x[0, 0]), 0).astype(int) // 2
    return lax.fori_loop(0, count, lambda i, c: c @ mnp.linalg.cholesky(x) * w, np.eye(2))


@each("f", [rooted, often])
@each("run", [lambda f: batched(f), lambda f: md.jit(batched(f)), lambda f: batched(md.jit(f))])
@each("of", [lambda f: f, lambda f: lambda w, xs: md.jvp(f, (w, xs), (1.0, np.cos(xs)))])
def test_elements_that_finish_at_different_times(f, run, of):
    actual, expected = run(functools.partial(f, md)), alone(functools.partial(f, Unrolled))
    assert_trees_close(of(actual)(0.9, MATRICES), of(expected)(0.9, MATRICES))


@each("max_steps", [None, 5])
@each("of", [lambda f: f, lambda f: lambda x: md.make_tape(f)(x)(x)[0]])
def test_without_a_bound_reverse_mode_is_refused_where_a_cotangent_comes(of, max_steps):
    x = np.arange(1.0, 4.0)
    f = of(lambda x: md.while_loop(lambda c: c.max() < 9, lambda c: c * 2.0, x, max_steps=max_steps))
    for run in (md.grad(lambda x: f(x).sum()), md.jit(md.grad(lambda x: f(x).sum()))):
        if max_steps:
            np.testing.assert_allclose(run(x), [4.0] * 3)
        else:
            with pytest.raises(TypeError):
                run(x)
    np.testing.assert_allclose(md.grad(lambda x: (x * 2).sum() + np.floor(f(x)).sum())(x), 2 * np.ones(3))
