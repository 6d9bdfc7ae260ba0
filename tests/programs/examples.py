"""Runs of the examples, of smaller networks: killed and taken up again, on simulated ranks and real ones."""

import dataclasses
import importlib
import re
from pathlib import Path
from unittest import mock

import numpy as np

import minidiff as md
import spmd
from spmd.examples import block, data_parallel, digits, fsdp_tp, fully_sharded, pipeline, tensor_parallel

EXAMPLES = {
    module.EXAMPLE.name: dataclasses.replace(module.EXAMPLE, layers=layers)
    for module, layers in (
        (block, (64, 16, 10)),
        (data_parallel, (64, 16, 10)),
        (fully_sharded, (64, 16, 16)),
        (tensor_parallel, (64, 16, 16)),
        (fsdp_tp, (64, 16, 16)),
        (pipeline, (64, *[8] * 9, 10)),
    )
}
STEPS = 8  # more than there are batches in an epoch: their order is drawn anew


def run_program_of_the_first_steps():
    """Run the program that the page shows, `train.py`, and return what it defines."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "first_steps.md").read_text()
    (text,) = re.findall(r"`train.py`:\n\n```python\n(.*?)```", page, re.S)
    names = {}
    exec(compile(text, "train.py", "exec"), names)
    return names


class Killed(BaseException):
    """End the process as SIGKILL does: nothing catches it."""


def train(name, ranks, path=None, backend=None, **options):
    """Some steps; with `path`, saved after every second one."""
    example, options = EXAMPLES[name], {"steps": STEPS, "every": 2, **options}
    return digits.train(example, example.mesh(ranks, backend), checkpoint=path and str(path), **options)


def train_until(last, name, ranks, path, backend=None, **options):
    """A run that is killed after so many steps."""
    advance = digits.DigitsRun.advance

    def killing(run, *args):
        if run.step == last:
            raise Killed
        advance(run, *args)

    with mock.patch.object(digits.DigitsRun, "advance", killing):
        try:
            train(name, ranks, path, backend, **options)
        except Killed:
            return
    raise AssertionError(f"it was to be killed after {last} steps")


def held(x):
    """Return this process's part of an array, to the last bit; a Python number or string unchanged."""
    if type(x) in (int, str):
        return x
    x = np.asarray(x.data if isinstance(x, spmd.ShardedArray) else x)
    return x.dtype.str, x.shape, x.tobytes()


def next_batch(run):
    """Return the run's next random number, without advancing its generator."""
    state, batch = run.batches.state(), next(run.batches)
    run.batches.restore(state)
    return [held(x) for x in batch]


def assert_same_run(one, other):
    """Two runs are the same to the last bit, and draw the same batches from here on."""
    (leaves, structure), (others, same) = (md.tree.flatten_with_paths(run.tree_to_save()) for run in (one, other))
    assert structure == same and len(leaves) > 2
    assert [name for (name, x), (_, y) in zip(leaves, others) if held(x) != held(y)] == []
    assert one.losses == other.losses and len(one.losses) > 0
    assert next_batch(one) == next_batch(other)


#: Studies, programs that print the same on simulated ranks and on real ones; and a part of it.
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


def print_study(name, options, capsys):
    """Run a study's program, and return what it prints after the lines about its mesh."""
    capsys.readouterr()
    importlib.import_module(f"spmd.examples.{name}").main(options)
    lines = capsys.readouterr().out.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"Mesh\(|No MPI launcher|\d+ ranks take turns", line))
