"""Pipelines that follow a schedule: loss and gradients, with few activations stashed.

Differentiating `pipeline` gives all forward passes, then all backward passes. Here a schedule says which of the two a
stage does at each tick, and for which microbatch. Each rank takes its branch of a `switch`. Then activations move on to
the next stage, and cotangents back to the previous one. A stage stashes the activations that it receives, and its
backward pass computes the layers again from these (rematerialization). If a schedule splits backward passes, the first
part leaves what the second one needs, the layers' operands and cotangents, in a stash.

Each tick has two `ppermute`s of a microbatch's activations, whether or not stages have something to send. At the end, a
`psum` sums the loss and the gradients of the parameters that all ranks have.

Sources: those of `schedules.py`; Chen et al., "Training deep nets with sublinear memory cost" (rematerialization).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import axis_index, axis_size, pbroadcast, psum
from collectives.ops import shift
from minidiff.higher_order.bodies import label_operation
from minidiff.higher_order.partial_eval import TracedBody, cast_to_types
from minidiff.higher_order.split_tape import split_tape
from spmd.parallel.schedule import Schedule
from spmd.parallel.slots import NOTHING, Entry, allocate

#: Marks the entries of a schedule, which a prediction reads from the tape (`spmd.predict`).
schedule_p = label_operation("schedule")


def scheduled(schedule: Schedule, layers: tuple, params: tuple, inputs: Any, targets: Any, axis: str) -> tuple:
    """(loss, gradients): the mean loss over the microbatches, computed in the order of a schedule.

    It is called in the body of a `shard_map`. `layers` are three functions: `first(params, inputs) -> x` begins the
    network, `stage(params, x) -> x`, a block of layers, keeps the shape of x, and `last(params, x, targets) -> loss`
    ends it. They must not communicate along the axis, since each rank does a different step. `params`, and `gradients`,
    have an entry for each function: the first and last are invariant along the axis, this stage's blocks have leaves
    [chunks, …]. `inputs` and `targets` are [microbatches, …], on all ranks. Raises ValueError if the schedule has
    another number of stages, chunks or microbatches.

    >>> from spmd import P, make_mesh, shard_map
    >>> from spmd.parallel import one_f_one_b
    >>> layers = (lambda v, t: v * t, lambda w, x: w[0] * x, lambda u, x, y: (u * x - y) ** 2)
    >>> params, specs = (2.0, np.array([[1.0, 3.0]]), 1.0), (P(), P(None, 'stages'), P())
    >>> f = lambda *args: scheduled(one_f_one_b(2, 4), layers, *args, 'stages')
    >>> mesh = make_mesh((2,), ('stages',), backend='simulated')
    >>> run = shard_map(f, mesh=mesh, in_specs=(specs, P(), P()), out_specs=(P(), specs))
    >>> loss, (v, w, u) = run(params, np.ones(4), np.full(4, 5.0))
    >>> print(loss, v, w, u)
    1.0 6.0 [[12.  4.]] 12.0
    """
    _check(schedule, params[1], inputs, targets, axis)
    params = pbroadcast(params[0], axis), params[1], pbroadcast(params[2], axis)  # no branch sums their gradients
    activation = md.eval_shape(layers[0], params[0], inputs[0])
    x = _zeros(activation, axis)
    loss = _zeros(md.eval_shape(layers[2], params[2], x, targets[0]), axis)
    gradients = md.tree.map(lambda leaf: _zeros(leaf, axis), params)
    table, slots = allocate(schedule)
    activations, cotangents, *saved = (max(1, *counts) for counts in zip(*slots, strict=True))
    stashes = _zeros(x, axis, activations), _zeros(x, axis, cotangents)
    rows = Entry(*(_at(column, axis_index(axis)) for column in table))
    rows = rows._replace(
        **{
            name: schedule_p.bind(getattr(rows, name), schedule=schedule, along=axis, field=name)
            for name in ("kind", "chunk")
        }
    )
    block = _block(schedule, layers, inputs, targets, loss, axis)

    def run(start, rows):
        if not saved:
            return md.scan(_tick(params, block, axis), start, rows)[0]
        split = SplitBackward(block, params, activation.update(variance={axis, *activation.variance}), rows)
        stash = tuple(_zeros(t, tuple(sorted(t.variance)), *saved) for t in split.saved)
        *rest, gradients = start
        *rest, (gradients, _) = md.scan(_tick(params, block, axis, split), (*rest, (gradients, stash)), rows)[0]
        return (*rest, gradients)

    # `jit` records one tick for all of them. Eagerly, each tick would record its branches again.
    *_, loss, gradients = md.jit(run)((x, x, stashes, loss, gradients), rows)
    loss, (of_first, of_blocks, of_last) = md.tree.map(lambda x: x / schedule.microbatches, (loss, gradients))
    loss, of_first, of_last = psum((loss, of_first, of_last), axis)
    return loss, (of_first, of_blocks, of_last)


def _block(schedule: Schedule, layers: tuple, inputs: Any, targets: Any, no_loss: Any, axis: str) -> Callable:
    """A function that applies a block of layers to a microbatch: (x, loss), where only the last block has a loss."""
    first, stage, last = layers
    rank = axis_index(axis)  # outside the branches, since not all simulated ranks run each of them

    def block(params, x, entry):
        number = rank + schedule.stages * entry.chunk
        x = md.cond(number == 0, lambda x: first(params[0], _at(inputs, entry.microbatch)), lambda x: x, x)
        x = stage(params[1], x)
        ending = lambda x: last(params[2], x, _at(targets, entry.microbatch))  # noqa: E731
        return x, md.cond(number == schedule.stages * schedule.chunks - 1, ending, lambda x: no_loss, x)

    return block


class SplitBackward:
    """The backward pass of a block as two tapes: for the cotangent of its operand, and for the gradients.

    `saved` has the types of what the first one leaves for the second one.
    """

    def __init__(self, block: Callable, params: tuple, x: md.ShapedArray, rows: Entry):
        def backward(x, cotangent, *entry):
            entry = Entry(*entry)
            (_, more), pull = md.vjp(lambda params, x: block(params, x, entry), _of_chunk(params, entry.chunk), x)
            of_chunk, cotangent = pull((cotangent, np.ones_like(more)))
            leaves, self.structure = md.tree.flatten(of_chunk)
            return [cotangent, *leaves]

        types = [x] * 2 + [t.update(shape=t.shape[1:]) for t in map(md.typeof, rows)]
        tape, self.captured = TracedBody(backward, types).close(lambda results: results)
        self.first, self.second = split_tape(tape, [k == 0 for k in range(len(tape.outputs))])
        self.operands = len(self.captured) + len(types)
        self.saved = [*types[:2], *self.second.in_types[self.operands :]]

    def cotangent(self, entry: Entry, x: Any, cotangent: Any) -> tuple[Any, list]:
        """The cotangent of the operand, and what to save."""
        x, cotangent = cast_to_types([x, cotangent], self.saved)
        cotangent_of_x, *saved = self.first.apply(*self.captured, x, cotangent, *entry)
        return cotangent_of_x, [x, cotangent, *saved]

    def gradients(self, entry: Entry, saved: list) -> Any:
        """The gradients of the block's parameters, from what was saved."""
        found = self.second.apply(*self.captured, *saved[:2], *entry, *saved[2:])
        return md.tree.unflatten(self.structure, found)


