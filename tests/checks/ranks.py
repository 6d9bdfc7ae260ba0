"""One table of checks for simulated and MPI ranks, with the numbers of ranks of each backend.

`tests/mpi/test_rank_tables_mpi.py` runs it on MPI ranks, and `test_rank_tables.py` of `tests/spmd/` and of
`tests/spmd/parallel/` on simulated ones. MPI ranks are asked less where the backend makes no difference: they run on
the numbers of ranks that show something new, and with the options that do. Where eight stand in one line and take
long, simulated ranks are the eight: what MPI does on eight, the collectives show, and the meshes of several axes.

A table is a list of rows. A row has a check, which takes a mesh, and the choices of its further arguments: it is called
with every one of them, `row(check, PROGRAMS, (True, False))`, or `in_turn` on MPI ranks, where each option then occurs
once at least. A choice may also be a function of the number of ranks. Rows may be of one backend, or of some numbers
of ranks. Programs themselves are data: a function of blocks beside that of whole arrays, whose values and derivatives
`check_kinds` of `tests/checks/of_whole.py` compares.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import spmd
from collectives import algorithms
from spmd import P
from spmd.examples import where_to_sum
from spmd.examples.cannon import cannon, summa
from spmd.examples.dlrm import SPLITS
from spmd.parallel import attention_by_heads, ring_attention
from tests.checks import algorithms as algorithm_checks
from tests.checks import collective_cases
from tests.checks import of_collectives as collective_checks
from tests.checks.meshes import mesh
from tests.checks.samples import check_each
from tests.programs import attention as attention_programs
from tests.programs import (
    auto_axes,
    branch,
    halo,
    loop,
    nested,
    networks,
    placement,
    precision,
    ragged,
    random_numbers,
    schedule,
    sequence_transformers,
    sharded_aliasing,
    solver,
    summed,
    transformers,
)
from tests.programs import decoder as decoder_programs
from tests.programs import expert as expert_programs
from tests.programs import grid as grid_programs
from tests.programs import layer as layer_programs
from tests.programs import matmul as matmul_programs
from tests.programs import offload as offload_programs
from tests.programs import optim as optim_programs
from tests.programs import recommendation as dlrm_programs
from tests.programs import scipy_functions as scipy_programs
from tests.programs import server as server_programs
from tests.programs import where_to_sum as sums
from tests.programs import zero as zero_programs
from tests.programs.transformers import AXIS, CONFIGS, WIDE

SIMULATED, MPI = "simulated", "mpi"


class Row(NamedTuple):
    """A check of a mesh, with every choice of its further arguments, or each in turn on MPI ranks."""

    check: Callable[..., None]
    choices: Sequence[Iterable | Callable[[int], Iterable]]
    on: str | None = None
    ranks: Sequence[int] | None = None
    in_turn: bool = False

    def checks(self, mesh: spmd.Mesh, on: str) -> Iterable[functools.partial]:
        if self.on not in (None, on) or (self.ranks is not None and mesh.size not in self.ranks):
            return []
        lists = [c(mesh.size) if callable(c) else c for c in self.choices]
        product = in_turn(on, *lists) if self.in_turn else itertools.product(*lists)
        return [functools.partial(self.check, mesh, *args) for args in product]


def row(check: Callable, *choices: Iterable | Callable[[int], Iterable], **where: Any) -> Row:
    return Row(check, choices, **where)


class Table(NamedTuple):
    """Rows, or a function of the number of ranks and the backend; the numbers of ranks of both; and their meshes."""

    rows: Sequence[Row] | Callable[[int, str], Iterable[functools.partial]]
    simulated: Sequence[int] = ()
    mpi: Sequence[int] = (2, 4)
    sizes: Mapping[int, tuple[int, ...]] = {}  # by the number of ranks, if not one line
    names: Sequence[str] = "ijk"

    def checks(self, n: int, on: str) -> Iterable[functools.partial]:
        if callable(self.rows):
            return self.rows(n, on)
        mesh = mesh_of(on, *self.sizes.get(n, (n,)), names=self.names)
        return itertools.chain(*[each.checks(mesh, on) for each in self.rows])


def mesh_of(on: str, *sizes: int, names: Sequence[str] = "ijk") -> spmd.Mesh:
    return mesh(*sizes, names=names, backend=on)


def line(on: str, n: int, axis: str = "i") -> spmd.Mesh:
    return mesh_of(on, n, names=(axis,))


def all_of(check: Callable, *choices: Iterable) -> list[functools.partial]:
    """A check of every choice of arguments."""
    return [functools.partial(check, *args) for args in itertools.product(*choices)]


def in_turn(on: str, *choices: Iterable) -> Iterable[tuple]:
    """Every choice on simulated ranks; on MPI ranks each option once at least, beside the others in turn."""
    lists = [list(c) for c in choices]
    if on == SIMULATED:
        return itertools.product(*lists)
    return itertools.islice(zip(*map(itertools.cycle, lists)), max(map(len, lists)))


def run(name: str, n: int, on: str) -> None:
    """Run a table's checks for n ranks of a backend, and list those that fail."""
    calls = (PARALLEL | TABLES)[name].checks(n, on)
    check_each((f"{c.func.__name__}({', '.join(map(str, c.args))})", c) for c in calls)


