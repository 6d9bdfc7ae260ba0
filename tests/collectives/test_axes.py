"""Sets of axes, where their order does not matter."""

import itertools

import pytest

import collectives
import minidiff as md
import minidiff.numpy as np
from collectives import psum
from spmd import P
from tests.checks.collective_cases import one_case_each
from tests.checks.meshes import mapped, mesh
from tests.checks.samples import each

UNORDERED = ("psum", "pmean", "pprod", "pmax", "pmin", "pany", "pall", "pbroadcast")


@each("kind", [set, frozenset])
@each("name", UNORDERED)
def test_a_set_of_axes_is_a_tuple_where_order_does_not_matter(name, kind):
    collective, on, x = getattr(collectives, name), mesh(2, 1, 2), np.arange(8.0).reshape(4, 2)
    for n in range(4):
        for axes in itertools.combinations(on.axis_names, n):
            in_specs, out = P(on.axis_names), P(tuple(a for a in on.axis_names if a not in axes))
            if name == "pbroadcast":
                in_specs, out = P(), P(axes)
            tapes = [
                str(md.make_tape(mapped(lambda x, a=a: collective(x, a), on, in_specs, out))(x))
                for a in (axes, kind(axes))
            ]
            assert tapes[0] == tapes[1]


@each("case", [case for case in one_case_each(2) if case.name not in UNORDERED], ids=lambda case: case.name)
def test_a_set_of_axes_is_refused_where_order_matters(case):
    with pytest.raises(TypeError):
        mapped(lambda x: case(x, frozenset("ji")), mesh(2, 3), P("i"), P())(np.arange(8.0))


@each("axes", itertools.permutations(["i", "j", "b"]), ids=str)
def test_axes_of_a_mesh_around_that_of_a_vmap(axes):
    x = np.arange(24.0).reshape(2, 3, 4)
    f = lambda x: psum(x, axes)  # noqa: E731
    total = mapped(md.vmap(f, in_axes=2, out_axes=2, axis_name="b"), mesh(2, 3), P("i", "j"), P())(x)
    np.testing.assert_array_equal(total, np.full((1, 1, 4), x.sum()))
