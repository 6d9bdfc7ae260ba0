"""Rules for `vmap`, in and around other transformations; `batching_rules.md` has the rest."""

import numpy as np

import minidiff as md
from minidiff import custom_vmap
from tests.checks.samples import each

X, Y = np.arange(3.0), np.arange(1.0, 4.0)


def telling(seen):
    """A function sin(x) y whose rule says cos(x) y, so that one can tell them apart."""

    @custom_vmap
    def f(x, y):
        return {"out": np.sin(x) * y}

    @f.def_vmap
    def rule(axis_size, in_batched, x, y):
        seen.append((axis_size, in_batched, np.shape(x), np.shape(y)))
        return {"out": np.cos(x) * y}, {"out": True}

    return lambda x, y: f(x, y)["out"]


WAYS = {
    "plain": lambda f: f,
    "jit": md.jit,
    "tape": lambda f: lambda *args: md.make_tape(f)(*args)(*args)[0],
    "scan": lambda f: lambda *args: md.scan(lambda _, i: (None, f(*args)), None, np.arange(2))[1][1],
    "checkpoint": md.checkpoint,
}


@each("inner", WAYS)
@each("outer", WAYS)
def test_the_rule_serves_under_vmap_alone(inner, outer):
    seen = []
    f = telling(seen)
    inside, around = WAYS[inner], WAYS[outer]
    tangent = lambda x, y: md.jvp(f, (x, y), (1.0, 0.0))[1]  # noqa: E731
    total = lambda x, y: np.sum(md.vmap(inside(f))(x, y))  # noqa: E731
    np.testing.assert_allclose(around(inside(f))(1.0, 2.0), np.sin(1.0) * 2)
    assert seen == []
    for g, at in ((f, np.cos), (tangent, lambda x: -np.sin(x))):
        np.testing.assert_allclose(around(md.vmap(inside(g)))(X, Y), at(X) * Y)
        np.testing.assert_allclose(around(md.vmap(inside(g), in_axes=(None, 0)))(1.0, Y), at(1.0) * Y)
    assert (3, [True, True], (3,), (3,)) in seen and (3, [False, True], (), (3,)) in seen
    np.testing.assert_allclose(around(inside(tangent))(1.0, 2.0), np.cos(1.0) * 2)
    np.testing.assert_allclose(around(md.grad(total))(X, Y), -np.sin(X) * Y)
