"""The gradient of a sum over MPI ranks that nobody wrote: the same numbers, and one rank warns."""

import warnings

import numpy
import pytest
from mpi4py import MPI

import spmd
from collectives import psum
from minidiff import VarianceWarning
from spmd import P
from tests import summed_programs as programs
from tests.samples import each
from tests.summed_programs import AROUND, QUIET, SAID, SILENT, W, data, gradients, mapped, warned

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def mesh_of_all():
    return spmd.make_mesh((SIZE,), ("i",), backend="mpi")


@pytest.mark.parallel(2)
@each("around", AROUND)
@each("name", SILENT)
def test_one_rank_warns_of_the_sum(name, around):
    mesh = mesh_of_all()
    found, result = warned(lambda: AROUND[around](mapped(mesh, SILENT[name]))(W, data(mesh)))
    assert [file for file, _ in found] == ([programs.__file__] if RANK == 0 else [])
    numpy.testing.assert_allclose(result, gradients(mesh).sum(0), rtol=1e-12)


@pytest.mark.parallel(2)
@each("name", SAID)
def test_none_warns_of_what_is_said(name):
    mesh, (body, over_ranks) = mesh_of_all(), SAID[name]
    found, result = warned(lambda: mapped(mesh, body)(W, data(mesh)))
    assert found == []
    numpy.testing.assert_allclose(result, over_ranks(gradients(mesh), axis=0), rtol=1e-12)


@pytest.mark.parallel(2)
@each("name", QUIET)
def test_nor_of_what_is_no_sum(name):
    mesh = mesh_of_all()
    assert warned(lambda: mapped(mesh, QUIET[name])(W, data(mesh)))[0] == []


@pytest.mark.parallel(2)
def test_one_rank_warns_of_copies():
    mesh = mesh_of_all()
    f = spmd.shard_map(lambda x: psum(x, "i"), mesh, in_specs=P("i"), out_specs=P("i"))
    found, result = warned(lambda: f(numpy.ones(4)))
    assert [text.split(":")[0] for _, text in found] == (["the result has type f64[2]"] if RANK == 0 else [])
    numpy.testing.assert_array_equal(result.gather(), [2, 2, 2, 2])


@pytest.mark.parallel(2)
def test_a_filter_that_makes_it_an_error_does_on_all_ranks():
    mesh = mesh_of_all()
    with warnings.catch_warnings(), pytest.raises(VarianceWarning, match="the sum of the results over 'i'"):
        warnings.simplefilter("error", VarianceWarning)
        mapped(mesh, SILENT["grad"])(W, data(mesh))
    numpy.testing.assert_array_equal(mapped(mesh, lambda w, x: psum(w[0] * x[0, 0] * 0, "i"))(W, data(mesh)), 0)
