"""The collectives on MPI ranks: the checks of the simulated ones, on meshes of as many ranks as there are."""

import functools

import numpy
import pytest
from mpi4py import MPI

import minidiff as md
import spmd
from collectives import all_gather, axis_index, pmax, psum
from spmd import P
from tests.collective_checks import (
    LAYOUTS,
    STORED,
    Case,
    axes_of,
    cases,
    check_case_counts,
    check_compiled,
    check_derivatives,
    check_dtypes,
    check_extremum,
    check_nan,
    check_stored,
    check_transposes,
    check_values,
    check_vmapped,
    one_case_each,
    sample,
    size_of,
    whole,
)
from tests.programs import assert_trees_close
from tests.rank_programs import random_program

SHAPES = {
    1: [(1,), (1, 1)],
    2: [(2,), (1, 2)],
    3: [(3,), (3, 1)],
    4: [(4, 1), (2, 2)],
    8: [(2, 2, 2)],
}
on_ranks = pytest.mark.parallel(list(SHAPES))


@functools.cache
def mesh_of(shape):
    """A mesh, once in a session: an MPI has only so many communicators."""
    return spmd.make_mesh(shape, ("x", "y", "z")[: len(shape)], backend="mpi")


def meshes():
    return [mesh_of(shape) for shape in SHAPES[MPI.COMM_WORLD.size]]


def placements():
    """The meshes, each with its axes alone and in every tuple of several."""
    return [(mesh, axes) for mesh in meshes() for axes in axes_of(mesh)]


def backwards():
    """The meshes, each with all its axes in the order that is not that of its ranks."""
    return [(mesh, mesh.axis_names[::-1]) for mesh in meshes()]


@on_ranks
def test_values():
    mesh, axes = backwards()[-1]
    check_values(mesh, [sample(mesh, case, axes) for case in cases(size_of(mesh, axes))])


@on_ranks
def test_values_along_each_axes():
    for mesh in meshes():
        check_values(
            mesh, [sample(mesh, case, axes) for axes in axes_of(mesh) for case in one_case_each(size_of(mesh, axes))]
        )


@on_ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_each_layout(layout):
    mesh, axes = backwards()[-1]
    check_values(mesh, [sample(mesh, case, axes) for case in one_case_each(size_of(mesh, axes))], layout)


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("kind", STORED)
def test_values_of_arrays_that_are_stored_in_other_ways(kind):
    mesh = meshes()[0]
    check_stored(mesh, mesh.axis_names, kind)


@on_ranks
def test_values_of_each_dtype():
    check_dtypes(*backwards()[-1])


@on_ranks
def test_vectorised_values():
    for mesh, axes in backwards():
        check_vmapped(mesh, one_case_each(size_of(mesh, axes)), axes)


@on_ranks
def test_values_of_an_operand_that_does_not_vary():
    for mesh, axes in backwards():
        check_values(mesh, [sample(mesh, case, axes, held=()) for case in one_case_each(size_of(mesh, axes))])


@on_ranks
def test_compiled():
    mesh, axes = backwards()[-1]
    for case in one_case_each(size_of(mesh, axes)):
        check_compiled(mesh, case, axes)


@on_ranks
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_programs(seed):
    program = random_program(seed, SHAPES[MPI.COMM_WORLD.size][-1], further=True)
    mesh = spmd.make_mesh(tuple(program.shape.values()), tuple(program.shape), backend="mpi")
    args = program.example(seed)
    numbers = tuple(range(len(args)))
    expected = md.value_and_grad(program.on_lists(), numbers)(*args)
    for options in ({}, {"check_rep": False}):
        found = md.value_and_grad(program.on_ranks(mesh, **options), numbers)
        for f in (found, md.jit(found)):
            assert_trees_close(md.tree.map(whole, f(*args)), expected, rtol=1e-7, atol=1e-9)


@on_ranks
def test_nan_is_the_extremum_everywhere():
    for mesh, axes in placements():
        check_nan(mesh, axes)


