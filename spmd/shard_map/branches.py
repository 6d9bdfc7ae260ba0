"""Bodies of `shard_map` whose ranks take different branches or numbers of steps, and effects of each rank by itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy

from collectives.backends.base import Axes, Backend, describe_rank
from collectives.reductions import pmax_p, pmin_p
from minidiff.control_flow.cond import Cond
from minidiff.control_flow.divergent import DivergentOperation, communicating_equations
from minidiff.control_flow.while_loop import While, run_active
from minidiff.core.interpreter import EVALUATE, running
from minidiff.core.primitive import Primitive
from minidiff.core.tape import Tape, tapes_of
from minidiff.core.tracer import Value
from minidiff.core.types import ShapedArray, Var, typeof
from minidiff.values.lists import split_list
from spmd.mesh.mesh import Mesh
from spmd.shard_map.interpreter import SPMD, RankTracer, marks_of


class BranchingBodies(SPMD):
    """Run a cond or a loop whose selector varies: each rank has the results of its own branch, or of its own steps."""

    idle: frozenset[int] = frozenset()  # the simulated ranks that do not take the running branch

    def run_higher_order(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
        if isinstance(primitive, Cond) and typeof(args[0]).variance:
            return self._run_branches(primitive, args, params)
        if isinstance(primitive, While) and (not self.scope.typed or params["cond"].out_types[0].variance):
            return self.run_loop(primitive, args, params)
        return self.run_bodies(primitive, args, params)

    def run_bodies(self, primitive: Primitive, args: Sequence[Value], params: dict) -> Any:
        """Run an operation with bodies, but a cond or a loop whose selector varies."""
        args = args if self.scope.typed else list(map(self._make_agreed_invariant, args))
        return super().run_higher_order(primitive, args, params)

    def _make_agreed_invariant(self, x: Value) -> Value:
        """Without types, make an integer or boolean scalar that is the same on all ranks invariant."""
        if type(x) is not RankTracer or not x.varying or x.shape or x.dtype.kind not in "biu":
            return x
        ranks, params = self.mesh.ranks, {"axes": x.varying, "size": self.mesh.ranks.size(x.varying)}
        data = numpy.asarray(x.data)  # raises TracerError if it is recorded
        low, high = (ranks.collective(p, data, x.varying, params, counted=False)[0] for p in (pmin_p, pmax_p))
        return RankTracer(self, low, ()) if numpy.array_equal(low, high) else x

    def run_effect(self, primitive: Primitive, args: Sequence[Value], params: dict) -> list:
        """Run an operation with an effect, and no results, on each rank's blocks."""
        operands = [self.operand(x) for x in args]
        by_rank = functools.partial(_by_rank, self.mesh, self.idle, [varying for _, varying in operands])
        with running(self.base):
            return primitive.bind(*[x for x, _ in operands], **{**params, "by_rank": by_rank})

    def _run_branches(self, cond: Cond, args: Sequence[Value], params: dict) -> list[Value]:
        """Prepare ranks for the communication in branches, and run these."""
        selector, *values = map(self.own_tracer, args)
        self.prepare_divergence(cond, selector.type, params)
        return self.run_branches(cond, selector, values, params)

    def own_tracer(self, x: Value) -> RankTracer:
        return RankTracer(self, *self.operand(x), getattr(x, "marked", None))

    def prepare_divergence(self, primitive: DivergentOperation, selector: ShapedArray, params: dict) -> None:
        """Check the communication in bodies that not all ranks run, and make its communicators, which all ranks do."""
        primitive.check_communication(selector, params)
        for eqn in [eqn for tape in tapes_of(params) for eqn in communicating_equations(tape)]:
            self.mesh.ranks.connect(eqn.params)

    def run_branches(self, cond: Cond, selector: RankTracer, values: Sequence[RankTracer], params: dict) -> list[Value]:
        """Run the branches that ranks in this process take, each on all of them at once, and select."""
        tapes = tapes_of(params)
        if self.mesh.backend == "mpi":
            with running(self), self._in_branch([]):
                return tapes[cond.choose(selector.data)](*values)
        results: dict[int, list[Value]] = {}
        for i, tape in enumerate(tapes):
            with running(EVALUATE):
                takers = cond.matches(selector.data, i)
            if takers.any():
                taken = RankTracer(self, takers, selector.varying)
                operands = self.mask_operands(taken, values, tape)
                with running(self), self._in_branch(self._idle_ranks(taken)):
                    results[i] = tape(*operands)
        return self.select_results(cond, selector, results, tapes)

    def run_loop(self, loop: While, args: Sequence[Value], params: dict) -> list[Value]:
        """Run a loop: on each rank, as many steps as its condition says."""
        args = args if self.scope.typed else list(map(self._make_agreed_invariant, args))
        k, n, body = params["cond_consts"], params["body_consts"], params["body"]
        leading, shared, carry = split_list(list(map(self.own_tracer, args)), k, n)
        axes: Axes = ()
        while True:
            with running(self), self._in_branch([]) if axes else contextlib.nullcontext():
                active = self.own_tracer(params["cond"](*leading, *carry)[0])
            if active.varying != axes:
                self.prepare_divergence(loop, ShapedArray((), active.dtype, active.varying), params)
                axes = active.varying
            if not numpy.asarray(active.data).any():
                return carry
            with running(self), self._in_branch(self._idle_ranks(active) if axes else []):
                carry = self.run_step(active, body, [*shared, *carry])

    def run_step(self, active: RankTracer, body: Tape, operands: Sequence[RankTracer]) -> list[Value]:
        """Run a step of the ranks that are active; the others keep their carries."""
        if self.mesh.backend == "mpi" or not active.varying:
            return list(map(self.own_tracer, body(*operands)))
        return self._with_marks(run_active(active, body, operands, self.mask_operands), body)

    def _idle_ranks(self, taken: RankTracer) -> list[int]:
        """Return the ranks in this process that do not run a body."""
        blocks = local_blocks(self.mesh.ranks, taken.data, taken.varying)
        return [r for r, is_taken in enumerate(blocks) if not is_taken]

    def mask_operands(self, taken: RankTracer, values: Sequence[RankTracer], tape: Tape) -> list[RankTracer]:
        """Give ranks that do not run a body the operands of one that does.

        On their own operands, which a body never gets on real ranks, it might raise, or warn of a NaN. Operands that
        a body only returns are not copied.
        """
        ranks: Any = self.mesh.ranks
        mask: Callable[..., tuple[Any, Axes]] = ranks.mask_operand
        used = {a for eqn in tape.equations for a in eqn.inputs if isinstance(a, Var)}
        with running(self.base):
            return [
                RankTracer(self, *mask(x.data, x.varying, taken.varying, taken.data), x.marked) if v in used else x
                for v, x in zip(tape.inputs, values)
            ]

    def select_results(
        self, cond: Cond, selector: RankTracer, results: dict[int, list[Value]], tapes: Sequence[Tape]
    ) -> list[Value]:
        """Select each rank's results. Those of a branch that no rank takes are missing."""
        some = next(iter(results.values()))
        with running(self):
            outs = cond.select(selector, [results.get(i, some) for i in range(len(tapes))])
        return self._with_marks(outs, tapes[0])

    def _with_marks(self, outs: Sequence[Value], tape: Tape) -> list[Value]:
        return [RankTracer(self, *self.operand(x), marks_of(t.states)) for x, t in zip(outs, tape.out_types)]

    @contextlib.contextmanager
    def _in_branch(self, idle: Collection[int]) -> Iterator[None]:
        """Run a branch that some ranks do not take: these neither print nor compare arrays."""
        before = self.idle, self.compare_constant
        self.idle, self.compare_constant = self.idle.union(idle), None
        try:
            yield
        finally:
            self.idle, self.compare_constant = before


def local_blocks(ranks: Backend, x: numpy.ndarray, varying: Axes) -> list[numpy.ndarray]:
    """Return the blocks of a value on the ranks in this process."""
    blocks = ranks.local(numpy.asarray(x), varying)
    return blocks if isinstance(blocks, list) else [blocks]


def _by_rank(
    mesh: Mesh, idle: Collection[int], axes: Sequence[Axes], data: Sequence[Value]
) -> Iterator[tuple[str, list[Value]]]:
    """Yield the name of each rank in this process that is not idle, and its blocks of these values."""
    columns = [
        local_blocks(mesh.ranks, x, varying) for x, varying in zip((0, *data), ((), *axes))
    ]  # 0: to count the ranks
    for r, (_, *blocks) in enumerate(zip(*columns)):
        if r not in idle:
            yield describe_rank(mesh.shape, mesh.ranks.rank + r), [x[()] for x in blocks]
