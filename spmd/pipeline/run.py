"""Pipelines that follow a schedule: loss and gradients, with few activations stashed.

Differentiating `pipeline` gives all forward passes, then all backward passes. Here a schedule says which of the two a
stage does at each tick, and for which microbatch. Each rank takes its branch of a `switch`. Then activations move on to
the next stage, and cotangents back to the previous one. A stage stashes the activations that it receives, and its
backward pass computes the layers again from these (rematerialization). Or, with `recompute=False`, it stashes what the
derivatives of its layers need (their residuals), and `md.checkpoint` around layers says how much that is. Parameters
are not stashed. The last block then computes the loss and the loss's gradient at once, in its forward pass. If a
schedule splits backward passes, the first part stashes what the second one needs: layers' operands and cotangents.

Each tick has two `ppermute`s of a microbatch's activations, whether or not stages have something to send. (If these are
the same along a second axis, each of its ranks may send a part, as Megatron's scatter and gather.) At the end, a
`psum` sums the loss and the gradients of the parameters that all ranks have.

Sources: those of `library.py`; Chen et al., "Training deep nets with sublinear memory cost" (rematerialization).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import minidiff as md
import minidiff.numpy as np
from collectives import all_gather_invariant, axis_index, axis_size, pbroadcast, pscatter, psum
from collectives.ops import shift
from minidiff.core.tracer import Tracer
from minidiff.higher_order.bodies import label_operation
from minidiff.higher_order.partial_eval import TracedBody, cast_to_types
from spmd.pipeline.allocate import NOTHING, Entry, allocate
from spmd.pipeline.split_tape import split_tape
from spmd.pipeline.tables import Schedule

#: Marks the entries of a schedule, which a prediction reads from the tape (`spmd.predict`).
schedule_p = label_operation("schedule")


def scheduled(
    schedule: Schedule,
    layers: tuple,
    params: tuple,
    inputs: Any,
    targets: Any,
    axis: str,
    recompute: bool = True,
    key: Any = None,
    accumulate: Any = None,
    alike: str | None = None,
) -> tuple:
    """(loss, gradients): the mean loss over the microbatches, computed in the order of a schedule.

    It is called in the body of a `shard_map`. `layers` are three functions: `first(params, inputs) -> x` begins the
    network, `stage(params, x) -> x`, a block of layers, keeps the shape of x, and `last(params, x, targets) -> loss`
    ends it. They must not communicate along the axis, since each rank does a different step. `params`, and `gradients`,
    have an entry for each function: the first and last are invariant along the axis, this stage's blocks have leaves
    [chunks, …]. `inputs` and `targets` are [microbatches, …], on all ranks. Without `recompute`, stages stash residuals
    instead of activations. With a `key` of `minidiff.random`, `first` and `stage` get a key as their last argument,
    another one for each block and microbatch. Gradients are added up in the dtype `accumulate`, if it is wider than
    that of their parameters, and have the parameters' dtype when they are summed over ranks. Along an axis `alike` all
    ranks have the same activations: each sends a part of their last dimension to the next stage, where the parts are
    gathered. Raises ValueError if the schedule has another number of stages, chunks or microbatches, or splits backward
    passes that do not recompute.

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
    if schedule.is_split and not recompute:
        raise ValueError("scheduled: a schedule with split backward passes recomputes: leave recompute at True")
    begun = begin(schedule, layers, params, inputs, targets, axis, recompute, key)
    params, block, ending, rows, slots, x, loss = begun
    activation = x.update(variance={axis, *x.variance})
    x, gradients = zeros(x, axis), md.tree.map(lambda leaf: zeros(leaf, axis, dtype=accumulate), params)
    counts, stashes = empty_stashes(x, slots, axis)
    if recompute:
        passes, kept = recomputing_passes(params, block, ending), ()
    else:
        passes, kept = _keeping(params, block, ending, x, counts[2:], axis)
    stashes, kept = md.checkpoint_name((stashes, kept), "activations")
    gradients = (gradients[0], md.checkpoint_name(gradients[1], "gradients"), gradients[2])

    # `jit` records one tick for all of them. Eagerly, each tick would record its branches again.
    def run(start, rows):
        if not schedule.is_split:
            return md.scan(tick_of(passes, axis, alike), start, rows)[0]
        parts, stash = _splitting(params, block, ending, activation, loss, counts[2], rows)
        *received, _, loss_so_far, sums = start
        return md.scan(tick_of(parts, axis, alike), (*received, stash, loss_so_far, sums), rows)[0]

    *_, loss, gradients = md.jit(run)((x, x, stashes, kept, loss, gradients), rows)
    loss, gradients = md.tree.map(lambda x: x / schedule.microbatches, (loss, gradients))
    of_first, of_blocks, of_last = md.tree.map(lambda x, leaf: x.astype(leaf.dtype), gradients, params)
    loss, of_first, of_last = psum((loss, of_first, of_last), axis)
    return loss, (of_first, of_blocks, of_last)


