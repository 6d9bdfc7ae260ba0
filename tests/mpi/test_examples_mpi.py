"""The examples on MPI ranks: the numbers of simulated ones; killed and taken up again, also on more ranks."""

import re

import numpy as np
import pytest
from mpi4py import MPI

import spmd
from spmd.examples import digits, study
from spmd.examples.loop import show_mesh
from spmd.examples.study import study_mesh
from tests.checks.results import by_rank_0
from tests.course.bug_page import NAMES, blocks, run
from tests.programs.examples import (
    EXAMPLES,
    assert_same_run,
    print_study,
    run_program_of_the_first_steps,
    train,
    train_until,
)

WORLD = MPI.COMM_WORLD
RANKS = WORLD.size


#: Studies of which the rank tables have no row, and one of each kind of message.
STUDIES = ["curriculum", "loss_spikes", "placement", "recurrence", "saturation", "send_receive", "two_rings"]


@pytest.mark.parallel(4)
@pytest.mark.parametrize("name", ["fsdp_tp", "pipeline"])
def test_killed_and_taken_up_again(path, name):
    whole = train(name, RANKS, steps=4)
    train_until(3, name, RANKS, path, steps=4)
    assert_same_run(train(name, RANKS, path, steps=4), whole)

    def simulated():
        run = train(name, RANKS, backend="simulated", steps=4)
        return run.losses, digits.accuracy(EXAMPLES[name], run)

    losses, accuracy = by_rank_0(simulated)
    np.testing.assert_allclose(whole.losses, losses, rtol=0, atol=1e-10)
    assert digits.accuracy(EXAMPLES[name], whole) == accuracy


@pytest.mark.parallel(4)
@pytest.mark.parametrize("name", ["fsdp_tp", "pipeline"])
def test_on_another_number_of_ranks(path, name):
    """Two ranks begin, and all go on."""
    half = WORLD.Split(WORLD.rank // 2)
    if WORLD.rank < 2:
        example = EXAMPLES[name]
        mesh = spmd.make_mesh(example.shape(2), example.axes, comm=half)
        digits.train(example, mesh, 2, checkpoint=str(path))
    WORLD.barrier()
    run = train(name, RANKS, path, steps=4)
    half.Free()
    np.testing.assert_allclose(run.losses, train(name, RANKS, steps=4).losses, rtol=0, atol=1e-10)


@pytest.mark.parallel(4)
@pytest.mark.parametrize("name", STUDIES)
def test_studies_print_what_they_print_on_simulated_ranks(name, monkeypatch, capsys):
    printed = print_study(name, [], capsys)
    if WORLD.rank:
        assert printed == ""
        return
    monkeypatch.setattr(study, "study_mesh", lambda axes, ranks: study_mesh(axes, ranks, "simulated"))
    assert printed == print_study(name, [], capsys)


@pytest.mark.parallel(4)
def test_the_program_of_the_first_steps(capsys):
    actual = run_program_of_the_first_steps()
    assert actual["mesh"].backend == "mpi" and actual["mesh"].calls["psum"] == 100  # one in each step
    np.testing.assert_allclose(actual["w"], [1, -2, 3], atol=1e-6)
    shown = capsys.readouterr().out
    assert shown.startswith("w = [ 1. -2.  3.]\ncollective ") if WORLD.rank == 0 else not shown


@pytest.mark.parallel(2)
@pytest.mark.parametrize("processors", [1, 64])
def test_ranks_that_take_turns_say_so(processors, monkeypatch, capsys):
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    show_mesh(spmd.make_mesh((2,), ("i",)))
    assert ("ranks take turns on 1 processors" in capsys.readouterr().out) == (processors == 1)


@pytest.mark.parallel(2)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "recompilation"])  # which ends the job
def test_the_bugs_are_caught_on_all_ranks(name):
    printed = blocks(name)[1]
    assert run(name) == (printed if WORLD.rank == 0 else re.sub("^VarianceWarning.*\n", "", printed, flags=re.M))