def _tick(params: tuple, block: Callable, axis: str, split: Any = None) -> Callable:
    """A tick, as the step of a scan over this stage's entries."""

    def idle(entry, *operands):
        return operands  # every tick sends them; receivers have no slot for these

    def forward(entry, x, cotangent, loss, gradients):
        x, more = block(_of_chunk(params, entry.chunk), x, entry)
        return x, cotangent, loss + more, gradients

    def backward(entry, x, cotangent, loss, gradients):
        (_, more), pull = md.vjp(lambda params, x: block(params, x, entry), _of_chunk(params, entry.chunk), x)
        of_chunk, cotangent = pull((cotangent, np.ones_like(more)))
        return x, cotangent, loss, _add_gradients(gradients, of_chunk, entry.chunk)

    def backward_alone(entry, x, cotangent, loss, sums):
        gradients, stash = sums
        cotangent, saved = split.cotangent(entry, x, cotangent)
        return x, cotangent, loss, (gradients, tuple(np.at(s)[entry.saved].set(v) for s, v in zip(stash, saved)))

    def weight(entry, x, cotangent, loss, sums):
        gradients, stash = sums
        of_chunk = split.gradients(entry, [_at(s, entry.saved) for s in stash])
        return x, cotangent, loss, (_add_gradients(gradients, of_chunk, entry.chunk), stash)

    branches = [idle, forward, backward] if split is None else [idle, forward, backward_alone, weight]

    def tick(carry, entry):
        x, cotangent, (activations, cotangents), *sums = carry
        activations = _put(activations, entry.arriving_activation, x)
        cotangents = _put(cotangents, entry.arriving_cotangent, cotangent)
        operands = _get(activations, entry.activation), _get(cotangents, entry.cotangent), *sums
        x, cotangent, *sums = md.switch(entry.kind, branches, entry, *operands)
        return (shift(x, axis, 1), shift(cotangent, axis, -1), (activations, cotangents), *sums), None

    return tick


