"""The compiler, from top to bottom: a Python function becomes a program in NumPy source.

Recording gives a tape. `optimize` and `plan_program` list the passes over it, in the order in which they run. Each
takes a tape and returns a tape of the same function, with the same types; the last one assigns buffers. `codegen.py`
prints the plan.

>>> import numpy as np
>>> from minidiff import grad, make_tape
>>> print(optimize(make_tape(grad(lambda x: np.sin(x) * 2.0))(1.0)))
lambda a:f64[]:
  b:f64[] = cos(a)
  c:f64[] = multiply(2.0, b)
  return c
"""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

from minidiff import tree
from minidiff.api.recording import collecting_later, stage_flat
from minidiff.compiler import buffers, native
from minidiff.compiler.at_once import compute_at_once
from minidiff.compiler.buffers import ProgramPlan, fused_p
from minidiff.compiler.codegen import Source
from minidiff.compiler.factorizations import share_factorizations
from minidiff.compiler.kernels import expand_operations, find_reads, fuse, split_operands
from minidiff.compiler.registers import find_loops, fuse_small
from minidiff.compiler.simplify import RULES, Passes, Program, inline_calls, rewrite_bodies
from minidiff.control_flow.dead_code import prune_tape
from minidiff.control_flow.loops import run_count
from minidiff.core.ranks import Scope, ranks
from minidiff.core.tape import Equation, Tape
from minidiff.core.types import Var, typeof
from minidiff.errors.location import warn_here
from minidiff.values.allocation import keep_by_default
from minidiff.values.settings import restores_settings

# ---------------------------------------------------------------- options

#: Settings of programs, with defaults: whether loops are compiled, if llvmlite is installed (`kernels.py`), and on how
#: many threads they run (`threads.py`).
SETTINGS = {"kernels": True, "threads": None}

#: Earlier names of rewrites, which still work, with a warning.
RENAMED = {
    "narrow operands": "drop broadcasts",
    "copied within": "drop copies",
    "neutral operand": "drop neutral",
    "times minus one": "fold minus one",
    "negated term": "fold negations",
    "negative twice": "drop double negations",
    "same shape": "drop identity reshapes",
    "reshaped twice": "merge reshapes",
    "transposed twice": "merge transposes",
    "rolled twice": "merge rolls",
    "sum reshaped": "fold reshape into sum",
    "sum divided": "recognize means",
}


def all_passes(excluded: Collection[str] = ()) -> Passes:
    """Return the rewrites of all layers as those of one, without those with the names in `excluded`."""
    layers = [*ranks.passes, Passes(RULES, last=[compute_at_once], settings=SETTINGS)]
    select = lambda rewrites: [r for r in rewrites if name_of_rewrite(r) not in excluded]  # noqa: E731
    return Passes(
        rules={p: select(rules) for layer in layers for p, rules in layer.rules.items()},
        first=select(p for layer in layers for p in layer.first),
        last=select(p for layer in layers for p in layer.last),
        settings={name: value for layer in layers for name, value in layer.settings.items()},
    )


def rewrites() -> dict[str, Callable]:
    """All rewrites by name (as in `without=`): passes over tapes, and rules for operations."""
    passes = all_passes()
    functions: list[Callable] = [*passes.first, *itertools.chain(*passes.rules.values()), *passes.last]
    return {name_of_rewrite(rewrite): rewrite for rewrite in functions}


def name_of_rewrite(rewrite: Callable) -> str:
    """Return the name of a rewrite: its function's name, as words."""
    return rewrite.__name__.replace("_", " ")


def check_options(without: Sequence[str], settings: dict) -> None:
    """Raise ValueError for an unknown rewrite, or a size that is not above 0, TypeError for an unknown setting."""
    if isinstance(without, str):
        raise TypeError(f"without must be a tuple of rewrites, got the string {without!r}; write ({without!r},)")
    known, options = rewrites(), all_passes().settings
    for name in without:
        if name in RENAMED:
            warn_here(f"the rewrite {name!r} is called {RENAMED[name]!r}", DeprecationWarning)
            continue
        if name not in known:
            raise ValueError(f"without names an unknown rewrite, {name!r}; there are {', '.join(sorted(known))}")
    for name, value in settings.items():
        if name not in options:
            raise TypeError(f"rewrites have no setting {name!r}; they have {', '.join(options) or 'none'}")
        is_size = isinstance(value, numbers.Real) and not isinstance(value, bool) and operator.gt(value, 0)
        if options[name] is None and value is not None and not is_size:
            raise ValueError(f"{name} must be a number above 0, or None for the default; got {value!r}")


# ---------------------------------------------------------------- passes from a recorded tape to a simplified one


@restores_settings
def optimize(tape: Tape, without: Sequence[str] = (), **settings: Any) -> Tape:
    """Optimize a tape and its bodies.

    Rewrites named in `without` are left out; `settings` override the defaults in `all_passes()`. Raises
    ValueError for a name that is not among the `rewrites()`, TypeError for an unknown setting.
    """
    check_options(without, settings)
    passes = all_passes({RENAMED.get(name, name) for name in without})
    passes = passes._replace(settings={**passes.settings, **settings})
    return buffers.copy_shared_results(_optimize_tape(tape, None, passes))


