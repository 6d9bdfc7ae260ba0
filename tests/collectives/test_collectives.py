"""The collectives on simulated ranks: values, types, transposes, derivatives, counts, errors."""

import itertools

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import given, settings

import collectives
import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import (
    all_gather,
    all_to_all,
    at_root,
    axis_index,
    axis_size,
    broadcast,
    broadcast_varying,
    gather,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    ppermute_start,
    pscan,
    pscatter,
    psum,
    psum_scatter,
    reduce,
    scatter,
)
from collectives.reference import REFERENCES
from spmd import P
from tests.checks.of_collectives import (
    DTYPES,
    LAYOUTS,
    ORDERED,
    TRANSPOSES,
    Case,
    affine,
    cases,
    check_counts,
    check_scans_in_branches,
    check_transpose,
    check_values,
    collectives_in,
    collectives_on,
    one_case_each,
    random,
    sample,
    size_of,
)
from tests.checks.samples import each

NAMES = ("x", "y", "z")


def simulated(*shape, names=NAMES):
    return spmd.make_mesh(shape, names[: len(shape)], backend="simulated")


MESHES = [simulated(*shape) for shape in [(1,), (4,), (2, 3), (1, 3), (2, 1, 2)]]
IJ = simulated(2, 3, names=("i", "j"))


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_copies_of_small_integers_wrap_around(dtype):
    """More ranks than the dtype has numbers: the sum of as many copies is what ranks that each have one add up."""
    mesh, ones = simulated(300), np.ones(2, dtype)

    def sums(x):
        return psum(x, "x"), psum(ones, "x"), psum(ones[0], "x"), psum(pbroadcast(x, "x"), "x")

    f = spmd.shard_map(sums, mesh=mesh, in_specs=P(), out_specs=P())
    expected = np.sum(np.ones((300, 2), dtype), axis=0, dtype=dtype)
    for actual in (f(ones), md.jit(f)(ones)):
        assert [x.dtype for x in actual] == [dtype] * 4
        assert all(np.array_equal(x, expected[0] if k == 2 else expected) for k, x in enumerate(actual))


def test_over_no_axes():
    """Over () each rank is alone: all there is of it is one."""
    over = {
        "psum": lambda x: psum(x, ()),
        "all_gather": lambda x: all_gather(x, ())[0],
        "all_gather, tiled": lambda x: all_gather(x, (), tiled=True),
        "psum_scatter": lambda x: psum_scatter(x[None], ()),
        "pscatter": lambda x: pscatter(x[None], ()),
        "index and size": lambda x: x * axis_size(()) + axis_index(()),
    }
    x = np.arange(6.0)
    for name, f in over.items():
        assert np.array_equal(spmd.shard_map(f, mesh=IJ, in_specs=P(("i", "j")), out_specs=P(("i", "j")))(x), x), name
    with pytest.raises(ValueError, match=r"ppermute over \(\): no axis is named; name at least one"):
        spmd.shard_map(lambda x: ppermute(x, (), []), mesh=IJ, in_specs=P(), out_specs=P())(x)


def test_scans_in_branches():
    check_scans_in_branches(simulated(2, 2))


def test_scans_over_the_axis_of_a_vmap():
    x = np.array([3.0, 1.0, 4.0, 1.0])
    weights = np.array([1.0, 10.0, 100.0, 1000.0])
    for how, expected in (
        ({}, [3, 4, 8, 9]),
        ({"reverse": True}, [9, 6, 5, 1]),
        ({"exclusive": True}, [0, 3, 4, 8]),
        ({"reverse": True, "exclusive": True}, [6, 5, 1, 0]),
    ):
        f = md.vmap(lambda x, how=how: pscan(x, "i", **how), axis_name="i")
        for run in (f, md.jit(f)):
            np.testing.assert_array_equal(run(x), expected)
        gradient = md.grad(lambda x, f=f: f(x) @ weights)(x)
        opposite = {**how, "reverse": not how.get("reverse", False)}
        transposed = md.vmap(lambda ct, how=opposite: pscan(ct, "i", **how), axis_name="i")
        np.testing.assert_array_equal(gradient, transposed(weights))


def test_all_collectives_are_tested():
    assert {case.name for case in cases(2)} == set(REFERENCES)


@pytest.mark.parametrize("value", [1, 2.5, 1j, True])
def test_psum_of_a_number_is_a_number(value):
    sums = []

    def body(x):
        sums.extend([psum(value, "i"), psum(value, ("j", "i")), axis_size("j")])
        return x

    spmd.shard_map(body, mesh=IJ, in_specs=P(), out_specs=P())(0.0)
    assert sums == [2 * value, 6 * value, 3]
    assert isinstance(sums[0], type(2 * value))


