"""One table of checks for simulated and MPI ranks, with the numbers of ranks of each backend.

`tests/mpi/test_rank_tables_mpi.py` runs it on MPI ranks, and `test_rank_tables.py` of `tests/spmd/` and of
`tests/spmd/parallel/` on simulated ones. MPI ranks are asked less where the backend makes no difference: they run on
the numbers of ranks that show something new, and with the options that do. Where eight stand in one line and take
long, simulated ranks are the eight: what MPI does on eight, the collectives show, and the meshes of several axes.

A table is a list of rows. A row has a check, which takes a mesh, and the choices of its further arguments:
`row(check, PROGRAMS, (True, False))` is called with every one of them on simulated ranks, and with each in turn on MPI
ranks, where each option then occurs once at least. A choice may also be a function of the number of ranks. Rows may be
of one backend, or of some numbers of ranks. Programs themselves are data: a function of blocks beside that of whole
arrays, whose values and derivatives `check_kinds` of `tests/checks/of_whole.py` compares.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import spmd
from collectives import algorithms
from spmd import P
from spmd.examples.cannon import cannon, summa
from spmd.examples.dlrm import SPLITS
from tests.checks import algorithms as algorithm_checks
from tests.checks import collective_cases
from tests.checks import of_collectives as collective_checks
from tests.checks.meshes import mesh
from tests.checks.samples import check_each
from tests.programs import (
    attention,
    auto_axes,
    branch,
    decoder,
    expert,
    grid,
    halo,
    layer,
    loop,
    matmul,
    nested,
    networks,
    offload,
    optim,
    placement,
    precision,
    ragged,
    random_numbers,
    recommendation,
    schedule,
    scipy_functions,
    sequence_transformers,
    server,
    sharded_aliasing,
    solver,
    summed,
    transformers,
    where_to_sum,
    zero,
)
from tests.programs.transformers import AXIS, CONFIGS

SIMULATED, MPI = "simulated", "mpi"


class Row(NamedTuple):
    """A check of a mesh, with every choice of its further arguments, each in turn on MPI ranks."""

    check: Callable[..., None]
    choices: Sequence[Iterable | Callable[[int], Iterable]]
    on: str | None = None
    ranks: Sequence[int] | None = None

    def checks(self, mesh: spmd.Mesh, on: str) -> Iterable[functools.partial]:
        if self.on not in (None, on) or (self.ranks is not None and mesh.size not in self.ranks):
            return []
        lists = [c(mesh.size) if callable(c) else c for c in self.choices]
        choose = in_turn if on == MPI else itertools.product
        return [functools.partial(self.check, mesh, *args) for args in choose(*lists)]


def row(check: Callable, *choices: Iterable | Callable[[int], Iterable], **where: Any) -> Row:
    return Row(check, choices, **where)


class Table(NamedTuple):
    """Rows, the numbers of ranks of both backends, and their meshes."""

    rows: Sequence[Row]
    simulated: Sequence[int] = ()
    mpi: Sequence[int] = (2, 4)
    sizes: Mapping[int, tuple[int, ...]] = {}  # by the number of ranks, if not one line
    names: Sequence[str] = "ijk"

    def checks(self, n: int, on: str) -> Iterable[functools.partial]:
        mesh = mesh_of(on, *self.sizes.get(n, (n,)), names=self.names)
        return itertools.chain(*[each.checks(mesh, on) for each in self.rows])


def mesh_of(on: str, *sizes: int, names: Sequence[str] = "ijk") -> spmd.Mesh:
    return mesh(*sizes, names=names, backend=on)


def line(on: str, n: int, axis: str = "i") -> spmd.Mesh:
    return mesh_of(on, n, names=(axis,))


def in_turn(*choices: Iterable) -> Iterable[tuple]:
    """Each option once at least, beside the others in turn; of no choices, nothing is chosen once."""
    lists = [list(c) for c in choices]
    return itertools.islice(zip(*map(itertools.cycle, lists)), max(map(len, lists))) if lists else [()]


def run(name: str, n: int, on: str) -> None:
    """Run a table's checks for n ranks of a backend, and list those that fail."""
    calls = (PARALLEL | TABLES)[name].checks(n, on)
    check_each((f"{c.func.__name__}({', '.join(map(str, c.args))})", c) for c in calls)


