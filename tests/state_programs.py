"""Random programs on values in all four states: on blocks, and as a function of the global values.

A global value is what all ranks hold (invariant, reduced), the sum of their parts (unreduced), or a stack of the ranks'
values, with the ranks in front (varying). A program is a list of steps, each of four numbers, which choose a way to
apply an operation, the operation among those that take its operands' states, and the two operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import (
    all_gather,
    at_root,
    axis_index,
    axis_size,
    pbroadcast,
    pcast,
    pmean,
    pscatter,
    psum,
    psum_scatter,
    reduced,
    unreduced,
)
from collectives.ops import shifted
from spmd import P

SIZE = 8
MATRIX = numpy.cos(numpy.arange(64.0)).reshape(8, 8) / 3
MASK = numpy.arange(8) % 3 == 0


class Operation(NamedTuple):
    """What it makes of operands' states, a letter or None; of blocks over some axes; and of global values."""

    state: Callable[[str, str], str | None]
    block: Callable
    whole: Callable


def _joined(a: str, b: str) -> str | None:
    return None if "U" in (a, b) else next(s for s in "VRI" if s in (a, b))


def _linear(a: str, b: str) -> str:
    return a


def _sum(a: str, b: str) -> str | None:
    return "U" if a == b == "U" else _joined(a, b)


def _product(a: str, b: str) -> str | None:
    return "U" if (a == "U") != (b == "U") and "V" not in (a, b) else _joined(a, b)


def _quotient(a: str, b: str) -> str | None:
    return _product(a, b) if b != "U" else None


def _same(state: Callable, f: Callable) -> Operation:
    """Of values along the last axis: the same on blocks and on global values."""
    return Operation(state, lambda x, y, axes: f(x, y), lambda x, y, n: f(x, y))


def _moves(taken: str, gives: str, block: Callable, whole: Callable) -> Operation:
    """A collective of the first operand."""
    return Operation(
        lambda a, b: gives if a in taken else None, lambda x, y, axes: block(x, axes), lambda x, y, n: whole(x, n)
    )


def _scattered(to: str) -> Callable:
    return lambda x, a: 0.5 * all_gather(psum_scatter(x, a, tiled=True), a, tiled=True, to=to)


def _total(x: Any, n: int) -> Any:
    return 0.5 * (x.sum(0) if x.ndim == 2 else x)


def _on_all(x: Any, n: int) -> Any:
    return np.broadcast_to(x, (n, SIZE))