def test_psum_of_a_number_in_groups_is_a_number_where_they_are_alike():
    sums = []

    def body(x):
        sums.append(psum(1, ("i", "j"), axis_index_groups=PAIRS))
        return psum(1, "j", axis_index_groups=UNEVEN)[None]

    counted = spmd.shard_map(body, mesh=IJ, in_specs=P(), out_specs=P("j"))(0.0)
    assert sums == [2] and isinstance(sums[0], int)
    assert numpy.asarray(counted).tolist() == [2, 1, 2]


def test_collectives_take_trees():
    def body(x):
        return pmax({"a": x, "b": (x + 1, 2 * x)}, "i")

    result = spmd.shard_map(body, mesh=IJ, in_specs=P("i"), out_specs=P())(numpy.arange(4.0))
    expected = {"a": numpy.array([2.0, 3]), "b": (numpy.array([3.0, 4]), numpy.array([4.0, 6]))}
    md.tree.map(numpy.testing.assert_array_equal, result, expected)


# ---------------------------------------------------------------- derivatives


@pytest.mark.parametrize("extremum", [pmax, pmin])
def test_ranks_that_tie_share_the_derivative(extremum):
    f = spmd.shard_map(lambda x: extremum(x, "x")[0], mesh=simulated(4), in_specs=P("x"), out_specs=P())
    at, rest = (2.0, [1.0, 0.0]) if extremum is pmax else (-2.0, [-1.0, 0.0])
    gradient = md.grad(f)(numpy.array([at, rest[0], at, rest[1]]))
    numpy.testing.assert_array_equal(gradient, [0.5, 0.0, 0.5, 0.0])


def test_the_way_back_of_an_extremum_communicates_nothing():
    f = spmd.shard_map(lambda x: pmax(np.sin(x), "i"), mesh=IJ, in_specs=P("i"), out_specs=P())
    rows = spmd.communication(lambda x, ct: md.vjp(f, x)[1](ct))(numpy.ones(4), numpy.ones(2)).rows
    assert [(row.collective, row.count, row.bytes) for row in rows] == [("pmax", 1, 16), ("psum", 1, 16)]
    linear = md.make_tape(md.linearize(f, numpy.ones(4))[1])(numpy.ones(4))
    assert spmd.communication(linear).counts == {"psum": 1}
    transposed = md.make_tape(md.vjp(f, numpy.ones(4))[1])(numpy.ones(2))
    assert spmd.communication(transposed).counts == {}


@pytest.mark.parametrize("name", ["pmax", "pmin"])
def test_extrema_are_not_linear(name):
    f = spmd.shard_map(lambda x: Case(name, ())(x, "x"), mesh=MESHES[1], in_specs=P("x"), out_specs=P())
    with pytest.raises(TypeError, match="not linear"):
        md.linear_transpose(f, numpy.ones(4))(numpy.ones(1))


# ---------------------------------------------------------------- types

