"""Checks that ranks agree on their calls, and on values that must be the same on all of them."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy

from collectives.backends.base import coordinates_of
from collectives.guards.mismatch import DisagreementError, first_difference, group_reports, report
from collectives.rooted import broadcast_p
from minidiff import tree
from minidiff.core.tracer import Tracer
from minidiff.core.types import ShapedArray
from minidiff.errors.location import current_location, warn_at
from minidiff.values.settings import checks, override
from spmd.mesh.mesh import Mesh
from spmd.mesh.specs import P, PartitionSpec

# ---------------------------------------------------------------- calls of shard_map


class UserCall:
    """A description of a user's `shard_map` call, for ranks to compare.

    It is compared before the call runs for the first time. It is a parameter of the operation, so that a compiled
    program compares when it runs, not when it is recorded, which one rank may do alone. Nothing computed depends on it:
    as parameters, all calls are equal.
    """

    __slots__ = ("function", "lines", "code", "is_linear", "agreed")

    def __init__(self, function: str, lines: Callable[[], list[str]] | None, code: Any = None, is_linear: bool = False):
        self.function = function
        self.lines: Any = lines
        self.code = code  # of the function: calls of one function are counted together
        self.is_linear = is_linear  # it is part of a derivative: its operands may depend on branches that ranks took
        self.agreed = lines is None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserCall)

    def __hash__(self) -> int:
        return 0


#: A call with nothing to compare, which the library made.
LIBRARY_CALL = UserCall("", None)


def install(hooks: Any) -> None:
    """Let every `shard_map` check that ranks agree: see `spmd.shard_map.calls`."""
    hooks.linear_part, hooks.compare_call, hooks.compare_results = linear_part, compare_call, compare_results
    hooks.compare_arguments = compare_arguments_if_due


def compare_call(mesh: Mesh, call: UserCall) -> None:
    """Raise DisagreementError on all ranks if they call a `shard_map` over this mesh differently."""
    if call.agreed:
        return
    name = f"shard_map of {call.function}"
    if lines := mesh.ranks.compare_once(name, [name, *call.lines()]):
        differ = any(line.startswith("shard_map") for line in lines.values())
        problem = "ranks call different shard_maps" if differ else f"ranks call {name} differently"
        advice = next(text for start, text in _ADVICE.items() if any(map(start.match, lines.values())))
        raise DisagreementError(report(problem, lines, advice))
    call.agreed, call.lines = True, None


def linear_part(call: UserCall | None) -> UserCall | None:
    """Return the call of the linear part of a call's derivative."""
    return call and UserCall(call.function, call.lines, call.code, is_linear=True)


def fused_call(params: Sequence[dict]) -> UserCall | None:
    """Return one call for several fused ones, whose descriptions are compared at once; None if no user made any."""
    calls = {id(call): call for p in params if (call := p.get("call")) is not None}.values()
    if not calls:
        return None
    names, parts = dict.fromkeys(call.function for call in calls), [call.lines for call in calls if call.lines]
    lines = (lambda: [line for lines in parts for line in lines()]) if parts else None
    return UserCall(" and ".join(names), lines, tuple(call.code for call in calls))


def describe_static(mesh: Mesh, values: Sequence[Any]) -> str:
    """Return static arguments as text for ranks to compare, without addresses in memory, which differ."""
    if mesh.backend == "simulated":
        return ""
    return ", ".join(re.sub(" at 0x[0-9a-f]+", "", f"{x!r:.200}") for x in values)


