"""Programs against what they mean: derivatives and batches of the one are those of the other, however it is run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy

import minidiff as md
from tests.checks.of_whole import KINDS
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close
from tests.checks.samples import check_each
from tests.programs.control import over_rows

#: Kinds of derivatives and batches that `check_meaning` takes: of programs without a backward pass, the first ones.
FORWARD = ("value", "jvp", "jvp of jvp", "linearize", "vmap", "vmap of jvp")
REVERSE = ("grad", "grad of grad", "pullbacks", "vmap of grad", "grad of vmap")
MIXED = ("jvp of grad", "grad of jvp")
ALL = FORWARD + REVERSE + MIXED


def _recorded(f: Callable) -> Callable:
    return lambda *args: md.make_tape(f)(*args)(*args)


#: What is run of a function, for a kind of it.
RUNS: dict[str, Callable[[Callable, Callable], Callable]] = {
    "run": lambda of, f: of(f),
    "tape": lambda of, f: _recorded(of(f)),
    "jit": lambda of, f: md.jit(of(f)),
    "of jit": lambda of, f: of(md.jit(lambda *args: f(*args))),
    "of checkpoint": lambda of, f: of(md.checkpoint(lambda *args: f(*args))),
}


@shows("reference", "derivatives", "modes")
def check_meaning(
    f: Callable,
    meaning: Callable,
    args: Sequence,
    kinds: Iterable[str] = ALL,
    runs: Iterable[str] = ("run",),
    **tolerances: float,
) -> None:
    """Compare kinds of a program, run so, with those of its meaning.

    Arguments other than arrays of floats are constants; results other than floats have no derivatives.
    """
    moving = [i for i, x in enumerate(args) if isinstance(x, numpy.ndarray) and x.dtype.kind == "f"]
    arrays = [args[i] for i in moving]

    def floats(f: Callable) -> Callable:
        def of_moving(*xs: Any) -> list:
            full = {**dict(enumerate(args)), **dict(zip(moving, xs))}
            return [y for y in md.tree.leaves(f(*full.values())) if md.typeof(y).dtype.kind == "f"]

        return of_moving

    @functools.cache
    def expected(kind: str) -> list:
        return md.tree.leaves(KINDS[kind](floats(meaning), over_rows)(*arrays))

    def check(kind: str, run: str) -> None:
        actual = RUNS[run](lambda f: KINDS[kind](floats(f), md.vmap), f)(*arrays)
        assert_trees_close(md.tree.leaves(actual), expected(kind), **tolerances)

    runs = [*runs]
    check_each((f"{kind}, {run}", functools.partial(check, kind, run)) for kind in kinds for run in runs)
