"""Mixtures of experts on MPI ranks: those of whole arrays, with the documented communication."""

import itertools

import pytest
from mpi4py import MPI

from tests import expert_programs as programs

everywhere = pytest.mark.parallel([2, 4, 8])
RANKS = MPI.COMM_WORLD.size


@everywhere
def test_mixtures_are_those_of_whole_arrays():
    for shape, gate in zip(itertools.cycle(programs.SHAPES[RANKS]), programs.GATES):  # simulated ranks have them all
        programs.check_mixture(shape, *gate)


@everywhere
def test_assigned_experts_drop_no_token():
    for assignment in programs.ASSIGNMENTS:
        programs.check_assigned(RANKS, assignment)


@everywhere
def test_experts_meet_nothing_but_tokens():
    for name in programs.PARTIAL_EXPERTS:
        programs.check_partial_experts(name, RANKS)
