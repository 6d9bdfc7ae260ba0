"""The compiler, from top to bottom: a Python function becomes a program in NumPy source.

Recording gives a tape. Then come passes over tapes, in this order: inline calls, apply rewrites, fold constants and
merge common subexpressions, remove dead code (`simplify.py`); add in place, share factorizations, fuse loops, assign
buffers (`plan.py`). The last pass prints the plan (`codegen.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minidiff import tree
from minidiff.api.recording import collecting_later, stage_flat
from minidiff.compiler.codegen import Source
from minidiff.compiler.plan import plan_program
from minidiff.compiler.simplify import optimize
from minidiff.core.types import typeof
from minidiff.values.allocation import keep_by_default


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
        plan = plan_program(simplified, sharded, donated, fills_donated=True, kernels=options.get("kernels", True))
        self.source = Source(plan, name, options=options)
        self.tape = plan.tape
        self.overwritten = plan.overwritten_inputs
        structure = self.out_structure
        is_tuple = structure.node is tuple and structure.size != 1 and {*structure.children} <= {tree.LEAF}
        if structure is tree.LEAF or is_tuple:
            self.function = self.source.function
        else:
            run = self.source.results
            self.function = lambda *leaves: tree.unflatten(structure, run(*leaves))
