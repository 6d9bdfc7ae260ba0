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

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import minidiff as md
import minidiff.numpy as np
from collectives import all_gather_invariant, axis_index, axis_size, pbroadcast, pscatter, psum
from collectives.ops import shift
from minidiff.control_flow.bodies import label_operation
from minidiff.control_flow.partial_eval import TracedBody, cast_to_types
from minidiff.core.tracer import Tracer
from spmd.pipeline.split_tape import split_tape
from spmd.pipeline.tables import NOTHING, Entry, Schedule, Slots, allocate

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
    """Return (loss, gradients), of the mean loss over the microbatches, in the order of a schedule.

    Call it in the body of a `shard_map`. Gradients have an entry for each function in `layers`, like `params`: the
    first and last are invariant along the axis.

    Args:
        schedule: a schedule, such as `one_f_one_b(stages, microbatches)`.
        layers: three functions. `first(params, inputs) -> x` begins the network, `stage(params, x) -> x`, a block of
            layers, keeps the shape of x, and `last(params, x, targets) -> loss` ends it. They must not communicate
            along the axis, since each rank does a different step.
        params: the parameters of each function. Those of this stage's blocks have leaves [chunks, …].
        inputs: [microbatches, …], on all ranks.
        targets: [microbatches, …], on all ranks.
        axis: the axis of the mesh along which stages are.
        recompute: whether a backward pass computes its layers again. If not, stages stash residuals instead of
            activations.
        key: a key of `minidiff.random`. `first` and `stage` then get a key as their last argument, another one for each
            block and microbatch.
        accumulate: the dtype in which gradients are added up, if it is wider than that of their parameters. They have
            the parameters' dtype when they are summed over ranks.
        alike: an axis along which all ranks have the same activations. Each rank sends a slice of their last dimension
            to the next stage, which gathers the slices.

    Raises:
        ValueError: if the schedule has another number of stages, chunks or microbatches, or splits backward passes that
            do not recompute.

    >>> from spmd import P, make_mesh, shard_map
    >>> from spmd.pipeline import one_f_one_b
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
        raise ValueError("scheduled: a schedule with split backward passes needs recompute=True")
    kind = SplitStage if schedule.is_split else PipelineStage if recompute else ResidualStage
    stage = kind(schedule, layers, params, (inputs, targets), axis, key)
    first, blocks, last = md.tree.map(lambda leaf: zeros(leaf, axis, dtype=accumulate), stage.params)
    gradients = first, md.checkpoint_name(blocks, "gradients"), last
    _, loss, gradients = run_stage(stage, stage.stash, stage.no_loss, gradients, alike)
    loss, gradients = md.tree.map(lambda x: x / schedule.microbatches, (loss, gradients))
    first, blocks, last = md.tree.map(lambda x, leaf: x.astype(leaf.dtype), gradients, stage.params)
    loss, first, last = psum((loss, first, last), axis)
    return loss, (first, blocks, last)


def run_stage(stage: PipelineStage, stash: Any, loss: Any, gradients: Any, alike: str | None = None) -> tuple:
    """Run a stage's entries on its rank, and return (stash, loss, gradients) after the last tick."""
    axis = stage.axis

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
        x, cotangent, *others = md.switch(entry.kind, [idle, *stage.passes], entry, *operands)
        return (send(x, 1), send(cotangent, -1), (activations, cotangents), *others), None

    received = tuple(zeros(stage.x, axis, count) for count in stage.slots[:2])
    received, stash = md.checkpoint_name((received, stash), "activations")
    # `jit` records one tick for all of them. Eagerly, each tick would record its branches again.
    run = md.jit(lambda start, rows: md.scan(tick, start, rows)[0])
    return run((stage.x, stage.x, received, stash, loss, gradients), stage.rows)[3:]


