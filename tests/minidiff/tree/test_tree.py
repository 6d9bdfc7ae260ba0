"""Trees of values: any tree is put together again; `trees.md` has what each function returns."""

from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff import tree
from tests.checks.aliasing import check_apart


class Point(NamedTuple):
    x: Any
    y: Any


nested = st.recursive(
    st.integers() | st.none(),
    lambda t: (
        st.lists(t, max_size=3)
        | st.lists(t, max_size=3).map(tuple)
        | st.dictionaries(st.text("ab\u00e9_", max_size=2), t, max_size=3)
        | st.builds(Point, t, t)
    ),
    max_leaves=8,
)


def is_tuple(x):
    return isinstance(x, tuple)


@settings(max_examples=30, deadline=None)
@given(nested, nested)
def test_trees_are_put_together_again(t, other):
    """Whatever the leaves are, and with whole trees in their place."""
    assert tree.map(lambda x, y: x - y, t, t) == tree.map(lambda x: 0, t)
    assert hash(tree.structure(t)) == hash(tree.flatten(t)[1])
    for is_leaf in (None, is_tuple, lambda x: x is None or isinstance(x, list), lambda x: True):
        leaves, structure = tree.flatten(t, is_leaf)
        assert structure.num_leaves == structure.size == len(leaves)
        assert structure.unflatten(leaves) == tree.unflatten(structure, leaves) == t
        assert tree.structure(tree.unflatten(structure, leaves), is_leaf) == structure
        assert structure.flatten_up_to(t) == leaves
        grown = tree.map(lambda x: [other], t, is_leaf=is_leaf)
        assert structure.flatten_up_to(grown) == [[other]] * len(leaves)
        pairs = tree.map(lambda x, y: (x, y), t, grown, is_leaf=is_leaf)
        assert pairs == structure.unflatten([(x, [other]) for x in leaves])
        paths = [tree.keystr(path) for path, _ in tree.leaves_with_path(t, is_leaf)]
        assert paths == tree.paths(structure) and len({*paths}) == len(leaves)


def test_deep_trees():
    t = u = 1
    for k in range(200):
        t, u = ([t], (t, 2), {"a": t, "b": None}, Point(0, t))[k % 4], [u]
    leaves, structure = tree.flatten(t)
    again = tree.map(lambda x: x, t)
    assert tree.leaves(again) == leaves and len(leaves) == structure.size
    assert tree.structure(again) == structure != tree.structure(u)
    assert hash(tree.structure(again)) == hash(structure)
    assert len(tree.paths(structure)) == structure.size
    assert tree.broadcast_prefix(t, again, lambda x: isinstance(x, int), "prefix") == leaves
    assert repr(tree.structure([t])) and repr(tree.structure(u))
    assert tree.unflatten(structure, iter([*leaves, 7, 8])) is not None  # no more is taken than there are leaves


def test_deep_trees_are_arguments():
    t = x = np.array([0.5, 2.0])
    for _ in range(100):
        t = [t]
    loss = lambda t: np.sum(np.sin(tree.leaves(t)[0]))  # noqa: E731
    for gradient in (md.grad(loss), md.jit(md.grad(loss)), md.grad(md.checkpoint(loss))):
        np.testing.assert_allclose(tree.leaves(gradient(t))[0], np.cos(x))


def test_ravel_pytree_of_traced_values():
    p = {"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "b": 5.0}
    flat, unravel = tree.ravel_pytree(p)
    check_apart(unravel(flat), flat, p)
    loss = lambda p: np.sum(p["w"] ** 2) * p["b"]  # noqa: E731
    through = md.jit(md.grad(lambda p: loss(unravel(tree.ravel_pytree(p)[0]))))
    md.tree.map(np.testing.assert_allclose, through(p), md.grad(loss)(p))
    assert md.hessian(lambda v: loss(unravel(v)))(flat).shape == (5, 5)
    batch = np.stack([flat, 2 * flat])
    np.testing.assert_array_equal(md.vmap(lambda v: tree.ravel_pytree(unravel(v))[0])(batch), batch)
