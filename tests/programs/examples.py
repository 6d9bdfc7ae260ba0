"""Runs of the examples, of smaller networks: killed and taken up again, on simulated ranks and real ones."""

import dataclasses
import importlib
import re
from pathlib import Path
from unittest import mock

from spmd.examples import block, data_parallel, digits, fsdp_tp, fully_sharded, pipeline, tensor_parallel
from tests.checks.saved_trees import assert_like, held

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


def next_batch(run):
    """Return the run's next random number, without advancing its generator."""
    state, batch = run.batches.state(), next(run.batches)
    run.batches.restore(state)
    return [held(x) for x in batch]


def assert_same_run(one, other):
    """Two runs are the same to the last bit, and draw the same batches from here on."""
    assert_like(one.tree_to_save(), other.tree_to_save())
    assert one.losses == other.losses and len(one.losses) > 0
    assert next_batch(one) == next_batch(other)


#: Studies: programs that print the same on simulated ranks and on real ones, which is quoted in `docs/topics.md`.
STUDIES = (
    *("assigned_experts", "beam_search", "cannon", "curriculum", "dlrm", "flash_attention", "fused_convolution"),
    *("loss_spikes", "low_rank_adaptation", "node_limited_experts", "offload", "packed", "parameter_server"),
    *("parameter_servers", "placement", "positions", "pyramid_experts", "recurrence", "rwkv", "saturation"),
    *("scheduled_network", "send_receive", "shadowed_experts", "sparse_attention", "summed_attention", "tensor_2d"),
    *("tensor_3d", "tiled_layer", "two_rings", "weight_versions", "winograd"),
)


def print_study(name, options, capsys):
    """Run a study's program, and return what it prints after the lines about its mesh."""
    capsys.readouterr()
    importlib.import_module(f"spmd.examples.{name}").main(options)
    lines = capsys.readouterr().out.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"Mesh\(|No MPI launcher|\d+ ranks take turns", line))