def describe_call(
    mapped: Any, context: Any, specs: Sequence[P], types: Sequence[ShapedArray], static: str = ""
) -> UserCall | None:
    """Return the description of a call as lines for ranks to compare."""
    if context.mesh.backend == "simulated":
        return None

    def lines() -> list[str]:
        sizes = ", ".join(f"{a}: {n}" for a, n in context.mesh.shape.items())
        return [
            f"arrays in the arguments: {len(specs)}",
            f"mesh ({sizes})",
            f"axis_names={{{', '.join(map(repr, context.axes))}}}",
            *[f"{name}={context.params[name]}" for name in ("check_rep", "auto_pbroadcast")],
            *[f"in_specs of {spec.path}: {spec}" for spec in specs],
            *[f"{path}: {spec}" for path, spec in mapped.out_paths],
            f"static arguments: {static}",
            *[
                f"{spec.path}: {t}" + (f", a ShardedArray split as {t.sharding.spec}" if t.sharding else "")
                for spec, t in zip(specs, types)
            ],
        ]

    return UserCall(mapped.name, lines, getattr(mapped.f, "__code__", None))


_ADVICE = {
    re.compile("shard_map|arrays"): "All ranks call the same functions, with as many arguments, in one order",
    re.compile("mesh"): "All ranks use one mesh: give make_mesh the same sizes and names on all of them",
    re.compile("in_specs|out_specs|axis_names|check_rep|auto_pbroadcast"): (
        "All ranks split values in the same way: write the same arguments of shard_map on all of them, "
        "independent of the rank"
    ),
    re.compile("static"): "All ranks pass the same static arguments, those whose entry of in_specs is None",
    re.compile(".* a ShardedArray"): "Split it the same on all ranks: spmd.distribute(x, mesh, spec), with one spec",
    re.compile(""): (
        "All ranks pass the same whole arrays, of which each takes its own blocks. Where only one rank has read the "
        "data, send it to the others first (MPI.COMM_WORLD.bcast(x)); where dtypes differ, convert them on all "
        "(np.asarray(x, np.float64))"
    ),
}

# ---------------------------------------------------------------- values


def gather_texts(mesh: Mesh, text: str) -> list[str]:
    """The texts of all processes of a mesh, in the order of ranks. It is a barrier too."""
    return mesh.ranks.gather_texts(text)


def check_invariant(x: Any, mesh: Mesh) -> Any:
    """Check that `x` is the same on all ranks of the mesh, and return it.

    Values are compared bit for bit, with their types. Arguments of a `shard_map` must be the same on all ranks, and
    under MPI only the program can ensure that: a random generator without a seed, or seeded by the rank, gives each
    rank other parameters. `x` is a tree of arrays; for a `ShardedArray`, type and spec are compared, not the blocks,
    which differ by design. It is a collective of a few bytes for each array: every rank must call it. Simulated ranks
    always agree.

    Raises ValueError on all ranks, naming the first array that is not the same, and which ranks have which value.

    >>> import numpy as np, spmd
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> params = check_invariant({'w': np.random.default_rng(0).normal(size=3)}, mesh)
    """
    leaves, _ = tree.flatten_with_paths(x, "x")
    types = [f"{path}: {_describe_type(leaf)}" for path, leaf in leaves]
    compare_lines("ranks have values of different types", mesh, types)
    check_blocks(mesh, [(path, leaf, ()) for path, leaf in leaves if not isinstance(leaf, Tracer)])
    return x


def compare_lines(problem: str, mesh: Mesh, lines: Sequence[str]) -> None:
    """Raise ValueError on all ranks, which begins with the `problem`, if their lines differ. It is a collective."""
    if mesh.backend == "mpi":
        check_agreement(problem, mesh, [text.split("\n") for text in gather_texts(mesh, "\n".join(lines))])


def make_and_compare(problem: str, mesh: Mesh, make: Callable[[], tuple[Any, list[str]]]) -> Any:
    """Return `result` of `result, lines = make()`, after comparing the lines, which describe it, between ranks.

    Raises ValueError on all ranks, which begins with the `problem`, if the lines differ. If `make` raises on some
    ranks, all ranks raise, so that none waits for another. It is a collective.
    """
    error: Exception | None = None
    try:
        result, lines = make()
    except Exception as caught:
        error, result, lines = caught, None, [f"{type(caught).__name__}: {caught}"]
    compare_lines(problem, mesh, lines)
    if error is not None:
        raise error
    return result