@dataclass(eq=False)
class PipelineStage:
    """A stage of a pipeline, whose backward passes compute its layers again from the activations it received.

    `layers`, `params` and `key` are those of `scheduled`, `batch` its inputs and targets. `rows` are the entries,
    `slots` the most slots of any stage, `x` and `no_loss` an activation and a loss of zeros. A pass takes an entry and
    (x, cotangent, stash, loss, gradients), and returns the same: x and the cotangent are what it sends, the others what
    the stage has stashed and added up.
    """

    schedule: Schedule
    layers: tuple
    params: tuple
    batch: tuple
    axis: str
    key: Any = None

    recomputes: ClassVar[bool] = True
    stash: Any = field(default=(), init=False)

    def __post_init__(self) -> None:
        _check(self.schedule, self.params[1], self.batch, self.axis)
        axis, (first, blocks, last) = self.axis, self.params
        # No branch sums the gradients of the parameters that all ranks have.
        self.params = pbroadcast(first, axis), blocks, pbroadcast(last, axis)
        # Outside the branches, since not all simulated ranks run each of them. The end has an index of its own: so a
        # compiled block computes its number twice, and does not hold it from its start to its end.
        self.rank, self.rank_of_end = axis_index(axis), axis_index(axis)
        table, slots = allocate(self.schedule, self.recomputes)
        self.slots = Slots(*(max(1, *counts) for counts in zip(*slots)))
        rows = Entry(*(take(column, self.rank) for column in table))
        label = partial(schedule_p.bind, schedule=self.schedule, along=axis)
        self.rows = rows._replace(kind=label(rows.kind, field="kind"), chunk=label(rows.chunk, field="chunk"))
        entry = md.tree.map(lambda column: column[0], self.rows)
        t = md.eval_shape(lambda: self.block(select_chunk(self.params, 0)[:2], None, entry))
        self.no_loss = zeros(md.eval_shape(self.layers[2], self.params[2], t, self.batch[1][0]), axis)
        self.type, self.x = t.update(variance={axis, *t.variance}), zeros(t, axis)

    @property
    def passes(self) -> tuple[Callable, ...]:
        """The passes, in the order of `tables.KINDS`."""
        return self.forward, self.backward

    def params_of(self, entry: Entry, stash: Any) -> tuple:
        """Return the parameters of one block: the first and last layers, and a chunk of this stage's."""
        return select_chunk(self.params, entry.chunk)

    def forward(self, entry: Entry, x: Any, cotangent: Any, stash: Any, loss: Any, gradients: Any) -> tuple:
        x, term = self.block_and_loss(self.params_of(entry, stash), x, entry, np.zeros_like(loss))
        return x, cotangent, stash, loss + term, gradients

    def backward(self, entry: Entry, x: Any, cotangent: Any, stash: Any, loss: Any, gradients: Any) -> tuple:
        terms, cotangent = self.pull_back(entry, stash, x, cotangent, loss)
        return x, cotangent, stash, loss, _add_gradients(gradients, terms, entry.chunk)

    def pull_back(self, entry: Entry, stash: Any, x: Any, cotangent: Any, loss: Any) -> tuple:
        """Compute a block again, and return the cotangents of its parameters and of x."""
        block = partial(self.block_and_loss, entry=entry, no_loss=np.zeros_like(loss))
        (_, term), pull = md.vjp(block, self.params_of(entry, stash), x)
        return pull((cotangent, np.ones_like(term)))

    def block(self, params: tuple, x: Any, entry: Entry) -> Any:
        """Apply a block of layers to a microbatch; the network's first block begins with its inputs."""
        number, keys = self.rank + self.schedule.stages * entry.chunk, []
        if self.key is not None:
            blocks = self.schedule.stages * self.schedule.chunks
            keys = [md.random.fold_in(self.key, entry.microbatch * blocks + number)]
        begin = lambda: self.layers[0](params[0], take(self.batch[0], entry.microbatch), *keys)  # noqa: E731
        x = begin() if x is None else md.cond(number == 0, lambda x: begin(), lambda x: x, x)
        return self.layers[1](params[1], x, *keys)

    def block_and_loss(self, params: tuple, x: Any, entry: Entry, no_loss: Any) -> tuple[Any, Any]:
        """Apply a block, and the last layer to the last block's result, where elsewhere the loss is `no_loss`."""
        x = self.block(params[:2], x, entry)
        return x, self.end(entry, lambda last, params, x: last(params, x), lambda params, x: no_loss, params[2], x)

    def end(self, entry: Entry, last_block: Callable, other_block: Callable, *operands: Any) -> Any:
        """Apply `last_block(loss, ...)` to the result of the last block, and `other_block` to those of others."""
        loss = lambda params, x: self.layers[2](params, x, take(self.batch[1], entry.microbatch))  # noqa: E731
        number = self.rank_of_end + self.schedule.stages * entry.chunk
        is_last = number == self.schedule.stages * self.schedule.chunks - 1
        return md.cond(is_last, partial(last_block, loss), other_block, *operands)


