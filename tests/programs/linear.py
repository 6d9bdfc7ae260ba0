"""Linear programs: derivatives of random ones, and those of several `shard_map`s."""

from __future__ import annotations

from collections.abc import Callable

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum
from spmd import P
from tests.checks.meshes import mapped, mesh
from tests.programs.rank import random_program


def program(seed: int) -> tuple[Callable, list]:
    """The derivative of the losses of a random program of ranks, a linear function of all its inputs; and inputs."""
    kind = ("further", "control", "redundant")[seed % 3]
    random = random_program(seed, **{kind: True})
    over = mesh(*random.shape.values(), names=tuple(random.shape))
    args = [np.stack([x, np.cos(x)]) for x in random.example(seed)]
    return md.linearize(random.on_ranks(over, batched=True), *args)[1], args


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
