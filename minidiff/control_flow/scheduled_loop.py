"""Loops whose backward pass follows a schedule of checkpoints: `schedule=` of `scan` and `while_loop`."""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy

from minidiff import tree
from minidiff.api.derivatives import jvp, pull_back, vjp
from minidiff.control_flow.bodies import label_operation
from minidiff.control_flow.bounded_loop import BoundedLoop, hoist_casts, with_constants
from minidiff.control_flow.carries import is_staging
from minidiff.control_flow.cond import switch
from minidiff.control_flow.custom_rules import custom_vjp
from minidiff.control_flow.dead_code import prune_tape
from minidiff.control_flow.loops import scan
from minidiff.control_flow.schedules import CheckpointSchedule
from minidiff.control_flow.while_loop import while_loop
from minidiff.core.forward import instantiate
from minidiff.core.tape import Tape
from minidiff.core.tracer import Tracer, Value
from minidiff.core.types import typeof, zeros_like
from minidiff.errors.location import runs_again
from minidiff.ops.callback import pure_callback
from minidiff.ops.elementwise import add, greater, less, subtract
from minidiff.ops.slices import dynamic_index_in_dim
from minidiff.values.dtypes import is_differentiable
from minidiff.values.lists import scatter, select, split_list


def _write_file(x: Any) -> Any:
    """Copy an array into a file without a name, which the system deletes when nothing holds the array."""
    if not numpy.size(x):
        return numpy.array(x)
    with tempfile.TemporaryFile() as file:
        out = numpy.memmap(file, numpy.asarray(x).dtype, "w+", shape=numpy.shape(x)).view(numpy.ndarray)
    out[...] = x
    return out


#: An array, copied to disk: it takes no memory but what the system lends it.
to_disk_p = label_operation("to_disk", copy=_write_file)

State = list[Value]