def check_agreement(
    problem: str, mesh: Mesh, lines: Sequence[Sequence[str]], varying: Sequence[str] = (), advice: str = ""
) -> None:
    """Raise ValueError, which begins with the `problem`, if the `lines` that describe values differ between ranks.

    There are lines for each rank of the mesh, or for those in this process. Ranks may differ along the axes `varying`.
    """
    if difference := _find_difference(mesh, lines, varying):
        raise ValueError(f"{problem}: {'; '.join(group_reports(difference))}{advice}")


def _find_difference(mesh: Mesh, lines: Sequence[Sequence[str]], varying: Sequence[str]) -> dict[int, str]:
    """Return the first line that ranks in one place along the axes `varying` do not share, by rank; {} if none."""
    groups: defaultdict[tuple, dict[int, Sequence[str]]] = defaultdict(dict)
    for rank, text in enumerate(lines):
        coordinates = coordinates_of(rank, mesh.shape)
        groups[(*map(coordinates.get, varying),)][rank] = text
    return next(filter(None, map(first_difference, groups.values())), {})


def check_copies(name: str, mesh: Mesh, varying: Sequence[str], texts: Sequence[str]) -> None:
    """Raise ValueError if ranks in the same place along the axes `varying` have different `texts` about a block."""
    check_agreement(f"ranks have different values of {name}", mesh, [[text] for text in texts], varying, _OTHER_BLOCKS)


_OTHER_BLOCKS = (
    ". Under mpirun every rank runs the whole script: let each compute or read the same values. Usual causes are a "
    "random seed (write numpy.random.default_rng(0) on all ranks), the order of a set (write sorted(names)), the time, "
    "and files; spmd.from_local takes blocks that differ from rank to rank"
)


# ---------------------------------------------------------------- which calls compare values

#: Whether every `shard_map` compares values that must be the same on all ranks: always, never, or (None) at times.
checks_values: Callable[[], bool | None] = checks.get


def checking(every_call: bool = True) -> AbstractContextManager[bool | None]:
    """Compare values that must be the same on all ranks at every call, not only at some.

    Arguments of a `shard_map` are the same whole arrays on all ranks, of which each takes its own blocks, and under MPI
    only the program can ensure that: a random generator without a seed, or a different file on each rank, makes them
    differ. So ranks compare plain arguments, and arrays that a body closes over, at the first call of a function with
    arguments of some types, and at calls 2, 4, 8, …; likewise what `distribute` splits. Simulated ranks always agree.

    Within `with spmd.checking():` they compare at every call, bit for bit, compiled functions too, and further values:
    blocks of sharded arguments along axes that their spec does not name, results that `check_rep=False` does not prove
    to be the same, and what `distribute` does not split. It costs a hash of these values, and a message, at each call.
    Within `with spmd.checking(False):` they never compare values. All ranks must set it alike. The environment variable
    SPMD_CHECKING, 1 or 0, sets it for a whole program. A key of `md.random` that is used twice is an error, too.

    Raises ValueError on all ranks, naming the argument, an element, and its value on each rank.

    >>> import numpy as np, spmd
    >>> mesh = spmd.make_mesh((4,), ('i',), backend='simulated')
    >>> f = spmd.shard_map(lambda w, x: w * x, mesh=mesh, in_specs=(P(), P('i')), out_specs=P('i'))
    >>> with checking():
    ...     y = f(np.random.normal(), np.ones(4))
    """
    return override(checks, every_call)


def is_compared(mesh: Mesh) -> bool:
    """Whether this process is one of several ranks of the mesh."""
    return mesh.backend == "mpi" and mesh.size > 1


def due_key(call: UserCall, specs: Sequence[PartitionSpec], args: Sequence[Any]) -> int:
    """Return a key by which calls of one function, with arguments of these types, are counted."""
    values = _users_arguments(call, specs, args)
    return hash((call.function, call.code, *[(s.path, numpy.shape(x), getattr(x, "dtype", None)) for s, x in values]))


