"""One table of checks for simulated and MPI ranks, with the numbers of ranks of each backend.

`tests/mpi/test_rank_tables_mpi.py` runs it on MPI ranks, and `test_rank_tables.py` of `tests/spmd/` and of
`tests/spmd/parallel/` on simulated ones. MPI ranks are asked less where the backend makes no difference: they run on
the numbers of ranks that show something new, and with the options that do. Where eight stand in one line and take
long, simulated ranks are the eight: what MPI does on eight, the collectives show, and the meshes of several axes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import spmd
from collectives import algorithms
from spmd import P
from spmd.examples import where_to_sum
from spmd.examples.cannon import cannon, summa
from spmd.examples.dlrm import SPLITS
from spmd.parallel import attention_by_heads, decoder_mesh, ring_attention
from tests.checks import algorithms as algorithm_checks
from tests.checks import collective_cases
from tests.checks import of_collectives as collective_checks
from tests.checks.samples import check_each
from tests.programs import attention as attention_programs
from tests.programs import auto_axes as auto_axes_programs
from tests.programs import branch as branch_programs
from tests.programs import decoder as decoder_programs
from tests.programs import expert as expert_programs
from tests.programs import grid as grid_programs
from tests.programs import halo as halo_programs
from tests.programs import layer as layer_programs
from tests.programs import loop as loop_programs
from tests.programs import matmul as matmul_programs
from tests.programs import nested as nested_programs
from tests.programs import networks, sequence_transformers, sharded_aliasing, transformers
from tests.programs import offload as offload_programs
from tests.programs import optim as optim_programs
from tests.programs import placement as placement_programs
from tests.programs import precision as precision_programs
from tests.programs import ragged as ragged_programs
from tests.programs import random_numbers as random_programs
from tests.programs import recommendation as dlrm_programs
from tests.programs import schedule as schedule_programs
from tests.programs import scipy_functions as scipy_programs
from tests.programs import server as server_programs
from tests.programs import solver as solver_programs
from tests.programs import summed as summed_programs
from tests.programs import where_to_sum as sums
from tests.programs import zero as zero_programs
from tests.programs.transformers import AXIS, CONFIGS, WIDE

SIMULATED, MPI = "simulated", "mpi"


class Table(NamedTuple):
    """Checks for n ranks of a backend, and the numbers of ranks that run them."""

    checks: Callable[[int, str], Iterable[functools.partial]]
    simulated: Sequence[int] = ()
    mpi: Sequence[int] = (2, 4)


@functools.cache
def mesh_of(on: str, *sizes: int, names: Sequence[str] = "ijk") -> spmd.Mesh:
    """A mesh, once in a session: an MPI has only so many communicators."""
    return spmd.make_mesh(sizes, tuple(names)[: len(sizes)], backend=on)


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


def typed_and_not(check: Callable, programs: Iterable[str], mesh: spmd.Mesh, on: str) -> list[functools.partial]:
    """A check of programs with types and without; on MPI ranks, of each program in one of the two ways, in turn."""
    return [functools.partial(check, name, mesh, typed) for name, typed in in_turn(on, programs, (True, False))]


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


def _convolutions(n, on):
    grid = mesh_of(on, *GRIDS[n])
    strided = all_of(halo_programs.check_strided_conv, [grid], (1, 2), (1, 2), (1, 2))
    return [*all_of(halo_programs.check_conv, [grid], (True, False)), *strided]


def _layers(n, on):
    yield functools.partial(layer_programs.check_sharded_conv, line(on, n))
    yield functools.partial(layer_programs.check_batch_norm, line(on, n))
    yield from all_of(layer_programs.check_recurrence, [line(on, n)], layer_programs.RECURRENCES, (False, True))


def _fields(n, on):
    checks = [halo_programs.check_fields, halo_programs.check_gradients]
    return [functools.partial(check, n, on) for check in (*checks, *[halo_programs.check_recovered] * (n == 2))]


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
    "convolutions along space": Table(_convolutions, (1, 4, 6)),
    "norms of batches, and recurrences": Table(_layers, (1, 3, 4)),
    "fields on a grid": Table(_fields, (1, 2, 4), (1, 2, 4)),
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

#: Meshes of simulated and of MPI ranks, by their number.
SHAPES = {
    SIMULATED: {1: [(1,)], 3: [(1, 3)], 4: [(4,), (2, 1, 2)], 6: [(2, 3)]},
    MPI: {1: [(1,), (1, 1)], 2: [(2,), (1, 2)], 3: [(3,), (3, 1)], 4: [(4, 1), (2, 2)], 8: [(2, 2, 2)]},
}


def _collectives(n, on):
    for shape in SHAPES[on][n]:
        mesh = mesh_of(on, *shape, names="xyz")
        for name, (_, simulated, mpi) in collective_checks.CHECKS.items():
            for axes in (simulated if on == SIMULATED else mpi)(mesh, shape == SHAPES[on][n][-1]):
                yield functools.partial(check_collectives, name, mesh, axes)


def check_collectives(name: str, mesh: spmd.Mesh, axes: tuple[str, ...]) -> None:
    collective_checks.CHECKS[name][0](mesh, axes)


def _stored(n, on):
    mesh = mesh_of(on, *SHAPES[on][n][0], names="xyz")
    return all_of(collective_checks.check_stored, [mesh], [mesh.axis_names], collective_cases.STORED)


#: The shapes of meshes of two axes.
GRIDS = {1: (1, 1), 2: (2, 1), 4: (2, 2), 6: (2, 3)}


def _halos(n, on):
    mesh = mesh_of(on, *GRIDS[n])
    for case, typed in in_turn(on, halo_programs.CASES, (True, False)):
        yield functools.partial(halo_programs.check_halo, mesh, case, typed)
    yield functools.partial(halo_programs.check_types, mesh)
    yield from all_of(halo_programs.check_messages, [mesh], halo_programs.CASES if on == SIMULATED else ())


def _algorithms(n, on):
    for name in algorithms.__all__:
        actual = algorithm_checks.cases(name, n)
        yield from all_of(algorithm_checks.check_value, [line(on, n)], actual)
        yield from all_of(
            algorithm_checks.check_derivatives, [line(on, n)], actual[: 2 if (on, n) == (SIMULATED, 3) else 1]
        )
        if (on, n) == (MPI, 4):
            for axes, size in (("y", 2), (("y", "x"), 4)):
                case = algorithm_checks.cases(name, size)[0]
                yield functools.partial(algorithm_checks.check_value, mesh_of(on, 2, 2, names="xy"), case, axes)


def _ragged(n, on):
    mesh = line(on, n)
    yield from all_of(ragged_programs.check_values, [mesh], ragged_programs.TABLES, ["float64"])
    yield from all_of(ragged_programs.check_values, [mesh], ["some"], ["bfloat16", "bool", "complex64"])
    checks = ["check_messages", "check_derivatives", "check_batches", "check_errors", "check_loops"]
    yield from [functools.partial(getattr(ragged_programs, check), mesh) for check in checks]
    if n == 4:
        yield functools.partial(ragged_programs.check_further_axes, on, (2, 2))
    if on == SIMULATED:
        yield functools.partial(ragged_programs.check_vmap_axis, n)


# ---------------------------------------------------------------- programs


def _auto_axes(n, on):
    mesh = mesh_of(on, *{2: (2, 1), 4: (2, 2), 8: (2, 4)}[n])
    names = [*auto_axes_programs.PROGRAMS, *auto_axes_programs.MOVED]
    some = ["a contraction", "softmax", "scan", "a nested shard_map", "joining columns"]
    return all_of(auto_axes_programs.check_program, some if n == 8 else names, [mesh])


def _branches(n, on):
    """The simulated ranks' are in `shard_map/test_branches.py`."""
    kinds = [branch_programs.REVERSE]
    if n == 2:
        yield from all_of(branch_programs.check_elements, branch_programs.BY_ELEMENT, [line(on, 2)])
    else:
        yield from all_of(branch_programs.check_derivatives, branch_programs.PROGRAMS, [line(on, 4)], kinds)
        fresh = spmd.make_mesh((2, 2), ("i", "j"), backend=on)  # all ranks make its communicators, whatever they choose
        yield from all_of(branch_programs.check_other_axes, branch_programs.OTHER_AXES, [fresh], kinds)
    yield from all_of(branch_programs.check_pipeline, [line(on, n, "stage")])


