"""The common part of the examples: the training loop with checkpoints and progress, options, and how a script ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any, Protocol

import spmd
from spmd.checkpoint import CheckpointError, Checkpoints
from spmd.mesh.launch import end_job, end_when_unread, ranks_on_this_machine

try:
    from tqdm import tqdm
except ImportError:  # without it there is no progress bar
    tqdm = None


class Run(Protocol):
    """The state of a training run: the losses so far, and a tree to save and to restore."""

    losses: list[float]

    def tree_to_save(self) -> Any: ...

    def restore(self, saved: Any, losses: list[float]) -> None: ...


def train_loop(
    run: Run,
    advance: Callable[[], None],
    mesh: spmd.Mesh,
    steps: int,
    options: dict[str, Any],
    checkpoint: str | None = None,
    every: int = 50,
    progress: bool = False,
    tokens: int = 0,
) -> None:
    """Call `advance` until the run has made `steps` steps, each of which adds to `run.losses`.

    With `checkpoint`, a directory, resume the run that was saved there, on any number of ranks, and save every `every`
    steps and at the end. `options` are those that the losses depend on. `tokens` is the number of tokens in a step;
    the progress bar shows them by the second. Raises CheckpointError if the saved run is damaged, or was made with
    other options, or if another run is saving there.
    """
    with contextlib.ExitStack() as stack:
        saved = None if checkpoint is None else stack.enter_context(Checkpoints(checkpoint, mesh, keep=2))
        if saved and saved.latest() is not None:
            _, notes = saved.load({})
            check_same_run(checkpoint, notes.get("options", {}), options)
            run.restore(saved.load(run.tree_to_save())[0], notes["losses"])
            if progress:
                print(f"Going on from step {len(run.losses)}, saved in {checkpoint}.\n", flush=True)
        if len(run.losses) > steps:
            raise CheckpointError(
                f"{checkpoint}: this run has made {len(run.losses)} steps already, more than {steps}: ask for at least "
                "that many (--steps), or save to another directory (--checkpoint)"
            )
        bar = None
        if tqdm is not None and progress:
            bar = stack.enter_context(tqdm(initial=len(run.losses), total=steps, unit="step"))
        while (step := len(run.losses)) < steps:
            advance()
            if bar is not None:
                speed = {"tokens/s": f"{tokens * (bar.format_dict['rate'] or 0):,.0f}"} if tokens else {}
                bar.set_postfix(loss=f"{run.losses[-1]:.4f}", **speed, refresh=False)
                bar.update()
            if saved and ((step + 1) % every == 0 or step + 1 == steps):
                saved.save(step + 1, run.tree_to_save(), notes={"options": options, "losses": run.losses})


def check_same_run(checkpoint: str | None, was: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise CheckpointError if a saved run was made with other options."""
    if names := [name for name in now if was.get(name) != now[name]]:
        one, other = (", ".join(f"{name} = {options.get(name)}" for name in names) for options in (was, now))
        raise CheckpointError(
            f"{checkpoint} was made by a run with {one}; this one has {other}. Use the same options, or another "
            "--checkpoint"
        )


# ---------------------------------------------------------------- scripts


def positive_integer(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"a number of at least 1, got {number}")
    return number


def parser_of(example: str, description: str | None, steps: int, random: str) -> argparse.ArgumentParser:
    """A parser of the options that all examples have. `random` names what the seed draws."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"python -m spmd.examples.{example}", None, description, formatter_class=raw)
    add = parser.add_argument
    add("--steps", type=positive_integer, default=steps, help="training steps, in all (default: %(default)s)")
    add("--seed", type=int, default=0, help=f"of {random} (default: 0)")
    add("--checkpoint", metavar="PATH", help="save the run in this directory, and go on from what is saved there")
    add(
        "--every", type=positive_integer, default=50, metavar="N", help="save after each N steps (default: %(default)s)"
    )
    return parser


def show_mesh(mesh: spmd.Mesh) -> None:
    """Print a mesh, and whether its ranks are simulated, or share processors."""
    print(mesh)
    if mesh.backend == "simulated":
        print(
            f"No MPI launcher: {mesh.size} ranks are simulated in this process. For real ones, mpirun -n {mesh.size}."
        )
    elif (ranks := ranks_on_this_machine()) > (processors := os.cpu_count() or ranks):
        print(f"{ranks} ranks take turns on {processors} processors, so expect no speed-up.")


def run_script(act: Callable, options: argparse.Namespace) -> None:
    """Call `act(options)` as a script does. Ctrl-C and SIGTERM end it, on all ranks."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with end_when_unread():
            act(options)
    except CheckpointError as error:
        end_job(str(error), 1)
    except KeyboardInterrupt:
        go_on = "Started again, with the same options, it goes on from what was saved last."
        text = f"Interrupted. {go_on if options.checkpoint else 'Nothing was saved: see --checkpoint.'}"
        end_job(text, 130, patience=0.3)  # launchers give ranks no more than a second until they kill them
