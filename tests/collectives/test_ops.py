"""The collectives on simulated ranks: what the tables of `tests/checks/ranks.py` do not ask of each of them.

Their types are in `tests/messages/types_of_collectives.md`, their errors in `collectives.md` beside it.
"""

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import given, settings

import minidiff as md
import minidiff.numpy as np
from collectives import all_gather, axis_index, axis_size, pbroadcast, pscatter, psum, psum_scatter
from collectives.reference import REFERENCES
from spmd import P
from tests.checks.collective_cases import (
    DTYPES,
    LAYOUTS,
    ORDERED,
    TRANSPOSES,
    Case,
    affine,
    cases,
    one_case_each,
    size_of,
)
from tests.checks.meshes import mapped, mesh
from tests.checks.of_collectives import check_transpose, check_values, sample
from tests.checks.samples import each


def test_all_collectives_are_tested():
    assert {case.name for case in cases(2)} == set(REFERENCES)


@each("case", one_case_each(1), ids=lambda case: case.name)
def test_axes_are_bound_and_distinct(case):
    with pytest.raises(md.UnboundAxisError):
        case(numpy.ones(case.shape), "i")
    for axes, error in (("k", md.UnboundAxisError), (("i", "i"), ValueError)):
        f = mapped(lambda x, axes=axes: case(x, axes), mesh(2, 3), P("i"), P())
        for run in (f, md.make_tape(f)):
            with pytest.raises(error):
                run(numpy.arange(8.0))


@each("dtype", ["int8", "uint8"])
def test_copies_of_small_integers_wrap_around(dtype):
    """More ranks than the dtype has numbers: the sum of as many copies is what ranks that each have one add up."""
    ones = np.ones(2, dtype)
    sums = lambda x: (psum(x, "x"), psum(ones, "x"), psum(ones[0], "x"), psum(pbroadcast(x, "x"), "x"))  # noqa: E731
    f = mapped(sums, mesh(300, names="x"), P(), P())
    expected = np.sum(np.ones((300, 2), dtype), axis=0, dtype=dtype)
    for actual in (f(ones), md.jit(f)(ones)):
        assert [x.dtype for x in actual] == [dtype] * 4
        assert all(np.array_equal(x, expected[0] if k == 2 else expected) for k, x in enumerate(actual))


@each("f", [
    lambda x: psum(x, ()),
    lambda x: all_gather(x, ())[0],
    lambda x: all_gather(x, (), tiled=True),
    lambda x: psum_scatter(x[None], ()),
    lambda x: pscatter(x[None], ()),
    lambda x: x * axis_size(()) + axis_index(()),
])  # fmt: skip
def test_over_no_axes_each_rank_is_alone(f):
    x = np.arange(6.0)
    assert np.array_equal(mapped(f, mesh(2, 3), P(("i", "j")), P(("i", "j")))(x), x)


@each("value", [1, 2.5, 1j, True])
def test_psum_of_a_number_is_a_number(value):
    """In groups, too, where they are alike."""
    sums = []

    def body(x):
        sums.extend([psum(value, "i"), psum(value, ("j", "i")), axis_size("j")])
        sums.append(psum(value, ("i", "j"), axis_index_groups=[[0, 5], [2, 1], [3, 4]]))
        return psum(value, "j", axis_index_groups=[[1], [2, 0]])[None]

    result = numpy.asarray(mapped(body, mesh(2, 3), P(), P("j"))(0.0))
    assert sums == [2 * value, 6 * value, 3, 2 * value] and isinstance(sums[0], type(2 * value))
    assert result.tolist() == [2 * value, value, 2 * value]


# ---------------------------------------------------------------- any mesh, axes, collective and operand

SPLIT = ("psum_scatter", "pscatter", "all_to_all", "scatter")
IN_GROUPS = {"psum", "pmean", "pprod", "pmax", "pmin", "pany", "pall", "preduce", "all_gather", *SPLIT[::2]}
ROOTED = {"broadcast", "broadcast_varying", "at_root", "reduce", "gather", "scatter"}


@st.composite
def random_cases(draw):
    """A mesh, some of its axes in some order, and a collective over them on blocks of some shape."""
    on = mesh(*draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)), names="xyz")
    axes = tuple(draw(st.lists(st.sampled_from(on.axis_names), min_size=1, unique=True)))
    n, name = size_of(on, axes), draw(st.sampled_from(sorted(REFERENCES)))
    if name == "all_to_all" and draw(st.booleans()):
        row = st.lists(st.integers(0, 2), min_size=n, max_size=n)
        splits = draw(st.lists(row, min_size=n, max_size=n))
        return on, axes, Case(name, (max(map(sum, splits)), 2), {"split_axis": 0, "concat_axis": 0, "splits": splits})
    options = {}
    if name in IN_GROUPS and draw(st.booleans()):
        ranks, n = draw(st.permutations(range(n))), draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
        options["axis_index_groups"] = [ranks[k : k + n] for k in range(0, len(ranks), n)]
    return on, axes, draw(operands(name, n, options))


@st.composite
def operands(draw, name, n, options):
    """A case of a collective over n ranks: a shape that it takes, and options."""
    splits, tiled = name in SPLIT, draw(st.booleans())
    shape = draw(st.lists(st.integers(0, 3), min_size=splits or (tiled and "gather" in name), max_size=3))
    dimension = st.integers(-len(shape), len(shape) - 1)
    options = {**options, **({"tiled": tiled} if splits or "gather" in name else {})}
    if splits:
        at = draw(dimension)
        shape[at] = n * shape[at] if tiled else n
        options[{"psum_scatter": "scatter_dimension", "all_to_all": "split_axis"}.get(name, "axis")] = at
    if name == "all_to_all":
        options["concat_axis"] = draw(dimension)
    if "gather" in name:
        options["axis"] = draw(dimension if tiled else st.integers(-len(shape) - 1, len(shape)))
    if name == "preduce":
        shape, options["combine"] = [2, *shape], affine
    if name in ("ppermute", "ppermute_start"):
        options["perm"] = list(enumerate(draw(st.permutations(range(n)))))[: draw(st.integers(0, n))]
    if name in ROOTED:
        options["root"] = draw(st.integers(0, n - 1))
    return Case(name, tuple(shape), options)


@settings(deadline=None, max_examples=60)
@given(random_cases(), st.sampled_from(DTYPES), st.sampled_from(sorted(LAYOUTS)), st.booleans())
def test_any_value(placed, dtype, layout, check_rep):
    on, axes, case = placed
    if case.name in ORDERED:
        dtype = dtype.replace("complex128", "float64").replace("complex64", "float32")
    check_values(on, [sample(on, case, axes, dtype)], layout, check_rep)


@settings(deadline=None, max_examples=40)
@given(random_cases().filter(lambda placed: placed[2].name in TRANSPOSES), st.sampled_from(["float64", "complex128"]))
def test_any_transpose(placed, dtype):
    on, axes, case = placed
    check_transpose(on, case, axes, dtype)