def _loops(n, on):
    """The simulated ranks' are in `shard_map/test_branches.py`; MPI ranks have the same bits."""
    yield from all_of(loop_programs.check_same_bits, loop_programs.EXACT, [line(on, n)])
    if n == 4:
        yield from all_of(loop_programs.check_steps, loop_programs.PROGRAMS, [line(on, n)], [loop_programs.FEW])
        fresh = spmd.make_mesh((2, 2), ("i", "j"), backend=on)  # all ranks make its communicators before they loop
        yield from all_of(loop_programs.check_one_axis, [fresh], [True, False])


def _schedules(n, on):
    programs = schedule_programs
    schedules = programs.SCHEDULES[: 3 if n == 2 else 1]
    return all_of(programs.check_same_bits, [line(on, n)], schedules, programs.MODES, programs.LOOPS)


def _summed(n, on):
    mesh, around = line(on, n), list(summed_programs.AROUND)
    yield from all_of(summed_programs.check_silent, [mesh], summed_programs.SILENT, around)
    yield from all_of(
        summed_programs.check_said, [mesh], summed_programs.SAID, around[: None if on == SIMULATED else 1]
    )
    yield from all_of(summed_programs.check_quiet, [mesh], summed_programs.QUIET)
    yield from all_of(summed_programs.check_filters, [mesh])
    yield from all_of(summed_programs.check_copies, [mesh], summed_programs.COPIES, around)
    yield from all_of(summed_programs.check_no_copies, [mesh], summed_programs.NO_COPIES, around)