def cases(tables: dict[str, Table], on: str) -> list[tuple[str, int]]:
    """Each table with each number of ranks."""
    return [(name, n) for name, table in tables.items() for n in getattr(table, on)]


# ---------------------------------------------------------------- parallelisms


def _attention(n, on):
    groups = [8, 4] if on == SIMULATED and n < 8 else [max(4, n)]
    split = line(on, n, "tokens")
    yield from all_of(
        attention_programs.check_split, [split], [attention_by_heads, ring_attention], [False, True], groups
    )
    if n == 4:
        yield from all_of(attention_programs.check_ring_of_heads, [on], [(2, 2)], [8, 4])


def _masked_attention(n, on):
    split = line(on, n, "tokens")
    for number, name in enumerate(attention_programs.MASKS):
        yield functools.partial(attention_programs.check_masked, split, name, 4 + 4 * (number % 2))
    if n < 3:
        yield functools.partial(attention_programs.check_other_keys, split)


def _decoders(n, on):
    few = slice(None) if on == SIMULATED else slice(1)
    yield from (
        functools.partial(decoder_programs.check_numbers, *pair, on) for pair in decoder_programs.MESHES[n][few]
    )
    for sizes in {1: [{}], 2: [{"data": 2}, {"feats": 2}], 4: [{"data": 2, "feats": 2}]}.get(n, []):
        yield functools.partial(decoder_programs.check_generated, sizes, 16, on)
        yield functools.partial(decoder_programs.check_generated, sizes, 5, on)  # older tokens are forgotten
    expected = decoder_programs.mixture_of_one_device()
    for pair in decoder_programs.WITH_EXPERTS[n][few]:
        yield functools.partial(decoder_programs.check_numbers, *pair, on, decoder_programs.MIXTURE, expected)
    if n == 2:
        yield functools.partial(decoder_programs.check_capacity, on)


def _experts(n, on):
    for shape, gate in in_turn(on, expert_programs.SHAPES[n], expert_programs.GATES):
        yield functools.partial(expert_programs.check_mixture, shape, *gate, on)
    for shape, (k, name) in in_turn(on, expert_programs.SHAPES[n], [(1, "one expert"), (2, "two experts"), (3, "any")]):
        yield functools.partial(expert_programs.check_dropless, shape, k, name, on)
    yield functools.partial(expert_programs.check_too_many, n, on)


def _tensor_parallel(n, on):
    configs = (
        CONFIGS.values()
        if n == 2 or (on, n) == (SIMULATED, 4)
        else [CONFIGS["grouped queries" if n > 1 else "tied, an encoder"]]
    )
    yield from all_of(transformers.check_numbers, configs, [line(on, n, AXIS)])
    if n > 1:
        yield from all_of(transformers.check_communication, configs, [line(on, n, AXIS)])
        yield from all_of(transformers.check_vocabulary, [line(on, n, AXIS)])
        yield from all_of(transformers.check_half_layers, [line(on, n, AXIS)])
    yield from all_of(transformers.check_labels, [line(on, n, AXIS)])
    if n == 4:
        yield from all_of(transformers.check_split_batch, [mesh_of(on, 2, 2, names=("batch", AXIS))])


