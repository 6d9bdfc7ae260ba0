"""Machines as data: the speed and the memory of a device, and the links between devices.

Each machine is a file of JSON in this folder, with the numbers of a data sheet and the source of each; `load` reads
one of your own, and `this_machine` measures the machine that this runs on. A roofline turns the work of an operation
into seconds: the longer of its arithmetic and of its memory traffic, and a cost of launching it. Of the peak, a matrix
product gets the share that an `Efficiency` says, by its size. Links join devices, the fast ones a few, the slow ones
all; `Machine.on(shape, nearest)` places the axes of a mesh on them.

>>> import spmd
>>> machine = spmd.machines.A100
>>> placed = machine.on({'data': 8, 'feats': 8}, nearest=('feats', 'data'))
>>> [(link.name, ranks) for link, ranks in placed.levels(('feats',))], placed.levels(('data',))[0][0].name
([('NVLink', 8)], 'InfiniBand')
>>> placed.seconds('psum', 8, 10**8, ('feats',)) < placed.seconds('psum', 8, 10**8, ('data',))
True
"""

from __future__ import annotations

import json
import math
from os import PathLike
from pathlib import Path

from spmd.machines.measured import this_machine
from spmd.prices.machine import Efficiency, Link, Machine, Placement, link

__all__ = [
    "A100", "B200", "H100", "H200", "TPU_V5E", "TPU_V5P", "TPU_V6E",
    "Efficiency", "Link", "Machine", "Placement", "link", "load", "this_machine",
]  # fmt: skip

#: What runs in one loop with elementwise operations on accelerators: a row stays in registers while it is reduced.
FUSED = frozenset(
    (
        *("sum", "prod", "max", "min", "mean", "var", "any", "all", "argmax", "argmin", "softmax", "log_softmax"),
        *("logsumexp", "random_bits", "convert", "concatenate", "split", "stack", "unslice", "sequential_map"),
    )
)


def load(path: str | PathLike) -> Machine:
    """Load a machine from a file of JSON.

    Its fields are those of `Machine`, in SI units: operations, bytes and seconds. A link has a name, the number of
    `ranks` that it joins (null: all), a latency, a bandwidth and its source. `fuses` is a list of names; true stands
    for all that kernels of accelerators run in one loop, null for none.

    Args:
        path: the file, such as one of the folder of `spmd.machines`.

    Raises:
        ValueError: for a field that a machine does not have, and for numbers that make no sense.
        OSError: if the file cannot be read.

    >>> import json, pathlib, tempfile, spmd
    >>> path = pathlib.Path(tempfile.mkdtemp()) / 'mine.json'
    >>> wire = {'name': 'wire', 'ranks': None, 'latency': 1e-5, 'bandwidth': 1e9, 'source': 'measured'}
    >>> fields = {'flops': {'float32': 1e12}, 'elementwise': 1e11, 'bandwidth': 1e11, 'memory': 8e9, 'launch': 1e-6}
    >>> _ = path.write_text(json.dumps({'name': 'mine', **fields, 'links': [wire]}))
    >>> spmd.machines.load(path).links[0].name
    'wire'
    """
    fields = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        links = [
            link(**{**each, "ranks": math.inf if each["ranks"] is None else each["ranks"]}) for each in fields["links"]
        ]
        fuses = fields.get("fuses", True)
        fields |= {"links": tuple(links), "fuses": FUSED if fuses is True else fuses and frozenset(fuses)}
        fields |= {"efficiency": Efficiency(**fields.get("efficiency", {}))}
        return Machine(**fields | {"caches": tuple(map(tuple, fields.get("caches", ())))})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}; the fields are those of spmd.machines.Machine") from None


A100, B200, H100, H200, TPU_V5E, TPU_V5P, TPU_V6E = (
    load(Path(__file__).with_name(f"{name}.json"))
    for name in ("a100", "b200", "h100", "h200", "tpu_v5e", "tpu_v5p", "tpu_v6e")
)