#: Of a body with the arguments x:f64[6]{i,j}, u:f64[6]{j}, w:f64[6]: the collectives on its tape, and their types.
TYPES = {
    # The JEP's table, and its kin.
    "psum(x, 'i')": "psum i: f64[6]{i,j} -> f64[6]{j}",
    "psum(x, ('j', 'i'))": "psum j,i: f64[6]{i,j} -> f64[6]",
    "pmean(u, 'j')": "psum j: f64[6]{j} -> f64[6]",
    "pmax(x, 'j')": "pmax j: f64[6]{i,j} -> f64[6]{i}",
    "pmin(x, ('i', 'j'))": "pmin i,j: f64[6]{i,j} -> f64[6]",
    "pbroadcast(u, 'i')": "pbroadcast i: f64[6]{j} -> f64[6]{i,j}",
    "all_gather(x, 'i')": "all_gather i: f64[6]{i,j} -> f64[2,6]{i,j}",
    "all_gather(u, 'j', tiled=True)": "all_gather j: f64[6]{j} -> f64[18]{j}",
    "all_gather_invariant(x, 'i', axis=1)": "all_gather_invariant i: f64[6]{i,j} -> f64[6,2]{j}",
    "psum_scatter(x, ('i', 'j'))": "psum_scatter i,j: f64[6]{i,j} -> f64[]{i,j}",
    "pscatter(u, 'i', tiled=True)": "pscatter i: f64[6]{j} -> f64[3]{i,j}",
    "all_to_all(u, 'j', 0, 0, tiled=True)": "all_to_all j: f64[6]{j} -> f64[6]{j}",
    "ppermute(x, 'i', [(0, 1)])": "ppermute i: f64[6]{i,j} -> f64[6]{i,j}",
    "broadcast(x, 'i')": "broadcast i: f64[6]{i,j} -> f64[6]{j}",
    "at_root(u, 'i')": "at_root i: f64[6]{j} -> f64[6]{i,j}",
    "broadcast_varying(x, 'j')": "broadcast_varying j: f64[6]{i,j} -> f64[6]{i,j}",
    "reduce(x, ('j', 'i'), 5)": "reduce j,i: f64[6]{i,j} -> f64[6]{i,j}",
    "gather(u, 'j', 2)": "gather j: f64[6]{j} -> f64[3,6]{j}",
    "scatter(u, 'j', tiled=True)": "scatter j: f64[6]{j} -> f64[2]{j}",
    "all_to_all(x, 'i', 0, 0, splits=[[2, 4], [1, 3]])": "ragged_all_to_all i: f64[6]{i,j} -> f64[7]{i,j}",
    # In groups, nothing is the same for all.
    "psum(u, 'j', axis_index_groups=UNEVEN)": "psum j: f64[6]{j} -> f64[6]{j}",
    "pprod(x, 'j')": "pprod j: f64[6]{i,j} -> f64[6]{i}",
    "pany(x, 'j')": "pmax j: bool[6]{i,j} -> bool[6]{i}",
    "pall(w, 'i')": "",
    "pprod(w, 'i') * 3": "",
    "preduce(x, 'j', np.minimum)": "all_gather_invariant j: f64[6]{i,j} -> f64[3,6]{i}",
    "pmax(x, ('i', 'j'), axis_index_groups=PAIRS)": "pmax i,j: f64[6]{i,j} -> f64[6]{i,j}",
    "all_gather(u, ('i', 'j'), axis_index_groups=PAIRS)": (
        "pbroadcast i: f64[6]{j} -> f64[6]{i,j}; all_gather i,j: f64[6]{i,j} -> f64[2,6]{i,j}"
    ),
    "psum_scatter(x, ('i', 'j'), tiled=True, axis_index_groups=PAIRS)": "psum_scatter i,j: f64[6]{i,j} -> f64[3]{i,j}",
    "all_to_all(x, ('i', 'j'), 0, 0, tiled=True, axis_index_groups=PAIRS)": (
        "all_to_all i,j: f64[6]{i,j} -> f64[6]{i,j}"
    ),
    # An operand that does not vary is varying for the collectives that take varying ones, ...
    "all_gather(w, 'i')": "pbroadcast i: f64[6] -> f64[6]{i}; all_gather i: f64[6]{i} -> f64[2,6]{i}",
    "psum_scatter(u, ('j', 'i'))": (
        "pbroadcast i: f64[6]{j} -> f64[6]{i,j}; psum_scatter j,i: f64[6]{i,j} -> f64[]{i,j}"
    ),
    "all_to_all(w, 'j', 0, 0, tiled=True)": "pbroadcast j: f64[6] -> f64[6]{j}; all_to_all j: f64[6]{j} -> f64[6]{j}",
    "ppermute(w, 'i', [(0, 1)])": "pbroadcast i: f64[6] -> f64[6]{i}; ppermute i: f64[6]{i} -> f64[6]{i}",
    "all_gather_invariant(w, 'i')": "pbroadcast i: f64[6] -> f64[6]{i}; all_gather_invariant i: f64[6]{i} -> f64[2,6]",
    # ... and not communicated by reductions: a sum is multiplied, an extremum is what it was.
    "psum(w, ('i', 'j'))": "",
    "psum(u, ('i', 'j'))": "psum j: f64[6]{j} -> f64[6]",
    "pmean(w, 'i')": "",
    "pmax(w, 'i')": "",
    "pmin(u, ('i', 'j'))": "pmin j: f64[6]{j} -> f64[6]",
    "pmax(3.0, 'i') * w": "",
    # What all ranks have need not come from a root, nor go to one.
    "broadcast(w, ('i', 'j'))": "",
    "broadcast(u, ('i', 'j'), 4)": "pbroadcast i: f64[6]{j} -> f64[6]{i,j}; broadcast i,j: f64[6]{i,j} -> f64[6]",
    "broadcast_varying(w, 'i')": "pbroadcast i: f64[6] -> f64[6]{i}",
    "reduce(w, 'i')": "at_root i: f64[6] -> f64[6]{i}",
    "reduce(u, ('i', 'j'), 4)": "pbroadcast i: f64[6]{j} -> f64[6]{i,j}; reduce i,j: f64[6]{i,j} -> f64[6]{i,j}",
    "gather(w, 'i', 1)": "at_root i: f64[6] -> f64[6]{i}",
    "gather(u, ('i', 'j'), 1)": "pbroadcast i: f64[6]{j} -> f64[6]{i,j}; gather i,j: f64[6]{i,j} -> f64[6,6]{i,j}",
    "scatter(w, ('i', 'j'))": "pscatter i,j: f64[6] -> f64[]{i,j}",
    "scatter(u, ('i', 'j'), 3)": "pbroadcast i: f64[6]{j} -> f64[6]{i,j}; scatter i,j: f64[6]{i,j} -> f64[]{i,j}",
    "psum(w, ('i', 'j'), axis_index_groups=PAIRS)": "",
    "psum(w, 'j', axis_index_groups=UNEVEN)": "pbroadcast j: f64[6] -> f64[6]{j}; psum j: f64[6]{j} -> f64[6]{j}",
    "pmin(w, 'j', axis_index_groups=UNEVEN)": "",
    # Operands that disagree are pbroadcast to the union, each value once.
    "x + x": "",
    "2.0 * x + 1": "",
    "x + w": "pbroadcast i,j: f64[6] -> f64[6]{i,j}",
    "x + u": "pbroadcast i: f64[6]{j} -> f64[6]{i,j}",
    "x * w + w": "pbroadcast i,j: f64[6] -> f64[6]{i,j}",
    "x * w + x * w.reshape(2, 3).T.reshape(6)": "pbroadcast i,j: f64[6] -> f64[6]{i,j}",
    "x * w + x * (u * w)": (
        "pbroadcast i,j: f64[6] -> f64[6]{i,j}; "
        "pbroadcast j: f64[6] -> f64[6]{j}; "
        "pbroadcast i: f64[6]{j} -> f64[6]{i,j}"
    ),
    "np.where(x > 0, u, w)": "pbroadcast i: f64[6]{j} -> f64[6]{i,j}; pbroadcast i,j: f64[6] -> f64[6]{i,j}",
    "pbroadcast(w, ('i', 'j')) * x + w": "pbroadcast i,j: f64[6] -> f64[6]{i,j}",
    "x * CONSTANT + CONSTANT": "pbroadcast i,j: f64[6] -> f64[6]{i,j}",
    "all_gather(w, 'j').sum() + u * w": "pbroadcast j: f64[6] -> f64[6]{j}; all_gather j: f64[6]{j} -> f64[3,6]{j}",
    "psum(x, 'i') * u": "psum i: f64[6]{i,j} -> f64[6]{j}",
}
CONSTANT = numpy.arange(6.0)
PAIRS = [[0, 5], [2, 1], [3, 4]]
UNEVEN = [[1], [2, 0]]


