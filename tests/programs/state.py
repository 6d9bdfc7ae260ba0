"""Random programs on values in all four states: on blocks, and as a function of the global values.

A global value is what all ranks hold (invariant, reduced), the sum of their parts (unreduced), or a stack of the ranks'
values, with the ranks in front (varying). A program is a list of steps, each of four numbers: they choose a way to
apply an operation, the operation among those that take its operands' states, and the two operands.
"""

from __future__ import annotations

import functools
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
)  # fmt: skip
from collectives.ops import shift
from spmd import P

SIZE = 8
MATRIX = numpy.cos(numpy.arange(64.0)).reshape(8, 8) / 3
MASK = numpy.arange(8) % 3 == 0


# ---------------------------------------------------------------- operations


class Operation(NamedTuple):
    """The letter of its result's state, or None, of two operands'; and what it does to blocks and to global values."""

    state: Callable[[str, str], str | None]
    block: Callable  # (x, y, axes)
    whole: Callable  # (x, y, number of ranks)


def joined(a: str, b: str) -> str | None:
    return None if "U" in (a, b) else next(s for s in "VRI" if s in (a, b))


def a_sum(a: str, b: str) -> str | None:
    return "U" if a == b == "U" else joined(a, b)


def a_product(a: str, b: str) -> str | None:
    return "U" if (a == "U") != (b == "U") and "V" not in (a, b) else joined(a, b)


def same(state: Callable, f: Callable) -> Operation:
    """An operation along the last axis, the same on blocks and on global values."""
    return Operation(state, lambda x, y, axes: f(x, y), lambda x, y, n: f(x, y))


def moves(taken: str, gives: str, block: Callable, whole: Callable) -> Operation:
    """A collective of the first operand."""
    state = lambda a, b: gives if a in taken else None  # noqa: E731
    return Operation(state, lambda x, y, axes: block(x, axes), lambda x, y, n: whole(x, n))


def scattered(x: Any, axes: Any, to: str) -> Any:
    return 0.5 * all_gather(psum_scatter(x, axes, tiled=True), axes, tiled=True, to=to)


def total(x: Any, n: int) -> Any:
    return 0.5 * (x.sum(0) if x.ndim == 2 else x)


def on_all(x: Any, n: int) -> Any:
    return np.broadcast_to(x, (n, SIZE))


def turned(x: Any) -> Any:
    return (x.reshape(*x.shape[:-1], 2, 4) * 1.5).swapaxes(-1, -2).reshape(x.shape)


