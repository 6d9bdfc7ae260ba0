"""Machines as data: what a device computes a second, what it holds, and the links between devices.

A `Machine` has the numbers of a data sheet, each with its source; four are below. A roofline turns the work of an
operation into seconds: the longer of its arithmetic and of its memory traffic, and a cost of launching it. Of the peak,
a matrix product gets the share that an `Efficiency` says, by its size. Links join devices, the fast ones a few, the
slow ones all; `Machine.on(shape, nearest)` places the axes of a mesh on them.

>>> import spmd
>>> machine = spmd.machines.A100
>>> placed = machine.on({'data': 8, 'feats': 8}, nearest=('feats', 'data'))
>>> [(link.name, ranks) for link, ranks in placed.levels(('feats',))], placed.levels(('data',))[0][0].name
([('NVLink', 8)], 'InfiniBand')
>>> placed.seconds('psum', 8, 10**8, ('feats',)) < placed.seconds('psum', 8, 10**8, ('data',))
True
"""

from __future__ import annotations

import math

from spmd.prices.calibrate import this_machine
from spmd.prices.machine import Efficiency, Link, Machine, Placement, link

__all__ = [
    "A100", "H100", "TPU_V5E", "TPU_V5P", "Efficiency", "Link", "Machine", "Placement", "link", "this_machine",
]  # fmt: skip

GB, TERA = 1e9, 1e12

#: What runs in one loop with elementwise operations on accelerators: a row stays in registers while it is reduced.
FUSED = frozenset(
    (
        *("sum", "prod", "max", "min", "mean", "var", "any", "all", "argmax", "argmin", "softmax", "log_softmax"),
        *("logsumexp", "random_bits", "convert", "concatenate", "split", "stack", "unslice", "sequential_map"),
    )
)

A100 = Machine(
    "A100 80 GB SXM",
    flops={"bfloat16": 312 * TERA, "float16": 312 * TERA, "float32": 156 * TERA, "float64": 19.5 * TERA},
    elementwise=19.5 * TERA,
    bandwidth=2039 * GB,
    memory=80 * 2**30,
    launch=4e-6,
    fuses=FUSED,
    links=(
        link("NVLink", 8, 4e-6, 300 * GB, "A100 data sheet: 600 GB/s a device, both ways; 8 devices a node (DGX A100)"),
        link("InfiniBand", math.inf, 8e-6, 25 * GB, "DGX A100 data sheet: 8 × 200 Gb/s a node, one adapter a device"),
    ),
    efficiency=Efficiency(best=0.85, half=300),
    sources={
        "flops": "NVIDIA A100 data sheet (2021): tensor cores, dense; float32 as TF32",
        "elementwise": "the same: float32 outside of tensor cores",
        "bandwidth": "the same: HBM2e of the 80 GB SXM model",
        "memory": "the same",
        "launch": "about 4 µs from one kernel's start to the next's (CUDA programming guide, graphs aside)",
        "efficiency": "large products of cuBLAS reach 85 % of the peak; small ones less",
    },
)

H100 = A100.replace(
    name="H100 80 GB SXM",
    flops={"bfloat16": 989 * TERA, "float16": 989 * TERA, "float32": 495 * TERA, "float64": 67 * TERA},
    elementwise=67 * TERA,
    bandwidth=3350 * GB,
    links=(
        link("NVLink", 8, 4e-6, 450 * GB, "H100 data sheet: 900 GB/s a device, both ways; 8 devices a node (DGX H100)"),
        link("InfiniBand", math.inf, 8e-6, 50 * GB, "DGX H100 data sheet: 8 × 400 Gb/s a node, one adapter a device"),
    ),
    efficiency=Efficiency(best=0.75, half=400),
    sources={
        **A100.sources,
        "flops": "NVIDIA H100 data sheet (2023): tensor cores, dense; float32 as TF32",
        "bandwidth": "the same: HBM3 of the SXM model",
        "launch": "as A100",
        "efficiency": "large products reach 75 % of the peak, where power limits the clock",
    },
)

TPU_V5E = Machine(
    "TPU v5e",
    flops={"bfloat16": 197 * TERA, "int8": 394 * TERA, "float32": 197 / 6 * TERA},
    elementwise=6.1 * TERA,
    bandwidth=819 * GB,
    memory=16 * 2**30,
    launch=1e-6,
    fuses=FUSED,
    links=(
        link("ICI", 256, 1e-6, 90 * GB, "Google Cloud, TPU v5e: pods of 16 × 16; a ring uses two links of 45 GB/s"),
        link("DCN", math.inf, 1e-5, 3.125 * GB, "Austin et al., How to scale your model (2025): 25 Gb/s a chip"),
    ),
    efficiency=Efficiency(best=0.95, half=60),
    sources={
        "flops": "Google Cloud, TPU v5e; float32 by six passes of bfloat16",
        "elementwise": "Austin et al., How to scale your model (2025): vector unit",
        "bandwidth": "Google Cloud, TPU v5e",
        "memory": "Google Cloud, TPU v5e",
        "launch": "one program for a step: a fraction of a microsecond an operation",
        "efficiency": "Austin et al.: products of multiples of 128 reach nearly the peak",
    },
)

TPU_V5P = TPU_V5E.replace(
    name="TPU v5p",
    flops={"bfloat16": 459 * TERA, "int8": 918 * TERA, "float32": 459 / 6 * TERA},
    elementwise=14 * TERA,
    bandwidth=2765 * GB,
    memory=95 * 2**30,
    links=(
        link("ICI", 8960, 1e-6, 180 * GB, "Google Cloud, TPU v5p: pods of 8,960; a ring uses two links of 90 GB/s"),
        link("DCN", math.inf, 1e-5, 6.25 * GB, "Austin et al., How to scale your model (2025): 50 Gb/s a chip"),
    ),
    sources={
        **TPU_V5E.sources,
        "flops": "Google Cloud, TPU v5p; float32 by six passes of bfloat16",
        "bandwidth": "Google Cloud, TPU v5p",
        "memory": "Google Cloud, TPU v5p",
    },
)
