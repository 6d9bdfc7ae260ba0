"""Compare this project's states along a mesh axis with JAX's: `python -m tests.benchmarks.jax_states [--differences]`.

Every operation of `jax_states.md` is applied to operands in each of the four states, and differentiated in the body.
Where JAX is installed, the same source runs on both: it is written over the names of `Names`. Compared are the types of
the values, whether the program is accepted, how often it reduces and gathers (a JAX program by its trace, ours
operation by operation and as `jit` compiles it), and its results.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from minidiff.core.states import INVARIANT, REDUCED, UNREDUCED, VARYING

from . import libraries, measure
from .state_names import RANKS, Counts, Names, jax_names, our_names

C = numpy.sin(numpy.arange(16.0)).reshape(4, 4) + 2
X = numpy.cos(numpy.arange(64.0)).reshape(16, 4) + 3
SHORT = {INVARIANT: "I", VARYING: "V", UNREDUCED: "U", REDUCED: "R"}
OF_TYPE = {"{}": "I", "{i}": "V", "{U:i}": "U", "{R:i}": "R"}
PAGE = Path(__file__).with_suffix(".md")
COLLECTIVES = ("all_gather", "all_to_all", "pcast", "pmax", "ppermute", "psum", "psum_scatter")


#: What the operands are made of: `c` is the same on all ranks, `x` varies.
OPERAND = {
    INVARIANT: lambda m, c, x: c,
    VARYING: lambda m, c, x: x,
    UNREDUCED: lambda m, c, x: m.pcast(x, UNREDUCED),
    REDUCED: lambda m, c, x: m.pcast(c, REDUCED),
}


def state_of(m: Names, x: Any) -> str:
    return m.states(x).along("i")


def cotangent_like(m: Names, y: Any) -> Any:
    """A cotangent of `y`, in the state that it has to have."""
    ones = m.np.ones(y.shape, y.dtype)
    state = {UNREDUCED: REDUCED, REDUCED: UNREDUCED}.get(state_of(m, y), state_of(m, y))
    if state == INVARIANT:
        return ones
    ones = m.pcast(ones, REDUCED if state == REDUCED else VARYING)
    return m.pcast(ones, UNREDUCED) if state == UNREDUCED else ones


def result(m: Names, y: Any) -> Any:
    """A value of any state as a result that varies."""
    state = state_of(m, y)
    y = m.psum(y) if state == UNREDUCED else y
    y = m.pcast(y, VARYING) if state != VARYING else y
    return y.reshape(1, -1)


def gradient_of(m: Names, f: Callable) -> Callable:
    """The value and the gradient in the first argument, outside of a shard_map."""

    def both(*args):
        value, pull = m.vjp(lambda w: f(w, *args[1:]), args[0])
        (ct,) = pull(value * 0.0 + 1.0)
        return value, m.see("gradient", ct)

    return both


def program_of(name: str, states: Sequence[str], gradient: bool) -> Callable:
    """A program that applies an operation to operands in these states, and pulls a cotangent back."""

    def program(m: Names):
        def body(c, x):
            operands = [OPERAND[state](m, c + k, x - k) for k, state in enumerate(states)]
            if not gradient:
                return [result(m, m.see("result", m.operations[name](*operands)))]
            y, pull = m.vjp(m.operations[name], *operands)
            gradients = pull(cotangent_like(m, y))
            return [result(m, m.see(f"ct {k}", g)) for k, g in enumerate(gradients)]

        one = m.P("i")
        outs = len(states) if gradient else 1
        return m.shard_map(body, (m.P(), one), [one] * outs), (m.P(), one), (C, X)

    return program


def named_operations(m: Names) -> dict[str, Callable]:
    """The operations of the page by the names of one side."""
    result: dict[str, Callable] = {}
    names = {name: getattr(m.collectives, name) for name in COLLECTIVES}
    libraries.run_page(PAGE, np=m.np, numpy=numpy, operation=result.__setitem__, **names)
    return result


def operation(name: str, f: Callable) -> None:
    """Print the states of results and cotangents by those of operands: for the page."""
    m, cells = our_names(), []
    m.operations[name] = f
    for states in states_of(f):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, gradient = (outcome(m, program_of(name, states, of)) for of in (False, True))
        types = [OF_TYPE[t] for t in [*whole.types.values(), *gradient.types.values()]]
        shown = f"{types[0]} ← {', '.join(types[1:]) or '-'}" if types and not whole.error else "-"
        cells.append(f"{', '.join(SHORT[s] for s in states)}: {shown}")
    for k in range(0, len(cells), 4):
        print("   ".join(cells[k : k + 4]))


def states_of(f: Callable) -> Iterator[tuple[str, ...]]:
    """All states that the operands of `f` may have."""
    return itertools.product(OPERAND, repeat=len(inspect.signature(f).parameters))


def operations(m: Names) -> Iterator[tuple[str, Callable]]:
    for name, f in m.operations.items():
        for states in states_of(f):
            for gradient in (False, True):
                title = f"{'grad ' if gradient else ''}{name}({', '.join(SHORT[s] for s in states)})"
                yield title, program_of(name, states, gradient)
    for inputs, named in itertools.product(OPERAND, repeat=2):
        if named != UNREDUCED:  # of which JAX makes no NumPy array
            yield f"{SHORT[inputs]} returned as {SHORT[named]}", returned(inputs, named, False)
        yield f"grad {SHORT[inputs]} returned as {SHORT[named]}", returned(inputs, named, True)


def returned(inputs: str, named: str, gradient: bool) -> Callable:
    """A program whose body returns a value in one state, where `out_specs` names another."""

    def program(m: Names):
        specs = {
            INVARIANT: m.P(None, None),
            VARYING: m.P("i", None),
            UNREDUCED: m.P(None, None, unreduced={"i"}),
            REDUCED: m.P(None, None, reduced={"i"}),
        }
        inner = (m.P(None, None), m.P("i", None))
        f = m.shard_map(lambda c, x: OPERAND[inputs](m, c, x), inner, specs[named])

        def whole(c, x):
            y = m.see("result", f(c, x))
            return m.np.sum((m.reshard(y, m.P(None, None)) if named in (VARYING, UNREDUCED) else y) ** 2)

        return gradient_of(m, whole) if gradient else f, inner, (C, X)

    return program


# ---------------------------------------------------------------- the report


@dataclasses.dataclass
class Outcome:
    """The outcome of a program: its values' types, its collectives and its results, or why it was rejected."""

    types: dict[str, str] = dataclasses.field(default_factory=dict)
    counts: list[Counts] = dataclasses.field(default_factory=list)
    values: list[numpy.ndarray] = dataclasses.field(default_factory=list)
    error: str = ""

    def shown(self) -> str:
        if self.error:
            return f"rejected: {self.error}"
        counts = [", ".join(f"{n} {kind}" for kind, n in sorted(c.items())) or "-" for c in self.counts]
        types = " ".join(f"{label}:{t}" for label, t in self.types.items())
        return f"{types} | {' / '.join(dict.fromkeys(counts))}"