def begin(
    schedule: Schedule, layers: tuple, params: tuple, inputs: Any, targets: Any, axis: str, recompute=True, key=None
) -> tuple:
    """The parameters, a block, the ending, this stage's entries, the slots, and the types of x and of the loss."""
    _check(schedule, params[1], inputs, targets, axis)
    params = pbroadcast(params[0], axis), params[1], pbroadcast(params[2], axis)  # no branch sums their gradients
    block = _block(schedule, layers[:2], inputs, key, axis)
    table, slots = allocate(schedule, recompute)
    rows = Entry(*(take(column, axis_index(axis)) for column in table))
    labels = {name: getattr(rows, name) for name in ("kind", "chunk")}
    labels = {name: schedule_p.bind(x, schedule=schedule, along=axis, field=name) for name, x in labels.items()}
    rows = rows._replace(**labels)
    x = md.eval_shape(lambda: block(_of_chunk(params, 0)[:2], None, md.tree.map(lambda column: column[0], rows)))
    loss = zeros(md.eval_shape(layers[2], params[2], x, targets[0]), axis)
    return params, block, _ending(schedule, layers[2], targets, axis), rows, slots, x, loss


def empty_stashes(x: Any, slots: Sequence, axis: str) -> tuple[list[int], tuple]:
    """How many slots all stages have, and the empty stashes of activations and cotangents."""
    counts = [max(1, *each) for each in zip(*slots)]
    return counts, tuple(zeros(x, axis, count) for count in counts[:2])


def _block(schedule: Schedule, layers: tuple, inputs: Any, key: Any, axis: str) -> Callable:
    """A function that applies a block of layers to a microbatch."""
    first, stage = layers
    rank = axis_index(axis)  # outside the branches, since not all simulated ranks run each of them

    def block(params, x, entry):
        number = rank + schedule.stages * entry.chunk
        keys = ()
        if key is not None:
            blocks = schedule.stages * schedule.chunks
            keys = (md.random.fold_in(key, entry.microbatch * blocks + number),)
        begin = lambda: first(params[0], take(inputs, entry.microbatch), *keys)  # noqa: E731
        x = begin() if x is None else md.cond(number == 0, lambda x: begin(), lambda x: x, x)
        return stage(params[1], x, *keys)

    return block


def _ending(schedule: Schedule, last: Callable, targets: Any, axis: str) -> Callable:
    """A function that applies one of two to the last block's result: `yes` if there is one, `no` elsewhere."""
    rank = axis_index(axis)

    def ending(entry, yes, no, *operands):
        number = rank + schedule.stages * entry.chunk
        loss = lambda params, x: last(params, x, take(targets, entry.microbatch))  # noqa: E731
        return md.cond(number == schedule.stages * schedule.chunks - 1, partial(yes, loss), no, *operands)

    return ending


# ---------------------------------------------------------------- forward and backward passes


def _with_loss(block: Callable, ending: Callable) -> Callable:
    """A function that applies a block to a microbatch: (x, loss), where only the last block has another loss."""

    def whole(params, x, entry, loss):
        x = block(params[:2], x, entry)
        return x, ending(entry, lambda last, params, x: last(params, x), lambda params, x: loss, params[2], x)

    return whole