def on_ij(body, out_specs=P(("i", "j"))):
    return spmd.shard_map(body, mesh=IJ, in_specs=(P(("i", "j")), P("j"), P()), out_specs=out_specs)


def variance_on_ij(body):
    """The axes along which the body's result varies, by its type."""
    types = []

    def look(*blocks):
        types.append(md.typeof(body(*blocks)))
        return ()

    on_ij(look)(*ARGUMENTS)
    return tuple(a for a in ("i", "j") if a in types[0].variance)


ARGUMENTS = (random(36, "float64"), random(18, "float64"), random(6, "float64"))


@each("program", TYPES)
def test_types(program):
    body = eval(f"lambda x, u, w: {program}", {**vars(collectives), **globals()})
    f = on_ij(lambda *blocks: body(*blocks).reshape(-1), P(variance_on_ij(body)))  # nothing is pbroadcast at the end
    actual = [
        f"{eqn.primitive} {','.join(eqn.params['axes'])}: {eqn.inputs[0].type} -> {eqn.outputs[0].type}"
        for eqn in collectives_in(f, *ARGUMENTS)
    ]
    assert actual == [x for x in TYPES[program].split("; ") if x]
    check_counts(IJ, f, *ARGUMENTS)
    check_counts(IJ, md.grad(lambda *args: np.sum(np.sin(f(*args))), (0, 1, 2)), *ARGUMENTS)


@pytest.mark.parametrize("axes", ["i", ("j", "i")])
def test_axis_index_varies_along_its_axes(axes):
    types = []

    def body(x):
        types.append(str(md.typeof(axis_index(axes))))
        return x

    spmd.shard_map(body, mesh=IJ, in_specs=P(), out_specs=P())(0.0)
    assert types == ["i64[]{i}" if axes == "i" else "i64[]{i,j}"]


# ---------------------------------------------------------------- counts