def cases(tables: dict[str, Table], on: str) -> list[tuple[str, int]]:
    """Each table with each number of ranks."""
    return [(name, n) for name, table in tables.items() for n in getattr(table, on)]


# ---------------------------------------------------------------- parallelisms


#: The shapes of meshes of two axes.
GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2), 6: (2, 3)}

#: Programs of `spmd.parallel` and `spmd.examples`, which must say what they mean. Those of several axes make their own
#: meshes. Of what simulated ranks have run, MPI ranks repeat a few rows at most, and the other way round.
PARALLEL = {
    "attention of split sequences": Table(
        [
            row(attention.check_split, attention.WAYS, [False, True], lambda n: [8, 4] if n in (2, 4) else [8]),
            row(attention.check_ring_of_heads, [4], ranks=(4,)),
        ],
        (1, 2, 8),
        (4,),
        names=("tokens",),
    ),
    "attention of split sequences with masks": Table(
        [
            row(attention.check_masked, attention.MASKS, on=SIMULATED),
            row(attention.check_masked, ["a causal window in zigzag order", "a prefix", "segments"], on=MPI),
            row(attention.check_other_keys, ranks=(4,)),
        ],
        (4,),
        (3,),
        names=("tokens",),
    ),
    "decoders": Table(
        [
            row(decoder.check_numbers, lambda n: decoder.MESHES[n], on=SIMULATED),
            row(decoder.check_numbers, lambda n: decoder.WITH_EXPERTS[n], [decoder.MIXTURE], on=SIMULATED),
            row(decoder.check_numbers, [({"data": 2, "stages": 2}, 2)], on=MPI),
            row(decoder.check_numbers, [({"experts": 2, "feats": 2}, 1)], [decoder.MIXTURE], on=MPI),
            row(decoder.check_generated, decoder.GENERATED.get, [16, 5], ranks=(1, 2)),  # of 5, the oldest are lost
            row(decoder.check_generated, [{"data": 2, "feats": 2}], [5], on=MPI),
            row(decoder.check_capacity, ranks=(2,)),
        ],
        (1, 2, 4, 8),
        (4,),
    ),
    "recommendation models": Table([row(recommendation.check_dlrm, SPLITS)], (1, 2), (4,), names=("ranks",)),
    "mixtures of experts": Table(
        [
            row(expert.check_mixture, lambda n: expert.SHAPES[n], expert.GATES, on=SIMULATED),
            row(expert.check_mixture, lambda n: expert.SHAPES[n], [(2, 2, expert.PRIORITIES)], on=MPI),
            row(expert.check_dropless, lambda n: expert.SHAPES[n], expert.ROUTED),
            row(expert.check_too_many),
            row(expert.check_assigned, expert.ASSIGNMENTS, ranks=(2, 4)),
            row(expert.check_partial_experts, expert.PARTIAL_EXPERTS, on=SIMULATED),
            row(expert.check_partial_experts, ["norm"], on=MPI),
        ],
        (2, 8),
        (4,),
        names=("experts",),
    ),
    "tensor parallel transformers": Table(
        [
            row(transformers.check_numbers, CONFIGS.values(), ranks=(2,)),
            row(transformers.check_numbers, [CONFIGS["grouped queries"]], ranks=(1, 4)),
            row(transformers.check_communication, CONFIGS.values(), ranks=(2,)),
            row(transformers.check_communication, [CONFIGS["grouped queries"]], ranks=(4,)),
            row(transformers.check_vocabulary, ranks=(2, 4)),
            row(transformers.check_labels),
            row(sequence_transformers.check_numbers_and_communication, [CONFIGS["rms norm, SwiGLU"]], ranks=(2, 4)),
        ],
        (1, 2),
        (4,),
        names=(AXIS,),
    ),
    "networks": Table(
        [row(networks.check_numbers, networks.cases), row(networks.check_communication, networks.cases)],
        (1, 2, 8),
        (4,),
    ),
    "pipelines of layers that are not finite everywhere": Table(
        [
            row(networks.check_partial_layers, networks.PARTIAL_LAYERS, [True]),
            row(networks.check_partial_layers, ["sqrt"], [False]),
        ],
        (4,),
        (2,),
        names=("stages",),
    ),
    "scheduled pipelines": Table(
        [
            row(networks.check_schedule, networks.SCHEDULES, ranks=(2,)),
            row(networks.check_schedule, ["interleaved", "zero_bubble"], ranks=(4,)),
            row(networks.check_schedule, ["interleaved"], ranks=(8,)),
            row(networks.check_schedule, ["one_f_one_b"], [2], ranks=(1,)),
            row(networks.check_without_flush, networks.WITHOUT_FLUSH, ranks=(2,)),
            row(networks.check_without_flush, ["pipedream", "double"], ranks=(4,)),
        ],
        (1, 2, 8),
        (4,),
        names=("stages",),
    ),
    "products and networks on grids": Table(
        [
            row(grid.check_product, grid.PRODUCTS),
            row(grid.check_network, [summa, cannon]),
            row(grid.check_cube, ranks=(1, 8)),
        ],
        (1, 8, 9),
        (4,),
    ),
    "convolutions along space": Table(
        [row(halo.check_conv, (True, False)), row(halo.check_strided_conv, halo.STRIDES)], (1, 6), (4,), GRIDS
    ),
    "norms of batches, and recurrences": Table(
        [
            row(layer.check_sharded_conv),
            row(layer.check_batch_norm),
            row(layer.check_recurrence, layer.RECURRENCES, (False, True), ranks=(3, 4)),
            row(layer.check_recurrence, ["affine"], (False, True), ranks=(1,)),
        ],
        (1, 3),
        (4,),
    ),
    "fields on a grid": Table(
        [row(halo.check_fields), row(halo.check_gradients), row(halo.check_recovered, ranks=(2,))], (1, 4), (2,)
    ),
    "parameter servers": Table([row(server.check_steps, lambda n: {0, n - 1})], (1, 2), (4,), names=("workers",)),
    "ZeRO": Table(
        [
            row(zero.check_training, zero.STAGES, lambda n: zero.TRAINED[n]),
            row(zero.check_communication, zero.STAGES, [2], ranks=(2, 4)),
            row(zero.check_communication, zero.STAGES, [1], ranks=(8,)),
            row(zero.check_memory, zero.STAGES, ranks=(2, 8)),
        ],
        (1, 2, 8),
        (4,),
        names=("ranks",),
    ),
    "states and parameters in files": Table(
        [row(offload.check_training, (2, 3), offload.OPTIMIZERS)], (1, 4), (2,), names=("batch",)
    ),
    "where to sum": Table([row(where_to_sum.check_program, where_to_sum.CALLS)], (4,), (2,), names=("ranks",)),
    "matrix products on a ring": Table([row(matmul.check_calls, matmul.PRODUCTS)], (1, 2, 3), (4,)),
}