OPERATIONS: dict[str, Operation] = {
    "tanh": same(lambda a, b: joined(a, a), lambda x, y: np.tanh(x)),
    "sine of a product": same(joined, lambda x, y: np.sin(x * y)),
    "cumsum": same(lambda a, b: a, lambda x, y: -0.4 * np.cumsum(x, axis=-1)),
    "slices": same(lambda a, b: a, lambda x, y: np.concatenate([x[..., 2:], 0.5 * x[..., :2]], axis=-1)),
    "reshape": same(lambda a, b: a, lambda x, y: turned(x)),
    "a matrix": same(lambda a, b: a, lambda x, y: x @ MATRIX),
    "add": same(a_sum, lambda x, y: 0.5 * x - y / 3),
    "where": same(a_sum, lambda x, y: np.where(MASK, x, 0.5 * y)),
    "multiply": same(a_product, np.multiply),
    "by a sum": same(a_product, lambda x, y: x * np.mean(y, axis=-1, keepdims=True)),
    "einsum": same(a_product, lambda x, y: np.einsum("...i,...j,ij->...j", x, y, MATRIX)),
    "divide": same(lambda a, b: a_product(a, b) if b != "U" else None, lambda x, y: x / (2 + np.cos(y))),
    "maximum": same(joined, np.maximum),
    "pbroadcast": moves("IR", "V", pbroadcast, on_all),
    "reduced": moves("I", "R", reduced, lambda x, n: x),
    "unreduced": moves("V", "U", unreduced, lambda x, n: x.sum(0)),
    "at the root": moves("I", "U", lambda x, a: unreduced(at_root(x, a), a), lambda x, n: x),
    "psum": moves("VU", "I", lambda x, a: 0.5 * psum(x, a), total),
    "pmean": moves("V", "I", pmean, lambda x, n: x.mean(0)),
    "scattered": moves("VU", "V", lambda x, a: scattered(x, a, "varying"), lambda x, n: on_all(total(x, n), n)),
    "scattered to invariant": moves("VU", "I", lambda x, a: scattered(x, a, "invariant"), total),
    "scattered to reduced": moves("VU", "R", lambda x, a: scattered(x, a, "reduced"), total),
    "gathered": moves("V", "R", lambda x, a: 0.5 * np.sum(all_gather(x, a, to="reduced"), axis=0), total),
    "shifted": moves("V", "V", lambda x, a: shift(x, a, 1), lambda x, n: np.roll(x, 1, axis=0)),
    "own slice": moves("I", "V", lambda x, a: np.tile(pscatter(x, a, tiled=True), axis_size(a)),
                       lambda x, n: np.tile(x.reshape(n, SIZE // n), (1, n))),
    "by the rank": moves("IVR", "V", lambda x, a: x * axis_index(a) / 2, lambda x, n: x * numpy.arange(n)[:, None] / 2),
}  # fmt: skip


# ---------------------------------------------------------------- ways to apply an operation


def by_scan(f: Callable, x: Any, y: Any, w: Any, ct: Any) -> Any:
    """The mean of results that are all the same, in the carry and as outputs."""
    last, each = md.scan(lambda mean, _: (0.5 * (mean + f(x, y)), f(x, y)), f(x, y), None, 2)
    return 0.5 * last + 0.25 * np.sum(each, axis=0)


#: Apply `f` to `x` and `y`. `w` is invariant, and `ct` makes a cotangent of the result.
WAYS: dict[str, Callable] = {
    "plainly": lambda f, x, y, w, ct: f(x, y),
    "jit": lambda f, x, y, w, ct: md.jit(f)(x, y),
    "checkpoint": lambda f, x, y, w, ct: md.checkpoint(f)(x, y),
    "vmap": lambda f, x, y, w, ct: md.vmap(f, (0, None))(np.stack([2 * x, x]), y)[1],
    "vmap of both": lambda f, x, y, w, ct: md.vmap(f)(np.stack([x, x]), np.stack([y, y])).sum(0) / 2,
    "scan": by_scan,
    "cond": lambda f, x, y, w, ct: md.cond(np.sum(w) > 0, f, lambda x, y: -f(x, y), x, y),
    "jvp": lambda f, x, y, w, ct: md.jvp(lambda x: f(x, y), (x,), (x,))[1],
    "vjp": lambda f, x, y, w, ct: md.vjp(lambda x: f(x, y), x)[1](ct())[0],
}
#: The same of global values: most have the meaning of `f` itself.
OF_GLOBAL = {**dict.fromkeys(WAYS, WAYS["plainly"]), **{way: WAYS[way] for way in ("cond", "jvp", "vjp")}}
SWAPPED = dict(zip("IVUR", "IVRU"))


class Step(NamedTuple):
    way: str
    name: str
    i: int
    j: int
    result: str  # the state of the operation's result


def decoded(program: Sequence[Sequence[int]]) -> tuple[list[Step], str]:
    """The steps that numbers stand for, and the states of all values: first x, w, r and u, then the steps' results."""
    states, steps, ways = "VIRU", [], list(WAYS)
    for way, operation, i, j in program:
        i, j = i % len(states), j % len(states)
        taken = [(name, s) for name, o in OPERATIONS.items() if (s := o.state(states[i], states[j]))]
        name, result = taken[operation % len(taken)]
        steps.append(Step(ways[way % len(ways)], name, i, j, result))
        states += SWAPPED[states[i]] if steps[-1].way == "vjp" else steps[-1].result
    return steps, states


def values_of(steps: Sequence[Step], ways: dict, apply: Callable, cts: dict, inputs: Sequence[Any]) -> list[Any]:
    """All values of a program: `apply(name, x, y)` applies an operation, `cts` makes cotangents by states."""
    values = list(inputs)
    for way, name, i, j, result in steps:
        values.append(ways[way](functools.partial(apply, name), values[i], values[j], inputs[1], cts[result]))
    return values


def on_blocks(steps: Sequence[Step], axes: tuple[str, ...], x: Any, w: Any, r: Any, u: Any) -> list[Any]:
    cts = {"V": lambda: x, "I": lambda: w, "U": lambda: reduced(w, axes), "R": lambda: unreduced(x, axes)}
    return values_of(steps, WAYS, lambda name, x, y: OPERATIONS[name].block(x, y, axes), cts, [x, w, r, u])


def of_global_values(steps: Sequence[Step], x: Any, w: Any, r: Any, u: Any) -> list[Any]:
    cts = {"V": lambda: x, "I": lambda: w, "U": lambda: w, "R": lambda: x.sum(0)}
    return values_of(steps, OF_GLOBAL, lambda name, y, z: OPERATIONS[name].whole(y, z, len(x)), cts, [x, w, r, u])


# ---------------------------------------------------------------- as functions of arrays


def spec_of_states(states: dict[str, str]) -> P:
    """The spec of an array in these states along axes, such as {"i": "V", "j": "U"}: V splits the first dimension."""
    along = {letter: {a for a in states if states[a] == letter} for letter in "VUR"}
    return P(tuple(sorted(along["V"])) or None, unreduced=along["U"], reduced=along["R"])


def specs_of(states: str, mesh: spmd.Mesh) -> list[P]:
    return [spec_of_states(dict.fromkeys(mesh.axis_names, s)) for s in states]


def array_of(spec: P, mesh: spmd.Mesh, seed: int, shape: tuple[int, ...]) -> spmd.ShardedArray:
    """An array of any values with this spec, outside of any body."""
    sizes = mesh.shape
    rows = shape[0] // spmd.mesh.specs.part_count(spec.axes, sizes)
    seeds = [[seed, *[k for a, k in zip(sizes, at) if a in spec.split_axes]] for at in numpy.ndindex(*sizes.values())]
    blocks = [numpy.random.default_rng(s).normal(size=(rows, *shape[1:])) for s in seeds]
    return spmd.from_local(lambda rank: blocks[rank], mesh, spec)


def example(mesh: spmd.Mesh) -> list[Any]:
    """The inputs x, w, r and u of a program."""
    shapes = [(mesh.size, SIZE), (SIZE,), (SIZE,), (SIZE,)]
    return [array_of(spec, mesh, k, shape) for k, (spec, shape) in enumerate(zip(specs_of("VIRU", mesh), shapes))]


def sharded(program: Any, mesh: spmd.Mesh) -> Callable:
    """All values of a program, as a function of x, w, r and u."""
    steps, states = decoded(program)
    specs = specs_of(states, mesh)

    def body(x, *others):
        values = on_blocks(steps, mesh.axis_names, x[0], *others)
        assert [md.typeof(v).states for v in values] == [spec.states for spec in specs]
        return [v[None] if s == "V" else v for v, s in zip(values, states)]

    return spmd.shard_map(body, mesh=mesh, in_specs=tuple(specs[:4]), out_specs=specs)


def number_of(states: str, values: Sequence[Any], x: Any, over_ranks: Callable) -> Any:
    """A number of a program's last values, by sums over ranks."""
    ends = {
        "I": lambda v: np.sum(np.cos(v)),
        "V": lambda v: over_ranks(np.sum(np.tanh(v))),
        "U": lambda v: np.sum(np.cos(over_ranks(v))),
        "R": lambda v: over_ranks(np.sum(np.sin(v) * x)),
    }
    return sum(ends[s](v) for s, v in [*zip(states, values)][-3:])


def loss_of(program: Any, mesh: spmd.Mesh, **options: Any) -> Callable:
    """A number, as a function of x, w, r and u."""
    (steps, states), axes = decoded(program), mesh.axis_names

    def body(x, *others):
        return number_of(states, on_blocks(steps, axes, x[0], *others), x[0], lambda v: psum(v, axes))

    return spmd.shard_map(body, mesh=mesh, in_specs=tuple(specs_of("VIRU", mesh)), out_specs=P(), **options)


def global_loss(program: Any) -> Callable:
    """The same, as a function of the global values."""
    steps, states = decoded(program)
    return lambda x, *others: number_of(states, of_global_values(steps, x, *others), x, lambda v: v)


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
