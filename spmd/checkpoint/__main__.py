"""python -m spmd.checkpoint PATH: list what is saved there, and say what of it is damaged."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from spmd.checkpoint.files import STEP, Array, CheckpointError, Saved, Scalar, saved_steps, shorten
from spmd.mesh.launch import end_when_unread, silence_other_ranks
from spmd.show import Table

HEADER = ("leaf", "dtype", "shape or value", "spec", "mesh", "blocks", "bytes")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m spmd.checkpoint",
        description="Prints a table of the leaves of each saved step, and reads all of it. Exit status 1: something is "
        "damaged, or nothing is complete.",
    )
    parser.add_argument("path", type=Path, help="the directory of a run, or of one of its steps")
    with silence_other_ranks():
        path = parser.parse_args(argv).path
    chosen = saved_steps(path, complete=False)
    if not chosen and (named := STEP.fullmatch(path.name)):
        path, chosen = path.parent, [int(named[1])]
    with end_when_unread(), silence_other_ranks():
        complete = [show(path, step) for step in chosen]
        if not any(complete):
            print(f"{path} has no complete step")
    return int(not any(complete) or None in complete)


def show(path: Path, step: int) -> bool | None:
    """Print a step. Returns whether it is complete; None if it is damaged."""
    if step not in saved_steps(path):
        print(f"step {step} is incomplete: it is being written, or its run was killed\n")
        return False
    try:
        saved = Saved(path, step)
    except CheckpointError as error:
        print(f"step {step}: {error}\n")
        return None
    arrays = [leaf for leaf in saved.leaves.values() if isinstance(leaf, Array)]
    print(f"step {step}, saved by {saved.backend} ranks; notes: {', '.join(saved.notes) or 'none'}")
    total = ("", "", "", "", "", str(sum(len(a.blocks) for a in arrays)), f"{sum(a.nbytes for a in arrays):,}")
    print(Table(HEADER, [row(name, leaf) for name, leaf in saved.leaves.items()], total))
    problems = damage(saved)
    print("\n".join(problems), end="\n\n" if problems else "\n")
    return None if problems else True


def row(name: str, leaf: Array | Scalar) -> tuple[str, ...]:
    name = shorten(name)
    if isinstance(leaf, Scalar):
        return name, leaf.type, repr(leaf.value)[:20], "", "", "", ""
    mesh = ", ".join(f"{axis}: {size}" for axis, size in leaf.mesh.items())
    return name, leaf.dtype, str(tuple(leaf.shape)), leaf.spec, mesh, str(len(leaf.blocks)), f"{leaf.nbytes:,}"


def damage(saved: Saved) -> list[str]:
    """Return the damage of a step: one message for each block that cannot be read."""
    problems = []
    for name, leaf in saved.leaves.items():
        for block in leaf.blocks if isinstance(leaf, Array) else ():
            try:
                saved.block(name, block)
            except CheckpointError as error:
                problems.append(str(error))
    return problems


if __name__ == "__main__":
    sys.exit(main())