def _sequence_parallel(n, on):
    configs = [WIDE] if on == MPI else [config for config in CONFIGS.values() if not config.tied]
    return all_of(sequence_transformers.check_numbers_and_communication, configs, [line(on, n, AXIS)])


def _networks(n, on):
    ways = networks.WAYS if on == SIMULATED or n == 2 else networks.WAYS[:1]
    for name, shape in networks.cases(n):
        yield functools.partial(networks.check_numbers, name, shape, on, ways)
        yield functools.partial(networks.check_communication, name, shape, on)


def _partial_layers(n, on):
    for typed in (True, False) if on == SIMULATED else (True,):
        for name in networks.PARTIAL_LAYERS:
            yield functools.partial(networks.check_partial_layers, name, line(on, n, "stages"), check_rep=typed)


def _schedules(n, on):
    for name in networks.SCHEDULES:
        least = max(4, n if name == "interleaved" else 4)  # which needs groups of as many as there are stages
        yield functools.partial(
            networks.check_schedule, name, 2 * n if on == SIMULATED and n < 8 else least, line(on, n, "stages")
        )
    if n < 8:
        yield from all_of(networks.check_without_flush, networks.WITHOUT_FLUSH, [3 * n], [line(on, n, "stages")])
    if (on, n) == (SIMULATED, 4):
        yield functools.partial(networks.check_schedule, "one_f_one_b", 2, line(on, n, "stages"))


def _grids(n, on):
    """On a square grid, and on two that share the examples."""
    copies = 2 if n == 8 else 1
    q = math.isqrt(n // copies)
    yield from all_of(grid_programs.check_product, grid_programs.PRODUCTS, [q], [on], [copies])
    yield from all_of(grid_programs.check_network, [summa, cannon], [q], [on], [copies])
    if n in (1, 8):
        yield functools.partial(grid_programs.check_cube, round(n ** (1 / 3)), on)


def _layers(n, on):
    yield functools.partial(layer_programs.check_sharded_conv, line(on, n))
    yield functools.partial(layer_programs.check_batch_norm, line(on, n))
    yield from all_of(layer_programs.check_recurrence, [line(on, n)], layer_programs.RECURRENCES, (False, True))


def _zero(n, on):
    trained = {1: [(2, "adam")], 2: [(4, "decayed")], 4: [(1, "adam"), (2, "clipped")], 8: [(2, "adam")]}[n]
    if on == MPI:
        trained = [(1, "clipped"), (2, "adam")][n > 2 :]
    for stage in zero_programs.STAGES:
        for microbatches, optimizer in trained:
            yield functools.partial(zero_programs.check_training, stage, microbatches, n, on, optimizer)
        if n > 1:
            microbatches = 2 if on == MPI else 8 // n
            yield functools.partial(zero_programs.check_communication, stage, microbatches, n, on)
            yield functools.partial(zero_programs.check_memory, stage, n, on)


#: The shapes of meshes of two axes.
GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2), 6: (2, 3)}

