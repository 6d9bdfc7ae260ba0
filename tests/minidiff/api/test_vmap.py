"""`vmap`: one element's function, applied along an axis."""

import numpy as np

import minidiff as md
from minidiff import random
from tests.checks.samples import each

X, KEY = np.arange(24.0).reshape(2, 3, 4), random.key(7)


def over_elements(f, in_axes, out_axes, args):
    """Call f for each element in a loop, and stack what it returns."""
    axes, of_axis = (
        (lambda spec, x: md.tree.broadcast_prefix(spec, x, of_axis, "axes")),
        lambda a: not a or type(a) is int,
    )
    (leaves, structure), places = md.tree.flatten(args), axes(in_axes, args)
    size = next(x.shape[a] for x, a in zip(leaves, places) if a is not None)
    elements = [[x if a is None else np.take(x, i, a) for x, a in zip(leaves, places)] for i in range(size)]
    outs = [f(*md.tree.unflatten(structure, xs)) for xs in elements]
    stacked = zip(zip(*map(md.tree.leaves, outs)), axes(out_axes, outs[0]))
    return md.tree.unflatten(md.tree.structure(outs[0]), [xs[0] if a is None else np.stack(xs, a) for xs, a in stacked])


def loss(w, x):
    return np.tanh(w @ x).sum() * x[0]


def slope(x):
    return md.grad(lambda y: md.vmap(lambda z: x * y * z)(np.arange(3.0)).sum())(x)


second = md.grad(md.grad(lambda x: np.sin(x) * x))
P = {"w": np.arange(3.0), "b": X}
#: f, in_axes, out_axes, and arguments.
PROGRAMS = {
    **{f"axis {a} to {b}": (lambda x: x * 2, a, b, (X,)) for a in (0, 1, 2, -1, -3) for b in (0, 1, -1)},
    "an axis for each": (lambda x, y, z: x @ y + z, (1, None, 0), 0, (X[0], np.ones(3), np.arange(4.0))),
    "trees": (
        lambda p, x: {"y": p["w"] * x, "z": (p["b"], 1.0)},
        ({"w": 0, "b": 1}, None),
        {"y": 0, "z": (2, None)},
        (P, 2.0),
    ),
    "constant results": (lambda x: (7.0, np.arange(2.0), x), 0, (0, 1, 0), (np.ones(3),)),
    "vmap": (md.vmap(lambda x, y: x * y, (0, None)), (None, 0), 0, (np.arange(3.0), np.arange(2.0))),
    "a closure over the batch": (lambda x: md.vmap(lambda y: x * y + x)(x), 0, 0, (X[0],)),
    "indices": (lambda i, j: md.numpy.take(X, i, axis=1)[0, j], 0, 0, (np.array([0, 2, 1]), np.array([3, 0, -1]))),
    "numbers that a key draws": (lambda i: random.normal(random.fold_in(KEY, i), 3), 0, 0, (np.arange(3),)),
    "probabilities": (lambda p: random.bernoulli(KEY, p, (5,)), 0, 0, (np.array([0.1, 0.5, 0.9]),)),
    "blocks of numbers": (lambda i: random.bits(KEY, random.Block((2,), (2 * i,), (6,))), 0, 0, (np.arange(3),)),
    "gradients": (md.grad(loss), (None, 0), 0, (X[0] / 10, X[1])),
    "second derivatives": (second, 0, 0, (np.array([0.1, 0.7, 2.0]),)),
    "tangents": (lambda x: md.jvp(second, (x,), (x,)), 0, 0, (np.array([0.1, 0.7, 2.0]),)),
    "grad of vmap": (slope, 0, 0, (np.array([1.0, 2.0]),)),
}


@each("name", PROGRAMS)
@each("run", [lambda f, args: f(*args), lambda f, args: md.jit(f)(*args)])
def test_vmap_is_a_loop(name, run):
    f, in_axes, out_axes, args = PROGRAMS[name]
    actual, expected = run(md.vmap(f, in_axes, out_axes), args), over_elements(f, in_axes, out_axes, args)
    md.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-12), actual, expected)


def test_arguments_by_keyword_are_mapped_along_their_first_axis():
    f = lambda x, *, k: x * k["a"].sum()  # noqa: E731
    k = {"a": np.arange(9.0).reshape(3, 3)}
    expected = np.stack([f(X[:, i], k={"a": k["a"][i]}) for i in range(3)])
    np.testing.assert_allclose(md.vmap(f, in_axes=1)(X, k=k), expected)
    np.testing.assert_allclose(md.vmap(lambda *, k: f(2.0, k=k))(k=k), 2 * k["a"].sum(1))
