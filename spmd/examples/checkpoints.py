"""Checkpoints of a run on many ranks, which can be killed and resumed.

    PATH/step-00000100/whole.npz        written by rank 0: arrays that are the same on all ranks
                       rank-00003.npz   written by rank 3: its blocks of sharded arrays
                       complete.json    written by rank 0, after all others: how the run was started
         lock                           held by rank 0 of the run that saves here, until its process ends

Each rank writes its own blocks: only the completion is communicated, and no rank needs memory for whole arrays. Files
appear atomically (written under another name, then renamed), and a step is valid once its `complete.json` exists: so
all ranks load the same step. It has the checksums of the other files, so that one that is damaged, or of another run,
is noticed. The last two steps are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import spmd
from minidiff.types import ShapedArray
from spmd.agreement import everyone
from spmd.arrays.sharded_array import ShardedArray
from spmd.partition import block_type

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

KEPT = 2  # steps

WHOLE, COMPLETE, LOCK = "whole.npz", "complete.json", "lock"
NOTES, CHECKSUMS = "notes", "checksums"  # names of further entries in WHOLE, and in COMPLETE

#: Exceptions that NumPy raises for a file that was damaged after it was written.
DAMAGE = (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


class CheckpointError(Exception):
    """A checkpoint cannot be used or written; the message says what to do."""


class Checkpoints:
    """The saved steps of a run, in the directory `path`.

    All ranks share its file system. `options` are the run's options that its numbers depend on; with the mesh they
    identify the run. All methods must be called on all ranks of the mesh; if one rank fails, all raise the same
    CheckpointError.
    """

    def __init__(self, path: str | os.PathLike, mesh: spmd.Mesh, options: dict[str, Any]):
        if not str(path).strip():
            raise CheckpointError("the directory to save in is '': name one (--checkpoint run), or leave it out")
        self.path = Path(path)
        self.mesh = mesh
        self.made_by = {"mesh": mesh.shape, "backend": mesh.backend, **options}
        self._lock: BinaryIO | None = None

    # ------------------------------------------------ saving

    def prepare(self) -> None:
        """Check that steps can be saved, and lock the directory.

        So an error comes before there is a result that could be lost. No other run can save there until `close` is
        called, or the process has ended in any way.
        """
        self._on_all_ranks(self._try)

    def close(self) -> None:
        """Unlock the directory, so that other runs can save there."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _try(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.path):
            pass
        if self.mesh.rank == 0 and fcntl is not None:
            self._take_lock()

    def _take_lock(self) -> None:
        """Lock the file LOCK, which names its holder.

        The system unlocks it when the process ends.
        """
        self._lock = file = (self.path / LOCK).open("a+b")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            who = file.read(200).decode(errors="replace").strip() or "an unknown process"
            self.close()
            raise CheckpointError(
                f"{self.path}: another run is saving there ({who}). Wait until it has ended, or save to another "
                "place (--checkpoint)"
            ) from None
        except OSError:  # this file system has no locks
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        file.flush()

    def save(self, step: int, arrays: dict[str, Any], notes: dict[str, Any]) -> None:
        """Save a step: arrays and notes.

        Each rank saves its blocks of sharded arrays. Notes must be JSON.
        """
        checksums = self._on_all_ranks(lambda: self._write(step, arrays, notes))
        said = everyone(self.mesh, json.dumps(checksums))
        self._on_all_ranks(lambda: self._complete(step, {k: v for text in said for k, v in json.loads(text).items()}))

    def _write(self, step: int, arrays: dict[str, Any], notes: dict[str, Any]) -> dict[str, str]:
        """Write this rank's files, and return their checksums, by name."""
        folder, checksums = self._folder(step), {}

        def write(name: str, arrays: dict[str, Any]) -> None:
            checksums[name] = _checksum(arrays)
            _replace(folder / name, lambda file: np.savez(file, **arrays))

        folder.mkdir(parents=True, exist_ok=True)
        mine = {name: x.data for name, x in arrays.items() if isinstance(x, ShardedArray)}
        if mine:
            write(self._own, mine)
        if self.mesh.rank == 0:
            alike = {name: x for name, x in arrays.items() if name not in mine}
            write(WHOLE, {NOTES: json.dumps(notes), **alike})
        return checksums

    def _complete(self, step: int, checksums: dict[str, str]) -> None:
        if self.mesh.rank:
            return
        text = json.dumps({**self.made_by, "step": step, CHECKSUMS: checksums}, indent=1).encode() + b"\n"
        _replace(self._folder(step) / COMPLETE, lambda file: file.write(text))
        for old in self._steps(complete=False):
            if old not in self._steps()[-KEPT:]:
                (self._folder(old) / COMPLETE).unlink(missing_ok=True)  # first: then a half-deleted step is invalid
                shutil.rmtree(self._folder(old))

    # ------------------------------------------------ loading

    def load(self, like: dict[str, Any], notes: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The arrays and notes of the last saved step; None if there is none.

        `like` are arrays of the same types and specs, `notes` the names of the notes that are required.
        """
        steps = everyone(self.mesh, str(self._steps()[-1:]))
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"{self.path}: ranks see different steps there, {', '.join(sorted(set(steps)))}: --checkpoint is a "
                "directory on a file system that all ranks share"
            )
        return self._on_all_ranks(lambda: self._read(self._steps()[-1], like, notes)) if self._steps() else None

    def _read(self, step: int, like: dict[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        file, found = self._folder(step) / COMPLETE, {}
        try:
            complete = _json_object(file.read_bytes())
            checksums = complete.pop(CHECKSUMS, None)
            self._check(file, complete, step)
            for name in (WHOLE, *[self._own] * any(isinstance(x, ShardedArray) for x in like.values())):
                file = file.with_name(name)
                with np.load(file, allow_pickle=False) as archive:
                    arrays = {entry: archive[entry] for entry in archive.files}
                if not isinstance(checksums, dict) or checksums.get(name) != _checksum(arrays):
                    raise ValueError(f"{name} is not the file that {COMPLETE} has the checksum of")
                found |= arrays
            notes = _json_object(found[NOTES])
            if missing := [*set(names).difference(notes)]:
                raise KeyError(*missing)
            return {name: _placed(found[name], x) for name, x in like.items()}, notes
        except DAMAGE as error:
            raise CheckpointError(self._damaged(file, error)) from error

    def _damaged(self, file: Path, error: Exception) -> str:
        others = [step for step in self._steps() if self._folder(step) != file.parent]
        folder = self._folder(self._steps()[-1])
        before = f"go on from step {others[-1]}" if others else "start from the beginning"
        return f"{file} is damaged ({type(error).__name__}: {error}): remove {folder} to {before}"

    def _check(self, file: Path, made_by: dict[str, Any], step: int) -> None:
        """Raise CheckpointError if a step belongs to another run, or is another step."""
        expected = {**self.made_by, "step": step}
        names = [name for name in expected | made_by if expected.get(name) != made_by.get(name)]
        if names:
            was, now = (", ".join(f"{name} = {x.get(name)}" for name in names) for x in (made_by, expected))
            raise CheckpointError(
                f"{file} was made by a run with {was}; this one has {now}. Use the same options and as many ranks, or "
                "another --checkpoint"
            )

    # ------------------------------------------------ files and ranks

    @property
    def _own(self) -> str:
        return f"rank-{self.mesh.rank:05}.npz"

    def _folder(self, step: int) -> Path:
        return self.path / f"step-{step:08}"

    def _steps(self, complete: bool = True) -> list[int]:
        """The saved steps, in order."""
        found = [f for f in self.path.glob("step-*") if f.name[5:].isdigit()]
        return sorted(int(f.name[5:]) for f in found if not complete or (f / COMPLETE).exists())

    def _on_all_ranks(self, act: Callable) -> Any:
        """Call `act` on all ranks, and wait for all of them.

        If it fails on one, its error is raised on all.
        """
        result, failure = None, ""
        try:
            result = act()
        except CheckpointError as error:
            failure = str(error)
        except OSError as error:  # from writing; those from reading are damage
            failure = f"{self.path}: it cannot be written: {error}"
        failures = list(filter(None, everyone(self.mesh, failure)))
        if failures:
            raise CheckpointError(failures[0])
        return result


def _json_object(text: Any) -> dict[str, Any]:
    found = json.loads(text if isinstance(text, bytes) else str(text))
    if not isinstance(found, dict):
        raise ValueError(f"it says {found!r:.40}, which is not a JSON object")
    return found


def _checksum(arrays: dict[str, Any]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        x = np.asarray(arrays[name])
        found.update(f"{name} {x.dtype.str} {x.shape} ".encode() + x.tobytes())
    return found.hexdigest()


def _replace(file: Path, write: Callable) -> None:
    """Write a file atomically: under another name, then renamed."""
    hidden = file.with_name(f".{file.name}")
    with hidden.open("wb") as opened:
        write(opened)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(hidden, file)


def _placed(data: np.ndarray, like: Any) -> Any:
    """The saved data as an array with the sharding of `like`.

    Raises ValueError for other shapes or dtypes.
    """
    expected = np.asarray(like.data if isinstance(like, ShardedArray) else like)
    if (data.shape, data.dtype) != (expected.shape, expected.dtype):
        raise ValueError(f"{data.dtype} of shape {data.shape}, not {expected.dtype} of shape {expected.shape}")
    if not isinstance(like, ShardedArray):
        return data
    block = block_type(ShapedArray(like.shape, like.dtype), like.spec, like.mesh.shape)
    return ShardedArray(like.mesh, like.spec, block, data)
