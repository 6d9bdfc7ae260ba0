"""shard_maps inside one another: any program on blocks, its axes one after the other; and programs made for it."""

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import all_gather_invariant, pmean, psum
from spmd import P
from spmd.mesh.specs import axes_of_entry, is_spec
from tests.checks.of_whole import check_kinds
from tests.checks.properties import shows


def along(specs, axes):
    """Partition specs, without the axes that are not among these."""

    def restricted(spec):
        return P(*[tuple(a for a in axes_of_entry(entry) if a in axes) or None for entry in spec.entries])

    return restricted(specs) if is_spec(specs) else tuple(along(s, axes) for s in specs)


def one_by_one(*levels):
    """`shard_map`, as several inside one another: each maps over the axes of its level."""

    def shard_map(f, *, mesh, in_specs, out_specs, **options):
        for i, axes in reversed(list(enumerate(levels))):
            specs = {"in_specs": along(in_specs, axes), "out_specs": along(out_specs, axes)}
            f = spmd.shard_map(f, mesh=None if i else mesh, axis_names=axes, **specs, **options)
        return f

    return shard_map


# ---------------------------------------------------------------- on a mesh (i: 2, j: 2), of w [4] and x [4, 4]


def inner(f, in_specs, out_specs, check_rep):
    return spmd.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_rep=check_rep)


def chained(w, x, typed):
    """Results of one inner shard_map go into the next one, into operations on blocks, and into a product."""
    total = psum(x.sum(0), "i")

    def first(x, total):
        t = psum(np.sin(x * total * w[:2]), "j") + x * psum(x.sum(), ("i", "j"))
        return t, np.tanh(t) + total

    columns = P(None, "j")
    a, b = inner(first, (columns, P("j")), (columns, columns), typed)(x, total)
    a, c = inner(first, (columns, P("j")), (columns, columns), typed)(0.1 * b, total * 2)
    d = np.sin(a) * b + c @ np.outer(w, w)
    e = inner(lambda y: psum((y * x.sum()).sum(), ("i", "j")), columns, P(), typed)(d)
    return e, psum((d * a).sum(), "i")


def chained_whole(w, x):
    total = x.sum(0)

    def first(x, total):
        t = sum(np.sin(x[:, k : k + 2] * total[k : k + 2] * w[:2]) for k in (0, 2))
        t = np.concatenate([t, t], 1) + x * x.sum()
        return t, np.tanh(t) + total

    a, b = first(x, total)
    a, c = first(0.1 * b, total * 2)
    d = np.sin(a) * b + c @ np.outer(w, w)
    return d[:2].sum() * x[:2].sum() + d[2:].sum() * x[2:].sum(), (d * a).sum()


def looped(w, x, typed):
    """In loops and branches: a carry becomes varying along the inner axis, and is whole again."""

    def step(c, k):
        def columns(c, v):
            total = psum((c * v).sum(), ("i", "j"))
            return md.cond(total > 0, lambda c: np.sin(c) * v, lambda c: c + psum(c, "j") * w[:2], c)

        return inner(columns, (P(None, "j"), P("j")), P(None, "j"), typed)(c, w * k), psum(c.sum(), "i")

    c, ys = md.scan(step, x, np.arange(3.0))
    return psum(c.sum(), "i"), ys


def looped_whole(w, x):
    c, ys = x, []
    for k in np.arange(3.0):
        ys.append(c.sum())
        v = w * k
        both = c[:, :2] + c[:, 2:]
        c = np.sin(c) * v if (c * v).sum() > 0 else c + np.concatenate([both, both], 1) * np.concatenate([w[:2], w[:2]])
    return c.sum(), np.stack(ys)


def within(w, x, typed):
    """vmap, grad, checkpoint and rules of one's own, around the inner one and in it."""
    doubled = md.custom_vjp(lambda x: 2.0 * x)
    doubled.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (2.0 * ct,))

    def columns(row, v):
        local = md.grad(lambda y: (np.sin(y) * v).sum())(row)
        return md.checkpoint(lambda y: psum(np.tanh(y * v).sum(), "j"))(doubled(local))

    def rows(x, v):
        return md.vmap(lambda row: inner(columns, (P("j"), P("j")), P(), typed)(row, v))(x)

    y = md.checkpoint(rows)(x, w)
    return psum((y * w[:2]).sum(), "i"), all_gather_invariant(y, "i", tiled=True).sum() * pmean(y.sum(), "i") * w


def within_whole(w, x):
    y = np.tanh(2.0 * np.cos(x) * w * w).sum(1)
    return (y * np.concatenate([w[:2], w[:2]])).sum(), y.sum() ** 2 / 2 * w


NESTED = {"chained": (chained, chained_whole), "looped": (looped, looped_whole), "within": (within, within_whole)}
NESTED_ARGS = (np.cos(np.arange(4.0)), np.sin(np.arange(16.0)).reshape(4, 4) / 2)


def two_levels(f, mesh, typed=True):
    """A program of rows of x, along i, and of w, as a function of whole arrays; it closes over w."""

    def mapped(w, x):
        body = lambda x: f(w, x, typed)  # noqa: E731
        kwargs = {"mesh": mesh, "axis_names": {"i"}, "check_rep": typed}
        return spmd.shard_map(body, in_specs=P("i"), out_specs=P(), **kwargs)(x)

    return mapped


@shows("reference", "derivatives", "modes", "types")
def check_nested(mesh, name, typed):
    kinds = ("value", "grad") if name == "within" else ("jvp", "grad of grad", "jvp of grad")  # custom_vjp: no tangents
    check_kinds(two_levels(NESTED[name][0], mesh, typed), NESTED_ARGS, NESTED[name][1], kinds)