def recomputing_passes(params: tuple, block: Callable, ending: Callable) -> tuple[Callable, Callable]:
    """The passes of stages that stash what they receive."""
    whole = _with_loss(block, ending)

    def forward(entry, x, cotangent, kept, loss, gradients):
        x, more = whole(_of_chunk(params, entry.chunk), x, entry, np.zeros_like(loss))
        return x, cotangent, kept, loss + more, gradients

    def backward(entry, x, cotangent, kept, loss, gradients):
        zero = np.zeros_like(loss)
        (_, more), pull = md.vjp(lambda params, x: whole(params, x, entry, zero), _of_chunk(params, entry.chunk), x)
        of_chunk, cotangent = pull((cotangent, np.ones_like(more)))
        return x, cotangent, kept, loss, _add_gradients(gradients, of_chunk, entry.chunk)

    return forward, backward


def _keeping(
    params: tuple, block: Callable, ending: Callable, x: Any, counts: Sequence[int], axis: str
) -> tuple[tuple[Callable, Callable], tuple]:
    """The passes of stages that stash residuals, and the empty stashes: of residuals, of the loss's cotangents."""
    structure: list = []  # of the pullback, once a forward pass has been recorded

    def pass_forward(params, x, entry):
        """The block's result, and the residuals that are neither parameters nor constants."""
        x, pull = md.vjp(lambda params, x: block(params, x, entry), params, x)
        leaves, made = md.tree.flatten(pull)
        known = {id(leaf): i for i, leaf in enumerate(md.tree.leaves(params))}
        places = [known.get(id(leaf), None if isinstance(leaf, Tracer) else leaf) for leaf in leaves]
        structure[:] = made, places
        return x, [leaf for leaf, place in zip(leaves, places) if place is None]

    def forward(entry, x, cotangent, kept, loss, gradients):
        residuals, cotangents = kept
        of_chunk = _of_chunk(params, entry.chunk)
        x, leaves = pass_forward(of_chunk[:2], x, entry)
        residuals = [np.at(stash)[entry.residuals].set(leaf) for stash, leaf in zip(residuals, leaves)]

        def ends(last, params, x, loss, cotangents, of_last):
            more, (ct_params, ct_x) = md.value_and_grad(last, argnums=(0, 1))(params, x)
            return loss + more, np.at(cotangents)[entry.loss].set(ct_x), md.tree.map(_add, of_last, ct_params)

        operands = of_chunk[2], x, loss, cotangents, gradients[2]
        loss, cotangents, of_last = ending(entry, ends, lambda params, x, *others: others, *operands)
        return x, cotangent, (residuals, cotangents), loss, (*gradients[:2], of_last)

    def backward(entry, x, cotangent, kept, loss, gradients):
        (residuals, cotangents), (of_first, of_blocks, of_last) = kept, gradients
        made, places = structure
        of_params = md.tree.leaves(_of_chunk(params, entry.chunk)[:2])
        left = iter([take(stash, entry.residuals) for stash in residuals])
        known = [of_params[place] if type(place) is int else place for place in places]
        pull = md.tree.unflatten(made, [next(left) if leaf is None else leaf for leaf in known])
        ct = np.where(entry.loss == NOTHING, cotangent, take(cotangents, entry.loss))
        of_chunk, cotangent = pull(ct)
        gradients = _add_gradients((of_first, of_blocks, ()), (*of_chunk, ()), entry.chunk)
        return x, cotangent, kept, loss, (*gradients[:2], of_last)

    entry = Entry(*[0] * len(Entry._fields))
    _, leaves = md.eval_shape(lambda x: pass_forward(_of_chunk(params, 0)[:2], x, entry), x)
    stashes = [zeros(leaf, axis, counts[0]) for leaf in leaves], zeros(x, axis, counts[1])
    return (forward, backward), stashes


