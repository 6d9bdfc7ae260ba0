"""Trees of values: flattening, structures, prefixes, paths, vectors."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff import tree
from tests.checks.aliasing import check_apart
from tests.checks.samples import each


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


@each(
    "t, leaves, shown, nodes",
    [
        ((1, [2, (None, 3)]), [1, 2, 3], "(*, [*, (None, *)])", 7),
        ({"w": 1, "b": {"y": 2, "x": 3}}, [3, 2, 1], "{'b': {'x': *, 'y': *}, 'w': *}", 5),
        ((None, 1, ()), [1], "(None, *, ())", 4),
        (Point(1, [2]), [1, 2], "Point(x=*, y=[*])", 4),
        ({2: 1, "a": 2}, [1, 2], "{2: *, 'a': *}", 3),  # keys that do not compare keep their order
        (7, [7], "*", 1),
        (None, [], "None", 1),
    ],
    ids=str,
)
def test_leaves_and_structure(t, leaves, shown, nodes):
    structure = tree.structure(t)
    assert (tree.leaves(t), repr(structure), structure.num_nodes) == (leaves, shown, nodes)


def test_unlike_trees_have_unlike_structures():
    trees = [(1, 2), [1, 2], (1, None), {"a": 1, "b": 2}, {"a": 1, "c": 2}, Point(1, 2), 1, None, ((1, 2),)]
    assert len({tree.structure(t) for t in trees}) == len(trees)
    assert tree.structure({"a": 1, "b": 2}) == tree.structure({"b": 3, "a": 4})


@each("other", [[1, 2], (1, 2, 3), (1, None), ((1,), 2), 1])
def test_trees_of_another_structure_are_refused(other):
    t = (1, 2)
    for call in (
        lambda: tree.map(lambda x, y: x, other, t),
        lambda: tree.map_with_path(lambda path, x, y: x, other, t),
        lambda: tree.structure(other).flatten_up_to(t),
        lambda: tree.broadcast(other, t),
    ):
        if other != 1:  # which t begins with
            with pytest.raises(ValueError):
                call()


@each("t, leaves", [((1, 2), [1]), ((1, 2), [1, 2, 3]), ((1, []), []), ((1, []), [1, 2]), (None, [1])], ids=str)
def test_a_wrong_number_of_leaves(t, leaves):
    for wrong in (leaves, tuple(leaves)):
        with pytest.raises(ValueError):
            tree.structure(t).unflatten(wrong)


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


def test_is_leaf():
    """Also of traced values; it sees the containers alone."""
    t = {"a": (1, [2]), "b": [(3,), None], "c": 4}
    assert tree.leaves(t, is_leaf=is_tuple) == [(1, [2]), (3,), 4]
    assert repr(tree.structure(t, is_tuple)) == "{'a': *, 'b': [*, None], 'c': *}"
    assert not tree.all([()], is_leaf=is_tuple) and tree.all([()])
    assert tree.all_leaves([1, (2, 3)], is_tuple) and not tree.all_leaves([1, (2, 3)])
    assert tree.flatten((1, 2), is_leaf=is_tuple) == ([(1, 2)], tree.LEAF)
    assert tree.flatten((1, 2)) == ([1, 2], tree.structure((3, 4)))  # nothing is remembered of another is_leaf
    f = lambda p: tree.reduce(lambda s, pair: s + pair[0] * pair[1], p, 0.0, is_leaf=is_tuple)  # noqa: E731
    assert md.jit(md.grad(f))({"a": (2.0, 3.0), "b": [(4.0, 5.0)]}) == {"a": (3.0, 2.0), "b": [(5.0, 4.0)]}


# ---------------------------------------------------------------- prefixes, key paths, transposition


@each(
    "prefix, t, expected",
    [
        (0, ((1, 2), {"a": 3}), [0, 0, 0]),
        ((0, 1), ((1, 2), {"a": 3}), [0, 0, 1]),
        ([0, {"a": 1}], ((1, 2), {"a": 3}), [0, 0, 1]),
        ((0, 1), (None, 5), [1]),
    ],
    ids=str,
)
def test_a_prefix_counts_for_what_is_beneath_it(prefix, t, expected):
    assert tree.broadcast_prefix(prefix, t, lambda x: isinstance(x, int), "axes") == expected


def test_prefixes_of_several_trees():
    assert tree.broadcast((0, 1), [1.0, (2.0, None)], is_leaf=is_tuple) == [(0, 1), ((0, 1), None)]
    assert tree.map(lambda x, y, z: (x, y, z), (1, 2), (3, [4]), ([5], 6)) == ((1, 3, [5]), (2, [4], 6))


def test_key_paths():
    t = [{"w": 1}, Point(2, (3, None))]
    actual, structure = tree.flatten_with_path(t)
    assert actual == tree.leaves_with_path(t) and structure == tree.structure(t)
    keys = [path for path, _ in actual]
    assert keys[0] == (tree.SequenceKey(0), tree.DictKey("w")) and {*keys} == {*keys[::-1]}
    assert (keys[0][0].idx, keys[0][1].key, keys[1][1].name) == (0, "w", "x")
    assert [tree.keystr(path, simple=True, separator="/") for path in keys] == ["0/w", "1/x", "1/y/0"]
    assert tree.SequenceKey(0) != tree.DictKey(0) and repr(keys[1]) == "(SequenceKey(idx=1), GetAttrKey(name='x'))"
    assert {eval(repr(key), vars(tree)) for path in keys for key in path} == {key for path in keys for key in path}
    assert tree.flatten_with_paths(t, "args")[0] == [("args[0]['w']", 1), ("args[1].x", 2), ("args[1].y[0]", 3)]
    of_weights = lambda path, x: 2 * x if path[-1] == tree.DictKey("w") else x  # noqa: E731
    assert md.grad(lambda t: sum(tree.leaves(tree.map_with_path(of_weights, t))))({"w": 1.0, "b": 1.0})["w"] == 2.0


def test_keys_of_a_registered_class():
    class Interval:
        def __init__(self, low, high):
            self.low, self.high = low, high

    flatten = lambda x: ([(tree.GetAttrKey("low"), x.low), ("^", x.high)], None)  # noqa: E731
    tree.register_with_keys(Interval, flatten, lambda _, children: Interval(*children))
    t = {"i": Interval(1.0, [2.0])}
    assert [tree.keystr(path) for path, _ in tree.leaves_with_path(t)] == ["['i'].low", "['i']^[0]"]
    assert repr(tree.structure(t)) == "{'i': Interval(.low: *, ^: [*]; None)}"
    assert md.grad(lambda t: t["i"].low * t["i"].high[0])(t)["i"].low == 2.0
    with pytest.raises(TypeError, match=r"args\[0\]\['i'\]\.low"):
        md.vmap(lambda t: t)({"i": Interval({1}, 1.0)})


def test_transpose():
    outer, inner = tree.structure((0, [0])), tree.structure({"x": 0, "y": 0})
    t, expected = ({"x": 1, "y": 2}, [{"x": 3, "y": 4}]), {"x": (1, [3]), "y": (2, [4])}
    assert tree.transpose(outer, inner, t) == tree.transpose(outer, None, t) == expected
    assert tree.transpose(inner, outer, expected) == t


# ---------------------------------------------------------------- ravel_pytree


@each(
    "t, numbers",
    [
        ({"w": np.ones((2, 2), np.float32), "b": [3.0, 2], "none": None}, [3.0, 2.0, 1.0, 1.0, 1.0, 1.0]),
        ([np.arange(2.0), 1j], [0, 1, 1j]),
        ([], []),
        (None, []),
    ],
    ids=str,
)
def test_ravel_pytree(t, numbers):
    flat, unravel = tree.ravel_pytree(t)
    again = unravel(flat)
    assert flat.tolist() == numbers and tree.structure(again) == tree.structure(t)
    check_apart(again, flat, t)
    for x, y in zip(tree.leaves(again), tree.leaves(t)):
        assert x.dtype == np.asarray(y).dtype and np.array_equal(x, y)
    for wrong in (np.ones(len(flat) + 1), flat[:, None]):
        with pytest.raises(ValueError):
            unravel(wrong)


def test_ravel_pytree_of_traced_values():
    p = {"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "b": 5.0}
    flat, unravel = tree.ravel_pytree(p)
    loss = lambda p: np.sum(p["w"] ** 2) * p["b"]  # noqa: E731
    through, of_flat = lambda p: loss(unravel(tree.ravel_pytree(p)[0])), lambda v: loss(unravel(v))
    expected, _ = tree.ravel_pytree(md.grad(loss)(p))
    np.testing.assert_allclose(tree.ravel_pytree(md.jit(md.grad(through))(p))[0], expected)
    assert md.hessian(of_flat)(flat).shape == (5, 5) and unravel(flat.astype("f4"))["b"].dtype == "f4"
    batch = np.stack([flat, 2 * flat])
    np.testing.assert_array_equal(md.vmap(lambda v: tree.ravel_pytree(unravel(v))[0])(batch), batch)