# ---------------------------------------------------------------- collectives

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
        (1, 4),
    ),
    "collectives": Table(
        [
            row(collective_checks.check_collectives, collective_checks.CHECKS, ranks=(1, 3, 4, 6)),
            row(collective_checks.check_collectives, ["every case", "values", "scans"], ranks=(8,)),
        ],
        (4, 6),
        (1, 3, 4, 8),
        {1: (1, 1), 3: (3, 1), 4: (2, 1, 2), 6: (2, 3), 8: (2, 2, 2)},
        "xyz",
    ),
    "arrays that are stored in other ways": Table(
        [row(collective_checks.check_stored, [("x",)], collective_cases.STORED)], (), (2,), names="x"
    ),
    "algorithms": Table([row(algorithm_checks.check_algorithm, algorithms.__all__)], (1, 3, 4, 5, 8), (4,)),
    "halos": Table(
        [
            row(halo.check_halo, halo.CASES, (True, False)),
            row(halo.check_types),
            row(halo.check_messages, halo.CASES, on=SIMULATED),
        ],
        (1, 6),
        (2, 4),
        GRIDS,
    ),
    "auto axes": Table(
        [
            row(auto_axes.check_program, auto_axes.ALL, on=SIMULATED, ranks=(4,)),
            row(auto_axes.check_program, auto_axes.FEW, on=SIMULATED, ranks=(8,)),
            row(auto_axes.check_program, auto_axes.FEW, on=MPI),
        ],
        (4, 8),
        (4,),
        {4: (2, 2), 8: (2, 4)},
    ),
    # on simulated ranks by `shard_map/test_branches.py`
    "ranks that choose their own branch": Table(
        [
            row(branch.check_elements, branch.BY_ELEMENT, ranks=(2,)),
            row(branch.check_program, branch.PROGRAMS.values(), [branch.FEW], ranks=(4,)),
            row(branch.check_other_axes, ["collectives", "a shard_map"], [branch.REVERSE], ranks=(4,)),
        ]
    ),
    "ranks that take their own numbers of steps": Table(
        [
            row(loop.check_same_bits, loop.EXACT),
            row(branch.check_program, loop.PROGRAMS.values(), [["jvp"]]),
            row(branch.check_other_axes, ["steps"], [loop.FEW], (True, False)),
        ],
        (),
        (4,),
    ),
    "schedules of checkpoints": Table([row(schedule.check_same_bits, schedule.CASES)], (2,), (2,)),
    "shard_maps in shard_maps": Table(
        [row(nested.check_nested, nested.NESTED, (True, False))], (4,), (4,), {4: (2, 2)}
    ),
    "gradients that are sums": Table(
        [
            row(summed.check_program, summed.PROGRAMS, AROUND[:2]),
            row(summed.check_program, [f"not said, {name}" for name in summed.SILENT], AROUND[2:], on=SIMULATED),
            row(summed.check_filters),
            row(summed.check_mean_of_integers, summed.INTEGERS, (False, True)),
            row(summed.check_direction, summed.DIRECTIONS, AROUND[:2]),
            row(summed.check_direction_by_hand, (True, False)),
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
            row(random_numbers.check_dropout_of_transformers, on=SIMULATED),
        ],
        (2,),
        (4,),
    ),
    "scipy": Table(
        [row(check, scipy_functions.PROGRAMS) for check in (scipy_functions.check_body, scipy_functions.check_sharded)],
        (3,),
        (2,),
    ),
    "linear systems without matrices": Table(
        [
            row(solver.check_body, solver.PROGRAMS, ["cg"]),
            row(solver.check_body, ["chain"], ["gmres"]),
            row(solver.check_body, ["chain"], ["cg"], [False], on=SIMULATED),
            row(solver.check_sharded, solver.METHODS, on=SIMULATED),
        ],
        (2,),
        (3,),
    ),
    "sums of a linear solver": Table([row(solver.check_sums)], (4,), (2,)),
    "16 bits": Table(
        [
            *map(row, (precision.check_reductions, precision.check_skipped_together, precision.check_ranges)),
            row(precision.check_sum_rounds_once, precision.SUMS | precision.OF_SHARDED, precision.HALF),
            row(precision.check_sign_of_zero, precision.MOVES | precision.PLACES, (np.float64, np.float16)),
            row(precision.check_signs_of_traced_places),
            row(precision.check_tf32),
            row(precision.check_parts_of_a_decoder, precision.BYTES, precision.BYTES, ranks=(2,)),
        ],
        (2, 4),
        (4,),
    ),
    "optimizers": Table(
        [
            row(optim.check_steps, optim.SHARDINGS, ["adam"], (False, True), on=SIMULATED),
            row(optim.check_steps, ["along several axes"], optim.OPTIMIZERS, (False, True), on=SIMULATED),
            row(optim.check_steps, ["along several axes"], ["adam", "lion"], (False, True), on=MPI),
        ],
        (4,),
        (4,),
        {4: (2, 2)},
    ),
    "placements": Table(
        [row(placement.check_placement, range(3)), row(placement.check_written_placement)], (1, 3, 8), (4,)
    ),
    "f and g by hand": Table([row(transformers.check_pairs)], (4,), (2, 8), names=(AXIS,)),
}