def _of_chunk(params: tuple, chunk: Any) -> tuple:
    """The parameters of one block: the first and last layers, and a chunk of this stage's."""
    return params[0], md.tree.map(lambda leaf: _at(leaf, chunk), params[1]), params[2]


def _add_gradients(gradients: tuple, of_chunk: tuple, chunk: Any) -> tuple:
    """Add the gradients of the parameters that `_of_chunk` selects."""
    of_blocks = md.tree.map(lambda leaf, more: np.at(leaf)[chunk].add(more), gradients[1], of_chunk[1])
    of_first, of_last = md.tree.map(np.add, (gradients[0], gradients[2]), (of_chunk[0], of_chunk[2]))
    return of_first, of_blocks, of_last


def _zeros(t: Any, axis: str | tuple[str, ...], *leading: int) -> Any:
    return pbroadcast(
        np.broadcast_to(np.zeros((), t.dtype), (*leading, *t.shape)), axis
    )  # no memory until it is added to


def _put(stash: Any, slot: Any, value: Any) -> Any:
    return np.at(stash)[slot].set(np.where(slot == NOTHING, _at(stash, slot), value))


def _get(stash: Any, slot: Any) -> Any:
    return np.where(slot == NOTHING, 0, _at(stash, slot))


def _at(x: Any, i: Any) -> Any:
    return np.take(x, i, axis=0)  # which takes plain arrays too


def _check(schedule: Schedule, blocks: Any, inputs: Any, targets: Any, axis: str) -> None:
    """Raise ValueError if the schedule is for another number of stages, chunks or microbatches."""
    leaves, _ = md.tree.flatten_with_paths(blocks, "params[1]")
    given = {
        "stages": (schedule.stages, {f"axis {axis!r}": axis_size(axis)}),
        "chunks": (schedule.chunks, {path: len(leaf) for path, leaf in leaves}),
        "microbatches": (schedule.microbatches, {"inputs": len(inputs), "targets": len(targets)}),
    }
    for what, (count, sizes) in given.items():
        for name, size in sizes.items():
            if size != count:
                raise ValueError(
                    f"scheduled: the schedule has {count} {what}, but {name} has size {size}: make a schedule for "
                    f"{size} {what}"
                )