def test_a_parameter_used_twice_is_summed_once():
    def body(x, u, w):
        return psum(np.sum(np.tanh(x * w) * w + u * w), ("i", "j"))

    gradient = md.grad(on_ij(body, P()), 2)
    check_counts(IJ, gradient, *ARGUMENTS)
    # The loss, and w's cotangents: along i and j together, and along j where it met u alone.
    assert spmd.communication(gradient)(*ARGUMENTS).counts["psum"] <= 4
    once = md.grad(on_ij(lambda x, u, w: psum(np.sum(np.tanh(x * w) * w), ("i", "j")), P()), 2)
    assert spmd.communication(once)(*ARGUMENTS).counts == {"psum": 2}


# ---------------------------------------------------------------- sets of axes


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("name", ["psum", "pmean", "pprod", "pmax", "pmin", "pany", "pall", "pbroadcast"])
def test_a_set_of_axes_is_a_tuple_where_order_does_not_matter(name, kind):
    collective = getattr(collectives, name)
    mesh, x = MESHES[-1], np.arange(8.0).reshape(4, 2)
    for n in range(4):
        for axes in itertools.combinations(mesh.axis_names, n):
            in_specs, out = P(mesh.axis_names), P(tuple(a for a in mesh.axis_names if a not in axes))
            if name == "pbroadcast":
                in_specs, out = P(), P(axes)
            with_tuple, with_set = (
                spmd.shard_map(lambda x, a=a: collective(x, a), mesh=mesh, in_specs=in_specs, out_specs=out)
                for a in (axes, kind(axes))
            )
            assert str(md.make_tape(with_set)(x)) == str(md.make_tape(with_tuple)(x))


