"""Functions on ranks, against the same functions of whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import minidiff as md
import minidiff.numpy as np
from tests.checks.properties import shows
from tests.checks.results import assert_trees_close
from tests.programs.control import over_rows


def summed(f: Callable) -> Callable:
    """Return a number of all results of a function, which is linear in none."""
    return lambda *args: sum(np.sum(np.sin(x)) for x in md.tree.leaves(f(*args)))


def gradient(f: Callable) -> Callable:
    """Return the gradient of `summed(f)` in all arguments."""
    return lambda *args: md.grad(summed(f), tuple(range(len(args))))(*args)


def tangents(f: Callable) -> Callable:
    return lambda *args: md.jvp(f, args, md.tree.map(np.cos, args))


def pairs(args: Sequence) -> Any:
    return md.tree.map(lambda x: np.stack([x, np.sin(x)]), args)


#: What is made of a function, by `vmap` or a loop that stands for it; in batches, of its first argument or of all.
KINDS: dict[str, Callable[[Callable, Callable], Callable]] = {
    "value": lambda f, vmap: f,
    "grad": lambda f, vmap: gradient(f),
    "grad of grad": lambda f, vmap: gradient(gradient(f)),
    "jvp": lambda f, vmap: tangents(f),
    "linearize": lambda f, vmap: lambda *args: md.linearize(f, *args)[1](*md.tree.map(np.cos, args)),
    "jvp of grad": lambda f, vmap: tangents(gradient(f)),
    "jvp of jvp": lambda f, vmap: tangents(tangents(f)),
    "grad of jvp": lambda f, vmap: gradient(tangents(f)),
    "pullbacks": lambda f, vmap: lambda *args: [*map(md.vjp(summed(f), *args)[1], (1.0, -2.0))],
    "vmap": lambda f, vmap: lambda first, *args: vmap(lambda x: f(x, *args))(pairs(first)),
    "vmap of grad": lambda f, vmap: lambda *args: vmap(gradient(f))(*pairs(args)),
    "grad of vmap": lambda f, vmap: lambda *args: gradient(vmap(f))(*pairs(args)),
    "vmap of jvp": lambda f, vmap: lambda *args: vmap(tangents(f))(*pairs(args)),
}


@shows("reference", "modes", "types")
def check_values(f: Callable, args: Sequence, whole: Callable, whole_args: Sequence | None = None) -> None:
    """Values are those of the whole arrays: run, compiled, and on a tape."""
    expected = md.tree.leaves(whole(*(args if whole_args is None else whole_args)))
    tape = md.make_tape(f)(*args)
    tape.check()
    for actual in (f(*args), md.jit(f)(*args), tape(*md.tree.leaves(args))):
        assert_trees_close(md.tree.leaves(actual), expected)


def check_agree(
    f: Callable, whole: Callable, args: Sequence, split: Any = None, rtol: float = 1e-9, atol: float = 1e-10
) -> None:
    """Values and gradients, run and compiled, are those of the whole arrays; `f` takes `split`, if that is given."""
    for of in (lambda f: f, gradient):
        expected = of(whole)(*args)
        for run in (of(f), md.jit(of(f))):
            assert_trees_close(run(*(args if split is None else split)), expected, rtol=rtol, atol=atol)


@shows("reference", "derivatives", "modes", "types")
def check_kinds(f: Callable, args: Sequence, whole: Callable, kinds: Iterable[str]) -> None:
    """Values, derivatives and batches of these kinds are those of whole arrays, by a loop over the batches."""
    for kind in kinds:
        check_values(KINDS[kind](f, md.vmap), args, KINDS[kind](whole, over_rows))


@shows("reference", "derivatives", "modes", "types")
def check_derivatives(f: Callable, args: Sequence, whole: Callable, whole_args: Sequence | None = None) -> None:
    """Values are those of whole arrays; so are gradients in all arguments of floats, their gradients, and tangents."""
    whole_args = args if whole_args is None else whole_args
    chosen = tuple(k for k, x in enumerate(args) if all(np.asarray(a).dtype.kind == "f" for a in md.tree.leaves(x)))

    def second(f: Callable) -> Callable:
        gradient = md.grad(summed(f), chosen)
        return md.grad(lambda *args: sum(np.sum(x**2) for x in md.tree.leaves(gradient(*args))), chosen)

    def tangent(f: Callable) -> Callable:
        def in_place(args: Sequence, *xs: Any) -> Any:
            return f(*[xs[chosen.index(k)] if k in chosen else x for k, x in enumerate(args)])

        return lambda *args: md.jvp(lambda *xs: in_place(args, *xs), *[[args[k] for k in chosen]] * 2)[1]

    check_values(f, args, whole, whole_args)
    check_values(md.grad(summed(f), chosen), args, md.grad(summed(whole), chosen), whole_args)
    for transformed in (second, tangent):
        assert_trees_close(transformed(f)(*args), transformed(whole)(*whole_args), rtol=1e-7)