class ResidualStage(PipelineStage):
    """A stage that stashes residuals and the loss's cotangents, and computes nothing again."""

    recomputes = False

    def __post_init__(self) -> None:
        super().__post_init__()
        entry = Entry(*[0] * len(Entry._fields))
        run = lambda x: self.linearize(select_chunk(self.params, 0)[:2], x, entry)[1]  # noqa: E731
        # In a branch, as in the passes: all that a branch takes varies.
        leaves = md.eval_shape(lambda x: md.cond(self.rank_of_end == 0, run, run, x), self.x)
        residuals = [zeros(leaf, self.axis, self.slots.residuals) for leaf in leaves]
        self.stash = residuals, zeros(self.x, self.axis, self.slots.losses)

    def linearize(self, params: tuple, x: Any, entry: Entry) -> tuple[Any, list]:
        """Return the block's result, and the residuals that vary along the axis and are not parameters.

        All others depend on constants alone.
        """
        x, pull = md.vjp(lambda params, x: self.block(params, x, entry), params, x)
        leaves, self.structure = md.tree.flatten(pull)
        known = {id(leaf): i for i, leaf in enumerate(md.tree.leaves(params))}
        varies = lambda leaf: isinstance(leaf, Tracer) and self.axis in md.typeof(leaf).variance  # noqa: E731
        self.places = [known.get(id(leaf), None if varies(leaf) else leaf) for leaf in leaves]
        return x, [leaf for leaf, place in zip(leaves, self.places) if place is None]

    def forward(self, entry: Entry, x: Any, cotangent: Any, stash: Any, loss: Any, gradients: Any) -> tuple:
        residuals, cotangents = stash
        params = self.params_of(entry, stash)
        x, leaves = self.linearize(params[:2], x, entry)
        residuals = [np.at(slots)[entry.residuals].set(leaf) for slots, leaf in zip(residuals, leaves)]

        def end(last, params, x, loss, cotangents, of_last):
            term, (ct_params, ct_x) = md.value_and_grad(last, argnums=(0, 1))(params, x)
            return loss + term, np.at(cotangents)[entry.loss].set(ct_x), md.tree.map(_add, of_last, ct_params)

        operands = params[2], x, loss, cotangents, gradients[2]
        loss, cotangents, of_last = self.end(entry, end, lambda params, x, *others: others, *operands)
        return x, cotangent, (residuals, cotangents), loss, (*gradients[:2], of_last)

    def backward(self, entry: Entry, x: Any, cotangent: Any, stash: Any, loss: Any, gradients: Any) -> tuple:
        residuals, cotangents = stash
        params = self.params_of(entry, stash)[:2]
        if any(isinstance(place, Tracer) for place in self.places):  # computed from constants, in the forward pass
            self.linearize(params, cotangent, entry)  # of which `jit` runs that part again; x has the cotangent's type
        of_params = md.tree.leaves(params)
        left = iter([take(slots, entry.residuals) for slots in residuals])
        known = [of_params[place] if type(place) is int else place for place in self.places]
        pull = md.tree.unflatten(self.structure, [next(left) if leaf is None else leaf for leaf in known])
        ct = np.where(entry.loss == NOTHING, cotangent, take(cotangents, entry.loss))
        terms, cotangent = pull(ct)
        first, blocks, _ = _add_gradients((*gradients[:2], ()), (*terms, ()), entry.chunk)
        return x, cotangent, stash, loss, (first, blocks, gradients[2])


