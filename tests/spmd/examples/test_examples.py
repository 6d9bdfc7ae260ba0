"""Scripts of `digits`: `block`, `data_parallel`, `fully_sharded`, `fsdp_tp`, `pipeline`, `tensor_parallel`; kills."""

import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import minidiff as md
import spmd
from spmd.data import batches
from spmd.examples import block, digits, loop
from spmd.parallel import cross_entropy, init_params, loss
from tests import PATIENCE
from tests.checks.launch import launching, mpiexec
from tests.checks.samples import each
from tests.programs.examples import EXAMPLES, run_program_of_the_first_steps, train


def alone(example, steps, seed):
    """The losses of the same training, without any ranks."""
    rng = np.random.default_rng(seed)
    data, held_out = digits.load_digits(rng, example.layers[-1])
    params = init_params(rng, example.layers)
    whole = batches(data, spmd.make_mesh((1,), ("i",), backend="simulated"), spmd.P(), batch=digits.BATCH, seed=seed)
    run = digits.DigitsRun(params, example.optimizer.init(params), whole, held_out)
    for _ in range(steps):
        run.advance(md.value_and_grad(partial(loss, error=cross_entropy)), example.optimizer)
    return run.losses


@each("name, ranks, seed", zip(EXAMPLES, (2, 8, 4, 2, 8, 4), range(6)))
def test_losses_are_those_of_one_process(name, ranks, seed):
    run = train(name, ranks, backend="simulated", steps=3, seed=seed)
    np.testing.assert_allclose(run.losses, alone(EXAMPLES[name], 3, seed), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_script(name, capsys):
    """It shows the mesh, what a step communicates, with types and without, which is counted, and the outcome."""
    example, jit = EXAMPLES[name], name in ("block", "fsdp_tp")
    digits.main(example, "", ["--ranks=2", "--steps=2", "--seed=1", "--no-tape", "--jit" if jit else "--no-jit"])
    out, err = capsys.readouterr()
    mesh = example.mesh(2, "simulated")
    run = digits.train(example, mesh, 2, seed=1, jit=jit)
    assert str(mesh) in out and "No MPI launcher: 2 ranks are simulated" in out and "2/2" in err
    typed, untyped, nbytes = re.search(r"^total +(\d+) +(\d+) +([\d,]+)", out, re.M).groups()
    assert (sum(mesh.calls.values()), sum(mesh.bytes.values())) == (2 * int(typed), 2 * int(nbytes.replace(",", "")))
    assert int(typed) < int(untyped)
    end = f"final loss {run.losses[-1]:.6f}, held-out accuracy {digits.accuracy(example, run):.4f}"
    assert end in out
    digits.show_one_rank(example, steps=1, jit=False)  # whatever the ranks that its axes need
    assert re.fullmatch(r"one rank alone takes about [\d.]+ s for 1 steps\n", capsys.readouterr().out)


def test_the_program_of_the_first_steps(capsys):
    actual = run_program_of_the_first_steps()
    assert actual["mesh"].backend == "simulated"
    np.testing.assert_allclose(actual["w"], [1, -2, 3], atol=1e-6)
    shown = capsys.readouterr().out
    assert shown.startswith("w = [ 1. -2.  3.]\ncollective ") and re.search(r"psum +batch +1 +32 +forward", shown)


def test_the_demo_makes_its_point_in_25_lines(capsys):
    digits.main(block.EXAMPLE, "", ["--ranks", "4", "--steps", "1", "--jit"])
    before = capsys.readouterr().out.partition("\nTraining")[0]
    assert len(before.splitlines()) <= 25
    assert re.search(r"\S+:f64\[240,10\] = psum\(\S+, 'ranks'\) +# all-reduce\n", before)
    assert re.search(r"^total +1 +2 +19,200 +38,480 +2.00\nboth give the same numbers$", before, re.M)


#: The options of each example.
OPTIONS = {
    **dict.fromkeys(EXAMPLES, ("--steps", "--seed", "--ranks", "--checkpoint PATH", "--every N", "--tape", "--jit")),
    **dict.fromkeys(("heat", "wave", "shallow_water"), ("--shape", "--steps", "--ranks")),
}


def test_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    for name, options in OPTIONS.items():
        with pytest.raises(SystemExit):
            runpy.run_path(importlib.util.find_spec(f"spmd.examples.{name}").origin, run_name="__main__")
        shown = capsys.readouterr().out
        assert f"usage: python -m spmd.examples.{name} " in shown and f" python -m spmd.examples.{name}\n" in shown
        assert [option for option in options if option not in shown] == []


def test_options_that_end_the_script(tmp_path, capsys):
    """The message says what to do, and nothing else."""
    run = partial(digits.main, EXAMPLES["data_parallel"], "")
    options = ["--ranks=2", "--no-tape", "--steps=1", f"--checkpoint={tmp_path}"]
    run(options)
    run(options)
    assert f"Going on from step 1, saved in {tmp_path}." in capsys.readouterr().out
    for wrong, message in {
        "--steps=0": "a number of at least 1, got 0",
        "--every=-1": "a number of at least 1, got -1",
        "--ranks=two": "two",
        "--checkpoint= ": "the directory to save to is '': name one",
        "--seed=5": "seed = 0; this one has seed = 5",
    }.items():
        with pytest.raises(SystemExit) as end:
            run([*options, wrong])
        assert end.value.code and message in capsys.readouterr().err


# ---------------------------------------------------------------- as programs, on MPI ranks


def test_the_program_on_mpi_ranks():
    """It learns."""
    run = mpiexec(4, "-m", "spmd.examples.data_parallel", "--steps", "70")
    assert run.returncode == 0, run.stderr
    assert "Mesh(batch: 4; 4 ranks, mpi)" in run.stdout and "70/70" in run.stderr  # the progress bar
    assert float(re.search(r"held-out accuracy ([\d.]+)", run.stdout).group(1)) >= 0.95


@pytest.mark.parametrize("ranks, which", [(None, signal.SIGTERM), (2, signal.SIGINT)])
def test_interrupted(tmp_path, ranks, which):
    """The launcher is told to end: so does the job, soon, without a traceback, and with a hint."""
    command = ["-m", "spmd.examples.fully_sharded", "--steps", "1000000", "--every", "1", "--checkpoint", str(tmp_path)]
    with launching(ranks, *command) as job:
        while not list(tmp_path.glob("*/index.json")):
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(which)
        _, err = job.communicate(timeout=PATIENCE)
    mpi = MPI.Get_library_version() if ranks else ""
    assert job.returncode == (1 if mpi.startswith("Open MPI") else 130)  # its launcher has one of its own
    assert "Traceback" not in err
    if not mpi.startswith("Open MPI v5"):  # whose launcher passes on nothing more, once it is told to end
        assert "Interrupted. Started again, with the same options, it goes on from what was saved last." in err


@pytest.mark.parametrize("arguments", ["-u -m spmd", "-m spmd.examples.data_parallel --steps 1"])
def test_programs_end_quietly_where_nobody_reads_what_they_print(arguments):
    reader, writer = os.pipe()
    os.close(reader)  # as `head -1` does, before they have printed all
    with os.fdopen(writer, "w") as out:
        command = [sys.executable, *arguments.split()]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_without_tqdm_there_is_no_progress_bar(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(loop, "tqdm", runpy.run_path(loop.__file__)["tqdm"])
    digits.main(EXAMPLES["data_parallel"], "", ["--steps", "2", "--no-tape"])
    out, err = capsys.readouterr()
    assert "final loss" in out and err == ""
