"""Trees of values: flattening, structures, prefixes."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidiff as md
from minidiff import tree


class Point(NamedTuple):
    x: Any
    y: Any


nested = st.recursive(
    st.integers() | st.none(),
    lambda t: (
        st.lists(t, max_size=3)
        | st.lists(t, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), t, max_size=3)
        | st.builds(Point, t, t)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(nested)
def test_flatten_and_unflatten_are_inverse(t):
    leaves, structure = tree.flatten(t)
    assert len(leaves) == structure.size
    assert tree.unflatten(structure, leaves) == t
    assert tree.structure(tree.unflatten(structure, leaves)) == structure
    assert hash(tree.structure(t)) == hash(structure)
    assert tree.map(lambda x, y: x - y, t, t) == tree.map(lambda x: 0, t)


FLAT = [
    ((1, [2, 3]), [1, 2, 3], "(*, [*, *])"),
    ({"w": 1, "b": {"y": 2, "x": 3}}, [3, 2, 1], "{'b': {'x': *, 'y': *}, 'w': *}"),
    ((None, 1, ()), [1], "(None, *, ())"),
    (Point(1, [2]), [1, 2], "Point(x=*, y=[*])"),
    ({2: 1, "a": 2}, [1, 2], "{2: *, 'a': *}"),  # keys that do not compare keep their order
    (7, [7], "*"),
]


@pytest.mark.parametrize("t, leaves, shown", FLAT, ids=[shown for *_, shown in FLAT])
def test_leaves_and_structure(t, leaves, shown):
    assert tree.leaves(t) == leaves
    assert repr(tree.structure(t)) == shown


@pytest.mark.parametrize("depth", [500, 2000, 20000])
def test_deep_trees(depth):
    """Deeper than functions can be nested."""
    t = u = 1
    for k in range(depth):
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
    for _ in range(2000):
        t = [t]
    loss = lambda t: np.sum(np.sin(tree.leaves(t)[0]))  # noqa: E731
    for gradient in (md.grad(loss), md.jit(md.grad(loss)), md.grad(md.checkpoint(loss)), md.jacrev(loss)):
        np.testing.assert_allclose(tree.leaves(gradient(t))[0], np.cos(x))


def test_unlike_trees_have_unlike_structures():
    trees = [(1, 2), [1, 2], (1, None), {"a": 1, "b": 2}, {"a": 1, "c": 2}, Point(1, 2), 1, None, ((1, 2),)]
    assert len({tree.structure(t) for t in trees}) == len(trees)


def test_order_of_keys_does_not_matter():
    assert tree.structure({"a": 1, "b": 2}) == tree.structure({"b": 3, "a": 4})


def test_paths():
    found, _ = tree.flatten_with_paths([{"w": 1}, Point(2, (3, None))], "args")
    assert found == [("args[0]['w']", 1), ("args[1].x", 2), ("args[1].y[0]", 3)]


def test_map_says_which_structures_differ():
    with pytest.raises(ValueError, match=r"differ in structure: \(\*, \*\) and \[\*, \*\]"):
        tree.map(lambda x, y: x, (1, 2), [1, 2])


PREFIXES = [
    (0, ((1, 2), {"a": 3}), [0, 0, 0]),
    ((0, 1), ((1, 2), {"a": 3}), [0, 0, 1]),
    ([0, {"a": 1}], ((1, 2), {"a": 3}), [0, 0, 1]),
    ((0, 1), (None, 5), [1]),
]


@pytest.mark.parametrize("prefix, t, expected", PREFIXES, ids=str)
def test_a_prefix_counts_for_what_is_beneath_it(prefix, t, expected):
    assert tree.broadcast_prefix(prefix, t, lambda x: isinstance(x, int), "axes") == expected


BAD_PREFIXES = [
    ((0, 1), (1, 2, 3), r"axes has 2 entries for 3 values"),
    ((0, (1, 1)), (1, 2), r"axes\[1\] is a tuple of 2 for a single array"),
    ({"a": 0}, {"b": 1}, r"axes has the keys \['a'\] for values with the keys \['b'\]"),
    ({"a": 0}, (1,), r"axes is a dict for a tuple"),
    ((0, None), (1, 2), r"axes\[1\] is None for a single array, but None means no arrays: write an"),
    (None, (1, 2), "axes is None for a tuple, but None means no arrays"),
    ((0, "no"), (1, 2), r"axes\[1\] is 'no', which is neither an entry for arrays nor a tree of entries"),
]


@pytest.mark.parametrize("prefix, t, message", BAD_PREFIXES, ids=[str(p) for p, *_ in BAD_PREFIXES])
def test_a_prefix_that_does_not_match_is_named(prefix, t, message):
    with pytest.raises(ValueError, match=message):
        tree.broadcast_prefix(prefix, t, lambda x: isinstance(x, int), "axes")
