"""The studies: what their programs print; and the names that `spmd.parallel` had before they moved."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import spmd
from spmd import examples, parallel
from tests.programs.examples import STUDIES, print_study

#: What a program must print, besides what MPI ranks print alike.
PRINTED = {
    "assigned_experts": "forward: 2 ragged_all_to_all",
    "beam_search": "2 beams:",
    "cannon": "cannon_tn: 4 ppermute\nthe same as NumPy's: yes",
    "curriculum": "{8: 8, 16: 8, 24: 8, 32: 12}; compiled: [8, 16, 24, 32], 4 programs\na curriculum: 36 steps",
    "dlrm": "split by rows: 2 all_gather, 1 psum_scatter, 2 psum",
    "flash_attention": "pairs of tiles: 9 of 16\nforward: 2 all_gather",
    "fused_convolution": "glu, folded, on ranks: the same as the layer: yes",
    "loss_spikes": "26 (z = 4799), 44 (z = 9123); 3 dropped\nas a run without these batches: yes",
    "low_rank_adaptation": "rank 2: 256 of 4096 numbers\ngradient: 1 all_gather, 2 psum\nstates of Adam on a rank: 514",
    "node_limited_experts": "(at most)\ngradient: 8 all_to_all, 2 psum\nthe same gradients: yes",
    "offload": "the same in memory: yes",
    "packed": "packed: 52 tokens, 2,014,464 operations",
    "parameter_server": "bound inf, updates in 12 s: 22; gradients by staleness: {0: 5, 1: 6, 2: 4, 3: 3, 4: 2, 5: 2}",
    "parameter_servers": "2 servers: the busiest sends 432 numbers; the least is 432\n4 steps: 24 broadcast_varying",
    "placement": "rank 1: matmul\nrank 1: tanh\nrank 1: matmul\nrank 0: add\nrank 0: sum\nforward: 1 ppermute",
    "positions": "XLNet          on ranks: the same; moved: the same\nNTK: the slowest angle is divided by 4.0",
    "pyramid_experts": "first layer, 2 experts: 3 all_to_all, 3 psum\nlast layer, 4 experts: 3 all_to_all, 2 psum",
    "recurrence": "in parallel: 6 ppermute",
    "rwkv": "written: abracadabra. abracadabra; in parallel: the same",
    "saturation": "saturated: overflows in 1 steps; the mean of the last 12 losses is 1.8",
    "scheduled_network": "22 ticks: 44 ppermute, 5 psum",
    "send_receive": "1 2 3 4 sent between 0 and 3: 0 0 0 1\n1 2 3 4 exchanged between 0 and 3: 4 0 0 1\n",
    "shadowed_experts": "2 copies: the busiest rank computes 38 rows; 41 rows are sent\ngradient: 8 broadcast_varying",
    "sparse_attention": "16 rounds: 1 pmax, 2 psum\n  the same as one rank: yes; error, and that of a mean: 0.06 0.18",
    "summed_attention": "ten times the tokens: [520, 520]\nheads of size  1: 52% of the weight is misplaced",
    "tensor_2d": "cannon: 14 ppermute, 3 psum",
    "tensor_3d": "gradient: 4 all_gather, 3 psum_scatter, 3 psum",
    "tiled_layer": "8 tiles: 358,152 bytes at the peak; the weights of a tile have 66,560\ngradient: 48 all_gather",
    "two_rings": "two rings: a rank sends 57,600 bytes; the same as psum: yes\n  16 of 18 links, 14,400 bytes",
    "weight_versions": "2BW, simulated: 1.0000",
    "winograd": "4 x 4 results: 36 multiplications instead of 144;",
}


@pytest.mark.parametrize("name", STUDIES)
def test_what_the_program_prints(name, capsys):
    out = print_study(name, ["--ranks", "4"], capsys)
    assert PRINTED[name] in out and "NO" not in out
    lines = [line.rpartition(": ")[2].split() for line in out.splitlines() if "(one rank)" in line]
    assert all(value == whole for value, whole, *_ in lines)


def test_every_study_is_a_row_of_the_page():
    assert sorted(STUDIES) == STUDIES and [*PRINTED] == STUDIES
    modules = {info.name for info in pkgutil.iter_modules(examples.__path__)}
    rows = {line.split(" ")[0] for line in examples.__doc__.splitlines()}
    assert {*STUDIES} <= modules & rows


def test_the_page_of_changes_has_the_names_that_moved_with_their_places():
    text = (Path(__file__).parents[3] / "docs" / "changes" / "0.1.0.md").read_text()
    tables = {"spmd.examples.": r"new place, in `spmd\.examples`", "": "new place"}
    actual = {}
    for prefix, head in tables.items():
        (rows,) = re.findall(
            rf"^  \| old name, in `spmd\.parallel` \| {head} \|\n  \|---\|---\|\n((?:  \|.*\n)+)", text, re.M
        )
        for old, new in re.findall(r"^  \| (.*) \| `([\w.]+)`.*\|$", rows, re.M):
            actual |= {name: f"{prefix}{new}.{name}" for name in re.findall(r"`(\w+)`", old)}
    assert {name: path for name, path in actual.items() if name not in parallel._OPTIONS} == parallel._MOVED
    assert not {*actual} & {*parallel.__all__} and len(parallel.__all__) <= 47


@pytest.mark.parametrize("name", parallel._MOVED)
def test_old_names_work_and_warn(name):
    vars(parallel).pop(name, None)
    module, _, attribute = parallel._MOVED[name].rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"^spmd\.parallel\.{name} is now {module}\.{attribute}$") as caught:
        moved = getattr(parallel, name)
    assert moved is getattr(importlib.import_module(module), attribute)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", parallel._OPTIONS)
def test_names_that_are_options_now_work_and_warn(name):
    vars(parallel).pop(name, None)
    call = parallel._OPTIONS[name]
    module, _, function = call.partition("(")[0].rpartition(".")
    expected = f"spmd.parallel.{name} is now {call}"
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(expected)}$") as caught:
        old = getattr(parallel, name)
    assert old.func is getattr(importlib.import_module(module), function)
    assert {*old.keywords} <= {*inspect.signature(old.func).parameters}
    assert caught[0].filename == __file__


def test_old_names_of_products_work_in_their_module():
    with pytest.warns(DeprecationWarning, match=r"^spmd.parallel.matmul.matmul_all_gather_overlapped is now "):
        from spmd.parallel.matmul import matmul_all_gather_overlapped
    assert matmul_all_gather_overlapped.keywords == {"directions": 1}


def test_old_modules_work_and_warn():
    for name, path in parallel._MODULES.items():
        vars(parallel).pop(name, None)
        with pytest.warns(DeprecationWarning, match=f"^spmd.parallel.{name} is now {path}$"):
            assert getattr(parallel, name) is importlib.import_module(path)
    vars(spmd).pop("list_schedule", None)
    with pytest.warns(DeprecationWarning, match="spmd.list_schedule is now spmd.examples.placement.list_schedule"):
        from spmd import list_schedule
    assert list_schedule.__module__ == "spmd.examples.placement"
