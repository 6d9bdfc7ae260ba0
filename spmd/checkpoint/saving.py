"""Save trees of arrays in the background. A run that is killed loses no step that was complete.

Each rank's thread writes the rank's blocks, and then a file such as `rank-00001.json` that says where they are. When
all of these files are there, the thread of rank 0 writes the index, which completes the step. So ranks need only the
file system while training continues. They communicate in the next call, where an error of one is raised on all.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from collectives.guards.mismatch import describe_ranks
from minidiff import tree
from minidiff.errors.location import current_location
from minidiff.values.dtypes import is_bfloat16
from spmd.arrays.blocks import Start, blocks_to_save
from spmd.checkpoint.files import (
    INDEX,
    SCALARS,
    Array,
    CheckpointError,
    Scalar,
    flush_folder,
    folder_of,
    latest,
    remove_step,
    saved_steps,
    shorten,
    write_blocks,
    write_index,
    write_json,
)
from spmd.checkpoint.loading import SAME_CALLS, call_on_all_ranks, check_leaf, latest_on, load_on, mesh_of
from spmd.checks.agreement import gather_texts, make_and_compare
from spmd.mesh.mesh import Mesh, make_mesh
from spmd.mesh.processes import process_count
from spmd.mesh.supervised import note, note_step
from spmd.sharding.sharded_array import ShardedArray

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

LOCK = ".checkpoints.lock"
BLOCKS_TIMEOUT = 600.0  # seconds that rank 0 waits for the blocks of others, after it has written its own


class Checkpoints:
    """The saved steps of a run, in a directory on a file system that all ranks of `mesh` share.

    Opening it checks that steps can be saved there, and locks the directory: no other `Checkpoints` can save there, in
    this process or another, until it is closed or the process ends. `keep` is the number of steps to keep, by default
    all. Only saved steps are removed, never files of other programs, nor the target of a symbolic link. Use it in a
    `with` statement, or `close` it.

    All ranks of the mesh must call all methods, with the same step and trees of the same types: otherwise all raise
    ValueError. If one rank fails, all raise the same CheckpointError.

    >>> import tempfile, numpy, spmd
    >>> mesh, path = spmd.make_mesh((2,), ("i",), backend="simulated"), tempfile.mkdtemp()
    >>> with Checkpoints(path, mesh, keep=2) as saved:
    ...     for step in (10, 20, 30):
    ...         saved.save(step, {"w": numpy.zeros(3)})
    >>> sorted(folder.name for folder in Path(path).glob("step-*"))
    ['step-00000020', 'step-00000030']
    """

    def __init__(self, path: str | os.PathLike, mesh: Mesh, *, keep: int | None = None):
        self.path, self.mesh, self.keep = Path(path), mesh, keep
        self._lock: BinaryIO | None = None
        self._pending: tuple[Future, Future, Path] | None = None  # this rank's blocks are written; the step is complete
        self._timeout = BLOCKS_TIMEOUT

        def checked() -> tuple[None, list[str]]:
            if not str(path).strip():
                raise CheckpointError("the directory to save to is '': name one")
            if keep is not None and keep < 1:
                raise ValueError(f"Checkpoints: keep must be a number of steps, at least 1, or None; got {keep!r}")
            return None, [f"keep={keep}"]

        self._compare_calls("Checkpoints", checked)
        try:
            self._open()
        except BaseException:
            self._unlock()
            raise
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # Python waits for its tasks before it exits

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            self.close()
        else:  # perhaps on this rank alone: the others may never come
            self._timeout = 1.0
            self._release()

    def save(self, step: int, tree: Any, notes: dict[str, Any] | None = None) -> None:
        """Save a tree, and notes, as a step that is greater than all before it.

        Leaves of the tree are sharded arrays, of which each rank saves its blocks; and arrays, numbers and strings that
        are the same on all ranks. The state of a random generator is `rng.bit_generator.state`. Notes must be JSON; the
        first rank's are saved, and `load({})` loads them without any array. Raises TypeError for masked arrays and
        matrices, and for arrays of objects or with fields.

        It returns when the arrays are copied, so the caller may write into them. A thread writes the copies to disk.
        The next call of a method waits for it, and raises its error.
        """

        def described_step() -> tuple[tuple, list[str]]:
            if not isinstance(step, (int, np.integer)) or step < 0:
                raise ValueError(f"checkpoint.save: step must be an integer of at least 0; got {step!r}")
            leaves, blocks = _describe_leaves(tree, self.mesh)
            index = {"step": int(step), "backend": self.mesh.backend, "notes": _copy_notes(notes or {})}
            index["leaves"] = {name: leaf._asdict() for name, leaf in leaves.items()}
            return (index, blocks), [f"step {step}", *map(_line, leaves, leaves.values())]

        index, blocks = self._finish_pending("save", described_step)
        folder = folder_of(self.path, index["step"])

        def copied() -> list:
            self._prepare(index["step"], folder)
            return [(name, start, np.array(x, order="C")) for name, start, x in blocks]

        copies = self._on_all_ranks(copied)
        self._timeout = BLOCKS_TIMEOUT
        written = self._thread.submit(self._write, folder, copies)
        self._pending = written, self._thread.submit(self._complete, written, folder, index), folder

    def steps(self, stop: int) -> Iterator[int]:
        """Yield the numbers of the steps to make: from the one after the last saved, until `stop`.

        If one of them fails, `python -m spmd run --restarts` says which.

        >>> import tempfile, spmd
        >>> mesh = spmd.make_mesh((2,), ("i",), backend="simulated")
        >>> with Checkpoints(tempfile.mkdtemp(), mesh) as saved:
        ...     saved.save(7, {})
        ...     list(saved.steps(10))
        [8, 9, 10]
        """
        for step in range((self.latest() or 0) + 1, stop + 1):
            note_step(step)
            yield step

    def wait(self) -> None:
        """Wait until the last step saved is complete."""
        self._finish_pending("wait")

    def latest(self) -> int | None:
        """Return the last complete step; None if there is none."""
        self._finish_pending("latest")
        return latest_on(self.path, self.mesh)

    def load(self, like: Any = None, step: int | None = None, *, verify: bool = True) -> tuple[Any, dict[str, Any]]:
        """Load from this directory: see `spmd.checkpoint.load`."""
        self._finish_pending("load")
        return load_on(self.path, self.mesh, like, step, verify)

    def close(self) -> None:
        """Wait until the last step saved is complete, and unlock the directory."""
        try:
            self._finish_pending("close")
        finally:
            self._release()

    # ------------------------------------------------ all ranks

    def _compare_calls(self, call: str, make: Callable[[], Any]) -> Any:
        """Return the first result of `make()`, after comparing the second, which describes the call, between ranks.

        Raises ValueError on all ranks if they make different calls.
        """

        def described() -> tuple[Any, list[str]]:
            result, lines = make()
            return result, [call, *lines]

        return make_and_compare(SAME_CALLS, self.mesh, described)

    def _on_all_ranks(self, act: Callable[[], Any]) -> Any:
        return call_on_all_ranks(self.mesh, self.path, "written", act)

    def _finish_pending(self, call: str, make: Callable[[], Any] = lambda: (None, [])) -> Any:
        """Compare calls, then wait until the last step saved is complete; if that fails, remove its files."""
        result = self._compare_calls(call, make)
        if self._pending is None:
            return result
        (written, complete, folder), self._pending = self._pending, None
        try:
            self._on_all_ranks(written.result)
            self._on_all_ranks(complete.result)
        except CheckpointError:
            self._timeout = 0.0  # rank 0 no longer waits for blocks that do not come
            complete.exception()
            if self.mesh.rank == 0 and not (folder / INDEX).exists():
                with contextlib.suppress(OSError):
                    remove_step(folder)
            raise
        except BaseException:
            self._timeout = 1.0
            raise
        return result

    # ------------------------------------------------ the directory

    def _open(self) -> None:
        """Lock the directory, after a check that it is the same one on all ranks, and that all can write to it."""
        with contextlib.ExitStack() as stack:

            def write() -> str:
                self.path.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".shared-", dir=self.path))
                return os.path.basename(file.name)

            first = gather_texts(self.mesh, self._on_all_ranks(write))[0]
            seen = gather_texts(self.mesh, str((self.path / first).exists()))
        if elsewhere := [rank for rank, exists in enumerate(seen) if exists != "True"]:
            raise CheckpointError(
                f"{self.path} on {describe_ranks(elsewhere)} is not the directory of rank 0: save to a file system "
                "that all ranks share, with the same path on each"
            )
        self._on_all_ranks(self._take_lock)
        note("checkpoints", str(self.path.resolve()))

    def _take_lock(self) -> None:
        """Lock the file LOCK on rank 0, and write into it which process holds it.

        The system unlocks it when the process ends. `flock` locks the open file, not the process, so it excludes other
        `Checkpoints` of this process too.
        """
        if self.mesh.rank or fcntl is None:
            return
        place = self.path / LOCK
        self._lock = file = os.fdopen(os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
        me = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(500).decode(errors="replace").strip() or "an unknown process"
            process, _, line = holder.partition(", ")
            raise CheckpointError(
                f"{self.path}: this process is saving there already, with Checkpoints that are not closed "
                f"({line or holder}). Close them first, with saved.close(), or open them in a `with` statement, which "
                "closes them, so that a notebook's cell can run twice"
                if process == me
                else f"{self.path}: another run is saving there ({holder}). Wait until it has ended, or save to "
                "another directory"
            ) from None
        except OSError:  # this file system has no locks
            return
        content = file.read(500)
        if content and not content.startswith(b"process "):
            raise CheckpointError(f"{place} is not a lock, but a file of another program: move it")
        file.seek(0)
        file.truncate()
        file.write(f"{me}, {current_location() or ''}\n".encode())
        file.flush()

    def _unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):  # forked processes have the open file, too
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    def _release(self) -> None:
        """Finish this rank's writing, and unlock the directory."""
        self._thread.shutdown()
        self._unlock()

    def _prepare(self, step: int, folder: Path) -> None:
        """Make room for a step, on rank 0: remove the files that a killed run has left."""
        if self.mesh.rank:
            return
        last = latest(self.path)
        if last is not None and step <= last:
            raise CheckpointError(
                f"{self.path} has step {last} already, so step {step} cannot be saved: steps increase, and none is "
                "overwritten. Continue from the last step, or save to another directory"
            )
        if folder.is_symlink():
            raise CheckpointError(f"{folder} is a symbolic link, and is not followed: move it")
        if os.path.lexists(folder):
            remove_step(folder)

    # ------------------------------------------------ in the background

    def _write(self, folder: Path, blocks: Sequence[tuple[str, Start, np.ndarray]]) -> None:
        """Write this rank's blocks, and then where they are."""
        folder.mkdir(exist_ok=True)
        flush_folder(self.path)
        name = f"rank-{self.mesh.ranks.rank:05}"
        written = write_blocks(folder / f"{name}.npz", blocks)
        size = {f"{name}.npz": (folder / f"{name}.npz").stat().st_size} if written else {}
        write_json(folder / f"{name}.json", {"files": size, "blocks": [(path, b._asdict()) for path, b in written]})

    def _complete(self, written: Future, folder: Path, index: dict[str, Any]) -> None:
        """Complete a step, on rank 0, when all ranks have written their blocks."""
        written.result()  # raises if this rank could not
        if self.mesh.ranks.rank:
            return
        count = 1 if self.mesh.backend == "simulated" else self.mesh.size
        parts = [folder / f"rank-{rank:05}.json" for rank in range(count)]
        files: dict[str, Any] = {}
        began = time.monotonic()
        for part in parts:
            while not part.exists():
                if time.monotonic() > began + self._timeout:
                    raise CheckpointError(f"{part} is missing: that rank has not written its blocks")
                time.sleep(0.01)
            content = json.loads(part.read_bytes())
            files |= content["files"]
            for name, block in content["blocks"]:
                index["leaves"][name]["blocks"].append(block)
        write_index(folder, {**index, "files": files})
        for part in parts:
            part.unlink()
        if self.keep is not None:
            for step in sorted({*saved_steps(self.path, complete=False)} - {*saved_steps(self.path)[-self.keep :]}):
                remove_step(folder_of(self.path, step))