#: Programs of `spmd.parallel` and `spmd.examples`, which must say what they mean.
PARALLEL = {
    "attention of split sequences": Table(_attention, (1, 2, 4, 8)),
    "decoders": Table(_decoders, (1, 2, 4, 8), (2, 4, 8)),
    "recommendation models": Table(
        lambda n, on: all_of(dlrm_programs.check_dlrm, SPLITS, [n], [on]), (1, 2, 4), (2, 4, 8)
    ),
    "attention of split sequences with masks": Table(_masked_attention, (1, 2, 3, 4), (2, 3, 4)),
    "mixtures of experts": Table(_experts, (1, 2, 4, 8), (2, 4, 8)),
    "assigned experts": Table(
        lambda n, on: all_of(expert_programs.check_assigned, [n], expert_programs.ASSIGNMENTS, [on]),
        (1, 2, 4),
        (2, 4, 8),
    ),
    "experts meet nothing but tokens": Table(
        lambda n, on: all_of(expert_programs.check_partial_experts, expert_programs.PARTIAL_EXPERTS, [n], [on]),
        (1, 4, 8),
    ),
    "tensor parallel transformers": Table(_tensor_parallel, (1, 2, 4), (2, 4, 8)),
    "sequence parallel transformers": Table(_sequence_parallel, (2, 4), (2, 4, 8)),
    "networks": Table(_networks, (1, 2, 8), (2, 4, 8)),
    "pipelines of layers that are not finite everywhere": Table(_partial_layers, (4,)),
    "scheduled pipelines": Table(_schedules, (1, 2, 4, 8)),
    "products and networks on grids": Table(_grids, (1, 4, 8, 9), (4, 8)),
    "convolutions along space": Table(
        [row(halo.check_conv, (True, False)), row(halo.check_strided_conv, halo.STRIDES)],
        (1, 6),
        sizes=GRIDS,
    ),
    "norms of batches, and recurrences": Table(_layers, (1, 3, 4)),
    "fields on a grid": Table(
        [row(halo.check_fields), row(halo.check_gradients), row(halo.check_recovered, ranks=(2,))], (1, 4), (1, 2, 4)
    ),
    "parameter servers": Table(
        lambda n, on: all_of(server_programs.check_steps, [n], range(n) if on == SIMULATED else (0, n - 1), [on]),
        (1, 2, 4),
        (2, 4, 8),
    ),
    "ZeRO": Table(_zero, (1, 2, 4, 8)),
    "states and parameters in files": Table(
        lambda n, on: all_of(
            offload_programs.check_training, (2, 3), offload_programs.OPTIMIZERS, [line(on, n, "batch")]
        ),
        (1, 2, 4),
    ),
    "where to sum": Table(lambda n, on: all_of(sums.check_program, [line(on, n, where_to_sum.AXIS)], sums.CALLS), (4,)),
    "matrix products on a ring": Table(
        lambda n, on: all_of(matmul_programs.check_calls, matmul_programs.PRODUCTS, [line(on, n)]),
        (1, 2, 3, 4),
        (2, 4, 8),
    ),
}

# ---------------------------------------------------------------- collectives

# ---------------------------------------------------------------- programs of other helpers' forms


def _scipy(n, on):
    checks = [scipy_programs.check_body, scipy_programs.check_sharded]
    return [functools.partial(c, name, line(on, n)) for c in checks for name in scipy_programs.PROGRAMS]


def _optimizers(n, on):
    mesh = mesh_of(on, *((2, 2) if n == 4 else (n,)))
    steps = optim_programs.sharded_steps(mesh, on == SIMULATED)
    return [functools.partial(optim_programs.assert_communicates, *step) for step in steps]