class ScheduledLoop:
    """A scan whose backward pass takes steps again, from the states that a schedule stores.

    The body is a tape of values `shared` by all steps, the carries, and elements. The forward pass is a plain scan,
    and keeps its operands alone. The backward pass is a scan over the steps that it reverses, with the slots among its
    carries. It restores a state, takes the steps up to the one that it reverses, and stores states on the way. Since
    the schedule is data to it, the program of a compiled loop is as long for a thousand steps as for ten.
    """

    def __init__(self, body: Tape, counts: tuple[int, int], schedule: CheckpointSchedule, length: int, reverse: bool):
        self.body, self.schedule, self.length, self.reverse = body, schedule, length, reverse
        self.counts, self.carries = counts, counts[1]
        self.step = prune_tape(Tape(body.inputs, body.equations, body.outputs[: self.carries]))
        self.active = [is_differentiable(t.dtype) for t in body.in_types]
        self.active_results = [is_differentiable(t.dtype) for t in body.out_types]
        self.run, self.replay = custom_vjp(self.take_steps), custom_vjp(self.follow_schedule)
        self.run.defvjp(self.run_and_save, lambda saved, cts: self.replay(*saved, *cts))
        self.run.defjvp(partial(jvp, self.take_steps))
        self.replay.defvjp(partial(vjp, self.save_all), lambda pull, cts: pull(cts))
        self.replay.defjvp(partial(jvp, self.follow_schedule))

    def take_steps(self, init: State, shared: list[Value], xs: list[Value]) -> tuple[State, list[Value]]:
        def step(carry: State, x: list[Value]) -> tuple[State, list[Value]]:
            carry, ys = split_list(self.body.apply(*shared, *carry, *x), self.carries)
            return carry, ys

        return scan(step, init, xs, self.length, self.reverse)

    def run_and_save(self, *operands: list[Value]) -> tuple[tuple, tuple]:
        """Return the results, and for the backward pass the operands and the number of steps, if it is not known."""
        return self.run(*operands), (*operands, [])

    def save_all(self, init: State, shared: list[Value], xs: list[Value], count: list[Value], *cts: Any) -> tuple:
        """Return the cotangents of the operands, without the schedule: second derivatives in reverse mode save all."""
        return pull_back(self.take_steps, (init, shared, xs), cts)

    # ------------------------------------------------ the backward pass

    def tables(self, length: int) -> tuple[list[numpy.ndarray], numpy.ndarray, numpy.ndarray]:
        """Return the schedule as integers: for each reversal, the slot to restore, and the range of steps to take.

        For each step to take, they are its element and the slot that stores its state before, or 0: slot 0 is the
        initial state, which is an operand. A slot whose number is higher by that of the others is empty afterwards.
        """
        turns, rows = list[tuple[int, int, int]](), list[tuple[int, int]]()
        slot = restored = begin = 0
        for name, step, where in self.schedule.actions(length):
            if name == "store":
                slot = where
            elif name == "restore":
                restored = where
            elif name == "advance":
                rows += zip(range(step, where), [slot, *[0] * (where - step - 1)])
                slot = 0
            else:
                is_last = begin == len(rows) and restored
                turns.append((restored + self.schedule.slots - 1 if is_last else restored, begin, len(rows)))
                begin = len(rows)
        columns = numpy.array(turns, int).reshape(-1, 3).T[:, :: 1 if self.reverse else -1]
        elements, slots = numpy.array(rows, int).reshape(-1, 2).T
        return list(columns), length - 1 - elements if self.reverse else elements, slots

    def store(self, slots: list[State], slot: Value, state: State) -> list[State]:
        def replace(n: int, slots: list[State], state: State) -> list[State]:
            is_file = n + 1 >= self.schedule.slots - self.schedule.disk
            return [*slots[:n], list(map(to_disk_p.bind, state)) if is_file else state, *slots[n + 1 :]]

        branches = [partial(replace, n) for n in range(len(slots))]
        return switch(slot, [lambda slots, state: slots, *branches], slots, state)

    def restore(self, slots: list[State], slot: Value, init: State) -> tuple[State, list[State]]:
        """Return the state in a slot, and the slots; without it, if it is used for the last time."""
        read = lambda n, slots, init: (slots[n], slots)  # noqa: E731
        take = lambda n, slots, init: (slots[n], [*slots[:n], init, *slots[n + 1 :]])  # noqa: E731
        branches = [partial(f, n) for f in (read, take) for n in range(len(slots))]
        return switch(slot, [lambda slots, init: (init, slots), *branches], slots, init)

    def follow_schedule(self, init: State, shared: State, xs: State, count: list[Value], *cts: State) -> tuple:
        """Return the cotangents of the operands, from those of the last carries and of the stacked results."""
        ct_last, ct_ys = cts
        turns, elements, stores = self.tables_of_run(count)

        def pull(carry: tuple, element: tuple) -> tuple:
            (slots, cts, sums), (x, ct_y, (slot, begin, end)) = carry, element

            @runs_again
            def advance(carry: tuple) -> tuple:
                row, state, slots = carry
                slots = self.store(slots, dynamic_index_in_dim(stores, row, 0, False), state)
                n = dynamic_index_in_dim(elements, row, 0, False)
                x = [dynamic_index_in_dim(array, n, 0, False) for array in xs]
                return add(row, 1), self.step.apply(*shared, *state, *x), slots

            first = (begin, *self.restore(slots, slot, init))
            _, state, slots = while_loop(lambda carry: less(carry[0], end), advance, first)
            sums, cts, ct_x = self.pull_step([*shared, *state, *x], [*cts, *ct_y], sums)
            return (slots, cts, sums), ct_x

        of_shared, of_carries, of_xs = split_list(self.active, *self.counts)
        sums = [zeros_like(typeof(x)) for x in select(shared, of_shared)]
        carry = [init] * (self.schedule.slots - 1), select(ct_last, of_carries), sums
        rows = xs, select(ct_ys, self.active_results[self.carries :]), turns
        (_, cts, sums), ct_xs = self.reverse_steps(pull, carry, rows, count)
        in_cts = (cts, of_carries, init), (sums, of_shared, shared), (ct_xs, of_xs, xs)
        return tuple(list(map(instantiate, scatter(cts, active), values)) for cts, active, values in in_cts)

    def tables_of_run(self, count: list[Value]) -> tuple:
        """Return the tables of a run of so many steps."""
        return self.tables(self.length)

    def reverse_steps(self, pull: Callable, carry: tuple, rows: tuple, count: list[Value]) -> tuple:
        """Repeat `pull` for each step, the last one first, with its elements, cotangents, and columns of the table."""
        return scan(pull, carry, rows, self.length, not self.reverse)

    def pull_step(self, values: Sequence[Value], cts: list[Value], sums: list[Value]) -> Sequence[list[Value]]:
        """Return the sums of the cotangents of shared values so far, and those of the carries and the elements.

        Cotangents are added in the order of a loop without schedule: one by one, if it runs step by step.
        """
        recorded = is_staging(eager=False)

        @runs_again
        def step(*active: Value) -> list[Value]:
            args = [a if is_active else x for x, a, is_active in zip(values, scatter(active, self.active), self.active)]
            results = select(self.body.apply(*args), self.active_results)
            return results if recorded else [*results, *active[: len(sums)]]

        in_cts = pull_back(step, tuple(select(values, self.active)), cts if recorded else [*cts, *sums])
        of_shared, others = split_list(in_cts, len(sums))
        return [
            list(map(add, sums, of_shared)) if recorded else of_shared,
            *split_list(others, sum(self.active[self.counts[0] :][: self.carries])),
        ]