def _users_arguments(call: UserCall, specs: Sequence[PartitionSpec], args: Sequence[Any]) -> list[tuple]:
    """Return specs and values of the arguments that the user wrote; of all operands of the library's own calls."""
    return [(spec, x) for spec, x in zip(specs, args) if spec.path or not call.function]


def is_due(mesh: Mesh, call: UserCall, specs: Sequence[PartitionSpec], args: Sequence[Any]) -> bool:
    """Count a call on several ranks, and return whether they compare its values."""
    always = checks_values()
    return mesh.ranks.is_due(due_key(call, specs, args)) if always is None else always


def _is_compiled(body: Any) -> bool:
    from minidiff.compiler.codegen import CompiledTape  # loads when something is compiled

    return isinstance(body, CompiledTape)


def compare_arguments_if_due(args: Sequence[Any], params: dict) -> Callable[[Any], None] | None:
    """Compare arguments between ranks, if it is due; return a function that compares an array closed over, or None."""
    mesh = params["mesh"]
    if not is_compared(mesh):
        return None
    specs, call = params["in_specs"], params.get("call") or LIBRARY_CALL
    if call.is_linear and not _is_compiled(params["body"]):
        return None  # its operands may depend on branches that ranks took
    if not is_due(mesh, call, specs, args):
        return None
    compare_arguments(mesh, call, specs, args)
    compared: dict[int, Any] = {}

    def compare_constant(x: Any) -> None:
        if id(x) not in compared:
            compared[id(x)] = x
            check_blocks(mesh, [("an array that the body closes over", x, ())], bool(checks_values()))

    return compare_constant


def compare_results(interpreter: Any, outs: Sequence[Any], specs: Sequence[PartitionSpec]) -> None:
    """Raise ValueError if ranks have different blocks of results along axes that their specs do not name."""
    if checks_values():
        mesh, blocks = interpreter.mesh, [interpreter.operand(x)[0] for x in outs]
        axes = [mesh.ranks.sort_axes(spec.split_axes) for spec in specs]
        check_blocks(mesh, [(f"result {k}", *block) for k, block in enumerate(zip(blocks, axes))])


def compare_arguments(mesh: Mesh, call: UserCall, specs: Sequence[PartitionSpec], args: Sequence[Any]) -> None:
    """Raise ValueError on all ranks if they have other plain arguments, or have cut sharded ones from other wholes.

    If all calls are checked, blocks of sharded ones are compared too, along axes that do not split them.
    """
    exact, blocks = bool(checks_values()), []
    x: Any
    for spec, x in _users_arguments(call, specs, args):
        unnamed = "an array that was split" if isinstance(x, Tracer) else "an unmapped operand"
        name = spec.path + f" of {call.function}" * bool(call.function) if spec.path else unnamed
        if not isinstance(x, Tracer):
            blocks.append((name, x, ()))
            continue
        blocks.append((f"a sample of {name}" if numpy.shape(x.sample) != x.shape else name, x.sample, ()))
        if exact and x.mesh.is_like(mesh):
            blocks.append((name, x.data, x.varying))
    check_blocks(mesh, blocks, exact)
    sharded: list[Any] = [x for x in args if isinstance(x, Tracer)]
    for x in sharded:
        x.sample = None


