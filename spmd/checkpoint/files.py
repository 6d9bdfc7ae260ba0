"""The files of a checkpoint.

    PATH/step-00000100/rank-00000.npz   blocks of arrays, written by rank 0
                       rank-00001.npz   those that rank 1 has, and no rank before it
                       index.json       written last: the tree's leaves, and where their blocks are
         .checkpoints.lock              held by the `Checkpoints` that save here, until they are closed

A step is complete when its `index.json` is there. Files appear atomically: they are written under another name, flushed
to the disk, and renamed.

Blocks are in NumPy's format, one `.npz` file for each process, without compression. So `numpy.load` and `unzip` read
them without this module; the index has each block's offset, so a slice is read from a memory map. (A `.npy` file for
each block takes forty times as long for many small arrays, since each file is flushed. safetensors has no complex
numbers and no checksums. zarr is a dependency, and cannot make a set of files appear at once.) The index also has the
CRC-32 of each block, taken from its zip entry, and a checksum of itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import operator
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidiff.errors import did_you_mean
from minidiff.values.dtypes import dtype_of

FORMAT = "spmd.checkpoint"
VERSION = 1
INDEX = "index.json"
BLOCKS = re.compile(r"rank-[0-9]{5,}\.npz")
STEP = re.compile("step-([0-9]{8,200})")
#: Errors that the content of a damaged or forged file can cause.
DAMAGE = (LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError, OSError)
#: The names of all files of a step, also while they are written.
OWN = re.compile(rf"\.?(index\.json|rank-[0-9]{{5,}}\.json|{BLOCKS.pattern})")


class CheckpointError(Exception):
    """A checkpoint cannot be used or written; the message says what to do.

    >>> import spmd
    >>> spmd.checkpoint.load("nowhere")
    Traceback (most recent call last):
    spmd.checkpoint.files.CheckpointError: nowhere has no complete step: there is nothing to load
    """


class SavedBlock(NamedTuple):
    """A block of an array, and its place: the entry of an `.npz` file from byte `offset`."""

    start: Sequence[int]  # in the array
    shape: Sequence[int]
    file: str
    offset: int
    nbytes: int  # of the entry, which has a header before the block
    crc32: int

    def __str__(self) -> str:
        return show_slices(self.start, self.shape)


class Array(NamedTuple):
    """An array in the index."""

    dtype: str
    shape: Sequence[int]
    spec: str
    mesh: dict[str, int]
    blocks: Sequence[SavedBlock]

    def __str__(self) -> str:
        return f"{dtype_of(self.dtype)}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Scalar(NamedTuple):
    """A Python number or string in the index."""

    type: str
    value: Any

    def __str__(self) -> str:
        return f"a Python {self.type}"

    def read(self) -> Any:
        return complex(*self.value) if self.type == "complex" else self.value


#: The types of leaves that are not arrays. JSON has no complex numbers: they are pairs there.
SCALARS = {bool, int, float, str, complex}


def shorten(name: str) -> str:
    """Shorten a leaf's path for a message or a zip entry: to its beginning, and a digest that tells it apart.

    >>> shorten("['w']"), len(shorten("w" * 70000))
    ("['w']", 200)
    """
    return name if len(name) <= 200 else f"{name[:183]}…{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def show_slices(start: Sequence[int], shape: Sequence[int]) -> str:
    """Show a block's slices of an array.

    >>> show_slices((0, 4), (2, 4))
    '[0:2, 4:8]'
    """
    return f"[{', '.join(f'{i}:{i + n}' for i, n in zip(start, shape))}]"


# ---------------------------------------------------------------- writing


def replace(file: Path, write: Callable) -> None:
    """Write a file atomically. If that fails, as on a full disk, no file is left."""
    hidden = file.with_name(f".{file.name}")
    try:
        with hidden.open("wb") as opened:
            write(opened)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(hidden, file)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    flush_folder(file.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder's list of files to the disk, where the system can."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_json(file: Path, content: Any) -> None:
    replace(file, lambda opened: opened.write(json.dumps(content, indent=1).encode() + b"\n"))


def write_blocks(file: Path, blocks: Iterable[tuple[str, Sequence[int], np.ndarray]]) -> list[tuple[str, SavedBlock]]:
    """Write blocks (path of the array, start, contiguous block) to an `.npz` file; return their paths and places.

    Without blocks, no file is written.
    """
    written, blocks = [], list(blocks)

    def write(opened: Any) -> None:
        with zipfile.ZipFile(opened, "w") as archive:
            for path, start, x in blocks:
                entry = zipfile.ZipInfo(f"{shorten(path)}{show_slices(start, x.shape) if x.shape else ''}.npy")
                with archive.open(entry, "w", force_zip64=True) as inside:
                    offset = opened.tell()
                    np.lib.format.write_array(inside, x, allow_pickle=False)
                written.append((path, SavedBlock(start, x.shape, file.name, offset, entry.file_size, entry.CRC)))

    if blocks:
        replace(file, write)
    return written


def write_index(folder: Path, content: dict[str, Any]) -> None:
    content = {"format": FORMAT, "version": VERSION, **content}
    write_json(folder / INDEX, {**content, "checksum": _checksum(content)})


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------- reading


def folder_of(path: Path, step: int) -> Path:
    return path / f"step-{step:08}"


def saved_steps(path: Path, complete: bool = True) -> list[int]:
    """Return the saved steps, in order; with `complete=False`, also those that a killed run has left unfinished."""
    numbers = [int(named[1]) for f in path.glob("step-*") if (named := STEP.fullmatch(f.name))]
    folders = {n: folder for n in numbers if (folder := folder_of(path, n)).exists()}
    return sorted(n for n, folder in folders.items() if not complete or (folder / INDEX).exists())


def remove_step(folder: Path) -> None:
    """Remove the files of a step. Other files stay, and the folder with them; symbolic links are not followed."""
    if folder.is_symlink() or not _is_own(folder / INDEX):
        return
    (folder / INDEX).unlink(missing_ok=True)  # first: then a half-deleted step is incomplete
    for file in list(folder.iterdir()):
        if OWN.fullmatch(file.name) and not file.is_dir():
            file.unlink()
    with contextlib.suppress(OSError):  # a file of others is in it
        folder.rmdir()


def _is_own(index: Path) -> bool:
    """Return whether this library has written an index, or there is none."""
    if index.is_symlink() or not index.is_file():
        return not os.path.lexists(index)
    with index.open("rb") as opened:
        return f'"format": "{FORMAT}"'.encode() in opened.read(100)


def latest(path: str | os.PathLike) -> int | None:
    """Return the last complete step in a directory; None if there is none.

    >>> latest('nowhere')
    """
    return next(reversed(saved_steps(Path(path))), None)


def _leaf_of(entry: dict[str, Any], files: dict[str, int]) -> Array | Scalar:
    """Return a leaf of the index. Raises an error of `DAMAGE` for an entry that `write_index` cannot have written."""
    if "blocks" not in entry:
        leaf = Scalar(**entry)
        if type(leaf.read()) is not {t.__name__: t for t in SCALARS}[leaf.type]:
            raise TypeError(f"{leaf.value!r:.80} is not a value of type {leaf.type}")
        return leaf
    blocks = [SavedBlock(**block) for block in entry["blocks"]]
    blocks = [block._replace(start=_integers(block.start), shape=_integers(block.shape)) for block in blocks]
    if missing := [block.file for block in blocks if block.file not in files]:
        raise LookupError(f"{missing[0]!r:.80} is not a file of the step")
    dtype, shape, spec, mesh = (entry[name] for name in ("dtype", "shape", "spec", "mesh"))
    np.empty((0, *_integers(shape)), dtype_of(str(dtype))).view(np.uint8)  # raises if no array in a file has this type
    return Array(str(dtype), _integers(shape), str(spec), {**mesh}, blocks)


def _integers(numbers: Sequence[Any]) -> list[int]:
    return [operator.index(n) for n in numbers]


def _overlap(blocks: Sequence[SavedBlock]) -> bool:
    """Return whether some blocks of an array overlap."""
    if len(blocks) < 2:
        return False
    start, shape = np.array([block.start for block in blocks]), np.array([block.shape for block in blocks])
    common = np.all(start[:, None] < start + shape, axis=-1)
    return bool(np.count_nonzero(common & common.T) > len(blocks))


class Saved:
    """A saved step: its index, and slices of its arrays.

    Raises CheckpointError if something is missing or damaged, naming the file, the array, and the expected content.
    With `verify`, a block is read whole, and its checksum compared, when a slice of it is read.
    """

    def __init__(self, path: Path, step: int, verify: bool = True):
        self.path, self.step, self.verify = path, step, verify
        self.folder = folder_of(path, step)
        self.file = self.folder / INDEX
        with self._checked(self.file, "it is not the index of a step"):
            index = self._index()
            self.backend, self.notes = index["backend"], {**index["notes"]}
            self.sizes = {file: size for file, size in index["files"].items() if BLOCKS.fullmatch(file)}
            self.leaves = {name: _leaf_of(entry, self.sizes) for name, entry in index["leaves"].items()}
        self._maps: dict[str, np.ndarray] = {}
        self._intact: set[tuple] = set()

    def _index(self) -> dict[str, Any]:
        if not self.file.is_file():
            there = ", ".join(map(str, saved_steps(self.path))) or "none"
            raise CheckpointError(f"{self.path} has no complete step {self.step}; complete steps: {there}")
        with self._checked(self.file, "it is not JSON"):
            index = json.loads(self.file.read_bytes())
        if not isinstance(index, dict):
            raise self.damage(self.file, f"it has {index!r:.40}, expected a JSON object")
        if "version" in index and index["version"] != VERSION:
            raise CheckpointError(
                f"{self.file} has version {index['version']!r:.40} of the format, expected {VERSION}: load it with the "
                "version of spmd that saved it"
            )
        expected = index.pop("checksum", None)
        if expected != _checksum(index):
            raise self.damage(self.file, f"its checksum is {_checksum(index)}, expected {expected!r:.80}")
        return index

    @contextlib.contextmanager
    def _checked(self, file: Path, problem: str) -> Iterator[None]:
        """Raise CheckpointError for an error that a damaged file causes in a `with` statement."""
        try:
            yield
        except DAMAGE as error:
            raise self.damage(file, f"{problem} ({type(error).__name__}: {error!s:.200})") from error

    def damage(self, file: Path, problem: str) -> CheckpointError:
        """Return the error that a file is damaged, with the way out."""
        if not self.file.exists():
            return CheckpointError(f"{self.folder} was removed while it was read: load the last step again")
        earlier = [step for step in saved_steps(self.path) if step < self.step]
        before = f"continue from step {earlier[-1]}" if earlier else "start from the beginning"
        return CheckpointError(f"{file} is damaged: {problem}. Remove {self.folder} to {before}")

    def leaf(self, name: str) -> Array | Scalar:
        if name not in self.leaves:
            raise CheckpointError(
                f"{self.file} has no array {shorten(name)}; it has {', '.join(map(shorten, self.leaves)):.500}"
                f"{did_you_mean(shorten(name), map(shorten, self.leaves))}"
            )
        return self.leaves[name]

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """Return a slice of an array, from the blocks that overlap it."""
        array = self.leaf(name)
        assert isinstance(array, Array)
        with self._checked(self.file, f"it cannot describe array {shorten(name)}"):
            return self._assemble(name, array, start, shape)

    def _assemble(self, name: str, array: Array, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        overlaps = []  # the blocks that overlap the slice, with where the overlap begins and ends
        for block in array.blocks:
            low = np.maximum(start, block.start).astype(int)
            high = np.minimum(np.add(start, shape), np.add(block.start, block.shape)).astype(int)
            if (low < high).all():
                overlaps.append((block, low, high))
        size, filled = math.prod(shape), sum(math.prod((high - low).tolist()) for _, low, high in overlaps)
        if filled != size or _overlap([block for block, *_ in overlaps]):
            problem = (
                f"blocks of array {shorten(name)} cover {filled} of the {size} numbers of {show_slices(start, shape)}"
            )
            raise self.damage(self.file, problem)
        out = np.empty(shape, dtype_of(array.dtype))
        for block, low, high in overlaps:
            source, target = (tuple(map(slice, low - origin, high - origin)) for origin in (block.start, start))
            out[target] = self.block(name, block)[source]
        return out

    def block(self, name: str, block: SavedBlock) -> np.ndarray:
        """Return a block of an array, memory-mapped."""
        description, leaf = f"block {block} of array {shorten(name)}", self.leaf(name)
        assert isinstance(leaf, Array)
        file = self.folder / block.file
        with self._checked(file, f"{description} cannot be read"):
            if block.file not in self._maps:
                size, expected = file.stat().st_size, self.sizes[block.file]
                if size != expected:
                    raise self.damage(file, f"it has {size} bytes, expected {expected}; {description} is in it")
                self._maps[block.file] = np.memmap(file, np.uint8, "r")  # raises ValueError if it is empty
            entry: Any = self._maps[block.file][block.offset : block.offset + block.nbytes]
            if self.verify and (block.file, block.offset) not in self._intact:
                if (crc32 := zlib.crc32(entry)) != block.crc32:
                    raise self.damage(file, f"{description} has the CRC-32 {crc32:08x}, expected {block.crc32:08x}")
                self._intact.add((block.file, block.offset))
            dtype = dtype_of(leaf.dtype)
            return entry[block.nbytes - math.prod(block.shape) * dtype.itemsize :].view(dtype).reshape(block.shape)