class ScheduledWhile(ScheduledLoop):
    """A `while_loop` of at most so many steps; its schedule is that of the number of steps that it took.

    The forward pass counts the steps, and stores nothing. A compiled program calls back for the table of this number.
    """

    def __init__(self, loop: BoundedLoop, schedule: CheckpointSchedule):
        self.loop, shared = loop, len(loop.shared)
        super().__init__(loop.body, (shared, len(loop.body.inputs) - shared), schedule, loop.max_steps, False)

    def take_steps(self, init: State, shared: list[Value], xs: list[Value]) -> tuple[State, list[Value]]:
        carries, _, count = self.loop.run(init, shared)
        return carries, [count]

    def run_and_save(self, *operands: list[Value]) -> tuple[tuple, tuple]:
        carries, count = self.run(*operands)
        return (carries, count), (*operands, count)

    def tables_of_run(self, count: list[Value]) -> tuple:
        """Return the tables, with zeros after the rows of a run of fewer steps than the largest number."""
        largest = tree.map(typeof, self.tables(self.length))
        fill = lambda row, t: numpy.pad(row, (0, t.size - row.size))  # noqa: E731
        tables = lambda n: tree.map(fill, self.tables(int(n)), largest)  # noqa: E731
        return pure_callback(tables, largest, *count) if isinstance(count[0], Tracer) else tables(*count)

    def reverse_steps(self, pull: Callable, carry: tuple, rows: tuple, count: list[Value]) -> tuple:
        def step(state: tuple) -> tuple:
            n, carry = subtract(state[0], 1), state[1]
            turn = [dynamic_index_in_dim(column, n, 0, False) for column in rows[2]]
            return n, pull(carry, ([], [], turn))[0]

        return while_loop(lambda state: greater(state[0], 0), step, (*count, carry))[1], []


class FollowedSchedule(CheckpointSchedule):
    """A schedule that `scan` and `while_loop` can follow."""

    def bind(self, closed: tuple[Tape, list[Value]], init: State, xs: list[Value], params: dict) -> tuple:
        tape, shared = hoist_casts(*with_constants(*closed))
        return ScheduledLoop(tape, (len(shared), len(init)), self, **params).run(init, shared, xs)

    def bind_while(self, loop: BoundedLoop, init: State) -> State:
        return ScheduledWhile(loop, self).run(init, loop.shared, [])[0]


def _schedule(kind: str, memory: int, disk: int = 0) -> FollowedSchedule:
    if operator.index(memory) < 1 or operator.index(disk) < 0:
        raise ValueError(
            f"{kind}: at least 1 state must be in memory, and no fewer than 0 on disk, got {memory!r} and {disk!r}"
        )
    return FollowedSchedule(kind, memory + disk, disk)


def revolve(slots: int) -> CheckpointSchedule:
    """Let the backward pass of a loop store `slots` states where it then takes the fewest steps again.

    The initial state is one of them. The backward pass of n steps takes `r * n - comb(slots + r, r - 1)` steps again,
    with the least r for which `comb(slots + r, r)` is at least n, and none more often than r times.

    Args:
        slots: the number of states in memory, at least 1.

    Returns:
        A schedule for `scan(…, schedule=)` and `while_loop(…, max_steps=, schedule=)`.

    >>> import numpy as np
    >>> from minidiff import grad
    >>> steps = lambda x: scan(lambda x, _: (np.sin(x), None), x, length=100, schedule=revolve(5))[0]
    >>> print(f"{grad(steps)(1.0):.4f}")
    0.0037

    Source: Griewank and Walther, "Algorithm 799: Revolve", ACM Transactions on Mathematical Software 26 (2000).
    """
    return _schedule("revolve", slots)


def multistage(memory: int, disk: int) -> CheckpointSchedule:
    """Store states as `revolve(memory + disk)` does, of which those that are used least are in files.

    Files have no name, so that none is left, whatever ends the program.

    Args:
        memory: the number of states in memory, at least 1.
        disk: the number of states on disk.

    Returns:
        A schedule for `scan(…, schedule=)` and `while_loop(…, max_steps=, schedule=)`.

    >>> multistage(2, 3).advances(40) == revolve(5).advances(40)
    True

    Source: Stumm and Walther, "MultiStage approaches for optimal offline checkpointing", SIAM Journal on Scientific
    Computing 31 (2009).
    """
    return _schedule("multistage", memory, disk)


def online(slots: int) -> CheckpointSchedule:
    """Store `slots` states of a loop where they are best if it may end after any step.

    No step is taken again more often than by `revolve`; all together are more, by up to half.

    Args:
        slots: the number of states in memory, at least 1.

    Returns:
        A schedule for `scan(…, schedule=)` and `while_loop(…, max_steps=, schedule=)`.

    >>> online(3).advances(38), revolve(3).advances(38)
    (142, 120)

    Source: Wang, Moin and Iaccarino, "Minimal repetition dynamic checkpointing algorithm for unsteady adjoint
    calculation", SIAM Journal on Scientific Computing 31 (2009).
    """
    return _schedule("online", slots)
