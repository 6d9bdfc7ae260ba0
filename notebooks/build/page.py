"""What the pages of "Build it yourself" share. It has no solutions: read it if you like."""

import queue
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `exercises` and `engines`

#: The files that the pages write, in order, and the page of each.
FILES = {
    "tracer": 1,
    "operations": 1,
    "tape": 2,
    "forward": 3,
    "reverse": 4,
    "ranks": 5,
    "variance": 6,
    "shard_map": 7,
    "ring": 8,
    "mpi": 8,
    "network": 8,
}
_EMPTY = re.compile(
    r"^ *# HOLE (\d+\.\d+) [^\n]*\n(?: *#(?! END)[^\n]*\n)*(?: *raise NotImplementedError[^\n]*\n)? *# END", re.M
)
MINE = Path("mine")
_page = 0  # the one that has been started last


def check(*answers: Any) -> Callable[[Callable], None]:
    """The `check` of all notebooks; below its verdict are the holes of this page that are empty still."""
    from exercises import check

    def run(test: Callable) -> None:
        check(*answers)(test)
        files = [path for name, page in FILES.items() if page == _page and (path := MINE / f"{name}.py").exists()]
        if holes := [hole for path in files for hole in unfilled(path.read_text())]:
            print("Empty still, on this page: " + ", ".join(f"hole {hole}" for hole in holes))

    return run


def unfilled(source: str) -> list[str]:
    """The numbers of the holes in which nothing has been written yet.

    >>> unfilled("x = [\\n    # HOLE 3.5 [1 point]\\n    # Some numbers.\\n    # END\\n]")
    ['3.5']
    >>> unfilled("x = [\\n    # HOLE 3.5 [1 point]\\n    # Some numbers.\\n    1, 2,\\n    # END\\n]")
    []
    """
    return _EMPTY.findall(source)


def start(page: int) -> None:
    """Begin a page: say what of earlier ones is missing, and read their files anew."""
    global _page
    _page = page
    MINE.mkdir(exist_ok=True)
    fresh()
    for name, written in FILES.items():
        path = MINE / f"{name}.py"
        if written < page and not path.exists():
            print(f"{path} is missing: page {written} writes it. Run the cells of that page first.")
        elif written < page and (holes := unfilled(path.read_text())):
            print(f"{path}: not filled yet, and this page may need it: {', '.join(f'hole {h}' for h in holes)}.")


def fresh() -> None:
    """Forget the modules of `mine`, so that the next import reads them as the cells have written them."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def ring_of(size: int, collective: Callable, blocks: Sequence[np.ndarray]) -> tuple[list[Any], list[int]]:
    """Run collective(block, shift, rank, size) on a ring of threads: each one's result, and the bytes that it sent."""
    links: list[queue.Queue] = [queue.Queue() for _ in range(size)]
    results: list[Any] = [None] * size
    sent = [0] * size

    def rank_runs(rank: int) -> None:
        def shift(x: np.ndarray) -> np.ndarray:
            sent[rank] += np.asarray(x).nbytes
            links[(rank + 1) % size].put(np.copy(x))
            try:
                return links[rank].get(timeout=2)
            except queue.Empty:
                before = (rank - 1) % size
                raise AssertionError(f"rank {rank} waits for a message that rank {before} does not send") from None

        try:
            results[rank] = collective(blocks[rank], shift, rank, size)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results, sent