def _optimize_tape(tape: Tape, scope: Scope | None, passes: Passes) -> Tape:
    """`optimize` for a program or for a body in one, whose results may share memory, in the scope of a `shard_map`."""
    tape = inline_calls(tape, scope)
    for rewrite in passes.first:
        tape = rewrite(tape, scope, passes.settings)
    # A loop and its body share a scope.
    inner = lambda eqn: eqn.primitive.body_scope(eqn.params) or scope  # noqa: E731
    tape = rewrite_bodies(prune_tape(tape), lambda eqn, body: _optimize_tape(body, inner(eqn), passes))
    tape = prune_tape(Program(tape, passes.rules).simplify())
    for rewrite in passes.last:
        tape = rewrite(tape, scope, passes.settings)
    return tape


# ---------------------------------------------------------------- passes from a simplified tape to a plan


def plan_program(tape: Tape, kernels: bool = True, **options: Any) -> ProgramPlan:
    """Plan how a tape and its bodies run: the options are those of `plan_tape`."""
    plan = plan_tape(tape, kernels=kernels, **options)
    bodies = {
        (eqn, key): plan_body(plan, eqn, key, kernels)
        for eqn in plan.tape.equations
        if eqn.bodies and eqn.primitive is not fused_p
        for key, body in eqn.params.items()
        if isinstance(body, Tape)
    }
    has_loops = kernels and native.is_available()
    in_registers = find_loops(plan.tape, plan.sharded, plan.runs) if has_loops else frozenset()
    return plan._replace(bodies=bodies, in_registers=in_registers)


def plan_body(
    plan: ProgramPlan, eqn: Equation, key: str, kernels: bool, plan_of: Callable[..., ProgramPlan] = plan_program
) -> ProgramPlan:
    """Plan a body of an equation. If an operand of the equation may be sharded, any input of the body may be."""
    body = eqn.params[key]
    sharded = any(isinstance(a, Var) and a in plan.sharded for a in eqn.inputs)
    donated = buffers.donatable_carries(eqn) if key == "body" and not sharded else []
    runs = plan.runs * run_count(eqn)
    return plan_of(body, sharded=[sharded] * len(body.inputs), donated=donated, kernels=kernels, runs=runs)


def plan_tape(
    tape: Tape,
    sharded: Sequence[bool] = (),
    donated: Sequence[bool] = (),
    fills_donated: bool = False,
    kernels: bool = True,
    runs: int = 1,
) -> ProgramPlan:
    """Plan how the operations of a tape run, `runs` times in each call of the program, but not those of its bodies.

    `sharded` marks inputs that may be sharded arrays: NumPy's functions compute what depends on them, and their memory
    is not reused. The program may write into inputs that are `donated`; with `fills_donated`, it copies results into
    them. `kernels=False` leaves all operations to NumPy.
    """
    not_plain = [*itertools.compress(tape.inputs, sharded)]
    writable = [*itertools.compress(tape.inputs, donated)]
    tape = group_operations(tape, not_plain, kernels, runs)
    if writable and fills_donated:
        tape = buffers.copy_views(tape, {v.type for v in writable} - {v.type for v in not_plain})
    return buffers.assign_buffers(tape, not_plain, writable, fills_donated, runs)


def group_operations(tape: Tape, sharded: Collection[Var] = (), kernels: bool = True, runs: int = 1) -> Tape:
    """Group the operations of a tape: sums within an array, shared factorizations, and fused loops.

    Inputs in `sharded` may be sharded arrays. A call of the program runs the tape `runs` times.
    """
    excluded = {*sharded}
    for eqn in tape.equations:
        excluded.update(buffers.sharded_results(eqn, excluded))
    has_loops = kernels and native.is_available()
    tape = split_operands(expand_operations(tape, excluded), excluded) if has_loops else tape
    tape = buffers.add_in_place(tape, {*excluded, *find_reads(tape, excluded)} if has_loops else excluded)
    if kernels and native.is_wanted():
        tape = share_factorizations(tape, excluded)
    if not has_loops:
        return tape
    return fuse_small(buffers.add_in_place(fuse(tape, excluded, runs), excluded), excluded, runs)


# ---------------------------------------------------------------- all of it


class CompiledProgram:
    """A function compiled for arguments of given types: its `tape` and its `source`.

    It writes into the arguments in `overwritten`, by index, which are some of those that are `donated`.
    """

    @collecting_later
    def __init__(self, f: Callable, args: Any, name: str, options: dict, donated: Sequence[bool] = ()):
        keep_by_default()
        recorded, _, self.out_structure = stage_flat(f, args, f"jit of {name}")
        simplified = optimize(recorded, **options)
        sharded = [typeof(x).sharding is not None for x in tree.leaves(args)]
        kernels = options.get("kernels", True)
        plan = plan_program(simplified, kernels, sharded=sharded, donated=donated, fills_donated=True)
        self.source = Source(plan, name, options=options)
        self.tape = plan.tape
        self.overwritten = plan.overwritten_inputs
        self.function = self.source.function_of(self.out_structure)