def outcome(m: Names, program: Callable) -> Outcome:
    m.seen.clear()
    try:
        f, specs, arrays = program(m)
        args = [m.put(x, spec) for x, spec in zip(arrays, specs)]
        counts = m.counts(f, *args)
        values = m.run(f, *args)
        flat = values if isinstance(values, (list, tuple)) else [values]
        return Outcome(dict(m.seen), counts, [numpy.asarray(x) for x in flat])
    except Exception as error:  # whatever it is: it is reported
        return Outcome(error=f"{type(error).__name__}: {str(error).splitlines()[0][:110]}")


def differences(ours: Outcome, theirs: Outcome) -> list[str]:
    if ours.error or theirs.error:
        if ours.error and theirs.error:
            return []
        return ["ours rejects" if ours.error else "JAX rejects"]
    actual = [f"types of {k}" for k in ours.types if ours.types[k] != theirs.types.get(k)]
    for how, local_value, other in zip(("by operation", "compiled"), ours.counts, theirs.counts):
        if local_value != other:
            actual.append(f"{'ours' if local_value <= other else 'JAX'} sends less, {how}")
    close = len(ours.values) == len(theirs.values) and all(map(numpy.allclose, ours.values, theirs.values))
    return actual if close else [*actual, "VALUES"]


def main() -> None:
    options = measure.options(__doc__, None, differences=False, only=())
    ours, theirs = our_names(), jax_names() if libraries.jax(RANKS) else None
    if theirs is None:
        print("JAX is not installed: only this project's column")
    for m in filter(None, (ours, theirs)):
        m.operations = named_operations(m)
    actual: dict[str, list[str]] = {}
    compared = 0
    for name, program in operations(ours):
        if not measure.chosen([name], options.only):
            continue
        local_value, other = outcome(ours, program), outcome(theirs, program) if theirs else None
        different = differences(local_value, other) if other else []
        compared += 1
        for subject in different:
            actual.setdefault(subject, []).append(name)
        if different or not options.differences:
            print(
                f"{name}\n    ours  {local_value.shown()}", *([f"    JAX   {other.shown()}"] if other else []), sep="\n"
            )
            if different:
                print(f"    differs: {', '.join(different)}")
    print(f"\n{compared} programs; {sum(map(len, actual.values()))} differences")
    for subject, names in actual.items():
        print(f"\n{subject} ({len(names)}):", textwrap.fill("; ".join(names), 118), sep="\n")


if __name__ == "__main__":
    main()