def _splitting(
    params: tuple, block: Callable, ending: Callable, x: md.ShapedArray, loss: Any, count: int, rows: Entry
) -> tuple[tuple[Callable, ...], list]:
    """The passes of stages with split backward passes, and the empty stash of what the first part leaves."""
    forward, _ = recomputing_passes(params, block, ending)
    whole, zero = _with_loss(block, ending), np.zeros_like(loss)
    structure: list = []  # of the gradients, once the pass has been recorded

    def both(x, cotangent, *entry):
        entry = Entry(*entry)
        of_chunk = _of_chunk(params, entry.chunk)
        (_, more), pull = md.vjp(lambda params, x: whole(params, x, entry, zero), of_chunk, x)
        of_chunk, cotangent = pull((cotangent, np.ones_like(more)))
        leaves, structure[:] = (found := md.tree.flatten(of_chunk))[0], [found[1]]
        return [cotangent, *leaves]

    types = [x, x, *(t.update(shape=t.shape[1:]) for t in map(md.typeof, rows))]
    tape, captured = TracedBody(both, types).close(lambda results: results)
    first, second = split_tape(tape, [k == 0 for k in range(len(tape.outputs))])
    stash = [zeros(t, tuple(sorted(t.variance)), count) for t in (x, x, *second.in_types[len(captured) + len(types) :])]

    def backward(entry, x_in, cotangent, kept, loss, gradients):
        operands = cast_to_types([x_in, cotangent], [x, x])
        cotangent, *saved = first.apply(*captured, *operands, *entry)
        kept = [np.at(stash)[entry.residuals].set(leaf) for stash, leaf in zip(kept, [*operands, *saved])]
        return x_in, cotangent, kept, loss, gradients

    def weight(entry, x_in, cotangent, kept, loss, gradients):
        saved = [take(stash, entry.residuals) for stash in kept]
        found = second.apply(*captured, *saved[:2], *entry, *saved[2:])
        of_chunk = md.tree.unflatten(structure[0], found)
        return x_in, cotangent, kept, loss, _add_gradients(gradients, of_chunk, entry.chunk)

    return (forward, backward, weight), stash


def tick_of(passes: tuple[Callable, ...], axis: str, alike: str | None) -> Callable:
    """A tick, as the step of a scan over this stage's entries."""

    def send(x, by):
        if alike is None or axis_size(axis) == 1:
            return shift(x, axis, by)
        part = pscatter(x, alike, axis=x.ndim - 1, tiled=True)
        return all_gather_invariant(shift(part, axis, by), alike, axis=x.ndim - 1, tiled=True)

    def idle(entry, *operands):
        return operands  # every tick sends them; receivers have no slot for these

    def tick(carry, entry):
        x, cotangent, (activations, cotangents), *others = carry
        activations = _put(activations, entry.arriving_activation, x)
        cotangents = _put(cotangents, entry.arriving_cotangent, cotangent)
        operands = _get(activations, entry.activation), _get(cotangents, entry.cotangent), *others
        x, cotangent, *others = md.switch(entry.kind, [idle, *passes], entry, *operands)
        return (send(x, 1), send(cotangent, -1), (activations, cotangents), *others), None

    return tick


def _of_chunk(params: tuple, chunk: Any) -> tuple:
    """The parameters of one block: the first and last layers, and a chunk of this stage's."""
    of_blocks = md.tree.map(lambda leaf: leaf[0] if len(leaf) == 1 else take(leaf, chunk), params[1])
    return params[0], of_blocks, params[2]


def _add_gradients(gradients: tuple, of_chunk: tuple, chunk: Any) -> tuple:
    """Add the gradients of the parameters that `_of_chunk` selects."""
    of_blocks = md.tree.map(lambda leaf, more: _add_at(leaf, chunk, more), gradients[1], of_chunk[1])
    of_first, of_last = md.tree.map(_add, (gradients[0], gradients[2]), (of_chunk[0], of_chunk[2]))
    return of_first, of_blocks, of_last


def _add(total: Any, more: Any) -> Any:
    return total + more.astype(total.dtype)


def _add_at(total: Any, chunk: Any, more: Any) -> Any:
    if len(total) == 1:
        return _add(total[0], more)[None]
    return np.at(total)[chunk].set(_add(take(total, chunk), more))  # which touches no other chunk


def zeros(t: Any, axis: str | tuple[str, ...], *leading: int, dtype: Any = None) -> Any:
    zero = np.zeros((), np.result_type(t.dtype, dtype or t.dtype))
    return pbroadcast(np.broadcast_to(zero, (*leading, *t.shape)), axis)  # no memory until it is added to


def _put(stash: Any, slot: Any, value: Any) -> Any:
    return np.at(stash)[slot].set(np.where(slot == NOTHING, take(stash, slot), value))


def _get(stash: Any, slot: Any) -> Any:
    return np.where(slot == NOTHING, 0, take(stash, slot))


def take(x: Any, i: Any) -> Any:
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