def _same_on_all(n, on):
    mesh, around = line(on, n), list(summed_programs.AROUND)
    yield from all_of(summed_programs.check_sum_of_the_same, [mesh], summed_programs.TWICE, around[:2])
    yield from all_of(summed_programs.check_mean_of_the_same, [mesh], summed_programs.NOT_SENT, around[:2])
    yield from all_of(summed_programs.check_mean_of_integers, [mesh], summed_programs.INTEGERS, (False, True))
    yield from all_of(summed_programs.check_direction, [mesh], summed_programs.DIRECTIONS, around[:2])
    yield from all_of(summed_programs.check_direction_by_hand, [mesh], (True, False))
    yield from all_of(summed_programs.check_direction_that_the_user_casts, [mesh])


def _aliasing(n, on):
    mesh = mesh_of(on, *((n, 1) if on == MPI or n < 4 else (2, 2)))
    yield from all_of(sharded_aliasing.check_made, sharded_aliasing.MADE, [mesh])
    yield from all_of(sharded_aliasing.check_out, sharded_aliasing.OUT, [mesh])


def _scipy(n, on):
    checks = [scipy_programs.check_body, scipy_programs.check_sharded]
    return [functools.partial(c, name, line(on, n)) for c in checks for name in scipy_programs.PROGRAMS]


def _linear_systems(n, on):
    mesh, programs = line(on, n), solver_programs.PROGRAMS
    yield from all_of(solver_programs.check_body, programs, solver_programs.METHODS, [mesh], [True])
    yield functools.partial(solver_programs.check_body, "chain", "cg", mesh, False)
    yield from all_of(solver_programs.check_sharded, solver_programs.METHODS, [mesh])


def _random_numbers(n, on):
    mesh, feats = random_programs.mesh_for(n, on)
    yield from all_of(random_programs.check_states, [mesh])
    yield from all_of(random_programs.check_keys_for_each_rank, [mesh])
    yield from all_of(random_programs.check_blocks, [mesh], [[P("i"), P(None, "i")]])
    yield from all_of(random_programs.check_initialize, [mesh], [("i", None)])
    yield from all_of(random_programs.check_dropout_of_transformers, [feats])


def _precision(n, on):
    if n % 2 == 0:
        yield from all_of(precision_programs.check_reductions, [line(on, n)])
        yield from all_of(precision_programs.check_skipped_together, [line(on, n)])
        yield from all_of(precision_programs.check_sums_round_once, [line(on, n)])
        yield from all_of(precision_programs.check_ranges, [line(on, n)])
    if n == 2:
        yield from all_of(precision_programs.check_parts_of_a_decoder, [decoder_mesh(data=2, backend=on)])
    if n < 4:
        yield from all_of(precision_programs.check_signs_of_zero, [line(on, n)])
        yield from all_of(precision_programs.check_tf32, [line(on, n)])


def _optimizers(n, on):
    mesh = mesh_of(on, *((2, 2) if n == 4 else (n,)))
    steps = optim_programs.sharded_steps(mesh, on == SIMULATED)
    return [functools.partial(optim_programs.assert_communicates, *step) for step in steps]


TABLES = {
    "all_to_all by splits of values": Table(_ragged, (1, 2, 3, 4), (1, 2, 3, 4)),
    "collectives": Table(_collectives, tuple(SHAPES[SIMULATED]), tuple(SHAPES[MPI])),
    "arrays that are stored in other ways": Table(_stored),
    "algorithms": Table(_algorithms, range(1, 9), (2, 3, 4)),
    "halos": Table(_halos, (1, 4, 6), (2, 4)),
    "auto axes": Table(_auto_axes, (2, 4), (2, 4, 8)),
    "ranks that choose their own branch": Table(_branches),
    "ranks that take their own numbers of steps": Table(_loops, (), (2, 3, 4)),
    "schedules of checkpoints": Table(_schedules, (1, 2, 4)),
    "shard_maps in shard_maps": Table(
        lambda n, on: typed_and_not(nested_programs.check_nested, nested_programs.NESTED, mesh_of(on, 2, 2), on),
        (4,),
        (4,),
    ),
    "gradients that are sums": Table(_summed, (1, 4), (2,)),
    "what is the same on all ranks": Table(_same_on_all, (1, 4), (2,)),
    "aliasing": Table(_aliasing, (1, 2, 4), (1, 2, 4)),
    "random numbers": Table(_random_numbers, (2, 4)),
    "scipy": Table(_scipy, (2, 3), (2,)),
    "linear systems without matrices": Table(_linear_systems, (2,), (2, 3)),
    "sums of a linear solver": Table(lambda n, on: all_of(solver_programs.check_sums, [line(on, n)]), (4,), (2,)),
    "16 bits": Table(_precision, (2, 3, 4), (2, 3, 4)),
    "optimizers": Table(_optimizers, (4,)),
    "placements": Table(
        lambda n, on: (
            [
                functools.partial(
                    placement_programs.check_placement, line(on, n), placement_programs.random_placement(seed, n)
                )
                for seed in range(4 if on == SIMULATED else 2)
            ]
            + all_of(placement_programs.check_written_placement, [line(on, n)])
        ),
        (1, 2, 3, 8),
    ),
    "f and g by hand": Table(lambda n, on: all_of(transformers.check_pairs, [line(on, n, AXIS)]), (2, 4), (2, 4, 8)),
}
