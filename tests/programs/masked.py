"""Masked functions: those of whole arrays that leave masked elements out, whatever their values are."""

import functools

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import pmean, psum
from minidiff import nn, optim
from spmd import P
from tests.checks.results import assert_trees_close

ROWS, COLUMNS = 12, 5
LABELS = numpy.arange(ROWS) % COLUMNS
PROBABILITIES = numpy.linspace(0.0, 1.0, ROWS * COLUMNS).reshape(ROWS, COLUMNS)
SCALE, BIAS = numpy.linspace(0.5, 2.0, COLUMNS), numpy.linspace(-1.0, 1.0, COLUMNS)


def cross_entropy(x, mask):
    mask = np.broadcast_to(mask, x.shape)
    return optim.softmax_cross_entropy(x, PROBABILITIES[: len(x)], where=mask)


def label_cross_entropy(x, mask):
    return optim.softmax_cross_entropy_with_integer_labels(x, LABELS[: len(x)], where=mask)


def reduction(f, axis, **options):
    return lambda x, mask: f(x, axis=axis, where=mask, **options)


#: Functions of an array [rows, columns] and a mask that broadcasts with it.
FUNCTIONS = {
    **{
        f"{f.__name__}, axis={axis}": reduction(f, axis)
        for f in (np.sum, np.mean, np.var, np.prod, nn.logsumexp)
        for axis in (None, 0, 1)
    },
    "max": reduction(np.max, 0, initial=-5.0),
    "min": reduction(np.min, None, initial=5.0),
    "softmax": reduction(nn.softmax, 1),
    "softmax of columns": reduction(nn.softmax, 0),
    "log_softmax": lambda x, mask: np.where(mask, nn.log_softmax(x, where=mask), 0.0),
    "cross entropy": cross_entropy,
    "cross entropy of labels": label_cross_entropy,
    "standardize": reduction(nn.standardize, -1),
    "layer_norm": lambda x, mask: nn.layer_norm(x, SCALE, BIAS, where=mask),
    "rms_norm": lambda x, mask: nn.rms_norm(x, SCALE, where=mask),
    "group_norm": lambda x, mask: nn.group_norm(x, 1, SCALE, BIAS, where=mask),
    "batch_norm": lambda x, mask: nn.batch_norm(x, SCALE, BIAS, where=mask)[0],
}

#: Functions of a rank's rows in a body, and the same of all rows.
BODIES = {
    "mean": (
        lambda x, mask: psum(np.sum(x, 0, where=mask), "i") / psum(np.sum(np.broadcast_to(mask, x.shape), 0), "i"),
        lambda x, mask: np.mean(x, 0, where=mask),
    ),
    "batch_norm": (
        lambda x, mask: nn.batch_norm(x, SCALE, BIAS, average=lambda m: pmean(m, "i"), where=mask)[1],
        lambda x, mask: nn.batch_norm(x, SCALE, BIAS, where=mask)[1],
    ),
}
#: Those of rows alone need no collective.
LOCAL = ["mean, axis=1", "softmax", "log_softmax", "layer_norm", "rms_norm", "sum, axis=1"]


def example(kind):
    """Return an array and its mask. Every other masked element is NaN, the others are infinite."""
    rng = numpy.random.default_rng(len(kind))
    x = rng.normal(size=(ROWS, COLUMNS))
    mask = {
        "rows": numpy.arange(ROWS)[:, None] < 9,  # the last rank of 4 has none
        "columns": numpy.broadcast_to(numpy.arange(COLUMNS) < 3, (ROWS, COLUMNS)).copy(),
        "elements": rng.random((ROWS, COLUMNS)) < 0.6,
    }[kind]
    if kind == "elements":
        mask[:, 0] = mask[0] = True  # nothing is left out whole
    left_out = ~numpy.broadcast_to(mask, x.shape)
    x[left_out] = numpy.where(numpy.arange(left_out.sum()) % 2, numpy.nan, numpy.inf)
    return x, mask


@functools.cache
def weights_of(shape):
    return numpy.cos(numpy.arange(numpy.prod(shape, dtype=int))).reshape(shape)


def loss_of(f, select):
    """Return a number that depends on all elements of f(x, mask) that `select` keeps, and not linearly."""

    def loss(x, mask):
        y = select(f(x, mask))
        return np.sum(weights_of(tuple(y.shape)) * y * (1 + y))

    return loss


def every(y):
    """Select all results but those of nothing at all, which are NaN or infinite."""
    return np.where(np.isfinite(y), y, 0.0)


def derivatives(loss, x, mask):
    """Return the loss, its gradient, and a product with its Hessian."""
    gradient = md.grad(loss)
    direction = numpy.ones(x.shape) / 7
    return loss(x, mask), gradient(x, mask), md.grad(lambda x: np.sum(gradient(x, mask) * direction))(x)


def check_on_ranks(name, mesh, kind):
    """The value and derivatives of a masked function on sharded arrays are those of whole ones."""
    x, mask = example(kind)
    expected = derivatives(loss_of(FUNCTIONS[name], every), x, mask)
    for array in expected:
        assert numpy.isfinite(array).all()
    for array in expected[1:]:
        assert not numpy.any(array[~numpy.broadcast_to(mask, x.shape)])
    sharded = [spmd.distribute(leaf, mesh, P("i")) for leaf in (x, mask)]
    for arguments in (sharded, [sharded[0], mask]):
        assert_trees_close(spmd.gather(derivatives(loss_of(FUNCTIONS[name], every), *arguments)), expected)


def check_in_body(body, of_whole, out, mesh, kind):
    """The value and derivatives of a masked function in a body are those of whole arrays."""
    x, mask = example(kind)
    mapped = spmd.shard_map(body, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=out)
    mapped_loss, loss = (
        lambda x, mask, f=f: sum(loss_of(lambda x, mask: x, every)(y, mask) for y in md.tree.leaves(f(x, mask)))
        for f in (mapped, of_whole)
    )
    for f in (mapped_loss, md.jit(mapped_loss)):
        assert_trees_close(spmd.gather(derivatives(f, x, mask)), derivatives(loss, x, mask))