def save(path: str | os.PathLike, step: int, tree: Any, notes: dict[str, Any] | None = None) -> None:
    """Save a tree, and notes, as a step, and wait until it is complete. All ranks must call it.

    To save more than once, use `Checkpoints`, which saves in the background.

    Args:
        path: the directory to save in, the same for all steps.
        step: the number of the step, greater than all before it.
        tree: a tree of sharded arrays, arrays, numbers and strings.
        notes: a dict of JSON values.

    >>> import tempfile
    >>> import numpy as np
    >>> path = tempfile.mkdtemp()
    >>> save(path, 1, {'w': np.arange(3.0), 'name': 'linear'}, notes={'loss': 0.5})
    >>> latest(path)
    1
    """
    mesh = mesh_of(tree)
    if mesh is None:
        mesh = make_mesh((process_count(),), ("process",), backend=None if process_count() > 1 else "simulated")
    with Checkpoints(path, mesh) as saved:
        saved.save(step, tree, notes)


# ---------------------------------------------------------------- trees


def _describe_leaves(x: Any, mesh: Mesh) -> tuple[dict[str, Array | Scalar], list[tuple[str, Start, np.ndarray]]]:
    """Return the leaves of a tree as in the index, without blocks, and the blocks that this rank writes, not copied.

    The first rank of the mesh writes values that are the same on all.
    """
    leaves: dict[str, Array | Scalar] = {}
    blocks: list[tuple[str, Start, np.ndarray]] = []
    for name, leaf in tree.flatten_with_paths(x)[0]:
        check_leaf("save", name, leaf)
        if name in leaves:
            raise ValueError(f"checkpoint.save: the tree has two leaves at {name}: give its keys different names")
        if type(leaf) in SCALARS:
            value = [leaf.real, leaf.imag] if isinstance(leaf, complex) else leaf
            leaves[name] = Scalar(type(leaf).__name__, value)
        elif isinstance(leaf, ShardedArray):
            alone = all(m.backend == "simulated" or m.size == 1 for m in (mesh, leaf.mesh))
            if not (alone or mesh.ranks.same_ranks(leaf.mesh.ranks)):
                raise ValueError(
                    f"checkpoint.save: {name} is split over {leaf.mesh}, whose ranks are not those of {mesh}"
                )
            leaves[name] = Array(_name(leaf.dtype), leaf.shape, repr(leaf.spec), leaf.mesh.shape, [])
            blocks += [(name, start, block) for start, block in blocks_to_save(leaf)]
        else:
            whole = np.asarray(leaf)
            leaves[name] = Array(_name(whole.dtype), whole.shape, "P()", {}, [])
            blocks += [(name, (0,) * whole.ndim, whole)] * (mesh.rank == 0)
    return leaves, blocks


def _line(name: str, leaf: Array | Scalar) -> str:
    """Return a line that describes a leaf, for ranks to compare."""
    details = shorten(repr(leaf.value)) if isinstance(leaf, Scalar) else f"split as {leaf.spec} over {leaf.mesh}"
    return f"{shorten(name)}: {leaf}, {details}"


def _name(dtype: np.dtype) -> str:
    """Return the name of a dtype in the index; that of bfloat16 is not NumPy's."""
    return dtype.name if is_bfloat16(dtype) else dtype.str


def _copy_notes(notes: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(notes, dict):
        raise TypeError(f"checkpoint.save: notes must be a dict of JSON values, got {notes!r:.60}")
    try:
        return json.loads(json.dumps(notes))
    except (TypeError, ValueError) as error:
        raise TypeError(f"checkpoint.save: notes are not JSON ({error}); arrays belong in the tree") from error