class SplitStage(PipelineStage):
    """A stage whose backward passes are in two parts: the first one stashes what the second one needs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        t = self.type
        types = [t, t, *(each.update(shape=each.shape[1:]) for each in map(md.typeof, self.rows))]
        tape, self.captured = TracedBody(self.differentiate, types).close(lambda results: results)
        self.for_cotangent, self.for_gradients = split_tape(tape, [k == 0 for k in range(len(tape.outputs))])
        stashed = t, t, *self.for_gradients.in_types[len(self.captured) + len(types) :]
        self.stash = [zeros(t, tuple(sorted(t.variance)), self.slots.residuals) for t in stashed]

    @property
    def passes(self) -> tuple[Callable, ...]:
        return self.forward, self.backward, self.weight

    def differentiate(self, x: Any, cotangent: Any, *entry: Any) -> list:
        """Return the cotangent of x, and the leaves of the gradients."""
        terms, cotangent = self.pull_back(Entry(*entry), (), x, cotangent, self.no_loss)
        leaves, self.structure = md.tree.flatten(terms)
        return [cotangent, *leaves]

    def backward(self, entry: Entry, x: Any, cotangent: Any, stash: Any, loss: Any, gradients: Any) -> tuple:
        operands = cast_to_types([x, cotangent], [self.type] * 2)
        cotangent, *saved = self.for_cotangent.apply(*self.captured, *operands, *entry)
        stash = [np.at(slots)[entry.residuals].set(leaf) for slots, leaf in zip(stash, [*operands, *saved])]
        return x, cotangent, stash, loss, gradients

    def weight(self, entry: Entry, x: Any, cotangent: Any, stash: Any, loss: Any, gradients: Any) -> tuple:
        saved = [take(slots, entry.residuals) for slots in stash]
        leaves = self.for_gradients.apply(*self.captured, *saved[:2], *entry, *saved[2:])
        terms = md.tree.unflatten(self.structure, leaves)
        return x, cotangent, stash, loss, _add_gradients(gradients, terms, entry.chunk)


def select_chunk(params: tuple, chunk: Any) -> tuple:
    """Return the parameters of one block: the first and last layers, and a chunk of this stage's."""
    of_blocks = md.tree.map(lambda leaf: leaf[0] if len(leaf) == 1 else take(leaf, chunk), params[1])
    return params[0], of_blocks, params[2]


def _add_gradients(gradients: tuple, terms: tuple, chunk: Any) -> tuple:
    """Add the gradients of the parameters that `select_chunk` selects."""
    of_blocks = md.tree.map(lambda leaf, term: _add_at(leaf, chunk, term), gradients[1], terms[1])
    of_first, of_last = md.tree.map(_add, (gradients[0], gradients[2]), (terms[0], terms[2]))
    return of_first, of_blocks, of_last


def _add(total: Any, term: Any) -> Any:
    return total + term.astype(total.dtype)


def _add_at(total: Any, chunk: Any, term: Any) -> Any:
    if len(total) == 1:
        return _add(total[0], term)[None]
    return np.at(total)[chunk].set(_add(take(total, chunk), term))  # which touches no other chunk


def zeros(t: Any, axis: str | tuple[str, ...], *leading: int, dtype: Any = None) -> Any:
    zero = np.zeros((), np.result_type(t.dtype, dtype or t.dtype))
    return pbroadcast(np.broadcast_to(zero, (*leading, *t.shape)), axis)  # no memory until it is added to


def _put(stash: Any, slot: Any, value: Any) -> Any:
    return np.at(stash)[slot].set(np.where(slot == NOTHING, take(stash, slot), value))


def _get(stash: Any, slot: Any) -> Any:
    return np.where(slot == NOTHING, 0, take(stash, slot))


def take(x: Any, i: Any) -> Any:
    return np.take(x, i, axis=0)  # which takes plain arrays too


def _check(schedule: Schedule, blocks: Any, batch: tuple, axis: str) -> None:
    """Raise ValueError if the schedule is for another number of stages, chunks or microbatches."""
    leaves, _ = md.tree.flatten_with_paths(blocks, "params[1]")
    expected = {
        "stages": (schedule.stages, {f"axis {axis!r}": axis_size(axis)}),
        "chunks": (schedule.chunks, {path: len(leaf) for path, leaf in leaves}),
        "microbatches": (schedule.microbatches, dict(zip(("inputs", "targets"), map(len, batch)))),
    }
    for parts, (count, sizes) in expected.items():
        for name, size in sizes.items():
            if size != count:
                raise ValueError(
                    f"scheduled: the schedule has {count} {parts}, but {name} has size {size}: make a schedule for "
                    f"{size} {parts}"
                )