@on_ranks
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_transposes(dtype):
    for mesh, axes in backwards():
        check_transposes(mesh, one_case_each(size_of(mesh, axes)), axes, dtype)


@on_ranks
def test_derivatives():
    mesh, axes = backwards()[-1]
    check_derivatives(mesh, [Case(name, (2,)) for name in ("psum", "pmean", "pmax", "pmin")], axes[:2])


@on_ranks
def test_extrema_have_the_derivatives_of_numpys():
    mesh, axes = backwards()[-1]
    for name in ("pmax", "pmin"):
        check_extremum(mesh, name, axes[:2])


@on_ranks
def test_counts():
    for mesh, axes in backwards():
        for case in one_case_each(size_of(mesh, axes)):
            check_case_counts(mesh, case, axes)


@on_ranks
def test_without_types():
    for mesh, axes in backwards():
        found = one_case_each(size_of(mesh, axes))
        check_values(mesh, [sample(mesh, case, axes) for case in found], check_rep=False)
        check_transposes(mesh, found, axes, check_rep=False)


@on_ranks
def test_an_error_on_all_ranks_leaves_the_mesh_usable():
    for mesh in meshes():
        check_usable_after_an_error(mesh)


def check_usable_after_an_error(mesh):
    def total(axes):
        body = functools.partial(psum, axis_name=axes)
        return spmd.shard_map(body, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P())

    x = numpy.arange(float(mesh.size))
    with pytest.raises(md.UnboundAxisError, match="no axis 'nowhere' here"):
        total("nowhere")(x)
    assert total(mesh.axis_names)(x) == x.sum()


@on_ranks
def test_ranks_go_the_same_way_where_the_type_says_that_they_agree():
    for mesh in meshes():
        check_branch(mesh, mesh.axis_names)


def check_branch(mesh, axes):
    def body(x):
        return 2 * x if pmax(axis_index(axes), axes) == mesh.size - 1 else x

    x = numpy.arange(float(mesh.size))
    doubled = spmd.shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(axes))(x)
    numpy.testing.assert_array_equal(whole(doubled), 2 * x)


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    ("dtype", "advice"),
    [(object, "to one of numbers"), ("M8[D]", "subtract a reference time"), ("m8[s]", "divide it by a unit")],
)
def test_arrays_that_are_not_of_numbers_are_refused(dtype, advice):
    """What moves is bytes; those of an object are an address, which means nothing elsewhere."""
    rows = numpy.array([1, 2]).astype(dtype)
    for mesh in (mesh_of((2,)), spmd.make_mesh((2,), ("x",), backend="simulated")):
        take = spmd.shard_map(lambda x: all_gather(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        with pytest.raises(TypeError, match=rf"args\[0\]: .*got one of dtype {rows.dtype.name[:6]}.*{advice}"):
            take(rows)
        body = spmd.shard_map(lambda x: all_gather(rows, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        with pytest.raises(TypeError, match=rf"got one of dtype {rows.dtype.name[:6]}.*{advice}"):
            body(numpy.zeros(2))


@pytest.mark.parallel([2, 4])
def test_a_set_of_axes_has_one_order_on_all_ranks():
    """A set's own order is that of hashes, which each process salts for itself."""
    for mesh in meshes():
        x, axes = numpy.arange(float(mesh.size)), mesh.axis_names

        def body(x, axes=axes):
            found = [psum(x, set(axes)), psum(x, md.typeof(x).variance), pmax(x, frozenset(axes))]
            with pytest.raises(TypeError, match=r"all_gather over the set \{'x'.*'x'"):
                all_gather(x, set(axes))
            return found

        for f in (body, md.jit(body)):
            total = spmd.shard_map(f, mesh=mesh, in_specs=P(axes), out_specs=P())
            numpy.testing.assert_array_equal(total(x), [[x.sum()], [x.sum()], [x.max()]])
