"""Train networks larger than memory: optimizer states and parameters in files (ZeRO-Offload, ZeRO-Infinity).

    mpirun -n 4 python -m spmd.examples.offload

The program trains with files and in memory, and prints the losses, whether they are the same, and the bytes in files.

A step goes through the layers forward, keeping the input of each, and then backward. There a layer computes its
derivatives from its input again, and is updated at once. So a rank works on the parameters and states of one layer.
The others are in files: meanwhile a thread reads what the next layer needs from a memory map, and writes behind what
the last one has made.

With P parameters, K numbers of state for each (2 for Adam), and p ranks, a rank holds, in numbers:

=====  ==============  ===========
stage  always          in files
=====  ==============  ===========
2      P               K*P/p
3      0               (K + 1)*P/p
=====  ==============  ===========

To these come the inputs of the layers, and what two or three layers need at work. As in `zero.py`, ranks split the
batch and the states, at stage 3 the parameters too; gradients are summed and split layer by layer.

Sources: Ren et al., "ZeRO-Offload: Democratizing billion-scale model training"; Rajbhandari et al., "ZeRO-Infinity:
Breaking the GPU memory wall for extreme scale deep learning".
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy

import minidiff as md
import minidiff.numpy as np
import spmd
from collectives import psum, reduced
from collectives.passes.fuse_psums import bucket_size
from minidiff.optim import GradientTransformation, apply_updates
from spmd.checks.agreement import make_and_compare
from spmd.examples.study import numbers, run_study
from spmd.mesh.specs import P
from spmd.parallel.network import axes_of
from spmd.parallel.zero import all_gather_buckets, psum_buckets, psum_scatter_buckets, shards_of, specs_of
from spmd.sharding.sharded_array import ShardedArray

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]


class StoredTree:
    """A tree of arrays in a file, or in memory if `file` is None. If it cannot be written, `read` raises OSError.

    It shares no memory with the trees that are written and read. The `folder` of its file is locked while it exists.
    """

    def __init__(self, file: Path | None, tree: Any, thread: ThreadPoolExecutor, folder: _Folder | None = None):
        self._file, self._thread, self._folder = file, thread, folder
        self.write(tree, file is None).result()

    def write(self, tree: Any, copy: bool = True) -> Future:
        """Begin to write a tree over the old one, and do not wait; without `copy`, it must not change any more."""
        leaves, self._structure = md.tree.flatten(tree)
        self._types = [md.typeof(x) for x in leaves]
        data = [x.data if isinstance(x, ShardedArray) else numpy.asarray(x) for x in leaves]
        data = [x.copy() for x in data] if copy else data
        self._reading: Future | None = None
        self.writing = self._thread.submit(self._put, data)
        return self.writing

    def prefetch(self) -> Future:
        """Begin to read."""
        self._reading = self._reading or self._thread.submit(self._get)
        return self._reading

    def read(self, copy: bool = True) -> Any:
        """Wait until the tree is in memory, and return it; without `copy`, it must not be changed."""
        self.writing.result()
        data = self.prefetch().result()
        self._reading = None
        data = [x.copy() for x in data] if copy and self._file is None else data
        leaves = [ShardedArray(t, x) if t.sharding else x for t, x in zip(self._types, data)]
        return md.tree.unflatten(self._structure, leaves)

    def _put(self, data: list[numpy.ndarray]) -> None:
        self._blocks = [(x.nbytes, x.dtype, x.shape) for x in data]
        if self._file is None:
            self._memory = data
            return
        with self._file.open("wb") as file:  # on a full disk, writing to a memory map would kill the process
            for x in data:
                x.tofile(file)
            file.write(b"\n")  # an empty file has no memory map

    def _get(self) -> list[numpy.ndarray]:
        if self._file is None:
            return self._memory
        mapped, ends = numpy.memmap(self._file, numpy.uint8, "r"), accumulate(n for n, _, _ in self._blocks)
        return [
            numpy.array(mapped[end - n : end]).view(dtype).reshape(shape)
            for end, (n, dtype, shape) in zip(ends, self._blocks)
        ]


class _Folder:
    """A rank's folder for the files of one network, which is locked while this object exists.

    A network of this or another process that uses the same `folder` gets another one: `rank-0`, `rank-0-2`, …
    """

    def __init__(self, folder: Path, rank: int):
        for number in itertools.count(1):
            self.path = folder / f"rank-{rank}{f'-{number}' * (number > 1)}"
            self.path.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                return
            lock = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:  # this file system has no locks
                return
            return


def offload(
    layers: Sequence[Callable],
    loss: Callable,
    optimizer: GradientTransformation,
    mesh: spmd.Mesh,
    folder: str | os.PathLike | None,
    stage: int = 3,
) -> tuple[Callable, Callable]:
    """Make `init(params) -> (params, states)` and `step(params, states, (inputs, targets)) -> loss`.

    `layers[k](params[k], x)` returns the next x; `loss(x, targets)` is a mean over examples, of one rank's block. The
    batch is split along the mesh's axis. `init` takes a tree of arrays for each layer, one after the other, as from a
    generator. It returns lists of stored trees, which a step changes; their `read()` returns the trees. Stage 2 stores
    states in files of `folder`, stage 3 parameters too; with None all stay in memory. Several networks may have one
    folder: each has files of its own. The optimizer sees one layer at a time: `clip_by_global_norm` takes a layer's
    norm. Raises ValueError for another stage, for more or fewer trees than layers, and on all ranks if one cannot make
    its folder or write its files.

    >>> mesh, folder = spmd.make_mesh((2,), ('batch',), backend='simulated'), tempfile.TemporaryDirectory()
    >>> layers, mean = [lambda W, x: np.tanh(x @ W)] * 3, lambda x, y: np.mean((x - y) ** 2)
    >>> init, step = offload(layers, mean, md.optim.adam(0.1), mesh, folder.name)
    >>> params, states = init(np.eye(4) for _ in layers)
    >>> [round(float(step(params, states, (np.ones((8, 4)), np.zeros((8, 4))))), 3) for _ in range(3)]
    [0.321, 0.034, 0.0]
    >>> params[0].read().spec, states[0].read()[0].mu.spec
    (P('batch'), P('batch'))
    """
    (axis,) = axes_of(mesh, "offload", "batch")
    if stage not in (2, 3):
        raise ValueError(f"offload: stage={stage!r}; write 2 to store states in files, 3 parameters too")
    network = _Network([*layers], loss, mesh, axis, stage)
    thread = ThreadPoolExecutor(1, "offload")
    place = (lambda shards: shards) if stage == 3 else spmd.gather
    on_all_ranks = lambda act: make_and_compare("offload", mesh, lambda: (act(), ["no error"]))  # noqa: E731

    def init(params: Iterable) -> tuple[list[StoredTree], list[StoredTree]]:
        files = on_all_ranks(lambda: None if folder is None else _Folder(Path(folder), mesh.rank))
        stored: tuple[list[StoredTree], list[StoredTree]] = [], []
        for k, tree in _trees_of_layers(params, len(layers)):
            shards = shards_of(tree, mesh)
            file = files.path / f"params-{k}" if files and stage == 3 else None
            stored[0].append(StoredTree(file, place(shards), thread, files))
            file = files and files.path / f"states-{k}"
            stored[1].append(StoredTree(file, optimizer.init(shards), thread, files))
        return stored

    def step(params: list[StoredTree], states: list[StoredTree], batch: tuple) -> Any:
        xs = network.forward(params, states, batch[0])
        value, *ct = network.loss_and_cotangent(xs.pop(), batch[1])
        for k in reversed(range(len(layers))):
            tree, state = params[k].read(False), states[k].read(False)
            for stored in (params[k - 1], states[k - 1]) if k else ():
                stored.prefetch()
            gradients, ct = network.apply(k, tree, xs.pop(), *ct)
            shards = tree if stage == 3 else shards_of(tree, mesh)
            updates, state = optimizer.update(gradients, state, shards)
            params[k].write(place(apply_updates(shards, updates)), False)
            states[k].write(state, False)
        on_all_ranks(lambda: [stored.writing.result() for stored in (*params, *states)])
        return value

    return init, step


def _trees_of_layers(params: Iterable, layers: int) -> Iterator[tuple[int, Any]]:
    """Yield the number and the tree of each layer. Raises ValueError at the end if there are more or fewer trees."""
    trees, count = iter(params), 0
    for count, tree in enumerate(itertools.islice(trees, layers), 1):
        yield count - 1, tree
    more = [*itertools.islice(trees, 1)]
    if count < layers or more:
        got = "more" if more else count
        raise ValueError(f"offload: {layers} layers need {layers} trees of parameters, got {got}")


@dataclass(frozen=True)
class _Network:
    """Layers and a loss, run on ranks one layer at a time."""

    layers: list[Callable]
    loss: Callable
    mesh: spmd.Mesh
    axis: str
    stage: int

    def forward(self, params: list[StoredTree], states: list[StoredTree], x: Any) -> list:
        """Return the input of each layer and the last result; begin to read the trees of the next layer meanwhile."""
        xs = [x]
        for k in range(len(self.layers)):
            tree = params[k].read(False)
            for stored in params[k + 1 : k + 2] or (params[k], states[k]):
                stored.prefetch()
            xs.append(self.apply(k, tree, xs[-1]))
        return xs

    def apply(self, k: int, tree: Any, *args: Any) -> Any:
        """Return a layer's result for an x; or for an x and the result's cotangent, the gradients, and what x needs."""
        axis, stage = self.axis, self.stage
        leaves, structure = md.tree.flatten(tree)
        dims, specs = specs_of(leaves, self.mesh)
        pieces, limit = dims if stage == 3 else [None] * len(dims), bucket_size(sum(x.nbytes for x in leaves))

        def gathering(leaves, x):
            leaves = all_gather_buckets(leaves, pieces, axis, limit, to="reduced")
            return self.layers[k](md.tree.unflatten(structure, leaves), x)

        def body(leaves, x, *ct):
            leaves = [p if d is not None else reduced(p, axis) for p, d in zip(leaves, pieces)]
            if not ct:
                return gathering(leaves, x)
            operands = (leaves, x) if k else (leaves,)  # nothing needs the cotangent of the inputs, such as tokens
            gradients, *ct = md.vjp(lambda leaves, x=x: gathering(leaves, x), *operands)[1](*ct)
            if stage == 2:
                gradients = psum_scatter_buckets(gradients, dims, axis, limit)
            return md.tree.unflatten(structure, psum_buckets(gradients, axis, limit)), ct

        in_specs = (specs if stage == 3 else P(), *[P(axis)] * len(args))
        out_specs = P(axis) if len(args) == 1 else (md.tree.unflatten(structure, specs), P(axis))
        return spmd.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)(leaves, *args)

    @functools.cached_property
    def loss_and_cotangent(self) -> Callable:
        """The function of the last layer's result and targets that returns the loss, and the result's cotangent."""

        def body(x, targets):
            value, ct = md.value_and_grad(lambda x: self.loss(x, targets) / self.mesh.size)(x)
            return psum(value, self.axis), ct

        return spmd.shard_map(body, mesh=self.mesh, in_specs=P(self.axis), out_specs=(P(), P(self.axis)))


# ---------------------------------------------------------------- the program


def show(mesh: spmd.Mesh) -> None:
    """Train a network with files in a temporary folder, and in memory, and print the losses of both."""
    rng, n = numpy.random.default_rng(0), 4 * mesh.size
    weights, layers = rng.normal(size=(6, n, n)) / 4, [lambda W, x: np.tanh(x @ W)] * 6
    batch = numpy.ones((2 * mesh.size, n)), numpy.zeros((2 * mesh.size, n))

    def train(folder: str | None, stage: int) -> list[float]:
        init, step = offload(layers, lambda x, y: np.mean((x - y) ** 2), md.optim.adam(0.01), mesh, folder, stage)
        params, states = init(iter(weights))
        return [float(step(params, states, batch)) for _ in range(3)]

    for stage in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            losses = train(folder, stage)
            files = [*Path(folder).glob("*/*")]
        same = losses == train(None, stage)
        print(f"stage {stage}, losses: {numbers(losses)}; the same in memory: {'yes' if same else 'NO'}")
        print(f"files of a rank: {', '.join(sorted({file.name.split('-')[0] for file in files}))}")


def main(argv: Sequence[str] | None = None) -> None:
    run_study(show, ("batch",), argv)


if __name__ == "__main__":
    main()
