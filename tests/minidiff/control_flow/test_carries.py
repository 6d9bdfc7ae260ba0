"""Derivatives in steps of loops: as the types say that are recorded; `types_of_steps.md` shows these."""

import pytest

import minidiff as md
import minidiff.numpy as np
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.checks.results import assert_trees_close
from tests.programs.control import stepwise_gradients


def as_while_loop(step, init, ts):
    state = 0, init
    c = md.while_loop(lambda s: s[0] < len(ts), lambda s: (s[0] + 1, step(s[1], s[0] + 1.0)[0]), state)[1]
    return c, c[0]


def gradient_in_a_body(f):
    """The same as `md.grad`, for a value that ranks share along an axis that the outer shard_map does not map."""
    return lambda v: mapped(md.grad(f), None, P(), P())(v)


@pytest.mark.parametrize("turns", [(0, 1, 2), (1, 0, 1)], ids=["straight", "turning"])
@pytest.mark.parametrize("how", ["scan", "while_loop", "jit", "shard_map"])
@pytest.mark.filterwarnings("ignore:.*the gradient of the sum of the results")  # which is what is tested
def test_derivatives_in_steps_are_of_the_types_that_stay(how, turns):
    """A cotangent is the sum over ranks of what they share: so values depend on types, and these are as recorded."""
    loop = as_while_loop if how == "while_loop" else md.scan
    jitted = md.jit(lambda v, x: md.grad(lambda v: (v * v * x).sum())(v))  # recorded in the first loop that uses it

    def body(w, x):
        ways = {"jit": lambda _: lambda v: jitted(v, x), "shard_map": gradient_in_a_body}
        return md.tree.map(lambda y: y[None], stepwise_gradients(loop, ways.get(how, md.grad), w, x, turns))

    axes = {"i"} if how == "shard_map" else {"i", "j"}
    f = mapped(body, mesh(2, 2), (P(), P("i")), P("i"), axis_names=axes)
    args = np.array([0.5, -0.3]), np.arange(4.0) / 3
    expected = md.make_tape(f)(*args)(*args)
    for _ in range(2):
        assert_trees_close(md.tree.leaves(f(*args)), expected)
