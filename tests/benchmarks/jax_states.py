"""Compare the four states along a mesh axis with JAX's: `python -m tests.benchmarks.jax_states [--differences]`.

Every operation is applied to operands in each of the four states, and differentiated in the body. Where JAX is
installed, the same source runs on both: it is written over the names of `Names`. Compared are the types of the values,
whether the program is accepted, how often it reduces and gathers (a JAX program by its trace, ours operation by
operation and as `jit` compiles it), and its results.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from minidiff.core.states import INVARIANT, REDUCED, UNREDUCED, VARYING

from . import libraries, measure
from .state_names import RANKS, Counts, Names, jax_names, our_names

C = numpy.sin(numpy.arange(16.0)).reshape(4, 4) + 2
X = numpy.cos(numpy.arange(64.0)).reshape(16, 4) + 3
SHORT = {INVARIANT: "I", VARYING: "V", UNREDUCED: "U", REDUCED: "R"}


UNARY: dict[str, Callable] = {
    "pcast varying": lambda m, x: m.pcast(x, "varying"),
    "pcast reduced": lambda m, x: m.pcast(x, "reduced"),
    "pcast unreduced": lambda m, x: m.pcast(x, "unreduced"),
    "psum": lambda m, x: m.psum(x),
    "psum_scatter": lambda m, x: m.collectives.psum_scatter(x, "i", tiled=True),
    "all_gather": lambda m, x: m.collectives.all_gather(x, "i", tiled=True),
    "all_gather reduced": lambda m, x: m.collectives.all_gather(x, "i", tiled=True, to="reduced"),
    "ppermute": lambda m, x: m.collectives.ppermute(x, "i", [(0, 1), (1, 0)]),
    "all_to_all": lambda m, x: m.collectives.all_to_all(x, "i", 0, 0, tiled=True),
    "pmax": lambda m, x: m.collectives.pmax(x, "i"),
    "negative": lambda m, x: -x,
    "tanh": lambda m, x: m.np.tanh(x),
    "x ** 2": lambda m, x: x**2,
    "x * x": lambda m, x: x * x,
    "x - x": lambda m, x: x - x,
    "2 * x": lambda m, x: 2.0 * x,
    "x / 2": lambda m, x: x / 2.0,
    "2 / x": lambda m, x: 2.0 / x,
    "x + 1": lambda m, x: x + 1.0,
    "x + 0": lambda m, x: x + 0.0,
    "x * array": lambda m, x: x * numpy.full((4, 4), 2.0),
    "sum": lambda m, x: m.np.sum(x),
    "mean": lambda m, x: m.np.mean(x, axis=0),
    "max": lambda m, x: m.np.max(x),
    "cumsum": lambda m, x: m.np.cumsum(x, axis=0),
    "reshape": lambda m, x: x.reshape(2, 8),
    "transpose": lambda m, x: x.T,
    "slice": lambda m, x: x[1:3],
    "broadcast_to": lambda m, x: m.np.broadcast_to(x, (2, 4, 4)),
    "flip": lambda m, x: m.np.flip(x, 0),
    "astype": lambda m, x: x.astype("float32"),
    "split": lambda m, x: m.np.split(x, 2)[1],
    "pad": lambda m, x: m.np.pad(x, 1),
    "where x or 0": lambda m, x: m.np.where(numpy.eye(4, dtype=bool), x, 0.0),
}
BINARY: dict[str, Callable] = {
    "add": lambda m, x, y: x + y,
    "subtract": lambda m, x, y: x - y,
    "multiply": lambda m, x, y: x * y,
    "divide": lambda m, x, y: x / y,
    "matmul": lambda m, x, y: x @ y,
    "maximum": lambda m, x, y: m.np.maximum(x, y),
    "concatenate": lambda m, x, y: m.np.concatenate([x, y]),
    "where": lambda m, x, y: m.np.where(numpy.eye(4, dtype=bool), x, y),
    "scalar multiply": lambda m, x, y: x * y[0, 0],
}

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


def operation(name: str, op: Callable, states: Sequence[str], gradient: bool) -> Callable:
    """A program that applies `op` to operands in these states, and pulls a cotangent back."""

    def program(m: Names):
        def body(c, x):
            operands = [OPERAND[state](m, c + k, x - k) for k, state in enumerate(states)]
            if not gradient:
                return [result(m, m.see("result", op(m, *operands)))]
            y, pull = m.vjp(lambda *xs: op(m, *xs), *operands)
            gradients = pull(cotangent_like(m, y))
            return [result(m, m.see(f"ct {k}", g)) for k, g in enumerate(gradients)]

        one = m.P("i")
        outs = len(states) if gradient else 1
        return m.shard_map(body, (m.P(), one), [one] * outs), (m.P(), one), (C, X)

    return program


def operations() -> Iterator[tuple[str, Callable]]:
    table = [(name, op, 1) for name, op in UNARY.items()] + [(name, op, 2) for name, op in BINARY.items()]
    for name, op, arity in table:
        for states in itertools.product(OPERAND, repeat=arity):
            for gradient in (False, True):
                title = f"{'grad ' if gradient else ''}{name}({', '.join(SHORT[s] for s in states)})"
                yield title, operation(name, op, states, gradient)
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
    actual: dict[str, list[str]] = {}
    compared = 0
    for name, program in operations():
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
