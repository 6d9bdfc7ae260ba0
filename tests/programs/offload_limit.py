"""Train a network that is larger than the memory which its process may have.

    mpirun -n 2 python -m tests.programs.offload_limit --stage 3 --limit 48

Parameters and Adam's states are in files. `--limit` is the MiB that a process may map beyond those that it has at the
start (RLIMIT_AS). With `--stage 0` all stay in memory: with the same limit, this ends with a MemoryError.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

import minidiff as md
import minidiff.numpy as np
import spmd
from spmd.examples.offload import offload
from spmd.mesh.launch import launcher_size

MIB = 1 << 20


def process_bytes(*names: str) -> list[int]:
    """The bytes that this process maps (VmSize), or that are or were resident (VmRSS, VmHWM), as Linux counts them.

    (`ru_maxrss` of `getrusage` is no less than that of the process that started this one.)
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [1024 * int(lines[name].split()[0]) for name in names]


def train(layers: int, features: int, steps: int, stage: int, folder: str, mesh: spmd.Mesh) -> list[float]:
    """The losses of a network of `layers` square matrices."""
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(16, features)), rng.normal(size=(16, features))
    network = [lambda W, x: np.tanh(x @ W)] * layers
    error = lambda x, y: np.mean((x - y) ** 2)  # noqa: E731
    init, step = offload(network, error, md.optim.adam(1e-4), mesh, folder if stage else None, stage or 3)
    params, states = init(rng.normal(size=(features, features)) / np.sqrt(features) for _ in network)
    return [float(step(params, states, batch)) for _ in range(steps)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 24, "features": 512, "steps": 3, "stage": 3, "limit": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    mesh = spmd.make_mesh((launcher_size() or 1,), ("batch",))
    with tempfile.TemporaryDirectory() as folder:
        train(1, 2 * mesh.size, 1, 3, folder, mesh)  # what the process needs for any network
        mapped, resident = process_bytes("VmSize", "VmRSS")
        if options.limit:
            resource.setrlimit(resource.RLIMIT_AS, (mapped + options.limit * MIB, -1))
        losses = train(options.layers, options.features, options.steps, options.stage, folder, mesh)
    most = process_bytes("VmHWM")[0] - resident
    if mesh.rank == 0:
        size = 3 * 8 * options.layers * options.features**2 // mesh.size
        print(f"parameters and states of a rank: {size / MIB:.0f} MiB, resident: at most {most / MIB:.0f} MiB more")
        print("losses", *losses)


if __name__ == "__main__":
    main()