OPERATIONS: dict[str, Operation] = {
    "tanh": _same(lambda a, b: _joined(a, a), lambda x, y: np.tanh(x)),
    "sine of a product": _same(_joined, lambda x, y: np.sin(x * y)),
    "cumsum": _same(_linear, lambda x, y: -0.4 * np.cumsum(x, axis=-1)),
    "slices": _same(_linear, lambda x, y: np.concatenate([x[..., 2:], 0.5 * x[..., :2]], axis=-1)),
    "reshaped": _same(_linear, lambda x, y: (x.reshape(*x.shape[:-1], 2, 4) * 1.5).swapaxes(-1, -2).reshape(x.shape)),
    "a matrix": _same(_linear, lambda x, y: x @ MATRIX),
    "add": _same(_sum, lambda x, y: 0.5 * x - y / 3),
    "where": _same(_sum, lambda x, y: np.where(MASK, x, 0.5 * y)),
    "multiply": _same(_product, np.multiply),
    "by a sum": _same(_product, lambda x, y: x * np.mean(y, axis=-1, keepdims=True)),
    "einsum": _same(_product, lambda x, y: np.einsum("...i,...j,ij->...j", x, y, MATRIX)),
    "divide": _same(_quotient, lambda x, y: x / (2 + np.cos(y)) if y.dtype == float else x),
    "maximum": _same(_joined, np.maximum),
    "pbroadcast": _moves("IR", "V", pbroadcast, _on_all),
    "reduced": _moves("I", "R", reduced, lambda x, n: x),
    "unreduced": _moves("V", "U", unreduced, lambda x, n: x.sum(0)),
    "part at the root": _moves("I", "U", lambda x, a: unreduced(at_root(x, a), a), lambda x, n: x),
    "psum": _moves("VU", "I", lambda x, a: 0.5 * psum(x, a), _total),
    "pmean": _moves("V", "I", pmean, lambda x, n: x.mean(0)),
    "scattered": _moves("VU", "V", _scattered("varying"), lambda x, n: _on_all(_total(x, n), n)),
    "scattered, invariant": _moves("VU", "I", _scattered("invariant"), _total),
    "scattered, reduced": _moves("VU", "R", _scattered("reduced"), _total),
    "slices of ranks": _moves(
        "V",
        "R",
        lambda x, a: np.sum(all_gather(x, a, to="reduced") * 0.5, axis=0),
        _total,
    ),
    "shifted": _moves("V", "V", lambda x, a: shifted(x, a, 1), lambda x, n: np.roll(x, 1, axis=0)),
    "own slice": _moves(
        "I",
        "V",
        lambda x, a: np.concatenate([pscatter(x, a, tiled=True)] * axis_size(a)),
        lambda x, n: np.concatenate([x.reshape(n, SIZE // n)] * n, axis=1),
    ),
    "by the rank": _moves(
        "IVR", "V", lambda x, a: x * (0.5 * axis_index(a)), lambda x, n: x * (0.5 * numpy.arange(n)[:, None])
    ),
}


# ---------------------------------------------------------------- ways to apply an operation


def _by_scan(f: Callable, x: Any, y: Any, sign: Any) -> Any:
    """The mean of results that are all the same, in the carry and as outputs."""
    last, each = md.scan(lambda total, _: (0.5 * (total + f(x, y)), f(x, y)), f(x, y), None, 2)
    return 0.5 * last + 0.25 * np.sum(each, axis=0)


#: Each applies `f` to two operands; the meaning is that of `f`, but for `cond`, which may change the sign.
WAYS: dict[str, Callable] = {
    "plainly": lambda f, x, y, sign: f(x, y),
    "jit": lambda f, x, y, sign: md.jit(f)(x, y),
    "checkpoint": lambda f, x, y, sign: md.checkpoint(f)(x, y),
    "vmap": lambda f, x, y, sign: md.vmap(f, (0, None))(np.stack([2 * x, x]), y)[1],
    "vmap of both": lambda f, x, y, sign: md.vmap(f)(np.stack([x, x]), np.stack([y, y])).sum(0) / 2,
    "scan": _by_scan,
    "cond": lambda f, x, y, sign: md.cond(np.sum(sign) > 0, f, lambda x, y: -f(x, y), x, y),
    "jvp": lambda f, x, y, sign: md.jvp(lambda x: f(x, y), (x,), (x,))[1],
}
DERIVATIVES = ("jvp", "vjp")
SWAPPED = dict(zip("IVUR", "IVRU"))


class Step(NamedTuple):
    way: str
    name: str
    i: int
    j: int
    given: str  # the states of the operands
    made: str  # the state of the operation's result


def decoded(program: Sequence[tuple[int, int, int, int]]) -> tuple[list[Step], str]:
    """The steps that numbers stand for, and the states of all values: first x, w, r and u, then the steps' results."""
    states, steps, ways = "VIRU", [], [*WAYS, "vjp"]
    for way, operation, i, j in program:
        i, j = i % len(states), j % len(states)
        taken = [(name, s) for name, o in OPERATIONS.items() if (s := o.state(states[i], states[j]))]
        name, made = taken[operation % len(taken)]
        steps.append(Step(ways[way % len(ways)], name, i, j, states[i] + states[j], made))
        states += SWAPPED[states[i]] if steps[-1].way == "vjp" else made
    return steps, states


def on_blocks(steps: Sequence[Step], axes: tuple[str, ...], inputs: Sequence[Any]) -> list[Any]:
    """All values of a program, in a body."""
    x, w = inputs[:2]
    cotangents = {"V": lambda: x, "I": lambda: w, "U": lambda: reduced(w, axes), "R": lambda: unreduced(x, axes)}
    values = list(inputs)
    for way, name, i, j, _, made in steps:

        def f(x: Any, y: Any, name: str = name) -> Any:
            return OPERATIONS[name].block(x, y, axes)

        if way == "vjp":
            values.append(md.vjp(lambda x, y=values[j], f=f: f(x, y), values[i])[1](cotangents[made]())[0])
        else:
            values.append(WAYS[way](f, values[i], values[j], w))
    return values


def of_global_values(steps: Sequence[Step], n: int, inputs: Sequence[Any]) -> list[Any]:
    """All values of a program, as global values."""
    x, w = inputs[:2]
    cotangents = {"V": x, "I": w, "U": w, "R": x.sum(0)}
    values = list(inputs)
    for way, name, i, j, _, made in steps:

        def f(x: Any, y: Any = values[j], name: str = name) -> Any:
            return OPERATIONS[name].whole(x, y, n)

        if way == "vjp":
            values.append(md.vjp(f, values[i])[1](cotangents[made])[0])
        elif way == "jvp":
            values.append(md.jvp(f, (values[i],), (values[i],))[1])
        else:
            values.append(-f(values[i]) if way == "cond" and np.sum(w) <= 0 else f(values[i]))
    return values


# ---------------------------------------------------------------- as functions of arrays


def spec_of_states(states):
    """The spec of a matrix in these states along axes, such as {"i": "V", "j": "U"}: V splits the first dimension."""
    along = {letter: {a for a in states if states[a] == letter} for letter in "VUR"}
    return P(tuple(sorted(along["V"])) or None, unreduced=along["U"], reduced=along["R"])


def array_of(spec: P, mesh: spmd.Mesh, seed: int, shape: tuple[int, ...]) -> spmd.ShardedArray:
    """An array of any values with this spec, outside of any body."""
    sizes = mesh.shape
    rows = shape[0] // spmd.partition.part_count(spec.axes, sizes)
    seeds = [[seed, *[k for a, k in zip(sizes, at) if a in spec.held]] for at in numpy.ndindex(*sizes.values())]
    blocks = [numpy.random.default_rng(s).normal(size=(rows, *shape[1:])) for s in seeds]
    return spmd.from_local(blocks if mesh.backend == "simulated" else blocks[mesh.ranks.rank], mesh, spec)


def spec_of_state(state: str, mesh: spmd.Mesh) -> P:
    return spec_of_states(dict.fromkeys(mesh.axis_names, state))


def example(mesh: spmd.Mesh) -> list[Any]:
    """The inputs x, w, r and u of a program."""
    shapes = [(mesh.size, SIZE), (SIZE,), (SIZE,), (SIZE,)]
    return [array_of(spec_of_state(s, mesh), mesh, k, shape) for k, (s, shape) in enumerate(zip("VIRU", shapes))]


def sharded(program: Any, mesh: spmd.Mesh, **options: Any) -> Callable:
    """All values of a program, as a function of x, w, r and u."""
    (steps, states), axes = decoded(program), mesh.axis_names

    def body(x, w, r, u):
        values = on_blocks(steps, axes, [x[0], w, r, u])
        if options.get("check_rep", True):
            found = [next((k for k, s in zip("VUR", md.typeof(v).states) if s == set(axes)), "I") for v in values]
            assert "".join(found) == states, (found, states)
        return [v[None] if s == "V" else v for v, s in zip(values, states)]

    specs = [spec_of_state(s, mesh) for s in states]
    return spmd.shard_map(body, mesh=mesh, in_specs=tuple(specs[:4]), out_specs=specs, **options)


def loss_of(program: Any, mesh: spmd.Mesh, **options: Any) -> Callable:
    """A number of the last values of a program, as a function of x, w, r and u."""
    (steps, states), axes = decoded(program), mesh.axis_names
    ends = {
        "I": lambda v, x: np.sum(np.cos(v)),
        "V": lambda v, x: psum(np.sum(np.tanh(v)), axes),
        "U": lambda v, x: np.sum(np.cos(psum(v, axes))),
        "R": lambda v, x: psum(np.sum(np.sin(v) * x), axes),
    }

    def body(x, w, r, u):
        values = on_blocks(steps, axes, [x[0], w, r, u])
        return sum(ends[s](v, x[0]) for s, v in [*zip(states, values)][-3:])

    specs = tuple(spec_of_state(s, mesh) for s in states[:4])
    return spmd.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), **options)


def global_loss(program: Any, n: int) -> Callable:
    """The same of global values."""
    steps, states = decoded(program)
    ends = {
        "I": lambda v, x: np.sum(np.cos(v)),
        "V": lambda v, x: np.sum(np.tanh(v)),
        "U": lambda v, x: np.sum(np.cos(v)),
        "R": lambda v, x: np.sum(np.sin(v) * x),
    }

    def loss(*inputs):
        values = of_global_values(steps, n, inputs)
        return sum(ends[s](v, inputs[0]) for s, v in [*zip(states, values)][-3:])

    return loss


def global_value(y: Any) -> numpy.ndarray:
    return y.gather() if isinstance(y, spmd.ShardedArray) else numpy.asarray(y)


# ---------------------------------------------------------------- the table of collectives

#: Name: the collective of a value and axes, the states before and after, and the operation that it transposes to.
ROWS = {
    "psum": (psum, "UI", "reduced"),
    "psum_scatter": (lambda x, a: psum_scatter(x, a, tiled=True), "UV", "all_gather_reduced"),
    "all_gather": (lambda x, a: all_gather(x, a, tiled=True, to="reduced"), "VR", "psum_scatter"),
    "pbroadcast": (pbroadcast, "RV", "unreduced"),
    "reduced": (reduced, "IR", "psum"),
    "unreduced": (unreduced, "VU", "pbroadcast"),
    "pcast to varying": (lambda x, a: pcast(x, a, to="varying"), "RV", "unreduced"),
    "pcast to reduced": (lambda x, a: pcast(x, a, to="reduced"), "IR", "psum"),
    "pcast to unreduced": (lambda x, a: pcast(x, a, to="unreduced"), "VU", "pbroadcast"),
    "psum of varying": (psum, "VI", "pbroadcast"),
    "pbroadcast of invariant": (pbroadcast, "IV", "psum"),
}