def check_blocks(mesh: Mesh, blocks: Sequence[tuple[str, Any, tuple[str, ...]]], exact: bool = True) -> None:
    """Raise ValueError on all ranks if copies of a block differ.

    Copies are blocks on ranks along axes that do not split the array. `blocks` are (name in errors, this rank's block
    or None, the axes that it is split along); those that are None on some rank are not compared. All ranks of the mesh
    must call it. If the comparison is not `exact`, values that are equal (-0.0 and 0.0, two NaNs) are the same, and it
    warns of those that differ by rounding.
    """
    blocks = [block for block in blocks if len(block[2]) < len(mesh.shape)]
    if not (is_compared(mesh) and blocks):
        return
    names = [f"{name}: {_describe_type(x)}" for name, x, _ in blocks]
    lines = [f"{name} #{_ABSENT if x is None else digest_of(x)}" for name, (_, x, _) in zip(names, blocks)]
    if not any(varying for *_, varying in blocks) and not mesh.ranks.compare_values(lines):
        return
    texts = [text.split("\n") for text in gather_texts(mesh, "\n".join(lines))]
    for name, (_, x, varying), column in zip(names, blocks, zip(*texts)):
        if any(line.endswith(_ABSENT) for line in column):
            continue
        if len({line.rpartition(" #")[0] for line in column}) > 1:
            raise DisagreementError(report("ranks compare different values", dict(enumerate(column)), _OTHER_VALUES))
        if _find_difference(mesh, [[line] for line in column], varying):
            name = f"{name} ({current_location()})"
            check_copies(name, mesh, varying, _first_values(name, mesh, varying, numpy.asarray(x), exact))
            check_copies(name, mesh, varying, [line[-8:] for line in column] if exact else ())


_ABSENT = "-" * 14  # the digest of no array
_OTHER_VALUES = "All ranks call the same functions in the same order, with values of the same types"


def _first_values(name: str, mesh: Mesh, varying: Sequence[str], x: numpy.ndarray, exact: bool) -> Sequence[str]:
    """Return each rank's value of the first element that differs, as text; [] if none differs by more than rounding."""
    axes = tuple(a for a in mesh.axis_names if a not in varying)
    params = {"axes": axes, "size": mesh.ranks.size(axes), "root": 0}
    differs, rounded = _differences(x, mesh.ranks.collective(broadcast_p, x, tuple(varying), params)[0], exact)
    states = gather_texts(mesh, f"{differs.argmax() if differs.any() else x.size} {rounded}")
    k = min(int(state.split()[0]) for state in states)
    if k < x.size:
        at = f" at {[*map(int, numpy.unravel_index(k, x.shape))]}" if x.ndim else ""
        return gather_texts(mesh, f"{x.reshape(-1)[k]}{at}")
    if mesh.ranks.rank == 0 and any(state.endswith("True") for state in states):
        message = (
            f"ranks have values of {name} that differ in their last digits, as if each had computed them on another "
            "processor, or in another order. Compute them on one rank, and send them (MPI.COMM_WORLD.bcast(x)): else a "
            "test such as `loss < tolerance` may have different results, and ranks wait for each other forever"
        )
        warn_at(current_location(), message, RuntimeWarning)
    return []


ROUNDING = 16  # units of rounding, of the largest element, by which correct programs may differ between processors


def _differences(x: numpy.ndarray, other: numpy.ndarray, exact: bool) -> tuple[numpy.ndarray, bool]:
    """Return whether each element differs, and whether any other element differs by rounding."""
    x, other = (numpy.ascontiguousarray(v).reshape(-1) for v in (x, other))
    if exact:
        return (x.view(numpy.uint8) != other.view(numpy.uint8)).reshape(x.size, -1).any(axis=1), False
    differs = (x != other) & ((x == x) | (other == other))
    if x.dtype.kind not in "fc":
        return differs, False
    with numpy.errstate(all="ignore"):
        largest = numpy.max(numpy.abs(other), where=numpy.isfinite(other), initial=0)
        near = numpy.abs(x - other) <= ROUNDING * numpy.finfo(x.dtype).eps * largest
    return differs & ~near, bool((differs & near).any())


def _describe_type(x: Any) -> str:
    if x is None:
        return ""
    where = f" split as {x.spec}" if isinstance(x, Tracer) else ""
    return f"{numpy.result_type(x)}{list(numpy.shape(x))}{where}"


def digest_of(x: Any) -> str:
    """Return a short text that differs if arrays of one type differ: a checksum, which a processor computes fast."""
    x = numpy.asarray(x)
    x = numpy.ascontiguousarray(x, x.dtype.newbyteorder("="))
    return f"{zlib.crc32(x.reshape(-1).view(numpy.uint8)):014x}"