def test_sets_of_axes_of_meshes_and_of_vmaps():
    def f(x):
        varying = md.typeof(x).variance
        assert axis_size({"i", "b"}) == 6 and axis_size(set()) == 1
        return psum(x, {"b", *varying}), psum(psum(x, varying), md.typeof(psum(x, "i")).variance)

    on_ranks = spmd.shard_map(md.vmap(f, axis_name="b"), mesh=IJ, in_specs=P(None, "i"), out_specs=P())
    both, mesh = on_ranks(np.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(both, np.full((3, 1), 15.0))
    np.testing.assert_array_equal(mesh, [[1.0], [5.0], [9.0]])


# ---------------------------------------------------------------- errors

#: Those that take a set of axes, too.
UNORDERED = ("psum", "pmean", "pprod", "pmax", "pmin", "pany", "pall", "pbroadcast")

# Of a body with the argument x:f64[4]{i} on a mesh with the axes i: 2 and j: 3.
ERRORS = [
    *[
        (f"{case.name}: unbound", lambda x, case=case: case(x, "k"), md.UnboundAxisError, "no axis 'k' here")
        for case in one_case_each(2)
    ],
    *[
        (f"{case.name}: twice", lambda x, case=case: case(x, ("i", "i")), ValueError, "named twice in ('i', 'i')")
        for case in one_case_each(2)
    ],
    ("axis_size: unbound", lambda x: axis_size("k"), md.UnboundAxisError, "no axis 'k' here"),
    ("axis first", lambda x: psum("i", x), TypeError, "that is not the name of an axis; write psum(x, 'i')"),
    ("axis_index of a value", axis_index, TypeError, "that is not the name of an axis; write axis_index('i')"),
    (
        "a set in a tuple",
        lambda x: psum(x, ("j", {"i"})),
        TypeError,
        "psum over {'i'}: that is not the name of an axis",
    ),
    (
        "axis_index over a set of one",
        lambda x: axis_index({"i"}),
        TypeError,
        "axis_index over the set {'i'}: the order of the axes matters here, and a set has none; write the name, 'i'",
    ),
    *[
        (f"{case.name}: a set", lambda x, case=case: case(x, frozenset("ji")), TypeError, "write a tuple, ('i', 'j')")
        for case in one_case_each(2)
        if case.name not in UNORDERED
    ],
    ("a set with groups", lambda x: psum(x, {"i"}, axis_index_groups=[[0, 1]]), TypeError, "write the name, 'i'"),
    ("a set: unbound", lambda x: psum(x, {"i", "k"}), md.UnboundAxisError, "no axis 'k' here"),
    (
        "no pairs",
        lambda x: ppermute(x, "i", [0, 1]),
        TypeError,
        "perm is [0, 1]; write a list of pairs (source, dest",
    ),
    ("no list", lambda x: ppermute(x, "i", 1), TypeError, "perm is 1; write a list of pairs (source, destination)"),
    ("source twice", lambda x: ppermute(x, "i", [(0, 1), (0, 0)]), ValueError, "source 0 occurs 2 times"),
    ("destination twice", lambda x: ppermute(x, "i", [(0, 1), (1, 1)]), ValueError, "destination 1 occurs 2 times"),
    ("half a rank", lambda x: ppermute(x, "i", [(1, 1 / 2)]), TypeError, "destination is 0.5, which is no integer"),
    ("half a root", lambda x: broadcast(x, "i", 0.5), TypeError, "broadcast: the root is 0.5, which is no integer"),
    ("no such source", lambda x: ppermute(x, "i", [(2, 0)]), ValueError, "source 2 is not an index along 'i'"),
    ("no such destination", lambda x: ppermute(x, "i", [(0, -1)]), ValueError, "destination -1 is not an index"),
    *[
        error
        for name, f, of in [
            ("psum_scatter", psum_scatter, lambda x: x),
            ("all_to_all", lambda x, axes, **tiled: all_to_all(x, axes, 0, 0, **tiled), lambda x: x),
            ("pscatter", pscatter, lambda x: psum(x, "i")),
        ]
        for error in [
            (f"{name}: no multiple", lambda x, f=f, of=of: f(of(x), "j", tiled=True), ValueError, f"{name}: axis 0 of"),
            (f"{name}: too long", lambda x, f=f, of=of: f(of(x), "i"), ValueError, "one entry for each of the 2 ranks"),
        ]
    ],
    *[
        (
            f"{name}: root {root}",
            lambda x, f=f, root=root: f(x, "j", root),
            ValueError,
            f"{name}: the root {root} is no",
        )
        for name, f, root in [
            ("broadcast", broadcast, 3),
            ("broadcast_varying", broadcast_varying, 3),
            ("at_root", at_root, -1),
            ("reduce", reduce, 3),
            ("gather", gather, 7),
            ("scatter", scatter, 3),
        ]
    ],
    (
        "scatter: no multiple",
        lambda x: scatter(x, "j", tiled=True),
        ValueError,
        "scatter: axis 0 of f64[4]{i} is split",
    ),
    ("scatter: too long", lambda x: scatter(x, "i"), ValueError, "one entry for each of the 2 ranks"),
    (
        "at_root of a varying value",
        lambda x: at_root(x, "i"),
        md.VarianceError,
        "at_root over 'i' takes a value that is",
    ),
    *[
        (f"groups: {label}", lambda x, g=groups: psum(x, "j", axis_index_groups=g), ValueError, text)
        for label, groups, text in [
            ("one missing", [[0, 1]], "axis_index_groups=[[0, 1]]: rank 2 is in no group"),
            ("one twice", [[0, 1], [1, 2]], "rank 1 occurs 2 times; each rank is in one group"),
            ("no such rank", [[0, 1, 2, 3]], "3 is not one of the 3 ranks, 0 to 2"),
            ("none", [], "rank 0 is in no group"),
            ("an empty one", [[0, 1, 2], []], "groups have 0 and 3 ranks; they must not be empty"),
        ]
    ],
    *[
        (f"{name}: uneven groups", lambda x, f=f: f(x, "j", axis_index_groups=[[0], [1, 2]]), ValueError, text)
        for name, f in [
            ("pmean", pmean),
            ("all_gather", all_gather),
            ("psum_scatter", psum_scatter),
            ("all_to_all", lambda x, axes, **options: all_to_all(x, axes, 0, 0, **options)),
        ]
        for text in [f"{name} over 'j': axis_index_groups=[[0], [1, 2]]: groups have 1 and 2 ranks"]
    ],
    *[
        (f"splits: {label}", lambda x, options=options: all_to_all(x, "i", 0, 0, **options), error, text)
        for label, options, error, text in [
            ("no table", {"splits": [[4, 0]]}, ValueError, "2 lists of 2 numbers, got [[4, 0]]"),
            ("less than none", {"splits": [[4, 0], [-1, 5]]}, ValueError, "splits[1][0] is -1: for no rows, write 0"),
            ("too few", {"splits": [[4, 1], [1, 3]]}, ValueError, "axis 0 of f64[4]{i} must have 5 rows"),
            ("of floats", {"splits": [[4.0, 0], [0, 4]]}, TypeError, "'float' object cannot be interpreted"),
            ("and groups", {"splits": [[4, 0]] * 2, "axis_index_groups": [[0, 1]]}, ValueError, "remove axis_index"),
        ]
    ],
    (
        "splits along two axes",
        lambda x: all_to_all(x.reshape(2, 2), "i", 0, 1, splits=[[2, 0], [0, 2]]),
        ValueError,
        "can be joined only along that axis, not along 1: write concat_axis=0",
    ),
    ("pbroadcast of a varying value", lambda x: pbroadcast(x, "i"), md.VarianceError, "already varies along 'i'"),
    ("pbroadcast along both", lambda x: pbroadcast(x, ("j", "i")), md.VarianceError, "already varies along 'i'"),
    (
        "pscatter of a varying value",
        lambda x: pscatter(x, "i", tiled=True),
        md.VarianceError,
        "pscatter over 'i' takes",
    ),
    ("pmax of complex", lambda x: pmax(1j * x, "i"), TypeError, "pmax: complex numbers have no order"),
    ("pmin of complex", lambda x: pmin(1j * x, "j"), TypeError, "pmin: complex numbers have no order"),
    ("no such dimension", lambda x: all_gather(x, "i", axis=3), IndexError, "all_gather: axis 3 is out of bounds"),
    ("tiled scalar", lambda x: all_gather(x[0], "i", tiled=True), IndexError, "all_gather: axis 0 is out of bounds"),
]


@each(("body", "error", "text"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_errors(body, error, text):
    f = spmd.shard_map(body, mesh=IJ, in_specs=P("i"), out_specs=P())
    with pytest.raises(error) as raised:
        f(numpy.arange(8.0))
    assert text in str(raised.value)
    with pytest.raises(error) as raised:
        md.make_tape(f)(numpy.arange(8.0))
    assert text in str(raised.value)


# Where every pbroadcast is written, of bodies with the argument x:f64[6]{i}: what the errors say to write instead.
EXPLICIT = [
    (lambda x: broadcast(x, "j"), "broadcast over 'j' takes a value that varies", "value: remove these axes"),
    (lambda x: scatter(x, "j", tiled=True, axis=0), "scatter over 'j' takes", "write pscatter over 'j'"),
    (lambda x: reduce(x, ("i", "j")), "is the same on all ranks along 'j'", "write pbroadcast(x, 'j') for it"),
    (lambda x: gather(x, "j"), "gather over 'j' takes", "write pbroadcast(x, 'j') for it"),
    (lambda x: broadcast_varying(x, "j"), "broadcast_varying over 'j' takes", "write pbroadcast(x, 'j') for it"),
    (lambda x: at_root(x, ("j", "i")), "at_root over ('j', 'i') takes", "varies along 'i': each rank has its own"),
    (lambda x: psum(x, "j", axis_index_groups=UNEVEN), "psum over 'j' takes", "write pbroadcast(x, 'j') for it"),
    (lambda x: all_to_all(x[:3], "j", 0, 0, splits=[[1] * 3] * 3), "ragged_all_to_all over", "write pbroadcast(x"),
]


@pytest.mark.parametrize(("body", "label", "instead"), EXPLICIT)
def test_errors_where_pbroadcasts_are_written(body, label, instead):
    f = spmd.shard_map(body, mesh=IJ, in_specs=P("i"), out_specs=P(), auto_pbroadcast=False)
    with pytest.raises(md.VarianceError) as raised:
        f(numpy.arange(12.0))
    assert label in str(raised.value) and instead in str(raised.value)


@each("case", one_case_each(1), ids=lambda case: case.name)
def test_outside_a_shard_map(case):
    with pytest.raises(md.UnboundAxisError, match=f"{case.name} over 'i' was called outside a shard_map"):
        case(numpy.ones(case.shape), "i")


# ---------------------------------------------------------------- without types


def test_without_types_psum_transposes_to_psum():
    f = spmd.shard_map(lambda x: psum(x, "i"), mesh=IJ, in_specs=P("i"), out_specs=P("i"), check_rep=False)

    def f_t(ct):
        return md.linear_transpose(f, numpy.ones(4))(ct)[0]

    # The second sums the cotangents of the unmapped j, which each rank has whole.
    assert [(eqn.primitive.name, eqn.params["axes"]) for eqn in collectives_in(f_t, numpy.ones(4))] == [
        ("psum", ("i",)),
        ("psum", ("j",)),
    ]
    assert not any(eqn.outputs[0].type.variance for eqn in collectives_in(f, numpy.ones(4)))


# ---------------------------------------------------------------- in flight

SWAP = [(0, 1), (1, 0)]


def in_flight(body):
    mesh = simulated(2)
    axis = mesh.axis_names[0]
    return spmd.shard_map(
        lambda x: body(x, ppermute_start(x, axis, SWAP)), mesh=mesh, in_specs=P(axis), out_specs=P(axis)
    )


UNREAD = {
    "added": lambda x, arriving: x + arriving,
    "added to a number": lambda x, arriving: arriving + 1,
    "an operand": lambda x, arriving: np.sum(arriving),
    "NumPy's operand": lambda x, arriving: numpy.sin(arriving),
    "converted": lambda x, arriving: numpy.asarray(arriving),
    "sent": lambda x, arriving: psum(arriving, "x"),
    "indexed": lambda x, arriving: arriving[0],
    "returned": lambda x, arriving: arriving,
}


@pytest.mark.parametrize("read", UNREAD.values(), ids=UNREAD)
def test_a_value_in_flight_cannot_be_read(read):
    for run in (lambda f: f, md.jit, md.grad):
        with pytest.raises(TypeError, match=r"InFlight|\.wait\(\)"):
            run(in_flight(read))(np.arange(4.0))


def test_each_value_is_waited_for_once_where_it_was_started():
    tape = md.make_tape(in_flight(lambda x, arriving: np.sin(x) * arriving.wait() + arriving.wait()))(np.arange(4.0))
    names = [eqn.primitive.name for eqn in tape.equations[0].params["body"].equations]
    assert names == ["ppermute_start", "sin", "ppermute_wait", "multiply", "add"]

    def in_loop(x, arriving):
        return md.scan(lambda carry, _: (carry + arriving.wait(), None), x, None, length=3)[0]

    with pytest.raises(RuntimeError, match=r"wait: a value in flight over 'x': f64.2.{x} was started outside of this"):
        md.jit(in_flight(in_loop))(np.arange(4.0))


def test_the_backward_pass_has_its_messages_in_flight_too():
    f = in_flight(lambda x, arriving: np.sum(np.sin(x) * arriving.wait())[None])
    names = [
        eqn.primitive.name for eqn in collectives_on(md.make_tape(md.grad(lambda x: np.sum(f(x))))(np.arange(4.0)))
    ]
    assert [name for name in names if name.startswith("ppermute")] == ["ppermute_start", "ppermute_wait"] * 2


# ---------------------------------------------------------------- anything


IN_GROUPS = {
    "psum",
    "pmean",
    "pprod",
    "pmax",
    "pmin",
    "pany",
    "pall",
    "preduce",
    "all_gather",
    "psum_scatter",
    "all_to_all",
}
ROOTED = {"broadcast", "broadcast_varying", "at_root", "reduce", "gather", "scatter"}


@st.composite
def random_cases(draw):
    """A mesh, some of its axes in some order, and a collective over them on blocks of some shape."""
    mesh = simulated(*draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    axes = tuple(draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True)))
    n, name = size_of(mesh, axes), draw(st.sampled_from(sorted(REFERENCES)))
    if name == "all_to_all" and draw(st.booleans()):
        row = st.lists(st.integers(0, 2), min_size=n, max_size=n)
        splits = draw(st.lists(row, min_size=n, max_size=n))
        return mesh, axes, Case(name, (max(map(sum, splits)), 2), {"split_axis": 0, "concat_axis": 0, "splits": splits})
    groups = {}
    if name in IN_GROUPS and draw(st.booleans()):
        ranks, n = draw(st.permutations(range(n))), draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
        groups = {"axis_index_groups": [ranks[k : k + n] for k in range(0, len(ranks), n)]}
    splits = name in ("psum_scatter", "pscatter", "all_to_all", "scatter")
    tiled = draw(st.booleans())
    shape = draw(st.lists(st.integers(0, 3), min_size=splits or (tiled and "gather" in name), max_size=3))
    dimension = st.integers(-len(shape), len(shape) - 1)
    options = {"tiled": tiled} if splits or "gather" in name else {}
    if splits:
        at = draw(dimension)
        shape[at] = n * shape[at] if tiled else n
        options[{"psum_scatter": "scatter_dimension", "all_to_all": "split_axis"}.get(name, "axis")] = at
    if name == "all_to_all":
        options["concat_axis"] = draw(dimension)
    if "gather" in name:
        options["axis"] = draw(dimension if tiled else st.integers(-len(shape) - 1, len(shape)))
    if name == "preduce":
        shape, options = [2, *shape], {"combine": affine}
    if name in ("ppermute", "ppermute_start"):
        destinations = draw(st.permutations(range(n)))
        options["perm"] = list(enumerate(destinations))[: draw(st.integers(0, n))]
    if name in ROOTED:
        options["root"] = draw(st.integers(0, n - 1))
    return mesh, axes, Case(name, tuple(shape), {**options, **groups})


@settings(deadline=None, max_examples=60)
@given(random_cases(), st.sampled_from(DTYPES), st.sampled_from(sorted(LAYOUTS)), st.booleans())
def test_any_value(placed, dtype, layout, check_rep):
    mesh, axes, case = placed
    if case.name in ORDERED:
        dtype = dtype.replace("complex128", "float64").replace("complex64", "float32")
    check_values(mesh, [sample(mesh, case, axes, dtype)], layout, check_rep)


@settings(deadline=None, max_examples=40)
@given(random_cases().filter(lambda placed: placed[2].name in TRANSPOSES), st.sampled_from(["float64", "complex128"]))
def test_any_transpose(placed, dtype):
    mesh, axes, case = placed
    check_transpose(mesh, case, axes, dtype)
