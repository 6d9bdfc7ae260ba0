"""`print_p`: a primitive that prints its operands and has no results.

Printing is an effect, so passes that remove, merge or precompute operations leave it in place (see
`Primitive.has_effect`). It prints when the program runs, in program order, once for each element of a `vmap` and on
each rank of a `shard_map`. Under `vmap`, a branch that only some elements take prints for all of them: the others run
it on the operands of one that takes it.
"""

from __future__ import annotations

import builtins
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from minidiff import tree
from minidiff.core.primitive import Primitive
from minidiff.core.tracer import Value
from minidiff.ops.dimensions import gather

#: Maps operands on all ranks of this process to the name of each rank and its local operands.
ByRank = Callable[[Sequence[Value]], Iterator[tuple[str, Sequence[Value]]]]


class Format(NamedTuple):
    """A format string, the structure of its arguments, and their non-array leaves."""

    text: str
    structure: tree.Structure
    fixed: tuple[tuple[int, Any], ...]  # non-array leaves, each with its position

    def __call__(self, operands: Iterable[Value]) -> str:
        leaves = list(operands)
        for place, x in self.fixed:
            leaves.insert(place, x)
        args, kwargs = tree.unflatten(self.structure, leaves)
        return self.text.format(*args, **kwargs)


class Print(Primitive):
    """The primitive that prints its operands, with the parameter `format`.

    Two more parameters are present where they are needed: `batches` says, for each `vmap` from the outermost, which
    operands have its axis in front; `by_rank` splits operands among the ranks of a `shard_map`.
    """

    multiple_results = True
    operands_agree = False
    has_effect = True

    def __init__(self) -> None:
        super().__init__("debug_print", _print, lambda *types, **params: [], sharding=gather)

    def jvp(self, primals, tangents, params):
        return self.bind(*primals, **params), []

    def batch(self, args, batched, params):
        return self.bind(*args, **{**params, "batches": (tuple(batched), *params.get("batches", ()))})

    def show_params(self, params):
        return repr(params["format"].text)


def _print(
    *operands: Value, format: Format, batches: Sequence[Sequence[bool]] = (), by_rank: ByRank | None = None
) -> list:
    for rank, local in [("", operands)] if by_rank is None else by_rank(operands):
        for element in batch_elements(local, batches):
            # One string with its newline, so that output of other processes does not come in between.
            builtins.print((f"{rank}: " if rank else "") + f"{format(element)}\n", end="", flush=True)
    return []


def batch_elements(operands: Sequence[Value], batches: Sequence[Sequence[bool]]) -> Iterator[Sequence[Value]]:
    """Yield the operands of each batch element; `batches` says which have each batch axis, from the outermost."""
    if not batches:
        yield operands
        return
    batched, *inner = batches
    for i in range(next(len(x) for x, is_batched in zip(operands, batched) if is_batched)):
        yield from batch_elements([x[i] if is_batched else x for x, is_batched in zip(operands, batched)], inner)


print_p = Print()


class CheckFormat(string.Formatter):
    """A formatter that raises for a missing argument, and for an unused one."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return ""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return value

    def get_field(self, field_name: str, args: Sequence, kwargs: Mapping) -> tuple[Any, Any]:
        first = field_name.partition(".")[0].partition("[")[0]
        key = int(first) if first.isdigit() else first
        return self.get_value(key, args, kwargs), key

    def check_unused_args(self, used_args: set, args: Sequence, kwargs: Mapping) -> None:
        unused = [f"argument {i}" for i in range(len(args)) if i not in used_args]
        unused += [f"{name}=" for name in kwargs if name not in used_args]
        if unused:
            raise TypeError(f"debug.print: the format does not use {', '.join(unused)}: write a {{}} for each argument")
