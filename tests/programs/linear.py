"""Random linear programs: `shard_map`s of sums, products with what is not linear, rearrangements, loops, branches and
collectives of all kinds.

A program is a list of small numbers, which choose: the mesh, the operations, and what they are applied to. Whatever
the numbers, it is a linear function of its first two arguments, whose third one is a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import collectives as c
import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pbroadcast, psum
from minidiff import typeof
from spmd import P
from tests.checks.meshes import mapped, mesh

MESHES = [mesh(*shape) for shape in ((2,), (2, 2), (1, 2), (2, 1, 2), (3,), (1,))]
ROWS, COLUMNS = 12, 2
SPECS = [P(), P("i"), P(None), P("i", None)]


class Choices:
    """The numbers, taken one after another; then zeros."""

    def __init__(self, numbers: Sequence[int]):
        self.numbers: Iterator[int] = iter(numbers)

    def of(self, options: Sequence) -> Any:
        return options[next(self.numbers, 0) % len(options)]


def _axes(x: Any, varying: bool, mesh: spmd.Mesh) -> Iterator[tuple[tuple[str, ...], int]]:
    """Groups of axes along all of which `x` varies, or along none of which it does, and their sizes."""
    along = tuple(a for a in mesh.axis_names if (a in typeof(x).variance) == varying)
    for axes in [(a,) for a in along] + ([along, along[::-1]] if len(along) > 1 else []):
        yield axes, math.prod(mesh.shape[a] for a in axes)


def _groups(size: int) -> list[list[int]]:
    """All ranks, in two groups where they can be halved, the ranks of each out of order."""
    return [list(range(size))[::-1]] if size % 2 else [list(range(0, size, 2))[::-1], list(range(1, size, 2))]


def _splits(size: int, rows: int) -> list[list[int]]:
    """Parts of different lengths: the first rank sends all rows to the last one, the others one or none."""
    return [[0] * (size - 1) + [rows]] + [[int(s == d) for d in range(size)] for s in range(1, size)]


def _by_rows(x: Any, axes: tuple[str, ...], table: Any) -> Any:
    """Send parts of different lengths, of which each rank knows its own row of the table."""
    splits = c.all_gather_invariant(np.take(table, c.axis_index(axes), axis=0), axes)
    return c.all_to_all(x, axes, 0, 0, splits=splits, capacity=int(table.sum(0).max()) + 1)


def _of_varying(x: Any, axes: tuple[str, ...], n: int) -> Iterator[Callable]:
    """Calls of collectives of a value that varies along the axes."""
    yield from (partial(f, x, axes) for f in (psum, c.pmean))
    yield from (partial(c.ppermute, x, axes, perm) for perm in ([(k, (k + 1) % n) for k in range(n)], [(0, n - 1)]))
    yield from (partial(f, x, axes, n - 1) for f in (c.broadcast, c.broadcast_varying, c.reduce))
    yield partial(psum, x, axes, axis_index_groups=_groups(n))
    if x.ndim < 3:
        gathers = (c.all_gather, c.all_gather_invariant, c.gather)
        yield from (partial(f, x, axes, axis=0, tiled=t) for f in gathers for t in (False, x.ndim > 0))
        yield partial(c.all_gather, x, axes, axis_index_groups=_groups(n))
    if x.ndim and x.shape[0] % n == 0:
        yield from (partial(f, x, axes, tiled=True) for f in (c.psum_scatter, c.scatter))
        yield partial(c.all_to_all, x, axes, 0, x.ndim - 1, tiled=True)
    if x.ndim and x.shape[0] == n:
        yield from (partial(c.psum_scatter, x, axes), partial(c.scatter, x, axes, n - 1))
        yield partial(c.all_to_all, x, axes, 0, x.ndim - 1)
    if x.ndim and x.shape[0] > 1:
        yield partial(c.all_to_all, x, axes, 0, 0, splits=_splits(n, x.shape[0]))
        yield partial(_by_rows, x, axes, np.array(_splits(n, x.shape[0])))


def _of_invariant(x: Any, axes: tuple[str, ...], n: int) -> Iterator[Callable]:
    yield from (partial(pbroadcast, x, axes), partial(c.at_root, x, axes, n - 1))
    if x.ndim and x.shape[0] % n == 0:
        yield partial(c.pscatter, x, axes, tiled=True)
    if x.ndim and x.shape[0] == n:
        yield partial(c.pscatter, x, axes)


def _collective(x: Any, choose: Choices, mesh: spmd.Mesh) -> Any:
    """One of the collectives that `x` fits; `x` itself where none does."""
    options = [f for axes, n in _axes(x, True, mesh) for f in _of_varying(x, axes, n)]
    options += [f for axes, n in _axes(x, False, mesh) for f in _of_invariant(x, axes, n)]
    return choose.of(options)() if options else x


def _rearranged(x: Any, choose: Choices) -> Any:
    options = [lambda: x.reshape(-1), lambda: x.T, lambda: np.sum(x)]
    if x.ndim < 3:
        options += [lambda: x.reshape(1, *x.shape), lambda: x.reshape(*x.shape, 1)]
        options += [lambda: np.broadcast_to(x, (2, *x.shape)) if x.size < 50 else x]
    if x.ndim:
        options += [partial(np.sum, x, axis=axis, keepdims=keep) for axis in (0, -1) for keep in (False, True)]
        options += [lambda: x[::-1], lambda: x[: max(1, x.shape[0] // 2)], lambda: x[0]]
        options += [lambda: np.split(x, [1])[choose.of([1, 0])] if x.shape[0] > 1 else x]
    if x.dtype.kind == "c":
        options += [lambda: np.real(x) + 2j * np.imag(x), lambda: np.conj(x)]
    if x.ndim and x.shape[-1] < 20:
        weights = np.arange(1.0, x.shape[-1] + 1)
        options += [lambda: x @ weights, lambda: weights @ x.T if x.ndim < 3 else x]
    return choose.of(options)()


def _fits(x: Any, y: Any) -> bool:
    """Whether two values broadcast together, to something small."""
    try:
        return math.prod(np.broadcast_shapes(x.shape, y.shape)) <= 200
    except ValueError:
        return False


def _combined(values: list, choose: Choices) -> Any:
    x = choose.of(values)
    y = choose.of([y for y in values if _fits(x, y)])
    options = [lambda: x + y, lambda: y + x, lambda: x - y]
    options += [lambda: np.where(np.arange(x.size).reshape(x.shape) > 1, x, y)]
    if x.shape == y.shape and 0 < x.ndim < 3 and x.size < 50:
        options += [lambda: np.concatenate([x, y, x], axis=-1), lambda: np.stack([y, x])]
    return choose.of(options)()


def _scaled(values: list, factors: list, choose: Choices) -> Any:
    x = choose.of(values)
    y = choose.of([y for y in [*factors, 3.0, 0.5, np.float64(2.0)] if not hasattr(y, "shape") or _fits(x, y)])
    return choose.of([lambda: x * y, lambda: y * x, lambda: x / (y * y + 1.0), lambda: -x])()


def _controlled(values: list, factors: list, choose: Choices, mesh: spmd.Mesh) -> Any:
    """A loop, or a branch, with a collective in its body."""
    x = choose.of(values)
    axes = choose.of([tuple(a for a in mesh.axis_names if a in typeof(x).variance), ()])
    total = (lambda y: psum(y, axes)) if axes else lambda y: y
    scalar = factors[-1]
    positive = psum(scalar, tuple(typeof(scalar).variance)) > 0 if typeof(scalar).variance else scalar > 0
    options = [
        lambda: md.cond(positive, lambda y: total(y) * scalar, lambda y: -total(2.0 * y), x),
        lambda: md.cond(positive, lambda y: y, total, x),
        lambda: md.fori_loop(0, 2, lambda i, c: c * scalar + 0.5 * c, x),
        lambda: md.fori_loop(0, 2, lambda i, c: c * scalar + values[0].sum() - x, x),
    ]
    if x.ndim and x.shape[0] < 20:
        options += [
            lambda: md.scan(lambda c, row: (c + row * scalar, 2.0 * c), 0 * x[0], x)[1],
            lambda: md.scan(lambda c, row: (total(row) + c, row), 0 * total(x[0]), x)[0],
            lambda: md.scan(lambda c, row: (c, total(row * scalar)), None, x, reverse=True)[1],
            lambda: md.scan(lambda c, _: (0.5 * c, total(c)), x, None, length=2)[1].sum(0),
        ]
    return choose.of(options)()


def program(numbers: Sequence[int], meshes: Sequence[spmd.Mesh] = MESHES) -> Callable:
    """A function of three arguments that is one `shard_map`, linear in the first two; its results are a tuple."""
    choose = Choices(numbers)
    mesh = choose.of(meshes)
    in_specs = tuple(choose.of(SPECS) for _ in range(3))
    count, reduced = 1 + choose.of(range(7)), [choose.of([True, False]) for _ in range(1 + choose.of(range(3)))]
    out_specs = tuple(P() if flag else P(mesh.axis_names) for flag in reduced)
    rest = list(choose.numbers)

    def body(x, y, factor):
        choose = Choices(rest)
        values, factors = [x, y], [factor, np.sin(factor), factor[0, 0]]
        kinds = {
            "combine": lambda: _combined(values, choose),
            "collective": lambda: _collective(choose.of(values[::-1]), choose, mesh),
            "rearrange": lambda: _rearranged(choose.of(values[::-1]), choose),
            "scale": lambda: _scaled(values, factors, choose),
            "control": lambda: _controlled(values, factors, choose, mesh),
        }
        for _ in range(count):
            values.append(kinds[choose.of([*kinds, "collective"])]())
        return tuple(_result(choose.of(values[::-1]), flag, mesh) for flag in reduced)

    return spmd.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _result(x: Any, reduced: bool, mesh: spmd.Mesh) -> Any:
    """A result that all ranks agree about; or one that is laid out block by block."""
    varying = tuple(a for a in mesh.axis_names if a in typeof(x).variance)
    if reduced:
        return psum(x, varying) if varying else x
    return x if x.ndim else x.reshape(1)


def example(seed: int = 0, is_complex: bool = False) -> tuple:
    """Arguments for any program."""
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=(ROWS, COLUMNS)) for _ in range(6)]
    return tuple(x + 1j * y if is_complex else x for x, y in zip(parts[:3], parts[3:]))


def several(line: spmd.Mesh, plane: spmd.Mesh) -> dict[str, Callable]:
    """Linear functions of 16 numbers that are several `shard_map`s: one after another, or one in another's body.

    The meshes have the axis 'i', of size 4, and the axes 'i' and 'j', each of size 2.
    """

    def on_ranks(f, in_specs=P("i"), out_specs=P("i"), over: spmd.Mesh | None = line, **options):
        return mapped(f, over, in_specs, out_specs, **options)

    def doubled(x):
        return on_ranks(lambda x: 2 * x)(x)

    def sine(x):
        return psum(np.sin(x), "i")

    return {
        "one after another": lambda x: on_ranks(lambda x: psum(3 * x, "i"), out_specs=P())(doubled(x)),
        "with an operation between": lambda x: on_ranks(lambda x: 3 * x)(np.sin(1.0) * doubled(x)),
        "a value used in two": lambda x: (lambda y: y + on_ranks(lambda x: 3 * x)(y) - on_ranks(np.flip)(y))(
            doubled(x)
        ),
        "on two meshes": lambda x: on_ranks(lambda x: psum(3 * x, "j"), P(("i", "j")), P("i"), plane)(doubled(x)),
        "laid out anew": lambda x: on_ranks(lambda x: 3 * x, P("j"), P("j"), plane)(
            on_ranks(lambda x: 2 * x, P("i"), P("i"), plane)(x)
        ),
        "unmapped between": lambda x: on_ranks(lambda x: 3 * x)(on_ranks(lambda x: psum(x, "i"), out_specs=P())(x)),
        "a partial sum between": lambda x: on_ranks(lambda x: 3 * x)(on_ranks(lambda x: x, out_specs=P(sum="i"))(x)),
        "two partial sums": lambda x: on_ranks(
            lambda x: (x, psum(x, "j")), P(("i", "j")), (P("j", sum="i"), P(sum="i")), plane
        )(x),
        "an operation on a partial sum": lambda x: (
            np.sin(1.0) * on_ranks(lambda x: x, P(("i", "j")), P("j", sum="i"), plane)(x)
        ),
        "a sum outside": lambda x: np.sum(doubled(x)),
        "a slice outside": lambda x: doubled(x)[1:5],
        "a product outside": lambda x: doubled(x).reshape(4, 4) @ np.ones((4, 2)),
        "in a scan": lambda x: md.scan(lambda c, _: (doubled(c), c), x, None, length=4),
        "the derivative of one": lambda t: md.jvp(on_ranks(sine, out_specs=P()), (np.ones(16),), (t,))[1],
        "the backward pass of one": lambda ct: md.vjp(on_ranks(sine, out_specs=P()), np.ones(16))[1](ct[:4]),
        "compiled": lambda x: md.jit(on_ranks(lambda x: psum(2 * x, "i"), out_specs=P()))(x),
        **_one_in_another(plane),
    }


def _one_in_another(plane: spmd.Mesh) -> dict[str, Callable]:
    def rows_of(f, out_specs):
        """One over 'i' alone, in whose body there may be one over 'j'."""
        return mapped(f, plane, P("i"), out_specs, axis_names={"i"})

    def inner(f, in_specs, out_specs):
        return mapped(f, None, in_specs, out_specs)

    return {
        "over some axes": lambda x: rows_of(lambda x: psum(x, "i"), P())(x),
        "one in another": lambda x: rows_of(inner(lambda x: psum(2 * x, ("i", "j")), P("j"), P()), P())(x),
        "an inner one that maps": lambda x: rows_of(lambda x: x + inner(lambda x: 2 * x, P("j"), P("j"))(x), P("i"))(x),
        "after a sum": lambda x: rows_of(lambda x: inner(lambda x: psum(2 * x, "j"), P("j"), P())(psum(x, "i")), P())(
            x
        ),
        "closed over in both": lambda x: rows_of(
            lambda x: inner(lambda y: y * x.sum(), P("j"), P("j"))(np.ones(4)), P("i")
        )(x),
    }