AROUND = list(summed.AROUND)
TABLES = {
    "all_to_all by splits of values": Table(
        [
            row(ragged.check_values, ragged.TABLES, ["float64"]),
            row(ragged.check_values, ["some"], ["bfloat16", "bool", "complex64"]),
            *map(row, ragged.CHECKS),
            row(ragged.check_further_axes, ranks=(4,)),
            row(ragged.check_vmap_axis, on=SIMULATED),
        ],
        (1, 3, 4),
        (1, 2, 4),
    ),
    "collectives": Table(
        [row(collective_checks.check_collectives, collective_checks.CHECKS)],
        (1, 4, 6),
        (1, 2, 3, 4, 8),
        {1: (1, 1), 3: (3, 1), 4: (2, 1, 2), 6: (2, 3), 8: (2, 2, 2)},
        "xyz",
    ),
    "arrays that are stored in other ways": Table(
        [row(collective_checks.check_stored, [("x",)], collective_cases.STORED)], names="x"
    ),
    "algorithms": Table([row(algorithm_checks.check_algorithm, algorithms.__all__)], (1, 3, 4, 5, 8), (2, 3, 4)),
    "halos": Table(
        [
            row(halo.check_halo, halo.CASES, (True, False), in_turn=True),
            row(halo.check_types),
            row(halo.check_messages, halo.CASES, on=SIMULATED),
        ],
        (1, 6),
        (2, 4),
        GRIDS,
    ),
    "auto axes": Table(
        [
            row(auto_axes.check_program, auto_axes.ALL, ranks=(2, 4)),
            row(auto_axes.check_program, auto_axes.FEW, ranks=(8,)),
        ],
        (2, 4),
        (2, 4, 8),
        {2: (2, 1), 4: (2, 2), 8: (2, 4)},
    ),
    # on simulated ranks by `shard_map/test_branches.py`
    "ranks that choose their own branch": Table(
        [
            row(branch.check_elements, branch.BY_ELEMENT, ranks=(2,)),
            row(branch.check_program, branch.PROGRAMS.values(), [branch.REVERSE], ranks=(4,)),
            row(branch.check_other_axes, ["collectives", "a shard_map"], [branch.REVERSE], ranks=(4,)),
            row(branch.check_pipeline),
        ]
    ),
    "ranks that take their own numbers of steps": Table(
        [
            row(loop.check_same_bits, loop.EXACT),
            row(branch.check_program, loop.PROGRAMS.values(), [loop.FEW], ranks=(4,)),
            row(branch.check_other_axes, ["steps"], [loop.FEW], (True, False), ranks=(4,)),
        ],
        (),
        (2, 3, 4),
    ),
    "schedules of checkpoints": Table([row(schedule.check_same_bits, schedule.CASES)], (2,)),
    "shard_maps in shard_maps": Table(
        [row(nested.check_nested, nested.NESTED, (True, False), in_turn=True)], (4,), (4,), {4: (2, 2)}
    ),
    "gradients that are sums": Table(
        [
            row(summed.check_program, summed.PROGRAMS, AROUND[:2]),
            row(summed.check_program, [f"not said, {name}" for name in summed.SILENT], AROUND[2:], on=SIMULATED),
            row(summed.check_filters),
            row(summed.check_mean_of_integers, summed.INTEGERS, (False, True)),
            row(summed.check_direction, summed.DIRECTIONS, AROUND[:2]),
            row(summed.check_direction_by_hand, (True, False)),
            row(summed.check_direction_that_the_user_casts),
        ],
        (1, 4),
        (2,),
    ),
    "aliasing": Table(
        [
            row(sharded_aliasing.check_made, sharded_aliasing.MADE),
            row(sharded_aliasing.check_out, sharded_aliasing.OUT),
        ],
        (1, 2, 4),
        (1, 2, 4),
        {n: GRIDS[n] for n in (1, 2, 4)},
    ),
    "random numbers": Table(
        [
            row(random_numbers.check_states),
            row(random_numbers.check_keys_for_each_rank),
            row(random_numbers.check_blocks, [[P("i"), P(None, "i")]]),
            row(random_numbers.check_initialize, [("i", None)]),
            row(random_numbers.check_dropout_of_transformers),
        ],
        (2,),
    ),
    "scipy": Table(_scipy, (2, 3), (2,)),
    "linear systems without matrices": Table(
        [
            row(solver.check_body, solver.PROGRAMS, solver.METHODS),
            row(solver.check_body, ["chain"], ["cg"], [False]),
            row(solver.check_sharded, solver.METHODS),
        ],
        (2,),
        (2, 3),
    ),
    "sums of a linear solver": Table([row(solver.check_sums)], (4,), (2,)),
    "16 bits": Table(
        [
            *[row(check, ranks=(2, 4)) for check in precision.OF_EVEN_RANKS],
            *[row(check, ranks=(2, 3)) for check in precision.OF_FEW_RANKS],
        ],
        (2, 3, 4),
        (2, 3, 4),
    ),
    "optimizers": Table(_optimizers, (4,)),
    "placements": Table([row(placement.check_placement, range(3)), row(placement.check_written_placement)], (1, 3, 8)),
    "f and g by hand": Table([row(transformers.check_pairs)], (4,), (2, 8), names=(AXIS,)),
}
